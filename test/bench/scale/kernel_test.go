package scale

import (
	"context"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/edgebake/edgebake/ipvs/kernel"
)

// memory is the kernel of one machine: virtual servers, the connections through them,
// and the packets of each real server.
type memory struct {
	self netip.Addr

	mu       sync.Mutex
	services []kernel.Service
	packets  map[netip.AddrPort]uint32
	routes   map[netip.Addr]netip.Addr
	conns    map[*balanced]kernel.Conn
	next     int
}

func newMemory(self netip.Addr) *memory {
	return &memory{self: self, packets: map[netip.AddrPort]uint32{}, routes: map[netip.Addr]netip.Addr{}, conns: map[*balanced]kernel.Conn{}, next: rand.IntN(1 << 16)}
}

// balanced is a connection through a virtual server.
type balanced struct {
	net.Conn
	k *memory
}

func (c *balanced) Write(b []byte) (int, error) {
	c.k.mu.Lock()
	c.k.packets[c.k.conns[c].Dest]++
	c.k.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *balanced) Close() error {
	c.k.mu.Lock()
	delete(c.k.conns, c)
	c.k.mu.Unlock()
	return c.Conn.Close()
}

// dial connects through the virtual server, to its real servers in turn.
func (k *memory) dial(ctx context.Context, vip netip.AddrPort) (net.Conn, error) {
	k.mu.Lock()
	var all []netip.AddrPort
	if s := k.find(vip); s != nil {
		for _, d := range s.Dests {
			if d.Weight > 0 {
				all = append(all, d.Addr)
			}
		}
	}
	if len(all) == 0 {
		k.mu.Unlock()
		return nil, syscall.ECONNREFUSED
	}
	k.next++
	to := all[k.next%len(all)]
	k.packets[to]++
	k.mu.Unlock()
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
	k.mu.Lock()
	k.conns[b] = kernel.Conn{Client: client, Virtual: vip, Dest: to}
	k.mu.Unlock()
	return b, nil
}

func (k *memory) find(vip netip.AddrPort) *kernel.Service {
	i := slices.IndexFunc(k.services, func(s kernel.Service) bool { return s.VIP == vip })
	if i < 0 {
		return nil
	}
	return &k.services[i]
}

func (k *memory) Ready() error { return nil }

func (k *memory) Service(vip netip.AddrPort) (*kernel.Service, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.find(vip)
	if s == nil {
		return nil, nil
	}
	seen := *s
	seen.Dests, seen.Packets = slices.Clone(s.Dests), maps.Clone(k.packets)
	return &seen, nil
}

func (k *memory) Apply(op kernel.Op) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	vip := op.Service.VIP
	switch s := k.find(vip); op.Kind {
	case kernel.AddService:
		k.services = append(k.services, kernel.Service{VIP: vip, Scheduler: op.Service.Scheduler})
	case kernel.DelService:
		k.services = slices.DeleteFunc(k.services, func(s kernel.Service) bool { return s.VIP == vip })
	case kernel.UpdateService:
		s.Scheduler, s.Flags = op.Service.Scheduler, op.Service.Flags
	case kernel.AddDest:
		s.Dests = append(s.Dests, op.Dest)
	case kernel.UpdateDest:
		s.Dests[slices.IndexFunc(s.Dests, func(d kernel.Dest) bool { return d.Addr == op.Dest.Addr })] = op.Dest
	case kernel.DelDest:
		s.Dests = slices.DeleteFunc(s.Dests, func(d kernel.Dest) bool { return d.Addr == op.Dest.Addr })
	}
	return nil
}

func (k *memory) Conns(vip, dest netip.AddrPort) ([]kernel.Conn, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []kernel.Conn
	for _, c := range k.conns {
		if c.Virtual == vip && c.Dest == dest {
			out = append(out, c)
		}
	}
	return out, nil
}

// sever closes the connections that which takes.
func (k *memory) sever(which func(kernel.Conn) bool) (int, error) {
	k.mu.Lock()
	var all []io.Closer
	for b, c := range k.conns {
		if which(c) {
			all = append(all, b)
		}
	}
	k.mu.Unlock()
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

func (k *memory) Untrack(vip, dest netip.AddrPort) error { return nil }

func (k *memory) Stuck(netip.AddrPort) ([]netip.AddrPort, error) { return nil, nil }

func (k *memory) Source(netip.Addr) (netip.Addr, error) { return k.self, nil }

func (k *memory) Route(vip netip.Addr) (netip.Addr, bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	src, ok := k.routes[vip]
	return src, ok, nil
}

func (k *memory) SetRoute(vip, src netip.Addr) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.routes[vip] = src
	return nil
}

func (k *memory) DelRoute(vip netip.Addr) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.routes, vip)
	return nil
}

func (k *memory) Settings() ([]string, error) { return nil, nil }

func (k *memory) Watch(context.Context, func()) error { return nil }
