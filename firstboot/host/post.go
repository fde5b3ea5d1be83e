package host

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// errPlain means that a report would be sent without encryption, or a download that began with
// https would continue without it.
var errPlain = errors.New("only https is allowed")

// through returns a transport that uses the proxy in these environment variables.
func through(env []string) *http.Transport {
	conf := httpproxy.Config{}
	for _, v := range env {
		switch name, value, _ := strings.Cut(v, "="); name {
		case "HTTP_PROXY":
			conf.HTTPProxy = value
		case "HTTPS_PROXY":
			conf.HTTPSProxy = value
		case "NO_PROXY":
			conf.NoProxy = value
		}
	}
	proxy := conf.ProxyFunc()
	return &http.Transport{
		Proxy:             func(r *http.Request) (*url.URL, error) { return proxy(r.URL) },
		ForceAttemptHTTP2: true,
	}
}

// trust makes the transport trust only the CA certificates in ca (PEM). An empty ca changes
// nothing.
func trust(t *http.Transport, ca string) error {
	if ca == "" {
		return nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(ca)) {
		return errors.New("report.caCert contains no PEM certificate")
	}
	t.TLSClientConfig = &tls.Config{RootCAs: roots}
	return nil
}

// downloads keeps connections open, so that the ranges of an update share one.
type downloads struct {
	remote     bool // reject loopback and link-local addresses
	mu         sync.Mutex
	transports map[string]*http.Transport // by the proxy's environment variables
}

// client returns the HTTP client that uses the proxy in these environment variables.
func (d *downloads) client(proxy []string) *http.Client {
	d.mu.Lock()
	defer d.mu.Unlock()
	key := strings.Join(proxy, "\n")
	t := d.transports[key]
	if t == nil {
		t = through(proxy)
		if d.remote {
			remoteOnly(t)
		}
		t.IdleConnTimeout = 90 * time.Second
		t.MaxResponseHeaderBytes = maxHeader
		// Close a lost HTTP/2 connection well before silence has passed, so that the next attempt
		// opens a new one.
		t.HTTP2 = &http.HTTP2Config{SendPingTimeout: silence / 4, PingTimeout: silence / 4}
		if d.transports == nil {
			d.transports = map[string]*http.Transport{}
		}
		d.transports[key] = t
	}
	return &http.Client{Transport: t, CheckRedirect: checkRedirect}
}

// remoteOnly makes a transport reject loopback and link-local addresses, except the proxy's.
func remoteOnly(t *http.Transport) {
	var proxies sync.Map // by hostPort
	proxy := t.Proxy
	t.Proxy = func(r *http.Request) (*url.URL, error) {
		if a, err := netip.ParseAddr(r.URL.Hostname()); err == nil && isLocal(a) { // also for requests through a proxy
			return nil, fmt.Errorf("%s: %w", a, machine.ErrLocal)
		}
		u, err := proxy(r)
		if u != nil {
			proxies.Store(hostPort(u), true)
		}
		return u, err
	}
	// A name may have any address, so check the address of each connection.
	remote := &net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		a, err := netip.ParseAddrPort(address)
		if err == nil && isLocal(a.Addr()) {
			err = machine.ErrLocal
		}
		return err
	}}
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if _, ok := proxies.Load(addr); ok {
			return new(net.Dialer).DialContext(ctx, network, addr)
		}
		return remote.DialContext(ctx, network, addr)
	}
}

// isLocal reports whether an address leads to this machine or only to its own link. The unspecified
// address leads to this machine.
func isLocal(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified()
}

// get requests a URL. It fails if the server sends nothing for a minute, before or during its
// response.
func (d *downloads) get(ctx context.Context, address string, header http.Header, proxy []string) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(silence, func() { cancel(fmt.Errorf("the server sent nothing for %s", silence)) })
	fail := func(err error) (*http.Response, error) {
		timer.Stop()
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		cancel(nil)
		return nil, fmt.Errorf("reading %s: %w", withoutSecrets(address), withoutURL(err))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return fail(err)
	}
	req.Header = header
	resp, err := d.client(proxy).Do(req)
	if err != nil {
		return fail(err)
	}
	resp.Body = &stallReader{resp.Body, timer, func() error { return context.Cause(ctx) }, func() { cancel(nil) }}
	return resp, nil
}

// withoutURL removes the URL from an error of net/http. It may be a redirect's URL, with a secret
// in its query.
func withoutURL(err error) error {
	if of := (*url.Error)(nil); errors.As(err, &of) {
		return of.Err
	}
	return err
}

// withoutSecrets returns a URL without its login and query.
func withoutSecrets(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "a URL that cannot be parsed"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// checkRedirect rejects redirects from https to another scheme, and more than ten redirects. It
// removes Authorization if the scheme, host or port changes: net/http would keep it for other
// ports and subdomains of the host.
func checkRedirect(req *http.Request, via []*http.Request) error {
	if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
		return fmt.Errorf("%w: %w", machine.ErrRedirect, errPlain)
	}
	if len(via) >= 10 {
		return fmt.Errorf("%w: more than ten redirects", machine.ErrRedirect)
	}
	if a, b := req.URL, via[0].URL; a.Scheme != b.Scheme || hostPort(a) != hostPort(b) {
		req.Header.Del("Authorization")
	}
	return nil
}

// hostPort returns the host and the port of a URL.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// maxHeader limits the header of a response, in bytes. net/http allows 10 MB, far more than an
// update with --max-bytes counts for a request in advance.
const maxHeader = 32 << 10

// silence is how long a server may send nothing.
const silence = time.Minute

// stallReader is a response body whose Read fails if the server sends nothing for a minute.
type stallReader struct {
	io.ReadCloser
	timer *time.Timer
	cause func() error
	done  func()
}

func (t *stallReader) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	if n > 0 {
		t.timer.Reset(silence)
	}
	if cause := t.cause(); err != nil && err != io.EOF && cause != nil {
		err = cause
	}
	return n, err
}

func (t *stallReader) Close() error {
	t.timer.Stop()
	err := t.ReadCloser.Close()
	t.done()
	return err
}

func post(ctx context.Context, c http.Client, url string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	fail := func(err error) error { return fmt.Errorf("sending to %s: %w", withoutSecrets(url), withoutURL(err)) }
	if err != nil {
		return fail(err)
	}
	if req.URL.Scheme != "https" {
		return fail(errPlain)
	}
	req.Header.Set("Content-Type", "application/json")
	c.Timeout = 10 * time.Second
	c.CheckRedirect = checkRedirect
	res, err := c.Do(req)
	if err != nil {
		return fail(err)
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		return fail(fmt.Errorf("it answered %s", res.Status))
	}
	return nil
}
