package cluster

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

// table is a kernel that has nothing but IPVS' table.
type table struct {
	mu  sync.Mutex
	all []kernel.Service
}

func (k *table) Service(vip netip.AddrPort) (*kernel.Service, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	i := slices.IndexFunc(k.all, func(s kernel.Service) bool { return s.VIP == vip })
	if i < 0 {
		return nil, nil
	}
	s := k.all[i]
	s.Dests = slices.Clone(s.Dests)
	return &s, nil
}

func (k *table) Apply(op kernel.Op) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if op.Kind == kernel.AddService {
		k.all = append(k.all, op.Service)
		return nil
	}
	i := slices.IndexFunc(k.all, func(s kernel.Service) bool { return s.VIP == op.Service.VIP })
	if i < 0 {
		return errors.New("no such service")
	}
	s := &k.all[i]
	s.Dests = slices.DeleteFunc(s.Dests, func(d kernel.Dest) bool { return d.Addr == op.Dest.Addr })
	if op.Kind == kernel.AddDest || op.Kind == kernel.UpdateDest {
		s.Dests = append(s.Dests, op.Dest)
	}
	return nil
}

func (k *table) Ready() error                                     { return nil }
func (k *table) Conns(_, _ netip.AddrPort) ([]kernel.Conn, error) { return nil, nil }
func (k *table) Sever([]kernel.Conn) (int, error)                 { return 0, nil }
func (k *table) Untrack(_, _ netip.AddrPort) error                { return nil }
func (k *table) Stuck(netip.AddrPort) ([]netip.AddrPort, error)   { return nil, nil }
func (k *table) SeverRemote(netip.AddrPort) (int, error)          { return 0, nil }
func (k *table) Source(netip.Addr) (netip.Addr, error)            { return netip.MustParseAddr("127.0.0.1"), nil }
func (k *table) Route(netip.Addr) (netip.Addr, bool, error)       { return netip.Addr{}, false, nil }
func (k *table) SetRoute(_, _ netip.Addr) error                   { return nil }
func (k *table) DelRoute(netip.Addr) error                        { return nil }
func (k *table) Settings() ([]string, error)                      { return nil, nil }
func (k *table) Watch(context.Context, func()) error              { return nil }

// TestMasterShowsItsCluster: a real API server shows the UIDs of cluster-info, to
// anybody, and of the Node and of the Service that it has made, to a certificate; ipvscare
// sends traffic to the one that shows any of them, and to no other.
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
		want   string // state
	}{
		{"it is the cluster", ipvs.Joined{ClusterInfo: info, Node: "shop-1", NodeUID: node.Metadata.UID}, cert, "up"},
		{"the Node is another", ipvs.Joined{ClusterInfo: info, Node: "gone", NodeUID: "1"}, cert, "up"},
		{"cluster-info is another", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: node.Metadata.UID}, cert, "up"},
		{"both are", ipvs.Joined{ClusterInfo: "1", Node: "gone", NodeUID: "1"}, cert, "alien"},
		{"both are, and the node has another UID", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: "1"}, cert, "alien"},
		{"both are, and the Service is not", ipvs.Joined{ClusterInfo: "1", Node: "gone", NodeUID: "1", ServiceUID: service}, cert, "up"},
		{"all are", ipvs.Joined{ClusterInfo: "1", Node: "gone", NodeUID: "1", ServiceUID: "1"}, cert, "alien"},
		{"cluster-info is another, and there is no certificate to ask with", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: node.Metadata.UID}, "", "down"},
		{"cluster-info is another, and the certificate has expired", ipvs.Joined{ClusterInfo: "1", Node: "shop-1", NodeUID: node.Metadata.UID, ServiceUID: service}, expired, "down"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rules := &table{}
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
			until(t, "the kernel to have it so", func() bool {
				s, _ := rules.Service(server.VIP)
				return s != nil && (len(s.Dests) == 1) == (tt.want == "up")
			})
		})
	}
}

// certificateOf is the client certificate and key of a kubeconfig, in one file.
func certificateOf(t *testing.T, kubeconfig string) string {
	t.Helper()
	text, err := os.ReadFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	k, err := api.ParseKubeconfig(text)
	if err != nil {
		t.Fatal(err)
	}
	u, err := k.User()
	if err != nil {
		t.Fatal(err)
	}
	pair, err := u.KeyPair("/")
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	key := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	file := filepath.Join(t.TempDir(), "client.pem")
	all := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), key...)
	if err := os.WriteFile(file, all, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
