package firstboot

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// TestWorkersNetworkComesUpLate checks that new settings stay if they start to work only while the
// former ones are tried.
func TestWorkersNetworkComesUpLate(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, address("192.0.2.50"))
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.2.51")))
	w.PowerOn()
	tried := false
	w.NetworkWorks = func() bool { tried = tried || w.Has(network.TrialFile); return tried }
	w.MustBoot()
	if !w.networkHas("192.0.2.51/24") || w.Has(network.TrialFile) || w.ConsoleHas("the previous settings are back") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestGatewaysOfTheOwnAddress checks that only gateways on the network card with the machine's
// address count.
func TestGatewaysOfTheOwnAddress(t *testing.T) {
	t.Parallel()
	site := func(own, address, gateway string) *configs.Site {
		s := &configs.Site{NodeName: "m1", ControlPlane: &configs.SiteControlPlane{Members: []configs.ControlPlaneMember{{Name: "m1", Address: own}}}}
		if address != "" {
			s.Network.Interfaces = []configs.Interface{{Name: "eth0", VLANs: []configs.VLAN{{ID: 7, Addresses: []string{address}, Gateway: gateway}}}}
		}
		return s
	}
	w := nativeWorld(t)
	w.Put("/proc/net/route", `Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010200C0	0003	0	0	1024	00000000	0	0	0
eth0	000200C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
eth1	000A64C6	FE0A64C6	0003	0	0	0	00FFFFFF	0	0	0
eth1	006433C6	00000000	0001	0	0	0	00FFFFFF	0	0	0
`)
	w.Put("/proc/net/ipv6_route", `20010db8000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001 eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200 lo
`)
	for _, tt := range []struct {
		site *configs.Site
		want []string
	}{
		{site("192.0.2.11", "", ""), []string{"192.0.2.1"}},
		{site("192.0.2.11", "192.0.2.11/24", "192.0.2.254"), []string{"192.0.2.254", "192.0.2.1"}},
		{site("192.0.2.11", "203.0.113.4/24", "203.0.113.1"), []string{"192.0.2.1"}},
		{site("198.51.100.4", "", ""), []string{"198.100.10.254"}},
		{site("203.0.113.4", "", ""), nil},
		{site("2001:db8::11", "", ""), []string{"fe80::1%eth0"}},
	} {
		if got := network.GatewaysOf(w.Env(), tt.site); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, expected %q", tt.site.Self().Address, got, tt.want)
		}
	}
	if err := network.NeighbourAnswers(t.Context(), w.Env(), site("203.0.113.4", "", "")); err != nil {
		t.Errorf("without other nodes or a gateway: %v", err)
	}
	if err := network.NeighbourAnswers(t.Context(), w.Env(), site("198.51.100.4", "", "")); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("a gateway that does not exist answers: %v", err)
	}
}
