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

// Masters may be given by DNS names. The last good answers count as long as
// there are no better ones, also after a boot without DNS: the certificate
// tells whether an API server is still there.

const (
	// lookupTime bounds one look-up.
	lookupTime = 5 * time.Second
	// A name may have another address each time it is looked up, and the disk
	// may be a card that wears out: of changed answers, storeAtOnce are written
	// as they come, then one in each storePause.
	storeAtOnce = 6
	storePause  = 10 * time.Minute
)

// resolver looks names up, at once, then now and then, when the list changed and
// when a named API server went down. It is beside run, since a look-up may take
// long when the network is just what fails.
func (g *group) resolver(ctx context.Context) {
	for {
		if g.resolve(ctx) {
			g.enlist(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		g.mu.Lock()
		first := !g.list.looked
		g.list.looked = true
		g.mu.Unlock()
		if first {
			poke(g.changed)
		}
		select {
		case <-ctx.Done():
			return
		case <-g.list.lookNow:
		case <-time.After(jitter(g.profile().Resolve)):
		}
	}
}

// resolve looks DNS names up and reports whether any answer changed. A name
// that cannot be looked up now keeps its last addresses.
func (g *group) resolve(ctx context.Context) bool {
	g.mu.Lock()
	masters := g.list.current(g.server.Masters)
	g.mu.Unlock()
	var listed []string
	for _, m := range masters {
		listed = append(listed, m.Host)
	}
	g.d.unsay(g.lookingUp(""), listed...)
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
		g.d.say(g.lookingUp(m.Host), err)
	}
	g.d.say(fmt.Sprintf("%s: answers of DNS", g.vip), g.keepNames())
	return changed
}

// lookingUp is the subject of what is said of looking a name up.
func (g *group) lookingUp(name string) string { return fmt.Sprintf("%s: looking up %s", g.vip, name) }

// keepNames stores the answers for a boot without DNS, if they changed.
func (g *group) keepNames() error {
	g.mu.Lock()
	names := make(map[string][]netip.Addr)
	for _, m := range slices.Concat(g.server.Masters, g.list.learned) {
		if addrs, ok := g.list.names[m.Host]; ok {
			names[m.Host] = addrs
		}
	}
	same := maps.EqualFunc(names, g.list.storedNames, slices.Equal)
	// Each writing takes a pause of its own, up to storeAtOnce at a time.
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

// lookup resolves an API server's name to addresses of the virtual address's
// family, the only ones to which IPVS can map its connections.
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
			return nil, fmt.Errorf("it has the addresses %v only, and the virtual address %s is %s: choose one of the same family", addrs, vip, family)
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

// usable returns those addresses that can be an API server's, sorted, and not
// more than maxPerName of them.
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

// isDNSName reports whether s can be looked up.
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
	return letters // 10.0.0.300 is a slip, not a name
}
