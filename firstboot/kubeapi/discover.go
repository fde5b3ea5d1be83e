package kubeapi

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/servercert"
)

// Errors of Discover that an API server's answer caused.
var (
	// ErrPin means that the cluster's CA is not the pinned one.
	ErrPin = errors.New("the cluster's CA is not the one that caCertHashes pins")
	// ErrSignature means that cluster-info is signed with another secret.
	ErrSignature = errors.New("cluster-info is not signed with this token's secret")
	// ErrToken means that the cluster rejects the token, which is unknown or has expired.
	ErrToken = errors.New("the cluster does not accept the bootstrap token: it is unknown or expired")
	// ErrStarting accompanies ErrToken if the API server is not ready: for some seconds after
	// its start it knows no token.
	ErrStarting = errors.New("the API server is not ready yet, and may not know its tokens")
	// ErrReadyHidden accompanies ErrToken if the API server does not show whether it is ready.
	ErrReadyHidden = errors.New("the API server does not show whether it is ready")
	// ErrUnsigned means that cluster-info has no signature for the token yet. The token may be
	// valid.
	ErrUnsigned = errors.New("cluster-info is not signed for this token yet")
	// ErrNoClusterInfo means that there is no cluster-info, or that anonymous users may not read
	// it.
	ErrNoClusterInfo = errors.New("the cluster publishes no cluster-info")
	// ErrAnonymous means that the API server requires authentication even for cluster-info, which
	// machines therefore cannot read before they have joined.
	ErrAnonymous = errors.New("the API server accepts no anonymous request for cluster-info")
	// ErrCA means that the API server's certificate is not signed by the given CA.
	ErrCA = errors.New("the API server's certificate is not signed by the Site's CA (caCert)")
	// ErrServerName means that the certificate has none of the expected names.
	ErrServerName = errors.New("the API server's certificate has none of the expected names")
	// ErrNode means that the server's certificate belongs to a node of the cluster.
	ErrNode = servercert.ErrNode
)

// SharedName is a name in the certificates of all of kubeadm's API servers and of every yurthub.
// Because it does not distinguish them, kubelet verifies it only if there is no better name.
const SharedName = "kubernetes"

// Discovery has the parameters for finding and verifying a cluster.
type Discovery struct {
	Masters []string // "host:port"
	Token   string
	// Pins are "sha256:<hex>" of the CA's public key. They may be empty only if SkipPins is set.
	Pins     []string
	SkipPins bool
	// CA is the cluster's CA in PEM, if known. Then cluster-info and Pins are not used.
	CA []byte
	// Node, if set, is the Node to read with the token; see Found.Node.
	Node string
	// Names are names that the API servers' certificate may have instead of their address, for
	// example SharedName.
	Names []string
	Dialer
	// Timeout limits the request to each API server.
	Timeout time.Duration
}

// Found is a verified cluster.
type Found struct {
	Master string // the first to answer, "host:port"
	CA     []byte // PEM
	// ServerName is the name that the API servers' certificate must have; empty: the host in
	// Master.
	ServerName string
	// Node is the Node named by Discovery.Node; nil if it does not exist or the token may not read
	// it.
	Node *Node

	kept *http.Transport
}

// ServerError is the error of one API server during discovery.
type ServerError struct {
	Server string // HOST:PORT
	Err    error
}

func (e *ServerError) Error() string {
	return "discovering the cluster at the API server " + e.Server + ": " + e.Err.Error()
}

func (e *ServerError) Unwrap() error { return e.Err }

// Client returns a client with the bootstrap token. If possible, its first request uses the
// connection on which the API server was verified.
func (f *Found) Client(d Discovery) *Client {
	return &Client{Server: "https://" + f.Master, CA: f.CA, ServerName: f.ServerName, Token: d.Token, Dial: d.Dial, Now: d.Now, kept: f.kept}
}

// stagger is how long Discover waits for an answer before it asks the next API server too.
const stagger = time.Second

// Discover asks the API servers in random order, the next one after stagger or an error. It returns
// the first that is verified to belong to the pinned cluster. If there is none, the error has the
// reason for each API server.
func Discover(ctx context.Context, d Discovery) (*Found, error) {
	id, secret, err := SplitToken(d.Token)
	if err != nil {
		return nil, err
	}
	if len(d.Pins) == 0 && len(d.CA) == 0 && !d.SkipPins {
		return nil, errors.New("discovering the cluster: no CA pin is given; set caCertHashes, or unsafeSkipCAVerification to join any cluster that answers")
	}
	if len(d.Masters) == 0 {
		return nil, errors.New("discovering the cluster: no API servers are given")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // stop the other requests once one API server is found
	type result struct {
		i     int
		found *Found
		err   error
	}
	results := make(chan result, len(d.Masters))
	left := rand.Perm(len(d.Masters))
	ask := func() {
		if len(left) == 0 {
			return
		}
		i := left[0]
		left = left[1:]
		go func() {
			ctx, cancel := context.WithTimeout(ctx, d.Timeout)
			defer cancel()
			f, err := d.ask(ctx, d.Masters[i], id, secret)
			results <- result{i, f, err}
		}()
	}
	ask()
	next := time.NewTicker(stagger)
	defer next.Stop()
	errs := make([]error, len(d.Masters))
	for answers := 0; answers < len(d.Masters); {
		select {
		case <-next.C:
			ask()
		case r := <-results:
			if r.err == nil {
				return r.found, nil
			}
			answers++
			d.forgetSession(d.Masters[r.i], r.err)
			errs[r.i] = &ServerError{d.Masters[r.i], bounded{r.err}}
			ask()
		}
	}
	return nil, errors.Join(errs...)
}

// bounded limits the length of an error, which may quote an unverified server.
type bounded struct{ error }

func (b bounded) Error() string { return quotedTo(1000, b.error.Error()) }

func (b bounded) Unwrap() error { return b.error }

// ask performs discovery with one API server.
func (d Discovery) ask(ctx context.Context, master, id, secret string) (*Found, error) {
	if len(d.CA) > 0 {
		return d.askKnown(ctx, master)
	}
	return d.askUnknown(ctx, master, id, secret)
}

// askKnown performs discovery with a known CA, which must have signed the API server's certificate.
// The API server must also accept the token.
func (d Discovery) askKnown(ctx context.Context, master string) (*Found, error) {
	f, err := d.found(ctx, master, d.CA)
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	return f, err
}

// askUnknown performs discovery as kubeadm does: it reads cluster-info over unverified TLS,
// checks its signature and the pins, and then verifies the certificate of that connection.
func (d Discovery) askUnknown(ctx context.Context, master, id, secret string) (f *Found, err error) {
	var cm struct {
		Data map[string]string `json:"data"`
	}
	// Everything read over this connection is verified below, by pin and signature. No secret is
	// sent over it before that.
	conn, err := d.unverified(ctx, master)
	if err != nil {
		return nil, err
	}
	var known atomic.Pointer[[]byte]
	transport := d.over(conn, master, &known)
	defer func() {
		if f == nil || f.kept != transport {
			conn.Close()
		}
	}()
	if err := getOver(ctx, transport, "https://"+master, clusterInfoPath, "", &cm); err != nil {
		switch Code(err) {
		case 401:
			return nil, fmt.Errorf("%w: %w", ErrAnonymous, err)
		case 403, 404:
			return nil, fmt.Errorf("%w: %w", ErrNoClusterInfo, err)
		}
		return nil, err
	}
	// Verify the signature first, over the bytes as received, so that no text is parsed that was
	// written without the token's secret.
	text := []byte(cm.Data[kubeconfigKey])
	sig, signed := cm.Data[SignaturePrefix+id]
	if !signed {
		return nil, d.unsigned(ctx, master, text)
	}
	if err := verifyJWS(sig, string(text), id, secret); err != nil {
		return nil, err
	}
	ca, err := clusterCA(text)
	if err != nil {
		return nil, err
	}
	certs, err := ParseCerts(ca)
	if err != nil {
		return nil, err
	}
	// A pin confirms only its own certificate: anyone who knows the token can sign a cluster-info
	// that has another CA next to the pinned one.
	if !d.SkipPins {
		if ca = d.pinned(certs); ca == nil {
			return nil, pinError(certs)
		}
	}
	host, _, err := net.SplitHostPort(master)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's address: %w", err)
	}
	name, err := verify(conn.ConnectionState(), d.Now, master, ca, append([]string{host}, d.Names...))
	if err == nil {
		known.Store(&ca)
		return d.proven(ctx, master, ca, name, host, transport)
	}
	var unknown x509.UnknownAuthorityError
	if !d.SkipPins && errors.As(err, &unknown) && d.anyUnpinned(certs) {
		return nil, fmt.Errorf("%w: %w", pinError(certs), err) // the API server's CA may be one of the unpinned ones
	}
	return nil, err
}

// unsigned returns why cluster-info has no signature for the token: the token is unknown or not
// signed yet, or the cluster is not the pinned one. The kubeconfig is not verified, so the CA is
// found with a pattern instead of a parser. To ask the API server, unsigned sends it the token, but
// only if its CA is pinned.
func (d Discovery) unsigned(ctx context.Context, master string, kubeconfig []byte) error {
	if len(kubeconfig) == 0 {
		return errNoKubeconfig
	}
	if d.SkipPins {
		return ErrUnsigned
	}
	if len(kubeconfig) > maxKubeconfig {
		return fmt.Errorf("reading cluster-info: its kubeconfig has %d bytes, more than the limit of %d", len(kubeconfig), maxKubeconfig)
	}
	found := caLine.FindSubmatch(kubeconfig)
	if found == nil {
		return ErrUnsigned
	}
	ca, err := base64.StdEncoding.DecodeString(string(found[1]))
	if err != nil {
		return fmt.Errorf("reading cluster-info: decoding its CA: %w", err)
	}
	certs, err := ParseCerts(ca)
	if err != nil {
		return err
	}
	if ca = d.pinned(certs); ca == nil {
		return pinError(certs)
	}
	if _, err := d.found(ctx, master, ca); err != nil {
		return err
	}
	return ErrUnsigned
}

// caLine matches the CA in a kubeconfig as kubeadm writes it.
var caLine = regexp.MustCompile(`(?m)^ *certificate-authority-data: *"?([A-Za-z0-9+/=]+)"? *\r?$`)

// pinError returns ErrPin with the pins of the first certificates.
func pinError(certs []*x509.Certificate) error {
	const most = 5
	text := strings.Join(pins(certs[:min(len(certs), most)]), ", ")
	if more := len(certs) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Errorf("%w: it has %s", ErrPin, text)
}

// found verifies an API server with ca, and then sends it the token. Only a 401 from an API server
// that is ready proves that the token is unknown or expired.
func (d Discovery) found(ctx context.Context, master string, ca []byte) (*Found, error) {
	host, _, err := net.SplitHostPort(master)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's address: %w", err)
	}
	conn, name, err := d.connect(ctx, master, ca, append([]string{host}, d.Names...))
	if err != nil {
		return nil, err
	}
	var known atomic.Pointer[[]byte]
	known.Store(&ca)
	f, err := d.proven(ctx, master, ca, name, host, d.over(conn, master, &known))
	if f == nil || f.kept == nil {
		conn.Close()
	}
	return f, err
}

// proven sends the token to a verified API server and checks the answer. name is the verified name
// in the certificate that the API server showed in a handshake for host.
func (d Discovery) proven(ctx context.Context, master string, ca []byte, name, host string, transport *http.Transport) (*Found, error) {
	f := &Found{Master: master, CA: ca}
	if name == host {
		f.kept = transport
	} else {
		f.ServerName = name // in a handshake for that name, the server may show another certificate
	}
	err := f.present(ctx, d)
	switch code := Code(err); {
	case code == 401:
		err = d.refused(ctx, f)
	case code != 0:
		err = nil // any other status means that the token is accepted
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// present sends the token: it reads d.Node or, if no Node is named, /version.
func (f *Found) present(ctx context.Context, d Discovery) (err error) {
	if d.Node == "" {
		return f.Client(d).Get(ctx, "/version", nil)
	}
	f.Node, err = f.Client(d).GetNode(ctx, d.Node)
	return err
}

// refused checks whether a 401 is final: the API server must report that it is ready, and then
// answer 401 again.
func (d Discovery) refused(ctx context.Context, f *Found) error {
	anonymous := f.Client(d)
	anonymous.Token = ""
	if err := anonymous.Get(ctx, "/readyz", nil); Code(err) == 401 || Code(err) == 403 {
		return fmt.Errorf("%w (%w: %w)", ErrToken, ErrReadyHidden, err)
	} else if err != nil {
		return fmt.Errorf("%w (%w: %w)", ErrToken, ErrStarting, err)
	}
	err := f.present(ctx, d)
	switch code := Code(err); {
	case code == 401:
		return ErrToken
	case code != 0:
		return nil // any other status means that the token is accepted
	}
	return err
}

// over returns a transport that uses the connection first, and then opens new ones, verified with
// *ca. Until ca is set, it opens none.
func (d Discovery) over(first *tls.Conn, master string, ca *atomic.Pointer[[]byte]) *http.Transport {
	var unused atomic.Pointer[tls.Conn]
	unused.Store(first)
	return keeping(&http.Transport{DialTLSContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		if conn := unused.Swap(nil); conn != nil {
			return conn, nil
		}
		ca := ca.Load()
		if ca == nil {
			return nil, fmt.Errorf("the API server %s closed the connection", master)
		}
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		conn, _, err := d.connect(ctx, master, *ca, []string{host})
		if err != nil {
			return nil, err // return nil, not conn: a nil *tls.Conn would be a non-nil net.Conn
		}
		return conn, nil
	}})
}

// ClusterInfoUID returns the UID of cluster-info, read by an anonymous request. A cluster that was
// re-created with the same keys has another UID.
func (c *Client) ClusterInfoUID(ctx context.Context) (string, error) {
	anonymous := *c
	anonymous.Cert, anonymous.Token, anonymous.kept = nil, "", nil
	var cm struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	err := anonymous.Get(ctx, clusterInfoPath, &cm)
	return cm.Metadata.UID, err
}

// ServiceUID returns the UID of the Service default/kubernetes. API servers create it when they
// start, before the cluster has published anything, and every node may read it.
func (c *Client) ServiceUID(ctx context.Context) (string, error) {
	var service struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	err := c.Get(ctx, "/api/v1/namespaces/default/services/kubernetes", &service)
	return service.Metadata.UID, err
}

// Dialer connects to API servers.
type Dialer struct {
	Dial DialFunc
	// Now returns the time at which certificates are checked; nil: this computer's clock.
	Now func() time.Time
	// Sessions, if not nil, keeps TLS sessions from one connection to the next.
	Sessions *Sessions
}

// Sessions has the last TLS session with each API server. A machine that waits for its cluster
// connects often, and resuming a session saves the server an RSA signature.
type Sessions struct {
	mu  sync.Mutex
	all map[string]*servercert.SessionCache // by "host:port"
}

// cacheFor returns the session cache for an API server; nil if sessions are not kept.
func (s *Sessions) cacheFor(master string) tls.ClientSessionCache {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = map[string]*servercert.SessionCache{}
	}
	kept := s.all[master]
	if kept == nil || kept.Expired() {
		kept = servercert.NewSessionCache()
		s.all[master] = kept
	}
	return kept
}

// forget removes the session with an API server.
func (s *Sessions) forget(master string) {
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.all, master)
	}
}

// ServerName connects to master, verifies it, and returns the first of names that its certificate
// has, or ErrServerName.
func (d Dialer) ServerName(ctx context.Context, master string, ca []byte, names []string) (string, error) {
	conn, name, err := d.connect(ctx, master, ca, names)
	if err != nil {
		return "", err
	}
	conn.Close()
	return name, nil
}

// maxChain limits the number of certificates that an API server may send: its own and intermediate
// CAs.
const maxChain = 8

// connect makes a verified connection to master. chosen is the first of names that master's
// certificate has.
func (d Dialer) connect(ctx context.Context, master string, ca []byte, names []string) (conn *tls.Conn, chosen string, err error) {
	conn, err = d.shake(ctx, master, &tls.Config{
		ServerName: names[0],
		VerifyConnection: func(cs tls.ConnectionState) error {
			chosen, err = verify(cs, d.Now, master, ca, names)
			return err
		},
	})
	return conn, chosen, err
}

// unverified makes a connection to master without verifying it.
func (d Dialer) unverified(ctx context.Context, master string) (*tls.Conn, error) {
	host, _, err := net.SplitHostPort(master)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's address: %w", err)
	}
	return d.shake(ctx, master, &tls.Config{ServerName: host})
}

// shake makes a TLS connection. It does not verify the certificate: conf.VerifyConnection or the
// caller must do that.
func (d Dialer) shake(ctx context.Context, master string, conf *tls.Config) (*tls.Conn, error) {
	conf.MinVersion, conf.InsecureSkipVerify = tls.VersionTLS12, true
	resumed := false
	if verify := conf.VerifyConnection; verify != nil {
		conf.VerifyConnection = func(cs tls.ConnectionState) error {
			resumed = cs.DidResume
			return verify(cs)
		}
	}
	for {
		conf.ClientSessionCache = d.Sessions.cacheFor(master)
		raw, err := d.Dial(ctx, "tcp", master)
		if err != nil {
			return nil, fmt.Errorf("connecting to the API server %s: %w", master, err)
		}
		conn := tls.Client(raw, conf)
		err = conn.HandshakeContext(ctx)
		if err == nil {
			return conn, nil
		}
		conn.Close()
		if ctx.Err() == nil { // the session may be the reason: the server may have a new certificate
			d.Sessions.forget(master)
		}
		if !resumed {
			return nil, err
		}
		resumed = false
	}
}

// forgetSession removes the TLS session with master, because the server may have a new certificate.
// It keeps the session if err is an HTTP status, a network error or a timeout.
func (d Dialer) forgetSession(master string, err error) {
	var broken net.Error
	if Code(err) == 0 && !errors.As(err, &broken) && !errors.Is(err, context.DeadlineExceeded) {
		d.Sessions.forget(master)
	}
}

// verify verifies the certificate of a connection to master with ca. It returns the first of names
// that the certificate has.
func verify(cs tls.ConnectionState, now func() time.Time, master string, ca []byte, names []string) (string, error) {
	pool, err := Pool(ca)
	if err != nil {
		return "", err
	}
	if now == nil {
		now = time.Now
	}
	// Each certificate costs signature checks, which no deadline interrupts.
	if n := len(cs.PeerCertificates); n > maxChain {
		return "", fmt.Errorf("verifying the certificate of the API server %s: it sends %d certificates, more than the limit of %d", master, n, maxChain)
	}
	inter := x509.NewCertPool()
	for _, c := range cs.PeerCertificates[1:] {
		inter.AddCert(c)
	}
	leaf := cs.PeerCertificates[0]
	opts := x509.VerifyOptions{Roots: pool, Intermediates: inter, CurrentTime: now()}
	if _, err := leaf.Verify(opts); err != nil {
		if from, ok := begins(leaf, ca, opts); ok {
			err = &EarlyError{from, err}
		}
		return "", fmt.Errorf("verifying the certificate of the API server %s: %w", master, err)
	}
	if err := servercert.Check(leaf); err != nil {
		return "", fmt.Errorf("verifying the certificate of the API server %s: %w", master, err)
	}
	i := slices.IndexFunc(names, func(n string) bool { return leaf.VerifyHostname(n) == nil })
	if i < 0 {
		return "", fmt.Errorf("%w: it is for %s, not for %s", ErrServerName, printable.Names(leaf.DNSNames), strings.Join(names, ", "))
	}
	return names[i], nil
}

// EarlyError means that a certificate's only fault is that it is not valid yet. Then this
// computer's clock is wrong: the owner of the CA's key set From, so that time has passed.
type EarlyError struct {
	From time.Time
	err  error
}

func (e *EarlyError) Error() string { return e.err.Error() }
func (e *EarlyError) Unwrap() error { return e.err }

// begins returns the time at which a chain becomes valid, if the chain's only fault is that this
// time is in the future. Only self-signed CAs count: a pin covers only the key, so anyone could
// make a CA certificate for that key with other dates.
func begins(leaf *x509.Certificate, ca []byte, opts x509.VerifyOptions) (time.Time, bool) {
	moments := []time.Time{leaf.NotBefore}
	roots, err := ParseCerts(ca)
	if err != nil {
		return time.Time{}, false
	}
	for _, root := range roots {
		if root.CheckSignatureFrom(root) == nil {
			moments = append(moments, root.NotBefore)
		}
	}
	slices.SortFunc(moments, time.Time.Compare)
	for _, m := range moments {
		if !m.After(opts.CurrentTime) {
			continue
		}
		at := opts
		at.CurrentTime = m
		if _, err := leaf.Verify(at); err == nil {
			return m, true
		}
	}
	return time.Time{}, false
}

var errNoKubeconfig = fmt.Errorf("%w: its ConfigMap has no kubeconfig", ErrNoClusterInfo)

func clusterCA(kubeconfig []byte) ([]byte, error) {
	if len(kubeconfig) == 0 {
		return nil, errNoKubeconfig
	}
	k, err := ParseKubeconfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("reading cluster-info: %w", err)
	}
	c, err := k.Cluster()
	if err != nil {
		return nil, fmt.Errorf("reading cluster-info: %w", err)
	}
	if c.CAData == "" {
		return nil, errors.New("reading cluster-info: its kubeconfig has no CA")
	}
	ca, err := base64.StdEncoding.DecodeString(c.CAData)
	if err != nil {
		return nil, fmt.Errorf("reading cluster-info: decoding its CA: %w", err)
	}
	return ca, nil
}

// Pin returns the pin of a certificate: the SHA-256 of its SubjectPublicKeyInfo.
func Pin(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// pinned returns, in PEM, those certificates that are pinned.
func (d Discovery) pinned(certs []*x509.Certificate) []byte {
	var out []byte
	for _, c := range certs {
		if slices.Contains(normal(d.Pins), Pin(c)) {
			out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
		}
	}
	return out
}

// anyUnpinned reports whether any of the certificates is not pinned.
func (d Discovery) anyUnpinned(certs []*x509.Certificate) bool {
	pinned := normal(d.Pins)
	return slices.ContainsFunc(certs, func(c *x509.Certificate) bool { return !slices.Contains(pinned, Pin(c)) })
}

// Pins returns the pins of all certificates in PEM.
func Pins(pemData []byte) ([]string, error) {
	certs, err := ParseCerts(pemData)
	if err != nil {
		return nil, err
	}
	return pins(certs), nil
}

func pins(certs []*x509.Certificate) []string {
	var out []string
	for _, c := range certs {
		out = append(out, Pin(c))
	}
	return out
}

func normal(pins []string) []string {
	out := make([]string, len(pins))
	for i, p := range pins {
		out[i] = strings.ToLower(strings.TrimSpace(p))
	}
	return out
}
