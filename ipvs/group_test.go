package ipvs

import (
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
