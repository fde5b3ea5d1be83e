package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/test/fleettest"
)

const (
	oldPlan = "0123456789abcdef"
	newPlan = "fedcba9876543210"
)

// fleet is a cluster whose machines answer orders.
type fleet struct {
	t *testing.T
	*fleettest.Server
	client   *Client
	mu       sync.Mutex
	machines map[string]*fleettest.Machine
	// The highest numbers that were seen at any time.
	atRisk, orders int
	end            chan struct{}
	before         func()        // before each step of the machines
	now            time.Time     // of simulate
	pace           time.Duration // between two steps of simulate
	told           []string
}

func newFleet(t *testing.T) *fleet {
	f := newStill(t)
	var running sync.WaitGroup
	running.Go(f.run)
	t.Cleanup(func() { close(f.end); running.Wait() })
	return f
}

// newStill returns a fleet whose machines take a step only when the test calls for it.
func newStill(t *testing.T) *fleet {
	f := &fleet{t: t, Server: fleettest.New(), machines: map[string]*fleettest.Machine{}, end: make(chan struct{})}
	t.Cleanup(f.Close)
	var err error
	if f.client, err = newClient(&rest.Config{Host: f.URL, QPS: -1}); err != nil {
		t.Fatal(err)
	}
	return f
}

// simulate carries out a rollout without a client: each machine takes one step per second, or pace.
// left is the number of pods that stay on a node.
func (f *fleet) simulate(r *Rollout, left func(node string) int) error {
	f.t.Helper()
	begun := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	f.now = begun
	past := newHistory()
	for range 20_000 {
		var all []*updateNode
		for _, name := range f.Nodes() {
			all = append(all, updateNodeOf(&unstructured.Unstructured{Object: f.Get(name)}))
		}
		sortNodes(all)
		past.observe(r, all, f.now, f.now.Sub(begun))
		p := r.plan(all, past, f.now)
		past.planned(p, f.now)
		if p.ended {
			return p.result(r)
		}
		for _, a := range p.acts {
			if a.what == actEvict {
				if left != nil && left(a.node.name) > 0 {
					continue
				}
				a.what = actRelease
			}
			f.Change(a.node.name, r.patchOf(a, f.now).merge())
			past.acted(a, updateNodeOf(&unstructured.Unstructured{Object: f.Get(a.node.name)}))
		}
		f.step()
		f.now = f.now.Add(cmp.Or(f.pace, time.Second))
	}
	f.t.Fatal("the rollout did not end in time")
	return nil
}

// add adds machines whose updates have this outcome.
func (f *fleet) add(outcome string, labels map[string]string, names ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range names {
		f.Node(name, labels, map[string]string{order.AnnotationAnswer: order.Answer{Plan: oldPlan, Serial: 1}.String()})
		f.machines[name] = fleettest.NewMachine(name, outcome, oldPlan, newPlan)
	}
}

// run makes each machine take steps until the test ends.
func (f *fleet) run() {
	for {
		select {
		case <-f.end:
			return
		case <-time.After(time.Millisecond):
		}
		f.step()
	}
}

func (f *fleet) step() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.before != nil {
		f.before()
	}
	atRisk := 0
	orders := f.Count(func(node fleettest.Object) bool {
		return node["metadata"].(fleettest.Object)["annotations"].(fleettest.Object)[order.AnnotationOrder] != nil
	})
	for name, m := range f.machines {
		node := f.Get(name)
		if node == nil {
			continue
		}
		a := node["metadata"].(fleettest.Object)["annotations"].(fleettest.Object)
		text, _ := a[order.AnnotationOrder].(string)
		_, halted := a[order.AnnotationHalt]
		ready := m.Ready
		answer := m.Step(text, halted).String()
		if a[order.AnnotationAnswer] != answer {
			f.Annotate(name, fleettest.Object{order.AnnotationAnswer: answer})
		}
		if m.Ready != ready {
			f.Ready(name, m.Ready)
		}
		if m.AtRisk {
			atRisk++
		}
	}
	f.atRisk, f.orders = max(f.atRisk, atRisk), max(f.orders, orders)
}

func rollout(change func(*Rollout)) *Rollout {
	r := &Rollout{Order: order.Order{Image: "https://images.example.com/edge.raw.zst", Golden: strings.Repeat("ab", 32)},
		Info:  ondisk.ImageInfo{Plan: newPlan, Arch: "amd64", Kubernetes: "v1.37.2", UpdateSerial: 2},
		Drain: 10 * time.Minute, Restart: 10 * time.Minute, Fetch: time.Hour, Tick: 5 * time.Millisecond}
	if change != nil {
		change(r)
	}
	return r
}

func (f *fleet) update(ctx context.Context, r *Rollout) error {
	return f.client.Update(ctx, r, func(row UpdateRow) { f.told = append(f.told, row.Node+" "+row.State) }, func(string) {})
}

// updated returns the machines that keep the new system.
func (f *fleet) updated() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, m := range f.machines {
		if m.Plan == newPlan && !m.AtRisk {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// clean checks that a rollout leaves nothing in the Nodes except its marks.
func (f *fleet) clean() {
	f.t.Helper()
	for _, name := range f.Nodes() {
		if o := f.Annotation(name, order.AnnotationOrder); o != "" || f.Cordoned(name) {
			f.t.Errorf("%s: order %q, cordoned %v", name, o, f.Cordoned(name))
		}
	}
}

func share(text string) (s Share) {
	if err := s.Set(text); err != nil {
		panic(err)
	}
	return s
}

func names(prefix string, n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("%s%d", prefix, i))
	}
	return out
}

// TestRollout checks that nodes are updated one after another, and drained before the restart. A
// Node that somebody else cordoned stays cordoned.
func TestRollout(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "shop-2", "shop-10", "shop-1")
	f.Change("shop-10", fleettest.Object{"spec": fleettest.Object{"unschedulable": true}})
	f.Pod("default", "web", "shop-1", "ReplicaSet")
	f.Pod("default", "agent", "shop-1", "DaemonSet")
	f.Pod("default", "bare", "shop-1", "")
	refusals := 2
	f.Evicted = func(path string, cordoned bool) int {
		if path != "/api/v1/namespaces/default/pods/web" || !cordoned {
			t.Errorf("%s was evicted; its node was cordoned: %t", path, cordoned)
		}
		if refusals--; refusals >= 0 {
			return http.StatusTooManyRequests
		}
		return 0
	}
	if err := f.update(t.Context(), rollout(nil)); err != nil {
		t.Fatal(err)
	}
	if got := f.updated(); len(got) != 3 || f.atRisk != 1 || f.orders != 1 {
		t.Errorf("%q were updated, at most %d at once, %d at risk", got, f.orders, f.atRisk)
	}
	var done []string
	for _, l := range f.told {
		if name, ok := strings.CutSuffix(l, " "+UpdateDone); ok {
			done = append(done, name)
		}
	}
	if strings.Join(done, " ") != "shop-1 shop-2 shop-10" || !slices.Contains(f.told, "shop-1 "+UpdateDraining) {
		t.Errorf("the reported rows are %q", f.told)
	}
	if !f.Cordoned("shop-10") {
		t.Error("the rollout uncordoned a node that somebody else had cordoned")
	}
	f.Change("shop-10", fleettest.Object{"spec": fleettest.Object{"unschedulable": nil}})
	f.clean()
	// A second run changes nothing.
	before := f.machines["shop-1"].Restarts
	if err := f.update(t.Context(), rollout(nil)); err != nil || f.machines["shop-1"].Restarts != before {
		t.Errorf("%v, %d restarts", err, f.machines["shop-1"].Restarts)
	}
}

// TestRolloutBudget checks that a rollout ends when its budget is used up, and never exceeds the
// budget, however many nodes fail or fetch.
func TestRolloutBudget(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		budget, parallel string
		bad              string
		most             int
	}{
		{"1", "1", fleettest.Bad, 1},
		{"1", "20", fleettest.Bad, 1},
		{"3", "20", fleettest.Bad, 3},
		{"10%", "50%", fleettest.Dead, 4},
		{"2", "5", fleettest.Rejects, 0},
	} {
		f := newStill(t)
		f.add(fleettest.Works, nil, names("a-", 10)...)
		f.add(c.bad, nil, names("b-", 30)...)
		r := rollout(func(r *Rollout) {
			r.Budget, r.Parallel, r.Order.NoDrain = share(c.budget), share(c.parallel), c.parallel == "20"
			r.Restart = time.Minute
		})
		err := f.simulate(r, nil)
		if err == nil || !strings.Contains(err.Error(), "is used up") {
			t.Errorf("%+v: %v", c, err)
		}
		// When the budget is used up, the order may still be on hold for up to Parallel working
		// nodes.
		if f.atRisk > r.Budget.of(40) || len(f.updated()) < 10-r.Parallel.of(40) {
			t.Errorf("%+v: %d at risk, %d updated", c, f.atRisk, len(f.updated()))
		}
		restarted := 0
		for name, m := range f.machines {
			if strings.HasPrefix(name, "b-") {
				restarted += m.Restarts
			}
		}
		if restarted > c.most {
			t.Errorf("%+v: %d bad machines restarted", c, restarted)
		}
		f.clean()
		// The budget stays used up if the command is repeated.
		if err := f.simulate(r, nil); err == nil {
			t.Errorf("%+v: the second run succeeded, want an error", c)
		}
	}
}

// TestRolloutRejected checks that if the API server rejects the changes of a Node, for example
// because of an admission webhook, that node has failed, and the others are updated. A Node that is
// deleted meanwhile has not failed.
func TestRolloutRejected(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		budget  string
		reject  func(answer order.Answer) bool
		updated int
		want    string
	}{
		{"2", func(order.Answer) bool { return true }, 3, "updating nodes: 1 failed: shop-2"},
		{"2", func(a order.Answer) bool { return a.State == order.StateHeld }, 3, "updating nodes: 1 failed: shop-2"},
		{"2", func(a order.Answer) bool { return a.Plan == newPlan }, 4, "updating nodes: 1 failed: shop-2"},
		{"1", func(order.Answer) bool { return true }, 1, "the budget (1) is used up"},
	} {
		f := newFleet(t)
		f.add(fleettest.Works, nil, "shop-1", "shop-2", "shop-3", "shop-4", "shop-5")
		f.Before = func(r *http.Request) int {
			if r.Method != http.MethodPatch {
				return 0
			}
			if strings.HasSuffix(r.URL.Path, "/shop-3") {
				f.Delete("shop-3")
			}
			if strings.HasSuffix(r.URL.Path, "/shop-2") && c.reject(order.ParseAnswer(f.Annotation("shop-2", order.AnnotationAnswer))) {
				return http.StatusForbidden
			}
			return 0
		}
		err := f.update(t.Context(), rollout(func(r *Rollout) { r.Budget = share(c.budget) }))
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "changing node shop-2: ") {
			t.Errorf("%+v: %v", c, err)
		}
		if got := f.updated(); len(got) != c.updated || !slices.Contains(f.told, "shop-2 "+UpdateFailed) {
			t.Errorf("%+v: %q were updated; reported %q", c, got, f.told)
		}
	}
}

// TestRolloutKilled checks that a rollout that is killed at any point and run again has the same
// result, and that no machine restarts twice.
func TestRolloutKilled(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, names("a-", 25)...)
	f.add(fleettest.Slow, nil, names("c-", 5)...)
	f.add(fleettest.Bad, nil, "z-1", "z-2")
	for i := range 6 {
		f.Pod("default", fmt.Sprint("web-", i), fmt.Sprint("a-", i), "ReplicaSet")
	}
	chance := rand.New(rand.NewPCG(1, 2))
	for runs := 1; ; runs++ {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+chance.IntN(60))*time.Millisecond)
		err := f.update(ctx, rollout(func(r *Rollout) { r.Parallel, r.Budget = share("6"), share("3") }))
		killed := ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || err != nil && strings.Contains(err.Error(), "context"))
		cancel()
		if killed {
			continue
		}
		if err == nil || !strings.Contains(err.Error(), "2 failed: z-1, z-2") {
			t.Fatal(err)
		}
		if runs < 3 {
			t.Errorf("the rollout was killed only %d times", runs-1)
		}
		break
	}
	if len(f.updated()) != 30 || f.atRisk > 3 || f.orders > 6 {
		t.Errorf("%d updated, at most %d orders, %d at risk", len(f.updated()), f.orders, f.atRisk)
	}
	for name, m := range f.machines {
		if m.Restarts != 1 {
			t.Errorf("%s restarted %d times", name, m.Restarts)
		}
	}
	f.clean()
}

// TestRolloutRings checks that a ring begins only after all nodes of the ring before it are updated
// and have stayed Ready.
func TestRolloutRings(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, map[string]string{"ring": "canary"}, "c-1", "c-2")
	f.add(fleettest.Works, map[string]string{"ring": "shops"}, "s-1", "s-2")
	f.add(fleettest.Works, map[string]string{"ring": "never"}, "n-1")
	r := rollout(func(r *Rollout) { r.Parallel, r.Soak = share("10"), 6*time.Second })
	r.Rings, _ = Rings("ring=canary,shops")
	began := time.Now()
	var soaks []string
	err := f.client.Update(t.Context(), r, func(row UpdateRow) { f.told = append(f.told, row.Node+" "+row.State) }, func(text string) {
		if strings.Contains(text, "soaks until") {
			soaks = append(soaks, text)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(soaks) != 1 || !strings.Contains(soaks[0], "waiting for ring canary") {
		t.Errorf("the notes of the soak are %q", soaks)
	}
	if got := strings.Join(f.updated(), " "); got != "c-1 c-2 s-1 s-2" {
		t.Error(got)
	}
	if took := time.Since(began); took < 5*time.Second { // Ended has a precision of seconds
		t.Errorf("the ring soaked for %s", took)
	}
	first := slices.IndexFunc(f.told, func(l string) bool { return strings.HasPrefix(l, "s-") })
	if first < slices.Index(f.told, "c-1 "+UpdateDone) || first < slices.Index(f.told, "c-2 "+UpdateDone) {
		t.Errorf("the reported rows are %q", f.told)
	}
	f.clean()
}

// TestRolloutRingWithoutResult checks that no ring begins after one in which no node runs the image,
// even if the budget allows more failures.
func TestRolloutRingWithoutResult(t *testing.T) {
	t.Parallel()
	for _, outcome := range []string{fleettest.Bad, fleettest.Rejects, "notReady", fleettest.Works} {
		f := newStill(t)
		f.add(outcome, map[string]string{"ring": "canary"}, "c-1")
		f.add(fleettest.Works, map[string]string{"ring": "shops"}, "s-1", "s-2")
		if outcome == "notReady" {
			f.machines["c-1"].Ready = false
			f.Ready("c-1", false)
		}
		r := rollout(func(r *Rollout) { r.Parallel, r.Budget, r.Restart = share("10"), share("3"), time.Minute })
		r.Rings, _ = Rings("ring=canary,shops")
		err := f.simulate(r, nil)
		if outcome == fleettest.Works {
			if err != nil || len(f.updated()) != 3 {
				t.Errorf("%v, %q", err, f.updated())
			}
		} else if err == nil || !strings.Contains(err.Error(), "no node of ring canary runs the image") || len(f.updated()) > 0 {
			t.Errorf("%s: %v, updated %q", outcome, err, f.updated())
		}
		f.clean()
	}
}

// TestRolloutHalted checks that after --pause nothing continues. After --stop no order is left and
// the rollout ends; after --resume it can be run again.
func TestRolloutHalted(t *testing.T) {
	t.Parallel()
	for _, stop := range []bool{false, true} {
		f := newFleet(t)
		f.add(fleettest.Works, nil, names("a-", 8)...)
		f.add(fleettest.Slow, nil, names("b-", 8)...)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		r := rollout(func(r *Rollout) { r.Parallel, r.Budget = share("4"), share("2") })
		go func() { ended <- f.update(ctx, r) }()
		for len(f.updated()) < 3 {
			time.Sleep(time.Millisecond)
		}
		if n, err := f.client.HaltUpdates(t.Context(), stop); err != nil || n != 16 {
			t.Errorf("%d nodes were halted: %v", n, err)
		}
		if stop {
			if err := <-ended; !errors.Is(err, ErrHalted) {
				t.Errorf("stopped: %v", err)
			}
			for _, name := range f.Nodes() {
				if o := f.Annotation(name, order.AnnotationOrder); o != "" {
					t.Errorf("%s still has an order", name)
				}
			}
			if err := f.update(ctx, r); !errors.Is(err, ErrHalted) {
				t.Errorf("run again while stopped: %v", err)
			}
		}
		for had := -1; had != len(f.updated()); { // machines that are restarting complete their updates
			had = len(f.updated())
			time.Sleep(100 * time.Millisecond)
		}
		if len(f.updated()) == 16 {
			t.Error("all machines were updated while halted")
		}
		if n, err := f.client.ResumeUpdates(t.Context()); err != nil || n != 16 {
			t.Errorf("%d nodes were resumed: %v", n, err)
		}
		if stop {
			go func() { ended <- f.update(ctx, r) }()
		}
		if err := <-ended; err != nil {
			t.Errorf("resumed: %v", err)
		}
		cancel()
		if len(f.updated()) != 16 || f.atRisk > 2 || f.orders > 4 {
			t.Errorf("%d updated, %d at risk, %d orders", len(f.updated()), f.atRisk, f.orders)
		}
		for name, m := range f.machines {
			if m.Restarts != 1 {
				t.Errorf("%s restarted %d times", name, m.Restarts)
			}
		}
		f.clean()
	}
}

// mark gives a Node an order of the rollout, with the mark that an earlier run left, and the
// machine's answer.
func (f *fleet) mark(r *Rollout, name, state string, m rolloutMark) {
	f.t.Helper()
	m.Golden = r.Order.Golden
	b, err := json.Marshal(m)
	if err != nil {
		f.t.Fatal(err)
	}
	o := r.orderOf(m, m.Released.IsZero())
	f.Annotate(name, fleettest.Object{annotationRollout: string(b), order.AnnotationOrder: o.String(),
		order.AnnotationAnswer: order.Answer{Plan: oldPlan, Serial: 1, Order: o.Key(), State: state}.String()})
	f.Change(name, fleettest.Object{"spec": fleettest.Object{"unschedulable": m.Cordoned}})
}

// plans returns the actions now of a run that has just begun.
func (f *fleet) plans(r *Rollout) []string {
	f.t.Helper()
	return f.plansAfter(r, newHistory())
}

func (f *fleet) plansAfter(r *Rollout, past *history) (out []string) {
	f.t.Helper()
	all, err := f.client.updateNodes(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	for _, a := range r.plan(all, past, time.Now()).acts {
		out = append(out, strings.TrimSpace(a.node.name+" "+string(a.what)+" "+a.result))
	}
	return out
}

// TestRolloutKilledInDrain checks that a command which was killed while it drained a node, and is run
// again after the time limit, drains that node again: it has not failed.
func TestRolloutKilledInDrain(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-1")
	r := rollout(nil)
	ago := time.Now().Add(-r.Fetch / 2)
	f.mark(r, "a-1", order.StateHeld, rolloutMark{Given: ago, Drain: ago, Cordoned: true})
	if err := f.update(t.Context(), r); err != nil || len(f.updated()) != 1 {
		t.Errorf("%v, updated %q", err, f.updated())
	}
	f.clean()
}

// TestRolloutKilledInDrainThenNoDrain checks that a run with NoDrain does not continue the drain of an
// earlier run that was killed.
func TestRolloutKilledInDrainThenNoDrain(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-1")
	f.Pod("default", "web", "a-1", "ReplicaSet")
	f.Evicted = func(path string, _ bool) int {
		t.Errorf("%s was evicted", path)
		return 0
	}
	r := rollout(func(r *Rollout) { r.Order.NoDrain = true })
	f.mark(r, "a-1", order.StateHeld, rolloutMark{Given: time.Now(), Drain: time.Now(), Cordoned: true})
	if err := f.update(t.Context(), r); err != nil || len(f.updated()) != 1 {
		t.Errorf("%v, updated %q", err, f.updated())
	}
	f.clean()
}

// TestRolloutClock checks that a mark from a computer whose clock was a year ahead delays no ring.
func TestRolloutClock(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, map[string]string{"ring": "canary"}, "c-1")
	f.add(fleettest.Works, map[string]string{"ring": "shops"}, "s-1")
	r := rollout(func(r *Rollout) { r.Soak = time.Second })
	r.Rings, _ = Rings("ring=canary,shops")
	if err := f.update(t.Context(), rollout(func(r *Rollout) { r.Rings = selector(t, "ring=canary") })); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(rolloutMark{Golden: r.Order.Golden, Ended: time.Now().AddDate(1, 0, 0), Result: UpdateDone})
	if err != nil {
		t.Fatal(err)
	}
	f.Annotate("c-1", fleettest.Object{annotationRollout: string(b)})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := f.update(ctx, r); err != nil || len(f.updated()) != 2 {
		t.Errorf("%v, updated %q", err, f.updated())
	}
}

// TestRolloutPaused checks that a pause that is longer than the time limits fails no node.
func TestRolloutPaused(t *testing.T) {
	t.Parallel()
	ago := time.Now().Add(-72 * time.Hour)
	for _, c := range []struct {
		state         string
		mark          rolloutMark
		paused, after string
	}{
		{order.StateWithdrawn, rolloutMark{Given: ago}, "", ""},
		{order.StateHeld, rolloutMark{Given: ago, Drain: ago, Cordoned: true}, "a-1 undrain", "a-1 evict"},
		{order.StateWithdrawn, rolloutMark{Given: ago, Drain: ago, Released: ago, Cordoned: true}, "a-1 withdraw", "a-1 withdraw"},
		{order.StateTrial, rolloutMark{Given: ago, Drain: ago, Released: ago, Cordoned: true}, "", ""},
	} {
		f, r := newStill(t), rollout(nil)
		f.add(fleettest.Works, nil, "a-1")
		f.mark(r, "a-1", c.state, c.mark)
		if _, err := f.client.HaltUpdates(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(f.plans(r), ", "); got != c.paused {
			t.Errorf("%+v: paused: %q", c, got)
		}
		if _, err := f.client.ResumeUpdates(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(f.plans(r), ", "); got != c.after {
			t.Errorf("%+v: resumed: %q", c, got)
		}
	}
}

// TestRolloutStopUncordons checks that --stop leaves no node cordoned, not even one that is
// restarting: the rollout has ended, so nothing would uncordon the node.
func TestRolloutStopUncordons(t *testing.T) {
	t.Parallel()
	for _, state := range []string{order.StateHeld, order.StateWaiting, order.StateRestarting} {
		f, r, now := newStill(t), rollout(nil), time.Now()
		f.add(fleettest.Works, nil, "a-1")
		f.mark(r, "a-1", state, rolloutMark{Given: now, Drain: now, Released: now, Cordoned: true})
		if _, err := f.client.HaltUpdates(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		f.clean()
		if _, err := f.client.ResumeUpdates(t.Context()); err != nil {
			t.Fatal(err)
		}
		all, err := f.client.updateNodes(t.Context())
		if want := map[bool]string{true: UpdatePending, false: UpdateRestarts}[state == order.StateHeld]; err != nil || r.state(all[0]) != want {
			t.Errorf("%s: %v, %s", state, err, r.state(all[0]))
		}
	}
}

// TestRolloutAfterStop checks that after --stop another image can be rolled out once the machines that
// were restarting have ended their updates. If one is lost, a second --stop forgets its update.
func TestRolloutAfterStop(t *testing.T) {
	t.Parallel()
	for _, state := range []string{order.StateRestarting, order.StateFailed, order.StateDone} {
		f, r, now := newStill(t), rollout(nil), time.Now()
		f.add(fleettest.Works, nil, "a-1")
		f.mark(r, "a-1", state, rolloutMark{Given: now, Drain: now, Released: now, Cordoned: true})
		next := rollout(func(r *Rollout) { r.Order.Golden = strings.Repeat("cd", 32) })
		check := func() error {
			_, err := f.client.CheckRollout(t.Context(), next)
			return err
		}
		for stops := range 2 {
			if _, err := f.client.HaltUpdates(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			if err := check(); (err != nil) != (state == order.StateRestarting && stops == 0) {
				t.Errorf("%s, %d times: %v", state, stops+1, err)
			}
		}
	}
	// The next rollout uncordons the nodes that a killed rollout cordoned.
	f, r := newStill(t), rollout(nil)
	f.add(fleettest.Works, nil, "a-1")
	f.mark(r, "a-1", order.StateFailed, rolloutMark{Given: time.Now(), Cordoned: true})
	next := rollout(func(r *Rollout) { r.Order.Golden = strings.Repeat("cd", 32) })
	all, err := f.client.updateNodes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f.Change("a-1", next.patchOf(next.plan(all, newHistory(), time.Now()).acts[0], time.Now()).merge())
	if f.Cordoned("a-1") || !strings.Contains(f.Annotation("a-1", order.AnnotationOrder), next.Order.Golden) {
		t.Errorf("cordoned %v, order %q", f.Cordoned("a-1"), f.Annotation("a-1", order.AnnotationOrder))
	}
}

// TestRolloutEviction checks that an error of one pod's eviction, such as 403 in a namespace that is
// being deleted, fails only that node, and only after the time limit of its drain.
func TestRolloutEviction(t *testing.T) {
	t.Parallel()
	for _, code := range []int{http.StatusInternalServerError, http.StatusForbidden} {
		t.Run(strconv.Itoa(code), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			f.add(fleettest.Works, nil, "a-1", "a-2")
			f.Pod("gone", "web", "a-1", "ReplicaSet")
			f.Pod("gone", "last", "a-1", "ReplicaSet")
			f.Evicted = func(path string, _ bool) int {
				if strings.HasSuffix(path, "/web") {
					return code
				}
				return 0
			}
			var notes []string
			r := rollout(func(r *Rollout) { r.Parallel, r.Budget, r.Drain = share("2"), share("2"), 6*time.Second })
			err := f.client.Update(t.Context(), r, func(UpdateRow) {}, func(text string) { notes = append(notes, text) })
			if err == nil || !strings.Contains(err.Error(), "1 failed: a-1") || strings.Join(f.updated(), " ") != "a-2" {
				t.Errorf("%v, updated %q", err, f.updated())
			}
			if n := strings.Count(strings.Join(notes, "\n"), "evicting pod gone/web"); n != 1 {
				t.Errorf("the notes are %q", notes)
			}
			if left, err := f.client.evict(t.Context(), "a-1"); left != 1 || err == nil {
				t.Errorf("%d pods are left, %v", left, err)
			}
			f.clean()
		})
	}
}

// TestRolloutsAtOnce checks that of two rollouts to different images, which began at the same time,
// neither takes the other's nodes.
func TestRolloutsAtOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-1", "a-2")
	other := rollout(func(r *Rollout) { r.Order.Golden = strings.Repeat("cd", 32) })
	f.mark(other, "a-2", order.StateHeld, rolloutMark{Given: time.Now(), Drain: time.Now(), Cordoned: true})
	err := f.update(t.Context(), rollout(nil))
	if err == nil || !strings.Contains(err.Error(), "another update is under way, to the image with the golden digest cdcdcdcdcdcd, on a-2") {
		t.Error(err)
	}
	if f.Annotation("a-1", order.AnnotationOrder) != "" || !strings.Contains(f.Annotation("a-2", order.AnnotationOrder), other.Order.Golden) {
		t.Errorf("orders: %q, %q", f.Annotation("a-1", order.AnnotationOrder), f.Annotation("a-2", order.AnnotationOrder))
	}
}

// restless makes a Node change before each patch of it, so that each patch has a conflict.
func (f *fleet) restless(name string) {
	var changes int
	f.Before = func(req *http.Request) int {
		if req.Method == http.MethodPatch && strings.HasSuffix(req.URL.Path, "/nodes/"+name) {
			changes++
			f.Annotate(name, fleettest.Object{"example.com/changes": fmt.Sprint(changes)})
		}
		return 0
	}
}

// TestRolloutRestlessNode checks that a Node that changes all the time, which its machine can do,
// delays no other node, and that the updates of all others can be stopped.
func TestRolloutRestlessNode(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-0", "a-1", "a-2", "a-3")
	f.restless("a-0")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- f.update(ctx, rollout(func(r *Rollout) { r.Parallel, r.Budget = share("4"), share("2") }))
	}()
	for len(f.updated()) < 3 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if got := strings.Join(f.updated(), " "); got != "a-1 a-2 a-3" {
		t.Errorf("updated: %q", got)
	}
	n, err := f.client.HaltUpdates(ctx, true)
	if n != 3 || err == nil || !strings.Contains(err.Error(), "changing node a-0") {
		t.Errorf("%d nodes were halted, %v", n, err)
	}
	if err := <-ended; !errors.Is(err, ErrHalted) {
		t.Error(err)
	}
}

// TestRolloutChangingHalt checks that a Node that is halted and resumed in turn does not have other
// nodes drained without end.
func TestRolloutChangingHalt(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-1", "bad")
	f.Pod("default", "stays", "a-1", "ReplicaSet")
	f.Evicted = func(string, bool) int { return http.StatusTooManyRequests }
	ended := make(chan error, 1)
	go func() { ended <- f.update(t.Context(), rollout(nil)) }()
	for range maxTurns {
		for !f.Cordoned("a-1") {
			time.Sleep(time.Millisecond)
		}
		f.Annotate("bad", fleettest.Object{order.AnnotationHalt: haltPaused})
		for f.Cordoned("a-1") {
			time.Sleep(time.Millisecond)
		}
		f.Annotate("bad", fleettest.Object{order.AnnotationHalt: nil})
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "1 failed: a-1") {
		t.Error(err)
	}
	if m := parseMark(f.Annotation("a-1", annotationRollout)); !strings.Contains(m.Reason, "was drained 10 times") {
		t.Errorf("%+v", m)
	}
}

// TestRolloutSpentStays checks that a rollout whose budget was used up does not go on when the failed
// node reports success, and says so.
func TestRolloutSpentStays(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-1", "a-2", "bad")
	r := rollout(nil)
	f.mark(r, "a-1", order.StateRestarting, rolloutMark{Given: time.Now(), Released: time.Now()})
	f.mark(r, "bad", order.StateFailed, rolloutMark{Given: time.Now(), Ended: time.Now(), Result: UpdateFailed})
	f.mu.Lock()
	delete(f.machines, "a-1")
	f.mu.Unlock()
	ended, seen := make(chan error, 1), make(chan bool, 9)
	go func() {
		ended <- f.client.Update(t.Context(), r, func(row UpdateRow) { seen <- row.Node == "bad" }, func(string) {})
	}()
	for !<-seen {
	}
	f.mu.Lock()
	delete(f.machines, "bad")
	f.mu.Unlock()
	answer := order.Answer{Plan: newPlan, Serial: 2, State: order.StateDone, Order: r.orderOf(rolloutMark{}, false).Key()}.String()
	f.Annotate("bad", fleettest.Object{order.AnnotationAnswer: answer})
	for parseMark(f.Annotation("bad", annotationRollout)).Result != UpdateDone {
		time.Sleep(time.Millisecond)
	}
	f.Annotate("a-1", fleettest.Object{order.AnnotationAnswer: answer})
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "the budget was used up") {
		t.Error(err)
	}
	if got := f.updated(); got != nil {
		t.Errorf("updated: %q", got)
	}
	if err := f.update(t.Context(), r); err != nil || strings.Join(f.updated(), " ") != "a-2" {
		t.Errorf("run again: %v, updated: %q", err, f.updated())
	}
}

// TestRolloutEndsEarly checks that a rollout that is interrupted, halted by one Node, or that meets
// another rollout leaves no node cordoned.
func TestRolloutEndsEarly(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  func(f *fleet, cancel func())
		want string
	}{
		"interrupted": {func(_ *fleet, cancel func()) { cancel() }, "canceled"},
		"halted": {func(f *fleet, _ func()) {
			f.Annotate("a-2", fleettest.Object{order.AnnotationHalt: haltStopped})
		}, "are stopped"},
		"another rollout": {func(f *fleet, _ func()) {
			b, _ := json.Marshal(rolloutMark{Golden: strings.Repeat("cd", 32), Given: time.Now()})
			f.Annotate("a-2", fleettest.Object{annotationRollout: string(b)})
		}, "another update is under way"},
	} {
		f := newFleet(t)
		f.add(fleettest.Works, nil, "a-1", "a-2")
		f.Pod("default", "stays", "a-1", "ReplicaSet")
		f.Evicted = func(string, bool) int { return http.StatusTooManyRequests }
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- f.update(ctx, rollout(nil)) }()
		for !f.Cordoned("a-1") {
			time.Sleep(time.Millisecond)
		}
		c.end(f, cancel)
		if err := <-ended; err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if f.Cordoned("a-1") {
			t.Errorf("%s: a-1 is still cordoned", name)
		}
		cancel()
	}
}

// TestRolloutClosedBeforeItWasRead checks that a released order that the machine has not read is put
// on hold again when the updates are paused, the window closes or the budget is used up. Otherwise a
// machine that was off could restart much later.
func TestRolloutClosedBeforeItWasRead(t *testing.T) {
	t.Parallel()
	for _, change := range []func(*fleet, *Rollout, *history){
		func(f *fleet, _ *Rollout, _ *history) {
			f.Annotate("a-2", fleettest.Object{order.AnnotationHalt: haltPaused})
		},
		func(_ *fleet, r *Rollout, _ *history) {
			from := time.Now().Add(2 * time.Hour)
			if err := r.Window.Set(from.Format("15:04") + "-" + from.Add(time.Hour).Format("15:04")); err != nil {
				t.Error(err)
			}
		},
		func(_ *fleet, _ *Rollout, past *history) { past.spent = true },
	} {
		f, r, now := newStill(t), rollout(nil), time.Now()
		f.add(fleettest.Works, nil, "a-1", "a-2")
		f.mark(r, "a-1", order.StateHeld, rolloutMark{Given: now, Drain: now, Released: now, Cordoned: true})
		if got := f.plans(r); got != nil && !slices.Equal(got, []string{"a-2 give"}) {
			t.Errorf("open: %q", got)
		}
		past := newHistory()
		change(f, r, past)
		if got := f.plansAfter(r, past); !slices.Equal(got, []string{"a-1 give"}) {
			t.Errorf("closed: %q", got)
		}
	}
}

// TestRolloutOfAStolenNode checks that a machine with false claims, which it renews all the time, does
// not hold up a rollout: it fails, and the other nodes are updated.
func TestRolloutOfAStolenNode(t *testing.T) {
	t.Parallel()
	const node, day = "a-stolen", 24 * time.Hour
	var window forms.Window
	if err := window.Set("22:00-05:00"); err != nil {
		t.Fatal(err)
	}
	answer := func(f *fleet, o order.Order, state, step string) {
		f.Annotate(node, fleettest.Object{order.AnnotationAnswer: order.Answer{Plan: oldPlan, Serial: 1, Order: o.Key(), State: state, Step: step}.String()})
	}
	writeMark := func(f *fleet, change func(m *rolloutMark)) {
		m := parseMark(f.Annotation(node, annotationRollout))
		change(&m)
		b, err := json.Marshal(m)
		if err != nil {
			t.Error(err)
		}
		f.Annotate(node, fleettest.Object{annotationRollout: string(b)})
	}
	for name, c := range map[string]struct {
		noDrain bool
		claim   func(f *fleet, o order.Order)
	}{
		"restarts": {false, func(f *fleet, o order.Order) {
			answer(f, o, order.StateHeld, "")
			if !o.Hold {
				answer(f, o, order.StateRestarting, "")
				writeMark(f, func(m *rolloutMark) { m.Given, m.Drain, m.Released = f.now, f.now, f.now })
			}
		}},
		"fetches": {false, func(f *fleet, o order.Order) {
			answer(f, o, order.StateWorking, "root")
			writeMark(f, func(m *rolloutMark) { m.Given = f.now })
		}},
		"waits for its window": {false, func(f *fleet, o order.Order) { answer(f, o, order.StateWaiting, order.StepWindow) }},
		"waits for its window when it may restart": {true, func(f *fleet, o order.Order) {
			answer(f, o, order.StateHeld, "")
			if !o.Hold {
				answer(f, o, order.StateWaiting, order.StepWindow)
			}
		}},
		"removes the order": {false, func(f *fleet, o order.Order) {
			answer(f, o, order.StateWorking, "root")
			f.Annotate(node, fleettest.Object{order.AnnotationOrder: nil})
		}},
		"removes the mark": {false, func(f *fleet, _ order.Order) {
			f.Annotate(node, fleettest.Object{order.AnnotationOrder: nil, annotationRollout: nil})
		}},
		"removes the time of its order": {false, func(f *fleet, o order.Order) {
			answer(f, o, order.StateWorking, "root")
			writeMark(f, func(m *rolloutMark) { m.Given = time.Time{} })
		}},
		"was in another rollout": {false, func(f *fleet, o order.Order) {
			o.Golden = strings.Repeat("cd", 32)
			answer(f, o, order.StateDone, "")
			writeMark(f, func(m *rolloutMark) { *m = rolloutMark{Golden: o.Golden, Given: f.now} })
		}},
		"waits for its turn outside the window of the rollout, and for its own window inside": {false, func(f *fleet, o order.Order) {
			if window.Open(f.now.Add(f.pace)) {
				answer(f, o, order.StateWaiting, order.StepWindow)
			} else {
				answer(f, o, order.StateHeld, "")
			}
		}},
		"is not Ready since now": {false, func(f *fleet, o order.Order) {
			answer(f, o, order.StateHeld, "")
			f.Change(node, fleettest.Object{"status": fleettest.Object{"conditions": []any{fleettest.Object{"type": "Ready", "status": "False", "lastTransitionTime": f.now.Format(time.RFC3339)}}}})
		}},
	} {
		f := newStill(t)
		f.pace = time.Hour
		f.add(fleettest.Works, nil, node, "b-1", "b-2")
		delete(f.machines, node)
		f.before = func() {
			if o, err := order.Parse(f.Annotation(node, order.AnnotationOrder)); err == nil {
				c.claim(f, o)
			}
		}
		err := f.simulate(rollout(func(r *Rollout) {
			r.Budget, r.Order.NoDrain, r.Window, r.Fetch, r.Drain, r.Restart = share("2"), c.noDrain, window, day, day, day
		}), nil)
		if err == nil || !strings.Contains(err.Error(), "1 failed: "+node) || strings.Join(f.updated(), " ") != "b-1 b-2" {
			t.Errorf("%s: %v; updated %q", name, err, f.updated())
		}
	}

	// A machine that removes its failure from its Node does not get the order again.
	f := newStill(t)
	f.add(fleettest.Rejects, nil, node)
	f.add(fleettest.Works, nil, "b-1")
	f.before = func() {
		if m := parseMark(f.Annotation(node, annotationRollout)); m.Result != "" {
			writeMark(f, func(m *rolloutMark) { *m = rolloutMark{Golden: m.Golden, Try: m.Try + 1} })
		}
	}
	if err := f.simulate(rollout(func(r *Rollout) { r.Budget = share("2") }), nil); err == nil || !strings.Contains(err.Error(), "1 failed: "+node) || len(f.updated()) != 1 {
		t.Errorf("another try: %v; updated %q", err, f.updated())
	}

	// A machine that claims to be updated just now does not make its ring soak without end.
	f = newStill(t)
	f.pace = time.Minute
	f.add(fleettest.Works, map[string]string{"ring": "canary"}, node)
	f.add(fleettest.Works, map[string]string{"ring": "shops"}, "b-1")
	f.before = func() {
		if m := parseMark(f.Annotation(node, annotationRollout)); m.Result != "" {
			writeMark(f, func(m *rolloutMark) { m.Ended = f.now })
		}
	}
	r := rollout(func(r *Rollout) { r.Soak, r.Restart = time.Hour, time.Hour })
	r.Rings, _ = Rings("ring=canary,shops")
	if err := f.simulate(r, nil); err != nil || len(f.updated()) != 2 {
		t.Errorf("%v; updated %q", err, f.updated())
	}
}

// TestRolloutPausedInARun checks that a pause does not count towards the time limits of a run that
// goes on meanwhile, but that the time after it does.
func TestRolloutPausedInARun(t *testing.T) {
	t.Parallel()
	f, r, now, past := newStill(t), rollout(nil), time.Now(), newHistory()
	f.add(fleettest.Works, nil, "a-1")
	f.mark(r, "a-1", order.StateTrial, rolloutMark{Given: now, Drain: now, Released: now, Cordoned: true})
	plans := func(after time.Duration) []rolloutAct {
		t.Helper()
		all, err := f.client.updateNodes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		past.observe(r, all, now.Add(after), after)
		return r.plan(all, past, now.Add(after)).acts
	}
	plans(0)
	if _, err := f.client.HaltUpdates(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	const pause = 72 * time.Hour
	for _, after := range []time.Duration{0, pause / 2, pause} {
		if acts := plans(after); len(acts) > 0 {
			t.Errorf("paused: %+v", acts)
		}
	}
	if _, err := f.client.ResumeUpdates(t.Context()); err != nil {
		t.Fatal(err)
	}
	if acts := plans(pause + r.Restart/2); len(acts) > 0 {
		t.Errorf("resumed: %+v", acts)
	}
	if acts := plans(pause + 2*r.Restart); len(acts) != 1 || acts[0].result != UpdateFailed {
		t.Errorf("too long after the pause: %+v", acts)
	}
}

// TestRolloutJumpOfTheClock checks that no node fails because the computer of the run has slept, or
// because its clock was wrong and is set during the run.
func TestRolloutJumpOfTheClock(t *testing.T) {
	t.Parallel()
	for _, jump := range []time.Duration{-72 * time.Hour, 72 * time.Hour} {
		for _, c := range []struct {
			state      string
			mark       func(now time.Time) rolloutMark
			soon, late string
		}{
			{order.StateWorking, func(now time.Time) rolloutMark { return rolloutMark{Given: now} }, "", "a-1 finish failed"},
			{order.StateHeld, func(now time.Time) rolloutMark { return rolloutMark{Given: now, Drain: now, Cordoned: true} }, "a-1 evict", "a-1 finish failed"},
			{order.StateTrial, func(now time.Time) rolloutMark {
				return rolloutMark{Given: now, Drain: now, Released: now, Cordoned: true}
			}, "", "a-1 finish failed"},
		} {
			f, r, past := newStill(t), rollout(nil), newHistory()
			now := time.Now().Add(-100 * time.Hour).Round(0)
			f.add(fleettest.Works, nil, "a-1")
			f.mark(r, "a-1", c.state, c.mark(now))
			plan := func(now time.Time, ran time.Duration) string {
				t.Helper()
				all, err := f.client.updateNodes(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				past.observe(r, all, now, ran)
				var acts []string
				for _, a := range r.plan(all, past, now).acts {
					acts = append(acts, strings.TrimSpace(a.node.name+" "+string(a.what)+" "+a.result))
				}
				return strings.Join(acts, ", ")
			}
			first := plan(now, 0)
			soon := plan(now.Add(r.Drain/2+jump), r.Drain/2)
			late := plan(now.Add(2*r.Fetch+jump), 2*r.Fetch)
			if first != c.soon || soon != c.soon || late != c.late {
				t.Errorf("%s, jump %s: %q, %q, %q", c.state, jump, first, soon, late)
			}
		}
	}
}

// TestRolloutNewNode checks that a Node that is deleted and joins again during a run counts as new.
func TestRolloutNewNode(t *testing.T) {
	t.Parallel()
	f, r, past := newStill(t), rollout(nil), newHistory()
	state := func() string {
		t.Helper()
		all, err := f.client.updateNodes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		past.observe(r, all, time.Now(), 0)
		if len(all) == 0 {
			return ""
		}
		return r.state(all[0])
	}
	f.add(fleettest.Works, nil, "a-1")
	f.mark(r, "a-1", order.StateFailed, rolloutMark{Given: time.Now(), Ended: time.Now(), Result: UpdateFailed})
	first := state()
	f.Annotate("a-1", fleettest.Object{annotationRollout: nil})
	erased := state()
	f.Delete("a-1")
	state()
	f.add(fleettest.Works, nil, "a-1")
	if again := state(); first != UpdateFailed || erased != UpdateFailed || again != UpdatePending {
		t.Errorf("%s, without its mark %s, as a new Node %s", first, erased, again)
	}
}

// TestParseMark checks that a mark that a machine wrote cannot hide its node or disturb a terminal.
func TestParseMark(t *testing.T) {
	t.Parallel()
	golden := strings.Repeat("ab", 32)
	if m := parseMark(`{"golden":"\u001b[2J","result":"done"}`); m != (rolloutMark{}) {
		t.Errorf("invalid digest: %+v", m)
	}
	m := parseMark(`{"golden":"` + golden + `","result":"hidden","reason":"` + strings.Repeat(`\u001b[2J`, 1000) + `"}`)
	if m.Golden != golden || m.Result != "" || len(m.Reason) > 2*order.MaxReason || strings.Contains(m.Reason, "\x1b") {
		t.Errorf("%+v", m)
	}
}

// TestRolloutHeldAway checks that a node that lost its power after it had fetched everything is not
// drained, which could not succeed and would use up the budget.
func TestRolloutHeldAway(t *testing.T) {
	t.Parallel()
	f := newStill(t)
	f.add(fleettest.Works, nil, "a-1")
	r := rollout(nil)
	f.mark(r, "a-1", order.StateHeld, rolloutMark{Given: time.Now()})
	f.Ready("a-1", false)
	if got := f.plans(r); got != nil {
		t.Errorf("away: %q", got)
	}
	f.Ready("a-1", true)
	if got := strings.Join(f.plans(r), ", "); got != "a-1 drain" {
		t.Errorf("back: %q", got)
	}
	f.mark(r, "a-1", order.StateHeld, rolloutMark{Given: time.Now().Add(-2 * r.Fetch)})
	if got := strings.Join(f.plans(r), ", "); got != "a-1 drain" {
		t.Errorf("held for long: %q", got)
	}
	f.Ready("a-1", false)
	if got := strings.Join(f.plans(r), ", "); got != "a-1 finish failed" {
		t.Errorf("away for long: %q", got)
	}
	f.Change("a-1", fleettest.Object{"status": fleettest.Object{"conditions": []any{fleettest.Object{"type": "Ready", "status": "Unknown", "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)}}}})
	if got := f.plans(r); got != nil {
		t.Errorf("held for long, and away since now: %q", got)
	}
}

// TestRolloutOutsideTheWindow checks that a node that waits for its turn during several days does not
// fail while the window of its Site is closed. If the window closes before the machine restarts, the
// node is uncordoned, and its order is on hold until it opens again.
func TestRolloutOutsideTheWindow(t *testing.T) {
	t.Parallel()
	ago := time.Now().Add(-72 * time.Hour)
	for _, c := range []struct {
		step, want string
		mark       rolloutMark
	}{
		{order.StepWindow, "", rolloutMark{Given: ago}},
		{"root", "a-1 finish failed", rolloutMark{Given: ago}},
		{order.StepWindow, "a-1 undrain", rolloutMark{Given: ago, Drain: ago, Cordoned: true}},
		{order.StepWindow, "a-1 give", rolloutMark{Given: ago, Drain: ago, Released: ago, Cordoned: true}},
		{"update-lease", "a-1 finish failed", rolloutMark{Given: ago, Drain: ago, Released: ago, Cordoned: true}},
	} {
		f, r := newStill(t), rollout(nil)
		f.add(fleettest.Works, nil, "a-1")
		f.mark(r, "a-1", order.StateWaiting, c.mark)
		a := order.ParseAnswer(f.Annotation("a-1", order.AnnotationAnswer))
		a.Step = c.step
		f.Annotate("a-1", fleettest.Object{order.AnnotationAnswer: a.String()})
		if got := strings.Join(f.plans(r), ", "); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
		all, err := f.client.updateNodes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if acts := r.plan(all, newHistory(), time.Now()).acts; len(acts) > 0 {
			f.Change("a-1", r.patchOf(acts[0], time.Now()).merge())
		}
		if f.Cordoned("a-1") || c.step == order.StepWindow && !strings.HasSuffix(f.Annotation("a-1", order.AnnotationOrder), " hold") {
			t.Errorf("%+v: cordoned %v, order %q", c, f.Cordoned("a-1"), f.Annotation("a-1", order.AnnotationOrder))
		}
	}
}

// TestRolloutSeveralNights checks that a download that takes several windows of the machine's Site
// does not fail, also if the command is killed in between, but does if it takes too long in windows.
func TestRolloutSeveralNights(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fetch  time.Duration
		killed func(hour int) bool
		fails  bool
	}{
		"one run":         {fetch: 30 * time.Hour, killed: func(int) bool { return false }},
		"killed each day": {fetch: 30 * time.Hour, killed: func(hour int) bool { return hour%24 == 12 }},
		"killed at night": {fetch: 30 * time.Hour, killed: func(hour int) bool { return hour%24 == 2 }},
		"slow":            {fetch: 20 * time.Hour, killed: func(int) bool { return false }, fails: true},
	} {
		f, past, failed := newStill(t), newHistory(), ""
		f.add(fleettest.Works, nil, "a-1")
		r := rollout(func(r *Rollout) { r.Fetch = c.fetch })
		begin := time.Date(2026, 11, 23, 0, 0, 0, 0, time.UTC)
		for hour := 12; hour < 5*24; hour++ { // a window of 6 hours in each night
			now := begin.Add(time.Duration(hour) * time.Hour)
			if o, err := order.Parse(f.Annotation("a-1", order.AnnotationOrder)); err == nil {
				a := order.Answer{Plan: oldPlan, Serial: 1, Order: o.Key(), State: order.StateWorking, Step: "root"}
				if hour%24 >= 6 {
					a.State, a.Step = order.StateWaiting, order.StepWindow
				}
				f.Annotate("a-1", fleettest.Object{order.AnnotationAnswer: a.String()})
			}
			if c.killed(hour) {
				past = newHistory()
			}
			n := updateNodeOf(&unstructured.Unstructured{Object: f.Get("a-1")})
			past.observe(r, []*updateNode{n}, now, now.Sub(begin))
			p := r.plan([]*updateNode{n}, past, now)
			past.planned(p, now)
			for _, a := range p.acts {
				if a.result == UpdateFailed && failed == "" {
					failed = now.Format(time.DateTime)
				}
				f.Change("a-1", r.patchOf(a, now).merge())
				past.acted(a, updateNodeOf(&unstructured.Unstructured{Object: f.Get("a-1")}))
			}
		}
		if c.fails != (failed != "") {
			t.Errorf("%s: failed %q", name, failed)
		}
	}
}

// TestRolloutReplaced checks that a node that was updated, but runs another image now because its
// disk was flashed again, gets the order again.
func TestRolloutReplaced(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Works, nil, "a-1", "a-2")
	if err := f.update(t.Context(), rollout(nil)); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.machines["a-1"] = fleettest.NewMachine("a-1", fleettest.Works, oldPlan, newPlan)
	f.mu.Unlock()
	for order.ParseAnswer(f.Annotation("a-1", order.AnnotationAnswer)).Plan != oldPlan {
		time.Sleep(time.Millisecond)
	}
	rows, err := f.client.CheckRollout(t.Context(), rollout(nil))
	if err != nil || rows[0].State != UpdatePending || rows[1].State != UpdateDone {
		t.Errorf("%+v, %v", rows, err)
	}
	if err := f.update(t.Context(), rollout(nil)); err != nil || len(f.updated()) != 2 {
		t.Errorf("%v, updated %q", err, f.updated())
	}
	f.clean()
}

// TestRolloutRetry checks that failed nodes get the order again only with Retry, and that a node
// repaired by hand counts as done.
func TestRolloutRetry(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.add(fleettest.Rejects, nil, "a-1")
	f.add(fleettest.Works, nil, "a-2")
	if err := f.update(t.Context(), rollout(nil)); err == nil || len(f.updated()) > 0 {
		t.Fatal(err, f.updated())
	}
	f.mu.Lock()
	f.machines["a-1"].Outcome = fleettest.Works
	f.mu.Unlock()
	if err := f.update(t.Context(), rollout(nil)); err == nil {
		t.Error("a failed node was forgotten")
	}
	if err := f.update(t.Context(), rollout(func(r *Rollout) { r.Retry = true })); err != nil || len(f.updated()) != 2 {
		t.Errorf("%v, %q", err, f.updated())
	}
	f.clean()
}

// TestRolloutLeaves checks that nodes that cannot be drained fail and are uncordoned. Nodes that
// are not Ready or have never answered are skipped and listed.
func TestRolloutLeaves(t *testing.T) {
	t.Parallel()
	f := newStill(t)
	f.add(fleettest.Works, nil, "a-1", "a-2", "away")
	f.Node("old", nil, nil)
	f.mu.Lock()
	f.machines["away"].Ready = false
	f.mu.Unlock()
	f.Ready("away", false)
	err := f.simulate(rollout(func(r *Rollout) { r.Budget = share("2") }), func(node string) int {
		if node == "a-1" {
			return 1
		}
		return 0
	})
	for _, want := range []string{"1 failed: a-1", "1 node skipped, since not Ready: away", "1 node skipped, without support for orders in the image: old"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if got := strings.Join(f.updated(), " "); got != "a-2" {
		t.Error(got)
	}
	f.clean()
}

// TestRolloutCheckStart checks that all reasons to reject a rollout are reported together, before
// any change.
func TestRolloutCheckStart(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.Version = "v1.36.5"
	f.add(fleettest.Works, map[string]string{"kubernetes.io/arch": "arm64"}, "arm")
	f.add(fleettest.Works, map[string]string{kubeapi.ControlPlaneLabel: ""}, "master")
	f.Node("newer", nil, map[string]string{order.AnnotationAnswer: order.Answer{Plan: oldPlan, Serial: 7}.String()})
	f.Node("other", nil, map[string]string{order.AnnotationOrder: "https://images.example.com/x@sha256:" + strings.Repeat("cd", 32)})
	all, _ := Selector("")
	r := rollout(func(r *Rollout) { r.Rings = []Ring{all} })
	_, err := f.client.CheckRollout(t.Context(), r)
	for _, want := range []string{"kubelet v1.37.2 is newer than the API server v1.36.5", "these nodes have another architecture: arm: exclude them with these selectors, in place of --rings or --selector: -l 'kubernetes.io/arch=amd64'", "the image does not support control-plane nodes (nodeTypes), or was made by an older edgebake, but the selectors match control-plane nodes: master",
		"a higher serial: newer (7): build the image with a higher updates.serial; if", "another update is under way, to the image with the golden digest cdcdcdcdcdcd, on other"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	r.Rings, _ = Rings("kubernetes.io/arch=arm64,amd64")
	if _, err := f.client.CheckRollout(t.Context(), r); err == nil || !strings.Contains(err.Error(), "another architecture: arm: exclude them with the selectors") {
		t.Error(err)
	}
	r.Rings, _ = Rings("ring=canary,shops")
	if text := r.exclude("kubernetes.io/arch=amd64"); !strings.HasSuffix(text, ": -l 'ring=canary,kubernetes.io/arch=amd64' -l 'ring=shops,kubernetes.io/arch=amd64'") {
		t.Error(text)
	}
	if _, err := Rings("ring=canary,shops,canary"); err == nil || err.Error() != `the value "canary" appears twice` {
		t.Error(err)
	}
	none, _ := Selector("ring=nowhere")
	r.Rings = []Ring{none}
	if _, err := f.client.CheckRollout(t.Context(), r); err == nil || !strings.Contains(err.Error(), "match none of the cluster's 4 nodes") {
		t.Error(err)
	}
	if _, err := f.client.CheckRollout(t.Context(), rollout(func(r *Rollout) { r.Rings = []Ring{none, all} })); err == nil || !strings.Contains(err.Error(), "no node is in ring ring=nowhere") {
		t.Errorf("a ring without nodes: %v", err)
	}
	f = newFleet(t)
	f.Node("silent", nil, nil)
	if _, err := f.client.CheckRollout(t.Context(), rollout(nil)); err == nil || !strings.Contains(err.Error(), "none of the 1 node has announced yet") {
		t.Error(err)
	}
	f.add(fleettest.Works, nil, "a-1", "a-10", "a-2")
	rows, err := f.client.CheckRollout(t.Context(), rollout(nil))
	var got []string
	for _, row := range rows {
		got = append(got, row.Node+" "+row.State)
	}
	if err != nil || strings.Join(got, ", ") != "a-1 pending, a-2 pending, a-10 pending, silent noAnswer" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestShare(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "0", "-1", "0%", "101%", "x", "5 %"} {
		var s Share
		if s.Set(text) == nil {
			t.Errorf("%q is accepted", text)
		}
	}
	if p := share("5%"); p.of(10) != 1 || p.of(1000) != 50 || p.String() != "5%" || (Share{}).of(9) != 1 {
		t.Error("a percentage gives the wrong number")
	}
}

// TestRolloutWithoutItsCAFile starts a rollout while a file that the kubeconfig names is being
// replaced: the client for watches cannot be made.
func TestRolloutWithoutItsCAFile(t *testing.T) {
	f := newStill(t)
	f.add(fleettest.Works, nil, "a-1")
	config := rest.CopyConfig(f.client.config)
	config.CAFile = t.TempDir() + "/ca.crt"
	f.client.config = config
	r := rollout(func(*Rollout) {})
	if err := f.client.Update(t.Context(), r, func(UpdateRow) {}, func(string) {}); err == nil || !strings.Contains(err.Error(), "ca.crt: no such file") {
		t.Errorf("without the CA file: %v", err)
	}
}
