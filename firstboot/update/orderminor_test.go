package update

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
)

// orderedMinor returns a box that is a node, with an order for another minor version.
func orderedMinor(t *testing.T) (b *box, c *worldtest.Cluster, e *machine.Env, annotate func(key, value string)) {
	b = newBox(t)
	c, e = b.member("v1.37.2")
	e.GetRemote = newLine(b, "minor.raw.zst").get
	e.Rand = func() float64 { return 0 }
	annotations := map[string]string{order.AnnotationOrder: imageURL + "@sha256:" + goldenOf(t, "minor.raw.zst")}
	dial := e.Dial
	var mu sync.Mutex // a dial goes on after its request was cancelled
	e.Dial = func(ctx context.Context, n, a string) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		m := &c.Nodes[memberName].Metadata
		if m.Annotations == nil {
			m.Annotations = map[string]string{}
		}
		for _, k := range []string{order.AnnotationOrder, order.AnnotationHalt} {
			if delete(m.Annotations, k); annotations[k] != "" {
				m.Annotations[k] = annotations[k]
			}
		}
		return dial(ctx, n, a)
	}
	return b, c, e, func(key, value string) { annotations[key] = value }
}

// TestOrderHaltedInDrain checks that a halt is too late once the boot entry is written: the machine
// restarts, and the order is done when the new system is kept.
func TestOrderHaltedInDrain(t *testing.T) {
	for _, fails := range []bool{false, true} {
		b, c, e, annotate := orderedMinor(t)
		c.Pods = append(c.Pods, pod("guarded", "StatefulSet"))
		began := b.now
		c.Disrupt = func(string) bool { return !fails && b.now.Sub(began) > 8*time.Minute }
		err := CarryOutOrder(t.Context(), e, func(s run.Step) {
			if s.Name == "esp" && s.Status == "done" {
				began = b.now
				annotate(order.AnnotationHalt, "stop")
			}
		})
		want := order.StateRestarting
		if fails {
			want = order.StateFailed
		}
		if record := b.get(OrderFile); err != nil || !strings.Contains(record, `"state":"`+want) || b.rebooted == fails {
			t.Errorf("%v; restarted %v; %s", err, b.rebooted, record)
		}
		b.runs(ondisk.LabelRootB, "minor.raw.zst") // the next boot, after a power cut
		if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil {
			t.Fatal(err)
		}
		if record := b.get(OrderFile); !strings.Contains(record, `"state":"done"`) {
			t.Errorf("the new system runs, but the order's record is %s", record)
		}
	}
}

// TestOrderStoppedInDrain checks that an order whose service is stopped after the boot entry was
// written, but before the restart, continues: nothing else would restart the machine.
func TestOrderStoppedInDrain(t *testing.T) {
	b, c, e, _ := orderedMinor(t)
	c.Pods = append(c.Pods, pod("guarded", "StatefulSet"))
	stays := true
	c.Disrupt = func(string) bool { return !stays }
	ctx, cancel := context.WithCancel(t.Context())
	err := CarryOutOrder(ctx, e, func(s run.Step) {
		if s.Name == "drain" && s.Status == "waiting" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || b.rebooted || b.status() != "pending ROOT-B" {
		t.Fatalf("%v, restarted: %v, %s", err, b.rebooted, b.status())
	}
	stays = false
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || !b.rebooted {
		t.Errorf("%v, restarted: %v; %s", err, b.rebooted, b.get(OrderFile))
	}
	// Once the restart was requested, it does not insist: a person may choose the former system.
	b.rebooted = false
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || b.rebooted {
		t.Errorf("the former system: %v, restarted: %v", err, b.rebooted)
	}
}

// TestOrderToStay checks that an order for the running image cancels an earlier order whose drain
// failed. Otherwise the earlier order's system would boot at the next restart.
func TestOrderToStay(t *testing.T) {
	b, c, e, annotate := orderedMinor(t)
	c.Pods = append(c.Pods, pod("guarded", "StatefulSet"))
	c.Disrupt = func(string) bool { return false }
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || b.status() != "pending ROOT-B" {
		t.Fatal(err, b.status())
	}
	e.GetRemote = newLine(b, "old.raw.zst").get
	annotate(order.AnnotationOrder, imageURL+"@sha256:"+goldenOf(t, "old.raw.zst"))
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || !strings.Contains(b.get(OrderFile), `"state":"done"`) || b.status() != "interrupted ROOT-B" || b.rebooted {
		t.Errorf("%v, %s, %s", err, b.get(OrderFile), b.status())
	}
}

// TestOrderVersionAway checks that an order waits while no API server reports its version.
func TestOrderVersionAway(t *testing.T) {
	b, _, e, _ := orderedMinor(t)
	away, dial := true, e.Dial
	e.Dial = func(ctx context.Context, n, a string) (net.Conn, error) {
		if away && (a == firstOf || a == secondOf) {
			return nil, errors.New("connection refused")
		}
		return dial(ctx, n, a)
	}
	for range 2 * maxTries {
		if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || !strings.Contains(b.get(OrderFile), `"state":"waiting"`) {
			t.Fatal(err, b.get(OrderFile))
		}
	}
	away = false
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || !b.rebooted {
		t.Error(err, b.get(OrderFile))
	}
}

// TestOrderWithoutDrain checks that with no-drain, an order leaves the pods where they are.
func TestOrderWithoutDrain(t *testing.T) {
	b, c, e, annotate := orderedMinor(t)
	c.Pods = append(c.Pods, pod("guarded", "StatefulSet"))
	c.Disrupt = func(string) bool { return false }
	annotate(order.AnnotationOrder, imageURL+"@sha256:"+goldenOf(t, "minor.raw.zst")+" no-drain")
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || !b.rebooted || c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, restarted: %v; %s", err, b.rebooted, b.get(OrderFile))
	}
}

// TestUncordonAfterKill checks an update that was killed while pods left. The next check for orders
// makes the Node schedulable again, unless an update is running.
func TestUncordonAfterKill(t *testing.T) {
	b, c, e, annotate := orderedMinor(t)
	annotate(order.AnnotationOrder, "")
	c.Pods = append(c.Pods, pod("guarded", "StatefulSet"))
	c.Disrupt = func(string) bool { return false }
	e.Lock = func(context.Context, string) (func(), error) { return func() {}, nil }
	func() {
		defer func() { _ = recover() }()
		_ = Update(t.Context(), e, Options{Image: b.inside("minor.raw.zst")}, func(s run.Step) {
			if s.Name == "drain" && s.Status == "waiting" {
				panic("killed")
			}
		})
	}()
	if !c.Nodes[memberName].Spec.Unschedulable || !e.Exists(cordonFile) {
		t.Fatal("the Node was not drained")
	}
	look := func(want bool) {
		t.Helper()
		if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || c.Nodes[memberName].Spec.Unschedulable != want {
			t.Errorf("%v, unschedulable: %v", err, c.Nodes[memberName].Spec.Unschedulable)
		}
	}
	lock := e.Lock
	e.Lock = func(context.Context, string) (func(), error) { return nil, machine.ErrLocked }
	look(true)
	e.Lock = lock
	look(false)
}
