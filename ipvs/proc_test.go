package ipvs

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

const procTable = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A60000A:0035 wrr
  -> 0AF40005:0035      Masq    1      0          0
TCP  0A676102:192B rr
  -> 0A67000B:192B      Masq    1      3          12
  -> 0A67000C:192B      Masq    0      0          0
TCP  [FD00:0097:0000:0000:0000:0000:0000:0002]:192B lc persistent 300 FFFFFFFF
  -> [FD00:0000:0000:0000:0000:0000:0000:0001]:192B      Route   5      0          0
UDP  0A676102:192B rr
  -> 0A67000D:192B      Masq    1      0          0
`

func TestSteadyMatches(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ip_vs")
	if err := os.WriteFile(file, []byte(procTable), 0o600); err != nil {
		t.Fatal(err)
	}
	ap := netip.MustParseAddrPort
	right := func() Service {
		return Service{VIP: testVIP, Scheduler: "rr", Dests: []Dest{{ap("10.103.0.11:6443"), 1, Masq}, {ap("10.103.0.12:6443"), 0, Masq}}}
	}
	for _, tt := range []struct {
		name   string
		change func(*Service)
		want   bool
	}{
		{"right", func(*Service) {}, true},
		{"weight", func(s *Service) { s.Dests[1].Weight = 1 }, false},
		{"method", func(s *Service) { s.Dests[0].Forward = Tunnel }, false},
		{"one missing", func(s *Service) { s.Dests = append(s.Dests, Dest{ap("10.103.0.13:6443"), 1, Masq}) }, false},
		{"one too many", func(s *Service) { s.Dests = s.Dests[:1] }, false},
		{"scheduler", func(s *Service) { s.Scheduler = "wrr" }, false},
		{"no such service", func(s *Service) { s.VIP = ap("10.103.97.3:6443") }, false},
		{"UDP is another", func(s *Service) { s.Dests = []Dest{{ap("10.103.0.13:6443"), 1, Masq}} }, false},
		{"persistent", func(s *Service) {
			*s = Service{VIP: ap("[fd00:97::2]:6443"), Scheduler: "lc", Dests: []Dest{{ap("[fd00::1]:6443"), 5, Route}}}
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := right()
			tt.change(&s)
			var st steady
			defer st.table.close()
			if got, err := st.same(file, []Service{s}); got != tt.want || err != nil {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
	t.Run("without garbage", func(t *testing.T) {
		var st steady
		defer st.table.close()
		want := []Service{right()}
		if n := testing.AllocsPerRun(100, func() {
			if ok, err := st.same(file, want); !ok || err != nil {
				t.Error(ok, err)
			}
		}); n != 0 {
			t.Errorf("%v allocations in a tick", n)
		}
	})
}

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
	mine, err := readConns(file, testVIP, netip.MustParseAddrPort("10.103.0.11:6443"))
	if err != nil || len(mine) != 1 || mine[0] != all[0] {
		t.Errorf("%v, %v", mine, err)
	}
}

// TestReadConnsOfALargeTable: the connections of others cost no memory, and each line
// is read once, wherever a piece ends.
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
	mine, err := readConns(file, testVIP, netip.MustParseAddrPort("10.103.0.11:6443"))
	runtime.ReadMemStats(&after)
	if err != nil || len(mine) != 5 {
		t.Errorf("%v, %v", mine, err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > 256<<10 {
		t.Errorf("it allocates %d bytes", n)
	}
	// The same file, again and again, as the table of sockets is read.
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

func FuzzProc(f *testing.F) {
	f.Add([]byte(procTable))
	f.Fuzz(func(t *testing.T, text []byte) {
		var s steady
		want := Service{VIP: testVIP, Scheduler: "rr", Dests: []Dest{{addrAt(1), 1, Masq}}}
		s.match(text, &want)
		parseConns(text, func(Conn, []byte) bool { return true })
	})
}

func TestSysctl(t *testing.T) {
	file := filepath.Join(t.TempDir(), "arp_ignore")
	if err := os.WriteFile(file, []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := sysctl{path: file, min: 1}
	var buf [32]byte
	for i, want := range []bool{true, false} {
		if did, err := s.ensure(buf[:]); did != want || err != nil {
			t.Errorf("call %d: %v, %v", i, did, err)
		}
	}
	if n := testing.AllocsPerRun(100, func() { s.value(buf[:]) }); n != 0 {
		t.Errorf("%v allocations in a tick", n)
	}
}
