package worldtest

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"
)

// Listener is a server's listener in memory, because tests make very many connections.
type Listener struct{ *backlog }

// Serve runs a server, with TLS if it is configured, until the test ends.
func Serve(t *testing.T, srv *http.Server) Listener {
	l := Listener{&backlog{conns: make(chan net.Conn, 128)}}
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if s, ok := c.(*tls.Conn); ok {
			c = s.NetConn()
		}
		return context.WithValue(ctx, connKey{}, c)
	}
	run := srv.Serve
	if srv.TLSConfig != nil {
		run = func(l net.Listener) error { return srv.ServeTLS(l, "", "") }
	}
	done := make(chan error)
	go func() { done <- run(l) }()
	t.Cleanup(func() {
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return l
}

type connKey struct{}

// BreakKeptAlive aborts a request on a connection that was used before
// if a new connection would fail now.
func BreakKeptAlive(r *http.Request, wrong func(addr string) error) {
	c := r.Context().Value(connKey{}).(*memConn)
	if c.hadRequest && wrong(string(c.local)) != nil {
		panic(http.ErrAbortHandler) // the connection breaks
	}
	c.hadRequest = true
}

// Dial connects to the server. addr is the connection's local address at the server.
func (l Listener) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return l.connect(memAddr(addr))
}

// memAddr is the address that a client dialled.
type memAddr string

func (memAddr) Network() string  { return "memory" }
func (a memAddr) String() string { return string(a) }

// backlog has the connections that are not accepted yet.
type backlog struct {
	mu     sync.Mutex
	closed bool
	conns  chan net.Conn
}

func (b *backlog) connect(to memAddr) (net.Conn, error) {
	there, back := newStream(), newStream()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errors.New("connection refused")
	}
	b.conns <- &memConn{in: there, out: back, local: to}
	return &memConn{in: back, out: there, remote: to}, nil
}

func (b *backlog) Accept() (net.Conn, error) {
	if c, ok := <-b.conns; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (b *backlog) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	close(b.conns)
	for c := range b.conns {
		if err := c.Close(); err != nil {
			return err
		}
	}
	return nil
}

func (b *backlog) Addr() net.Addr { return memAddr("") }

// memConn is one end of a connection. Writes do not block.
type memConn struct {
	in, out       *stream
	local, remote memAddr
	hadRequest    bool // true once the server has received a request on it
}

func (c *memConn) Read(p []byte) (int, error)         { return c.in.read(p) }
func (c *memConn) Write(p []byte) (int, error)        { return c.out.write(p) }
func (c *memConn) Close() error                       { c.in.close(); c.out.close(); return nil }
func (c *memConn) LocalAddr() net.Addr                { return c.local }
func (c *memConn) RemoteAddr() net.Addr               { return c.remote }
func (c *memConn) SetDeadline(t time.Time) error      { return c.SetReadDeadline(t) }
func (c *memConn) SetReadDeadline(t time.Time) error  { c.in.until(t); return nil }
func (c *memConn) SetWriteDeadline(t time.Time) error { return nil }

// stream is one direction of a connection.
type stream struct {
	mu      sync.Mutex
	changed sync.Cond
	data    []byte
	closed  bool
	late    bool // the reader's deadline has passed
	timer   *time.Timer
}

func newStream() *stream {
	s := new(stream)
	s.changed.L = &s.mu
	return s
}

func (s *stream) read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.late:
			return 0, os.ErrDeadlineExceeded
		case len(s.data) > 0:
			n := copy(p, s.data)
			s.data = s.data[n:]
			return n, nil
		case s.closed:
			return 0, io.EOF
		}
		s.changed.Wait()
	}
}

func (s *stream) write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, io.ErrClosedPipe
	}
	s.data = append(s.data, p...)
	s.changed.Broadcast()
	return len(p), nil
}

func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.changed.Broadcast()
}

// until sets the deadline for reading; zero means no deadline.
func (s *stream) until(t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	s.late = !t.IsZero() && !t.After(time.Now())
	if !t.IsZero() && !s.late {
		var own *time.Timer
		own = time.AfterFunc(time.Until(t), func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.timer == own { // it was not replaced
				s.late = true
				s.changed.Broadcast()
			}
		})
		s.timer = own
	}
	s.changed.Broadcast()
}
