package ipvs

import (
	"encoding/pem"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/ondisk"
)

func TestParseConfigRefuses(t *testing.T) {
	for _, tt := range []struct{ name, json, want string }{
		{"half a file", `{"version":1,"serv`, "unexpected EOF"},
		{"two documents", `{"version":1,"servers":[{"vip":"10.1.1.1:1","masters":["10.0.0.1:1"]}]}{}`, "more text follows"},
		{"unknown field", `{"version":1,"sevrers":[]}`, `unknown field "sevrers"`},
		{"version", `{"version":2}`, "unsupported version 2: want 1"},
		{"no server", `{"version":1}`, "servers: must not be empty"},
		{"no master", `{"version":1,"servers":[{"vip":"10.1.1.1:1"}]}`, "servers[0]: masters: must not be empty"},
		{"duplicate", `{"version":1,"servers":[{"masters":["10.0.0.1:6443","10.0.0.1:6443"]}]}`, "masters[1]: 10.0.0.1:6443 is already listed, as 10.0.0.1:6443"},
		{"duplicate after mapping", `{"version":1,"servers":[{"masters":["10.0.0.1:6443","[::ffff:10.0.0.1]:6443"]}]}`, "[::ffff:10.0.0.1]:6443 is already listed, as 10.0.0.1:6443"},
		{"VIP among the masters", `{"version":1,"servers":[{"masters":["10.103.97.2:6443"]}]}`, "10.103.97.2:6443 is the virtual address itself"},
		{"port missing", `{"version":1,"servers":[{"masters":["10.0.0.1"]}]}`, `"10.0.0.1" has no port: write host:port`},
		{"port missing, IPv6", `{"version":1,"servers":[{"vip":"[fd00::9]:1","masters":["fd00::1"]}]}`, "IPv6 as [address]:port"},
		{"port 0", `{"version":1,"servers":[{"masters":["10.0.0.1:0"]}]}`, `invalid port "0"`},
		{"mixed families", `{"version":1,"servers":[{"masters":["10.0.0.1:1","[fd00::1]:1"]}]}`, "of different families"},
		{"VIP without port", `{"version":1,"servers":[{"vip":"10.9.9.9","masters":["10.0.0.1:1"]}]}`, "has no port: write 10.9.9.9:6443"},
		{"VIP on loopback", `{"version":1,"servers":[{"vip":"127.0.0.1:6443","masters":["10.0.0.1:1"]}]}`, "cannot be a virtual address"},
		{"loopback master", `{"version":1,"servers":[{"masters":["127.0.0.1:1"]}]}`, "cannot be reached through IPVS"},
		{"slip in an address", `{"version":1,"servers":[{"masters":["10.0.0.300:1"]}]}`, "write an address or a DNS name"},
		{"scheduler", `{"version":1,"servers":[{"scheduler":"best","masters":["10.0.0.1:1"]}]}`, `unknown scheduler "best": want one of rr, lc, dh, sh, wrr, wlc`},
		{"profile", `{"version":1,"servers":[{"profile":"wan","masters":["10.0.0.1:1"]}]}`, `unknown profile "wan": want lan or metered`},
		{"host", `{"version":1,"servers":[{"host":"a b","masters":["10.0.0.1:1"]}]}`, "invalid domain name"},
		{"path", `{"version":1,"servers":[{"probePath":"readyz","masters":["10.0.0.1:1"]}]}`, "must begin with /"},
		{"rise", `{"version":1,"servers":[{"rise":-1,"masters":["10.0.0.1:1"]}]}`, "rise: must be between 1 and 100: -1"},
		{"same host twice", `{"version":1,"servers":[{"host":"a.b","masters":["10.0.0.1:1"]},{"vip":"10.1.1.1:1","host":"a.b","masters":["10.0.0.2:1"]}]}`, `servers[1].host: a.b is already used by servers[0]`},
		{"same VIP twice", `{"version":1,"servers":[{"masters":["10.0.0.1:1"]},{"masters":["10.0.0.2:1"]}]}`, "is already used by servers[0]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			servers, err := parseConfig("ipvs.json", []byte(tt.json))
			if err == nil {
				t.Fatalf("accepted as %+v", servers)
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %q, want it to contain %q", err, tt.want)
			}
		})
	}
	t.Run("all problems at once", func(t *testing.T) {
		_, err := parseConfig("ipvs.json", []byte(`{"version":1,"servers":[{"vip":"x","masters":["y","10.0.0.1:0"],"scheduler":"z","fall":-1}]}`))
		for _, want := range []string{"servers[0]: vip:", "servers[0]: masters[0]", "servers[0]: masters[1]", "servers[0]: scheduler:", "servers[0]: fall:"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v does not mention %s", err, want)
			}
		}
	})
}

func TestParseConfigDefaults(t *testing.T) {
	servers, err := parseConfig("ipvs.json", []byte(`{"version":1,"servers":[{"masters":["10.0.0.1:6443","Master-2.example:6443"]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	s := servers[0]
	if s.VIP != netip.MustParseAddrPort(DefaultVIP) || s.Scheduler != "rr" || s.Rise != 2 || s.Fall != 2 || s.Probe.Path != "/readyz" || s.Profile != LAN() {
		t.Errorf("%+v", s)
	}
	if s.Masters[1] != (Master{"master-2.example", 6443}) {
		t.Errorf("%+v", s.Masters)
	}
	// Dual stack: one name with an address in each family.
	servers, err = parseConfig("ipvs.json", []byte(`{"version":1,"servers":[{"host":"a.b","masters":["10.0.0.1:6443"]},{"host":"a.b","vip":"[fd00:97::2]:6443","masters":["[fd00::1]:6443"]}]}`))
	if err != nil || len(servers) != 2 {
		t.Errorf("dual stack: %v", err)
	}
}

func TestCAFile(t *testing.T) {
	now := time.Now()
	c := newCA(t, now.Add(-time.Hour), now.Add(time.Hour))
	leaf := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.issue(t, now.Add(-time.Hour), now.Add(time.Hour), "kubernetes").Certificate[0]})
	if r, err := probe.ParseRoots("ca.crt", append([]byte("# the old and the new\n"), append(c.pem, c.pem...)...)); err != nil || len(r.Certs) != 2 {
		t.Errorf("a bundle: %v", err)
	}
	for _, tt := range []struct {
		name string
		data []byte
		want string
	}{
		{"empty", nil, "it contains no PEM certificate"},
		{"a key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}), "it contains no PEM certificate"},
		{"half a certificate", c.pem[:len(c.pem)/2], "its last PEM block is truncated"},
		{"one and a half certificates", append(slices.Clone(c.pem), c.pem[:len(c.pem)-10]...), "its last PEM block is truncated"},
		{"no certificate inside", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}), "x509"},
		{"a master's own certificate", leaf, "is not a CA: use the cluster's ca.crt"},
	} {
		if _, err := probe.ParseRoots("ca.crt", tt.data); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "ca.crt") {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"version":1,"servers":[{"vip":"[fd00::9]:1","masters":["[fd00::1]:2","a.b:3"]}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		servers, err := parseConfig("x", data)
		if err != nil {
			return
		}
		for _, s := range servers {
			if !s.VIP.IsValid() || len(s.Masters) == 0 || s.Rise < 1 || s.Fall < 1 {
				t.Fatalf("accepted %+v", s)
			}
			for _, m := range s.Masters {
				if a, ok := m.addr(); ok && (a.Addr() == s.VIP.Addr() || a.Addr().Is4() != s.VIP.Addr().Is4()) {
					t.Fatalf("accepted master %s behind %s", m, s.VIP)
				}
			}
		}
	})
}

func TestParseConfigMap(t *testing.T) {
	body := `{"kind":"ConfigMap","data":{"masters":"10.0.0.1:6443 # first\n\n# 10.0.0.9:6443\n10.0.0.2:6443"}}`
	masters, err := parseConfigMap(testVIP, []byte(body))
	if err != nil || len(masters) != 2 || masters[1].Host != "10.0.0.2" {
		t.Errorf("%v, %v", masters, err)
	}
	for _, bad := range []string{``, `{}`, `{"kind":"Status"}`, `{"kind":"ConfigMap"}`, `{"kind":"ConfigMap","data":{"masters":"\n#x"}}`,
		`{"kind":"ConfigMap","data":{"masters":"10.103.97.2:6443"}}`} {
		if masters, err := parseConfigMap(testVIP, []byte(bad)); err == nil {
			t.Errorf("%s: accepted as %v", bad, masters)
		}
	}
}

// TestWatchedFile checks that a file counts as changed if it is written twice within one tick of
// the clock with the same size, but not if only its modification time changes.
func TestWatchedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ipvs.json")
	f := watchedFile{path: path}
	at := time.Unix(1767225600, 0)
	write := func(text string) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o644), os.Chtimes(path, at, at)); err != nil {
			t.Fatal(err)
		}
	}
	check := func(what string, want bool) {
		t.Helper()
		if f.changed() != want {
			t.Errorf("%s: changed is %v", what, !want)
		}
		if f.changed() {
			t.Errorf("%s: changed again", what)
		}
	}
	check("absent", false)
	write("")
	check("empty", true)
	write("10.0.0.1")
	check("written", true)
	write("10.0.0.2")
	check("written in the same tick", true)
	at = at.Add(time.Hour)
	write("10.0.0.2")
	check("touched", false)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	check("removed", true)
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	check("a directory instead", true)
	if none := (watchedFile{}); none.changed() {
		t.Error("no file has changed")
	}
}

// TestSpreadOfVirtual checks that the nodes of a large cluster spread their return over a longer
// time, also after a boot, and request /readyz less often. In a small cluster the profile applies.
func TestSpreadOfVirtual(t *testing.T) {
	for _, tt := range []struct {
		seconds             int
		profile             string
		boot, spread, ready time.Duration
	}{
		{0, "lan", ondisk.BootSpread, DefaultSpread, LAN().Ready},
		{3, "lan", ondisk.BootSpread, DefaultSpread, LAN().Ready},
		{5, "lan", 5 * time.Second, DefaultSpread, 15 * time.Second},
		{10, "lan", 10 * time.Second, DefaultSpread, 30 * time.Second},
		{40, "lan", 40 * time.Second, 40 * time.Second, 30 * time.Second},
		{40, "metered", 40 * time.Second, 40 * time.Second, Metered().Ready},
	} {
		s, err := FromVirtual(ondisk.IPVSVirtual{Masters: []string{"10.0.0.1:6443"}, SpreadSeconds: tt.seconds, Profile: tt.profile})
		if err != nil || s.BootSpread != tt.boot || s.Profile.Spread != tt.spread || s.Profile.Ready != tt.ready {
			t.Errorf("%d s, %s: after a boot %s, return %s, /readyz every %s: %v", tt.seconds, tt.profile, s.BootSpread, s.Profile.Spread, s.Profile.Ready, err)
		}
	}
	if _, err := FromVirtual(ondisk.IPVSVirtual{Masters: []string{"10.0.0.1:6443"}, SpreadSeconds: 601}); err == nil {
		t.Error("601 s are accepted")
	}
}
