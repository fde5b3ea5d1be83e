//go:build linux

package guest

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
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

// TestHTTP2Watches: idle watches over TLS and HTTP/2, as kubelet holds them,
// move within a second after a stopped master was found out, whether the
// client sends PINGs of its own or not.
func TestHTTP2Watches(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	for _, pings := range []bool{false, true} {
		var watches []*watch
		for range 6 {
			watches = append(watches, n.watchHTTP2(pings))
		}
		l.masters[0].signal(syscall.SIGSTOP)
		n.expect("m2 m3", slow*5*time.Second)
		removed := time.Now()
		time.Sleep(slow * 500 * time.Millisecond)
		mine := 0
		for _, w := range watches {
			broken := w.brokenAt()
			switch {
			case w.master != "m1" && !broken.IsZero():
				t.Errorf("client pings %v: a watch on the live master %s broke", pings, w.master)
			case w.master == "m1" && broken.IsZero():
				t.Errorf("client pings %v: a watch on the dead master did not break within %s", pings, time.Since(removed))
			case w.master == "m1":
				mine++
				t.Logf("client pings %v: broke %s after the removal", pings, broken.Sub(removed))
			}
			w.close()
		}
		if mine == 0 {
			t.Errorf("client pings %v: no watch was on the dead master", pings)
		}
		l.masters[0].signal(syscall.SIGCONT)
		n.expect("m1 m2 m3", slow*5*time.Second)
	}
}

// TestFailovers: over many failovers no request is lost that its client
// tries once more.
func TestFailovers(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	rounds := number(t, "GUEST_FAILOVERS", 4)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var lost, retried, fine atomic.Int64
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(25 * time.Millisecond):
				}
				for try := range 2 {
					c, _, err := n.ask(vip, 15*time.Second)
					if err == nil {
						c.Close()
						fine.Add(1)
						break
					}
					if try == 0 {
						retried.Add(1)
					} else {
						lost.Add(1)
						t.Logf("lost: %v", err)
					}
				}
			}
		})
	}
	all := []string{"m2 m3", "m1 m3", "m1 m2"}
	for i := range rounds {
		k := rand.IntN(3)
		m := l.masters[k]
		time.Sleep(time.Duration(rand.IntN(1000)) * time.Millisecond)
		switch i % 3 {
		case 0:
			m.kill()
			n.expect(all[k], slow*5*time.Second)
			m.serve()
		case 1:
			m.signal(syscall.SIGSTOP)
			n.expect(all[k], slow*5*time.Second)
			m.signal(syscall.SIGCONT)
		case 2:
			m.netem(100, 0)
			n.expect(all[k], slow*5*time.Second)
			m.netem(0, 0)
		}
		n.expect("m1 m2 m3", slow*20*time.Second)
	}
	close(stop)
	wg.Wait()
	t.Logf("RESULT failovers rounds=%d requests=%d retried=%d lost=%d", rounds, fine.Load()+lost.Load(), retried.Load(), lost.Load())
	if lost.Load() > 0 || fine.Load() == 0 {
		t.Errorf("%d requests were lost in %d failovers, %d went well", lost.Load(), rounds, fine.Load())
	}
}
