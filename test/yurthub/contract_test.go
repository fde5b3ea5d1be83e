package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/lab"
)

// TestContract drives the stand-in through bootstrap, normal service, loss of every server, and a
// restart without any server, and compares the responses with the real program's transcript for
// each version. To record a transcript, set YURTHUB_BINARY to the real program and YURTHUB_STAND_IN
// to its version.
func TestContract(t *testing.T) {
	transcript := func(version string) string { return "testdata/transcripts/yurthub-" + version + ".txt" }
	if program := os.Getenv("YURTHUB_BINARY"); program != "" {
		version := os.Getenv("YURTHUB_STAND_IN")
		// The real program must have this name: otherwise it does not recognize its own requests,
		// and rejects them forever.
		bin := filepath.Join(t.TempDir(), "yurthub")
		if err := os.Symlink(program, bin); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(transcript(version), []byte(drive(t, bin, version)), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	bin := filepath.Join(t.TempDir(), "yurthub")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("building the stand-in: %v\n%s", err, out)
	}
	for _, version := range []string{"v1.6.1", "v1.7.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel() // subtests mostly wait, so run them in parallel
			want, err := os.ReadFile(transcript(version))
			if err != nil {
				t.Fatal(err)
			}
			if got := drive(t, bin, version); got != string(want) {
				t.Errorf("the stand-in differs from the real program.\nreal:\n%s\nstand-in:\n%s", want, got)
			}
		})
	}
}

func drive(t *testing.T, bin, version string) string {
	env := append(os.Environ(), "YURTHUB_STAND_IN="+version)
	before17 := strings.HasPrefix(version, "v1.6.")
	var out strings.Builder
	say := func(format string, args ...any) {
		fmt.Fprintf(&out, format+"\n", args...)
		t.Logf(format, args...)
	}

	// These arguments are rejected at once.
	good := []string{"--node-name=edge1", "--nodepool-name=shops", "--node-ip=127.0.0.1", "--server-addr=https://127.0.0.1:1", "--bootstrap-file=/nonexistent/bootstrap"}
	type start struct {
		name string
		args []string
	}
	without := func(flag string) []string {
		return slices.DeleteFunc(slices.Clone(good), func(a string) bool { return strings.HasPrefix(a, flag+"=") })
	}
	refused := []start{{"no node pool", without("--nodepool-name")}}
	if before17 {
		refused = []start{{"a node address", good}}
		good = without("--node-ip")
	}
	for _, c := range append(refused,
		start{"no node name", without("--node-name")},
		start{"no server", without("--server-addr")},
		start{"http server", append(slices.Clone(good), "--server-addr=http://127.0.0.1:1")},
		start{"no bootstrap file", without("--bootstrap-file")},
		start{"lb-mode round-robin", append(slices.Clone(good), "--lb-mode=round-robin")},
		start{"working-mode far", append(slices.Clone(good), "--working-mode=far")},
		start{"dummy address outside link-local", append(slices.Clone(good), "--dummy-if-ip=10.0.0.1")},
		start{"dummy name too long", append(slices.Clone(good), "--dummy-if-name=a-very-long-name")},
	) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		cmd := exec.CommandContext(ctx, bin, append(c.args, "--enable-dummy-if=false", "--root-dir="+t.TempDir())...)
		cmd.Env = env
		b, err := cmd.CombinedOutput()
		no := err != nil && ctx.Err() == nil
		cancel()
		say("refused at start, %s: %v", c.name, no)
		if !no {
			t.Logf("%s", b)
		}
	}

	api := newAPI(t)
	api.pools = "v1beta2"
	if before17 {
		api.pools = "v1beta1"
	}
	root := t.TempDir()
	h := &hub{t: t, bin: bin, root: root, api: api, env: env, before17: before17}
	h.ports()
	h.start(api.addr)
	defer h.stop()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the program:\n%s", h.log.String())
		}
	})

	// During bootstrap, no port is open before both certificates exist.
	first := api.waitCSR(0)
	say("first CSR: %s", first)
	say("health before the client certificate: %s", h.settled("/v1/healthz"))
	api.approve(0)
	second := api.waitCSR(1)
	say("second CSR: %s", second)
	say("health before the serving certificate: %s", h.settled("/v1/healthz"))
	api.approve(1)
	h.until("/v1/healthz", "200 OK")
	say("health with both certificates: %s", h.health("/v1/healthz"))

	// Readiness requires ConfigMaps and NodePools, the latter in only one version.
	say("ready without the right to list configmaps: %s", h.settled("/v1/readyz"))
	say("request while not ready: %s", h.get("kubelet/v1.36.3", "/api/v1/nodes/edge1"))
	api.allow("configmaps")
	const noPools = "500 resources needed by filters are not synced"
	h.until("/v1/readyz", noPools)
	say("ready without the right to list node pools: %s", h.settled("/v1/readyz"))
	api.allow("nodepools")
	h.until("/v1/readyz", "200 OK")
	say("ready with both: %s", h.health("/v1/readyz"))

	// These are the responses while a server is healthy.
	h.until2("kubelet/v1.36.3", "/api/v1/nodes/edge1", "200 edge1")
	say("kubelet gets its node: %s", h.get("kubelet/v1.36.3", "/api/v1/nodes/edge1"))
	say("kubelet lists its node: %s", h.get("kubelet/v1.36.3", "/api/v1/nodes?fieldSelector=metadata.name%3Dedge1&limit=500&resourceVersion=0"))
	say("kubelet lists its pods: %s", h.get("kubelet/v1.36.3", "/api/v1/pods?fieldSelector=spec.nodeName%3Dedge1&limit=500&resourceVersion=0"))
	say("kubelet 1.30 lists services: %s", h.get("kubelet/v1.30.3", "/api/v1/services?limit=500&resourceVersion=0"))
	say("kubelet 1.31 lists services: %s", h.get("kubelet/v1.36.3", "/api/v1/services?fieldSelector=spec.clusterIP%21%3DNone&limit=500&resourceVersion=0"))
	say("another client gets the node: %s", h.get("curl/8", "/api/v1/nodes/edge1"))
	say("the API server sees the client as: %s", api.lastSubject())
	say("HTTPS asks for no client certificate: %s", h.getTLS("kubelet/v1.36.3", "/api/v1/nodes/edge1"))
	for end := time.Now().Add(time.Minute); h.send("kubelet/v1.36.3", "PUT", leasePath, lease) != "200 edge1" && time.Now().Before(end); {
		time.Sleep(200 * time.Millisecond) // until the health prober has renewed it once
	}
	say("kubelet's lease: %s", h.send("kubelet/v1.36.3", "PUT", leasePath, lease))

	// Now all servers are down.
	time.Sleep(time.Second)
	api.stop()
	h.until2("curl/8", "/api/v1/nodes/edge1", "400")
	say("offline, another client gets the node: %s", h.get("curl/8", "/api/v1/nodes/edge1"))
	say("offline, kubelet gets its node: %s", h.get("kubelet/v1.36.3", "/api/v1/nodes/edge1"))
	say("offline, kubelet lists its pods: %s", h.get("kubelet/v1.36.3", "/api/v1/pods?fieldSelector=spec.nodeName%3Dedge1&limit=500&resourceVersion=0"))
	say("offline, kubelet gets what it never read: %s", h.get("kubelet/v1.36.3", "/api/v1/namespaces/default/configmaps/never"))
	say("offline, kubelet deletes a pod: %s", h.send("kubelet/v1.36.3", "DELETE", "/api/v1/namespaces/default/pods/p", ""))
	say("offline, kubelet posts an event: %s", h.send("kubelet/v1.36.3", "POST", "/api/v1/namespaces/default/events", `{"apiVersion":"v1","kind":"Event","metadata":{"name":"e","namespace":"default"},"involvedObject":{}}`))
	say("offline, kubelet asks a token: %s", h.send("kubelet/v1.36.3", "POST", "/api/v1/namespaces/default/serviceaccounts/default/token", `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"audiences":[],"expirationSeconds":600}}`))
	say("offline, kubelet's lease: %s", h.send("kubelet/v1.36.3", "PUT", leasePath, lease))
	say("offline, a watch: %s", h.watch("/api/v1/pods?fieldSelector=spec.nodeName%3Dedge1&watch=true&timeoutSeconds=300&resourceVersion=10"))

	// Restart without any server and without the token.
	h.stop()
	h.noToken = true
	h.start(api.addr)
	h.until("/v1/readyz", "200 OK")
	say("restarted offline, ready: %s", h.health("/v1/readyz"))
	say("restarted offline, kubelet gets its node: %s", h.get("kubelet/v1.36.3", "/api/v1/nodes/edge1"))
	say("restarted offline, kubelet lists its pods: %s", h.get("kubelet/v1.36.3", "/api/v1/pods?fieldSelector=spec.nodeName%3Dedge1&limit=500&resourceVersion=0"))
	h.stop()

	// The server list does not have the server in yurthub.conf any more.
	say("identity before: %v", fileExists(filepath.Join(root, "pki", "yurthub-current.pem")))
	h.start("127.0.0.1:1")
	deadline := time.Now().Add(2 * time.Minute)
	for fileExists(filepath.Join(root, "pki", "yurthub-current.pem")) && time.Now().Before(deadline) {
		time.Sleep(100 * time.Millisecond)
	}
	say("identity after a start with another server list: %v", fileExists(filepath.Join(root, "pki", "yurthub-current.pem")))
	return out.String()
}

const leasePath = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/edge1"

const lease = `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"edge1","namespace":"kube-node-lease"},"spec":{"holderIdentity":"edge1","leaseDurationSeconds":40}}`

// hub runs the tested program.
type hub struct {
	t         *testing.T
	bin, root string
	before17  bool
	noToken   bool // the bootstrap file has been removed
	env       []string
	api       *api
	port      [4]int
	cmd       *exec.Cmd
	log       bytes.Buffer
}

func (h *hub) ports() {
	free, err := lab.FreePorts(len(h.port))
	if err != nil {
		h.t.Fatal(err)
	}
	copy(h.port[:], free)
}

func (h *hub) start(server string) {
	boot := filepath.Join(h.t.TempDir(), "bootstrap-hub.conf")
	conf := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", certificate-authority-data: %s}}]
users: [{name: u, user: {token: abcdef.0123456789abcdef}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server, base64.StdEncoding.EncodeToString(h.api.caPEM))
	if !h.noToken {
		if err := os.WriteFile(boot, []byte(conf), 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
	args := []string{
		"--node-name=edge1", "--nodepool-name=shops", "--bind-address=127.0.0.1",
		"--server-addr=https://" + server, "--bootstrap-file=" + boot, "--bootstrap-mode=token", "--working-mode=edge",
		"--root-dir=" + h.root, "--disk-cache-path=" + filepath.Join(h.root, "cache-of-test"), "--enable-dummy-if=false",
		"--heartbeat-interval-seconds=1", "--heartbeat-timeout-seconds=1", "--lb-mode=priority",
		"--discovery-token-unsafe-skip-ca-verification=true",
		fmt.Sprintf("--serve-port=%d", h.port[0]), fmt.Sprintf("--proxy-port=%d", h.port[1]),
		fmt.Sprintf("--proxy-secure-port=%d", h.port[2]), "--v=2",
	}
	if !h.before17 {
		args = append(args, "--node-ip=127.0.0.1", fmt.Sprintf("--multiplexer-port=%d", h.port[3]))
	}
	h.cmd = exec.Command(h.bin, args...)
	h.cmd.Env, h.cmd.Stdout, h.cmd.Stderr = h.env, &h.log, &h.log
	// The child's processes end with the test.
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := h.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
}

func (h *hub) stop() {
	if h.cmd == nil {
		return
	}
	h.cmd.Process.Kill()
	h.cmd.Wait()
	h.cmd = nil
}

func (h *hub) health(path string) string {
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", h.port[0], path))
	if err != nil {
		return "refused"
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return fmt.Sprintf("%d %s", resp.StatusCode, strings.TrimSpace(string(b)))
}

func (h *hub) fatal(what, last string) {
	h.t.Helper()
	b := h.log.String()
	h.t.Fatalf("%s did not come; last: %s\nlog:\n%s", what, last, b[max(0, len(b)-6000):])
}

// settled returns the response of the health port once it has been the same for two seconds,
// because the stand-in retries every second.
func (h *hub) settled(path string) string {
	h.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	last, since := h.health(path), time.Now()
	patience := 2 * time.Second
	if os.Getenv("YURTHUB_BINARY") == "" {
		patience = 1200 * time.Millisecond
	}
	for time.Since(since) < patience {
		time.Sleep(100 * time.Millisecond)
		if got := h.health(path); got != last {
			last, since = got, time.Now()
		}
		if time.Now().After(deadline) {
			h.fatal(path+" to answer the same", last)
		}
	}
	return last
}

func (h *hub) until(path, want string) {
	h.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for got := ""; ; time.Sleep(100 * time.Millisecond) {
		if got = h.health(path); got == want {
			return
		}
		if time.Now().After(deadline) {
			h.fatal(path+" "+want, got)
		}
	}
}

func (h *hub) until2(agent, path, want string) {
	h.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for got := ""; ; time.Sleep(200 * time.Millisecond) {
		if got = h.get(agent, path); strings.HasPrefix(got, want) {
			return
		}
		if time.Now().After(deadline) {
			h.fatal(path+" "+want, got)
		}
	}
}

func (h *hub) get(agent, path string) string {
	return h.do(http.DefaultClient, agent, "GET", fmt.Sprintf("http://127.0.0.1:%d%s", h.port[1], path), "")
}

func (h *hub) send(agent, method, path, body string) string {
	return h.do(http.DefaultClient, agent, method, fmt.Sprintf("http://127.0.0.1:%d%s", h.port[1], path), body)
}

func (h *hub) getTLS(agent, path string) string {
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: h.api.pool, ServerName: "kubernetes"}}}
	port := h.port[3]
	if h.before17 {
		port = h.port[2]
	}
	return h.do(c, agent, "GET", fmt.Sprintf("https://127.0.0.1:%d%s", port, path), "")
}

// do returns a summary of a response: the status, and the name of an object or the names in a list.
func (h *hub) do(c *http.Client, agent, method, url, body string) string {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("User-Agent", agent)
	req.Header.Set("Accept", "application/json")
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return "no answer"
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	var o struct {
		Kind     string
		Metadata struct{ Name string }
		Items    []struct{ Metadata struct{ Name string } }
	}
	json.Unmarshal(b, &o)
	sum := fmt.Sprint(resp.StatusCode)
	if resp.StatusCode >= 300 {
		return sum
	}
	if o.Metadata.Name != "" {
		sum += " " + o.Metadata.Name
	}
	for _, i := range o.Items {
		sum += " [" + i.Metadata.Name + "]"
	}
	return sum
}

// watch reports whether a watch is accepted and then stays silent.
func (h *hub) watch(path string) string {
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://127.0.0.1:%d%s", h.port[1], path), nil)
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("User-Agent", "kubelet/v1.36.3")
	req.Header.Set("Accept", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "no answer"
	}
	defer resp.Body.Close()
	defer time.AfterFunc(2*time.Second, cancel).Stop()
	n, err := resp.Body.Read(make([]byte, 1))
	return fmt.Sprintf("%d, open and silent: %v", resp.StatusCode, n == 0 && err != nil && ctx.Err() != nil)
}

// api is an API server with only the parts that yurthub needs.
type api struct {
	t      *testing.T
	addr   string
	key    *ecdsa.PrivateKey
	ca     *x509.Certificate
	caPEM  []byte
	pool   *x509.CertPool
	server *http.Server

	mu      sync.Mutex
	csrs    []csr
	rights  map[string]bool
	subject string
	leases  map[string]any
	pools   string // the only version of NodePools
}

func newAPI(t *testing.T) *api {
	a := &api{t: t, rights: map[string]bool{}}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	a.ca, _ = x509.ParseCertificate(der)
	a.caPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	a.pool = x509.NewCertPool()
	a.pool.AddCert(a.ca)

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, DNSNames: []string{"kubernetes"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, &key.PublicKey)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{leaf}, PrivateKey: key}},
		ClientCAs:    a.pool, ClientAuth: tls.VerifyClientCertIfGiven,
	})
	if err != nil {
		t.Fatal(err)
	}
	a.addr = l.Addr().String()
	a.server = &http.Server{Handler: a}
	go a.server.Serve(l)
	t.Cleanup(func() { a.server.Close() })
	return a
}

func (a *api) stop() { a.server.Close() }

func (a *api) sign(tmpl *x509.Certificate, pub any) []byte {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		a.t.Fatal(err)
	}
	tmpl.SerialNumber = serial
	tmpl.NotBefore, tmpl.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.ca, pub, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return der
}

// waitCSR waits for the i-th request and returns its summary.
func (a *api) waitCSR(i int) string {
	a.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for time.Now().Before(deadline) {
		a.mu.Lock()
		if len(a.csrs) > i {
			c := a.csrs[i]
			a.mu.Unlock()
			block, _ := pem.Decode(c.Spec.Request)
			r, err := x509.ParseCertificateRequest(block.Bytes)
			if err != nil {
				a.t.Fatal(err)
			}
			org := slices.Clone(r.Subject.Organization)
			slices.Sort(org)
			usages := slices.Clone(c.Spec.Usages)
			slices.Sort(usages)
			dns := slices.Clone(r.DNSNames)
			slices.Sort(dns)
			return fmt.Sprintf("signer %s, CN %s, O %v, usages %v, DNS %v", c.Spec.SignerName, r.Subject.CommonName, org, usages, dns)
		}
		a.mu.Unlock()
		time.Sleep(100 * time.Millisecond)
	}
	a.t.Fatalf("CSR %d never came", i)
	return ""
}

func (a *api) approve(i int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := &a.csrs[i]
	block, _ := pem.Decode(c.Spec.Request)
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		a.t.Fatal(err)
	}
	use := x509.ExtKeyUsageClientAuth
	if c.Spec.SignerName == signerServing {
		use = x509.ExtKeyUsageServerAuth
	}
	der := a.sign(&x509.Certificate{Subject: r.Subject, DNSNames: r.DNSNames, IPAddresses: r.IPAddresses, ExtKeyUsage: []x509.ExtKeyUsage{use}}, r.PublicKey)
	c.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	c.Status.Conditions = append(c.Status.Conditions, struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	}{"Approved", "by the test"})
}

func (a *api) allow(resource string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rights[resource] = true
}

func (a *api) lastSubject() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.subject
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	answer := func(code int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(v)
	}
	fail := func(code int, reason string) {
		answer(code, map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": r.URL.Path})
	}
	serveList := func(apiVersion, kind string, items ...any) {
		if isWatch(r) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(200)
			if r.URL.Query().Get("sendInitialEvents") == "true" {
				for _, i := range items {
					json.NewEncoder(w).Encode(map[string]any{"type": "ADDED", "object": i})
				}
				json.NewEncoder(w).Encode(map[string]any{"type": "BOOKMARK", "object": map[string]any{
					"apiVersion": apiVersion, "kind": kind,
					"metadata": map[string]any{"resourceVersion": "10", "annotations": map[string]string{"k8s.io/initial-events-end": "true"}},
				}})
			}
			w.(http.Flusher).Flush()
			a.mu.Unlock()
			<-r.Context().Done()
			a.mu.Lock()
			return
		}
		if items == nil {
			items = []any{}
		}
		answer(200, map[string]any{"apiVersion": apiVersion, "kind": kind + "List", "metadata": map[string]any{"resourceVersion": "10"}, "items": items})
	}
	object := func(kind, ns, name string) map[string]any {
		return map[string]any{"apiVersion": "v1", "kind": kind, "metadata": map[string]any{"name": name, "namespace": ns, "uid": name, "resourceVersion": "5"}}
	}
	node := object("Node", "", "edge1")
	// The real program sets this condition through the server. Without a server, it fails any
	// request for a Node that lacks the condition.
	node["status"] = map[string]any{"conditions": []any{map[string]any{"type": "Autonomy", "status": "False"}}}
	p := r.URL.Path
	switch {
	case p == csrPath && r.Method == "POST":
		var c csr
		if spec, ok := protobufCSR(body); ok {
			c.Spec = spec
		} else if err := json.Unmarshal(body, &c); err != nil {
			fail(400, "BadRequest")
			return
		}
		name := fmt.Sprintf("csr-%d", len(a.csrs))
		c.APIVersion, c.Kind = "certificates.k8s.io/v1", "CertificateSigningRequest"
		c.Metadata = map[string]any{"name": name, "uid": name, "resourceVersion": "1"}
		a.csrs = append(a.csrs, c)
		answer(201, c)
	case strings.HasPrefix(p, csrPath):
		name := strings.TrimPrefix(strings.TrimPrefix(p, csrPath), "/")
		if name == "" {
			var items []any
			for _, c := range a.csrs {
				if r.URL.Query().Get("fieldSelector") == "metadata.name="+c.Metadata["name"].(string) {
					items = append(items, c)
				}
			}
			if isWatch(r) {
				// Do not send events: the client gets the certificate by listing again.
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(200)
				w.(http.Flusher).Flush()
				a.mu.Unlock()
				time.Sleep(500 * time.Millisecond)
				a.mu.Lock()
				return
			}
			serveList("certificates.k8s.io/v1", "CertificateSigningRequest", items...)
			return
		}
		for _, c := range a.csrs {
			if c.Metadata["name"] == name {
				answer(200, c)
				return
			}
		}
		fail(404, "NotFound")
	case strings.Contains(p, "/leases"):
		switch {
		case r.Method == "GET" && a.leases == nil:
			fail(404, "NotFound")
		case r.Method == "GET":
			answer(200, a.leases)
		default:
			// Ignore the content, which is protobuf from the real program.
			a.leases = map[string]any{
				"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
				"metadata": map[string]any{"name": "edge1", "namespace": "kube-node-lease", "resourceVersion": fmt.Sprint(time.Now().UnixNano())},
				"spec":     map[string]any{"holderIdentity": "edge1", "leaseDurationSeconds": 40},
			}
			answer(200, a.leases)
		}
	case strings.HasSuffix(p, "/configmaps"):
		if !a.rights["configmaps"] {
			fail(403, "Forbidden")
			return
		}
		serveList("v1", "ConfigMap")
	case p == "/apis/apps.openyurt.io/"+a.pools+"/nodepools":
		if !a.rights["nodepools"] {
			fail(403, "Forbidden")
			return
		}
		serveList("apps.openyurt.io/"+a.pools, "NodePool")
	case p == "/api/v1/nodes/edge1":
		if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
			s := r.TLS.PeerCertificates[0].Subject
			org := slices.Clone(s.Organization)
			slices.Sort(org)
			a.subject = fmt.Sprintf("%s %v", s.CommonName, org)
		}
		answer(200, node)
	case p == "/api/v1/pods":
		serveList("v1", "Pod", object("Pod", "default", "hello"))
	case p == "/api/v1/nodes":
		serveList("v1", "Node", node)
	case p == "/api/v1/services":
		// Without a cached Service, the real 1.7.0 is not ready offline.
		serveList("v1", "Service", object("Service", "default", "kubernetes"))
	case p == "/api/v1/configmaps":
		serveList("v1", "ConfigMap")
	case p == "/api/v1/namespaces/default/services/kubernetes":
		svc := object("Service", "default", "kubernetes")
		svc["spec"] = map[string]any{"clusterIP": "10.96.0.1"}
		answer(200, svc)
	case p == "/api":
		answer(200, map[string]any{"kind": "APIVersions", "versions": []string{"v1"}})
	case p == "/apis":
		answer(200, map[string]any{"kind": "APIGroupList", "apiVersion": "v1", "groups": []any{}})
	case p == "/api/v1":
		answer(200, map[string]any{"kind": "APIResourceList", "groupVersion": "v1", "resources": []any{
			map[string]any{"name": "nodes", "kind": "Node", "namespaced": false, "verbs": []string{"get", "list"}},
			map[string]any{"name": "pods", "kind": "Pod", "namespaced": true, "verbs": []string{"get", "list"}},
		}})
	case p == "/version":
		answer(200, map[string]any{"major": "1", "minor": "36", "gitVersion": "v1.36.3"})
	default:
		fail(404, "NotFound")
	}
}

// protobufCSR returns the spec of a CertificateSigningRequest in Kubernetes' protobuf encoding:
// four magic bytes, then an envelope. Field 2 of the envelope is the object, and field 2 of the
// object is the spec. The spec has the fields request (1), usages (5) and signerName (7).
func protobufCSR(b []byte) (spec csrSpec, ok bool) {
	b, ok = bytes.CutPrefix(b, []byte("k8s\x00"))
	if !ok {
		return spec, false
	}
	object := bytesFields(bytesFields(b)[2][0])
	for n, values := range bytesFields(object[2][0]) {
		for _, v := range values {
			switch n {
			case 1:
				spec.Request = v
			case 5:
				spec.Usages = append(spec.Usages, string(v))
			case 7:
				spec.SignerName = string(v)
			}
		}
	}
	return spec, true
}

// bytesFields returns the length-delimited fields of a protobuf message.
func bytesFields(b []byte) map[uint64][][]byte {
	fields := map[uint64][][]byte{}
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		b = b[n:]
		v, n := binary.Uvarint(b)
		b = b[n:]
		if tag&7 == 2 {
			fields[tag>>3] = append(fields[tag>>3], b[:v])
			b = b[v:]
		}
	}
	return fields
}
