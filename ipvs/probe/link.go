// Package probe asks one API server whether it is alive, and whether it is one of the
// cluster's. [Dial] opens a [Link], which is held and asked again and again; [Spec.Judge]
// and [Classify] turn an answer or an error into an [Outcome].
//
// Invariant: nothing is sent over a link before the API server has proved its identity,
// unless the Spec says Unsafe or Plain, or no CA is known yet.
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
)

// Link is one held connection to an API server: HTTP/2 where the API server
// speaks it, HTTP/1.1 otherwise. It is a client for exactly what sensing
// needs, because net/http would cost half of the memory that ipvscare may use.
// Frames as in RFC 9113.
//
// One goroutine owns the link; another, started by Dial, reads and
// delivers events.
type Link struct {
	nc net.Conn

	HTTP2  bool
	Skew   Skew // of the API server's certificate to this node's clock
	Target Target

	Events chan Event // from the reader
	done   chan struct{}
	once   sync.Once

	wmu     sync.Mutex // the reader acknowledges, the owner asks
	wbuf    []byte
	stream  uint32
	request []byte // HPACK block or HTTP/1.1 text of the probe
	Pings   uint64 // sent
}

// Target is what a link connects to and how it proves itself.
type Target struct {
	Addr   netip.AddrPort
	Name   string // API server's DNS name, or its address
	SNI    string
	Probe  Spec
	Roots  *Roots // nil: nobody can be verified yet
	Client *tls.Certificate
	// Progress, if set, is how far the connection came.
	Progress *atomic.Int32
	// ConnectTime bounds the wait for TCP's handshake; 0: the context alone does.
	ConnectTime time.Duration
	// Dial opens the connection; net.Dialer by default.
	Dial func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)
}

// Event is news from a link. Only one of the kinds is set.
type Event struct {
	Kind   eventKind
	Ping   uint64 // number of the PING that EventPong answers
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

// BodyLimit bounds the bytes kept of a response: enough for the list of failed
// checks of /readyz, and for a ConfigMap with as many API servers as may be
// learned.
const (
	BodyLimit     = 4 << 10
	BodyLimitLong = 256 << 10
)

// The progress of a connection, in order. An API server's kernel alone shakes hands
// over TCP, even for a stopped program; bytes come from the program.
const (
	NotConnected int32 = iota
	Connected
	Heard
)

// IdentityError means that the API server could not prove to be one.
type IdentityError struct{ Err error }

func (e *IdentityError) Error() string { return e.Err.Error() }
func (e *IdentityError) Unwrap() error { return e.Err }

// ErrNotTLS: something answers, but not with TLS.
var ErrNotTLS = errors.New("it does not speak TLS")

// Dial connects, shakes hands and verifies. The context bounds all of it.
func Dial(ctx context.Context, t Target, limit int) (*Link, error) {
	if t.Dial == nil {
		t.Dial = func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			d := net.Dialer{KeepAlive: -1} // PINGs do it
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

// hearing notes that something was read.
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
	var alien error // is worth more than what becomes of the handshake then
	cfg := &tls.Config{
		ServerName: t.SNI,
		NextProtos: []string{"h2", "http/1.1"},
		// Verified below, so that a wrong clock can be told from a wrong
		// identity.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if t.Probe.Unsafe || t.Roots == nil {
				return nil
			}
			var err error
			if l.Skew, err = t.Roots.verify(ctx, cs.PeerCertificates, t.names(), time.Now()); errors.Is(err, ctx.Err()) {
				return err // the time was up: that says nothing of the identity
			} else if err != nil {
				alien = &IdentityError{err}
			}
			return alien
		},
		SessionTicketsDisabled: true,
		// Without the post-quantum keys, which need a second packet each way:
		// nothing said here is worth hiding for decades, and where packets are
		// lost, each one counts.
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

// names are those the certificate must match one of them.
func (t *Target) names() []string {
	names := []string{t.Name, t.Addr.Addr().String(), CertName}
	if t.SNI != "" && t.SNI != CertName {
		names = append(names, t.SNI)
	}
	return names
}

// encodeRequest makes the request once; it is sent again and again.
func (l *Link) encodeRequest(method, path string) {
	if l.HTTP2 {
		l.request = l.Target.encodeHTTP2(method, path)
	} else {
		l.request = l.Target.encodeHTTP1(method, path)
	}
}

// authority is the host that a request is for.
func (t *Target) authority() string {
	if t.SNI != "" {
		return t.SNI
	}
	return t.Addr.String()
}

// Ask sends the prepared request; the answer comes as an event.
func (l *Link) Ask() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.HTTP2 {
		return l.askHTTP2()
	}
	return l.write(l.request)
}

// Ping asks for a sign of life. Over HTTP/1.1 that is the request itself.
func (l *Link) Ping() error {
	if !l.HTTP2 {
		return l.Ask()
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.pingHTTP2()
}

// Exhausted reports that the link has no stream ids left to speak of.
func (l *Link) Exhausted() bool { return l.stream > 1<<30 }

// writeTime is how long a write may wait: a full socket buffer is as good as no
// answer.
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
		// A polite TLS close_notify could block on a dead peer.
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
