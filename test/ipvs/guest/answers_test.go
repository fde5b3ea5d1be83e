//go:build linux

package guest

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestAnswers checks ipvscare's verdicts for a master's responses and certificates.
func TestAnswers(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	l.virtual() // writes the CA
	start := func() {
		argv := []string{"/bin/ipvscare", "care", "--vs", vip, "--ca-file", "/run/lab/ca.crt", "--run-dir", n.dir + "/run",
			"--interval", "1s", "--health-timeout", "2s"} // not 10 s, to save time
		for _, m := range l.masters {
			argv = append(argv, "--rs", m.addr.String()+":6443")
		}
		n.journalled(n.command(argv...))
		n.expect("m1 m2 m3")
	}
	start()
	m1, m2 := l.masters[0], l.masters[1]

	l.run("503 takes a master out", func(t *testing.T) {
		m2.mode("503")
		n.expect("m1 m3")
		m2.mode("")
		n.expect("m1 m2 m3")
	})
	l.run("401, 403 and 429 mean alive", func(t *testing.T) {
		for i, mode := range []string{"401", "403", "429"} {
			l.masters[i].mode(mode)
		}
		n.stays("m1 m2 m3", 3*time.Second)
		for _, m := range l.masters {
			m.mode("")
		}
	})
	l.run("draining: no new connections, no reset", func(t *testing.T) {
		var watches []*watch
		for range 6 {
			watches = append(watches, n.watch())
		}
		m2.mode("drain")
		n.expect("m1 m3")
		time.Sleep(time.Second)
		mine := 0
		for _, w := range watches {
			n.unbroken(w)
			if w.master == "m2" {
				mine++
			}
			w.conn.Close()
		}
		if mine == 0 {
			t.Error("no watch was connected to the draining master")
		}
		m2.mode("")
		n.expect("m1 m2 m3")
	})
	l.run("a hanging request with a live connection", func(t *testing.T) {
		m2.mode("hang")
		n.expect("m1 m3")
		m2.mode("")
		n.expect("m1 m2 m3")
	})
	l.run("the last one stays, and an alien never serves", func(t *testing.T) {
		wrong := newAuthority("somebody-else")
		m2.kill()
		m2.certificate(wrong, epoch.Add(-time.Hour), epoch.AddDate(1, 0, 0))
		n.expect("m1 m3")
		m2.serve()
		m2.awaitServing()
		n.stays("m1 m3", 3*time.Second)
		l.masters[2].kill()
		n.expect("m1")
		m1.kill()
		n.stays("m1", 3*time.Second) // m1 is dead, and the foreign server gets no traffic
		m1.certificate(wrong, epoch.Add(-time.Hour), epoch.AddDate(1, 0, 0))
		m1.serve()
		m1.awaitServing()
		n.expect("") // all servers are foreign now, so none serves
		if _, _, err := n.ask(vip, time.Second); err == nil {
			t.Error("a server of another cluster got a connection")
		}
		for _, m := range []*machine{m1, m2} {
			m.kill()
			m.certificate(l.ca, epoch.Add(-time.Hour), epoch.AddDate(10, 0, 0))
			m.serve()
			m.awaitServing()
		}
		l.masters[2].serve()
		n.expect("m1 m2 m3")
	})
	l.run("an expired certificate takes a master out", func(t *testing.T) {
		m2.kill()
		n.expect("m1 m3")
		m2.certificate(l.ca, epoch.AddDate(0, -2, 0), epoch.AddDate(0, -1, 0))
		m2.serve()
		m2.awaitServing()
		n.stays("m1 m3", 4*time.Second)
		m2.kill()
		m2.certificate(l.ca, epoch.Add(-time.Hour), epoch.AddDate(10, 0, 0))
		m2.serve()
		n.expect("m1 m2 m3")
	})
	l.run("the clock at 1970 takes nobody out", func(t *testing.T) {
		now := time.Now()
		set := func(at time.Time) {
			tv := unix.NsecToTimeval(at.UnixNano())
			check(unix.Settimeofday(&tv))
		}
		set(time.Unix(1000, 0))
		began := time.Now()
		defer func() { set(now.Add(time.Since(began))) }()
		n.stays("m1 m2 m3", 2*time.Second)
		// After a start in 1970, all masters are found too.
		n.stopProcess()
		n.must("/bin/ipvsadm", "-C")
		start()
		n.stays("m1 m2 m3", 2*time.Second)
		for _, m := range l.masters {
			// Without processor time, a VM may consider a master dead at first.
			count := func(what string) int { return n.log.count(fmt.Sprintf("API server %s:6443 is %s", m.addr, what)) }
			const said = " (ready, but this node's clock does not match"
			if ups := count("up, it was unknown"+said) + count("up, it was down"+said); ups != 1+count("down, it was up") {
				t.Errorf("the log must say once that the clock does not match %s:\n%s", m.name, n.log)
			}
		}
	})
}

// TestFlapping checks that a flapping master must be healthy for longer, and that it does not fill
// the log.
func TestFlapping(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	m := l.masters[1]
	for range 6 {
		m.kill()
		time.Sleep(400 * time.Millisecond)
		m.serve()
		m.awaitServing()
		time.Sleep(1200 * time.Millisecond)
	}
	n.expect("m1 m2 m3")
	if lines := n.log.count("API server 10.103.0.12"); lines > 16 && !n.heldUp() {
		t.Errorf("%d lines about the flapping master:\n%s", lines, n.log)
	}
}
