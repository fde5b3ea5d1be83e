package ipvs

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/edgebake/edgebake/ipvs/kernel"
)

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
func choose(masters []candidate, last []kernel.Dest, guarded bool) []kernel.Dest {
	known := make(map[netip.AddrPort]candidate, len(masters))
	for _, m := range masters {
		known[m.Addr] = m
	}
	stood := make(map[netip.AddrPort]kernel.Dest, len(last))
	for _, d := range last {
		stood[d.Addr] = d
	}
	var dests []kernel.Dest
	serving := false
	for _, m := range masters {
		before, there := stood[m.Addr]
		switch {
		case m.State == Up:
			dests = append(dests, kernel.Dest{Addr: m.Addr, Weight: 1, Forward: kernel.Masq})
			serving = true
		case m.State == Unknown && there:
			dests = append(dests, kernel.Dest{Addr: m.Addr, Weight: before.Weight, Forward: kernel.Masq})
			serving = serving || before.Weight > 0
		case m.State == Draining:
			dests = append(dests, kernel.Dest{Addr: m.Addr, Weight: 0, Forward: kernel.Masq})
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
				dests = append(dests, kernel.Dest{Addr: m.Addr, Weight: 1, Forward: kernel.Masq})
			}
		}
		slow := len(dests) > 0
		served := slices.ContainsFunc(last, func(d kernel.Dest) bool { return d.Weight > 0 })
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
				dests = append(dests, kernel.Dest{Addr: d.Addr, Weight: 0, Forward: kernel.Masq})
			case slow && m.State == Down:
				continue
			default:
				dests = append(dests, kernel.Dest{Addr: d.Addr, Weight: 1, Forward: kernel.Masq})
			}
		}
	}
	slices.SortFunc(dests, func(a, b kernel.Dest) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Weight, b.Weight)) })
	return dests
}
