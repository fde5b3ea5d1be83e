package network

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// TestPresentAddressInTime checks that API servers that do not answer, with names that have
// addresses of both families, do not use up the time to determine the node's address.
func TestPresentAddressInTime(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	line := siteconf.HostsEntry{IP: "192.0.2.50", Names: []string{"edge-1"}}
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "etc/hosts"), siteconf.EditHosts(nil, NodeOwner, []siteconf.HostsEntry{line}), 0o644); err != nil {
		t.Fatal(err)
	}
	site := &configs.Site{}
	site.IPVS.Disabled = true
	for i := range 6 {
		site.Masters = append(site.Masters, fmt.Sprintf("m%d.example:6443", i))
	}
	synctest.Test(t, func(t *testing.T) {
		e := &machine.Env{Root: root, Network: machine.Network{
			Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
				n := host[1:2]
				return []netip.Addr{netip.MustParseAddr("2001:db8::" + n), netip.MustParseAddr("192.0.2.1" + n)}, nil
			},
			Source: func(context.Context, string) (netip.Addr, error) { return netip.MustParseAddr("192.0.2.50"), nil },
			Dial: func(ctx context.Context, _, addr string) (net.Conn, error) {
				if addr == "192.0.2.15:6443" && ctx.Err() == nil {
					conn, other := net.Pipe()
					other.Close()
					return conn, nil
				}
				<-ctx.Done()
				return nil, ctx.Err()
			},
		}}
		ctx, cancel := context.WithTimeout(t.Context(), run.CheckTimeout)
		defer cancel()
		if got, err := presentAddr(ctx, e, site); err != nil || got.String() != line.IP {
			t.Errorf("%s, %v", got, err)
		}
	})
}
