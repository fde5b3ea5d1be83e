package ipvs

import (
	"net/netip"
	"slices"
	"time"
)

// serverList is the list of API servers, either configured or learned from the cluster, and
// the addresses of their names. The group's mutex guards it.
type serverList struct {
	learned []Master // the cluster's own list, in place of the configured one
	// unstored: learned could not be stored. dropped: the disk may have an outdated list.
	unstored, dropped bool
	source            netip.AddrPort // the API server that the list is read from
	noSource          bool           // there was none to read it from
	allDown           bool           // none has been up for allDownAfter: use both lists

	names map[string][]netip.Addr // last good answers of DNS
	// storedNames are the answers on the disk; they may be written again at nextStore.
	storedNames map[string][]netip.Addr
	nextStore   time.Time
	lookedUp    bool // every name was looked up once

	learnNow   chan struct{} // the cluster's list is wanted soon
	resolveNow chan struct{} // names are to be looked up soon
}

func newServerList() serverList {
	return serverList{names: make(map[string][]netip.Addr), learnNow: make(chan struct{}, 1), resolveNow: make(chan struct{}, 1)}
}

// current returns the API servers of the list in use.
func (l *serverList) current(configured []Master) []Master {
	switch {
	case l.learned == nil:
		return configured
	case l.allDown:
		return slices.Concat(l.learned, configured)
	}
	return l.learned
}

// addresses returns the addresses of the API servers in use, each with its name.
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
