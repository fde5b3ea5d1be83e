package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/lab"
)

// live is one control plane for all tests of this package. They use different names, and remove
// their objects.
var live = struct {
	sync.Mutex
	lab     *lab.Lab
	cluster *lab.Cluster
	err     error
}{}

func TestMain(m *testing.M) {
	code := m.Run()
	if live.lab != nil {
		if err := live.lab.Close(); err != nil {
			fmt.Println(err)
		}
		if code == 0 {
			os.RemoveAll(live.lab.Dir)
		}
	}
	os.Exit(code)
}

func needCluster(t *testing.T) *lab.Cluster {
	t.Helper()
	p := needPrograms(t)
	live.Lock()
	defer live.Unlock()
	if live.cluster == nil && live.err == nil {
		live.cluster, live.err = startCluster(p)
	}
	if live.err != nil {
		t.Fatal(live.err)
	}
	return live.cluster
}

func startCluster(p *lab.Programs) (*lab.Cluster, error) {
	dir, err := os.MkdirTemp("", "edgebake-cluster-")
	if err != nil {
		return nil, err
	}
	if live.lab, err = lab.New(dir, os.Stdout); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	c, _, err := live.lab.StartLocalCluster(ctx, p)
	return c, err
}

// open returns a client of the cluster, as its administrator or as another user.
func open(t *testing.T, c *lab.Cluster, user string) *cluster.Client {
	t.Helper()
	file := c.Kubeconfig
	if user != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		changed := strings.Replace(string(text), "    client-certificate-data:", "    as: "+user+"\n    client-certificate-data:", 1)
		if changed == string(text) {
			t.Fatalf("the kubeconfig has no client-certificate-data:\n%s", text)
		}
		file = filepath.Join(t.TempDir(), "kubeconfig")
		if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client, err := cluster.Open(file, "")
	if err != nil {
		t.Fatal(err)
	}
	return client
}

const secretsPath = "/api/v1/namespaces/kube-system/secrets"

// until polls until ok returns true. On a busy machine, an election of etcd takes minutes.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	const patience = 5 * time.Minute
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("waited %s for %s", patience, what)
}

// TestTokenLife checks that a node can join with a minted token, and that the Site's fields are
// complete.
func TestTokenLife(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	m, err := c.MintToken(ctx, cluster.MintOptions{Node: "shop-7", TTL: time.Hour, Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	token := m.Site.Credentials.Token.Reveal()
	var checked *cluster.Token
	until(t, "the token to be signed", func() bool {
		if checked, err = c.CheckToken(ctx, token, time.Now()); err != nil {
			t.Fatal(err)
		}
		return len(checked.Problems) == 0
	})
	text, err := configs.EncodeSlot(m.Site)
	if err != nil {
		t.Fatal(err)
	}
	site, err := configs.ParseSite("site.yaml", text)
	if err != nil {
		t.Fatalf("the stub is no Site: %v\n%s", err, text)
	}
	if site.NodeName != "shop-7" || site.Endpoint != lab.Endpoint || site.CACertHashes[0] != lc.CAHash || site.Masters[0] != lc.Masters[0] {
		t.Errorf("%s", text)
	}
	all, err := c.Tokens(ctx, time.Now())
	if err != nil || len(all) != 2 {
		t.Errorf("%d tokens, want the lab's and the minted one: %v", len(all), err)
	}
	if strings.Contains(fmt.Sprintf("%+v", all), token[7:]) {
		t.Error("a list shows a secret")
	}
	if _, err := c.CheckToken(ctx, token[:7]+"aaaaaaaaaaaaaaaa", time.Now()); err != nil {
		t.Error(err)
	} else if checked, _ := c.CheckToken(ctx, token[:7]+"aaaaaaaaaaaaaaaa", time.Now()); len(checked.Problems) != 1 || !strings.Contains(checked.Problems[0].Reason, "another secret") {
		t.Error(checked.Problems)
	}
	if err := c.RevokeToken(ctx, token); err != nil {
		t.Error(err)
	}
	if err := c.RevokeToken(ctx, token); err == nil || !strings.Contains(err.Error(), "has no token with this ID") || strings.Contains(err.Error(), token[7:]) {
		t.Error(err)
	}
	if _, err := c.CheckToken(ctx, token, time.Now()); err == nil || !strings.Contains(err.Error(), "no token with this ID") {
		t.Error(err)
	}
}

// TestTokenProblems checks the messages for a token that has expired, has the wrong usages or lacks
// the group.
func TestTokenProblems(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	for id, tt := range map[string]struct {
		change map[string]string
		want   []string
	}{
		"bada00": {map[string]string{"expiration": time.Now().Add(2 * time.Second).UTC().Format(time.RFC3339)}, []string{"it expired at"}},
		"bada01": {map[string]string{"usage-bootstrap-authentication": "", "usage-bootstrap-signing": "false"}, []string{"lacks the usage authentication", "lacks the usage signing"}},
		"bada02": {map[string]string{"auth-extra-groups": "system:bootstrappers:others"}, []string{"lacks the group system:bootstrappers:kubeadm:default-node-token"}},
		"bada03": {map[string]string{"token-secret": "short"}, []string{"not of the form"}},
		"bada04": {map[string]string{"token-id": "bada05"}, []string{"its Secret is named bootstrap-token-bada04"}},
		"bada06": {map[string]string{"expiration": "tomorrow"}, []string{`"tomorrow" is not a time`}},
	} {
		data := map[string]string{"token-id": id, "token-secret": "0123456789abcdef", "expiration": time.Now().Add(time.Hour).UTC().Format(time.RFC3339),
			"usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true", "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token"}
		for k, v := range tt.change {
			data[k] = v
		}
		name := "bootstrap-token-" + id
		if err := lc.Create(ctx, secretsPath, map[string]any{"apiVersion": "v1", "kind": "Secret", "type": "bootstrap.kubernetes.io/token",
			"metadata": map[string]string{"name": name}, "stringData": data}); err != nil {
			t.Fatal(err)
		}
		// Check the token at a later time, because the token cleaner removes an expired one.
		checked, err := c.CheckToken(ctx, id, time.Now().Add(3*time.Second))
		if err != nil {
			t.Errorf("%s: %v", id, err)
			continue
		}
		for _, want := range tt.want {
			if !strings.Contains(fmt.Sprint(checked.Problems), want) {
				t.Errorf("%s: %q, want %q", id, checked.Problems, want)
			}
		}
		if len(checked.Problems) != len(tt.want) {
			t.Errorf("%s: %q", id, checked.Problems)
		}
		if err := lc.Delete(ctx, secretsPath+"/"+name); err != nil && !lab.NotFound(err) {
			t.Error(err)
		}
	}
}

// TestTokenOfNoUse checks that no token is created for a Site that a machine would reject.
func TestTokenOfNoUse(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	before, err := c.Tokens(ctx, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, vip := range []string{"fd00::2", "nowhere", "10.0.2.2"} {
		if _, err := c.MintToken(ctx, cluster.MintOptions{TTL: time.Hour, Now: time.Now(), VIP: vip}); err == nil || !strings.Contains(err.Error(), "VIP") && !strings.Contains(err.Error(), "vip: ") {
			t.Errorf("%s: %v", vip, err)
		}
	}
	after, err := c.Tokens(ctx, time.Now())
	if err != nil || len(after) != len(before) {
		t.Error(len(after), err)
	}
}

// TestTokenRights checks that missing rights are reported by verb and resource before anything is
// changed.
func TestTokenRights(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, "nobody-special"), t.Context()
	before, err := open(t, lc, "").Tokens(ctx, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.MintToken(ctx, cluster.MintOptions{TTL: time.Hour, Now: time.Now()})
	if err == nil || !strings.Contains(err.Error(), "has no permission to create secrets in namespace kube-system, or get configmaps cluster-info in namespace kube-public, or get configmaps kubeadm-config in namespace kube-system, or list endpointslices.discovery.k8s.io in namespace default; nothing was changed") {
		t.Error(err)
	}
	if err := c.RevokeToken(ctx, before[0].ID); err == nil || !strings.Contains(err.Error(), "has no permission to delete secrets bootstrap-token-"+before[0].ID) {
		t.Error(err)
	}
	if _, err := c.Tokens(ctx, time.Now()); err == nil || !strings.Contains(err.Error(), "has no permission") {
		t.Error(err)
	}
	after, err := open(t, lc, "").Tokens(ctx, time.Now())
	if err != nil || len(after) != len(before) {
		t.Error(len(after), err)
	}
}

// TestTokenWithoutGroupsRights uses a cluster in which bootstrappers have no rights. The token
// itself is valid.
func TestTokenWithoutGroupsRights(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	const path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/kubeadm:kubelet-bootstrap"
	var binding map[string]any
	if err := lc.Get(ctx, path, &binding); err != nil {
		t.Fatal(err)
	}
	if err := lc.Delete(ctx, path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		meta := binding["metadata"].(map[string]any)
		delete(meta, "resourceVersion")
		delete(meta, "uid")
		if err := lc.Create(context.Background(), filepath.Dir(path), binding); err != nil {
			t.Error(err)
		}
	})
	until(t, "the missing right to be reported", func() bool {
		checked, err := c.CheckToken(ctx, lc.Token, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(fmt.Sprint(checked.Problems), "its groups may not create certificatesigningrequests.certificates.k8s.io")
	})
}

func TestUnreachable(t *testing.T) {
	lc := needCluster(t)
	text, err := os.ReadFile(lc.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ text, want string }{
		{strings.ReplaceAll(string(text), "server: https://127.0.0.1:", "server: https://127.0.0.9:"), "does not answer"},
		{strings.ReplaceAll(string(text), "server: https://127.0.0.1:", "server: https://localhost:"), ""},
	} {
		file := filepath.Join(t.TempDir(), "kubeconfig")
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := cluster.Open(file, "")
		if err != nil {
			if !strings.Contains(err.Error(), "kubeconfig") {
				t.Error(err)
			}
			continue
		}
		if _, err = c.Tokens(t.Context(), time.Now()); tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v", tt.want, err)
		}
	}
	if _, err := cluster.Open("/not/there", ""); err == nil || !strings.Contains(err.Error(), "/not/there") {
		t.Error(err)
	}
	if _, err := cluster.Open(lc.Kubeconfig, "elsewhere"); err == nil || !strings.Contains(err.Error(), "elsewhere") {
		t.Error(err)
	}
}
