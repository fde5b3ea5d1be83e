package scale

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/test/kerneltest"
)

// memory simulates the kernel of one machine, and has the connections through its virtual servers.
type memory struct {
	kerneltest.Table
	self  netip.Addr
	conns map[*balanced]kernel.Conn
	next  int
}

func newMemory(self netip.Addr) *memory {
	return &memory{self: self, conns: map[*balanced]kernel.Conn{}, next: rand.IntN(1 << 16)}
}

// balanced is a connection through a virtual server.
type balanced struct {
	net.Conn
	k *memory
}

func (c *balanced) Write(b []byte) (int, error) {
	c.k.Mu.Lock()
	c.k.Packets++
	c.k.Mu.Unlock()
	return c.Conn.Write(b)
}

func (c *balanced) Close() error {
	c.k.Mu.Lock()
	delete(c.k.conns, c)
	c.k.Mu.Unlock()
	return c.Conn.Close()
}

// dial connects through the virtual server to its real servers in turn.
func (k *memory) dial(ctx context.Context, vip netip.AddrPort) (net.Conn, error) {
	s, err := k.Service(vip)
	if err != nil {
		return nil, err
	}
	var all []netip.AddrPort
	if s != nil {
		for _, d := range s.Dests {
			if d.Weight > 0 {
				all = append(all, d.Addr)
			}
		}
	}
	if len(all) == 0 {
		return nil, syscall.ECONNREFUSED
	}
	k.Mu.Lock()
	k.next++
	to := all[k.next%len(all)]
	k.Packets++
	k.Mu.Unlock()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	client, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		return nil, err
	}
	b := &balanced{conn, k}
	k.Mu.Lock()
	k.conns[b] = kernel.Conn{Client: client, Virtual: vip, Dest: to}
	k.Mu.Unlock()
	return b, nil
}

func (k *memory) Service(vip netip.AddrPort) (*kernel.Service, error) {
	s, err := k.Table.Service(vip)
	if s == nil || err != nil {
		return s, err
	}
	k.Mu.Lock()
	defer k.Mu.Unlock()
	s.Conns = make(map[netip.AddrPort]kernel.Conns)
	for _, c := range k.conns {
		if c.Virtual == vip {
			s.Conns[c.Dest] = kernel.Conns{Active: s.Conns[c.Dest].Active + 1}
		}
	}
	return s, nil
}

func (k *memory) Conns(vip, dest netip.AddrPort) ([]kernel.Conn, error) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	var out []kernel.Conn
	for _, c := range k.conns {
		if c.Virtual == vip && c.Dest == dest {
			out = append(out, c)
		}
	}
	return out, nil
}

// sever closes the connections for which the given function returns true, and returns their number.
func (k *memory) sever(which func(kernel.Conn) bool) (int, error) {
	k.Mu.Lock()
	var all []io.Closer
	for b, c := range k.conns {
		if which(c) {
			all = append(all, b)
		}
	}
	k.Mu.Unlock()
	for _, c := range all {
		c.Close()
	}
	return len(all), nil
}

func (k *memory) Sever(conns []kernel.Conn) (int, error) {
	return k.sever(func(c kernel.Conn) bool { return slices.Contains(conns, c) })
}

func (k *memory) SeverRemote(addr netip.AddrPort) (int, error) {
	return k.sever(func(c kernel.Conn) bool { return c.Virtual == addr || c.Dest == addr })
}

func (k *memory) Source(netip.Addr) (netip.Addr, error) { return k.self, nil }
