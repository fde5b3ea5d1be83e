package ipvs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ondisk"
)

// TestUpdatesWhileHostsIsLocked changes the configuration several times while the group waits for
// the lock on the hosts file. Afterwards the last configuration must be in effect.
func TestUpdatesWhileHostsIsLocked(t *testing.T) {
	w := newWorld(t, 1)
	s := testServer(t, 200)
	s.Masters = []Master{w.masters[0].master()}
	w.start(s)
	w.eventually("it serves", func() bool { return w.daemon.Status().Servers[0].Masters[0].State == "up" })
	unlock, err := files.Lock(t.Context(), filepath.Join(w.run, filepath.Base(ondisk.HostsLock)), patience)
	if err != nil {
		t.Fatal(err)
	}
	g := w.daemon.kept()[s.VIP]
	wake(g.changed)
	time.Sleep(100 * time.Millisecond) // long enough that the group waits for the lock
	cancelled := 0
	g.mu.Lock()
	for _, m := range g.apiServers {
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
	unlock()
	w.eventually("it is watched again", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, m := range g.apiServers {
			if m.cancel == nil || m.health.Rise != s.Rise {
				return false
			}
		}
		return len(g.apiServers) == 1
	})
	w.masters[0].stop()
	w.eventually("and it is seen to go down", func() bool { return w.daemon.Status().Servers[0].Masters[0].State == "down" })
}

// TestFailoverWhileHostsIsLocked checks that new connections avoid failed API servers while another
// program holds the lock on the hosts file, and that ipvscare's line is written once the lock is
// free.
func TestFailoverWhileHostsIsLocked(t *testing.T) {
	w := newWorld(t, 3)
	s := testServer(t, 201)
	for _, m := range w.masters {
		s.Masters = append(s.Masters, m.master())
	}
	serve := func(masters ...*loopMaster) func() bool {
		want := s.VIP.String() + " rr"
		for _, m := range masters {
			want += " " + m.addr.Addr().String() + "=1"
		}
		return func() bool { return w.kernel.text() == want }
	}
	w.start(s)
	w.eventually("all serve", serve(w.masters...))
	w.eventually("the name", func() bool { return w.ours() != "" })
	unlock, err := files.Lock(t.Context(), filepath.Join(w.run, filepath.Base(ondisk.HostsLock)), patience)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.hosts, []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.eventually("it waits for the lock", func() bool { // follow has noticed the changed file
		wake(w.daemon.kept()[s.VIP].hostsChanged)
		return len(w.daemon.kept()[s.VIP].hostsChanged) > 0
	})
	began := time.Now()
	w.masters[0].stop()
	w.eventually("one is out", serve(w.masters[1:]...))
	w.masters[1].stop()
	w.eventually("two are out", serve(w.masters[2:]...))
	if took := time.Since(began); took > files.HostsTimeout/2 {
		t.Errorf("both API servers were removed after %s", took)
	}
	if w.ours() != "" {
		t.Errorf("the daemon wrote to a hosts file that another program has locked: %s", w.ours())
	}
	unlock()
	w.eventually("the name is back", func() bool { return w.ours() == "10.103.97.201 apiserver.cluster.local" })
}

// TestRemovalWhileHostsIsLocked removes virtual servers from the configuration while another
// program holds the lock on the hosts file. That delays neither the removal of their rules nor the
// next configuration, which maintains one of them again.
func TestRemovalWhileHostsIsLocked(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	var all []Server
	for i, host := range []string{"one", "two", "three"} {
		s := testServer(t, byte(i+1))
		s.Host, s.Masters = host, []Master{{"127.0.0.1", 1}}
		all = append(all, s)
	}
	w.start(all...)
	const names = "10.103.97.1 one, 10.103.97.2 two, 10.103.97.3 three"
	w.eventually("the names", func() bool { return w.ours() == names })
	w.eventually("the rules", func() bool { return strings.Count(w.kernel.text(), "rr") == 3 })
	unlockHosts, err := files.Lock(t.Context(), filepath.Join(w.run, filepath.Base(ondisk.HostsLock)), patience)
	if err != nil {
		t.Fatal(err)
	}
	replace := func(servers ...Server) {
		t.Helper()
		began := time.Now()
		if err := w.daemon.replace(w.ctx, servers); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > files.HostsTimeout/2 {
			t.Errorf("the change took %s", took)
		}
	}
	replace(all[0])
	if got := w.kernel.text(); got != "10.103.97.1:6443 rr" {
		t.Errorf("left: %s", got)
	}
	if got := readNotes(w.run); w.ours() != names || len(got) != 3 {
		t.Errorf("the lines are %s, noted: %v", w.ours(), got)
	}
	if _, locked := lockedBy(w.run, all[2].VIP); !locked {
		t.Error("another daemon could maintain a virtual server whose rules are not removed yet")
	}
	// A configuration that cannot be applied changes nothing.
	taken := testServer(t, 9)
	taken.Host, taken.Masters = "nine", all[0].Masters
	unlock, err := files.Lock(t.Context(), lockPath(w.run, taken.VIP), patience)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.daemon.replace(w.ctx, []Server{all[0], all[2], taken}); err == nil {
		t.Error("the daemon maintains a virtual server that another process maintains")
	}
	unlock()
	replace(all[0], all[1])
	w.eventually("the second is kept again", func() bool { return w.kernel.text() == "10.103.97.1:6443 rr 10.103.97.2:6443 rr" })
	unlockHosts()
	w.eventually("only the third one's line goes", func() bool { return w.ours() == "10.103.97.1 one, 10.103.97.2 two" })
	w.eventually("and its note", func() bool { return len(readNotes(w.run)) == 2 })
	w.eventually("and its lock", func() bool { _, locked := lockedBy(w.run, all[2].VIP); return !locked })
	if _, locked := lockedBy(w.run, all[1].VIP); !locked {
		t.Error("the lock of the second virtual server is free")
	}
}

// TestStatusWhileItStarts reads a group's status while the group takes over the state of an earlier
// process. The race detector reports violations.
func TestStatusWhileItStarts(t *testing.T) {
	state := t.TempDir()
	text := `{"version":1,"servers":[{"vip":"` + testVIP.String() + `","configured":["10.0.0.1:6443"],"masters":["10.0.0.2:6443"],"names":{"a.example":["192.0.2.1"]}}]}`
	if err := os.WriteFile(filepath.Join(state, "learned.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, 0)
	g, _ := namesGroup(t, t.TempDir(), deadDNS, "10.0.0.1:6443")
	w.kernel.Services = []kernel.Service{{VIP: g.vip, Scheduler: "rr", Dests: []kernel.Dest{{Addr: addrAt(1), Weight: 1}}}}
	g.d.opt.StateDir, g.server.Learn = state, true
	g.d.reconciler = newReconciler(w.kernel, g.d.logf, &g.d.stats, func(error) {})
	go g.d.reconciler.run(t.Context())
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
		t.Errorf("the daemon took over %+v", st)
	}
}
