package ipvs

import (
	"net/netip"
	"slices"
	"time"
)

// serverList is the list of API servers, configured or learned from the cluster, with the addresses
// of their names. The group's mutex protects it.
type serverList struct {
	learned []Master // the cluster's own list, which replaces the configured one
	// unstored is set if learned could not be stored. dropped is set if the list on disk may be
	// outdated.
	unstored, dropped bool
	source            netip.AddrPort // the API server from which the list is read
	noSource          bool           // there was no API server to read it from
	allDown           bool           // no learned one has been up for allDownAfter: use both lists

	names map[string][]netip.Addr // last good DNS answers
	// storedNames are the answers on disk. They are replaced at nextStore or later; see keepNames.
	storedNames map[string][]netip.Addr
	nextStore   time.Time
	lookedUp    bool // every name has been looked up at least once

	learnNow   chan struct{} // triggers reading the cluster's list
	resolveNow chan struct{} // triggers lookups of the names
}

func newServerList() serverList {
	return serverList{names: make(map[string][]netip.Addr), learnNow: make(chan struct{}, 1), resolveNow: make(chan struct{}, 1)}
}

// current returns the list in use.
func (l *serverList) current(configured []Master) []Master {
	switch {
	case l.learned == nil:
		return configured
	case l.allDown:
		return slices.Concat(l.learned, configured)
	}
	return l.learned
}

// addresses returns the addresses of the API servers in use, each with its
// name.
func (l *serverList) addresses(configured []Master) map[netip.AddrPort]string {
	all := make(map[netip.AddrPort]string)
	for _, m := range l.current(configured) {
		if a, ok := m.addr(); ok {
			all[a] = m.Host
			continue
		}
		for _, a := range l.names[m.Host] {
			all[netip.AddrPortFrom(a, m.Port)] = m.Host
		}
	}
	return all
}
