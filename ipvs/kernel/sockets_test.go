package kernel

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

var vip6443 = netip.MustParseAddrPort("10.103.97.2:6443")

func TestStuckSockets(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 6500670A:A001 0261670A:192B 01 00000000:00000000 02:00000D05 00000000     0        0 11 2 0000000000000000 20 4 30 10 -1
   1: 6500670A:A002 0261670A:192B 01 00000023:00000000 01:00000D05 00000002     0        0 12 2 0000000000000000 20 4 30 10 -1
   2: 6500670A:A003 0261670A:192B 01 00000023:00000000 01:00000D05 00000001     0        0 13 2 0000000000000000 20 4 30 10 -1
   3: 6500670A:A004 0261670A:192B 02 00000001:00000000 01:00000D05 00000001     0        0 14 2 0000000000000000 20 4 30 10 -1
   4: 6500670A:A005 0261670A:192C 01 00000023:00000000 01:00000D05 00000009     0        0 15 2 0000000000000000 20 4 30 10 -1
`
	sockets := stuckSockets([]byte(table), vip6443)
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
	if got, want := stuckBehind([]byte(conns), vip6443, sockets), []netip.AddrPort{netip.MustParseAddrPort("10.0.0.12:6443")}; !slices.Equal(got, want) {
		t.Errorf("behind them: %v, want %v", got, want)
	}
}

// TestSocketAddrs checks that addresses are parsed as this machine's kernel formats them.
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
