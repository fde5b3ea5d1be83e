package ipvs

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

// group keeps one virtual server: it owns the watchers of its API servers and
// tells the keeper what should stand behind the virtual address.
type group struct {
	d     *Daemon
	vip   netip.AddrPort
	roots atomic.Pointer[probe.Roots]

	mu       sync.Mutex
	server   Server
	list     serverList
	members  map[netip.AddrPort]*member
	stood    []kernel.Dest // what choose is told of before
	hostsAt  netip.Addr    // what the hosts file says
	verdicts bool          // every API server had its first verdict
	// cert is the node's own, certFile what it was read of.
	cert     *tls.Certificate
	certFile []byte

	changed  chan struct{} // something was observed
	renew    chan struct{} // the list of API servers may have changed
	hostsNow chan struct{} // the hosts file may have to change
	judged   chan struct{} // closed when the rules and the hosts file reflect first verdicts
	once     sync.Once
	wg       sync.WaitGroup
}

// member is one real server's watcher and what is believed of it.
type member struct {
	name   string
	health health
	skewed bool
	err    string
	renew  chan struct{}
	cancel context.CancelFunc
	// needed has it asked at once; suspected is when that was last done for connections
	// that wait.
	needed    chan struct{}
	suspected time.Time
	// hidden is since when it shows nothing of its cluster; zero: it does. excused
	// says that it is believed all the same by now.
	hidden  time.Time
	excused bool
}

// darkAfter is how long nobody may be up before API servers of the configured
// list are tried beside those of the learned one.
const darkAfter = time.Minute

func newGroup(d *Daemon, s Server) *group {
	return &group{d: d, vip: s.VIP, server: s, members: make(map[netip.AddrPort]*member), list: newServerList(),
		changed: make(chan struct{}, 1), renew: make(chan struct{}, 1), hostsNow: make(chan struct{}, 1), judged: make(chan struct{})}
}

// run keeps the virtual server until the context ends. The rules stay.
func (g *group) run(ctx context.Context) {
	defer g.wg.Wait()
	g.takeOver(ctx)
	g.mu.Lock()
	fresh := len(g.stood) == 0
	g.mu.Unlock()
	if fresh && g.d.opt.Spread > 0 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(g.d.opt.Spread - time.Since(g.d.started)):
		}
	}
	g.loadCA()
	g.loadLearned()
	g.enlist(ctx)
	g.wg.Go(func() { g.resolver(ctx) })
	g.wg.Go(func() { g.learner(ctx) })
	g.wg.Go(func() { g.listener(ctx) })
	g.wg.Go(func() { g.hostsKeeper(ctx) })
	look := time.NewTicker(darkAfter / 2)
	defer look.Stop()
	lit := time.Now() // when somebody was up last
	for {
		g.apply(ctx)
		select {
		case <-ctx.Done():
			return
		case <-g.changed:
		case <-g.renew:
			g.enlist(ctx)
			poke(g.list.lookNow)
		case <-look.C:
			g.mu.Lock()
			if g.count(Up) > 0 {
				lit = time.Now()
			}
			dark := g.list.learned != nil && time.Since(lit) > darkAfter
			changed := dark != g.list.dark
			g.list.dark = dark
			g.mu.Unlock()
			if changed {
				poke(g.renew)
			}
		}
	}
}

// takeOver learns what stands in the kernel, from an earlier life.
func (g *group) takeOver(ctx context.Context) {
	have, err := g.d.keeper.current(ctx, g.vip)
	if err != nil || have == nil {
		return // the keeper says what is wrong
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	serves := slices.ContainsFunc(have.Dests, func(d kernel.Dest) bool { return d.Weight > 0 })
	// One of weight 0 drains or, where API servers have to show their cluster, is
	// out until it does: it has its connections. Else nobody is left to keep any:
	// an earlier life ended while it removed the last one.
	if serves || g.guarded() {
		g.stood = have.Dests
	}
	switch {
	case serves:
		g.d.logf("%s: taking over %v as they stand", g.vip, g.serving())
	case len(g.stood) > 0:
		g.d.logf("%s: taking over the connections that stand; no API server got new ones", g.vip)
	}
}

func (g *group) profile() Profile {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.server.Profile
}

// sensing is the profile of watchers: without IPVS nothing counts what the node's
// programs send, so that each API server counts as used. g.mu is held.
func (g *group) sensing() Profile {
	p := g.server.Profile
	if g.d.absent.Load() {
		p.Ping = min(p.Ping, time.Second)
	}
	return p
}

// count returns how many API servers are in the state. g.mu is held.
func (g *group) count(s State) int {
	n := 0
	for _, m := range g.members {
		if m.health.State == s {
			n++
		}
	}
	return n
}

// update takes a new configuration of the same virtual server. Watchers start
// anew only if what they do changed; beliefs are kept.
func (g *group) update(s Server) {
	g.mu.Lock()
	old := g.server
	if reflect.DeepEqual(old, s) {
		g.mu.Unlock()
		return
	}
	g.server = s
	if !slices.Equal(old.Masters, s.Masters) || !s.Learn {
		g.list.learned, g.list.dropped = nil, true // a person who writes a list means it
	}
	if s.Learn || g.list.dropped {
		poke(g.list.learnNow)
	}
	if !reflect.DeepEqual(old.Probe, s.Probe) || old.Profile != s.Profile || old.Rise != s.Rise || old.Fall != s.Fall || old.Host != s.Host || old.Joined != s.Joined {
		for _, m := range g.members {
			if m.cancel != nil { // or it was stopped before, and enlist has not come to it yet
				m.cancel()
				m.cancel = nil // enlist starts it again
			}
			m.health.Rise, m.health.Fall = s.Rise, s.Fall
			if old.Joined != s.Joined {
				m.resetHidden() // it showed nothing that fits the former note
			}
		}
	}
	if old.Probe.CAFile != s.Probe.CAFile {
		g.roots.Store(nil)
	}
	g.mu.Unlock()
	g.loadCA()
	poke(g.renew)
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// caFile names the file of authorities, if there is one.
func (g *group) caFile() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.server.Probe.CAFile
}

// loadCA reads the authorities anew. A file that is not one changes nothing.
func (g *group) loadCA() {
	file := g.caFile()
	if file == "" {
		return
	}
	r, err := readRoots(file)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // not yet, or about to be replaced
	}
	if err != nil {
		err = fmt.Errorf("%w; keeping the previous authorities", err)
	}
	g.d.say(g.vip.String()+": authorities", err)
	if r == nil {
		return
	}
	old := g.roots.Swap(r)
	if old != nil && old.Pool.Equal(r.Pool) {
		return
	}
	if old == nil {
		g.d.logf("%s: verifying API servers with %s", g.vip, file)
	} else {
		g.d.logf("%s: %s changed, verifying API servers again", g.vip, file)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		poke(m.renew)
	}
	g.askAgain()
}

// target is how an API server is dialled. g.mu is held.
func (g *group) target(a netip.AddrPort, name string) probe.Target {
	sni := g.server.Host
	if sni == "" {
		sni = probe.CertName
	}
	t := probe.Target{Addr: a, Name: name, SNI: sni, Probe: g.server.Probe, Roots: g.roots.Load()}
	if t.Roots != nil && !t.Probe.Plain {
		t.Client = g.client()
	}
	return t
}

// client is the node's certificate, nil until it has joined. With it a
// kube-apiserver lets the connection stand; without, it hangs up after every
// answer (its mitigation of CVE-2023-44487). g.mu is held.
func (g *group) client() *tls.Certificate {
	file := g.d.opt.ClientCert
	if file == "" {
		file = kubeletCert
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	if g.cert != nil && bytes.Equal(data, g.certFile) {
		return g.cert
	}
	cert, err := tls.X509KeyPair(data, data)
	if err != nil {
		return g.cert // kubelet is just exchanging it
	}
	g.cert, g.certFile = &cert, data
	return g.cert
}

// enlist starts watchers for new API servers and stops those of old ones.
func (g *group) enlist(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	want := g.list.addresses(g.server.Masters)
	for a, m := range g.members {
		if want[a] != m.name {
			if m.cancel != nil {
				m.cancel()
			}
			delete(g.members, a)
		}
	}
	for a, name := range want {
		m := g.members[a]
		if m == nil {
			m = &member{name: name, renew: make(chan struct{}, 1), needed: make(chan struct{}, 1),
				health: health{Rise: g.server.Rise, Fall: g.server.Fall, Since: time.Now()}}
			g.members[a] = m
		}
		if m.cancel != nil {
			continue
		}
		mctx, cancel := context.WithCancel(ctx)
		m.cancel = cancel
		w := &watcher{
			profile: g.sensing(), fall: g.server.Fall, renew: m.renew, needed: m.needed, slots: g.d.slots, beat: g.d.keeper.beat,
			target: func() probe.Target {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.target(a, name)
			},
			observe: func(c probe.Outcome, err error) (State, bool) { return g.observe(mctx, a, m, c, err) },
			vouch:   func(ctx context.Context) (probe.Outcome, error) { return g.vouch(ctx, a, m) },
			count:   func(c counter) { g.d.stats.wire[c].Add(1) },
			alone: func() bool {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.count(Up) == 0
			},
		}
		g.wg.Go(func() { w.run(mctx) })
	}
	poke(g.changed)
}

// observe takes one outcome of a watcher.
func (g *group) observe(ctx context.Context, a netip.AddrPort, m *member, c probe.Outcome, err error) (State, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ctx.Err() != nil { // a watcher that was stopped speaks of the past
		return m.health.State, false
	}
	before, wasLost, wasSlow := m.health.State, m.lost(), m.health.slow()
	changed := m.health.observe(c, time.Now())
	m.err = ""
	if err != nil {
		m.err = err.Error()
	}
	if skewed := c == probe.SkewedOK; skewed != m.skewed {
		m.skewed = skewed
		if skewed && !changed { // or the line below says it
			g.d.logf("%s: API server %s: %s", g.vip, a, c)
		}
	}
	if g.guarded() && m.lost() != wasLost || m.health.slow() != wasSlow {
		poke(g.changed)
	}
	if changed {
		g.d.stats.transitions.Add(1)
		detail := c.String()
		if m.err != "" {
			detail += ": " + m.err
		}
		g.d.logf("%s: API server %s is %s, it was %s (%s)", g.vip, a, m.health.State, before, detail)
		poke(g.changed)
		if m.health.State == Up {
			g.askAgain()
		}
		if named := m.name != a.Addr().String(); named && before == Up {
			poke(g.list.lookNow) // its name may be somewhere else by now
		}
	}
	return m.health.State, m.health.probeSoon()
}

// apply chooses and has the keeper do it.
func (g *group) apply(ctx context.Context) {
	g.mu.Lock()
	s := g.server
	candidates := make([]candidate, 0, len(g.members))
	via := make([]netip.Addr, 0, len(g.members))
	for a, m := range g.members {
		candidates = append(candidates, candidate{a, m.health.State, m.lost(), m.health.slow()})
		via = append(via, a.Addr())
	}
	judged := g.list.looked && len(candidates) > 0 && g.count(Unknown) == 0
	slices.SortFunc(candidates, func(a, b candidate) int { return a.Addr.Compare(b.Addr) })
	slices.SortFunc(via, netip.Addr.Compare)
	dests := choose(candidates, g.stood, g.guarded())
	previous := g.serving()
	if g.stood = dests; len(g.serving()) > 0 { // else whoever keeps its connections keeps its place
		g.stood = slices.DeleteFunc(slices.Clone(dests), func(d kernel.Dest) bool {
			m := g.members[d.Addr]
			return d.Weight == 0 && m != nil && m.health.State != Unknown // or nobody knows whether it still drains
		})
	}
	last := g.serving()
	g.mu.Unlock()
	want := kernel.Service{VIP: s.VIP, Scheduler: s.Scheduler, Dests: dests}
	err := g.d.keeper.set(ctx, want, routeSource{masters: via, source: s.Source})
	if ctx.Err() != nil {
		return
	}
	g.d.say(s.VIP.String(), err)
	if !slices.Equal(previous, last) {
		if len(last) == 0 {
			g.d.logf("%s: no API server is available for new connections", s.VIP)
		} else {
			g.d.logf("%s: new connections go to %v", s.VIP, last)
		}
	}
	if judged {
		g.mu.Lock()
		g.verdicts = true
		g.mu.Unlock()
	}
	poke(g.hostsNow)
}

// hostsKeeper keeps the hosts file, with what is wanted whenever it comes to it.
// It is beside run: another program may hold the lock on the file, and a disk may
// be slow, while API servers die.
func (g *group) hostsKeeper(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.hostsNow:
		}
		g.mu.Lock()
		judged := g.verdicts
		g.mu.Unlock()
		g.hosts(ctx)
		if judged {
			g.once.Do(func() { close(g.judged) })
		}
	}
}

// hosts keeps the line of the hosts file: the virtual address, or without
// IP_VS a healthy API server's. Then it removes the lines of former names.
func (g *group) hosts(ctx context.Context) {
	g.mu.Lock()
	s, old := g.server, g.hostsAt
	at := g.vip.Addr()
	if g.d.absent.Load() {
		at = g.fallback(old)
	}
	g.hostsAt = at
	var gone netip.AddrPort
	if g.d.absent.Load() && old.IsValid() && old != at {
		a := netip.AddrPortFrom(old, g.vip.Port())
		if m := g.members[a]; m == nil || m.health.State == Down && at != g.vip.Addr() || m.health.State == Alien {
			gone = a
		}
	}
	g.mu.Unlock()
	if g.d.opt.HostsFile == "" {
		return
	}
	if err := g.keepLine(ctx, s, at); ctx.Err() == nil {
		g.d.say(fmt.Sprintf("%s: %s", g.vip, g.d.opt.HostsFile), err)
	}
	if gone.IsValid() && s.Host != "" && at.IsValid() {
		g.d.say(fmt.Sprintf("%s: closing connections to %s", g.vip, gone), g.d.keeper.sever(ctx, gone))
	}
}

// keepLine writes the line of the hosts file, if there is to be one, and leaves no
// line of a former name.
func (g *group) keepLine(ctx context.Context, s Server, at netip.Addr) error {
	if s.Host != "" && at.IsValid() {
		if err := g.d.note(s); err != nil {
			return err
		}
		changed, err := keepHosts(ctx, g.d.opt.HostsFile, g.d.opt.RunDir, lineFor(s.Host, at))
		if err != nil {
			return err
		}
		if changed {
			g.d.logf("%s: %s says %s %s", g.vip, g.d.opt.HostsFile, at, s.Host)
		}
	}
	return g.d.removeFormer(ctx, g.vip, s.Host)
}

// serving are the API servers that new connections go to.
func (g *group) serving() []netip.AddrPort {
	var all []netip.AddrPort
	for _, d := range g.stood {
		if d.Weight > 0 {
			all = append(all, d.Addr)
		}
	}
	return all
}

// fallback picks the API server that the hosts file is to name, and keeps to
// it while it serves. g.mu is held.
func (g *group) fallback(present netip.Addr) netip.Addr {
	var usable []netip.Addr
	for _, a := range g.serving() {
		if a.Port() == g.vip.Port() { // a hosts file cannot change ports
			usable = append(usable, a.Addr())
		}
	}
	if len(usable) == 0 && present.IsValid() && g.guarded() {
		return g.vip.Addr() // where nobody answers
	}
	if slices.Contains(usable, present) || len(usable) == 0 {
		return present
	}
	// Nodes spread over the API servers.
	return usable[rand.IntN(len(usable))]
}
