package cluster

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/lab"
)

// preflightSite returns a valid Site, modified by change.
func preflightSite(t *testing.T, lc *lab.Cluster, token string, change func(*configs.Site)) cluster.PreflightSite {
	t.Helper()
	doc := fmt.Sprintf("apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [192.0.2.1:6443]\ncaCertHashes: ['%s']\ncredentials: {token: %s}\nnodeName: preflight-1\nvip: 10.103.97.2\n",
		lc.CAHash, token)
	site, err := configs.ParseSite("site.yaml", []byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	site.Masters = []string{strings.TrimPrefix(open(t, lc, "").Server(), "https://")} // on loopback, unlike real ones
	if change != nil {
		change(site)
	}
	return cluster.PreflightSite{Name: "one", Site: site}
}

func checkNamed(t *testing.T, checks []cluster.Check, name string) cluster.Check {
	t.Helper()
	for _, c := range checks {
		if strings.HasPrefix(c.Name, name) {
			return c
		}
	}
	t.Errorf("no check %q in %+v", name, checks)
	return cluster.Check{}
}

// TestPreflight causes each failure once against a real API server, with and without a kubeconfig.
func TestPreflight(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	mint := func(ttl time.Duration) string {
		m, err := c.MintToken(ctx, cluster.MintOptions{Node: "preflight", TTL: ttl, Now: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		return m.Site.Credentials.Token.Reveal()
	}
	good, short := mint(30*24*time.Hour), mint(2*time.Hour)
	var unsigned [8]byte
	rand.Read(unsigned[:])
	options := func(admin bool) cluster.PreflightOptions {
		o := cluster.PreflightOptions{Now: time.Now(), ShipWithin: 72 * time.Hour, Kubelet: needPrograms(t).Version, Dial: (&net.Dialer{}).DialContext, Timeout: 10 * time.Second}
		if admin {
			o.Client = c
		}
		return o
	}
	run := func(admin bool, token string, change func(*configs.Site), option func(*cluster.PreflightOptions)) []cluster.Check {
		o := options(admin)
		if option != nil {
			option(&o)
		}
		return cluster.Preflight(ctx, []cluster.PreflightSite{preflightSite(t, lc, token, change)}, o)
	}
	until(t, "the tokens to be signed", func() bool {
		return checkNamed(t, run(false, good, nil, nil), "API server").State == cluster.CheckOK && checkNamed(t, run(false, short, nil, nil), "API server").State == cluster.CheckOK
	})
	for _, admin := range []bool{true, false} {
		for _, k := range run(admin, good, nil, nil) {
			if k.State == cluster.CheckFailed || admin && k.State == cluster.CheckUnknown {
				t.Errorf("with an administrator %v: %+v", admin, k)
			}
		}
	}
	node := map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "preflight-taken"}}
	if err := lc.Create(ctx, "/api/v1/nodes", node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lc.Delete(context.Background(), "/api/v1/nodes/preflight-taken") })
	for _, x := range []struct {
		what, check, detail string
		admin, both         bool
		token               string
		change              func(*configs.Site)
		option              func(*cluster.PreflightOptions)
	}{
		{what: "a dead master", check: "API server", detail: "connection refused", both: true, change: func(s *configs.Site) { s.Masters = []string{dead} }},
		{what: "another CA", check: "API server", detail: "is not the one that caCertHashes pins", both: true, change: func(s *configs.Site) {
			s.CACertHashes = []string{"sha256:" + strings.Repeat("0", 64)}
		}},
		{what: "another CA, by the kubeconfig", check: "CA hash", detail: "does not match the cluster's CA", admin: true, change: func(s *configs.Site) {
			s.CACertHashes = []string{"sha256:" + strings.Repeat("0", 64)}
		}},
		{what: "a token that was never there", check: "token", detail: "", admin: true, token: "aaaaaa." + hex.EncodeToString(unsigned[:])},
		{what: "a token that nobody signed for", check: "API server", detail: "", both: true, token: "aaaaaa." + hex.EncodeToString(unsigned[:])},
		{what: "another secret", check: "token", detail: "another secret", admin: true, token: good[:7] + strings.Repeat("a", 16)},
		{what: "a token that ends too early", check: "token", detail: "expires on", admin: true, token: short},
		{what: "a newer kubelet", check: "version", detail: "may not be newer", both: true, option: func(o *cluster.PreflightOptions) { o.Kubelet = "v1.99.0" }},
		{what: "an old kubelet", check: "version", detail: "three minor versions older", both: true, option: func(o *cluster.PreflightOptions) { o.Kubelet = "v1.20.0" }},
		{what: "a node name", check: "node name", detail: "has a Node preflight-taken", both: true, change: func(s *configs.Site) { s.NodeName = "preflight-taken" }},
		{what: "no OpenYurt", check: "NodePools", detail: "no NodePool CRD", admin: true, change: func(s *configs.Site) { s.NodeType, s.NodePool = "edge", "shops" }},
		{what: "no rights of yurthub", check: "yurthub's rights", detail: "no ClusterRole", admin: true, change: func(s *configs.Site) { s.NodeType, s.NodePool = "edge", "shops" }},
		{what: "no approver", check: "certificate approver", detail: "no Deployment yurt-manager", admin: true, change: func(s *configs.Site) { s.NodeType, s.NodePool = "edge", "shops" }},
	} {
		for _, admin := range []bool{true, false} {
			if !x.both && admin != x.admin {
				continue
			}
			token := x.token
			if token == "" {
				token = good
			}
			k := checkNamed(t, run(admin, token, x.change, x.option), x.check)
			if k.State != cluster.CheckFailed || k.Fix == "" || !strings.Contains(k.Detail, x.detail) {
				t.Errorf("%s, with an administrator %v: %+v", x.what, admin, k)
			}
			if strings.Contains(k.Detail+k.Fix, token[7:]) {
				t.Errorf("%s: the token is quoted: %+v", x.what, k)
			}
		}
	}
}

// dead is an address where no program listens. Its port is never assigned as a free one.
const dead = "127.0.0.1:1"
