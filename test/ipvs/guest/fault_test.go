//go:build linux

package guest

import (
	"syscall"
	"testing"
	"time"
)

// settle lets the node find all masters and its connections become steady.
func (l *lab) settle() *machine {
	l.t.Helper()
	n := l.nodes[0]
	n.configure(l.virtual())
	n.care()
	n.expect("m1 m2 m3", slow*3*time.Second)
	return n
}

// TestFaults: after a fault on one master new connections fail for a bounded
// time, its watches break, those on live masters stay, and it comes back.
func TestFaults(t *testing.T) {
	for _, f := range []struct {
		name        string
		break_, fix func(*machine)
		fails       time.Duration // on real hardware
	}{
		{"kill", (*machine).kill, func(m *machine) { m.serve(); m.awaitServing() }, 300 * time.Millisecond},
		{"stop", func(m *machine) { m.signal(syscall.SIGSTOP) }, func(m *machine) { m.signal(syscall.SIGCONT) }, 2500 * time.Millisecond},
		{"drop", func(m *machine) { m.netem(100, 0) }, func(m *machine) { m.netem(0, 0) }, 2500 * time.Millisecond},
	} {
		t.Run(f.name, func(t *testing.T) {
			l := newLab(t, 3, 1)
			n := l.settle()
			var watches []*watch
			for range 6 {
				watches = append(watches, n.watch())
			}
			h := n.hammer(50 * time.Millisecond)
			time.Sleep(500 * time.Millisecond)
			at := time.Now()
			f.break_(l.masters[1])
			n.expect("m1 m3", slow*5*time.Second)
			removed := time.Now()
			time.Sleep(time.Second)
			last, failed, ok := h.end(at)
			t.Logf("removed after %s, last failing connection after %s, %d failed, %d went well", removed.Sub(at), last, failed, ok)
			if limit := slow * f.fails; last > limit {
				t.Errorf("new connections failed for %s, longer than %s", last, limit)
			}
			if ok == 0 {
				t.Error("no connection went well")
			}
			for _, w := range watches {
				broken := w.brokenAt()
				switch {
				case w.master != "m2" && !broken.IsZero():
					t.Errorf("a watch on the live master %s broke", w.master)
				case w.master == "m2" && broken.IsZero():
					t.Error("a watch on the dead master never broke")
				case w.master == "m2":
					t.Logf("a watch on the dead master broke %s after its removal", broken.Sub(removed))
				}
				w.conn.Close()
			}
			f.fix(l.masters[1])
			n.expect("m1 m2 m3", slow*5*time.Second)
		})
	}
}
