package cluster

import (
	"context"
	"crypto/tls"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/test/kerneltest"
)

// TestMasterShowsItsCluster checks that ipvscare sends traffic only to an API server that returns a
// known UID: of cluster-info, which is public, or of the Node or the Service, which require a
// certificate.
func TestMasterShowsItsCluster(t *testing.T) {
	lc := needCluster(t)
	ctx := t.Context()
	if err := lc.Create(ctx, "/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]string{"name": "shop-1"}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lc.Delete(context.Background(), "/api/v1/nodes/shop-1"); err != nil {
			t.Error(err)
		}
	})
	c := adminAPI(t, lc.Kubeconfig)
	info, err := c.ClusterInfoUID(ctx)
	if err != nil || info == "" {
		t.Fatalf("cluster-info has UID %q: %v", info, err)
	}
	node, err := c.GetNode(ctx, "shop-1")
	if err != nil {
		t.Fatal(err)
	}
	service, err := c.ServiceUID(ctx)
	if err != nil || service == "" {
		t.Fatalf("the Service default/kubernetes has UID %q: %v", service, err)
	}
	addr, err := netip.ParseAddrPort(strings.TrimPrefix(c.Server, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	cert := certificateOf(t, lc.Kubeconfig)
	expired := filepath.Join(t.TempDir(), "expired.pem")
	if err := os.WriteFile(expired, nodeCertificate(t, lc, "shop-1", time.Now().Add(-time.Hour)), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		joined ipvs.Joined
		cert   string
		want   string // expected state
	}{
		{"all UIDs match", ipvs.Joined{ClusterInfo: info, Node: "shop-1", NodeUID: node.Metadata.UID}, cert, "up"},
		{"another Node", ipvs.Joined{ClusterInfo: info, Node: "gone", NodeUID: "1"}, cert, "up"},
		{"another cluster-info", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: node.Metadata.UID}, cert, "up"},
		{"another cluster-info and no such Node", ipvs.Joined{ClusterInfo: "1", Node: "gone", NodeUID: "1"}, cert, "alien"},
		{"another cluster-info, and the Node has another UID", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: "1"}, cert, "alien"},
		{"another cluster-info and no such Node, but the Service matches", ipvs.Joined{ClusterInfo: "1", Node: "gone", NodeUID: "1", ServiceUID: service}, cert, "up"},
		{"no UID matches", ipvs.Joined{ClusterInfo: "1", Node: "gone", NodeUID: "1", ServiceUID: "1"}, cert, "alien"},
		{"another cluster-info, and there is no client certificate", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: node.Metadata.UID}, "", "down"},
		{"another cluster-info, and the client certificate has expired", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: node.Metadata.UID, ServiceUID: service}, expired, "down"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rules := &kerneltest.Table{}
			server := ipvs.Server{VIP: netip.MustParseAddrPort("10.103.97.222:6443"), Masters: []ipvs.Master{{Host: addr.Addr().String(), Port: addr.Port()}},
				Scheduler: "rr", Profile: ipvs.LAN(), Rise: 2, Fall: 2, Probe: probe.Spec{Method: "GET", Path: "/readyz", CAFile: lc.CAFile}, Joined: tt.joined}
			file := tt.cert
			if file == "" {
				file = filepath.Join(t.TempDir(), "none.pem")
			}
			d := ipvs.NewDaemon(ipvs.Options{Servers: []ipvs.Server{server}, Kernel: rules, ClientCert: file, Log: func(line string) { t.Log(line) }})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			done := make(chan error, 1)
			go func() { done <- d.Run(ctx) }()
			defer func() {
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			}()
			until(t, "the master to be "+tt.want, func() bool {
				s := d.Status().Servers
				return len(s) == 1 && len(s[0].Masters) == 1 && s[0].Masters[0].State == tt.want
			})
			until(t, "the kernel's table to match", func() bool {
				s, _ := rules.Service(server.VIP)
				return s != nil && (len(s.Dests) == 1) == (tt.want == "up")
			})
		})
	}
}

// certificateOf writes the client certificate and key of a kubeconfig to one file, and returns its
// path.
func certificateOf(t *testing.T, kubeconfig string) string {
	t.Helper()
	text, err := os.ReadFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	k, err := kubeapi.ParseKubeconfig(text)
	if err != nil {
		t.Fatal(err)
	}
	u, err := k.User()
	if err != nil {
		t.Fatal(err)
	}
	cert, key, err := u.KeyTexts("/")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "client.pem")
	if err := os.WriteFile(file, slices.Concat(cert, []byte("\n"), key), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// keyPair reads the client certificate of a kubeconfig's user.
func keyPair(u *kubeapi.User) (*tls.Certificate, error) {
	cert, key, err := u.KeyTexts("/")
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	return &pair, err
}
