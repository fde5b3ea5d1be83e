// Package probe checks whether one API server is alive and belongs to the cluster. [Dial] opens a
// [Link], over which the same request is sent repeatedly. [Spec.Judge] and [Classify] turn an
// answer or an error into an [Outcome].
//
// Invariant: nothing is sent over a link before the API server has proved its
// identity, unless the Spec sets Unsafe or Plain, or no CA is known yet.
package probe

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/firstboot/servercert"
)

// Link is an open connection to an API server: HTTP/2 if the server supports it, otherwise
// HTTP/1.1. It implements only what probes need, because net/http would use half of the memory that
// ipvscare may use. The frames are those of RFC 9113.
//
// One goroutine owns the link. Dial starts another one, which reads from the connection and
// delivers events.
type Link struct {
	nc net.Conn

	HTTP2  bool
	Skew   Skew // of the API server's certificate relative to this node's clock
	Target Target

	Events chan Event // delivered by the reader
	done   chan struct{}
	once   sync.Once

	wmu     sync.Mutex // for writes: the reader acknowledges frames, the owner sends requests
	wbuf    []byte
	stream  uint32
	request []byte // HPACK block or HTTP/1.1 text of the request
	Pings   uint64 // number of PINGs sent
}

// Target is the server to connect to, and how it proves its identity.
type Target struct {
	Addr     netip.AddrPort
	Name     string // the API server's DNS name, or its IP address as text
	SNI      string
	Probe    Spec
	Roots    *Roots // nil: no server can be verified yet
	Client   *tls.Certificate
	Sessions *Sessions // TLS sessions with this server; may be nil
	// Progress, if set, receives the progress of the connection.
	Progress *atomic.Int32
	// ConnectTime is the timeout of the TCP handshake; 0 means that only the context limits it.
	ConnectTime time.Duration
	// Dial opens the TCP connection; default: net.Dialer.
	Dial func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)
}

// Sessions are the last TLS sessions with one server, one without a client certificate and one for
// the last certificate: the server identifies the client by the certificate that began the session.
// Resuming a session saves the server its RSA signature, most of the work of a handshake.
type Sessions struct {
	mu                sync.Mutex
	client            *tls.Certificate
	withCert, without *servercert.SessionCache
}

// of returns the session cache for connections with this certificate; nil if sessions are not kept.
func (s *Sessions) of(client *tls.Certificate) tls.ClientSessionCache {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	current := &s.without
	if client != nil {
		if current = &s.withCert; s.client != client {
			s.client, s.withCert = client, nil
		}
	}
	if *current == nil || (*current).Expired() {
		*current = servercert.NewSessionCache()
	}
	return *current
}

// forget removes the session that belongs to this certificate.
func (s *Sessions) forget(client *tls.Certificate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if client == nil {
		s.without = nil
	} else if s.client == client {
		s.withCert = nil
	}
}

// Event is an event of a link. Kind determines which of the other fields are set.
type Event struct {
	Kind   eventKind
	Ping   uint64 // number of the PING that an EventPong answers
	Status int
	date   string
	Body   []byte
	Err    error
}

type eventKind int

// Kinds of events.
const (
	EventPong eventKind = iota
	EventResponse
	EventGoAway
	EventClosed
)

// BodyLimit is the number of bytes of a response that are kept: enough for the
// list of failed checks of /readyz. BodyLimitLong is enough for a ConfigMap
// with the maximum number of API servers.
const (
	BodyLimit     = 4 << 10
	BodyLimitLong = 256 << 10
)

// Progress of a connection, in order. Connected alone does not prove that the program runs: the
// server's kernel completes the TCP handshake even for a stopped program. Heard means that the
// program sent bytes.
const (
	NotConnected int32 = iota
	Connected
	Heard
)

// IdentityError means that the API server could not prove its identity.
type IdentityError struct{ Err error }

func (e *IdentityError) Error() string { return e.Err.Error() }
func (e *IdentityError) Unwrap() error { return e.Err }

// ErrNotTLS means that the server answers, but not with TLS.
var ErrNotTLS = errors.New("it does not speak TLS")

// errStale means that the certificate of a resumed session is not valid any more. The server may
// already have another one.
var errStale = errors.New("the certificate of the TLS session is not valid")

// Dial connects, makes the TLS handshake and verifies the certificate, all within the context's
// deadline. limit is the number of bytes of each response to keep.
func Dial(ctx context.Context, t Target, limit int) (*Link, error) {
	l, err := dial(ctx, t, limit)
	if err != nil && t.Sessions != nil && ctx.Err() == nil && Classify(err, false) != Timeout {
		t.Sessions.forget(t.Client) // the session may be the reason
	}
	if errors.Is(err, errStale) {
		l, err = dial(ctx, t, limit)
	}
	return l, err
}

func dial(ctx context.Context, t Target, limit int) (*Link, error) {
	if t.Dial == nil {
		t.Dial = func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			d := net.Dialer{KeepAlive: -1} // PINGs replace keep-alives
			return d.DialContext(ctx, "tcp", addr.String())
		}
	}
	cctx, cancel := ctx, context.CancelFunc(func() {})
	if t.ConnectTime > 0 {
		cctx, cancel = context.WithTimeout(ctx, t.ConnectTime)
	}
	nc, err := t.Dial(cctx, t.Addr)
	cancel()
	if err != nil {
		return nil, err
	}
	if t.Progress != nil {
		t.Progress.Store(Connected)
		nc = &hearing{nc, t.Progress}
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	l := &Link{nc: nc, Target: t, Events: make(chan Event, 16), done: make(chan struct{})}
	err = l.handshake(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	l.encodeRequest(t.Probe.Method, t.Probe.Path)
	if l.HTTP2 {
		go l.readHTTP2(limit)
	} else {
		go l.readHTTP1(limit)
	}
	return l, nil
}

// hearing is a connection that records whether anything was read.
type hearing struct {
	net.Conn
	progress *atomic.Int32
}

func (c *hearing) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.progress.Store(Heard)
	}
	return n, err
}

func (l *Link) handshake(ctx context.Context) error {
	t := &l.Target
	if t.Probe.Plain {
		return nil
	}
	var alien error // takes precedence over the error of the handshake
	cfg := &tls.Config{
		ServerName: t.SNI,
		NextProtos: []string{"h2", "http/1.1"},
		// Verified below, to distinguish a wrong clock from a wrong identity.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if t.Probe.Unsafe || t.Roots == nil {
				return nil
			}
			var err error
			l.Skew, err = t.Roots.verify(ctx, cs.PeerCertificates, t.names(), time.Now())
			switch {
			case err == nil:
				return nil
			case errors.Is(err, ctx.Err()):
				return err // timeout: no statement about the identity
			case cs.DidResume:
				return errStale
			}
			alien = &IdentityError{err}
			return alien
		},
		ClientSessionCache: t.Sessions.of(t.Client),
		// Post-quantum keys are not offered: they need a second packet in each direction, which
		// matters on a link that loses packets. Nothing sent here must stay secret for decades.
		CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384},
		MinVersion:       tls.VersionTLS12,
	}
	if t.Client != nil {
		cfg.Certificates = []tls.Certificate{*t.Client}
	}
	tc := tls.Client(l.nc, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		if alien != nil {
			return alien
		}
		var rec tls.RecordHeaderError
		if errors.As(err, &rec) {
			return fmt.Errorf("%w: %w", ErrNotTLS, err)
		}
		return err
	}
	l.nc = tc
	l.HTTP2 = tc.ConnectionState().NegotiatedProtocol == "h2"
	if l.HTTP2 {
		return l.preface()
	}
	return nil
}

// names returns the names that are accepted in the certificate; one of them must match.
func (t *Target) names() []string {
	names := []string{t.Name, t.Addr.Addr().String(), CertName}
	if t.SNI != "" && t.SNI != CertName {
		names = append(names, t.SNI)
	}
	return names
}

// encodeRequest encodes the request once; it is sent repeatedly.
func (l *Link) encodeRequest(method, path string) {
	if l.HTTP2 {
		l.request = l.Target.encodeHTTP2(method, path)
	} else {
		l.request = l.Target.encodeHTTP1(method, path)
	}
}

// authority returns the host name of a request.
func (t *Target) authority() string {
	if t.SNI != "" {
		return t.SNI
	}
	return t.Addr.String()
}

// Ask sends the encoded request. The answer is delivered as an event.
func (l *Link) Ask() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.HTTP2 {
		return l.askHTTP2()
	}
	return l.write(l.request)
}

// Ping sends a PING. Over HTTP/1.1 it sends the request instead.
func (l *Link) Ping() error {
	if !l.HTTP2 {
		return l.Ask()
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.pingHTTP2()
}

// Exhausted reports whether the link has used up its stream IDs.
func (l *Link) Exhausted() bool { return l.stream > 1<<30 }

// writeTime is the timeout of a write. A write that blocks for so long means a full socket buffer:
// the server does not read.
const writeTime = 2 * time.Second

func (l *Link) write(b []byte) error {
	l.nc.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := l.nc.Write(b)
	return err
}

// Close ends the link and its reader. It is safe to call more than once.
func (l *Link) Close() {
	l.once.Do(func() {
		close(l.done)
		// Close the TCP connection directly: sending a TLS close_notify could block on a dead peer.
		if tc, ok := l.nc.(*tls.Conn); ok {
			tc.NetConn().Close()
			return
		}
		l.nc.Close()
	})
}

func (l *Link) deliver(e Event) bool {
	select {
	case l.Events <- e:
		return true
	case <-l.done:
		return false
	}
}
