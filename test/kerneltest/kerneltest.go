// Package kerneltest simulates the kernel's IPVS table and routes in memory, for tests of
// ipvscare's daemon. It rejects operations that a kernel would reject.
package kerneltest

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/edgebake/edgebake/ipvs/kernel"
)

// Table is a kernel.Kernel without connections. A type that embeds it can add them.
type Table struct {
	Mu       sync.Mutex
	Services []kernel.Service
	// Packets is the number of sent packets. Opened counts the connections of each real server.
	Packets uint64
	Opened  map[netip.AddrPort]kernel.Conns
	Routes  map[netip.Addr]netip.Addr // source address of each local route
}

func (t *Table) Ready() error { return nil }

func (t *Table) Service(vip netip.AddrPort) (*kernel.Service, error) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	i := t.index(vip)
	if i < 0 {
		return nil, nil
	}
	s := t.Services[i]
	s.Dests, s.Conns = slices.Clone(s.Dests), maps.Clone(t.Opened)
	return &s, nil
}

func (t *Table) Sent() (uint64, error) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	return t.Packets, nil
}

func (t *Table) index(vip netip.AddrPort) int {
	return slices.IndexFunc(t.Services, func(s kernel.Service) bool { return s.VIP == vip })
}

func (t *Table) Apply(op kernel.Op) error {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	return t.Perform(op)
}

// Perform is like Apply, for a caller that holds Mu.
func (t *Table) Perform(op kernel.Op) error {
	var s *kernel.Service
	i := t.index(op.Service.VIP)
	if i >= 0 {
		s = &t.Services[i]
	}
	after, err := Step(s, op)
	switch {
	case err != nil:
		return err
	case s == nil:
		t.Services = append(t.Services, *after)
	case after == nil:
		t.Services = slices.Delete(t.Services, i, i+1)
	default:
		t.Services[i] = *after
	}
	return nil
}

// Step returns a virtual server after one operation, or nil if the operation removed it.
func Step(s *kernel.Service, op kernel.Op) (*kernel.Service, error) {
	if (s == nil) != (op.Kind == kernel.AddService) {
		return nil, fmt.Errorf("%s on %v", op, s)
	}
	if s == nil {
		return &kernel.Service{VIP: op.Service.VIP, Scheduler: op.Service.Scheduler, Flags: op.Service.Flags}, nil
	}
	i := slices.IndexFunc(s.Dests, func(d kernel.Dest) bool { return d.Addr == op.Dest.Addr })
	switch op.Kind {
	case kernel.UpdateService:
		s.Scheduler, s.Flags = op.Service.Scheduler, op.Service.Flags
	case kernel.DelService:
		return nil, nil
	case kernel.AddDest:
		if i >= 0 {
			return nil, fmt.Errorf("%s: it exists already", op)
		}
		s.Dests = append(s.Dests, op.Dest)
	case kernel.UpdateDest:
		if i < 0 {
			return nil, fmt.Errorf("%s: it does not exist", op)
		}
		s.Dests[i] = op.Dest
	case kernel.Sever, kernel.DelDest:
		if i < 0 || s.Dests[i].Weight != 0 {
			return nil, fmt.Errorf("%s: it still accepts new connections", op)
		}
		if op.Kind == kernel.DelDest {
			s.Dests = slices.Delete(s.Dests, i, i+1)
		}
	}
	return s, nil
}

func (t *Table) Route(vip netip.Addr) (netip.Addr, bool, error) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	src, ok := t.Routes[vip]
	return src, ok, nil
}

func (t *Table) SetRoute(vip, src netip.Addr) error {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if t.Routes == nil {
		t.Routes = map[netip.Addr]netip.Addr{}
	}
	t.Routes[vip] = src
	return nil
}

func (t *Table) DelRoute(vip netip.Addr) error {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	delete(t.Routes, vip)
	return nil
}

func (t *Table) Source(netip.Addr) (netip.Addr, error) { return netip.MustParseAddr("127.0.0.1"), nil }

func (t *Table) Conns(vip, dest netip.AddrPort) ([]kernel.Conn, error) { return nil, nil }

func (t *Table) Sever([]kernel.Conn) (int, error) { return 0, nil }

func (t *Table) SeverRemote(netip.AddrPort) (int, error) { return 0, nil }

func (t *Table) Untrack(vip, dest netip.AddrPort) error { return nil }

func (t *Table) Stuck(netip.AddrPort) ([]netip.AddrPort, error) { return nil, nil }

func (t *Table) Settings() ([]string, error) { return nil, nil }

func (t *Table) Watch(context.Context, func()) error { return nil }
