package kernel

import (
	"fmt"
	"net/netip"
	"slices"
)

// Forward is a forwarding method of IPVS.
type Forward uint32

// Forwarding methods, with the kernel's numbers. edgebake uses only Masq: the others require API
// servers that have the virtual address. Other programs may use them.
const (
	Masq   Forward = 0
	Local  Forward = 1
	Tunnel Forward = 2
	Route  Forward = 3
)

func (f Forward) String() string {
	switch f {
	case Masq:
		return "masq"
	case Local:
		return "local"
	case Tunnel:
		return "tunnel"
	case Route:
		return "route"
	}
	return fmt.Sprintf("forward(%d)", uint32(f))
}

// Dest is one real server of a virtual server.
type Dest struct {
	Addr    netip.AddrPort
	Weight  int // share of new connections; 0: none
	Forward Forward
}

// Conns has the numbers of a real server's connections.
type Conns struct {
	Active   int // established
	Inactive int // being opened, or closed within the last two minutes
}

// Service is one virtual server with its real servers, in any order.
type Service struct {
	VIP       netip.AddrPort
	Scheduler string
	// Flags are the kernel's flags: persistent, one-packet. edgebake sets none.
	Flags uint32
	Dests []Dest
	// Conns has the numbers of connections of each real server. It is set only in services read
	// from the kernel.
	Conns map[netip.AddrPort]Conns
}

type OpKind int

// Kinds of steps. Sever closes the sockets whose connections IPVS forwards to the real server.
const (
	AddService OpKind = iota
	UpdateService
	DelService
	AddDest
	UpdateDest
	Sever
	DelDest
)

func (k OpKind) String() string {
	return [...]string{"add-service", "update-service", "del-service", "add-dest", "update-dest", "sever", "del-dest"}[k]
}

// Op is one change of the kernel's table. Service identifies the virtual server and has no Dests.
// Dest is set if Kind concerns a real server.
type Op struct {
	Kind    OpKind
	Service Service
	Dest    Dest
}

func (o Op) String() string {
	if o.Kind <= DelService {
		return fmt.Sprintf("%s %s %s", o.Kind, o.Service.VIP, o.Service.Scheduler)
	}
	return fmt.Sprintf("%s %s -> %s weight %d %s", o.Kind, o.Service.VIP, o.Dest.Addr, o.Dest.Weight, o.Dest.Forward)
}

// Diff returns the steps from have to want; nil means no service. It first adds real servers or
// raises their weights, then removes others or lowers their weights. A real server that is in both
// stays in the table. A real server gets weight 0, and its connections are closed, before it is
// removed.
func Diff(want, have *Service) []Op {
	var ops []Op
	switch {
	case want == nil && have == nil:
		return nil
	case want == nil:
		for _, d := range have.Dests {
			ops = append(ops, remove(have.bare(), d)...)
		}
		return append(ops, Op{Kind: DelService, Service: have.bare()})
	case have == nil:
		have = &Service{VIP: want.VIP, Scheduler: want.Scheduler, Flags: want.Flags}
		ops = append(ops, Op{Kind: AddService, Service: want.bare()})
	case have.Scheduler != want.Scheduler || have.Flags != want.Flags:
		ops = append(ops, Op{Kind: UpdateService, Service: want.bare()})
	}
	svc := want.bare()
	had := make(map[netip.AddrPort]Dest, len(have.Dests))
	for _, d := range have.Dests {
		had[d.Addr] = d
	}
	var better, worse []Op
	wanted := make(map[netip.AddrPort]bool, len(want.Dests))
	for _, d := range sorted(want.Dests) {
		if wanted[d.Addr] {
			continue
		}
		wanted[d.Addr] = true
		old, ok := had[d.Addr]
		switch {
		case !ok:
			better = append(better, Op{Kind: AddDest, Service: svc, Dest: d})
		case old == d:
		case d.Weight >= old.Weight:
			better = append(better, Op{Kind: UpdateDest, Service: svc, Dest: d})
		default:
			worse = append(worse, Op{Kind: UpdateDest, Service: svc, Dest: d})
		}
	}
	ops = append(ops, better...)
	ops = append(ops, worse...)
	for _, d := range sorted(have.Dests) {
		if !wanted[d.Addr] {
			ops = append(ops, remove(svc, d)...)
		}
	}
	return ops
}

func remove(svc Service, d Dest) []Op {
	var ops []Op
	if d.Weight != 0 {
		d.Weight = 0
		ops = append(ops, Op{Kind: UpdateDest, Service: svc, Dest: d})
	}
	return append(ops, Op{Kind: Sever, Service: svc, Dest: d}, Op{Kind: DelDest, Service: svc, Dest: d})
}

func (s *Service) bare() Service {
	return Service{VIP: s.VIP, Scheduler: s.Scheduler, Flags: s.Flags}
}

func sorted(dests []Dest) []Dest {
	return slices.SortedStableFunc(slices.Values(dests), func(a, b Dest) int { return a.Addr.Compare(b.Addr) })
}
