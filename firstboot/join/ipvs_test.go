package join_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ondisk"
)

// TestIPVScareTakesWhatFirstBootWrites checks that ipvscare can read the list that first boot
// writes when a Site's API servers change, whatever the former ones were.
func TestIPVScareTakesWhatFirstBootWrites(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	former := w.Get(member.ProvenFile)
	for _, tc := range []struct {
		name, masters string
		lines         []string
		former        []string
		want          []string // nil: it only must be readable
	}{
		{"spelled differently", "'[2001:db8::1]:6443'", []string{"vip: 'fd00:ed6e::2'"}, []string{"[2001:DB8:0::1]:6443", "[2001:db8::2]:6443"}, []string{"[2001:db8::1]:6443", "[2001:db8::2]:6443"}},
		{"a name in capitals", "m1.example:6443", nil, []string{"M1.Example:6443", "m2.example:6443"}, []string{"m1.example:6443", "m2.example:6443"}},
		{"a port with a zero", "192.0.2.11:6443", nil, []string{"192.0.2.11:06443"}, []string{"192.0.2.11:6443"}},
		{"it is the VIP now", "192.0.2.11:6443", []string{"vip: 192.0.2.200"}, []string{"192.0.2.200:6443", "192.0.2.12:6443"}, []string{"192.0.2.11:6443", "192.0.2.12:6443"}},
		{"it is the endpoint now", "192.0.2.11:6443", []string{"endpoint: api.example"}, []string{"API.example:6443"}, []string{"192.0.2.11:6443"}},
		{"former ones among themselves", "192.0.2.11:6443", nil, []string{"m1.example:6443", "M1.example:6443"}, []string{"192.0.2.11:6443", "m1.example:6443"}},
		{"of the other family", "192.0.2.11:6443", nil, []string{"[2001:db8::1]:6443"}, []string{"192.0.2.11:6443"}},
		{"no address and port", "192.0.2.11:6443", nil, []string{"192.0.2.12", ""}, []string{"192.0.2.11:6443"}},
		{"odd names", "m1-.example:6443", nil, nil, nil},
		{"a root", "m1.example.:6443", nil, nil, nil},
		{"an underscore", "m_1.example:6443", nil, nil, nil},
	} {
		site, err := site.Parse([]byte(w.SiteWithMasters(tc.masters, tc.lines...)))
		if err != nil {
			if tc.want != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue // no Site is like this
		}
		p := new(member.Proven)
		if err := json.Unmarshal([]byte(former), p); err != nil {
			t.Fatal(err)
		}
		p.Masters = tc.former
		b, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		w.Put(member.ProvenFile, string(b))
		doc, err := join.IPVSConfig(w.Env(), site)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "ipvs.json")
		if err := os.WriteFile(file, doc, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ipvs.ReadConfig(file); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		var conf ondisk.IPVS
		if err := json.Unmarshal(doc, &conf); err != nil {
			t.Fatal(err)
		}
		if got := conf.Servers[0].Masters; tc.want != nil && !slices.Equal(got, tc.want) {
			t.Errorf("%s: masters %s, want %s", tc.name, strings.Join(got, ", "), strings.Join(tc.want, ", "))
		}
	}
}

// TestIPVScareDelaysOnlyAfterPowerOn checks that first boot spares ipvscare the random delay when it
// has written its configuration, and only then.
func TestIPVScareDelaysOnlyAfterPowerOn(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	if !w.Has(ondisk.IPVSStarted) {
		t.Errorf("after a fresh join, there is no %s", ondisk.IPVSStarted)
	}
	w.PowerOn()
	w.MustBoot()
	if w.Has(ondisk.IPVSStarted) {
		t.Errorf("after a reboot, first boot wrote %s", ondisk.IPVSStarted)
	}
}
