package ipvs

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

// TestOverloadedAPIServerIsProbedRarely checks a joined node whose connection to its only API server
// broke, while the server is too busy to show its cluster. The node sends few requests, new
// connections still go to the server, and the node notices within half a minute that it has
// recovered.
func TestOverloadedAPIServerIsProbedRarely(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, tt := range []struct {
		name   string
		status int           // of the answers to questions about the cluster
		after  time.Duration // time until these answers
	}{
		{"429", http.StatusTooManyRequests, 0},
		{"503", http.StatusServiceUnavailable, 0},
		{"late", http.StatusOK, 20 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeMaster(t, cert)
				var busy atomic.Bool
				var requests atomic.Int64
				cluster := &shows{info: oldInfo, node: oldNode, service: oldSvc}
				m.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					requests.Add(1)
					if busy.Load() {
						time.Sleep(tt.after)
						w.WriteHeader(tt.status)
						return
					}
					cluster.ServeHTTP(w, r)
				})
				m.start()
				target := func() probe.Target {
					return probe.Target{Addr: addrAt(1), Name: "10.0.0.1", SNI: "apiserver.cluster.local", Sessions: &probe.Sessions{},
						Probe: probe.Spec{Method: "GET", Path: "/readyz"}, Roots: c.roots(t), Dial: m.dial}
				}
				var mu sync.Mutex
				server := apiServer{health: health{Rise: 2, Fall: 2}}
				state := func() State {
					mu.Lock()
					defer mu.Unlock()
					return server.health.State
				}
				ctx, cancel := context.WithCancel(t.Context())
				w := &watcher{
					profile: LAN(), fall: 2, renew: make(chan struct{}, 1), probeNow: make(chan struct{}, 1), slots: make(chan struct{}, maxHandshakes), ticks: tickTimes{time.Now()},
					alone:  func() bool { return state() != Up },
					target: target, count: func(counter) {},
					clusterCheck: func(ctx context.Context) (probe.Outcome, error) { return joinedNow.check(ctx, target()) },
					observe: func(o probe.Outcome, _ error) (State, bool) {
						mu.Lock()
						defer mu.Unlock()
						server.health.observe(o, time.Now())
						return server.health.State, server.health.probeSoon()
					},
				}
				ended := make(chan struct{})
				go func() { defer close(ended); w.run(ctx) }()
				time.Sleep(time.Minute)
				busy.Store(true)
				m.mu.Lock()
				for _, conn := range m.conns {
					conn.Close()
				}
				m.conns = nil
				m.mu.Unlock()
				time.Sleep(2 * time.Minute)
				sent, dials := requests.Load(), m.dials.Load()
				time.Sleep(10 * time.Minute)
				// A node's share of the 50 requests a second that a thousand nodes may send.
				if sent = requests.Load() - sent; sent > 30 {
					t.Errorf("%d requests in ten minutes", sent)
				}
				if dials = m.dials.Load() - dials; dials > 60 {
					t.Errorf("%d connections in ten minutes", dials)
				}
				mu.Lock()
				last := choose([]candidate{{addrAt(1), server.health.State, server.lost(), server.health.slow(), server.health.keeps(time.Now(), true)}}, []kernel.Dest{dest(addrAt(1), 1)}, true)
				mu.Unlock()
				if len(last) != 1 || last[0].Weight != 1 {
					t.Errorf("real servers: %v", last)
				}
				busy.Store(false)
				time.Sleep(maxTimeout + mostSpacing + 5*time.Second)
				if got := state(); got != Up {
					t.Errorf("after its recovery it is %s", got)
				}
				cancel()
				<-ended
				m.stop()
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestStoppedAPIServerIsLost checks that a joined node sends nothing to its last API server if that
// has stopped, also if it answers 503 when it starts again: it may belong to another cluster then.
func TestStoppedAPIServerIsLost(t *testing.T) {
	now := time.Now()
	m := apiServer{health: health{Rise: 2, Fall: 2}}
	for _, o := range []probe.Outcome{probe.OK, probe.OK, probe.Closed, probe.Refused, probe.Busy, probe.Busy} {
		m.health.observe(o, now)
	}
	if !m.lost() {
		t.Errorf("not lost: %+v", m.health)
	}
}
