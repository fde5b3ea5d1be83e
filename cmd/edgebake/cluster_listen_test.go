package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
	"golang.org/x/net/html"
)

// said is an output that can be read while it is being written.
type said struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// until waits until the output contains a match of want.
func (s *said) until(t *testing.T, want string) []string {
	t.Helper()
	re := regexp.MustCompile(want)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if m := re.FindStringSubmatch(s.String()); m != nil {
			return m
		}
	}
	t.Fatalf("the output lacks %q after a minute:\n%s", want, s)
	return nil
}

// listening starts `cluster listen` and returns its output.
func listening(t *testing.T, dir string, args ...string) *said {
	t.Helper()
	out := &said{}
	ctx, cancel := context.WithCancel(t.Context())
	root := newRoot(streams{Out: out, Err: out, In: strings.NewReader("")})
	root.SetArgs(append([]string{"cluster", "listen", "--dir", dir, "--listen", "127.0.0.1:0", "--page", "127.0.0.1:0"}, args...))
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("listening ended with %v", err)
		}
	})
	return out
}

// TestClusterListen checks that the printed lines make a valid Cluster and a valid Site, with which
// machines reach the receiver, and that a browser shows the reports in a light and a dark theme.
func TestClusterListen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "reports")
	out := listening(t, dir, "--name", "127.0.0.1")
	lines := out.until(t, `(?s)(report:\n.*-----END CERTIFICATE-----\n).*\n(  url: \S+)\n.*The page: (http://\S+/)\n`)
	elsewhere := strings.ReplaceAll(lines[1], "127.0.0.1", "192.0.2.9") // a Cluster cannot have a loopback address
	cluster, err := clusterdoc.Parse("cluster.yaml", []byte("apiVersion: edgebake.io/v1alpha1\nkind: Cluster\nname: shops\nkubernetesVersion: v1.36.3\n"+
		"masters: [{name: m1, address: 192.0.2.1}]\nnodes: [{name: shop-1}, {name: shop-2}]\n"+elsewhere))
	if err != nil {
		t.Fatalf("the lines for the Cluster: %v\n%s", err, lines[1])
	}
	byHand := regexp.MustCompile(`  key: .*\n`).ReplaceAllString(elsewhere, "")
	byHand = regexp.MustCompile(`  url: .*`).ReplaceAllString(byHand, strings.ReplaceAll(lines[2], "127.0.0.1", "192.0.2.9"))
	site, err := configs.ParseSite("site.yaml", []byte("apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [\"192.0.2.1:6443\"]\n"+
		"credentials: {token: k3l9x2.p0w8v7b6n5m4q3zz}\nunsafeSkipCAVerification: true\n"+byHand))
	if err != nil {
		t.Fatalf("the lines for a Site: %v\n%s", err, byHand)
	}
	urls := map[string]string{"shop-3": site.Report.URL}
	for i, n := range cluster.Nodes {
		own := cluster.NodeSite(&cluster.Nodes[i], configs.NewSecret("k3l9x2.p0w8v7b6n5m4q3zz"), "")
		urls[n.Name] = own.Report.URL
		if own.Report.CACert != site.Report.CACert {
			t.Errorf("the certificate of %s is %s", n.Name, own.Report.CACert)
		}
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(site.Report.CACert)) {
		t.Fatal("caCert has no certificate")
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	for _, s := range []ondisk.State{
		{Node: "shop-1", Result: ondisk.ResultDone, Phases: []ondisk.PhaseState{{Name: "join", Status: ondisk.PhaseDone}}},
		{Node: "shop-2", Result: ondisk.ResultFailed, Phases: []ondisk.PhaseState{{Name: "network", Status: ondisk.PhaseDone},
			{Name: "join", Status: ondisk.PhaseFailed, Error: "the token has expired", Fix: "stamp the machine again"}, {Name: "vip", Status: ondisk.PhasePending}}},
		{Node: "shop-3", Result: ondisk.ResultRunning, Phases: []ondisk.PhaseState{{Name: "network", Status: ondisk.PhaseRunning, Waiting: "an API server to answer"}}},
	} {
		body, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Post(strings.ReplaceAll(urls[s.Node], "192.0.2.9", "127.0.0.1"), "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusNoContent {
			t.Errorf("%s: %s", s.Node, resp.Status)
		}
	}
	out.until(t, `shop-2: failed, 2/3 join: the token has expired \(to fix: stamp the machine again\)`)

	resp, err := http.Get(lines[3])
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	doc, err := html.Parse(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	counts := map[string]string{}
	var walk func(*html.Node)
	walk = func(n *html.Node) {
		if name := attribute(n, "data-node"); name != "" {
			rows = append(rows, name)
		}
		if result := attribute(n, "data-count"); result != "" {
			counts[result] = n.FirstChild.Data
		}
		for c := range n.ChildNodes() {
			walk(c)
		}
	}
	walk(doc)
	if got := strings.Join(rows, " "); got != "shop-2 shop-3 shop-1" {
		t.Errorf("the page lists %s, want failed nodes first", got)
	}
	if counts["failed"] != "1" || counts["running"] != "1" || counts["done"] != "1" || counts["waiting"] != "0" {
		t.Errorf("the page counts %v", counts)
	}
	chromium := desk.NeedProgram(t, "chromium", "chromium")
	inTheme(t, chromium, "light", "1280,700", lines[3])
	inTheme(t, chromium, "dark", "500,1000", lines[3]) // the size of a phone's screen
}

// TestClusterListenRejects checks that the error for each cause that prevents listening names the
// flag that fixes it.
func TestClusterListenRejects(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "reports")
	c := newCLI(t)
	taken := listening(t, filepath.Join(t.TempDir(), "other"), "--name", "localhost")
	port := taken.until(t, `Listening on (127\.0\.0\.1:\d+)`)[1]
	for _, name := range []string{"http://x/", "192.0.2.1:8443", "a b", "fe80::1%eth0"} {
		if c.run(2, "cluster", "listen", "--dir", dir, "--name", name); !strings.Contains(c.err, "--name: ") || !strings.Contains(c.err, name) {
			t.Errorf("%s: %s", name, c.err)
		}
	}
	for _, x := range []struct{ args, want string }{
		{"", "the first time, --name is required"},
		{"--name a.example --listen " + port, "--listen"},
		{"--name b.example --listen 127.0.0.1:0", "is for a.example"},
		{"--listen 127.0.0.1:0 --page " + port, "--page"},
	} {
		if c.run(1, append([]string{"cluster", "listen", "--dir", dir}, strings.Fields(x.args)...)...); !strings.Contains(c.err, x.want) {
			t.Errorf("%s: %s", x.args, c.err)
		}
	}
}
