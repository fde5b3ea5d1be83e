package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
)

// TestUpdateLease checks with the Lease of a real API server that only one of several control-plane
// nodes may be updated at a time, and the next one once the Lease is released.
func TestUpdateLease(t *testing.T) {
	m := newMasters(t)
	for i := range 3 {
		m.start(i, m.etcds.all(), "new")
	}
	m.serve(0)
	m.note(0, "first") // wait until the API server serves
	leases := map[string]controlplane.UpdateLease{}
	for i := range 3 {
		leases[name(i)] = m.updateLease(i)
	}
	for round := range 3 {
		var mu sync.Mutex
		var took []string
		var all sync.WaitGroup
		for who, lease := range leases {
			all.Go(func() {
				err := lease.Acquire(t.Context())
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					took = append(took, who)
				case !strings.Contains(err.Error(), "has been updating since 20"):
					t.Errorf("round %d: %s: %v", round, who, err)
				}
			})
		}
		all.Wait()
		if len(took) != 1 {
			t.Fatalf("round %d: these nodes are updated at the same time: %q", round, took)
		}
		holder := took[0]
		t.Logf("round %d: %s holds the Lease", round, holder)
		if err := leases[holder].Acquire(t.Context()); err != nil {
			t.Errorf("acquiring its own Lease again: %v", err)
		}
		for who, lease := range leases {
			if who == holder {
				continue
			}
			if err := lease.Release(t.Context()); err != nil { // has no effect on another node's Lease
				t.Errorf("%s: %v", who, err)
			}
			if err := lease.Acquire(t.Context()); err == nil {
				t.Errorf("%s acquired the Lease of %s", who, holder)
			}
		}
		if err := leases[holder].Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var lease struct{ Spec map[string]any }
	if err := m.api(0).Get(t.Context(), "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/"+controlplane.LeaseName, &lease); err != nil || lease.Spec["holderIdentity"] != nil {
		t.Errorf("%v, %v", lease, err)
	}
}

// updateLease returns the UpdateLease of the i-th master, which has only its own credentials. It
// uses the first API server and its own member of etcd.
func (m *masters) updateLease(i int) controlplane.UpdateLease {
	m.t.Helper()
	root := m.t.TempDir()
	put := func(path string, data []byte) {
		m.t.Helper()
		full := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			m.t.Fatal(err)
		}
		if err := os.WriteFile(full, data, 0o600); err != nil {
			m.t.Fatal(err)
		}
	}
	put(controlplane.SuperAdminConf, m.conf)
	for _, file := range []string{"etcd/ca.crt", "etcd/peer.crt", "etcd/peer.key"} {
		text, err := os.ReadFile(filepath.Join(m.pki, file))
		if err != nil {
			m.t.Fatal(err)
		}
		put(member.PKIDir+"/"+file, text)
	}
	// A proxy adds TLS to etcd, which serves without it in these tests.
	target, err := url.Parse(m.client[i])
	if err != nil {
		m.t.Fatal(err)
	}
	cert, err := tls.LoadX509KeyPair(filepath.Join(m.pki, "etcd/server.crt"), filepath.Join(m.pki, "etcd/server.key"))
	if err != nil {
		m.t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		m.t.Fatal(err)
	}
	proxy := &http.Server{Handler: httputil.NewSingleHostReverseProxy(target), ReadHeaderTimeout: time.Minute}
	go func() { _ = proxy.Serve(l) }() // until Close is called
	m.t.Cleanup(func() { proxy.Close() })

	files := host.Files{Root: root}
	e := &machine.Env{Root: root, Log: slog.New(slog.NewTextHandler(m.t.Output(), nil))}
	e.WriteFile, e.Remove, e.Now, e.Sleep = files.WriteFile, files.Remove, time.Now, host.Sleep
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		to := l.Addr().String()
		if strings.HasSuffix(addr, ":6443") {
			to = fmt.Sprintf("127.0.0.1:%d", m.port[0])
		}
		return (&net.Dialer{}).DialContext(ctx, network, to)
	}
	// 192.0.2.11 is the address in kubeadm's certificates.
	self := configs.ControlPlaneMember{Name: name(i), Address: "192.0.2.11"}
	return controlplane.NewUpdateLease(e, &configs.Site{NodeName: self.Name, NodeType: configs.NodeControlPlane, Masters: []string{"192.0.2.11:6443"},
		ControlPlane: &configs.SiteControlPlane{Members: []configs.ControlPlaneMember{self}}})
}

// TestHealthyEtcd checks Maintenance.Healthy with etcd members that run, are down, or do not vote.
func TestHealthyEtcd(t *testing.T) {
	e := newEtcds(t)
	etcd := func(i int) etcdmember.Client {
		return etcdmember.Client{HTTP: &http.Client{Timeout: 8 * time.Second}, URL: e.client[i]}
	}
	healthy := func(i int, named ...string) error {
		u := etcdmember.Maintenance{Own: etcd(i), Name: name(i), Others: map[string]etcdmember.Client{}}
		for j := range 3 {
			if j != i {
				u.Others[name(j)] = etcd(j)
			}
		}
		return u.Healthy(t.Context(), named)
	}
	all := []string{"m1", "m2", "m3"}
	becomes := func(i int, want string) {
		t.Helper()
		var err error
		defer func() {
			if t.Failed() {
				t.Logf("the last answer: %v", err)
			}
		}()
		until(t, fmt.Sprintf("%s to find %q", name(i), want), func() bool {
			err = healthy(i, all...)
			return want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(), want)
		})
	}
	for i := range 3 {
		e.start(i, e.all(), "new")
	}
	becomes(0, "")
	becomes(2, "")
	if err := healthy(0, append(slices.Clone(all), "m4")...); err == nil || !strings.Contains(err.Error(), "m4 is not a member of etcd") {
		t.Errorf("%v", err)
	}
	e.stop(2)
	becomes(0, "the member of etcd on m3 does not answer")
	e.stop(1)
	becomes(0, "asking etcd at") // no quorum
	e.start(1, e.all(), "new")
	e.start(2, e.all(), "new")
	becomes(0, "")

	// While a member is being replaced, its learner has no vote, whether it runs or not.
	e.wipe(2)
	members, err := etcd(0).Members(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range members {
		if m.Name == "m3" {
			if err := etcd(0).Remove(t.Context(), m.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	becomes(0, "m3 is not a member of etcd")
	var own etcdmember.Member
	until(t, "etcd to take a learner", func() bool {
		own, err = etcd(0).AddLearner(t.Context(), e.peer[2])
		return err == nil
	})
	becomes(0, "is not a voting member yet")
	if members, err = etcd(0).Members(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.start(2, etcdmember.InitialCluster(members, own, "m3"), "existing")
	becomes(0, "the member of etcd on m3 is not a voting member yet")
	until(t, "the learner to catch up", func() bool { return etcd(0).Promote(t.Context(), own.ID) == nil })
	becomes(0, "")
}
