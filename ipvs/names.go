package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ondisk"
)

// Masters may be DNS names. The last good answers are used until there are new ones, even after a
// boot without DNS. That is safe, because an API server must prove its identity with its
// certificate.

const (
	// lookupTime is the timeout of a lookup.
	lookupTime = 5 * time.Second
	// DNS answers may change at each lookup, and the disk may be an SD card that wears out.
	// Therefore the first storeAtOnce changes are stored at once, and later ones at most once per
	// storePause.
	storeAtOnce = 6
	storePause  = 10 * time.Minute
)

// resolver resolves names at the start, periodically, when the list changes, and when an API server
// that has a name goes down. It runs in its own goroutine, because a lookup may take long.
func (g *group) resolver(ctx context.Context) {
	for {
		if g.resolve(ctx) {
			g.updateWatchers(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		g.mu.Lock()
		first := !g.list.lookedUp
		g.list.lookedUp = true
		g.mu.Unlock()
		if first {
			wake(g.changed)
		}
		select {
		case <-ctx.Done():
			return
		case <-g.list.resolveNow:
		case <-time.After(jitter(g.config().Profile.Resolve)):
		}
	}
}

// resolve resolves the names and reports whether any answer changed. If a
// lookup fails, the name keeps its addresses.
func (g *group) resolve(ctx context.Context) bool {
	g.mu.Lock()
	masters := g.list.current(g.server.Masters)
	g.mu.Unlock()
	var listed []string
	for _, m := range masters {
		listed = append(listed, m.Host)
	}
	g.d.forgetLogged(g.lookingUp(""), listed...)
	changed := false
	for _, m := range masters {
		if _, ok := m.addr(); ok {
			continue
		}
		addrs, err := g.d.lookup(ctx, g.vip.Addr(), m.Host)
		g.mu.Lock()
		last := g.list.names[m.Host]
		if err == nil {
			g.list.names[m.Host] = addrs
		}
		g.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			return changed
		case err != nil && len(last) > 0:
			err = fmt.Errorf("%w; keeping its last addresses %v", err, last)
		case err == nil && !slices.Equal(last, addrs):
			changed = true
			g.d.logf("%s: %s is %v", g.vip, m.Host, addrs)
		}
		g.d.logChange(g.lookingUp(m.Host), err)
	}
	g.d.logChange(fmt.Sprintf("%s: storing the answers of DNS", g.vip), g.keepNames())
	return changed
}

// lookingUp returns the subject of log lines about a name's lookup.
func (g *group) lookingUp(name string) string { return fmt.Sprintf("%s: looking up %s", g.vip, name) }

// keepNames stores changed answers on disk, for a boot without DNS.
func (g *group) keepNames() error {
	g.mu.Lock()
	names := make(map[string][]netip.Addr)
	for _, m := range slices.Concat(g.server.Masters, g.list.learned) {
		if addrs, ok := g.list.names[m.Host]; ok {
			names[m.Host] = addrs
		}
	}
	same := maps.EqualFunc(names, g.list.storedNames, slices.Equal)
	// A token bucket of storeAtOnce writes, refilled with one write per
	// storePause.
	next := g.list.nextStore
	if earliest := time.Now().Add(-(storeAtOnce - 1) * storePause); next.Before(earliest) {
		next = earliest
	}
	g.mu.Unlock()
	if same || next.After(time.Now()) {
		return nil
	}
	if err := g.d.storeLearned(g.vip, func(s *ondisk.IPVSLearnedVirtual) { s.Names = names }); err != nil {
		return err
	}
	g.mu.Lock()
	g.list.storedNames, g.list.nextStore = names, next.Add(storePause)
	g.mu.Unlock()
	return nil
}

// lookup resolves an API server's name to addresses of the same family as the virtual address,
// because IPVS cannot forward between families.
func (d *Daemon) lookup(ctx context.Context, vip netip.Addr, name string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	network, family, other := "ip4", "IPv4", "ip6"
	if vip.Is6() {
		network, family, other = "ip6", "IPv6", "ip4"
	}
	find := d.opt.Lookup
	if find == nil {
		find = net.DefaultResolver.LookupNetIP
	}
	addrs, err := find(ctx, network, name)
	var dns *net.DNSError
	if errors.As(err, &dns) && dns.IsNotFound {
		if addrs, oerr := find(ctx, other, name); oerr == nil && len(addrs) > 0 {
			return nil, fmt.Errorf("it resolves only to %v, but the virtual address %s is %s: choose a virtual address of the same family", addrs, vip, family)
		}
	}
	if err != nil {
		return nil, err
	}
	good := usable(vip, addrs)
	if len(good) == 0 {
		return nil, fmt.Errorf("its addresses are %v, none of which can be an API server", addrs)
	}
	return good, nil
}

// usable returns the addresses that may be an API server's: at most maxPerName, sorted.
func usable(vip netip.Addr, addrs []netip.Addr) []netip.Addr {
	var good []netip.Addr
	for _, a := range addrs {
		a = a.Unmap()
		if a.IsValid() && a.Zone() == "" && a.Is6() == vip.Is6() && a != vip && !a.IsLoopback() && !a.IsUnspecified() && !a.IsMulticast() {
			good = append(good, a)
		}
	}
	slices.SortFunc(good, netip.Addr.Compare)
	good = slices.Compact(good)
	return good[:min(len(good), maxPerName)]
}

// isDNSName reports whether s is a valid DNS name.
func isDNSName(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	letters := false
	for label := range strings.SplitSeq(strings.TrimSuffix(s, "."), ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range label {
			switch {
			case c >= 'a' && c <= 'z' || c == '-' || c == '_':
				letters = true
			case c >= '0' && c <= '9':
			default:
				return false
			}
		}
	}
	return letters // a name without letters, such as 10.0.0.300, is not valid
}
