package reports

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Share limits the simultaneous connections from one IPv4 address or IPv6 /64 network, and closes
// further ones at once. So one sender cannot lock out all machines.
func Share(l net.Listener, most int) net.Listener {
	return &share{Listener: l, most: most, open: map[netip.Prefix]int{}}
}

type share struct {
	net.Listener
	most int
	mu   sync.Mutex
	open map[netip.Prefix]int
}

func (s *share) Accept() (net.Conn, error) {
	for {
		conn, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := sender(conn.RemoteAddr())
		if !s.take(from) {
			conn.Close()
			continue
		}
		return &shared{Conn: conn, leave: sync.OnceFunc(func() { s.leave(from) })}, nil
	}
}

func (s *share) take(from netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[from] >= s.most {
		return false
	}
	s.open[from]++
	return true
}

func (s *share) leave(from netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[from]--; s.open[from] == 0 {
		delete(s.open, from)
	}
}

// shared is a connection that counts toward the limit until it is closed.
type shared struct {
	net.Conn
	leave func()
}

func (c *shared) Close() error {
	c.leave()
	return c.Conn.Close()
}

// Crowd limits the connections of all addresses together. At the limit, a new connection
// closes the one that has been silent for longest.
func Crowd(l net.Listener, most int) net.Listener {
	return &crowd{Listener: l, most: most, open: map[*member]bool{}}
}

type crowd struct {
	net.Listener
	most int
	mu   sync.Mutex
	open map[*member]bool
}

func (c *crowd) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	m := &member{Conn: conn, crowd: c}
	m.heard.Store(time.Now().UnixNano())
	c.mu.Lock()
	var silent *member
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

// member is a connection of a crowd, with the time at which it last sent data.
type member struct {
	net.Conn
	crowd *crowd
	heard atomic.Int64
}

func (m *member) Read(p []byte) (int, error) {
	n, err := m.Conn.Read(p)
	if n > 0 {
		m.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

func (m *member) Close() error {
	m.crowd.mu.Lock()
	delete(m.crowd.open, m)
	m.crowd.mu.Unlock()
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
