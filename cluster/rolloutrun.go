package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ondisk/order"
)

// UpdateRow is a node in an update.
type UpdateRow struct {
	Node   string    `json:"node"`
	Ring   string    `json:"ring,omitempty"`
	State  string    `json:"state"`
	Since  time.Time `json:"since,omitzero"`
	Detail string    `json:"detail,omitempty"`
	// Image and Plan describe the system that the node runs.
	Image string `json:"image,omitempty"`
	Plan  string `json:"plan,omitempty"`
}

// row describes a node.
func (r *Rollout) row(n *updateNode, ring string) UpdateRow {
	m := n.mark
	row := UpdateRow{Node: n.name, Ring: ring, State: r.state(n), Image: n.answer.Image, Plan: n.answer.Plan}
	row.Since = cmp.Or(m.Ended, m.Released, m.Drain, m.Given)
	switch {
	case row.State == UpdateFailed:
		row.Detail = cmp.Or(n.rejected, m.Reason)
	case row.State == UpdateFetching && n.answer.Total > 0:
		row.Detail = n.answer.Step + ": " + bytesize.MBOf(n.answer.Fetched, n.answer.Total)
	case row.State == UpdateFetching && n.answer.State != "":
		row.Detail = strings.TrimSuffix(n.answer.State+": "+n.answer.Reason, ": ")
	case row.State == UpdateRestarts:
		row.Detail = n.answer.State
	case row.State == UpdateNone:
		row.Detail = "its image does not support orders: update it by hand once"
	}
	if n.halt != "" {
		row.Detail = strings.TrimPrefix(row.Detail+"; "+n.halt, "; ")
	}
	if !n.ready {
		row.Detail = strings.TrimPrefix(row.Detail+"; not Ready", "; ")
	}
	return row
}

// updateNodes lists the Nodes in natural order of their names.
func (c *Client) updateNodes(ctx context.Context) ([]*updateNode, error) {
	list, err := c.list(ctx, nodes, "", metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var out []*updateNode
	for i := range list {
		out = append(out, updateNodeOf(&list[i]))
	}
	sortNodes(out)
	return out, nil
}

func sortNodes(all []*updateNode) {
	slices.SortFunc(all, func(a, b *updateNode) int { return reports.Natural(a.name, b.name) })
}

// UpdateStatus returns the update state of each node.
func (c *Client) UpdateStatus(ctx context.Context) ([]UpdateRow, error) {
	all, err := c.updateNodes(ctx)
	if err != nil {
		return nil, err
	}
	rows := []UpdateRow{}
	for _, n := range all {
		r := &Rollout{}
		r.Order.Golden = n.mark.Golden
		if n.mark.Golden == "" { // not part of a rollout: show only the machine's answer
			row := r.row(n, "")
			row.State = cmp.Or(n.answer.State, "-")
			if row.Detail = n.answer.Reason; !n.answered {
				row.State, row.Detail = UpdateNone, ""
			}
			rows = append(rows, row)
			continue
		}
		rows = append(rows, r.row(n, ""))
	}
	return rows, nil
}

// CheckRollout returns the nodes that would get the order, ring by ring. If the rollout is not
// possible, the error has all reasons.
func (c *Client) CheckRollout(ctx context.Context, r *Rollout) ([]UpdateRow, error) {
	all, err := c.updateNodes(ctx)
	if err != nil {
		return nil, err
	}
	server, _, err := c.version(ctx, "asking for the version of the API server")
	if err != nil {
		return nil, err
	}
	if err := r.checkStart(all, server); err != nil {
		return nil, err
	}
	var rows []UpdateRow
	for i, ring := range r.selectNodes(all) {
		for _, n := range ring {
			row := r.row(n, r.ringName(i))
			if r.replaced(n) {
				row.State = UpdatePending
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// HaltUpdates makes machines stop carrying out orders and rollouts stop writing them. stop also
// removes all orders, and uncordons the Nodes that a rollout cordoned. It returns the number of
// changed Nodes.
func (c *Client) HaltUpdates(ctx context.Context, stop bool) (int, error) {
	value := haltPaused
	if stop {
		value = haltStopped
	}
	return c.changeUpdates(ctx, func(n *updateNode) *nodePatch {
		if !n.answered && n.order == "" && n.mark.Golden == "" {
			return nil
		}
		var what rolloutAction
		switch {
		case !stop || n.mark.Result != "":
		case n.mark.Released.IsZero() || n.answer.State == order.StateHeld || n.halt == haltStopped:
			what = actWithdraw
		default:
			what = actUndrain // it may be restarting, but no rollout uncordons it then
		}
		patch := (&Rollout{}).patchOf(rolloutAct{node: n, what: what}, time.Time{})
		if patch.annotations[order.AnnotationHalt] = value; stop {
			patch.annotations[order.AnnotationOrder] = nil
		}
		if n.mark.Golden == "" {
			delete(patch.annotations, annotationRollout)
		}
		return patch
	})
}

// ResumeUpdates reverts HaltUpdates, except that removed orders stay removed.
func (c *Client) ResumeUpdates(ctx context.Context) (int, error) {
	now := time.Now()
	return c.changeUpdates(ctx, func(n *updateNode) *nodePatch {
		if n.halt == "" {
			return nil
		}
		n.mark = n.mark.resumed(now)
		patch := (&Rollout{}).patchOf(rolloutAct{node: n}, now)
		if patch.annotations[order.AnnotationHalt] = nil; n.mark.Golden == "" {
			delete(patch.annotations, annotationRollout)
		}
		return patch
	})
}

// changeUpdates patches each Node for which change returns a patch. If a Node was changed
// meanwhile, it is read and patched again.
func (c *Client) changeUpdates(ctx context.Context, change func(*updateNode) *nodePatch) (int, error) {
	list, err := c.updateNodes(ctx)
	if err != nil {
		return 0, err
	}
	done := 0
	var errs []error
	for _, n := range list {
		for try := 1; ; try++ {
			patch := change(n)
			if patch == nil {
				break
			}
			_, err := c.patchNode(ctx, n.name, patch)
			if apierrors.IsConflict(err) && try < maxConflicts {
				var u *unstructured.Unstructured
				if u, err = c.get(ctx, nodes, "", n.name); u != nil {
					n = updateNodeOf(u)
					continue
				}
			}
			if err == nil {
				done++
			} else if !apierrors.IsNotFound(err) {
				errs = append(errs, err)
			}
			break
		}
	}
	return done, errors.Join(errs...)
}

func (c *Client) patchNode(ctx context.Context, name string, patch *nodePatch) (*unstructured.Unstructured, error) {
	b, err := json.Marshal(patch.merge())
	if err != nil {
		return nil, err
	}
	u, err := c.resource(nodes, "").Patch(ctx, name, types.MergePatchType, b, metav1.PatchOptions{})
	return u, c.explain("changing node "+name, err)
}

// nodeView has the last known state of all Nodes.
type nodeView struct {
	mu      sync.Mutex
	nodes   map[string]*updateNode
	changed chan struct{}
	// rejected has the errors of changes that the API server rejected, by Node.
	rejected map[string]error
	// conflicts counts the changes that failed because the Node was changed meanwhile, by Node.
	conflicts map[string]int
}

func (v *nodeView) all() []*updateNode {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]*updateNode, 0, len(v.nodes))
	for _, n := range v.nodes {
		if err := v.rejected[n.name]; err != nil {
			n.rejected = err.Error()
		}
		n.contested = v.conflicts[n.name] > 0
		out = append(out, n)
	}
	sortNodes(out)
	return out
}

// get returns a Node, or nil if it does not exist.
func (v *nodeView) get(name string) *updateNode {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.nodes[name]
}

// put stores a Node, unless the stored one is newer.
func (v *nodeView) put(n *updateNode) {
	v.mu.Lock()
	if old := v.nodes[n.name]; old == nil || !newer(old.version, n.version) {
		v.nodes[n.name] = n
	}
	v.mu.Unlock()
	v.signal()
}

// remove removes a Node that no longer exists.
func (v *nodeView) remove(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.nodes, name)
}

// replace replaces all Nodes.
func (v *nodeView) replace(nodes map[string]*updateNode) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.nodes = nodes
}

// reject records that the API server rejected a change of a Node.
func (v *nodeView) reject(name string, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.rejected == nil {
		v.rejected = map[string]error{}
	}
	v.rejected[name] = err
}

// conflict counts a conflict of a Node.
func (v *nodeView) conflict(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.conflicts == nil {
		v.conflicts = map[string]int{}
	}
	v.conflicts[name]++
}

// calmFirst sorts actions by the number of conflicts of their Nodes. So a Node that changes all the
// time delays no other.
func (v *nodeView) calmFirst(acts []rolloutAct) {
	v.mu.Lock()
	defer v.mu.Unlock()
	slices.SortStableFunc(acts, func(a, b rolloutAct) int { return cmp.Compare(v.conflicts[a.node.name], v.conflicts[b.node.name]) })
}

// signal wakes wait.
func (v *nodeView) signal() {
	select {
	case v.changed <- struct{}{}:
	default:
	}
}

// newer reports whether resource version a is newer than b; both are numbers.
func newer(a, b string) bool {
	x, err1 := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return err1 == nil && err2 == nil && x > y
}

// watchTime is the duration of one watch. After it, the Nodes are listed again.
const watchTime = 10 * time.Minute

// load lists the Nodes, and returns the version of the list.
func (c *Client) load(ctx context.Context, v *nodeView) (string, error) {
	list, err := c.resource(nodes, "").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", c.explain("listing nodes", err)
	}
	now := map[string]*updateNode{}
	for i := range list.Items {
		now[list.Items[i].GetName()] = updateNodeOf(&list.Items[i])
	}
	v.replace(now)
	v.signal()
	return list.GetResourceVersion(), nil
}

// withoutTimeout returns a client for watches, which last longer than requestTimeout.
func (c *Client) withoutTimeout() (*Client, error) {
	config := rest.CopyConfig(c.config)
	config.Timeout = 0
	return newClient(config)
}

// watchNodes keeps v up to date until ctx ends. watcher is a client without a timeout, and version
// the version of v.
func (c *Client) watchNodes(ctx context.Context, watcher *Client, v *nodeView, version string, tick time.Duration, tell func(string)) {
	seconds := int64(watchTime.Seconds())
	var err error
	for ; ctx.Err() == nil; version, err = c.load(ctx, v) {
		var w watch.Interface
		if err == nil {
			w, err = watcher.resource(nodes, "").Watch(ctx, metav1.ListOptions{ResourceVersion: version, TimeoutSeconds: &seconds})
		}
		if err != nil {
			if ctx.Err() == nil {
				tell(c.explain("watching nodes", err).Error())
			}
			sleep(ctx, tick)
			continue
		}
		for e := range w.ResultChan() {
			u, ok := e.Object.(*unstructured.Unstructured)
			if !ok || e.Type == watch.Error {
				break
			}
			if e.Type == watch.Deleted {
				v.remove(u.GetName())
				v.signal()
				continue
			}
			v.put(updateNodeOf(u))
		}
		w.Stop()
		sleep(ctx, tick/5)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// rolloutTick is the interval between checks of the times, and of the pods on nodes that are being
// drained.
const rolloutTick = 5 * time.Second

// transient reports whether the request may succeed if it is repeated.
func transient(err error) bool {
	var network net.Error
	return apierrors.IsConflict(err) || apierrors.IsTooManyRequests(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err) || errors.As(err, &network) || errors.Is(err, context.DeadlineExceeded)
}

// rejects reports whether the API server rejected the change of one object, for example because of
// an admission webhook. Changes of other objects may succeed.
func rejects(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && !transient(err) && !apierrors.IsUnauthorized(err)
}

// ErrHalted means that the updates of the cluster were stopped.
var ErrHalted = errors.New("the updates of this cluster are stopped: edgebake cluster update --resume allows them again")

// rolloutRun is one run of a rollout.
type rolloutRun struct {
	*Client
	rollout *Rollout
	view    *nodeView
	past    *history
}

// Update carries out a rollout until every node that can be updated is updated, or the budget is used
// up. It calls tell for each change of a node, and note with each reason to wait.
func (c *Client) Update(ctx context.Context, r *Rollout, tell func(UpdateRow), note func(string)) error {
	const doing = "updating nodes"
	rights := []permission{{"list", nodes, "", ""}, {"watch", nodes, "", ""}, {"patch", nodes, "", ""}}
	if !r.Order.NoDrain {
		rights = append(rights, permission{"list", pods, "", ""}, permission{"create", evictions, "", ""})
	}
	if err := c.requirePermissions(ctx, doing, rights...); err != nil {
		return err
	}
	watcher, err := c.withoutTimeout()
	if err != nil {
		return err
	}
	v := &nodeView{changed: make(chan struct{}, 1)}
	version, err := c.load(ctx, v)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { c.watchNodes(ctx, watcher, v, version, r.tick(), note) })
	run := &rolloutRun{Client: c, rollout: r, view: v, past: newHistory()}
	defer run.undrain(ctx, note)
	if err := run.begin(ctx); err != nil {
		return err
	}
	told, waits, problem := map[string]string{}, "", ""
	begun := time.Now()
	for {
		all := v.all()
		now := time.Now().Round(0) // by the clock, also if that was set
		run.past.observe(r, all, now, time.Since(begun))
		p := r.plan(all, run.past, now)
		run.past.planned(p, now)
		for _, n := range all {
			if row := r.row(n, ""); told[n.name] != row.State {
				if old, ok := told[n.name]; ok || r.ours(n) && old != row.State {
					tell(row)
				}
				told[n.name] = row.State
			}
		}
		if p.waits != waits {
			if waits = p.waits; waits != "" {
				note("waiting for " + waits)
			}
		}
		if p.halted == haltStopped {
			return ErrHalted
		}
		if p.ended {
			return p.result(r)
		}
		if err := underWay(r.otherRollouts(all)); err != nil {
			return err
		}
		acted, why, err := run.actAll(ctx, p.acts)
		if err != nil {
			return err
		}
		if why != "" && why != problem {
			problem = why
			note(why)
		}
		v.wait(ctx, r.tick(), acted)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// undrainTime limits the time to uncordon nodes at the end of a run.
const undrainTime = 30 * time.Second

// undrain uncordons the nodes that are being drained when a run ends early, for example because it
// was interrupted: nobody knows when the next run begins.
func (run *rolloutRun) undrain(ctx context.Context, note func(string)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undrainTime)
	defer cancel()
	for _, n := range run.view.all() {
		for try := 0; try < maxConflicts && n != nil && run.rollout.ours(n) && run.rollout.state(n) == UpdateDraining; try++ {
			if err := run.act(ctx, rolloutAct{node: n, what: actUndrain}); err != nil && !apierrors.IsConflict(err) {
				note(err.Error() + ": it stays cordoned until the same command runs again")
				break
			}
			n = run.view.get(n.name)
		}
	}
}

// maxConflicts limits the attempts to change a Node that others change at the same time.
const maxConflicts = 5

// begin carries out the actions that a run needs once, at its beginning.
func (run *rolloutRun) begin(ctx context.Context) error {
	r, v := run.rollout, run.view
	all := v.all()
	for _, n := range r.withEarlier(all, slices.Concat(r.selectNodes(all)...)) {
		for range maxConflicts {
			what := r.atBegin(n, time.Now())
			if what == "" {
				break
			}
			err := run.act(ctx, rolloutAct{node: n, what: what})
			if err != nil && rejects(err) {
				v.reject(n.name, err)
				break
			}
			if err != nil && !apierrors.IsConflict(err) {
				return err
			}
			if n = v.get(n.name); n == nil {
				break
			}
		}
	}
	return nil
}

// actAll carries out the actions of a plan. Errors of evictions, and changes that the API server
// rejects, concern only one node; any other error stops it, because the remaining actions may be
// outdated. acted reports whether there were actions and none had an error, except rejections.
// problem has the errors after which the rollout tries again.
func (run *rolloutRun) actAll(ctx context.Context, acts []rolloutAct) (acted bool, problem string, err error) {
	var drains []error
	run.view.calmFirst(acts)
	for _, a := range acts {
		err := run.act(ctx, a)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return false, "", ctx.Err()
		case apierrors.IsConflict(err):
			run.view.conflict(a.node.name)
			return false, "", nil
		case a.what == actEvict:
			drains = append(drains, err)
		case transient(err):
			return false, err.Error(), nil
		case rejects(err):
			run.view.reject(a.node.name, err)
		default:
			return false, "", err
		}
	}
	if len(drains) > 0 {
		return false, errors.Join(drains...).Error(), nil
	}
	return len(acts) > 0, "", nil
}

// wait waits until a Node changes, at most for tick. If acted is false, it also waits for
// further changes.
func (v *nodeView) wait(ctx context.Context, tick time.Duration, acted bool) {
	select {
	case <-ctx.Done():
	case <-time.After(tick):
	case <-v.changed:
		if !acted {
			sleep(ctx, tick/5) // changes often arrive in groups
		}
	}
}

// result returns nil if all nodes were updated, otherwise an error with the reasons.
func (p *rolloutPlan) result(r *Rollout) error {
	var errs []error
	failed := p.states[UpdateFailed]
	if p.spent && len(failed) == 0 {
		errs = append(errs, errors.New("updating nodes: the budget was used up, so no other node was started, but the nodes that had failed run the image now: run the same command again"))
	}
	if len(failed) > 0 {
		what := "updating nodes: " + strconv.Itoa(len(failed)) + " failed: " + firstNames(failed)
		if p.spent {
			what += fmt.Sprintf("; the budget (%s) is used up, so no other node was started", &r.Budget)
		}
		errs = append(errs, errors.New(what+": see edgebake cluster update --status; --retry sends the order again"))
	}
	for _, why := range p.rejected {
		errs = append(errs, fmt.Errorf("%s: once that is repaired, run the same command again", why))
	}
	if l := p.states[UpdateNotReady]; len(l) > 0 {
		errs = append(errs, fmt.Errorf("%s skipped, since not Ready: %s: run the same command again later", configs.Count(len(l), "node"), firstNames(l)))
	}
	if l := p.states[UpdateNone]; len(l) > 0 {
		errs = append(errs, fmt.Errorf("%s skipped, without support for orders in the image: %s: update them by hand once", configs.Count(len(l), "node"), firstNames(l)))
	}
	if p.stuck != "" {
		errs = append(errs, fmt.Errorf("no node of ring %s runs the image, so no later ring was begun", p.stuck))
	}
	return errors.Join(errs...)
}

// act performs one action.
func (run *rolloutRun) act(ctx context.Context, a rolloutAct) error {
	if a.what == actEvict {
		left, err := run.evict(ctx, a.node.name)
		if err != nil || left > 0 {
			return err
		}
		a.what = actRelease
	}
	// Not cancelled with ctx: a cancelled request may have been carried out, and undrain must know.
	u, err := run.patchNode(context.WithoutCancel(ctx), a.node.name, run.rollout.patchOf(a, time.Now()))
	switch {
	case err == nil:
		n := updateNodeOf(u)
		run.past.acted(a, n)
		run.view.put(n)
		return nil
	case apierrors.IsNotFound(err):
		run.view.remove(a.node.name)
		return nil
	case apierrors.IsConflict(err):
		if u, got := run.get(ctx, nodes, "", a.node.name); got == nil && u != nil {
			run.view.put(updateNodeOf(u))
		}
	}
	return err
}

// evict requests the eviction of the pods that a drain removes, and returns how many of them
// remain.
func (c *Client) evict(ctx context.Context, node string) (left int, err error) {
	list, err := c.list(ctx, pods, "", metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return 0, err
	}
	var errs []error
	for i := range list {
		p := &list[i]
		var pod kubeapi.Pod
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(p.Object, &pod); err != nil {
			return left, fmt.Errorf("reading pod %s/%s: %w", p.GetNamespace(), p.GetName(), err)
		}
		if pod.Stays() {
			continue
		}
		left++
		if p.GetDeletionTimestamp() != nil {
			continue
		}
		eviction := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "policy/v1", "kind": "Eviction",
			"metadata":      map[string]any{"name": p.GetName(), "namespace": p.GetNamespace()},
			"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": string(p.GetUID())}}}}
		_, err := c.resource(pods, p.GetNamespace()).Create(ctx, eviction, metav1.CreateOptions{}, "eviction")
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsTooManyRequests(err) && !apierrors.IsConflict(err) {
			errs = append(errs, c.explain("evicting pod "+p.GetNamespace()+"/"+p.GetName(), err))
		}
	}
	return left, errors.Join(errs...)
}
