package reports

import (
	"net"
	"net/netip"
	"sync"
)

// Share limits the connections that one address has at a time, or in IPv6 one
// network of a machine (/64): others are closed at once. Who opens connections and says
// nothing would keep all machines out, since the receiver takes a limited number.
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

// shared is a connection that is counted until it is closed.
type shared struct {
	net.Conn
	leave func()
}

func (c *shared) Close() error {
	c.leave()
	return c.Conn.Close()
}

// sender is who an address counts as.
func sender(addr net.Addr) netip.Prefix {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip, bits := tcp.AddrPort().Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
