package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	phases "github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/lab"
)

// nodeCertificate returns a kubelet certificate with this expiry, and its key, in PEM.
func nodeCertificate(t *testing.T, lc *lab.Cluster, node string, end time.Time) []byte {
	t.Helper()
	ca, err := tls.LoadX509KeyPair(lc.CAFile, strings.TrimSuffix(lc.CAFile, ".crt")+".key")
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
		NotBefore: end.AddDate(-1, 0, 0), NotAfter: end, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, ca.Leaf, key.Public(), ca.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

// makeClusterInfoAnew recreates cluster-info, which then has another UID.
func makeClusterInfoAnew(t *testing.T, lc *lab.Cluster) {
	t.Helper()
	const path = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	var published struct{ Data map[string]string }
	if err := lc.Get(t.Context(), path, &published); err != nil {
		t.Fatal(err)
	}
	if err := lc.Delete(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if err := lc.Create(t.Context(), filepath.Dir(path), map[string]any{"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]string{"name": "cluster-info"}, "data": map[string]string{"kubeconfig": published.Data["kubeconfig"]}}); err != nil {
		t.Fatal(err)
	}
}

// TestExpiredMemberJoinsAgain checks a member with an expired certificate, which can read only
// cluster-info from a real API server. If cluster-info was created again, the member joins again,
// but only with a token that the cluster accepts.
func TestExpiredMemberJoinsAgain(t *testing.T) {
	lc := needCluster(t)
	admin, ctx := adminAPI(t, lc.Kubeconfig), t.Context()
	info, err := admin.ClusterInfoUID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	service, err := admin.ServiceUID(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(lc.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	e := &machine.Env{Root: t.TempDir(), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	e.Now, e.Dial, e.Console = time.Now, new(net.Dialer).DialContext, func(line string) { t.Log(line) }
	e.ClockSynced = func(context.Context) (bool, error) { return true, nil }
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
	e.Remove = func(path string) error { return os.Remove(e.Path(path)) }
	put := func(path string, data []byte) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(e.Path(path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(e.Path(path), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	enrol := func(end time.Time) {
		t.Helper()
		put(member.ClientCert, nodeCertificate(t, lc, "shop-9", end))
		conf, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: admin.Server, TLSServerName: kubeapi.SharedName, CAData: base64.StdEncoding.EncodeToString(ca)},
			kubeapi.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
		if err != nil {
			t.Fatal(err)
		}
		put(ondisk.KubeletConf, conf)
	}
	noted := ondisk.IPVSJoined{ClusterInfo: info, Node: "shop-9", NodeUID: "of a Node that is gone", ServiceUID: service}
	note, err := json.Marshal(noted)
	if err != nil {
		t.Fatal(err)
	}
	put(ondisk.KubeCA, ca)
	put(ondisk.KubeletConfig, []byte("kind: KubeletConfiguration\n"))
	put(member.KubeadmFlags, []byte("KUBELET_KUBEADM_ARGS=\"\"\n"))
	put(member.JoinedCluster, note)

	client := open(t, lc, "")
	minted, err := client.MintToken(ctx, cluster.MintOptions{Node: "shop-9", TTL: time.Hour, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	token := minted.Site.Credentials.Token
	t.Cleanup(func() {
		if err := client.RevokeToken(context.Background(), token.Reveal()); err != nil {
			t.Error(err)
		}
	})
	text, err := configs.EncodeSlot(minted.Site)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := site.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	spec.Masters = []string{strings.TrimPrefix(admin.Server, "https://")} // the API server's address on this host
	phase := func() phases.Phase {
		for _, p := range firstboot.Phases(&site.Active{Site: spec, Node: "shop-9"}) {
			if p.Name == "cluster" {
				return p
			}
		}
		t.Fatal("the phase does not exist")
		return phases.Phase{}
	}
	look := func(want phases.Verdict, when string) {
		t.Helper()
		if v, err := phase().Look(ctx, e); err != nil || v != want {
			t.Errorf("%s: %v, %v; want %v", when, v, err, want)
		}
	}

	enrol(time.Now().AddDate(0, 1, 0))
	makeClusterInfoAnew(t, lc)
	look(phases.Done, "with a valid certificate, the Service's UID identifies the cluster")

	enrol(time.Now().Add(-time.Hour))
	if again, unclear := member.CheckRecreated(ctx, e, spec); again || !member.CannotShow(e, unclear) {
		t.Errorf("with an expired certificate: the cluster counts as recreated: %v, error %v", again, unclear)
	}
	p := phase()
	if v, err := p.Look(ctx, e); err != nil || v != phases.Todo {
		t.Fatalf("expired: %v, %v", v, err)
	}
	spec.Credentials.Token = configs.NewSecret(token.Reveal()[:7] + "aaaaaaaaaaaaaaaa")
	if err := p.Run(ctx, e); err == nil || member.ReadJoinedCluster(e) == nil {
		t.Errorf("with another token: %v, recorded: %v", err, member.ReadJoinedCluster(e))
	}
	spec.Credentials.Token = token
	until(t, "the token to be accepted", func() bool {
		err := p.Run(ctx, e)
		if err != nil {
			t.Log(err)
		}
		return err == nil
	})
	if member.ReadJoinedCluster(e) != nil {
		t.Error("the record of the cluster still exists")
	}
	look(phases.Done, "afterwards")

	put(member.JoinedCluster, note)
	spec.Credentials.Token = configs.Secret{}
	look(phases.Done, "without a token")
	if member.ReadJoinedCluster(e) == nil {
		t.Error("without a token the record is gone")
	}
}
