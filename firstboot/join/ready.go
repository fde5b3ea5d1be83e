package join

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// HubNode contains the checks that ReadyPhase adds for an OpenYurt node. Each func may be nil.
type HubNode struct {
	// Missing returns the reason why the Node may be missing in the cluster, or nil if it is
	// unknown.
	Missing func(context.Context, *machine.Env) error
	// Ready runs once the Node is Ready.
	Ready func(context.Context, *machine.Env) error
}

// ReadyPhase waits until the cluster reports the Node as Ready, with the Site's labels.
func ReadyPhase(active *site.Active, hub HubNode) run.Phase {
	r := &readiness{active: active, hub: hub}
	return run.Phase{
		Name: "node-ready", Doc: "the cluster sees the node Ready, with the Site's labels", Timeout: 3 * time.Minute,
		Check: r.check, Run: r.await,
	}
}

// readiness watches this machine's Node.
type readiness struct {
	active *site.Active
	hub    HubNode
	// joined is the record of the join; recorded reports whether it exists.
	joined   member.JoinedAs
	recorded bool
	// Results of the last call of look:
	node        *kubeapi.Node // last version seen
	otherLabels bool          // its labels differ from the Site's
	// reporters lists the machines that the Node has shown so far.
	reporters reporters
}

// look reads the Node. It returns an error unless the Node is Ready with the Site's labels,
// and judge finds no second machine that reports as this Node.
func (r *readiness) look(ctx context.Context, e *machine.Env) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, n, err := member.OwnNode(ctx, e, r.active.Node)
	if errors.Is(err, member.ErrNoNode) && r.hub.Missing != nil {
		if missing := r.hub.Missing(ctx, e); missing != nil {
			return missing
		}
	}
	if err != nil {
		return err
	}
	r.node = n
	r.reporters.saw(n, e.Now())
	if err := r.labels(e); err != nil {
		return err
	}
	if r.recorded {
		member.RemarkTaints(e, r.joined, r.active.Site, n)
	}
	if ready, why := n.Ready(); !ready {
		return run.Advise(fmt.Errorf("the Node %s is not Ready: %s", n.Metadata.Name, why), "see `journalctl -u kubelet -u containerd` on the machine, and check that the cluster's network add-on runs")
	}
	if err := member.Reported(ctx, e, n); err != nil {
		return err
	}
	return r.reporters.judge(e, n, e.Exists(member.ReadyMark))
}

// labels compares the Node's labels with the Site's.
func (r *readiness) labels(e *machine.Env) error {
	n := r.node
	missing, left := missingLabels(r.active.Site, n), member.LeftLabels(r.joined, r.active.Site, n)
	r.otherLabels = len(missing)+len(left) > 0
	switch {
	case len(missing) > 0:
		// kubelet sets labels only when it creates a Node.
		return run.Advise(fmt.Errorf("the Node %s lacks labels of the Site: %s", n.Metadata.Name, labelList(missing)),
			fmt.Sprintf("the Node existed before the join and kept its labels: kubectl delete node %s, then restart the machine", n.Metadata.Name))
	case len(left) > 0:
		return run.Advise(fmt.Errorf("the Node %s has labels that the Site no longer has: %s", n.Metadata.Name, labelList(left)),
			fmt.Sprintf("remove them: kubectl label node %s %s-", n.Metadata.Name, strings.Join(slices.Sorted(maps.Keys(left)), "- ")))
	}
	return nil
}

func (r *readiness) check(ctx context.Context, e *machine.Env) (run.Verdict, error) {
	if !e.Exists(member.ReadyMark) {
		return run.Todo, nil // await has not succeeded before
	}
	r.joined, r.recorded = member.ReadJoinedAs(e)
	if err := r.look(ctx, e); err != nil {
		if kubeapi.Code(err) == 0 && run.Advice(err) == "" {
			return run.Unknown, nil // no answer: a node that was Ready before continues
		}
		return run.Todo, nil
	}
	record, err := member.ClusterToSave(ctx, e, r.active.Site, r.node)
	switch {
	case errors.Is(err, member.ErrOtherCluster) && r.active.Site.IPVS.Disabled:
		// Without ipvscare, kubelet already uses these API servers.
		e.Log.Warn("the API servers belong to another cluster than the recorded one", "recorded", *member.ReadJoinedCluster(e))
	case errors.Is(err, member.ErrOtherCluster):
		e.Note("%s", member.RecreatedNote(e))
		return run.Unknown, nil
	case err == nil && record != nil:
		return run.Todo, nil
	}
	return run.Done, nil
}

// await waits until the node is Ready, sets its labels as far as the cluster permits it, and
// records the node's state.
func (r *readiness) await(ctx context.Context, e *machine.Env) error {
	var refused, final error
	labelled, missing := false, member.Absence{}
	r.joined, r.recorded = member.ReadJoinedAs(e)
	err := e.Retry(ctx, machine.Wait{Every: 2 * time.Second, Gently: true}, func() error {
		bad := r.look(ctx, e)
		if errors.Is(bad, member.ErrNoNode) {
			bad = errors.Join(bad, missing.End(ctx, e, r.active.Site))
		} else {
			missing = member.Absence{}
		}
		if r.otherLabels && !labelled {
			labelled, refused = labelOwn(ctx, e, r.active, r.joined)
			bad = r.look(ctx, e)
		}
		if _, ok := run.Fix(bad); ok {
			final = bad
			return nil
		}
		if bad != nil && !errors.Is(bad, errWatched) {
			if refused != nil {
				bad = fmt.Errorf("%w; the node could not change its labels: %w", bad, refused)
			}
			e.Waiting("the Node to be Ready: %s", machine.OneLine(bad))
		}
		return bad
	})
	if err := cmp.Or(final, err); err != nil {
		return err
	}
	if r.hub.Ready != nil {
		if err := r.hub.Ready(ctx, e); err != nil {
			return err
		}
	}
	if err := member.SaveLabels(e, r.active.Site); err != nil {
		return err
	}
	other := saveCluster(ctx, e, r.active, r.node)
	if other != nil && !errors.Is(other, member.ErrOtherCluster) {
		return other
	}
	if err := member.SaveRecord(e); err != nil {
		return err
	}
	if _, err := e.Write(member.ReadyMark, nil, machine.Mode(0o600)); err != nil || other != nil {
		return err // the next check reports that the cluster is another one
	}
	return run.ErrConfirmed
}

// labelOwn sets the Site's missing labels on the Node, as far as a node may, and removes those that
// the Site no longer has. It returns whether it tried, and the errors of rejected labels.
func labelOwn(ctx context.Context, e *machine.Env, active *site.Active, j member.JoinedAs) (tried bool, refused error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, n, err := member.OwnNode(ctx, e, active.Node)
	if err != nil {
		return false, nil
	}
	// Set OpenYurt's two labels together: the cluster would act on one label alone.
	pair, rest := map[string]string{}, map[string]string{}
	for k, v := range missingLabels(active.Site, n) {
		if openyurt.IsLabel(k) {
			pair[k] = v
		} else {
			rest[k] = v
		}
	}
	for _, labels := range []map[string]string{pair, rest} {
		if len(labels) == 0 {
			continue
		}
		if err := member.PatchLabels(ctx, e, n.Metadata.Name, member.AnyOf(labels)); err != nil {
			refused = errors.Join(refused, err)
			continue
		}
		e.Console(fmt.Sprintf("set labels of the Site that the Node %s lacked: %s", n.Metadata.Name, labelList(labels)))
	}
	if left := member.LeftLabels(j, active.Site, n); len(left) > 0 {
		refused = errors.Join(refused, unlabelOwn(ctx, e, n.Metadata.Name, left))
	}
	return true, refused
}

// unlabelOwn removes the Node's labels that were removed from the Site.
func unlabelOwn(ctx context.Context, e *machine.Env, name string, labels map[string]string) error {
	gone := map[string]any{}
	for k := range labels {
		gone[k] = nil
	}
	flags := e.Contents(member.KubeadmFlags)
	if _, err := e.Write(member.KubeadmFlags, kubeadm.DropLabels(flags, labels), machine.Mode(0o644)); err != nil {
		return fmt.Errorf("removing labels from kubelet's flag --node-labels: %w", err)
	}
	if err := member.PatchLabels(ctx, e, name, gone); err != nil {
		return err
	}
	e.Console(fmt.Sprintf("removed labels from the Node %s that the Site no longer has: %s", name, labelList(labels)))
	return nil
}

// missingLabels returns the labels of the Site that the Node does not have.
func missingLabels(site *configs.Site, n *kubeapi.Node) map[string]string {
	out := siteconf.KubeletLabels(site)
	maps.DeleteFunc(out, func(k, v string) bool {
		have, ok := n.Metadata.Labels[k]
		return ok && have == v
	})
	return out
}

func labelList(labels map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, ", ")
}

// saveCluster records the identity of the cluster in which n is this machine's Node. ipvscare uses
// the record too.
func saveCluster(ctx context.Context, e *machine.Env, active *site.Active, n *kubeapi.Node) error {
	record, err := member.ClusterToSave(ctx, e, active.Site, n)
	if record == nil || err != nil {
		return err
	}
	if old := member.ReadJoinedCluster(e); old != nil {
		e.Log.Info("the objects that identify the cluster were recreated one at a time: recording their new UIDs", "was", *old, "is", *record)
	}
	doc, err := json.Marshal(record)
	if err == nil {
		_, err = e.Write(member.JoinedCluster, append(doc, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording the UIDs that identify the cluster: %w", err)
	}
	if active.Site.IPVS.Disabled {
		return nil
	}
	_, err = writeIPVSConfig(e, active.Site)
	return err
}
