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
	n.expect("m1 m2 m3")
	return n
}

// TestFaults: after a fault on one master new connections fail for a bounded
// time, its watches break, those on live masters stay, and it comes back.
func TestFaults(t *testing.T) {
	for _, f := range []struct {
		name        string
		break_, fix func(*machine)
	}{
		{"kill", (*machine).kill, func(m *machine) { m.serve(); m.awaitServing() }},
		{"stop", func(m *machine) { m.signal(syscall.SIGSTOP) }, func(m *machine) { m.signal(syscall.SIGCONT) }},
		{"drop", func(m *machine) { m.netem(100, 0) }, func(m *machine) { m.netem(0, 0) }},
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
			n.expect("m1 m3")
			removed := time.Now()
			time.Sleep(time.Second)
			last, failed, ok := h.end(at)
			t.Logf("removed after %s, last failing connection after %s, %d failed, %d went well", removed.Sub(at), last, failed, ok)
			if last > removed.Sub(at) {
				t.Errorf("a new connection failed %s after the removal", last-removed.Sub(at))
			}
			if ok == 0 {
				t.Error("no connection went well")
			}
			for _, w := range watches {
				if w.master == "m2" {
					t.Logf("a watch on the dead master broke %s after its removal", n.breaks(w).Sub(removed))
				} else {
					n.unbroken(w)
				}
				w.conn.Close()
			}
			f.fix(l.masters[1])
			n.expect("m1 m2 m3")
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
		n.expect("m2 m3")
		removed := time.Now()
		mine := 0
		for _, w := range watches {
			if w.master != "m1" {
				n.unbroken(w)
			} else {
				mine++
				t.Logf("RESULT watch pings=%v after_ms=%d", pings, n.breaks(w).Sub(removed).Milliseconds())
			}
			w.close()
		}
		if mine == 0 {
			t.Errorf("client pings %v: no watch was on the dead master", pings)
		}
		l.masters[0].signal(syscall.SIGCONT)
		n.expect("m1 m2 m3")
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
			n.expect(all[k])
			m.serve()
		case 1:
			m.signal(syscall.SIGSTOP)
			n.expect(all[k])
			m.signal(syscall.SIGCONT)
		case 2:
			m.netem(100, 0)
			n.expect(all[k])
			m.netem(0, 0)
		}
		n.expect("m1 m2 m3")
	}
	close(stop)
	wg.Wait()
	t.Logf("RESULT failovers rounds=%d requests=%d retried=%d lost=%d", rounds, fine.Load()+lost.Load(), retried.Load(), lost.Load())
	if lost.Load() > 0 || fine.Load() == 0 {
		t.Errorf("%d requests were lost in %d failovers, %d went well", lost.Load(), rounds, fine.Load())
	}
}
