package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ondisk"
)

// zone has the answers of a DNS server, by network and name.
type zone map[string][]netip.Addr

func (z zone) lookup(_ context.Context, network, host string) ([]netip.Addr, error) {
	if addrs, ok := z[network+" "+host]; ok {
		return addrs, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

// deadDNS returns the error of a DNS server that does not answer.
func deadDNS(_ context.Context, _, host string) ([]netip.Addr, error) {
	return nil, &net.DNSError{Err: "i/o timeout", Name: host, IsTimeout: true}
}

func addrs(text ...string) []netip.Addr {
	var all []netip.Addr
	for _, s := range text {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

// namesGroup returns a group of a daemon that was not started, with this state directory.
func namesGroup(t *testing.T, state string, lookup func(context.Context, string, string) ([]netip.Addr, error), masters ...string) (*group, *[]string) {
	t.Helper()
	var mu sync.Mutex
	lines := new([]string)
	d := NewDaemon(Options{StateDir: state, Lookup: lookup, Log: func(line string) {
		mu.Lock()
		defer mu.Unlock()
		*lines = append(*lines, line)
	}})
	s := testServer(t, 2)
	var err error
	if s.Masters, err = parseMasters(s.VIP, masters); err != nil {
		t.Fatal(err)
	}
	g := newGroup(d, s)
	g.loadLearned()
	return g, lines
}

// TestAddressesOfNamesSurviveAReboot checks that the API servers' addresses are known after a boot
// without DNS.
func TestAddressesOfNamesSurviveAReboot(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	z := zone{"ip4 a.example": addrs("192.0.2.12", "192.0.2.11"), "ip4 b.example": addrs("192.0.2.13")}
	g, _ := namesGroup(t, state, z.lookup, "a.example:6443", "b.example:6443", "192.0.2.14:6443")
	if !g.resolve(t.Context()) {
		t.Fatal("no name was resolved")
	}
	g, lines := namesGroup(t, state, deadDNS, "a.example:6443", "b.example:6443", "192.0.2.14:6443")
	if got := g.list.names["a.example"]; !slices.Equal(got, addrs("192.0.2.11", "192.0.2.12")) {
		t.Errorf("a.example is %v after a boot", got)
	}
	if g.resolve(t.Context()) || !slices.Equal(g.list.names["b.example"], addrs("192.0.2.13")) {
		t.Errorf("without DNS b.example is %v", g.list.names["b.example"])
	}
	if !slices.ContainsFunc(*lines, func(l string) bool {
		return strings.Contains(l, "looking up b.example") && strings.Contains(l, "keeping its last addresses [192.0.2.13]")
	}) {
		t.Errorf("the log does not name the addresses that stay in use: %q", *lines)
	}
	// A name that is no longer in the list is forgotten with the next answer.
	delete(z, "ip4 b.example")
	z["ip4 a.example"] = addrs("192.0.2.15")
	g, _ = namesGroup(t, state, z.lookup, "a.example:6443")
	g.resolve(t.Context())
	g, _ = namesGroup(t, state, deadDNS, "a.example:6443")
	if len(g.list.names) != 1 || !slices.Equal(g.list.names["a.example"], addrs("192.0.2.15")) {
		t.Errorf("kept: %v", g.list.names)
	}
	// Addresses in the file are checked like answers of DNS.
	text := `{"version":1,"servers":[{"vip":"10.103.97.2:6443","names":{"a.example":["127.0.0.1","fd00::1","10.103.97.2","192.0.2.16"],"b.example":["::1"]}}]}`
	if err := os.WriteFile(filepath.Join(state, "learned.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	g, _ = namesGroup(t, state, deadDNS, "a.example:6443")
	if len(g.list.names) != 1 || !slices.Equal(g.list.names["a.example"], addrs("192.0.2.16")) {
		t.Errorf("taken from the file: %v", g.list.names)
	}
}

// TestSameErrorIsLoggedOnce checks that a lookup's error is logged once, although net's resolver puts
// another local port into it each time.
func TestSameErrorIsLoggedOnce(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := pc.LocalAddr().String()
	pc.Close() // the kernel rejects packets from now on
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server)
	}}
	ports := make(map[string]bool)
	g, lines := namesGroup(t, t.TempDir(), func(ctx context.Context, network, host string) ([]netip.Addr, error) {
		addrs, err := r.LookupNetIP(ctx, network, host+".")
		if err != nil {
			ports[err.Error()] = true
		}
		return addrs, err
	}, "a.example:6443")
	for range 20 {
		g.resolve(t.Context())
	}
	if len(ports) < 2 {
		t.Fatalf("the resolver's errors: %v", ports)
	}
	if len(*lines) != 1 || !strings.Contains((*lines)[0], "connection refused") || !strings.Contains((*lines)[0], server) {
		t.Errorf("said: %q", *lines)
	}
}

// TestNamesAreWrittenRarely checks that a name whose address changes at each lookup is not written
// each time.
func TestNamesAreWrittenRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := t.TempDir()
		n := 0
		g, _ := namesGroup(t, state, func(context.Context, string, string) ([]netip.Addr, error) {
			n++
			return addrs(fmt.Sprintf("192.0.2.%d", n%200+1)), nil
		}, "a.example:6443")
		written, last := 0, ""
		for range 120 { // an hour
			g.resolve(t.Context())
			if b, _ := os.ReadFile(filepath.Join(state, "learned.json")); string(b) != last {
				written, last = written+1, string(b)
			}
			time.Sleep(30 * time.Second)
		}
		if written < storeAtOnce || written > storeAtOnce+6 {
			t.Errorf("written %d times in an hour", written)
		}
	})
}

// TestLookupFamily checks that an API server with both families gets an address of the virtual
// address's family. If it has none of that family, the error names its addresses.
func TestLookupFamily(t *testing.T) {
	four, six := netip.MustParseAddr("10.103.97.2"), netip.MustParseAddr("fd00:97::2")
	z := zone{"ip4 both.example": addrs("192.0.2.1"), "ip6 both.example": addrs("2001:db8::1", "fe80::1%eth0", "::ffff:192.0.2.9"),
		"ip6 six.example": addrs("2001:db8::6"), "ip4 four.example": addrs("192.0.2.4"), "ip4 loop.example": addrs("127.0.0.1")}
	d := NewDaemon(Options{Lookup: z.lookup})
	for _, tt := range []struct {
		vip  netip.Addr
		name string
		want []netip.Addr
		err  string
	}{
		{four, "both.example", addrs("192.0.2.1"), ""},
		{six, "both.example", addrs("2001:db8::1"), ""},
		{four, "six.example", nil, "it resolves only to [2001:db8::6], but the virtual address 10.103.97.2 is IPv4"},
		{six, "four.example", nil, "it resolves only to [192.0.2.4], but the virtual address fd00:97::2 is IPv6"},
		{four, "loop.example", nil, "none of which can be an API server"},
		{four, "no.example", nil, "no such host"},
	} {
		got, err := d.lookup(t.Context(), tt.vip, tt.name)
		if !slices.Equal(got, tt.want) || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s behind %s: %v, %v", tt.name, tt.vip, got, err)
		}
	}
	var many []netip.Addr
	for i := range 1000 {
		many = append(many, netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}))
	}
	d = NewDaemon(Options{Lookup: zone{"ip4 many.example": many}.lookup})
	if got, err := d.lookup(t.Context(), four, "many.example"); err != nil || len(got) != maxPerName {
		t.Errorf("of a thousand addresses %d are taken, %v", len(got), err)
	}
}

// TestLearnedListIsCapped checks that a large ConfigMap makes a node watch only a few API servers,
// and log only a few lines.
func TestLearnedListIsCapped(t *testing.T) {
	list := func(n int, item string) string {
		return `{"kind":"ConfigMap","data":{"masters":"` + strings.Repeat(item+`\n`, n) + `"}}`
	}
	var distinct strings.Builder
	for i := range maxLearned + 1 {
		fmt.Fprintf(&distinct, `192.0.2.%d:6443\n`, i+1)
	}
	for name, body := range map[string]string{
		"one too many":  `{"kind":"ConfigMap","data":{"masters":"` + distinct.String() + `"}}`,
		"nonsense":      list(20000, "nonsense"),
		"one long word": list(1, strings.Repeat("x", 200000)),
	} {
		masters, err := parseConfigMap(testVIP, []byte(body))
		if err == nil || len(err.Error()) > 2000 {
			t.Errorf("%s: %d masters, %.300v", name, len(masters), err)
		}
	}
	if masters, err := parseConfigMap(testVIP, []byte(`{"kind":"ConfigMap","data":{"masters":"`+strings.TrimSuffix(distinct.String(), fmt.Sprintf(`192.0.2.%d:6443\n`, maxLearned+1))+`"}}`)); err != nil || len(masters) != maxLearned {
		t.Errorf("a list of maxLearned API servers: %d, %v", len(masters), err)
	}
	if _, err := parseLearned(testVIP, make([]string, maxLearned+1)); err == nil {
		t.Error("the stored list is not capped")
	}
}

func TestStoreLearnedFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d := NewDaemon(Options{StateDir: file})
	if err := d.storeLearned(testVIP, func(*ondisk.IPVSLearnedVirtual) {}); err == nil || !strings.Contains(err.Error(), "storing learned addresses in "+file) || errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// TestProblemsGo checks that the status has current problems only, not those of a name that left
// the list or of a removed virtual server.
func TestProblemsGo(t *testing.T) {
	g, _ := namesGroup(t, t.TempDir(), deadDNS, "old.example:6443", "new.example:6443")
	problems := func() string {
		g.d.mu.Lock()
		defer g.d.mu.Unlock()
		return strings.Join(slices.Sorted(maps.Keys(g.d.logged)), "; ")
	}
	g.resolve(t.Context())
	if got := problems(); !strings.Contains(got, "looking up old.example") || !strings.Contains(got, "looking up new.example") {
		t.Fatal(got)
	}
	s := g.server
	s.Masters = s.Masters[1:]
	g.update(s)
	g.resolve(t.Context())
	if got := problems(); strings.Contains(got, "old.example") || !strings.Contains(got, "looking up new.example") {
		t.Error(got)
	}
	g.d.logChange(g.vip.String()+": authorities", errors.New("damaged"))
	g.d.logChange("metrics", errors.New("in use"))
	g.d.reconciler = newReconciler(newMemKernel(t), g.d.logf, &g.d.stats, func(error) {})
	go g.d.reconciler.run(t.Context())
	g.d.forget(t.Context(), g.vip)
	if got := problems(); got != "metrics" {
		t.Error(got)
	}
}
