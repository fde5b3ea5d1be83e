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
	// Lost: it does not answer, and may return as an API server of another
	// cluster.
	Lost bool
	// Slow: it is down only because its answers are late.
	Slow bool
	// Kept: it is down, and its connections are kept.
	Kept bool
}

// choose returns the real servers of the virtual server, sorted. last are the
// current ones, even if another program added them; guarded means that API
// servers must prove which cluster they belong to. Weight 0 keeps connections
// and accepts no new ones.
//
//   - API servers that are up get weight 1, draining and kept ones weight 0;
//   - one without a verdict keeps its weight, so that a restart changes nothing;
//   - if none of these has weight 1, draining ones get weight 1;
//   - if there are none, lastResort decides;
//   - an alien (wrong identity) is never chosen.
func choose(masters []candidate, last []kernel.Dest, guarded bool) []kernel.Dest {
	dests := byState(masters, last)
	if !serves(dests) {
		for _, m := range masters {
			if m.State == Draining {
				dests[indexDest(dests, m.Addr)].Weight = 1
			}
		}
	}
	if !serves(dests) {
		dests = lastResort(masters, last, guarded)
	}
	slices.SortFunc(dests, func(a, b kernel.Dest) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Weight, b.Weight)) })
	return dests
}

// byState returns the API servers that are up or draining, and those in last
// without a verdict.
func byState(masters []candidate, last []kernel.Dest) []kernel.Dest {
	var dests []kernel.Dest
	for _, m := range masters {
		switch m.State {
		case Up:
			dests = append(dests, dest(m.Addr, 1))
		case Draining:
			dests = append(dests, dest(m.Addr, 0))
		case Down:
			if m.Kept {
				dests = append(dests, dest(m.Addr, 0))
			}
		case Unknown:
			if i := indexDest(last, m.Addr); i >= 0 {
				dests = append(dests, dest(m.Addr, last[i].Weight))
			}
		}
	}
	return dests
}

// lastResort returns the real servers while no API server is up or draining:
// the slow and kept ones, and those in last that are not known to be down. If
// there is no slow one, all of last stay, even if they are not listed any more. An API
// server that may return in another cluster keeps only its connections.
func lastResort(masters []candidate, last []kernel.Dest, guarded bool) []kernel.Dest {
	listed := make(map[netip.AddrPort]candidate, len(masters))
	var dests []kernel.Dest
	for _, m := range masters {
		listed[m.Addr] = m
		if m.Slow || m.Kept && !(guarded && m.Lost) {
			dests = append(dests, dest(m.Addr, 1))
		}
	}
	slow, served := slices.ContainsFunc(masters, func(m candidate) bool { return m.Slow }), serves(last)
	for _, d := range last {
		m, ok := listed[d.Addr]
		switch {
		case m.State == Alien || indexDest(dests, d.Addr) >= 0: // never, or already chosen
		case served && d.Weight == 0:
			if m.State == Unknown { // still draining: without a verdict it may finish
				dests = append(dests, d)
			}
		case guarded && (!ok || m.Lost || m.State == Unknown):
			dests = append(dests, dest(d.Addr, 0))
		case !slow || m.State != Down:
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
