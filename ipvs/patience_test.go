package ipvs

import (
	"fmt"
	mrand "math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

func TestLatency(t *testing.T) {
	var l latency
	for range 100 {
		l.add(0)
	}
	if got := l.timeout(130*time.Millisecond, 4*time.Second); got > 131*time.Millisecond {
		t.Errorf("a nearby API server counts as late after %s", got)
	}
	l.add(2 * time.Second)
	if got := l.timeout(130*time.Millisecond, 4*time.Second); got < 2*time.Second {
		t.Errorf("after an answer that took 2 s, the API server counts as late after %s", got)
	}
	for range 30 {
		l.add(time.Millisecond)
	}
	if got := l.timeout(130*time.Millisecond, 4*time.Second); got > 200*time.Millisecond {
		t.Errorf("the slow answer is not forgotten: %s", got)
	}
	for range 100 {
		l.add(time.Hour)
	}
	if got := l.timeout(130*time.Millisecond, 4*time.Second); got != 4*time.Second {
		t.Errorf("there is no limit: %s", got)
	}
}

// TestSlowServer checks an API server that is slow for ten minutes: few extra connections at the
// start and hardly any later. It stays up if it answers within a second. If it goes down, it still
// serves while no other does, and is up after its next answer: within 5 s after it has become fast
// again, or mostSpacing later if it went down.
func TestSlowServer(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, tt := range []struct {
		lag           time.Duration
		first, others int64 // connections in the first minute, and in the nine after it
		down          bool
	}{
		{200 * time.Millisecond, 2, 0, false},
		{500 * time.Millisecond, 3, 0, false},
		{time.Second, 4, 0, false},
		{3 * time.Second, 8, 9, true},
		{10 * time.Second, 16, 45, true},
		{20 * time.Second, 12, 45, true},
	} {
		t.Run(tt.lag.String(), func(t *testing.T) {
			for range 5 {
				synctest.Test(t, func(t *testing.T) {
					m := newFakeMaster(t, cert)
					m.slow = true
					m.start()
					s := startWatcher(t, m, LAN(), c.roots(t))
					defer s.stop(m)
					time.Sleep(time.Minute)
					d0 := m.dials.Load()
					m.lag.Store(int64(tt.lag))
					time.Sleep(time.Minute)
					d1 := m.dials.Load()
					time.Sleep(9 * time.Minute)
					d2 := m.dials.Load()
					if d1-d0 > tt.first || d2-d1 > tt.others {
						t.Errorf("%d connections in the first minute, want at most %d; %d in the next nine, want at most %d", d1-d0, tt.first, d2-d1, tt.others)
					}
					s.mu.Lock()
					t.Logf("%d connections in the first minute, %d in the next nine; %d changes: %q", d1-d0, d2-d1, len(s.events)-1, s.events)
					if down := len(s.events) > 1; down != tt.down {
						t.Errorf("%q", s.events)
					}
					if st := s.health.State; st == Down && !s.health.slow() {
						t.Errorf("the API server is down for another reason than slowness: %s", s.health.Outcome)
					}
					s.mu.Unlock()
					time.Sleep(tt.lag) // pending data arrives
					m.lag.Store(0)
					within := 5 * time.Second
					if tt.down {
						within += mostSpacing
					}
					time.Sleep(tt.lag + within)
					if st, _ := s.state(); st != Up {
						t.Errorf("the API server is %s %s after it became fast again", st, within)
					}
				})
			}
		})
	}
}

// TestAnswerDuringInquiry checks that over HTTP/1.1 a late answer ends the inquiry at once, and the
// API server stays up.
func TestAnswerDuringInquiry(t *testing.T) {
	c, cert := bubbleCerts(t)
	synctest.Test(t, func(t *testing.T) {
		m := newFakeMaster(t, cert)
		m.slow, m.plain = true, true
		m.start()
		s := startWatcher(t, m, LAN(), c.roots(t))
		defer s.stop(m)
		time.Sleep(time.Minute)
		m.lag.Store(int64(700 * time.Millisecond))
		time.Sleep(time.Minute)
		if len(s.changes()) != 1 {
			t.Errorf("%q", s.changes())
		}
	})
}

// TestKeepsConnections checks that a node keeps its connections to an API server that answers but
// is not ready for 10 to 20 s, and longer if no other is up. Connections to a dead one are not
// kept.
func TestKeepsConnections(t *testing.T) {
	for _, tt := range []struct {
		name  string
		in    []probe.Outcome
		keeps bool
	}{
		{"not ready", []probe.Outcome{probe.ServerError, probe.ServerError}, true},
		{"requests hang", []probe.Outcome{probe.Overdue, probe.Overdue}, true},
		{"not ready, then slow", []probe.Outcome{probe.ServerError, probe.ServerError, probe.Late, probe.Overdue}, true},
		{"hangs", []probe.Outcome{probe.Late, probe.Late}, false},
		{"is dropped", []probe.Outcome{probe.Late, probe.Timeout}, false},
		{"not ready, then stopped", []probe.Outcome{probe.ServerError, probe.ServerError, probe.Refused}, false},
		{"another cluster", []probe.Outcome{probe.ServerError, probe.ServerError, probe.Recreated}, false},
		{"up again", []probe.Outcome{probe.ServerError, probe.ServerError, probe.OK, probe.OK}, false},
	} {
		now := time.Unix(1000, 0)
		h := health{Rise: 2, Fall: 2}
		h.observe(probe.OK, now)
		for _, c := range tt.in {
			h.observe(c, now)
		}
		if got := h.keeps(now.Add(closeAfter/2-1), false); got != tt.keeps {
			t.Errorf("%s: keeps its connections: %t", tt.name, got)
		}
		if h.keeps(now.Add(closeAfter), false) {
			t.Errorf("%s: keeps its connections for more than %s", tt.name, closeAfter)
		}
		if got := h.keeps(now.Add(time.Hour), true); got != tt.keeps {
			t.Errorf("%s: keeps its connections while no API server is up: %t", tt.name, got)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(NewDaemon(Options{Log: func(string) {}}), Server{})
		a, m := addrAt(1), &apiServer{health: health{Rise: 2, Fall: 2}}
		g.apiServers[a] = m
		for outage := range 2 { // what the first one leaves behind must not change the second
			for _, c := range []probe.Outcome{probe.OK, probe.OK, probe.ServerError, probe.ServerError} {
				g.observe(t.Context(), a, m, c, nil)
			}
			<-g.changed
			time.Sleep(closeAfter)
			synctest.Wait()
			select {
			case <-g.changed:
			default:
				t.Errorf("outage %d: the real servers are not chosen again when the connections are to be closed", outage+1)
			}
			time.Sleep(time.Minute)
		}
	})
}

// TestSlowAfterARestart checks that the last API server serves although every other request is
// answered too late, even if its connections broke before.
func TestSlowAfterARestart(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		now := time.Unix(1000, 0)
		dead, slow := &apiServer{health: health{Rise: 2, Fall: 2}}, &apiServer{health: health{Rise: 2, Fall: 2}}
		var serving []kernel.Dest
		observe := func(m *apiServer, outcomes ...probe.Outcome) {
			for _, c := range outcomes {
				now = now.Add(4 * time.Second)
				m.health.observe(c, now)
				alone := dead.health.State != Up && slow.health.State != Up
				var all []candidate
				for i, m := range []*apiServer{dead, slow} {
					all = append(all, candidate{addrAt(byte(i + 1)), m.health.State, m.lost(), m.health.slow(), m.health.keeps(now, alone)})
				}
				serving = choose(all, serving, guarded)
			}
		}
		observe(dead, probe.OK)
		observe(slow, probe.OK, probe.Closed, probe.Refused, probe.Refused)
		observe(slow, probe.Overdue, probe.OK, probe.Overdue, probe.OK)
		observe(dead, probe.Closed, probe.Refused)
		for range 5 {
			for _, c := range []probe.Outcome{probe.Overdue, probe.OK} {
				observe(slow, c)
				if i := indexDest(serving, addrAt(2)); i < 0 || serving[i].Weight == 0 {
					t.Fatalf("guarded %t, after %q: the real servers are %v", guarded, c, serving)
				}
			}
		}
	}
}

// TestGuardedNodeKeepsConnections checks a guarded group when an API server answers with errors: if
// it is the only one, it keeps serving; if it is one of two, its connections are not closed.
func TestGuardedNodeKeepsConnections(t *testing.T) {
	now := time.Unix(1000, 0)
	m := &apiServer{health: health{Rise: 2, Fall: 2}}
	serving := []kernel.Dest{dest(addrAt(1), 1)}
	for _, c := range []probe.Outcome{probe.OK, probe.ServerError, probe.ServerError, probe.Overdue} {
		m.health.observe(c, now)
		alone := m.health.State != Up
		serving = choose([]candidate{{addrAt(1), m.health.State, m.lost(), m.health.slow(), m.health.keeps(now, alone)}}, serving, true)
	}
	if !serves(serving) {
		t.Errorf("the only API server answers, and the real servers are %v", serving)
	}
	got := choose([]candidate{{Addr: addrAt(1), State: Down, Lost: true}, {Addr: addrAt(2), State: Down, Lost: true, Kept: true}},
		[]kernel.Dest{dest(addrAt(1), 1)}, true)
	if indexDest(got, addrAt(2)) < 0 {
		t.Errorf("the connections to the second one are closed: %v", got)
	}
}

// TestFewConnections checks the number of connections to an API server that completes each TLS
// handshake and then closes the connection.
func TestFewConnections(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, others := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeMaster(t, cert)
			m.slams.Store(true)
			m.start()
			s := startWatcher(t, m, LAN(), c.roots(t))
			s.others.Store(others)
			defer s.stop(m)
			time.Sleep(time.Minute)
			if n := m.dials.Load(); n > 40 {
				t.Errorf("others %t: %d connections in a minute", others, n)
			}
		})
	}
}

// TestRestartAfterAHang checks that the only API server is up again within 5 s of its return, after
// it has hung, was killed, and refused connections for a while.
func TestRestartAfterAHang(t *testing.T) {
	c, cert := bubbleCerts(t)
	for range 5 {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeMaster(t, cert)
			m.start()
			s := startWatcher(t, m, LAN(), c.roots(t))
			defer s.stop(m)
			time.Sleep(time.Minute)
			m.hung.Store(true)
			time.Sleep(2 * time.Minute)
			m.kill()
			m.hung.Store(false)
			time.Sleep(2 * time.Minute)
			m.dead.Store(false)
			began := time.Now()
			time.Sleep(time.Minute)
			if state, at := s.state(); state != Up || at.Sub(began) > 5*time.Second {
				t.Errorf("%s after %s", state, at.Sub(began))
			}
		})
	}
}

// TestReturn checks that nodes do not all return at the same moment: to the only API server they
// return within 5 s, to one of several spread over at least 6 s.
func TestReturn(t *testing.T) {
	c, cert := bubbleCerts(t)
	const nodes = 40
	for _, tt := range []struct {
		name   string
		others bool
		spread time.Duration // least time between the first and the last return
		last   time.Duration
	}{
		{"alone", false, time.Second, 5 * time.Second},
		{"one of several", true, 6 * time.Second, LAN().Spread + 2*time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeMaster(t, cert)
				m.start()
				var all []*testWatcher
				for range nodes {
					s := startWatcher(t, m, LAN(), c.roots(t))
					s.others.Store(tt.others)
					all = append(all, s)
				}
				time.Sleep(time.Minute)
				m.kill()
				time.Sleep(30 * time.Second)
				began, before := time.Now(), m.dials.Load()
				m.dead.Store(false)
				time.Sleep(tt.last)
				var after []time.Duration
				for _, s := range all {
					st, at := s.state()
					if st != Up {
						t.Errorf("on one node, the API server is %s after %s", st, tt.last)
					}
					after = append(after, at.Sub(began))
				}
				slices.Sort(after)
				t.Logf("back after %s to %s, %d connections", after[0], after[nodes-1], m.dials.Load()-before)
				if after[nodes-1]-after[0] < tt.spread {
					t.Errorf("all are back between %s and %s", after[0], after[nodes-1])
				}
				for _, s := range all {
					s.cancel()
					<-s.done
				}
				m.stop()
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestUrgentReturn checks that the pause before a reconnection ends if the other API servers go
// down too.
func TestUrgentReturn(t *testing.T) {
	c, cert := bubbleCerts(t)
	for range 10 {
		synctest.Test(t, func(t *testing.T) {
			p := LAN()
			p.Spread = time.Hour
			m := newFakeMaster(t, cert)
			m.start()
			s := startWatcher(t, m, p, c.roots(t))
			s.others.Store(true)
			defer s.stop(m)
			time.Sleep(time.Minute)
			m.kill()
			time.Sleep(5 * time.Second)
			m.dead.Store(false)
			time.Sleep(p.RetryMax)
			s.others.Store(false)
			time.Sleep(5 * time.Second)
			if st, _ := s.state(); st != Up {
				t.Errorf("the API server is %s", st)
			}
		})
	}
}

// TestSlowLoneServer checks that the only API server of a joined node stays in use while it answers
// only PINGs, until its process ends.
func TestSlowLoneServer(t *testing.T) {
	w := newGuardedWorld(t)
	hang := make(chan struct{})
	w.m.stop()
	w.m.handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == DefaultPath {
			select {
			case <-hang:
				<-r.Context().Done()
			default:
			}
		}
		w.says.ServeHTTP(rw, r)
	})
	w.m.start()
	w.s.Profile.ReadyTimeout = 300 * time.Millisecond
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))
	mark := w.kernel.mark()
	close(hang)
	w.eventually("it is down", func() bool { return w.said("is down, it was up") > 0 })
	wake(w.daemon.kept()[w.s.VIP].changed)
	time.Sleep(200 * time.Millisecond)
	if since := w.kernel.since(mark); len(since) > 0 || !w.serves("1")() {
		t.Errorf("the rules changed: %s", fmt.Sprint(since))
	}
	w.m.stop()
	w.eventually("it gets no new connections", w.serves("0"))
}

// TestHTTP1 checks that an API server or proxy without HTTP/2 gets few requests, however long its
// answers take, and that HEAD works without a body.
func TestHTTP1(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, takes := range []time.Duration{time.Millisecond, 200 * time.Millisecond, time.Second, 3 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeMaster(t, cert)
			h := &starved{}
			h.status.Store(200)
			h.takes.Store(int64(takes))
			m.http.Handler, m.plain = h, true
			m.start()
			s := startWatcher(t, m, LAN(), c.roots(t))
			time.Sleep(time.Minute)
			before := h.asked.Load()
			time.Sleep(10 * time.Minute)
			if n := h.asked.Load() - before; n > 180 {
				t.Errorf("answers take %s: %d requests in ten minutes", takes, n)
			}
			if st, _ := s.state(); st != Up {
				t.Errorf("answers take %s: the API server is %s, %q", takes, st, s.changes())
			}
			s.cancel()
			<-s.done
			m.stop()
			time.Sleep(2 * time.Hour)
		})
	}
	synctest.Test(t, func(t *testing.T) {
		m := newFakeMaster(t, cert)
		m.plain = true
		m.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "2")
			w.Write([]byte("ok"))
		})
		m.start()
		s := startWatcherWith(t, m, LAN(), c.roots(t), probe.Spec{Method: "HEAD", Path: "/readyz"})
		defer s.stop(m)
		time.Sleep(time.Minute)
		if fmt.Sprint(s.changes()) != "[up (ready)]" {
			t.Errorf("HEAD: %q", s.changes())
		}
	})
}

// TestReturnOfAServerThatClosesConnections checks an API server that closes the connection after each
// answer, as kube-apiserver does without a valid client certificate. It must be up soon after its
// errors end.
func TestReturnOfAServerThatClosesConnections(t *testing.T) {
	c, cert := bubbleCerts(t)
	for range 10 {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeMaster(t, cert)
			m.closesEach = true
			m.status.Store(500)
			m.start()
			s := startWatcher(t, m, LAN(), c.roots(t))
			defer s.stop(m)
			time.Sleep(time.Minute + time.Duration(mrand.Int64N(int64(time.Minute))))
			m.status.Store(200)
			time.Sleep(35 * time.Second)
			if st, _ := s.state(); st != Up {
				t.Errorf("the API server is %s 35 s after its errors ended", st)
			}
		})
	}
	// The other API servers are up until this one, which closes connections, has returned; then
	// they fail.
	for range 10 {
		synctest.Test(t, func(t *testing.T) {
			p := LAN()
			p.Spread = 10 * time.Minute
			m := newFakeMaster(t, cert)
			m.closesEach, m.client = true, &cert
			m.start()
			s := startWatcher(t, m, p, c.roots(t))
			s.others.Store(true)
			defer s.stop(m)
			time.Sleep(time.Minute)
			m.status.Store(500)
			time.Sleep(11 * time.Second)
			m.status.Store(200)
			time.Sleep(5 * time.Second)
			s.others.Store(false)
			time.Sleep(6 * time.Second)
			if st, _ := s.state(); st != Up {
				t.Errorf("the API server is %s 6 s after it became the only one: %q", st, s.changes())
			}
		})
	}
}

// TestRejectedCertificate checks that a node with an expired certificate causes no more connections
// than one without a certificate.
func TestRejectedCertificate(t *testing.T) {
	c, cert := bubbleCerts(t)
	synctest.Test(t, func(t *testing.T) {
		m := newFakeMaster(t, cert)
		m.closesEach, m.client = true, &cert
		m.status.Store(http.StatusUnauthorized)
		m.start()
		s := startWatcher(t, m, LAN(), c.roots(t))
		defer s.stop(m)
		time.Sleep(10 * time.Minute)
		before := m.dials.Load()
		time.Sleep(time.Hour)
		if n := m.dials.Load() - before; n > 60 {
			t.Errorf("%d connections in an hour", n)
		}
	})
}
