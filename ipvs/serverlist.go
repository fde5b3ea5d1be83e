package ipvs

import (
	"net/netip"
	"slices"
	"time"
)

// serverList is which API servers there are: the configured ones or those that the
// cluster lists itself, and the addresses of their names. The group's mutex guards it.
type serverList struct {
	learned []Master // the cluster's own list, in place of the configured one
	// unstored: learned is not on the disk, as it should be. dropped: the disk may have
	// a list that no longer counts.
	unstored, dropped bool
	teacher           netip.AddrPort // the API server that the list is read from
	unasked           bool           // nobody could be asked for it
	dark              bool           // nobody is up for long: try every API server ever named

	names map[string][]netip.Addr // last good answers of DNS
	// storedNames are the answers as they are on the disk; the next ones may be written
	// at nextStore.
	storedNames map[string][]netip.Addr
	nextStore   time.Time
	looked      bool // every name was looked up once

	learnNow chan struct{} // the cluster's list is wanted soon
	lookNow  chan struct{} // names are to be looked up soon
}

func newServerList() serverList {
	return serverList{names: make(map[string][]netip.Addr), learnNow: make(chan struct{}, 1), lookNow: make(chan struct{}, 1)}
}

// current returns the API servers that count now.
func (l *serverList) current(configured []Master) []Master {
	switch {
	case l.learned == nil:
		return configured
	case l.dark:
		return slices.Concat(l.learned, configured)
	}
	return l.learned
}

// addresses are those of the API servers that count now, with the name of each.
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
