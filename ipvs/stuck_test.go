package ipvs

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

func TestStuckSockets(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 6500670A:A001 0261670A:192B 01 00000000:00000000 02:00000D05 00000000     0        0 11 2 0000000000000000 20 4 30 10 -1
   1: 6500670A:A002 0261670A:192B 01 00000023:00000000 01:00000D05 00000002     0        0 12 2 0000000000000000 20 4 30 10 -1
   2: 6500670A:A003 0261670A:192B 01 00000023:00000000 01:00000D05 00000001     0        0 13 2 0000000000000000 20 4 30 10 -1
   3: 6500670A:A004 0261670A:192B 02 00000001:00000000 01:00000D05 00000001     0        0 14 2 0000000000000000 20 4 30 10 -1
   4: 6500670A:A005 0261670A:192C 01 00000023:00000000 01:00000D05 00000009     0        0 15 2 0000000000000000 20 4 30 10 -1
`
	sockets := stuckSockets([]byte(table), testVIP)
	at := func(port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("10.103.0.101"), port)
	}
	if want := []netip.AddrPort{at(0xa002), at(0xa004)}; !slices.Equal(sockets, want) {
		t.Errorf("got %v, want %v", sockets, want)
	}
	const conns = `Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP 0A670065 A001 0A676102 192B 0A00000B 192B ESTABLISHED     899
TCP 0A670065 A002 0A676102 192B 0A00000C 192B ESTABLISHED     899
TCP 0A670065 A004 0A676102 192B 0A00000C 192B SYN_RECV         59
`
	if got, want := stuckBehind([]byte(conns), testVIP, sockets), []netip.AddrPort{netip.MustParseAddrPort("10.0.0.12:6443")}; !slices.Equal(got, want) {
		t.Errorf("behind them: %v, want %v", got, want)
	}
}

// TestSocketAddrs: addresses are read as this machine's kernel writes them.
func TestSocketAddrs(t *testing.T) {
	for file, listen := range map[string]string{procTCP: "127.0.0.1:0", procTCP6: "[::1]:0"} {
		ln, err := net.Listen("tcp", listen)
		if err != nil {
			t.Logf("SKIPPED: %v", err)
			continue
		}
		defer ln.Close()
		text, err := os.ReadFile(file)
		if err != nil {
			desk.Lacks(t, "reading the kernel's table of sockets: %v", err)
		}
		found := false
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) > 1 {
				a, ok := parseSocketAddr([]byte(f[1]))
				found = found || ok && a.String() == ln.Addr().String()
			}
		}
		if !found {
			t.Errorf("%s does not name %s:\n%s", file, ln.Addr(), text)
		}
	}
	for _, bad := range []string{"", "local_address", "0261670A", "0261670A:", "0261670:192B", "0261670G:192B"} {
		if a, ok := parseSocketAddr([]byte(bad)); ok {
			t.Errorf("%q is %s", bad, a)
		}
	}
}

// TestMeteredSensing: what the metered profile promises. A silent master is
// noticed with the next request, and within a few seconds once the node's own
// connections to it wait.
func TestMeteredSensing(t *testing.T) {
	c, cert := bubbleCerts(t)
	doubted := Metered().Tick*time.Duration(2*Metered().Ticks) + 2*time.Second
	for _, tt := range []struct {
		name  string
		fault func(*fakeMaster)
		stuck bool
		most  time.Duration
	}{
		{"killed", (*fakeMaster).kill, false, time.Second},
		{"stopped", func(m *fakeMaster) { m.hung.Store(true) }, false, Metered().Ready + doubted},
		{"silent", func(m *fakeMaster) { m.gone.Store(true) }, false, Metered().Ready + doubted},
		{"stopped, and the node waits", func(m *fakeMaster) { m.hung.Store(true) }, true, doubted},
		{"silent, and the node waits", func(m *fakeMaster) { m.gone.Store(true) }, true, doubted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i := range 8 {
				synctest.Test(t, func(t *testing.T) {
					m := newFakeMaster(t, cert)
					m.start()
					s := sense(t, m, Metered(), c.roots(t))
					defer s.stop(m)
					time.Sleep(5*time.Minute + time.Duration(i)*9700*time.Millisecond)
					if dials := m.dials.Load(); dials != 1 {
						t.Errorf("%d connections in peace, want 1", dials)
					}
					broke := time.Now()
					tt.fault(m)
					if tt.stuck {
						poke(s.stuck)
					}
					time.Sleep(2 * time.Minute)
					st, at := s.state()
					if st != Down || at.Sub(broke) > tt.most {
						t.Errorf("it is %s after %s, want down within %s: %v", st, at.Sub(broke), tt.most, s.events)
					}
				})
			}
		})
	}
	t.Run("a node that waits for a live master costs one PING", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFakeMaster(t, cert)
			m.start()
			s := sense(t, m, Metered(), c.roots(t))
			defer s.stop(m)
			time.Sleep(5 * time.Minute)
			poke(s.stuck)
			time.Sleep(10 * time.Second)
			if n := s.pings.Load(); n != 1 || len(s.events) != 1 || m.dials.Load() != 1 {
				t.Errorf("%d PINGs, %d connections, %v", n, m.dials.Load(), s.events)
			}
		})
	})
}

// TestSuspect: a poor link does not have a master asked all the time.
func TestSuspect(t *testing.T) {
	g, _ := namesGroup(t, "", nil, "192.0.2.1:6443")
	a := netip.MustParseAddrPort("192.0.2.1:6443")
	m := &member{stuck: make(chan struct{}, 1), health: health{State: Up}}
	g.members[a] = m
	asked := ""
	for i := range 10 {
		g.suspect([]netip.AddrPort{a, addrAt(9)}, time.Unix(int64(i*5), 0))
		select {
		case <-m.stuck:
			asked += fmt.Sprint(i*5, " ")
		default:
		}
	}
	if asked != "0 15 30 45 " {
		t.Errorf("asked at %q", asked)
	}
}
