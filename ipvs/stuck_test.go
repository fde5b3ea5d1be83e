package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ipvs/kernel"
)

// TestMeteredFailureDetection checks that with the metered profile, a silent API server is detected
// at the next request, and within seconds once the node's own connections to it wait for
// acknowledgements.
func TestMeteredFailureDetection(t *testing.T) {
	c, cert := bubbleCerts(t)
	inquiryTime := Metered().Tick*time.Duration(2*Metered().Ticks) + 2*time.Second
	for _, tt := range []struct {
		name  string
		fault func(*fakeMaster)
		stuck bool
		most  time.Duration
	}{
		{"killed", (*fakeMaster).kill, false, time.Second},
		{"stopped", func(m *fakeMaster) { m.hung.Store(true) }, false, Metered().Ready + inquiryTime},
		{"silent", func(m *fakeMaster) { m.gone.Store(true) }, false, Metered().Ready + inquiryTime},
		{"stopped, and the node waits", func(m *fakeMaster) { m.hung.Store(true) }, true, inquiryTime},
		{"silent, and the node waits", func(m *fakeMaster) { m.gone.Store(true) }, true, inquiryTime},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i := range 8 {
				synctest.Test(t, func(t *testing.T) {
					m := newFakeMaster(t, cert)
					m.start()
					s := startWatcher(t, m, Metered(), c.roots(t))
					defer s.stop(m)
					time.Sleep(5*time.Minute + time.Duration(i)*9700*time.Millisecond)
					if dials := m.dials.Load(); dials != 1 {
						t.Errorf("%d connections without faults, want 1", dials)
					}
					broke := time.Now()
					tt.fault(m)
					if tt.stuck {
						wake(s.needed)
					}
					time.Sleep(2 * time.Minute)
					st, at := s.state()
					if st != Down || at.Sub(broke) > tt.most {
						t.Errorf("the API server is %s after %s, want down within %s: %v", st, at.Sub(broke), tt.most, s.changes())
					}
				})
			}
		})
	}
	t.Run("a node that waits for a live master costs one PING", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeMaster(t, cert)
			m.start()
			s := startWatcher(t, m, Metered(), c.roots(t))
			defer s.stop(m)
			time.Sleep(5 * time.Minute)
			wake(s.needed)
			time.Sleep(10 * time.Second)
			if n := s.pings.Load(); n != 1 || len(s.changes()) != 1 || m.dials.Load() != 1 {
				t.Errorf("%d PINGs, %d connections, %v", n, m.dials.Load(), s.changes())
			}
		})
	})
}

// TestSuspect checks that a poor link does not cause continuous probes.
func TestSuspect(t *testing.T) {
	g, _ := namesGroup(t, "", nil, "192.0.2.1:6443")
	a := netip.MustParseAddrPort("192.0.2.1:6443")
	m := &apiServer{probeNow: make(chan struct{}, 1), health: health{State: Up}}
	g.apiServers[a] = m
	asked := ""
	for i := range 10 {
		g.suspect([]netip.AddrPort{a, addrAt(9)}, time.Unix(int64(i*5), 0))
		select {
		case <-m.probeNow:
			asked += fmt.Sprint(i*5, " ")
		default:
		}
	}
	if asked != "0 15 30 45 " {
		t.Errorf("asked at %q", asked)
	}
}

// TestUsed checks that when programs of the node send packets, API servers with established or new
// connections are probed on the next tick, and no others are.
func TestUsed(t *testing.T) {
	for _, p := range []Profile{LAN(), Metered()} {
		g, _ := namesGroup(t, "", nil, "192.0.2.1:6443")
		g.server.Profile = p
		a, b := netip.MustParseAddrPort("192.0.2.1:6443"), netip.MustParseAddrPort("192.0.2.2:6443")
		servers := map[netip.AddrPort]*apiServer{}
		for _, addr := range []netip.AddrPort{a, b} {
			servers[addr] = &apiServer{probeNow: make(chan struct{}, 1), health: health{State: Up}}
			g.apiServers[addr] = servers[addr]
		}
		m := newMemKernel(t)
		want := kernel.Service{VIP: g.vip, Scheduler: "rr", Dests: []kernel.Dest{{Addr: a, Weight: 1}, {Addr: b, Weight: 1}}}
		m.Services = []kernel.Service{want}
		k := newReconciler(m, t.Logf, new(stats), nil)
		k.want = []kernel.Service{want}
		k.used = func(vip netip.AddrPort, dests []netip.AddrPort) {
			if vip != g.vip {
				t.Errorf("%s was used", vip)
			}
			g.used(dests)
		}
		var asked []string
		type conns = map[netip.AddrPort]kernel.Conns
		for _, at := range []struct {
			packets uint64
			conns   conns
		}{
			{0, nil},
			{3, conns{a: {Active: 1}}},
			{3, conns{a: {Active: 1}, b: {Active: 1}}}, // no packets
			{5, conns{a: {Active: 1}, b: {Active: 1}}},
			{6, conns{a: {Inactive: 1}, b: {Inactive: 1}}}, // connections to a and b are opened or closed
			{7, conns{a: {Inactive: 1}, b: {Inactive: 2}}},
			{8, conns{a: {Inactive: 1}, b: {Inactive: 2}}}, // the new packets belong to closed connections
		} {
			m.Packets, m.Opened = at.packets, at.conns
			k.tick(false)
			look := ""
			for _, addr := range []netip.AddrPort{a, b} {
				select {
				case <-servers[addr].probeNow:
					look += addr.Addr().String()[len("192.0.2."):]
				default:
				}
			}
			asked = append(asked, look)
		}
		expected := []string{"", "1", "", "12", "12", "2", ""}
		if p.Ping == 0 { // this profile checks for unacknowledged packets instead
			expected = []string{"", "", "", "", "", "", ""}
		}
		if !slices.Equal(asked, expected) {
			t.Errorf("%s: asked %q, want %q", p.Name, asked, expected)
		}
	}
}

// TestReceivers checks that virtual servers with a common real server are each compared with their
// own earlier numbers.
func TestReceivers(t *testing.T) {
	k := newReconciler(newMemKernel(t), t.Logf, new(stats), nil)
	one, two, dest := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:1"), addrAt(1)
	with := func(n int) *kernel.Service {
		return &kernel.Service{Conns: map[netip.AddrPort]kernel.Conns{dest: {Inactive: n}}}
	}
	for i, step := range []struct {
		vip      netip.AddrPort
		inactive int
		want     int
	}{{one, 5, 1}, {two, 0, 0}, {one, 5, 0}, {one, 4, 0}, {one, 5, 1}, {two, 1, 1}} {
		if got := k.receivers(step.vip, with(step.inactive)); len(got) != step.want {
			t.Errorf("step %d: %v", i, got)
		}
	}
}
