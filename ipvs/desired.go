package ipvs

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// Forward is how IPVS passes packets on.
type Forward uint32

// Forwarding methods, with the kernel's numbers. Ours is Masq, the only one
// that works for API servers which do not know the virtual address; the others
// are known to recognise what somebody else changed.
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
	Weight  int // its share of new connections; 0: none
	Forward Forward
}

// Service is one virtual server with its real servers, in no special order.
type Service struct {
	VIP       netip.AddrPort
	Scheduler string
	// Flags are the kernel's, persistent or one-packet. Ours has none.
	Flags uint32
	Dests []Dest
}

// OpKind is one kind of step.
type OpKind int

// The steps. Sever destroys the sockets of connections that IPVS maps to the
// real server.
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

// Op is one change of the kernel's table. Service says of which virtual server; its
// Dests are empty. Dest is the real server, where Kind is about one.
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

// diff returns the steps from have to want; nil stands for no service at all.
// New and better real servers come before worse ones go, so that no step
// leaves the service without a real server that it had and keeps. A real
// server that goes is first given weight 0 and its connections are severed.
func diff(want, have *Service) []Op {
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

// candidate is what choose knows of one API server.
type candidate struct {
	Addr  netip.AddrPort
	State State
	// Lost: it does not answer, and may come back as an API server of another cluster.
	Lost bool
	// Slow: it is down only because its answers are late.
	Slow bool
}

// choose decides which API servers stand behind the virtual server. last are
// the real servers that were chosen before, or stand there, whoever put them.
// Those of weight 0 only keep the connections that they have. guarded says that an API server has to show its
// cluster.
//
//   - API servers that are up get weight 1, draining ones weight 0;
//   - one that stood there before and has no verdict yet keeps its place, so
//     that a restart costs nothing;
//   - if nobody is left: the draining ones serve again; else the slow ones
//     do, without those that are dead; else the last set stays, even when the list was replaced meanwhile. What of it may come
//     back as an API server of another cluster keeps the connections that it
//     has, and gets no others (weight 0);
//   - an alien (wrong identity) is never chosen.
func choose(masters []candidate, last []Dest, guarded bool) []Dest {
	known := make(map[netip.AddrPort]candidate, len(masters))
	for _, m := range masters {
		known[m.Addr] = m
	}
	stood := make(map[netip.AddrPort]Dest, len(last))
	for _, d := range last {
		stood[d.Addr] = d
	}
	var dests []Dest
	serving := false
	for _, m := range masters {
		before, there := stood[m.Addr]
		switch {
		case m.State == Up:
			dests = append(dests, Dest{m.Addr, 1, Masq})
			serving = true
		case m.State == Unknown && there:
			dests = append(dests, Dest{m.Addr, before.Weight, Masq})
			serving = serving || before.Weight > 0
		case m.State == Draining:
			dests = append(dests, Dest{m.Addr, 0, Masq})
		}
	}
	if !serving {
		for i, d := range dests {
			if known[d.Addr].State == Draining {
				dests[i].Weight = 1
				serving = true
			}
		}
	}
	if !serving {
		dests = nil
		for _, m := range masters {
			if m.Slow {
				dests = append(dests, Dest{m.Addr, 1, Masq})
			}
		}
		slow := len(dests) > 0
		served := slices.ContainsFunc(last, func(d Dest) bool { return d.Weight > 0 })
		for _, d := range last {
			m, listed := known[d.Addr]
			switch {
			case m.State == Alien || m.Slow:
				continue
			case served && d.Weight == 0 && m.State != Unknown:
				continue // it drained, and has its verdict
			case served && d.Weight == 0:
				dests = append(dests, d)
			case guarded && (!listed || m.Lost || m.State == Unknown):
				dests = append(dests, Dest{d.Addr, 0, Masq})
			case slow && m.State == Down:
				continue
			default:
				dests = append(dests, Dest{d.Addr, 1, Masq})
			}
		}
	}
	slices.SortFunc(dests, func(a, b Dest) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Weight, b.Weight)) })
	return dests
}
