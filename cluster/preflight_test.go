package cluster

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/openyurt"
	"k8s.io/client-go/rest"
)

// impostor is a server that knows one token, and therefore can sign cluster-info for it. It records
// every token that it receives.
type impostor struct {
	kubeconfig, id, secret string
	// stuck is the prefix of the paths for which the server never sends an answer; "": none.
	stuck string
	// version is the answer at /version.
	version string
	end     chan struct{}
	mu      sync.Mutex
	shown   []string
}

func (i *impostor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if a := r.Header.Get("Authorization"); a != "" {
		i.mu.Lock()
		i.shown = append(i.shown, a)
		i.mu.Unlock()
	}
	switch {
	case i.stuck != "" && strings.HasPrefix(r.URL.Path, i.stuck):
		select {
		case <-i.end:
		case <-r.Context().Done():
		}
	case strings.HasSuffix(r.URL.Path, "/cluster-info"):
		head := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"HS256","kid":"` + i.id + `"}`))
		mac := hmac.New(sha256.New, []byte(i.secret))
		mac.Write([]byte(head + "." + base64.RawURLEncoding.EncodeToString([]byte(i.kubeconfig))))
		json.NewEncoder(w).Encode(map[string]any{"data": map[string]string{"kubeconfig": i.kubeconfig,
			"jws-kubeconfig-" + i.id: head + ".." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))}})
	case r.URL.Path == "/version":
		fmt.Fprint(w, cmp.Or(i.version, `{"gitVersion":"v1.36.3"}`))
	default:
		http.NotFound(w, r)
	}
}

// serve starts the server and returns its address.
func (i *impostor) serve(t *testing.T) string {
	t.Helper()
	i.end = make(chan struct{})
	srv := httptest.NewTLSServer(i)
	t.Cleanup(func() { close(i.end); srv.Close() })
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	i.kubeconfig = "apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster: {server: \"https://x:6443\", certificate-authority-data: " + base64.StdEncoding.EncodeToString(ca) + "}\n"
	return srv.Listener.Addr().String()
}

func unpinned(name, token, master string) PreflightSite {
	s := &configs.Site{Masters: []string{master}, UnsafeSkipCAVerification: true, NodeName: name}
	s.Credentials.Token = configs.NewSecret(token)
	return PreflightSite{Name: name, Site: s}
}

// TestPreflightSendsATokenToItsServer checks that a server that was verified with one Site's
// token does not get another Site's token.
func TestPreflightSendsATokenToItsServer(t *testing.T) {
	i := &impostor{id: "aaaaaa", secret: strings.Repeat("a", 16)}
	master := i.serve(t)
	checks := Preflight(t.Context(), []PreflightSite{unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", master), unpinned("two", "bbbbbb.bbbbbbbbbbbbbbbb", master)},
		PreflightOptions{Now: time.Now(), Kubelet: "v1.36.3", Dial: (&net.Dialer{}).DialContext, Timeout: time.Minute})
	if len(i.shown) == 0 {
		t.Error("the first token was not sent: the test proves nothing")
	}
	for _, shown := range i.shown {
		if shown != "Bearer aaaaaa.aaaaaaaaaaaaaaaa" {
			t.Errorf("the server got %s", shown)
		}
	}
	state := map[string]string{}
	for _, c := range checks {
		state[strings.TrimSpace(c.Name+" "+c.Site)] = c.State
	}
	for name, want := range map[string]string{"token aaaaaa": CheckOK, "token bbbbbb": CheckFailed, "node name one": CheckOK, "node name two": CheckUnknown, "version": CheckOK} {
		if state[name] != want {
			t.Errorf("%s: %q in %+v", name, state[name], checks)
		}
	}
}

// TestPreflightEnds checks that an API server that stops answering does not block preflight.
func TestPreflightEnds(t *testing.T) {
	i := &impostor{id: "aaaaaa", secret: strings.Repeat("a", 16), stuck: "/api/v1/nodes/"}
	master := i.serve(t)
	start := time.Now()
	Preflight(t.Context(), []PreflightSite{unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", master)},
		PreflightOptions{Now: time.Now(), Kubelet: "v1.36.3", Dial: (&net.Dialer{}).DialContext, Timeout: 2 * time.Second})
	if took := time.Since(start); took > 3*time.Minute {
		t.Errorf("preflight took %v", took)
	}
}

// TestPreflightWithAnotherClustersKubeconfig checks that a kubeconfig of another cluster is
// detected, even if the Site gives its CA as caCert instead of a hash.
func TestPreflightWithAnotherClustersKubeconfig(t *testing.T) {
	store, c := newStore(t)
	i := &impostor{}
	master := i.serve(t)
	store.put("/api/v1/namespaces/kube-public/configmaps/cluster-info", map[string]any{"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": "cluster-info", "namespace": "kube-public"}, "data": map[string]any{"kubeconfig": i.kubeconfig}})
	other := anotherCA(t)
	k, err := kubeapi.ParseKubeconfig([]byte(i.kubeconfig))
	if err != nil {
		t.Fatal(err)
	}
	own, err := k.Clusters[0].Cluster.CA("/")
	if err != nil {
		t.Fatal(err)
	}
	for ca, want := range map[string]string{string(own): CheckOK, other: CheckFailed} {
		s := unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", master)
		s.UnsafeSkipCAVerification, s.CACert = false, ca
		checks := Preflight(t.Context(), []PreflightSite{s}, PreflightOptions{Client: c, Now: time.Now(), Dial: (&net.Dialer{}).DialContext, Timeout: time.Minute})
		at := slices.IndexFunc(checks, func(k Check) bool { return k.Name == "CA hash" })
		if at < 0 || checks[at].State != want {
			t.Errorf("want %s: %+v", want, checks)
		}
	}
}

// TestPreflightWithAUselessKubeconfig checks that an unusable kubeconfig is reported once, with a
// fix. The other checks are the same as without a kubeconfig.
func TestPreflightWithAUselessKubeconfig(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	expired := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }))
	defer expired.Close()
	master := (&impostor{id: "aaaaaa", secret: strings.Repeat("a", 16)}).serve(t)
	for server, want := range map[string]string{gone.URL: gone.URL + " does not answer: ", expired.URL: expired.URL + " does not accept the kubeconfig's credentials"} {
		c, err := newClient(&rest.Config{Host: server})
		if err != nil {
			t.Fatal(err)
		}
		checks := Preflight(t.Context(), []PreflightSite{unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", master), unpinned("two", "aaaaaa.aaaaaaaaaaaaaaaa", master)},
			PreflightOptions{Client: c, Now: time.Now(), Dial: (&net.Dialer{}).DialContext, Timeout: time.Minute})
		var failed []Check
		for _, k := range checks {
			if k.State == CheckFailed {
				failed = append(failed, k)
			}
			if k.Name == "token aaaaaa" && k.State != CheckOK {
				t.Errorf("%+v", k)
			}
		}
		if len(failed) != 1 || failed[0].Name != "kubeconfig" || !strings.HasPrefix(failed[0].Detail, want) || !strings.Contains(failed[0].Fix, "leave --kubeconfig out") {
			t.Errorf("%+v", failed)
		}
	}
}

// TestPreflightWithoutRights checks that a check is unknown if the kubeconfig's user may not read
// its object. The fix is another kubeconfig, not another token or cluster-info.
func TestPreflightWithoutRights(t *testing.T) {
	forbidden := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	defer forbidden.Close()
	c, err := newClient(&rest.Config{Host: forbidden.URL})
	if err != nil {
		t.Fatal(err)
	}
	s := unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", (&impostor{id: "aaaaaa", secret: strings.Repeat("a", 16)}).serve(t))
	s.UnsafeSkipCAVerification, s.CACert = false, anotherCA(t)
	checks := Preflight(t.Context(), []PreflightSite{s}, PreflightOptions{Client: c, Now: time.Now(), Dial: (&net.Dialer{}).DialContext, Timeout: time.Minute})
	for name, right := range map[string]string{"CA hash": "get configmaps cluster-info in namespace kube-public", "token aaaaaa": "get secrets bootstrap-token-aaaaaa in namespace kube-system"} {
		at := slices.IndexFunc(checks, func(k Check) bool { return k.Name == name })
		if at < 0 || checks[at].State != CheckUnknown || !strings.Contains(checks[at].Detail, "the kubeconfig's user has no permission") || checks[at].Fix != "name a kubeconfig whose user may "+right {
			t.Errorf("%s: %+v", name, checks)
		}
	}
}

// anotherCA returns an unrelated certificate.
func anotherCA(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// TestPreflightInWords checks that each error of an API server is one readable line of the table,
// without repetitions.
func TestPreflightInWords(t *testing.T) {
	i := &impostor{id: "aaaaaa", secret: strings.Repeat("a", 16)}
	good := i.serve(t)
	j := &impostor{id: "aaaaaa", secret: strings.Repeat("a", 16)}
	plain := httptest.NewServer(j)
	defer plain.Close()
	s := unpinned("one", "bbbbbb.bbbbbbbbbbbbbbbb", good)
	s.Masters = []string{good, "127.0.0.1:1", plain.Listener.Addr().String(), "nowhere.invalid:6443", good}
	detail := map[string]string{}
	for _, c := range Preflight(t.Context(), []PreflightSite{s}, PreflightOptions{Now: time.Now(), Kubelet: "v1.36.3", Timeout: time.Minute, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		if strings.HasPrefix(addr, "nowhere.") {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "no such host", Name: "nowhere.invalid", IsNotFound: true}}
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}) {
		detail[c.Name] = c.Detail
	}
	for name, want := range map[string]string{
		"API server 127.0.0.1:1":          "cannot be reached: connect: connection refused",
		"API server " + s.Masters[2]:      "speaks plain HTTP, not HTTPS: it is not an API server",
		"API server nowhere.invalid:6443": "is not found in DNS",
		"node name":                       "cluster-info is not signed for this token yet; cannot be reached: connect: connection refused; speaks plain HTTP, not HTTPS: it is not an API server; is not found in DNS",
	} {
		if got := detail[name]; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for name, d := range detail {
		if strings.Contains(d, "\n") {
			t.Errorf("%s breaks the table: %q", name, d)
		}
	}
}

// TestPreflightOddVersion checks that the message about a server's invalid version quotes it.
func TestPreflightOddVersion(t *testing.T) {
	i := &impostor{id: "aaaaaa", secret: strings.Repeat("a", 16), version: `{"gitVersion":"latest"}`}
	master := i.serve(t)
	for _, c := range Preflight(t.Context(), []PreflightSite{unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", master)},
		PreflightOptions{Now: time.Now(), Kubelet: "v1.36.3", Dial: (&net.Dialer{}).DialContext, Timeout: time.Minute}) {
		if c.Name == "version" && (c.State != CheckUnknown || c.Detail != `the API server reports the invalid version "latest"`) {
			t.Errorf("%+v", c)
		}
	}
}

// TestPreflightCertificateNames checks that two errors are distinguished: a certificate without any
// name that a node expects, and an API server of another cluster.
func TestPreflightCertificateNames(t *testing.T) {
	i := &impostor{id: "aaaaaa", secret: strings.Repeat("a", 16)}
	master := i.serve(t)
	s := unpinned("one", "aaaaaa.aaaaaaaaaaaaaaaa", "master.invalid:6443")
	checks := Preflight(t.Context(), []PreflightSite{s}, PreflightOptions{Now: time.Now(), Kubelet: "v1.36.3", Timeout: time.Minute, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, master)
	}})
	if k := checks[0]; k.Name != "API server master.invalid:6443" || k.State != CheckFailed || !strings.Contains(k.Detail, "the API server's certificate has none of the expected names") || !strings.Contains(k.Fix, "apiServer.certSANs") {
		t.Errorf("%+v", k)
	}
	if len(i.shown) > 0 {
		t.Errorf("the server got %q", i.shown)
	}
}

// TestPreflightSeesWhatYurthubLacks checks that preflight reports the rights that prepare would
// add. Without one of them, yurthub would never become ready.
func TestPreflightSeesWhatYurthubLacks(t *testing.T) {
	roleRules := func(but string) []any {
		var rules []any
		for _, r := range openyurt.HubRules() {
			if r.Resources[0] != but {
				rules = append(rules, ruleObject(r))
			}
		}
		return rules
	}
	const bindingPath = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/" + hubName
	role := func(but string) map[string]any {
		return rbac("ClusterRole", "", hubName, map[string]any{"rules": roleRules(but)})
	}
	bound, other := rbac("ClusterRoleBinding", "", hubName, bindNodes("ClusterRole", hubName)), rbac("ClusterRoleBinding", "", hubName, bindNodes("ClusterRole", hubName))
	other["subjects"] = []any{map[string]any{"kind": "Group", "name": "shop"}}
	for name, tt := range map[string]struct {
		role, binding map[string]any
		want          string // "": nothing is missing
	}{
		"nothing":           {nil, nil, "there is no ClusterRole yurt-hub"},
		"all":               {role(""), bound, ""},
		"no node pools":     {role("nodepools"), bound, "ClusterRole yurt-hub does not grant list, watch of nodepools.apps.openyurt.io"},
		"no slices":         {role("endpointslices"), bound, "endpointslices.discovery.k8s.io"},
		"no settings":       {role("configmaps"), bound, "does not grant get, list, watch of configmaps"},
		"no binding":        {role(""), nil, "there is no ClusterRoleBinding yurt-hub"},
		"another's binding": {role(""), other, "does not bind the ClusterRole to system:nodes"},
		"wider":             {rbac("ClusterRole", "", hubName, map[string]any{"rules": []any{map[string]any{"apiGroups": anyList("*"), "resources": anyList("*"), "verbs": anyList("*")}}}), bound, ""},
	} {
		s, c := newStore(t)
		if tt.role != nil {
			s.put(hubPath, tt.role)
		}
		if tt.binding != nil {
			s.put(bindingPath, tt.binding)
		}
		site := unpinned("edge1", "abcdef.0123456789abcdef", "127.0.0.1:1")
		site.NodeType, site.NodePool = configs.NodeEdge, "shops"
		checks := Preflight(t.Context(), []PreflightSite{site}, PreflightOptions{Client: c, Now: time.Now(), Dial: (&net.Dialer{}).DialContext, Timeout: time.Second})
		i := slices.IndexFunc(checks, func(k Check) bool { return k.Name == "yurthub's rights" })
		if i < 0 {
			t.Fatalf("%s: there is no check of the rights: %+v", name, checks)
		}
		k := checks[i]
		if (k.State == CheckOK) != (tt.want == "") || !strings.Contains(k.Detail, tt.want) || (k.Fix == "") != (tt.want == "") {
			t.Errorf("%s: %+v, want %q", name, k, tt.want)
		}
		// This is the state after Prepare.
		for _, w := range hubObjects() {
			obj, err := c.get(t.Context(), w.resource, "", w.name)
			if err != nil {
				t.Fatal(err)
			}
			want, err := w.change(copyOf(stateOf(obj)))
			if err != nil {
				t.Fatal(err)
			}
			s.put(map[string]string{"clusterroles": hubPath, "clusterrolebindings": bindingPath}[w.resource.Resource], want)
		}
		if lacks, err := c.missingRights(t.Context(), openyurt.HubRules()); err != nil || len(lacks) > 0 {
			t.Errorf("%s, prepared: %q, %v", name, lacks, err)
		}
	}
}
