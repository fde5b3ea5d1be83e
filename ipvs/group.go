package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// group keeps one virtual server: it owns the watchers of its masters and
// tells the keeper what should stand behind the virtual address.
type group struct {
	d     *Daemon
	roots atomic.Pointer[roots]

	mu      sync.Mutex
	server  Server
	members map[netip.AddrPort]*member
	names   map[string][]netip.Addr // last good answers of DNS
	last    []netip.AddrPort        // real servers with weight, as they stand

	changed chan struct{}
	renew   chan struct{} // look DNS names up now
	settled chan struct{} // closed when every master had its first verdict
	once    sync.Once

	hostsAt netip.Addr // what the hosts line points to
	wg      sync.WaitGroup
}

// member is one real server's watcher and what is believed of it.
type member struct {
	name   string
	health Health
	skewed bool
	err    string
	renew  chan struct{}
	cancel context.CancelFunc
}

func newGroup(d *Daemon, s Server) *group {
	return &group{d: d, server: s, members: make(map[netip.AddrPort]*member), names: make(map[string][]netip.Addr),
		changed: make(chan struct{}, 1), renew: make(chan struct{}, 1), settled: make(chan struct{})}
}

// run keeps the virtual server until the context ends. The rules stay.
func (g *group) run(ctx context.Context) {
	defer g.wg.Wait()
	vip := g.server.VIP
	if have, err := g.d.keeper.current(ctx, vip); err != nil {
		g.d.logf("%s: %v", vip, err)
	} else if have != nil {
		for _, dest := range have.Dests {
			if dest.Weight > 0 {
				g.last = append(g.last, dest.Addr)
			}
		}
		if len(g.last) > 0 {
			g.d.logf("%s: taking over %v as they stand", vip, g.last)
		}
	}
	g.loadCA()
	g.resolve(ctx)
	g.enlist(ctx)
	resolve := time.NewTimer(jitter(g.server.Profile.Resolve))
	defer resolve.Stop()
	for {
		g.apply(ctx)
		select {
		case <-ctx.Done():
			return
		case <-g.changed:
		case <-g.renew:
			g.resolve(ctx)
			g.enlist(ctx)
		case <-resolve.C:
			resolve.Reset(jitter(g.profile().Resolve))
			if g.resolve(ctx) {
				g.enlist(ctx)
			}
		}
	}
}

func (g *group) profile() Profile {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.server.Profile
}

// update takes a new configuration of the same virtual server.
func (g *group) update(s Server) {
	g.mu.Lock()
	old := g.server
	g.server = s
	rewatch := old.Profile != s.Profile || old.Rise != s.Rise || old.Fall != s.Fall || old.Host != s.Host || !sameProbe(old.Probe, s.Probe)
	if rewatch {
		for a, m := range g.members {
			m.cancel()
			delete(g.members, a)
		}
	}
	g.mu.Unlock()
	g.loadCA()
	poke(g.renew)
}

func sameProbe(a, b Probe) bool {
	return fmt.Sprint(a) == fmt.Sprint(b)
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// loadCA reads the authorities anew. A file that is not one changes nothing.
func (g *group) loadCA() {
	g.mu.Lock()
	file := g.server.Probe.CAFile
	g.mu.Unlock()
	if file == "" {
		return
	}
	r, err := readRoots(file)
	if err != nil {
		if !errors.Is(err, errNoFile) {
			g.d.logf("%s: %v; going on as before", g.server.VIP, err)
		}
		return
	}
	old := g.roots.Swap(r)
	if old != nil && old.pool.Equal(r.pool) {
		return
	}
	if old == nil {
		g.d.logf("%s: verifying masters by %s from now on", g.server.VIP, file)
	} else {
		g.d.logf("%s: %s changed, verifying masters anew", g.server.VIP, file)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		poke(m.renew)
	}
}

// resolve looks DNS names up and reports whether any answer changed. A name
// that cannot be looked up now keeps its last addresses.
func (g *group) resolve(ctx context.Context) bool {
	g.mu.Lock()
	masters := g.server.Masters
	vip := g.server.VIP.Addr()
	g.mu.Unlock()
	changed := false
	for _, m := range masters {
		if _, ok := m.addr(); ok {
			continue
		}
		network := "ip4"
		if vip.Is6() {
			network = "ip6"
		}
		rctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		addrs, err := net.DefaultResolver.LookupNetIP(rctx, network, m.Host)
		cancel()
		var usable []netip.Addr
		for _, a := range addrs {
			if a = a.Unmap(); a != vip && !a.IsLoopback() && !a.IsUnspecified() {
				usable = append(usable, a)
			}
		}
		slices.SortFunc(usable, netip.Addr.Compare)
		usable = slices.Compact(usable)
		g.mu.Lock()
		known := g.names[m.Host]
		if len(usable) > 0 {
			if !slices.Equal(known, usable) {
				changed = true
				g.d.logf("%s: %s is %v", g.server.VIP, m.Host, usable)
			}
			g.names[m.Host] = usable
		} else if err == nil {
			err = fmt.Errorf("no %s address among %v that could be a master's", network, addrs)
		}
		g.mu.Unlock()
		g.d.say("looking up "+m.Host, err)
	}
	return changed
}

// enlist starts watchers for new masters and stops those of old ones.
func (g *group) enlist(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	want := make(map[netip.AddrPort]string)
	for _, m := range g.server.Masters {
		if a, ok := m.addr(); ok {
			want[a] = m.Host
			continue
		}
		for _, a := range g.names[m.Host] {
			want[netip.AddrPortFrom(a, m.Port)] = m.Host
		}
	}
	for a, m := range g.members {
		if want[a] != m.name {
			m.cancel()
			delete(g.members, a)
		}
	}
	for a, name := range want {
		if g.members[a] != nil {
			continue
		}
		mctx, cancel := context.WithCancel(ctx)
		m := &member{name: name, cancel: cancel, renew: make(chan struct{}, 1),
			health: Health{Rise: g.server.Rise, Fall: g.server.Fall, Since: time.Now()}}
		g.members[a] = m
		s := g.server
		w := &watcher{
			profile: s.Profile, fall: s.Fall, renew: m.renew,
			target: func() target {
				sni := s.Host
				if sni == "" {
					sni = certName
				}
				return target{addr: a, name: name, sni: sni, probe: s.Probe, roots: g.roots.Load()}
			},
			observe: func(c Class, err error) (State, bool) { return g.observe(a, m, c, err) },
			count:   func(c counter) { g.d.stats.wire[c].Add(1) },
		}
		g.wg.Go(func() { w.run(mctx) })
	}
	poke(g.changed)
}

// observe takes one outcome of a watcher.
func (g *group) observe(a netip.AddrPort, m *member, c Class, err error) (State, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.members[a] != m { // a watcher that was stopped speaks of the past
		return m.health.State, false
	}
	before := m.health.State
	changed := m.health.Observe(c, time.Now())
	m.err = ""
	if err != nil {
		m.err = err.Error()
	}
	if skewed := c == SkewedOK; skewed != m.skewed {
		m.skewed = skewed
		if skewed {
			g.d.logf("%s: %s", a, c)
		}
	}
	if changed {
		g.d.stats.transitions.Add(1)
		detail := c.String()
		if m.err != "" {
			detail += ": " + m.err
		}
		g.d.logf("%s: master %s is %s, it was %s (%s)", g.server.VIP, a, m.health.State, before, detail)
	}
	if changed || g.unsettled() {
		poke(g.changed)
	}
	return m.health.State, m.health.Doubted()
}

// unsettled closes settled once there is a verdict on every master.
func (g *group) unsettled() bool {
	for _, m := range g.members {
		if m.health.State == Unknown {
			return true
		}
	}
	if len(g.members) > 0 {
		g.once.Do(func() { close(g.settled) })
	}
	return false
}

// apply chooses and has the keeper do it.
func (g *group) apply(ctx context.Context) {
	g.mu.Lock()
	s := g.server
	candidates := make([]Candidate, 0, len(g.members))
	var via []netip.Addr
	for a, m := range g.members {
		candidates = append(candidates, Candidate{a, m.health.State})
		via = append(via, a.Addr())
	}
	slices.SortFunc(candidates, func(a, b Candidate) int { return a.Addr.Compare(b.Addr) })
	slices.SortFunc(via, netip.Addr.Compare)
	dests := Choose(candidates, g.last, s.Forward)
	previous := g.last
	g.last = nil
	for _, dest := range dests {
		if dest.Weight > 0 {
			g.last = append(g.last, dest.Addr)
		}
	}
	last := g.last
	g.mu.Unlock()
	want := Service{VIP: s.VIP, Scheduler: s.Scheduler, Dests: dests}
	if err := g.d.keeper.set(ctx, want, via); err != nil && ctx.Err() == nil {
		g.d.say(s.VIP.String(), err)
	} else {
		g.d.say(s.VIP.String(), nil)
	}
	if !slices.Equal(previous, last) {
		g.d.logf("%s: new connections now go to %v", s.VIP, last)
	}
	g.hosts()
}

// hosts keeps the line of /etc/hosts.
func (g *group) hosts() {
	g.mu.Lock()
	name, addr := g.server.Host, g.server.VIP.Addr()
	g.mu.Unlock()
	if name == "" || g.d.opt.HostsFile == "" {
		return
	}
	changed, err := keepHosts(g.d.opt.HostsFile, name, addr)
	g.d.say("hosts "+name, err)
	if changed {
		g.d.logf("%s: %s now has %s %s", g.server.VIP, g.d.opt.HostsFile, addr, name)
	}
}
