package ipvs

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/edgebake/edgebake/ipvs/kernel"
)

// candidate is an API server that may become a real server.
type candidate struct {
	Addr  netip.AddrPort
	State State
	// Lost is set if the API server does not answer. When it answers again, it may belong to
	// another cluster.
	Lost bool
	// Slow is set if it is down only because its answers are late.
	Slow bool
	// Kept is set if it is down, but its existing connections are kept.
	Kept bool
}

// choose returns the real servers of the virtual server, sorted. last lists the current real
// servers, including those added by other programs. guarded means that API servers must prove which
// cluster they belong to. A real server of weight 0 keeps its connections and gets no new ones.
//
//   - An API server that is up gets weight 1; one that is draining or kept gets weight 0.
//   - An API server without a verdict keeps its weight, so that a restart changes nothing.
//   - If no API server has weight 1 after that, those that are draining get weight 1.
//   - If none is draining either, lastResort decides.
//   - An alien (wrong identity) is never chosen.
func choose(masters []candidate, last []kernel.Dest, guarded bool) []kernel.Dest {
	dests := byState(masters, last)
	if !serves(dests) {
		for _, c := range masters {
			if c.State == Draining {
				dests[indexDest(dests, c.Addr)].Weight = 1
			}
		}
	}
	if !serves(dests) {
		dests = lastResort(masters, last, guarded)
	}
	slices.SortFunc(dests, func(a, b kernel.Dest) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Weight, b.Weight)) })
	return dests
}

// byState returns the API servers that are up, draining or kept, and those in last without a
// verdict.
func byState(masters []candidate, last []kernel.Dest) []kernel.Dest {
	var dests []kernel.Dest
	for _, c := range masters {
		switch c.State {
		case Up:
			dests = append(dests, dest(c.Addr, 1))
		case Draining:
			dests = append(dests, dest(c.Addr, 0))
		case Down:
			if c.Kept {
				dests = append(dests, dest(c.Addr, 0))
			}
		case Unknown:
			if i := indexDest(last, c.Addr); i >= 0 {
				dests = append(dests, dest(c.Addr, last[i].Weight))
			}
		}
	}
	return dests
}

// lastResort returns the real servers while no API server is up or draining: the slow and kept
// ones, and those in last that are not known to be down. If no API server is slow, those that are
// down stay too. Aliens, and API servers with weight 0 whose draining has ended, do not stay. With
// guarded, API servers that are lost, not listed, or without a verdict get weight 0.
func lastResort(masters []candidate, last []kernel.Dest, guarded bool) []kernel.Dest {
	listed := make(map[netip.AddrPort]candidate, len(masters))
	var dests []kernel.Dest
	for _, c := range masters {
		listed[c.Addr] = c
		switch {
		case c.Slow, c.Kept && !(guarded && c.Lost):
			dests = append(dests, dest(c.Addr, 1))
		case c.Kept:
			dests = append(dests, dest(c.Addr, 0))
		}
	}
	slow, served := slices.ContainsFunc(masters, func(c candidate) bool { return c.Slow }), serves(last)
	for _, d := range last {
		c, ok := listed[d.Addr]
		switch {
		case c.State == Alien || indexDest(dests, d.Addr) >= 0: // an alien, or already chosen
		case served && d.Weight == 0:
			if c.State == Unknown { // it is still draining, and its requests may complete
				dests = append(dests, d)
			}
		case guarded && (!ok || c.Lost || c.State == Unknown):
			dests = append(dests, dest(d.Addr, 0))
		case !slow || c.State != Down:
			dests = append(dests, dest(d.Addr, 1))
		}
	}
	return dests
}

// dest returns an API server as a real server of the virtual server.
func dest(addr netip.AddrPort, weight int) kernel.Dest {
	return kernel.Dest{Addr: addr, Weight: weight, Forward: kernel.Masq}
}

// indexDest returns the index of an API server in dests, or -1.
func indexDest(dests []kernel.Dest, addr netip.AddrPort) int {
	return slices.IndexFunc(dests, func(d kernel.Dest) bool { return d.Addr == addr })
}

// serves reports whether any real server accepts new connections.
func serves(dests []kernel.Dest) bool {
	return slices.ContainsFunc(dests, func(d kernel.Dest) bool { return d.Weight > 0 })
}
