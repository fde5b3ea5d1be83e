package ipvs

import (
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// starved simulates a kube-apiserver whose processors or etcd are overloaded. It works on each
// request for a while, even if the connection is closed, and answers PINGs at once.
type starved struct {
	takes  atomic.Int64 // time of one request
	status atomic.Int64
	now    atomic.Int64 // requests being worked on
	most   atomic.Int64 // maximum of now
	asked  atomic.Int64
}

func (s *starved) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.asked.Add(1)
	for n := s.now.Add(1); ; {
		most := s.most.Load()
		if n <= most || s.most.CompareAndSwap(most, n) {
			break
		}
	}
	defer s.now.Add(-1)
	time.Sleep(time.Duration(s.takes.Load()))
	w.WriteHeader(int(s.status.Load()))
}

// TestStarvedServer checks overloaded API servers. One daemon never causes work on two requests at
// once; a thousand send at most 50 requests a second. A slow API server stays in use. One that
// starts is up within 5 s of being ready, others soon after their next answer.
func TestStarvedServer(t *testing.T) {
	c, cert := bubbleCerts(t)
	const nodes, fleet, most = 20, 1000, 50
	for _, tt := range []struct {
		name   string
		takes  time.Duration // time of each answer
		lag    time.Duration // delay of everything that it sends, including PINGs
		status int64
		lasts  time.Duration
		back   time.Duration // maximum time until it is up again after it recovers
		state  State         // state while it is in trouble
		slow   bool          // it stays in use anyway
	}{
		{"starts", time.Millisecond, 0, 500, 15 * time.Second, 5 * time.Second, Down, false},
		{"errors", time.Millisecond, 0, 500, 10 * time.Minute, 35 * time.Second, Down, false},
		{"errors after 1 s", time.Second, 0, 500, 10 * time.Minute, 35 * time.Second, Down, false},
		{"errors after 30 s", 30 * time.Second, 0, 500, 10 * time.Minute, 65 * time.Second, Down, false},
		{"errors after 60 s", time.Minute, 0, 504, 10 * time.Minute, 95 * time.Second, Down, false},
		{"0.5 s", 500 * time.Millisecond, 0, 200, 10 * time.Minute, 0, Up, false},
		{"1 s", time.Second, 0, 200, 10 * time.Minute, 0, Up, false},
		{"5 s", 5 * time.Second, 0, 200, 10 * time.Minute, 0, Up, false},
		{"10 s", 10 * time.Second, 0, 200, 10 * time.Minute, 45 * time.Second, Down, true},
		{"30 s", 30 * time.Second, 0, 200, 10 * time.Minute, 65 * time.Second, Down, true},
		{"60 s", time.Minute, 0, 200, 10 * time.Minute, 95 * time.Second, Down, true},
		{"for ever", time.Hour, 0, 200, 10 * time.Minute, 160 * time.Second, Down, true},
		{"30 s, and PINGs 10 s", 30 * time.Second, 10 * time.Second, 200, 10 * time.Minute, 80 * time.Second, Down, true},
		{"30 s, and PINGs 20 s", 30 * time.Second, 20 * time.Second, 200, 10 * time.Minute, 90 * time.Second, Down, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeMaster(t, cert)
				h := &starved{}
				h.status.Store(200)
				m.http.Handler, m.slow = h, true
				m.start()
				var all []*testWatcher
				for range nodes {
					all = append(all, startWatcher(t, m, LAN(), c.roots(t)))
				}
				time.Sleep(time.Minute)
				m.lag.Store(int64(tt.lag))
				h.takes.Store(int64(tt.takes))
				h.status.Store(tt.status)
				early := min(tt.lasts, time.Minute)
				time.Sleep(early)
				if later := tt.lasts - early; later > 0 {
					before := h.asked.Load()
					time.Sleep(later)
					rate := float64(h.asked.Load()-before) / later.Seconds() * fleet / nodes
					t.Logf("%d daemons send %.0f requests a second; at most %d were being worked on for %d", fleet, rate, h.most.Load(), nodes)
					if rate > most {
						t.Errorf("%d daemons send %.0f requests a second, want at most %d", fleet, rate, most)
					}
				}
				if tt.takes < mostAnswer && h.most.Load() > nodes {
					t.Errorf("%d requests of %d daemons were being worked on", h.most.Load(), nodes)
				}
				for _, s := range all {
					s.mu.Lock()
					if got := s.health.slow(); s.health.State != tt.state || got != tt.slow {
						t.Errorf("state %s, stays a real server: %t; want %s, %t: %q", s.health.State, got, tt.state, tt.slow, s.events)
					}
					s.mu.Unlock()
				}
				m.lag.Store(0)
				h.takes.Store(0)
				h.status.Store(200)
				time.Sleep(tt.back)
				for _, s := range all {
					if st, _ := s.state(); st != Up {
						t.Errorf("the API server is %s %s after it recovered", st, tt.back)
						break
					}
				}
				for _, s := range all {
					s.cancel()
					<-s.done
				}
				m.stop()
				time.Sleep(2 * time.Hour)
			})
		})
	}
}
