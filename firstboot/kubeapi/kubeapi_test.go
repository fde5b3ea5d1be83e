package kubeapi

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const (
	token  = "abcdef.0123456789abcdef"
	secret = "0123456789abcdef"
)

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (a *authority) serving(t *testing.T, names ...string) tls.Certificate {
	t.Helper()
	return a.servingAs(t, pkix.Name{CommonName: "kube-apiserver"}, names...)
}

func (a *authority) servingAs(t *testing.T, subject pkix.Name, names ...string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: subject,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, n)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// master is an API server that publishes cluster-info.
type master struct {
	ca []byte // the published CA
	// kubeconfig, if set, is published instead of one with ca.
	kubeconfig string
	sig        func(payload string) map[string]string
	revoked    bool
	anon       int  // status for anonymous readers, 0: 200
	ready      int  // status of /readyz, 0: not served
	accepts    bool // accepts the token after a request for /readyz
	bearers    []string
	requests   int
	resumed    bool // the TLS session of the last request
}

func (m *master) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.requests++
	m.resumed = r.TLS.DidResume
	if b := r.Header.Get("Authorization"); b != "" {
		m.bearers = append(m.bearers, b)
		if m.revoked || b != "Bearer "+token {
			http.Error(w, `{"message":"Unauthorized"}`, http.StatusUnauthorized)
			return
		}
	}
	switch r.URL.Path {
	case clusterInfoPath:
		if m.anon != 0 {
			http.Error(w, `{"message":"no"}`, m.anon)
			return
		}
		kc := "apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster:\n    server: https://x:6443\n    certificate-authority-data: " + base64.StdEncoding.EncodeToString(m.ca) + "\n"
		if m.kubeconfig != "" {
			kc = m.kubeconfig
		}
		data := map[string]string{"kubeconfig": kc}
		for k, v := range m.sig(kc) {
			data[k] = v
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"data": data})
	case "/version":
		fmt.Fprint(w, `{"gitVersion":"v1.36.3"}`)
	case "/readyz":
		m.revoked = m.revoked && !m.accepts
		w.WriteHeader(cmp.Or(m.ready, http.StatusNotFound))
	default:
		http.NotFound(w, r)
	}
}

func jws(payload, id, secret string) map[string]string {
	h := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"HS256","kid":"` + id + `"}`))
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(h + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))))
	return map[string]string{"jws-kubeconfig-" + id: h + ".." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))}
}

func signed(payload string) map[string]string { return jws(payload, "abcdef", secret) }
func unsigned(string) map[string]string       { return nil }

func serve(t *testing.T, m *master, cert tls.Certificate) string {
	t.Helper()
	s := httptest.NewUnstartedServer(m)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func discovery(ca *authority, masters ...string) Discovery {
	return Discovery{
		Masters: masters, Token: token, Pins: []string{Pin(ca.cert)}, Names: []string{"kubernetes", "apiserver.cluster.local"},
		Dialer: Dialer{Dial: (&net.Dialer{}).DialContext, Sessions: new(Sessions)}, Timeout: 5 * time.Minute,
	}
}

// dead is an address where no program listens. Its port is never assigned as a free one.
const dead = "127.0.0.1:1"

func TestDiscoverFirstDead(t *testing.T) {
	ca := newAuthority(t)
	m := &master{ca: ca.pem, sig: signed}
	live := serve(t, m, ca.serving(t, "127.0.0.1", "kubernetes"))
	d := discovery(ca, dead, live)
	start := time.Now()
	f, err := Discover(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	if f.Master != live || f.ServerName != "" || string(f.CA) != string(ca.pem) {
		t.Errorf("found %+v", f)
	}
	if took := time.Since(start); took > d.Timeout/4 {
		t.Errorf("a dead master cost %v", took)
	}
	if m.requests > 2 {
		t.Errorf("one node made %d requests", m.requests)
	}
}

// TestDiscoverConnectsOnce checks that discovery makes only one handshake. Handshakes are most of
// an API server's work when a thousand machines start at once.
func TestDiscoverConnectsOnce(t *testing.T) {
	ca := newAuthority(t)
	d := discovery(ca, serve(t, &master{ca: ca.pem, sig: signed}, ca.serving(t, "127.0.0.1")))
	dial, connections := d.Dial, 0
	d.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		connections++
		return dial(ctx, network, addr)
	}
	f, err := Discover(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := f.Client(d).Get(t.Context(), "/version", nil); err != nil || connections != 1 {
			t.Errorf("%d connections, %v", connections, err)
		}
	}
	own := &Client{Server: "https://" + f.Master, CA: f.CA, Dial: d.Dial}
	kept, err := own.Kept()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := errors.Join(kept.Get(t.Context(), "/version", nil), own.Get(t.Context(), "/version", nil)); err != nil {
			t.Error(err)
		}
	}
	if connections != 1+1+3 {
		t.Errorf("%d connections", connections)
	}
}

// TestDiscoverSparesTheOthers checks that while an API server has neither answered nor failed, the
// next one is asked only after a pause.
func TestDiscoverSparesTheOthers(t *testing.T) {
	ca := newAuthority(t)
	synctest.Test(t, func(t *testing.T) {
		d := discovery(ca, "a:6443", "b:6443", "c:6443")
		var dials atomic.Int32
		d.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			dials.Add(1)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			_, err := Discover(ctx, d)
			ended <- err
		}()
		time.Sleep(stagger / 2)
		for want := int32(1); want <= 3; want++ {
			if got := dials.Load(); got != want {
				t.Errorf("%d API servers were asked, want %d", got, want)
			}
			time.Sleep(stagger)
		}
		cancel()
		if err := <-ended; err == nil {
			t.Error("the discovery found a cluster, want an error")
		}
	})
}

// TestDiscoverResumes checks that a machine which repeats discovery resumes its TLS session, unless
// the API server has a new certificate.
func TestDiscoverResumes(t *testing.T) {
	ca, next := newAuthority(t), newAuthority(t)
	m := &master{ca: ca.pem, sig: signed}
	var serving atomic.Pointer[tls.Certificate]
	use := func(ca *authority) {
		c := ca.serving(t, "127.0.0.1")
		serving.Store(&c)
	}
	use(ca)
	srv := httptest.NewUnstartedServer(m)
	srv.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return &tls.Config{Certificates: []tls.Certificate{*serving.Load()}}, nil
	}}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	for _, known := range []bool{false, true} {
		use(ca)
		m.ca = ca.pem
		d := discovery(ca, srv.Listener.Addr().String())
		if known {
			d.CA = ca.pem
		}
		for _, want := range []bool{false, true} {
			if _, err := Discover(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			if m.resumed != want {
				t.Errorf("CA known %t: resumed is %t, want %t", known, m.resumed, want)
			}
		}
		use(next)
		m.ca = next.pem
		d.Pins = []string{Pin(next.cert)}
		if known {
			d.CA = next.pem
		}
		_, err := Discover(t.Context(), d)
		if err != nil && !known {
			_, err = Discover(t.Context(), d)
		}
		if err != nil {
			t.Errorf("CA known %t, another certificate: %v", known, err)
		}
	}
}

// TestWays checks that clients share a connection only if CA, server name and client certificate
// are equal.
func TestWays(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	m := &master{ca: ca.pem, sig: signed}
	server, second := serve(t, m, ca.serving(t, "127.0.0.1", "kubernetes")), serve(t, m, ca.serving(t, "127.0.0.1"))
	own := ca.serving(t)
	connections := 0
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		connections++
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	ways := new(Transports)
	plain := Client{Server: "https://" + server, CA: ca.pem, Dial: dial, Transports: ways}
	with := func(change func(c *Client)) *Client {
		c := plain
		change(&c)
		return &c
	}
	for _, c := range []struct {
		what   string
		client *Client
		opened int
		fails  bool
	}{
		{"the first", &plain, 1, false},
		{"one like it", with(func(c *Client) { c.CA = slices.Clone(ca.pem) }), 0, false},
		{"with a token", with(func(c *Client) { c.Token = token }), 0, false},
		{"without one again", &plain, 0, false},
		{"with a certificate", with(func(c *Client) { c.Cert = &own }), 1, false},
		{"with that certificate again", with(func(c *Client) { c.Cert = &own }), 0, false},
		{"by another name", with(func(c *Client) { c.ServerName = "kubernetes" }), 1, false},
		{"by a name that it has not", with(func(c *Client) { c.ServerName = "elsewhere" }), 1, true},
		{"who trusts another CA", with(func(c *Client) { c.CA = other.pem }), 1, true},
		{"who asks another server", with(func(c *Client) { c.Server = "https://" + second }), 1, false},
		{"no shared transports", with(func(c *Client) { c.Transports = nil }), 1, false},
		{"the first again", &plain, 0, false},
	} {
		before := connections
		err := c.client.Get(t.Context(), "/version", nil)
		if connections-before != c.opened || (err != nil) != c.fails {
			t.Errorf("%s: %d connections, %v", c.what, connections-before, err)
		}
	}
	if len(m.bearers) != 1 {
		t.Errorf("%d requests had a token", len(m.bearers))
	}
	before := connections
	ways.Close()
	if err := plain.Get(t.Context(), "/version", nil); err != nil || connections != before+1 {
		t.Errorf("after Close: %d connections, %v", connections-before, err)
	}
	ways.Close()
}

func TestDiscoverSilentMasterDoesNotHoldUpTheOthers(t *testing.T) {
	ca := newAuthority(t)
	live := serve(t, &master{ca: ca.pem, sig: signed}, ca.serving(t, "127.0.0.1"))
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections, never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := discovery(ca, l.Addr().String(), live)
	start := time.Now()
	if _, err := Discover(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > d.Timeout/4 {
		t.Errorf("the call took %v", took)
	}
}

func TestDiscoverByASharedName(t *testing.T) {
	ca := newAuthority(t)
	live := serve(t, &master{ca: ca.pem, sig: signed}, ca.serving(t, "kubernetes", "10.9.9.9"))
	f, err := Discover(t.Context(), discovery(ca, live))
	if err != nil {
		t.Fatal(err)
	}
	if f.ServerName != "kubernetes" {
		t.Errorf("server name %q", f.ServerName)
	}
	if err := f.Client(discovery(ca, live)).Get(t.Context(), "/version", nil); err != nil {
		t.Error(err)
	}
}

func TestDiscoverRefuses(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	for _, tc := range []struct {
		name string
		m    master
		cert tls.Certificate
		d    func(*Discovery)
		want error
	}{
		{"wrong CA", master{ca: other.pem, sig: signed}, other.serving(t, "127.0.0.1"), nil, ErrPin},
		{"wrong secret", master{ca: ca.pem, sig: func(p string) map[string]string { return jws(p, "abcdef", "aaaaaaaaaaaaaaaa") }}, ca.serving(t, "127.0.0.1"), nil, ErrSignature},
		{"unsigned", master{ca: ca.pem, sig: unsigned}, ca.serving(t, "127.0.0.1"), nil, ErrUnsigned},
		{"unsigned, no pin", master{ca: ca.pem, sig: unsigned}, ca.serving(t, "127.0.0.1"), func(d *Discovery) { d.Pins, d.SkipPins = nil, true }, ErrUnsigned},
		{"expired token", master{ca: ca.pem, sig: unsigned, revoked: true}, ca.serving(t, "127.0.0.1"), nil, ErrToken},
		{"revoked but still signed", master{ca: ca.pem, sig: signed, revoked: true}, ca.serving(t, "127.0.0.1"), nil, ErrToken},
		{"no cluster-info", master{ca: ca.pem, sig: signed, anon: 404}, ca.serving(t, "127.0.0.1"), nil, ErrNoClusterInfo},
		{"anonymous forbidden", master{ca: ca.pem, sig: signed, anon: 403}, ca.serving(t, "127.0.0.1"), nil, ErrNoClusterInfo},
		{"anonymous not accepted", master{ca: ca.pem, sig: signed, anon: 401}, ca.serving(t, "127.0.0.1"), nil, ErrAnonymous},
		{"name", master{ca: ca.pem, sig: signed}, ca.serving(t, "elsewhere"), nil, ErrServerName},
		{"yurthub of a node", master{ca: ca.pem, sig: signed}, ca.servingAs(t, pkix.Name{CommonName: "system:node:edge-1", Organization: []string{"system:nodes"}}, "kubernetes", "127.0.0.1"), nil, ErrNode},
		{"CA known, kubelet of a node", master{ca: ca.pem, sig: signed}, ca.servingAs(t, pkix.Name{CommonName: "master", Organization: []string{"system:nodes"}}, "127.0.0.1"), func(d *Discovery) { d.CA = ca.pem }, ErrNode},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := discovery(ca, serve(t, &tc.m, tc.cert))
			if tc.d != nil {
				tc.d(&d)
			}
			_, err := Discover(t.Context(), d)
			if !errors.Is(err, tc.want) {
				t.Fatalf("%v", err)
			}
			if strings.Contains(err.Error(), secret) {
				t.Error("the error contains the token's secret")
			}
			if (tc.want == ErrPin || tc.want == ErrNode || d.SkipPins) && len(tc.m.bearers) > 0 {
				t.Error("the token was sent to an unverified server")
			}
		})
	}
}

// TestClientMeetsANode checks that a client rejects the yurthub of another node, although its
// certificate has the right CA and the right name.
func TestClientMeetsANode(t *testing.T) {
	ca, m := newAuthority(t), &master{sig: signed}
	addr := serve(t, m, ca.servingAs(t, pkix.Name{CommonName: "system:node:edge-1"}, "kubernetes"))
	for _, ways := range []*Transports{nil, new(Transports)} {
		c := &Client{Server: "https://" + addr, CA: ca.pem, ServerName: "kubernetes", Token: token, Dial: (&net.Dialer{}).DialContext, Transports: ways}
		if err := c.Get(t.Context(), "/version", nil); !errors.Is(err, ErrNode) || len(m.bearers) > 0 {
			t.Errorf("%v; the server got %q", err, m.bearers)
		}
	}
}

// TestTokenIsRefusedForGood checks that a 401 is final only if the API server reports that it is
// ready, and then answers 401 again.
func TestTokenIsRefusedForGood(t *testing.T) {
	ca := newAuthority(t)
	for _, tc := range []struct {
		name  string
		ready int  // status of /readyz
		after bool // the token is accepted after that
		want  error
		also  error
	}{
		{"ready", 200, false, ErrToken, nil},
		{"ready, and knows the token by then", 200, true, nil, nil},
		{"starting", 500, false, ErrToken, ErrStarting},
		{"hidden", 403, false, ErrToken, ErrReadyHidden},
		{"nobody anonymous", 401, false, ErrToken, ErrReadyHidden},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := &master{ca: ca.pem, sig: signed, revoked: true, ready: tc.ready, accepts: tc.after}
			_, err := Discover(t.Context(), discovery(ca, serve(t, m, ca.serving(t, "127.0.0.1"))))
			if !errors.Is(err, tc.want) || tc.also != nil && !errors.Is(err, tc.also) {
				t.Errorf("%v", err)
			}
			if tc.also == nil && (errors.Is(err, ErrStarting) || errors.Is(err, ErrReadyHidden)) {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestTokenIsNotShownToANeighbourOfThePinnedCA checks that an API server of an unpinned CA does not
// get the token, although an unsigned cluster-info lists that CA next to the pinned one.
func TestTokenIsNotShownToANeighbourOfThePinnedCA(t *testing.T) {
	ca, evil := newAuthority(t), newAuthority(t)
	m := &master{ca: append(append([]byte(nil), ca.pem...), evil.pem...), sig: unsigned}
	_, err := Discover(t.Context(), discovery(ca, serve(t, m, evil.serving(t, "127.0.0.1"))))
	if err == nil {
		t.Fatal("the unverified answer was accepted")
	}
	if len(m.bearers) > 0 {
		t.Error("the token was sent")
	}
}

// TestNeighbourOfThePinnedCA checks a signed cluster-info that lists an unpinned CA next to the
// pinned one; anyone with a token can sign it. API servers of the unpinned CA must be rejected, and
// Discover must not return that CA.
func TestNeighbourOfThePinnedCA(t *testing.T) {
	ca, evil := newAuthority(t), newAuthority(t)
	for _, bundle := range [][]byte{slices.Concat(ca.pem, evil.pem), slices.Concat(evil.pem, ca.pem)} {
		m := &master{ca: bundle, sig: signed}
		f, err := Discover(t.Context(), discovery(ca, serve(t, m, evil.serving(t, "127.0.0.1"))))
		if !errors.Is(err, ErrPin) || !strings.Contains(err.Error(), Pin(evil.cert)) {
			t.Errorf("found %v, %v", f != nil, err)
		}
		if len(m.bearers) > 0 {
			t.Error("the token was sent")
		}
		f, err = Discover(t.Context(), discovery(ca, serve(t, m, ca.serving(t, "127.0.0.1"))))
		if err != nil || string(f.CA) != string(ca.pem) {
			t.Errorf("with the pinned CA alone: %v, %v", err == nil, err)
		}
		// While a cluster changes its CA, both CAs are pinned.
		d := discovery(ca, serve(t, m, evil.serving(t, "127.0.0.1")))
		d.Pins = append(d.Pins, Pin(evil.cert))
		if f, err := Discover(t.Context(), d); err != nil || string(f.CA) != string(bundle) {
			t.Errorf("both pinned: %v", err)
		}
	}
}

func TestDiscoverBadInput(t *testing.T) {
	ca := newAuthority(t)
	for _, tc := range []struct {
		change func(*Discovery)
		words  string
	}{
		{func(d *Discovery) { d.Token = "short" }, "not of the form"},
		{func(d *Discovery) { d.Pins = nil }, "no CA pin"},
		{func(d *Discovery) { d.Masters = nil }, "no API servers"},
	} {
		d := discovery(ca, "127.0.0.1:1")
		tc.change(&d)
		if _, err := Discover(t.Context(), d); err == nil || !strings.Contains(err.Error(), tc.words) {
			t.Errorf("%v", err)
		}
	}
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	ca := newAuthority(t)
	var seen []string
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r.URL.Path)
		http.Redirect(w, r, "/elsewhere", http.StatusFound)
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{ca.serving(t, "127.0.0.1")}}
	s.StartTLS()
	defer s.Close()
	c := &Client{Server: s.URL, CA: ca.pem, Token: token, Dial: (&net.Dialer{}).DialContext}
	if err := c.Get(t.Context(), "/version", nil); Code(err) != http.StatusFound || len(seen) != 1 {
		t.Errorf("%v, %v", err, seen)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	ca := newAuthority(t)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.CopyN(w, endless{}, 64<<20)
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{ca.serving(t, "127.0.0.1")}}
	s.StartTLS()
	defer s.Close()
	c := &Client{Server: s.URL, CA: ca.pem, Dial: (&net.Dialer{}).DialContext}
	if err := c.Get(t.Context(), "/x", nil); err == nil || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("%v", err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// TestUntrustedText checks that errors with texts of unverified servers are short and have no
// control characters, because they are printed on consoles.
func TestUntrustedText(t *testing.T) {
	body, err := json.Marshal(map[string]string{"message": "no\x1b[2J\nMAINPID=1\r" + strings.Repeat("é", 1<<20)})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write(body)
	}))
	defer s.Close()
	err = get(t.Context(), (&net.Dialer{}).DialContext, nil, s.URL, "/x", "", nil)
	if Code(err) != 403 || strings.ContainsAny(err.Error(), "\x1b\n\r") || len(err.Error()) > 600 || !strings.Contains(err.Error(), "MAINPID=1 é") {
		t.Errorf("%d bytes: %.80q", len(err.Error()), err)
	}
}

func TestSetServer(t *testing.T) {
	const before = `apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority: /etc/kubernetes/pki/ca.crt # kept
    server: https://192.0.2.11:6443
    tls-server-name: old
  name: default-cluster
users:
- name: default-auth
  user:
    client-certificate: /var/lib/kubelet/pki/kubelet-client-current.pem
`
	out, err := SetServer([]byte(before), "https://apiserver.cluster.local:6443", "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	k, err := ParseKubeconfig(out)
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.Cluster()
	if err != nil || c.Server != "https://apiserver.cluster.local:6443" || c.TLSServerName != "kubernetes" || c.CAFile != "/etc/kubernetes/pki/ca.crt" {
		t.Errorf("%+v, %v", c, err)
	}
	again, err := SetServer(out, "https://apiserver.cluster.local:6443", "kubernetes")
	if err != nil || string(again) != string(out) {
		t.Errorf("a second run changes it:\n%s\n%s", out, again)
	}
	gone, err := SetServer(out, "https://apiserver.cluster.local:6443", "")
	if err != nil || strings.Contains(string(gone), "tls-server-name") {
		t.Errorf("%s, %v", gone, err)
	}
	for _, bad := range []string{"", "clusters: []", "clusters: [{name: x}]", "- a", "\x00", "a: [", "clusters: {a: b}"} {
		if _, err := SetServer([]byte(bad), "https://x:1", ""); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestContextEndsARequest(t *testing.T) {
	ca := newAuthority(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Discover(ctx, discovery(ca, dead)); err == nil {
		t.Error("Discover succeeded with a cancelled context")
	}
}

func FuzzKubeconfig(f *testing.F) {
	f.Add([]byte("clusters:\n- name: a\n  cluster: {server: 'https://x:6443'}\n"))
	f.Add([]byte("clusters: [{cluster: {server: 1}}]\ncontexts: [{}]\ncurrent-context: x"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if k, err := ParseKubeconfig(data); err == nil {
			if c, err := k.Cluster(); err == nil {
				_, _ = c.CA(t.TempDir())
			}
			_, _ = k.User()
		}
		out, err := SetServer(data, "https://name:6443", "kubernetes")
		if err != nil {
			return
		}
		k, err := ParseKubeconfig(out)
		if err != nil {
			return // the result may still be rejected by ParseKubeconfig
		}
		for _, c := range k.Clusters {
			if c.Cluster.Server != "https://name:6443" {
				t.Errorf("server %q", c.Cluster.Server)
			}
		}
	})
}

func FuzzJWS(f *testing.F) {
	f.Add(signed("payload")["jws-kubeconfig-abcdef"], "payload")
	f.Add("a..b", "payload")
	f.Add("eyJhbGciOiJub25lIn0..", "payload")
	f.Fuzz(func(t *testing.T, sig, payload string) {
		if verifyJWS(sig, payload, "abcdef", secret) != nil {
			return
		}
		// A signature passes only if it is the HMAC of this header and payload. Any header may be
		// used that names the algorithm and the key.
		h, _, _ := strings.Cut(sig, ".")
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(h + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))))
		if want := base64.RawURLEncoding.EncodeToString(mac.Sum(nil)); !strings.HasPrefix(sig, h+"..") || sig[len(h)+2:] != want {
			t.Errorf("signature %q was accepted for %q", sig, payload)
		}
	})
}

// TestDiscoverKnownCA checks that with a known CA there is no anonymous request, and a server with
// another CA does not get the token.
func TestDiscoverKnownCA(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	for _, tc := range []struct {
		name string
		m    master
		cert tls.Certificate
		want error
	}{
		{"no anonymous access", master{ca: ca.pem, sig: unsigned, anon: 401}, ca.serving(t, "127.0.0.1"), nil},
		{"another cluster", master{ca: other.pem, sig: signed}, other.serving(t, "127.0.0.1"), ErrCA},
		{"another name", master{ca: ca.pem, sig: signed}, ca.serving(t, "elsewhere"), ErrServerName},
		{"expired token", master{ca: ca.pem, sig: signed, revoked: true}, ca.serving(t, "127.0.0.1"), ErrToken},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := discovery(ca, serve(t, &tc.m, tc.cert))
			d.Pins, d.CA = nil, ca.pem
			f, err := Discover(t.Context(), d)
			if tc.want == nil && (err != nil || string(f.CA) != string(ca.pem)) || !errors.Is(err, tc.want) {
				t.Fatalf("%+v, %v", f, err)
			}
			if (tc.want == ErrCA || tc.want == ErrServerName) && len(tc.m.bearers) > 0 {
				t.Error("the token was sent to an unverified server")
			}
			if tc.want == nil && tc.m.requests != 1 {
				t.Errorf("it made %d requests, expected 1", tc.m.requests)
			}
		})
	}
}
