package ipvs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// TestUpdatesWhileHostsIsLocked: the configuration changes several times while
// another program holds the lock on the hosts file, for which the group waits.
// The last configuration is the one that is kept then.
func TestUpdatesWhileHostsIsLocked(t *testing.T) {
	w := newWorld(t, 1)
	s := testServer(t, 200)
	s.Masters = []Master{w.masters[0].master()}
	w.start(s)
	w.eventually("it serves", func() bool { return w.daemon.Status().Servers[0].Masters[0].State == "up" })
	release, err := lockFile(t.Context(), filepath.Join(w.run, filepath.Base(ondisk.HostsLock)), patience)
	if err != nil {
		t.Fatal(err)
	}
	g := w.daemon.kept()[s.VIP]
	poke(g.changed)
	time.Sleep(100 * time.Millisecond) // it waits for the lock by now
	cancelled := 0
	g.mu.Lock()
	for _, m := range g.members {
		stop := m.cancel
		m.cancel = func() { cancelled++; stop() }
	}
	for range 3 {
		s.Rise++
		g.mu.Unlock()
		g.update(s)
		g.mu.Lock()
	}
	g.mu.Unlock()
	if cancelled != 1 {
		t.Errorf("one watcher was stopped %d times", cancelled)
	}
	release()
	w.eventually("it is watched again", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, m := range g.members {
			if m.cancel == nil || m.health.Rise != s.Rise {
				return false
			}
		}
		return len(g.members) == 1
	})
	w.masters[0].stop()
	w.eventually("and it is seen to go down", func() bool { return w.daemon.Status().Servers[0].Masters[0].State == "down" })
}

// TestStatusWhileItStarts: a group that takes over what earlier lives left is asked
// for its status meanwhile. The race detector watches.
func TestStatusWhileItStarts(t *testing.T) {
	state := t.TempDir()
	text := `{"version":1,"servers":[{"vip":"` + testVIP.String() + `","configured":["10.0.0.1:6443"],"masters":["10.0.0.2:6443"],"names":{"a.example":["192.0.2.1"]}}]}`
	if err := os.WriteFile(filepath.Join(state, "learned.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, 0)
	g, _ := namesGroup(t, t.TempDir(), deadDNS, "10.0.0.1:6443")
	w.kernel.services = []Service{{VIP: g.vip, Scheduler: "rr", Dests: []Dest{{Addr: addrAt(1), Weight: 1}}}}
	g.d.opt.StateDir, g.server.Learn = state, true
	newAlarm, closeAlarms := quietAlarms()
	defer closeAlarms()
	g.d.keeper = newKeeper(w.kernel, g.d.logf, &g.d.stats, func(error) {})
	g.d.keeper.alarms = newAlarm
	go g.d.keeper.run(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.takeOver(t.Context())
		g.loadLearned()
	}()
	for over := false; !over; {
		g.status()
		select {
		case <-done:
			over = true
		default:
		}
	}
	st := g.status()
	if !st.Learned || len(st.Masters) != 1 || !st.Masters[0].Serving {
		t.Errorf("it took over %+v", st)
	}
}
