package ipvs

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

// link is one held connection to an API server: HTTP/2 where the API server
// speaks it, HTTP/1.1 otherwise. It is a client for exactly what sensing
// needs, because net/http would cost half of the memory that ipvscare may use.
// Frames as in RFC 9113.
//
// One goroutine owns the link; another, started by dialLink, reads and
// delivers events.
type link struct {
	nc net.Conn

	h2     bool
	skew   skew
	target target

	events chan event
	done   chan struct{}
	once   sync.Once

	wmu     sync.Mutex // the reader acknowledges, the owner asks
	wbuf    []byte
	stream  uint32
	request []byte // HPACK block or HTTP/1.1 text of the probe
	pings   uint64
}

// target is what a link connects to and how it proves itself.
type target struct {
	addr   netip.AddrPort
	name   string // API server's DNS name, or its address
	sni    string
	probe  Probe
	roots  *roots // nil: nobody can be verified yet
	client *tls.Certificate
	// progress, if set, is how far the connection came.
	progress *atomic.Int32
	// connectTime bounds the wait for TCP's handshake; 0: the context alone does.
	connectTime time.Duration
	// dial opens the connection; net.Dialer by default.
	dial func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)
}

// event is news from a link. Only one of the kinds is set.
type event struct {
	kind   eventKind
	ping   uint64 // number of the PING that evPong answers
	status int
	date   string
	body   []byte
	err    error
}

type eventKind int

const (
	evPong eventKind = iota
	evResponse
	evGoAway
	evClosed
)

// bodyLimit bounds the bytes kept of a response: enough for the list of failed
// checks of /readyz, and for a ConfigMap with as many API servers as may be
// learned.
const (
	bodyLimit     = 4 << 10
	bodyLimitLong = 256 << 10
)

// identityError means that the API server could not prove to be one.
type identityError struct{ err error }

func (e *identityError) Error() string { return e.err.Error() }
func (e *identityError) Unwrap() error { return e.err }

// errNotTLS: something answers, but not with TLS.
var errNotTLS = errors.New("it does not speak TLS")

// dialLink connects, shakes hands and verifies. The context bounds all of it.
func dialLink(ctx context.Context, t target, limit int) (*link, error) {
	if t.dial == nil {
		t.dial = func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			d := net.Dialer{KeepAlive: -1} // PINGs do it
			return d.DialContext(ctx, "tcp", addr.String())
		}
	}
	cctx, cancel := ctx, context.CancelFunc(func() {})
	if t.connectTime > 0 {
		cctx, cancel = context.WithTimeout(ctx, t.connectTime)
	}
	nc, err := t.dial(cctx, t.addr)
	cancel()
	if err != nil {
		return nil, err
	}
	if t.progress != nil {
		t.progress.Store(progressConnected)
		nc = &hearing{nc, t.progress}
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	l := &link{nc: nc, target: t, events: make(chan event, 16), done: make(chan struct{})}
	err = l.handshake(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	l.encodeRequest(t.probe.Method, t.probe.Path)
	if l.h2 {
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
		c.progress.Store(progressHeard)
	}
	return n, err
}

func (l *link) handshake(ctx context.Context) error {
	t := &l.target
	if t.probe.Plain {
		return nil
	}
	var alien error // is worth more than what becomes of the handshake then
	cfg := &tls.Config{
		ServerName: t.sni,
		NextProtos: []string{"h2", "http/1.1"},
		// Verified below, so that a wrong clock can be told from a wrong
		// identity.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if t.probe.Unsafe || t.roots == nil {
				return nil
			}
			var err error
			if l.skew, err = t.roots.verify(ctx, cs.PeerCertificates, t.names(), time.Now()); errors.Is(err, ctx.Err()) {
				return err // the time was up: that says nothing of the identity
			} else if err != nil {
				alien = &identityError{err}
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
	if t.client != nil {
		cfg.Certificates = []tls.Certificate{*t.client}
	}
	tc := tls.Client(l.nc, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		if alien != nil {
			return alien
		}
		var rec tls.RecordHeaderError
		if errors.As(err, &rec) {
			return fmt.Errorf("%w: %w", errNotTLS, err)
		}
		return err
	}
	l.nc = tc
	l.h2 = tc.ConnectionState().NegotiatedProtocol == "h2"
	if l.h2 {
		return l.preface()
	}
	return nil
}

// names are those the certificate must match one of them.
func (t *target) names() []string {
	names := []string{t.name, t.addr.Addr().String(), certName}
	if t.sni != "" && t.sni != certName {
		names = append(names, t.sni)
	}
	return names
}

// encodeRequest makes the request once; it is sent again and again.
func (l *link) encodeRequest(method, path string) {
	if l.h2 {
		l.request = l.target.encodeHTTP2(method, path)
	} else {
		l.request = l.target.encodeHTTP1(method, path)
	}
}

// authority is the host that a request is for.
func (t *target) authority() string {
	if t.sni != "" {
		return t.sni
	}
	return t.addr.String()
}

// ask sends the prepared request; the answer comes as an event.
func (l *link) ask() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.h2 {
		return l.askHTTP2()
	}
	return l.write(l.request)
}

// ping asks for a sign of life. Over HTTP/1.1 that is the request itself.
func (l *link) ping() error {
	if !l.h2 {
		return l.ask()
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.pingHTTP2()
}

// exhausted reports that the link has no stream ids left to speak of.
func (l *link) exhausted() bool { return l.stream > 1<<30 }

// writeTime is how long a write may wait: a full socket buffer is as good as no
// answer.
const writeTime = 2 * time.Second

func (l *link) write(b []byte) error {
	l.nc.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := l.nc.Write(b)
	return err
}

// close ends the link and its reader. It is safe to call more than once.
func (l *link) close() {
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

func (l *link) deliver(e event) bool {
	select {
	case l.events <- e:
		return true
	case <-l.done:
		return false
	}
}
