package firstboot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/overlays/node"
)

// kubeletKeys are the key pairs that kubelet made while joining.
func kubeletKeys(e *Env) []string {
	entries, err := os.ReadDir(e.path(kubeletPKI))
	if err != nil {
		return nil
	}
	var out []string
	for _, en := range entries {
		if strings.HasPrefix(en.Name(), "kubelet-client") || strings.HasPrefix(en.Name(), "kubelet.") {
			out = append(out, filepath.Join(kubeletPKI, en.Name()))
		}
	}
	return out
}

// nodeClient reads with the node's own certificate, through the endpoint and
// past yurthub.
func nodeClient(e *Env) (*api.Client, error) {
	k, err := credentials(e)
	if err != nil {
		return nil, err
	}
	return e.clientOf(k)
}

// ownNode is this machine's Node as the cluster has it, and the client that
// asked for it.
func ownNode(ctx context.Context, e *Env, name string) (*api.Client, *api.Node, error) {
	c, err := nodeClient(e)
	if err != nil {
		return nil, nil, err
	}
	n, err := c.GetNode(ctx, name)
	if api.Code(err) == 404 {
		err = Advise(fmt.Errorf("%w %s yet", errNoNode, name), "see `journalctl -u kubelet` on the machine")
	}
	return c, n, err
}

var errNoNode = errors.New("the cluster has no Node")

// readyPhase sees the node as the cluster sees it.
func readyPhase(active *Active) Phase {
	r := &readiness{active: active}
	return Phase{
		Name: readyStep, Doc: "the cluster sees the node Ready, with the Site's labels", Timeout: 3 * time.Minute,
		Check: r.check, Run: r.await,
	}
}

// readiness looks at this machine's Node.
type readiness struct {
	active *Active
	// joined is what was noted when the machine joined, if noted.
	joined joinedAs
	noted  bool
	// Of the last look:
	node        *api.Node // as it was seen
	otherLabels bool      // than the Site's
	// reporters are the machines that it has shown at all looks.
	reporters reporters
}

// look returns nil when all is well, else what is missing.
func (r *readiness) look(ctx context.Context, e *Env) error {
	site := r.active.Site
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, n, err := ownNode(ctx, e, r.active.Node)
	if errors.Is(err, errNoNode) && site.OpenYurt() {
		if h, herr := hubOf(e, r.active); herr == nil {
			if perr := poolFits(ctx, e, h); perr != nil {
				return perr
			}
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
	if r.noted {
		remarkTaints(e, r.joined, site, n)
	}
	if ready, why := n.Ready(); !ready {
		return Advise(fmt.Errorf("the Node %s is not Ready: %s", n.Metadata.Name, why), "see `journalctl -u kubelet -u containerd` on the machine, and whether the cluster's network add-on runs")
	}
	if err := reported(ctx, e, n); err != nil {
		return err
	}
	return r.reporters.judge(e, n, e.exists(readyMark))
}

// labels compares the Node's labels with the Site's.
func (r *readiness) labels(e *Env) error {
	site, n := r.active.Site, r.node
	missing, left := missingLabels(site, n), leftLabels(r.joined, site, n)
	r.otherLabels = len(missing)+len(left) > 0
	switch {
	case len(missing) > 0:
		// Kubelet labels only the Node that it makes itself.
		return Advise(fmt.Errorf("the Node %s lacks labels of the Site: %s", n.Metadata.Name, labelWords(missing)),
			fmt.Sprintf("the Node was there before and kept its labels: kubectl delete node %s, then restart the machine", n.Metadata.Name))
	case len(left) > 0:
		return Advise(fmt.Errorf("the Node %s has labels that the Site has no more: %s", n.Metadata.Name, labelWords(left)),
			fmt.Sprintf("take them away: kubectl label node %s %s-", n.Metadata.Name, strings.Join(slices.Sorted(maps.Keys(left)), "- ")))
	}
	return nil
}

func (r *readiness) check(ctx context.Context, e *Env) (Verdict, error) {
	if !e.exists(readyMark) {
		return Todo, nil // whatever the cluster says
	}
	r.joined, r.noted = readJoinedAs(e)
	if err := r.look(ctx, e); err != nil {
		if api.Code(err) == 0 && Advice(err) == "" {
			return Unknown, nil // nobody answers: a node that was Ready continues
		}
		return Todo, nil
	}
	note, err := clusterToNote(ctx, e, r.active, r.node)
	switch {
	case errors.Is(err, errOther) && r.active.Site.IPVS.Disabled:
		// Nothing is between kubelet and the API servers, which it follows already.
		e.Log.Warn("the API servers are of another cluster than the one noted", "noted", *readJoinedCluster(e))
	case errors.Is(err, errOther):
		e.Note("%s", bornAgainNote(e))
		return Unknown, nil
	case err == nil && note != nil:
		return Todo, nil
	}
	return Done, nil
}

// await waits for the node to be Ready, labels it where the cluster lets it, and
// saves what holds of a node that was Ready.
func (r *readiness) await(ctx context.Context, e *Env) error {
	var refused, final error
	labelled, missing := false, absence{}
	r.joined, r.noted = readJoinedAs(e)
	err := e.retry(ctx, 2*time.Second, func() error {
		bad := r.look(ctx, e)
		if errors.Is(bad, errNoNode) {
			bad = errors.Join(bad, missing.end(ctx, e, r.active.Site))
		} else {
			missing = absence{}
		}
		if r.otherLabels && !labelled {
			labelled, refused = labelOwn(ctx, e, r.active, r.joined)
			bad = r.look(ctx, e)
		}
		if _, ok := Fix(bad); ok {
			final = bad
			return nil
		}
		if bad != nil && !errors.Is(bad, errWatched) {
			if refused != nil {
				bad = fmt.Errorf("%w; the node may not set them: %w", bad, refused)
			}
			e.Waiting("the Node to be Ready: %s", oneLine(bad))
		}
		return bad
	})
	if err := cmp.Or(final, err); err != nil {
		return err
	}
	if r.active.Site.OpenYurt() && hubForm(r.active.Image) == openyurt.FormStaticPod {
		if err := annotateSocket(ctx, e, r.active); err != nil {
			return err
		}
	}
	if err := saveLabels(e, r.active.Site); err != nil {
		return err
	}
	if err := saveCluster(ctx, e, r.active); err != nil {
		return err
	}
	if err := recordMember(e); err != nil {
		return err
	}
	_, err = e.write(readyMark, nil, Mode(0o600))
	return err
}

// labelOwn gives the Node the labels of the site that it lacks, as far as the
// cluster lets a node do that, and reports whether it has tried: a Node that was
// there before, of a machine of the same name, keeps what it had.
func labelOwn(ctx context.Context, e *Env, active *Active, j joinedAs) (tried bool, refused error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, n, err := ownNode(ctx, e, active.Node)
	if err != nil {
		return false, nil
	}
	// OpenYurt's two go together: the cluster acts on one without the other.
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
		if err := patchLabels(ctx, e, n.Metadata.Name, anyOf(labels)); err != nil {
			refused = errors.Join(refused, err)
			continue
		}
		e.Console(fmt.Sprintf("the Node %s lacked labels of the Site, and has them now: %s", n.Metadata.Name, labelWords(labels)))
	}
	if left := leftLabels(j, active.Site, n); len(left) > 0 {
		refused = errors.Join(refused, unlabelOwn(ctx, e, n.Metadata.Name, left))
	}
	return true, refused
}

// unlabelOwn takes labels from the Node that the site has no more.
func unlabelOwn(ctx context.Context, e *Env, name string, labels map[string]string) error {
	gone := map[string]any{}
	for k := range labels {
		gone[k] = nil
	}
	flags := e.contents(kubeadmFlags)
	if _, err := e.write(kubeadmFlags, dropLabels(flags, labels), Mode(0o644)); err != nil {
		return fmt.Errorf("having kubelet register without labels: %w", err)
	}
	if err := patchLabels(ctx, e, name, gone); err != nil {
		return err
	}
	e.Console(fmt.Sprintf("the Node %s had labels that the Site has no more: %s; they are gone", name, labelWords(labels)))
	return nil
}

// reported makes sure that kubelet runs, and that what the cluster shows is
// what kubelet has said since it was started: for the better part of a minute
// a Node looks as Ready as it was before.
func reported(ctx context.Context, e *Env, n *api.Node) error {
	if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil || state != "active" {
		return Advise(errors.Join(fmt.Errorf("kubelet is %s", state), err), "see `journalctl -u kubelet` on the machine")
	}
	since, err := e.UnitSince(ctx, ondisk.UnitKubelet)
	if err != nil {
		return err
	}
	// A report of this boot may be dated by a clock that was set since.
	earliest := since.Now
	if id := bootID(e); id != "" && n.Status.NodeInfo.BootID == id {
		earliest = since.Earlier()
	}
	if n.Heartbeat().Before(earliest.Truncate(time.Second)) {
		return Advise(fmt.Errorf("kubelet has not reported to the cluster since it was started at %s", since.Now.UTC().Format(time.TimeOnly)),
			"it does within a minute; else see `journalctl -u kubelet` on the machine")
	}
	return nil
}

// readyMark says that the cluster has seen this enrolment Ready once, which
// cannot be observed offline.
const readyMark = ondisk.StateDir + "/ready"

// missingLabels are those of the site that the Node does not carry.
func missingLabels(site *configs.Site, n *api.Node) map[string]string {
	out := node.KubeletLabels(site)
	maps.DeleteFunc(out, func(k, v string) bool {
		have, ok := n.Metadata.Labels[k]
		return ok && have == v
	})
	return out
}

func labelWords(labels map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, ", ")
}

// forgetPhase leaves nothing of the token on this machine.
func forgetPhase(active *Active) Phase {
	return Phase{
		Name: "forget-token", Doc: "nothing of the bootstrap token is left", Timeout: time.Minute,
		Final: true, // nothing before it needs the token any more
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			for _, f := range tokenFiles {
				if e.exists(f) {
					return Todo, nil
				}
			}
			if j, ok := readJoinedAs(e); ok && !j.TokenForgotten {
				return Todo, nil
			}
			if found, err := secretsInSlot(e, active); err != nil || found != noSecrets {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			// Kubeadm and kubelet sync nothing, and the token is the only way
			// back in.
			if err := syncCredentials(e); err != nil {
				return err
			}
			for _, f := range tokenFiles {
				if err := e.Remove(f); err != nil {
					return fmt.Errorf("forgetting the token: %w", err)
				}
			}
			found, err := secretsInSlot(e, active)
			if err == nil && found != noSecrets {
				err = forgetToken(e, active, found == slotBlank)
			}
			if err != nil {
				return err
			}
			return saveForgotten(e)
		},
	}
}

// slotSecrets is what secretsInSlot found.
type slotSecrets int

const (
	noSecrets   slotSecrets = iota // of the active Site
	someSecrets                    // it has some
	slotBlank                      // it was cut off while they were forgotten
)

// secretsInSlot looks for secrets of the active Site in the slot. Another Site,
// stamped meanwhile, keeps its own: it needs them.
func secretsInSlot(e *Env, active *Active) (slotSecrets, error) {
	dev, err := ownSlot(e)
	if err != nil {
		return noSecrets, err
	}
	c, one, err := readContents(e, dev)
	if errors.Is(err, slot.ErrBlank) {
		return slotBlank, nil
	}
	site, mac := active.Site, active.MAC
	if err == nil && !active.isMadeOf(one.Files[ondisk.SlotSite], one.Files[ondisk.SlotIgnition]) {
		if site, err = parseSite(one.Files[ondisk.SlotSite]); err == nil {
			mac, err = siteMAC(active.inputs.key, site, one.Files[ondisk.SlotIgnition])
		}
	}
	if err != nil {
		// A person's half-written correction is left for the person.
		e.Log.Warn("the slot cannot be read, and is left as it is", "error", err)
		return noSecrets, nil
	}
	if mac != active.MAC {
		e.Log.Info("the slot has another Site now, and is left as it is")
		return noSecrets, nil
	}
	if site.Credentials.IsZero() && !hasPKI(c) {
		return noSecrets, nil
	}
	return someSecrets, nil
}

// forgetToken leaves the Site in the slot, and no secret. A blank slot was cut off
// in the middle of this: what else was in it is gone.
func forgetToken(e *Env, active *Active, blank bool) error {
	doc, err := withoutToken(active.Site)
	if err != nil {
		return err
	}
	var secrets []string
	if token := active.Site.Credentials.Token.Reveal(); token != "" {
		secrets = append(secrets, token)
	}
	info := ondisk.SlotInfo{Version: ondisk.SlotInfoVersion, Plan: active.Image.Plan}
	if blank {
		info.Stamped = active.Stamped
		c := slot.Contents{Info: info, Files: map[string][]byte{ondisk.SlotSite: doc}}
		if active.ignition != nil {
			c.Files[ondisk.SlotIgnition] = slot.HideInIgnition(active.ignition, secrets...)
		}
		if err := e.WriteSlot(active.Device, &c); err != nil {
			return fmt.Errorf("writing the Site to the slot again: %w", err)
		}
		return nil
	}
	if err := e.ScrubSlot(active.Device, info, doc, secrets); err != nil {
		return fmt.Errorf("forgetting the token: %w", err)
	}
	return nil
}

// tokenFiles may hold the token, or point to where it was.
var tokenFiles = []string{discoveryFile, joinFile, bootstrapRun, bootstrapConf, hubBootstrap}

func hasPKI(c *slot.Contents) bool {
	for name := range c.Files {
		if strings.HasPrefix(name, ondisk.SlotPKIDir+"/") {
			return true
		}
	}
	return false
}
