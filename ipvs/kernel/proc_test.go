package kernel

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

func TestParseConns(t *testing.T) {
	text := []byte(`Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP 0A670065 D2F0 0A676102 192B 0A67000B 192B ESTABLISHED     899
TCP 0A670065 D2F1 0A676102 192B 0A67000C 192B SYN_RECV         12
TCP 0A670065 D2F3 0A676102 192B 0A67000B 192B SYN_RECV         12
TCP 0A670065 D2F2 0A60000A 192B 0A67000B 192B ESTABLISHED     899
UDP 0A670065 D2F3 0A676102 192B 0A67000B 192B UDP             899
TCP FD00:0000:0000:0000:0000:0000:0000:0003 D2F4 FD00:0097:0000:0000:0000:0000:0000:0002 192B FD00:0000:0000:0000:0000:0000:0000:0001 192B ESTABLISHED     899
TCP nonsense
`)
	all := parseConns(text, func(Conn, []byte) bool { return true })
	if len(all) != 5 {
		t.Fatalf("%d connections: %v", len(all), all)
	}
	if got, want := fmt.Sprint(all[0]), "{10.103.0.101:54000 10.103.97.2:6443 10.103.0.11:6443}"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(all[4]), "{[fd00::3]:54004 [fd00:97::2]:6443 [fd00::1]:6443}"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	file := filepath.Join(t.TempDir(), "conns")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	mine, err := readConns(file, vip6443, netip.MustParseAddrPort("10.103.0.11:6443"))
	if err != nil || len(mine) != 1 || mine[0] != all[0] {
		t.Errorf("%v, %v", mine, err)
	}
}

// TestReadConnsOfALargeTable checks that connections of other programs need no memory, and that
// each line is parsed once, wherever a read ends.
func TestReadConnsOfALargeTable(t *testing.T) {
	const entries = 20000
	var text bytes.Buffer
	for i := range entries {
		fmt.Fprintf(&text, "TCP 0A67%04X D2F0 0A60000A 192B 0A67000B 192B ESTABLISHED %*d\n", i, i%37, 0)
		if i%4000 == 0 {
			fmt.Fprintf(&text, "TCP 0A67%04X D2F0 0A676102 192B 0A67000B 192B ESTABLISHED 899\n", i)
		}
	}
	file := filepath.Join(t.TempDir(), "conns")
	if err := os.WriteFile(file, bytes.TrimSuffix(text.Bytes(), []byte("\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	mine, err := readConns(file, vip6443, netip.MustParseAddrPort("10.103.0.11:6443"))
	runtime.ReadMemStats(&after)
	if err != nil || len(mine) != 5 {
		t.Errorf("%v, %v", mine, err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 256<<10 {
		t.Errorf("readConns allocates %d bytes", n)
	}
	// The same file is read repeatedly, like the table of sockets.
	var table procFile
	defer table.close()
	for range 2 {
		var again bytes.Buffer
		for {
			lines, err := table.next(file)
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			again.Write(lines)
		}
		if got := again.String() + "\n"; got != text.String() {
			t.Errorf("%d bytes, want %d", len(got), text.Len())
		}
	}
}

// procStatsText is from Linux 6.12. The line with "~" is the estimator's total.
const procStatsText = `       Total Incoming Outgoing         Incoming         Outgoing
CPU    Conns  Packets  Packets            Bytes            Bytes
  0       1A       FF        0             9C40                0
 1F        2        2        0              100                0
  ~       10       80        0             4000                0

     Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s
           0        1        0               28                0
`

func TestSentPackets(t *testing.T) {
	if n := sentPackets([]byte(procStatsText)); n != 0x101 {
		t.Errorf("%#x packets", n)
	}
	if n := sentPackets(nil); n != 0 {
		t.Errorf("%d packets in an empty file", n)
	}
}

func FuzzProc(f *testing.F) {
	f.Add([]byte("TCP 0A670065 D2F0 0A676102 192B 0A67000B 192B ESTABLISHED     899\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		parseConns(text, func(Conn, []byte) bool { return true })
		stuckSockets(text, vip6443)
		sentPackets(text)
	})
}

func TestSysctl(t *testing.T) {
	file := filepath.Join(t.TempDir(), "arp_ignore")
	if err := os.WriteFile(file, []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := sysctl{path: file, min: 1}
	for i, want := range []bool{true, false} {
		if did, err := s.ensure(); did != want || err != nil {
			t.Errorf("call %d: %v, %v", i, did, err)
		}
	}
}
