package cluster

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/semver"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
)

// A rollout keeps its state only in the Nodes, so it can be killed at any point and run again. Each
// change of a Node is one patch, which fails if somebody else has changed the Node meanwhile.

// annotationRollout is the annotation with the rolloutMark of a Node.
const annotationRollout = "edgebake.io/update-rollout"

// rolloutMark is the state that a rollout keeps in a Node.
type rolloutMark struct {
	Golden string `json:"golden"`
	// Given is when the order was written, Drain when the Node was cordoned, Released when the
	// order was changed to let the machine restart, and Ended when the result was recorded.
	Given    time.Time `json:"given,omitzero"`
	Drain    time.Time `json:"drain,omitzero"`
	Released time.Time `json:"released,omitzero"`
	Ended    time.Time `json:"ended,omitzero"`
	// Cordoned is set if the rollout cordoned the Node, and therefore must uncordon it.
	Cordoned bool   `json:"cordoned,omitempty"`
	Result   string `json:"result,omitempty"` // UpdateDone, UpdateFailed or empty
	Reason   string `json:"reason,omitempty"`
	// Try counts how often the order was given again after a failure.
	Try int `json:"try,omitempty"`
}

// maxTurns limits how often a run drains a node, or lets it restart without a drain. Otherwise a Node
// whose annotations change all the time, for example a halt, could have other nodes drained without
// end.
const maxTurns = 10

// windowPatience is how long a run waits for a node in addition to Fetch, if the node waits for its
// window or is not Ready. A window opens every day, but a machine may be off for some days.
const windowPatience = 7 * 24 * time.Hour

// parseMark parses a mark. It is untrusted, because a machine may change its own Node. A mark that
// cannot be read, or has no valid golden digest, counts as none.
func parseMark(text string) rolloutMark {
	var m rolloutMark
	if json.Unmarshal([]byte(text), &m) != nil || order.CheckGolden(m.Golden) != nil {
		return rolloutMark{}
	}
	if m.Result != UpdateDone && m.Result != UpdateFailed {
		m.Result = ""
	}
	m.Reason = printable.Short(m.Reason, order.MaxReason)
	return m
}

// resumed returns the mark of a Node after a pause that ends now. The time limits begin again.
func (m rolloutMark) resumed(now time.Time) rolloutMark {
	for _, begun := range []*time.Time{&m.Given, &m.Drain, &m.Released} {
		if m.Result == "" && !begun.IsZero() {
			*begun = now.UTC().Truncate(time.Second)
		}
	}
	return m
}

// clockError is the difference of two computers' clocks that does not count as a wrong clock.
const clockError = time.Minute

// corrected replaces times in the future, from a clock that was ahead, with now. Otherwise a ring
// would soak until such a time.
func (m rolloutMark) corrected(now time.Time) rolloutMark {
	for _, at := range []*time.Time{&m.Given, &m.Drain, &m.Released, &m.Ended} {
		if at.Sub(now) > clockError {
			*at = now.UTC().Truncate(time.Second)
		}
	}
	return m
}

// States of a node in a rollout.
const (
	UpdatePending  = "pending"
	UpdateNotReady = "notReady" // pending, but the node is not Ready: it gets no order
	UpdateNone     = "noAnswer" // the machine has never answered an order, so it gets none
	UpdateFetching = "fetching" // it has an order that forbids the restart for now
	UpdateHeld     = "held"     // everything is fetched; it waits for permission to restart
	UpdateDraining = "draining"
	UpdateRestarts = "restarting"
	UpdateDone     = "done"
	UpdateFailed   = "failed"
)

// updateNode has the fields of a Node that a rollout needs.
type updateNode struct {
	name, version, kubelet string
	labels                 map[string]string
	ready, unschedulable   bool
	since                  time.Time // of the present value of ready
	order                  string
	halt                   string // haltPaused, haltStopped or ""
	answer                 order.Answer
	mark                   rolloutMark
	controlPlane, answered bool
	// contested is set if a change of this Node had a conflict in this run. Its actions come last, so
	// the end of its update does not count before it is written.
	contested bool
	// rejected is the API server's error for a change of this Node that it rejected in this run, or
	// "". The node then counts as failed, although its mark does not record that.
	rejected string
}

func updateNodeOf(u *unstructured.Unstructured) *updateNode {
	a := u.GetAnnotations()
	n := &updateNode{name: u.GetName(), version: u.GetResourceVersion(), labels: u.GetLabels(), order: a[order.AnnotationOrder],
		answer: order.ParseAnswer(a[order.AnnotationAnswer]), mark: parseMark(a[annotationRollout])}
	state := nodeState(u)
	n.ready, n.since = state.State == Ready, state.Since
	switch halt, halted := a[order.AnnotationHalt]; {
	case halted && (halt == "" || halt == haltStopped):
		n.halt = haltStopped
	case halted:
		n.halt = haltPaused
	}
	n.kubelet, _, _ = unstructured.NestedString(u.Object, "status", "nodeInfo", "kubeletVersion")
	n.unschedulable, _, _ = unstructured.NestedBool(u.Object, "spec", "unschedulable")
	_, n.controlPlane = n.labels[kubeapi.ControlPlaneLabel]
	n.answered = n.answer.Plan != ""
	return n
}

// Values of order.AnnotationHalt.
const (
	haltPaused  = "paused"
	haltStopped = "stopped"
)

// Share is a number of nodes or a percentage of the selected nodes. It is always at least one node.
type Share struct{ n, percent int }

// String returns the share in the form that Set reads.
func (s *Share) String() string {
	if s.percent > 0 {
		return strconv.Itoa(s.percent) + "%"
	}
	return strconv.Itoa(max(1, s.n))
}

// Type returns the value's type for the flag's usage text (pflag.Value).
func (s *Share) Type() string { return "number or %" }

// Set reads "3" or "5%".
func (s *Share) Set(text string) error {
	digits, percent := strings.CutSuffix(text, "%")
	n, err := strconv.Atoi(digits)
	if err != nil || n < 1 || percent && n > 100 {
		return errors.New("must be a number of at least 1, or a percentage such as 5%")
	}
	*s = Share{n: n}
	if percent {
		*s = Share{percent: n}
	}
	return nil
}

func (s Share) of(nodes int) int { return max(1, s.n, nodes*s.percent/100) }

// Ring is a group of nodes that is updated before the next ring begins.
type Ring struct {
	Name     string
	selector labels.Selector
}

// Rings parses KEY=a,b,c. It returns one ring for each value of the label KEY, in that order.
func Rings(text string) ([]Ring, error) {
	key, list, ok := strings.Cut(text, "=")
	if !ok || list == "" {
		return nil, fmt.Errorf("%q is not KEY=VALUE,VALUE, such as ring=canary,shops", text)
	}
	var out []Ring
	for value := range strings.SplitSeq(list, ",") {
		if slices.ContainsFunc(out, func(r Ring) bool { return r.Name == value }) {
			return nil, fmt.Errorf("the value %q appears twice", value)
		}
		r, err := Selector(key + "=" + value)
		if err != nil {
			return nil, err
		}
		r.Name = value
		out = append(out, r)
	}
	return out, nil
}

// Selector parses a label selector as kubectl does.
func Selector(text string) (Ring, error) {
	s, err := labels.Parse(text)
	if err != nil {
		return Ring{}, fmt.Errorf("%q is not a label selector: %w", text, err)
	}
	return Ring{Name: text, selector: s}, nil
}

// Rollout is an update of nodes to one image.
type Rollout struct {
	// Order is the order for each node, without Hold and Again. Its NoDrain applies to the rollout
	// too.
	Order order.Order
	// Info describes the image.
	Info ondisk.ImageInfo
	// Rings select the nodes; empty: all workers. Control-plane nodes that a ring selects are
	// updated last, one at a time, and only until one fails.
	Rings []Ring
	// Parallel limits the number of nodes that fetch or restart at the same time. The rollout stops
	// when Budget nodes have failed. Budget also limits the number of nodes at risk: drained,
	// restarting, or failed after their order was no longer on hold.
	Parallel, Budget Share
	// Soak is the time that a ring's nodes must stay Ready before the next ring begins.
	Soak time.Duration
	// Window is the time of each day in which orders are written and machines restart, in this
	// computer's time zone.
	Window forms.Window
	// Drain limits the time to drain a node. Restart limits the time until the node runs the new
	// system and is Ready. Fetch limits the time to fetch everything.
	Drain, Restart, Fetch time.Duration
	// Retry writes the order again for nodes that have failed.
	Retry bool
	// Tick is the interval between checks of the times; 0: rolloutTick.
	Tick time.Duration
}

// history is the part of a run's past that its plans depend on. It is not kept in the Nodes, where a
// machine can change it.
type history struct {
	// spent is set once the budget was used up, even if a failed node runs the image later:
	// otherwise a node that reports failures and successes in turn could have other nodes drained
	// and withdrawn without end.
	spent bool
	// turns counts how often the run has let each node restart, including nodes deleted since.
	turns map[string]int
	// nodes has the nodes that are part of the rollout.
	nodes map[string]nodeHistory
	// last and ran are the arguments of the last call of observe.
	last time.Time
	ran  time.Duration
}

// nodeHistory is the history of one node.
type nodeHistory struct {
	// mark is the mark of the Node. Its times are moved only by the run's own patches, by pauses,
	// jumps of the clock, and closed windows of Sites.
	mark rolloutMark
	// moved is set if Given in mark is later than in the Node, since the window was closed.
	moved bool
	// waits is the time since when the run has waited for the node to carry out its order, not
	// counting the time in which the node waited for its turn. It is zero if the node has had no
	// order.
	waits time.Time
	// idle is set if the node was ready to restart when the rollout was halted, its budget was used
	// up, or its window was closed.
	idle bool
}

func newHistory() *history {
	return &history{turns: map[string]int{}, nodes: map[string]nodeHistory{}}
}

// observe undoes the changes that the machines have made to the marks of their Nodes. ran is how long
// the run has been running. If the clock was set, or this computer slept, now has changed by another
// time: that difference does not count towards any limit.
func (h *history) observe(r *Rollout, all []*updateNode, now time.Time, ran time.Duration) {
	elapsed := now.Sub(cmp.Or(h.last, now))
	jump := elapsed - (ran - h.ran)
	if h.last.IsZero() || jump.Abs() < clockError {
		jump = 0
	}
	nodes := map[string]nodeHistory{} // without deleted Nodes
	for _, n := range all {
		node := h.nodes[n.name]
		old, m := node.mark, &n.mark
		first := old.Golden == ""
		switch {
		case first && !r.ours(n), r.inOther(n): // inOther ends the run
			continue
		case !r.ours(n), m.Result == "" && old.Result != "":
			*m = old
		default:
			m.Ended = cmp.Or(old.Ended, m.Ended)
			m.Given = cmp.Or(old.Given, m.Given)
			for _, at := range [][2]*time.Time{{&m.Drain, &old.Drain}, {&m.Released, &old.Released}} {
				if !at[0].IsZero() && !at[1].IsZero() {
					*at[0] = *at[1]
				}
			}
		}
		if node.waits.IsZero() && m.Result == "" && !m.Given.IsZero() {
			node.waits = now
		}
		move := func(d time.Duration, times ...*time.Time) {
			for _, at := range times {
				if !at.IsZero() {
					*at = at.Add(d)
				}
			}
		}
		if !first {
			move(jump, &m.Given, &m.Drain, &m.Released, &node.waits)
		}
		switch counted := elapsed - jump; {
		case n.halt != "" && !first:
			move(counted, &m.Given, &m.Drain, &m.Released, &node.waits)
		case r.outsideWindow(n) && !m.Given.IsZero():
			if move(counted, &m.Given); first { // an earlier run was killed, perhaps days ago
				m.Given = now.UTC().Truncate(time.Second)
			}
			node.moved = true
		case node.idle:
			move(counted, &node.waits)
		}
		node.mark, node.idle = *m, false // planned sets idle again
		nodes[n.name] = node
	}
	h.last, h.ran, h.nodes = now, ran, nodes
}

// planned records the results of a plan that later plans depend on.
func (h *history) planned(p rolloutPlan, now time.Time) {
	h.spent = p.spent
	for _, name := range p.queued {
		node := h.nodes[name]
		if p.free {
			node.waits = now
		} else {
			node.idle = true
		}
		h.nodes[name] = node
	}
}

// acted records that the run has performed an action. n is the Node after it.
func (h *history) acted(a rolloutAct, n *updateNode) {
	node := h.nodes[n.name]
	node.mark, node.moved = n.mark, false
	h.nodes[n.name] = node
	if a.what == actDrain || a.what == actRelease && a.node.mark.Drain.IsZero() {
		h.turns[n.name]++
	}
}

func (r *Rollout) tick() time.Duration { return cmp.Or(r.Tick, rolloutTick) }

// orderOf returns the order for a Node with this mark.
func (r *Rollout) orderOf(m rolloutMark, hold bool) order.Order {
	o := r.Order
	o.Hold = hold
	if m.Try > 0 {
		o.Again = strconv.Itoa(m.Try)
	}
	return o
}

// ours reports whether the mark of a Node belongs to a rollout of this rollout's image.
func (r *Rollout) ours(n *updateNode) bool { return n.mark.Golden == r.Order.Golden }

// runs reports whether a node is Ready with the new system, which is no longer on trial.
func (r *Rollout) runs(n *updateNode) bool {
	return n.answered && n.answer.Plan == r.Info.Plan && n.answer.State != order.StateTrial && n.ready
}

// answers reports whether the machine's last answer has this state and belongs to the last order
// for the Node. The order's limits may differ.
func (r *Rollout) answers(n *updateNode, state string) bool {
	o, err := order.Parse(n.answer.Order)
	given := r.orderOf(n.mark, false)
	return err == nil && n.answer.State == state && o.Golden == given.Golden && o.Again == given.Again
}

// outsideWindow reports whether the machine has not begun to restart, and waits for its window.
func (r *Rollout) outsideWindow(n *updateNode) bool {
	return r.answers(n, order.StateWaiting) && n.answer.Step == order.StepWindow
}

// state returns the state of a node.
func (r *Rollout) state(n *updateNode) string {
	m := n.mark
	switch {
	case n.rejected != "":
		return UpdateFailed
	case r.ours(n) && m.Result != "":
		return m.Result
	case r.ours(n) && !m.Given.IsZero(): // a withdrawn order has no Given
		switch {
		case !m.Released.IsZero():
			return UpdateRestarts
		case !m.Drain.IsZero():
			return UpdateDraining
		case r.answers(n, order.StateHeld):
			return UpdateHeld
		}
		return UpdateFetching
	}
	switch {
	case r.runs(n):
		return UpdateDone
	case !n.answered:
		return UpdateNone
	case !n.ready:
		return UpdateNotReady
	}
	return UpdatePending
}

// controlPlaneRing is the name of the last ring if control-plane nodes are selected.
const controlPlaneRing = "control-plane"

// ringName returns the name of the i-th ring of selectNodes.
func (r *Rollout) ringName(i int) string {
	switch {
	case len(r.Rings) == 0:
		return ""
	case i == len(r.Rings):
		return controlPlaneRing
	}
	return r.Rings[i].Name
}

// selectNodes assigns nodes to rings, in natural order of names. Control-plane nodes that a ring
// selects form an additional last ring. Without Rings, control-plane nodes are left out.
func (r *Rollout) selectNodes(all []*updateNode) [][]*updateNode {
	rings := r.Rings
	if len(rings) == 0 {
		rings = []Ring{{selector: labels.Everything()}}
	}
	out := make([][]*updateNode, len(rings))
	var last []*updateNode
	for _, n := range all {
		i := slices.IndexFunc(rings, func(ring Ring) bool { return ring.selector.Matches(labels.Set(n.labels)) })
		switch {
		case i < 0:
		case !n.controlPlane:
			out[i] = append(out[i], n)
		case len(r.Rings) > 0:
			last = append(last, n)
		}
	}
	if last != nil {
		out = append(out, last)
	}
	return out
}

// checkStart returns all reasons to reject a rollout. server is the version of the API server, and
// all has all nodes of the cluster.
func (r *Rollout) checkStart(all []*updateNode, server string) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if k := r.Info.Kubernetes; semver.IsValid(k) && semver.IsValid(server) && semver.Compare(semver.MajorMinor(k), semver.MajorMinor(server)) > 0 {
		bad("the image's kubelet %s is newer than the API server %s: update the control plane first", k, server)
	}
	nodes := slices.Concat(r.selectNodes(all)...)
	names := func(match func(*updateNode) bool) string {
		var out []string
		for _, n := range nodes {
			if match(n) {
				out = append(out, n.name)
			}
		}
		return firstNames(out)
	}
	if len(nodes) == 0 {
		bad("the selectors match none of the cluster's %s: see kubectl get nodes --show-labels", configs.Count(len(all), "node"))
	}
	for _, ring := range r.Rings { // a misspelt ring must not let the next one begin at once
		if len(nodes) > 0 && !slices.ContainsFunc(all, func(n *updateNode) bool { return ring.selector.Matches(labels.Set(n.labels)) }) {
			bad("no node is in ring %s: correct it (see kubectl get nodes --show-labels), or leave it out", ring.Name)
		}
	}
	if l := names(func(n *updateNode) bool { return n.labels[archLabel] != "" && n.labels[archLabel] != r.Info.Arch }); l != "" {
		bad("the image is for %s, and these nodes have another architecture: %s: %s", r.Info.Arch, l, r.exclude(archLabel+"="+r.Info.Arch))
	}
	if l := names(func(n *updateNode) bool { return n.controlPlane }); l != "" && !r.Info.ControlPlaneUpdates {
		bad("the image does not support control-plane nodes (nodeTypes), or was made by an older edgebake, but the selectors match control-plane nodes: %s: %s", l, r.exclude("!"+kubeapi.ControlPlaneLabel))
	} else if l := names(func(n *updateNode) bool {
		return n.controlPlane && semver.MajorMinor(n.kubelet) != semver.MajorMinor(r.Info.Kubernetes)
	}); l != "" {
		bad("the image has Kubernetes %s, but these control-plane nodes have another minor version: %s: control-plane nodes accept only patch releases; %s", r.Info.Kubernetes, l, r.exclude("!"+kubeapi.ControlPlaneLabel))
	}
	var higher []string
	for _, n := range nodes {
		if serial := n.answer.Serial; n.answered && serial > r.Info.UpdateSerial {
			higher = append(higher, fmt.Sprintf("%s (%d)", n.name, serial))
		}
	}
	if len(higher) > 0 {
		bad("the image has serial %d, but these nodes report an image with a higher serial: %s: build the image with a higher updates.serial; if a node reports a serial that was never built, leave it out with the selectors", r.Info.UpdateSerial, firstNames(higher))
	}
	if len(nodes) > 0 && names(func(n *updateNode) bool { return n.answered }) == "" {
		bad("none of the %s has announced yet that it accepts orders (annotation %s): a node does so within 15 minutes after it starts, if its image supports orders", configs.Count(len(nodes), "node"), order.AnnotationAnswer)
	}
	return errors.Join(append(errs, underWay(r.otherUpdates(all)))...)
}

// exclude returns the flags that add a requirement to the selectors of all rings.
func (r *Rollout) exclude(requirement string) string {
	if len(r.Rings) == 0 {
		return "exclude them with -l '" + requirement + "'"
	}
	var flags []string
	label, _, _ := strings.Cut(strings.TrimPrefix(requirement, "!"), "=")
	for _, ring := range r.Rings {
		if strings.Contains(ring.selector.String(), label) {
			continue // the ring is about this label
		}
		flags = append(flags, "-l '"+strings.TrimPrefix(ring.selector.String()+","+requirement, ",")+"'")
	}
	if flags == nil {
		return "exclude them with the selectors"
	}
	return "exclude them with these selectors, in place of --rings or --selector: " + strings.Join(flags, " ")
}

// underWay returns an error for updates to other images, which otherUpdates or otherRollouts found.
func underWay(other map[string][]string) error {
	var errs []error
	for _, golden := range slices.Sorted(maps.Keys(other)) {
		errs = append(errs, fmt.Errorf("another update is under way, to the image with the golden digest %s, on %s: wait until it ends, or end it with edgebake cluster update --stop", shortDigest(golden), firstNames(other[golden])))
	}
	return errors.Join(errs...)
}

// otherUpdates returns the names of nodes that are being updated to other images, keyed by the
// image's golden digest.
func (r *Rollout) otherUpdates(all []*updateNode) map[string][]string {
	other := r.otherRollouts(all)
	for _, n := range all {
		if o, err := order.Parse(n.order); err == nil && o.Golden != r.Order.Golden && !slices.Contains(other[n.mark.Golden], n.name) && !(n.answer.Order == o.Key() && (n.answer.State == order.StateDone || n.answer.State == order.StateFailed)) {
			other[o.Golden] = append(other[o.Golden], n.name)
		}
	}
	return other
}

// ended reports whether the machine has answered the order of its mark with a result. A stopped
// rollout does not record this result in the mark.
func (n *updateNode) ended() bool {
	o, err := order.Parse(n.answer.Order)
	return err == nil && o.Golden == n.mark.Golden && (n.answer.State == order.StateDone || n.answer.State == order.StateFailed || n.answer.State == order.StateWithdrawn)
}

// otherRollouts is otherUpdates without the orders that a person has written. It is for two rollouts
// that begin at the same time: neither takes the other's nodes.
func (r *Rollout) otherRollouts(all []*updateNode) map[string][]string {
	other := map[string][]string{}
	for _, n := range all {
		if r.inOther(n) {
			other[n.mark.Golden] = append(other[n.mark.Golden], n.name)
		}
	}
	return other
}

// inOther reports whether another rollout updates a node.
func (r *Rollout) inOther(n *updateNode) bool {
	return n.mark.Golden != "" && !r.ours(n) && n.mark.Result == "" && !n.mark.Given.IsZero() && !n.ended()
}

const archLabel = "kubernetes.io/arch"

// shortDigest returns the beginning of a digest, for use in messages.
func shortDigest(digest string) string { return digest[:min(12, len(digest))] }

// firstNames lists the first names, and how many more there are.
func firstNames(names []string) string {
	const most = 5
	if more := len(names) - most; more > 0 {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(names, ", ")
}

// rolloutAction is a change of a Node by a rollout; "" is none.
type rolloutAction string

const (
	actGive     rolloutAction = "give"     // write the order, with hold
	actDrain    rolloutAction = "drain"    // cordon
	actEvict    rolloutAction = "evict"    // evict pods; when none is left, release
	actRelease  rolloutAction = "release"  // write the order without hold
	actFinish   rolloutAction = "finish"   // remove the order, uncordon, record the result
	actWithdraw rolloutAction = "withdraw" // remove the order, uncordon
	actUndrain  rolloutAction = "undrain"  // uncordon, but leave the order
	actRetry    rolloutAction = "retry"    // forget the result
	actCorrect  rolloutAction = "correct"  // replace times in the future, and write those of the history
)

type rolloutAct struct {
	node           *updateNode
	what           rolloutAction
	result, reason string // of actFinish
}

// rolloutPlan lists the next actions of a rollout.
type rolloutPlan struct {
	acts []rolloutAct
	// ended is set if nothing is left to do and no machine is awaited.
	ended bool
	// stuck is the name of a ring in which no node runs the image, so that no later ring begins.
	stuck string
	// waits is the event that the rollout waits for, unless it waits only for machines.
	waits string
	// states maps each state to the names of the nodes in it.
	states map[string][]string
	// rejected has the errors of changes that the API server rejected.
	rejected []string
	// halted is the value of order.AnnotationHalt if any node has one.
	halted string
	// queued lists the nodes that could restart, but have to wait until the rollout lets them.
	queued []string
	free   bool // the rollout is not halted, its budget is not used up, and its window is open
	budget int
	spent  bool // the budget is used up, now or earlier in this run
}

// haltOf returns the value of order.AnnotationHalt that any node has; haltStopped takes precedence.
func haltOf(all []*updateNode) (halt string) {
	for _, n := range all {
		if n.halt == haltStopped {
			return haltStopped
		}
		halt = cmp.Or(halt, n.halt)
	}
	return halt
}

// withEarlier adds the nodes that an earlier run of this rollout, perhaps with other selectors, has
// begun to update.
func (r *Rollout) withEarlier(all, nodes []*updateNode) []*updateNode {
	for _, n := range all {
		if r.ours(n) && n.mark.Result == "" && !n.mark.Given.IsZero() && !slices.Contains(nodes, n) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// plan returns the next actions. The result depends only on the arguments and on the rollout's
// configuration.
func (r *Rollout) plan(all []*updateNode, past *history, now time.Time) rolloutPlan {
	p := rolloutPlan{states: map[string][]string{}, halted: haltOf(all)}
	rings := r.selectNodes(all)
	nodes := r.withEarlier(all, slices.Concat(rings...))
	parallel := r.Parallel.of(len(nodes))
	p.budget = r.Budget.of(len(nodes))
	count := r.count(&p, nodes, past, now)
	spent := past.spent || count.failed >= p.budget || count.controlPlaneFailed
	p.spent = spent
	free := p.halted == "" && !spent && r.Window.Open(now)
	p.free = free
	switch {
	case p.halted != "":
		p.waits = "edgebake cluster update --resume: the updates are " + p.halted
	case !spent && !free:
		p.waits = "the window " + r.Window.String()
	}
	for _, n := range nodes {
		act := r.next(n, past, now, limits{spent: spent, free: free, restart: free && count.atRisk < p.budget})
		if act.what == "" && n.ready && r.state(n) == UpdateHeld {
			p.queued = append(p.queued, n.name)
		}
		if act.what == "" || act.what == actFinish { // count has planned actFinish
			continue
		}
		if act.what == actDrain || act.what == actRelease {
			count.atRisk++
		}
		p.acts = append(p.acts, act)
	}
	ring, waits, stuck := r.ring(rings, now)
	p.stuck = stuck
	if waits != "" && free {
		p.waits = waits
	}
	if slices.ContainsFunc(ring, func(n *updateNode) bool { return n.controlPlane }) {
		parallel = 1
	}
	left := false
	for _, n := range ring {
		if r.state(n) != UpdatePending {
			continue
		}
		left = true
		if act := r.next(n, past, now, limits{begin: free && count.flying < parallel}); act.what != "" {
			count.flying++
			p.acts = append(p.acts, act)
		}
	}
	p.ended = len(p.acts) == 0 && count.flying == 0 && (spent || !left && waits == "")
	return p
}

// rolloutCount counts nodes.
type rolloutCount struct {
	flying int // have an order that has not ended
	atRisk int // drained or restarting, or failed after the order was released
	failed int
	// controlPlaneFailed is set if a control-plane node has failed. Then no other control-plane
	// node is updated, whatever the budget.
	controlPlaneFailed bool
}

// count counts nodes by their states, and plans actFinish for each update that has ended.
func (r *Rollout) count(p *rolloutPlan, nodes []*updateNode, past *history, now time.Time) (c rolloutCount) {
	for _, n := range nodes {
		state := r.state(n)
		if act := r.next(n, past, now, limits{}); act.what == actFinish {
			p.acts = append(p.acts, act)
			switch {
			case !n.contested:
				state = act.result
			case act.result == UpdateFailed:
				state = act.result
				c.flying++
			}
		}
		p.states[state] = append(p.states[state], n.name)
		if n.rejected != "" {
			p.rejected = append(p.rejected, n.rejected)
		}
		switch state {
		case UpdateFailed:
			c.failed++
			c.controlPlaneFailed = c.controlPlaneFailed || n.controlPlane
			if !n.mark.Released.IsZero() {
				c.atRisk++
			}
		case UpdateFetching, UpdateHeld:
			c.flying++
		case UpdateDraining, UpdateRestarts:
			c.flying++
			c.atRisk++
		}
	}
	return c
}

// ring returns the nodes of the first incomplete ring. If the rollout has to wait before that ring,
// ring returns no nodes, and waits names the condition that it waits for. If no node of a
// finished ring runs the image, stuck is the name of that ring, and no later ring may begin.
func (r *Rollout) ring(rings [][]*updateNode, now time.Time) (ring []*updateNode, waits, stuck string) {
	for i, nodes := range rings {
		var last time.Time
		var lastNode string
		var unready []string
		done := 0
		for _, n := range nodes {
			switch r.state(n) {
			case UpdatePending, UpdateFetching, UpdateHeld, UpdateDraining, UpdateRestarts:
				return nodes, "", ""
			case UpdateDone:
				done++
				if ended := n.mark.corrected(now).Ended; r.ours(n) && ended.After(last) {
					last, lastNode = ended, n.name
				}
				if !n.ready {
					unready = append(unready, n.name)
				}
			}
		}
		if i == len(rings)-1 {
			break
		}
		name := r.ringName(i)
		switch left := last.Add(r.Soak).Sub(now); {
		case len(nodes) > 0 && done == 0:
			return nil, "", name
		case last.IsZero():
		case len(unready) > 0:
			return nil, "nodes of ring " + name + " to be Ready: " + firstNames(unready), ""
		case left > 0:
			return nil, fmt.Sprintf("ring %s, which soaks until %s; %s was updated last", name, now.Add(left).Format(time.DateTime), lastNode), ""
		}
	}
	return nil, "", ""
}

// atBegin returns the action that a Node needs when the command starts; "" for none.
func (r *Rollout) atBegin(n *updateNode, now time.Time) rolloutAction {
	switch {
	case r.state(n) == UpdateDraining && (r.Order.NoDrain || now.Sub(n.mark.Drain) > r.Drain):
		return actUndrain // an earlier run was killed: nothing has drained this node since
	case r.replaced(n), r.Retry && r.state(n) == UpdateFailed && !r.runs(n):
		return actRetry
	}
	return ""
}

// replaced reports whether a node that was updated runs another image now, for example because its
// disk was flashed again.
func (r *Rollout) replaced(n *updateNode) bool {
	return r.ours(n) && n.mark.Result == UpdateDone && n.answered && n.answer.Plan != r.Info.Plan
}

// nodePatch is a change of a Node.
type nodePatch struct {
	version     string         // of the Node; another version is a conflict
	annotations map[string]any // by key: the new value, or nil to remove it
	spec        map[string]any // by field: the new value, or nil to remove it
}

// merge returns the JSON merge patch.
func (p *nodePatch) merge() map[string]any {
	out := map[string]any{"metadata": map[string]any{"resourceVersion": p.version, "annotations": p.annotations}}
	if len(p.spec) > 0 {
		out["spec"] = p.spec
	}
	return out
}

// patchOf returns the patch that carries out an action on a Node, including the Node's new
// mark.
func (r *Rollout) patchOf(a rolloutAct, now time.Time) *nodePatch {
	n, m := a.node, a.node.mark
	now = now.UTC().Truncate(time.Second)
	annotations, spec := map[string]any{}, map[string]any{}
	uncordon := func() {
		if m.Cordoned {
			spec["unschedulable"], m.Cordoned = nil, false
		}
	}
	switch a.what {
	case actGive:
		if !r.ours(n) {
			m = rolloutMark{Golden: r.Order.Golden, Cordoned: m.Cordoned}
		}
		uncordon()
		m.Given, m.Drain, m.Released = now, time.Time{}, time.Time{}
		annotations[order.AnnotationOrder] = r.orderOf(m, true).String()
	case actDrain:
		m.Drain, m.Cordoned = now, !n.unschedulable
		spec["unschedulable"] = true
	case actRelease:
		m.Released = now
		annotations[order.AnnotationOrder] = r.orderOf(m, false).String()
	case actUndrain:
		uncordon()
		m.Drain = time.Time{}
	case actWithdraw:
		uncordon()
		m.Given, m.Drain, m.Released = time.Time{}, time.Time{}, time.Time{}
		annotations[order.AnnotationOrder] = nil
	case actCorrect:
		m = m.corrected(now)
	case actRetry:
		m = rolloutMark{Golden: m.Golden, Try: m.Try + 1}
		annotations[order.AnnotationOrder] = nil
	case actFinish:
		uncordon()
		if !r.ours(n) {
			m = rolloutMark{Golden: r.Order.Golden}
		}
		m.Ended, m.Result, m.Reason = now, a.result, a.reason
		annotations[order.AnnotationOrder] = nil
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic("BUG: " + err.Error()) // cannot fail: it has only strings and times
	}
	annotations[annotationRollout] = string(b)
	return &nodePatch{version: n.version, annotations: annotations, spec: spec}
}
