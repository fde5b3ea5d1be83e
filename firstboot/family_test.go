package firstboot

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// dualStack gives the machine both families and the API servers
// names with addresses of both; the kernel prefers IPv6 (RFC 6724).
func (w *world) dualStack(addrs ...string) *machine.Env {
	e := w.Env()
	var all []netip.Addr
	for _, a := range addrs {
		all = append(all, netip.MustParseAddr(a))
	}
	e.Resolve = func(_ context.Context, host string) ([]netip.Addr, error) {
		if !strings.HasSuffix(host, ".shop.example") {
			return nil, errors.New("no such host")
		}
		return all, nil
	}
	e.Source = func(_ context.Context, addr string) (netip.Addr, error) {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return netip.Addr{}, err
		}
		if a, err := netip.ParseAddr(host); err == nil && a.Is4() {
			return netip.MustParseAddr("192.0.2.50"), nil
		}
		return netip.MustParseAddr("2001:db8::50"), nil
	}
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, port, _ := net.SplitHostPort(addr)
		if strings.HasSuffix(host, ".shop.example") || host == "2001:db8::11" {
			addr = net.JoinHostPort("192.0.2.11", port)
		}
		return dial(ctx, network, addr)
	}
	return e
}

// TestFamilyOfTheNode checks that the node's address is of the VIP's family, whatever the kernel
// prefers for a name with both. Without IPVS, it is of the family of an address that answers.
func TestFamilyOfTheNode(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, site string
		addrs      []string
		want       string // the node's address; empty: it has none
		endpoint   string // in /etc/hosts
	}{
		{"an IPv4 VIP", "", []string{"2001:db8::11", "192.0.2.11"}, "192.0.2.50", ""},
		{"an IPv6 VIP", "vip: 'fd00:ed6e::2'", []string{"192.0.2.11", "2001:db8::11"}, "2001:db8::50", ""},
		{"masters of the other family", "", []string{"2001:db8::11"}, "", ""},
		{"without IPVS", "ipvs: {disabled: true}", []string{"2001:db8::11", "192.0.2.11"}, "2001:db8::50", "2001:db8::11"},
		{"without IPVS, IPv6 leads nowhere", "ipvs: {disabled: true}", []string{"2001:db8::99", "192.0.2.11"}, "192.0.2.50", "192.0.2.11"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.Stamp(worldtest.SlotDevice, w.SiteWithMasters("a.shop.example:6443", worldtest.WithToken, c.site))
			err := w.Run(New(w.dualStack(c.addrs...)))
			said := strings.Join(w.Console, "\n")
			if c.want == "" {
				if err == nil || w.State().Result != ondisk.ResultWaiting || !strings.Contains(said, "has no address of the family of the VIP 10.103.97.2") {
					t.Errorf("%v\n%s", err, said)
				}
				return
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, said)
			}
			hosts := w.Get("/etc/hosts")
			if !strings.Contains(hosts, c.want+"\tedge-sn0042\n") || c.endpoint != "" && !strings.Contains(hosts, c.endpoint+"\tapiserver.cluster.local\n") {
				t.Errorf("expected %s:\n%s", c.want, hosts)
			}
		})
	}
}
