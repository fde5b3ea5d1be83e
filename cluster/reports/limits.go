package reports

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// LimitPerSender limits the simultaneous connections from one IPv4 address or IPv6 /64 network, and
// closes further ones at once. So one sender cannot lock out all machines.
func LimitPerSender(l net.Listener, most int) net.Listener {
	return &senderLimit{Listener: l, most: most, open: map[netip.Prefix]int{}}
}

type senderLimit struct {
	net.Listener
	most int
	mu   sync.Mutex
	open map[netip.Prefix]int
}

func (s *senderLimit) Accept() (net.Conn, error) {
	for {
		conn, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := sender(conn.RemoteAddr())
		if !s.acquire(from) {
			conn.Close()
			continue
		}
		return &senderConn{Conn: conn, leave: sync.OnceFunc(func() { s.release(from) })}, nil
	}
}

func (s *senderLimit) acquire(from netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[from] >= s.most {
		return false
	}
	s.open[from]++
	return true
}

func (s *senderLimit) release(from netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[from]--; s.open[from] == 0 {
		delete(s.open, from)
	}
}

// senderConn is a connection that counts toward the limit until it is closed.
type senderConn struct {
	net.Conn
	leave func()
}

func (c *senderConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// LimitTotal limits the connections of all addresses together. At the limit, a new connection
// closes the one that has been silent for longest.
func LimitTotal(l net.Listener, most int) net.Listener {
	return &totalLimit{Listener: l, most: most, open: map[*limitedConn]bool{}}
}

type totalLimit struct {
	net.Listener
	most int
	mu   sync.Mutex
	open map[*limitedConn]bool
}

func (c *totalLimit) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	m := &limitedConn{Conn: conn, limit: c}
	m.heard.Store(time.Now().UnixNano())
	c.mu.Lock()
	var silent *limitedConn
	for o := range c.open {
		if silent == nil || o.heard.Load() < silent.heard.Load() {
			silent = o
		}
	}
	full := len(c.open) >= c.most
	c.open[m] = true
	c.mu.Unlock()
	if full {
		silent.Close()
	}
	return m, nil
}

// limitedConn is a connection of a totalLimit, with the time at which it last sent data.
type limitedConn struct {
	net.Conn
	limit *totalLimit
	heard atomic.Int64
}

func (m *limitedConn) Read(p []byte) (int, error) {
	n, err := m.Conn.Read(p)
	if n > 0 {
		m.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

func (m *limitedConn) Close() error {
	m.limit.mu.Lock()
	delete(m.limit.open, m)
	m.limit.mu.Unlock()
	return m.Conn.Close()
}

// sender returns the address or network under which a connection is counted.
func sender(addr net.Addr) netip.Prefix {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	return senderAt(tcp.AddrPort())
}

// senderOf is like sender, but for the address in a report.
func senderOf(from string) netip.Prefix {
	at, err := netip.ParseAddrPort(from)
	if err != nil {
		return netip.Prefix{}
	}
	return senderAt(at)
}

func senderAt(at netip.AddrPort) netip.Prefix {
	ip, bits := at.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
