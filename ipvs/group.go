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

	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

// group maintains one virtual server. It runs a watcher for each API server, and passes the desired
// real servers to the reconciler.
type group struct {
	d     *Daemon
	vip   netip.AddrPort
	roots atomic.Pointer[probe.Roots]

	mu sync.Mutex
	// awaitsCA is set while no CA is known although there must be one: the file cannot be read, or
	// the node has joined and has no file. Then no watcher starts, since it would accept any server.
	awaitsCA   bool
	server     Server
	list       serverList
	apiServers map[netip.AddrPort]*apiServer
	lastDests  []kernel.Dest // the previous real servers, for choose
	hostsAddr  netip.Addr    // address in the hosts file
	allJudged  bool          // every API server has had its first verdict
	// cert is the node's own certificate, certFile the content of its file; certMu guards them.
	certMu   sync.Mutex
	cert     *tls.Certificate
	certFile []byte

	changed      chan struct{} // triggers apply
	renew        chan struct{} // triggers updateWatchers: the list of API servers may have changed
	hostsChanged chan struct{} // triggers hosts: the hosts file may have to change
	judged       chan struct{} // closed when the rules and the hosts file reflect the first verdicts
	once         sync.Once
	wg           sync.WaitGroup
}

// apiServer is one API server of a group: its watcher and its state.
type apiServer struct {
	name   string
	health health
	skewed bool
	err    string
	renew  chan struct{}
	cancel context.CancelFunc
	// probeNow triggers a probe. suspectedAt is the time at which suspect last triggered one.
	probeNow    chan struct{}
	suspectedAt time.Time
	sessions    probe.Sessions
	// hiddenSince is when the API server first failed to show its cluster; zero if it has shown it.
	// trustedAnyway is set once it is trusted because maxHidden has passed.
	hiddenSince   time.Time
	trustedAnyway bool
}

// allDownAfter is the time without any learned API server up after which the configured ones are
// tried too.
const allDownAfter = time.Minute

func newGroup(d *Daemon, s Server) *group {
	return &group{d: d, vip: s.VIP, server: s, apiServers: make(map[netip.AddrPort]*apiServer), list: newServerList(),
		changed: make(chan struct{}, 1), renew: make(chan struct{}, 1), hostsChanged: make(chan struct{}, 1), judged: make(chan struct{})}
}

// run maintains the virtual server until the context ends, and then leaves the rules in place.
func (g *group) run(ctx context.Context) {
	defer g.wg.Wait()
	g.takeOver(ctx)
	g.mu.Lock()
	fresh := len(g.lastDests) == 0
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
	g.updateWatchers(ctx)
	g.wg.Go(func() { g.resolver(ctx) })
	g.wg.Go(func() { g.learner(ctx) })
	g.wg.Go(func() { g.socketWatcher(ctx) })
	g.wg.Go(func() { g.reconcileHosts(ctx) })
	look := time.NewTicker(allDownAfter / 2)
	defer look.Stop()
	lastUp := time.Now() // when an API server was last up
	for {
		g.apply(ctx)
		select {
		case <-ctx.Done():
			return
		case <-g.changed:
		case <-g.renew:
			g.updateWatchers(ctx)
			wake(g.list.resolveNow)
		case <-look.C:
			g.mu.Lock()
			changed := g.checkLearned(&lastUp, time.Now())
			g.mu.Unlock()
			if changed {
				wake(g.renew)
			}
		}
	}
}

// takeOver reads the real servers that an earlier process left in the kernel.
func (g *group) takeOver(ctx context.Context) {
	have, err := g.d.reconciler.current(ctx, g.vip)
	for err != nil && !errors.Is(err, kernel.ErrNoIPVS) {
		// Without the real servers in the kernel, the next apply could replace them by none.
		g.d.logChange(g.vip.String()+": reading the real servers of an earlier process", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(keepTick):
		}
		have, err = g.d.reconciler.current(ctx, g.vip)
	}
	g.d.logChange(g.vip.String()+": reading the real servers of an earlier process", nil)
	if err != nil || have == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	served := serves(have.Dests)
	// A real server of weight 0 keeps its connections: it drains, or has not shown its cluster. But
	// if all have weight 0 and the group is not guarded, the earlier process ended while it removed
	// the virtual server's last real server.
	if served || g.guarded() {
		g.lastDests = have.Dests
	}
	switch {
	case served:
		g.d.logf("%s: taking over the existing API servers %v", g.vip, g.serving())
	case len(g.lastDests) > 0:
		g.d.logf("%s: taking over existing connections; no API server accepted new ones", g.vip)
	}
}

// config returns the present configuration.
func (g *group) config() Server {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.server
}

// watcherProfile returns the profile of watchers. Without IPVS the packets of the node's programs
// cannot be counted, so each API server is probed as if programs used it. g.mu must be held.
func (g *group) watcherProfile() Profile {
	p := g.server.Profile
	if g.d.absent.Load() {
		p.Ping = min(p.Ping, time.Second)
	}
	return p
}

// count returns the number of API servers in a state. g.mu must be held.
func (g *group) count(s State) int {
	n := 0
	for _, srv := range g.apiServers {
		if srv.health.State == s {
			n++
		}
	}
	return n
}

// update applies a new configuration of the same virtual server. It keeps the states, and restarts
// watchers only if the configuration of probes changed.
func (g *group) update(s Server) {
	g.mu.Lock()
	old := g.server
	if reflect.DeepEqual(old, s) {
		g.mu.Unlock()
		return
	}
	g.server = s
	if !slices.Equal(old.Masters, s.Masters) || !s.Learn {
		g.list.learned, g.list.dropped = nil, true // a newly configured list takes precedence
	}
	if s.Learn || g.list.dropped {
		wake(g.list.learnNow)
	}
	if !reflect.DeepEqual(old.Probe, s.Probe) || old.Profile != s.Profile || old.Rise != s.Rise || old.Fall != s.Fall || old.Host != s.Host || old.Joined != s.Joined {
		for _, srv := range g.apiServers {
			if srv.cancel != nil { // nil: updateWatchers has not restarted it yet
				srv.cancel()
				srv.cancel = nil // updateWatchers starts it again
			}
			srv.health.Rise, srv.health.Fall = s.Rise, s.Fall
			if old.Joined != s.Joined {
				srv.resetHidden() // hiddenSince was measured for the old cluster
			}
		}
	}
	if old.Probe.CAFile != s.Probe.CAFile {
		g.roots.Store(nil)
		g.awaitsCA = true // until loadCA, below
	}
	g.mu.Unlock()
	g.loadCA()
	wake(g.renew)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// loadCA reads the CA file. If that fails, the previous certificates stay in use. Without any, the
// real servers stay as they are while awaitsCA is set: follow reads the file again when it changes.
func (g *group) loadCA() {
	var r, old *probe.Roots
	var err error
	file := g.config().Probe.CAFile
	if file != "" {
		r, err = readRoots(file)
	}
	if r != nil {
		old = g.roots.Swap(r)
	}
	g.mu.Lock()
	if errors.Is(err, fs.ErrNotExist) && (g.roots.Load() != nil || !g.guarded()) {
		err = nil // not written yet, or being replaced
	}
	awaited := g.awaitsCA
	g.awaitsCA = err != nil && g.roots.Load() == nil && !g.server.Probe.Unsafe && !g.server.Probe.Plain
	switch {
	case g.awaitsCA:
		err = fmt.Errorf("%w; probing no API server until it can be read", err)
	case err != nil:
		err = fmt.Errorf("%w; keeping the previous CA certificates", err)
	}
	if awaited && !g.awaitsCA {
		wake(g.renew)
	}
	g.mu.Unlock()
	g.d.logChange(g.vip.String()+": authorities", err)
	if r == nil || old != nil && old.Pool.Equal(r.Pool) {
		return
	}
	if old == nil {
		g.d.logf("%s: verifying API servers with %s", g.vip, file)
	} else {
		g.d.logf("%s: %s changed, verifying API servers again", g.vip, file)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, srv := range g.apiServers {
		wake(srv.renew)
	}
	g.retryLearning()
}

// target returns the probe's target for an API server. g.mu must not be held, since target may read
// the node's certificate from the disk.
func (g *group) target(a netip.AddrPort, name string) probe.Target {
	t := g.bareTarget(a, name)
	if t.Roots != nil && !t.Probe.Plain {
		t.Client, _ = g.client() // nil before the node has joined
	}
	return t
}

// bareTarget is target without the node's certificate.
func (g *group) bareTarget(a netip.AddrPort, name string) probe.Target {
	g.mu.Lock()
	defer g.mu.Unlock()
	sni := g.server.Host
	if sni == "" {
		sni = probe.CertName
	}
	t := probe.Target{Addr: a, Name: name, SNI: sni, Probe: g.server.Probe, Roots: g.roots.Load()}
	if srv := g.apiServers[a]; srv != nil {
		t.Sessions = &srv.sessions
	}
	return t
}

// client returns the node's certificate. Before the node has joined, the error is fs.ErrNotExist.
// For a damaged file, client returns the previous certificate and an error. Without a certificate,
// kube-apiserver closes the connection after each answer (its mitigation of CVE-2023-44487).
func (g *group) client() (*tls.Certificate, error) {
	file := g.d.opt.ClientCert
	if file == "" {
		file = kubeletCert
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	g.certMu.Lock()
	defer g.certMu.Unlock()
	if g.cert != nil && bytes.Equal(data, g.certFile) {
		return g.cert, nil
	}
	cert, err := tls.X509KeyPair(data, data)
	if err != nil {
		return g.cert, err // kubelet may be replacing it
	}
	g.cert, g.certFile = &cert, data
	return g.cert, nil
}

// updateWatchers starts watchers for new API servers and stops those of removed ones.
func (g *group) updateWatchers(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	want := g.list.addresses(g.server.Masters)
	for a, srv := range g.apiServers {
		if want[a] != srv.name {
			if srv.cancel != nil {
				srv.cancel()
			}
			delete(g.apiServers, a)
		}
	}
	for a, name := range want {
		srv := g.apiServers[a]
		if srv == nil {
			srv = &apiServer{name: name, renew: make(chan struct{}, 1), probeNow: make(chan struct{}, 1),
				health: health{Rise: g.server.Rise, Fall: g.server.Fall, Since: time.Now()}}
			g.apiServers[a] = srv
		}
		if srv.cancel != nil || g.awaitsCA {
			continue
		}
		watching, cancel := context.WithCancel(ctx)
		srv.cancel = cancel
		w := &watcher{
			profile: g.watcherProfile(), fall: g.server.Fall, renew: srv.renew, probeNow: srv.probeNow, slots: g.d.slots, ticks: g.d.reconciler.ticks,
			target:       func() probe.Target { return g.target(a, name) },
			observe:      func(outcome probe.Outcome, err error) (State, bool) { return g.observe(watching, a, srv, outcome, err) },
			clusterCheck: func(ctx context.Context) (probe.Outcome, error) { return g.checkCluster(ctx, a, srv) },
			count:        func(c counter) { g.d.stats.wire[c].Add(1) },
			alone: func() bool {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.count(Up) == 0
			},
		}
		g.wg.Go(func() { w.run(watching) })
	}
	wake(g.changed)
}

// observe records one outcome of a watcher, and returns the new state and
// whether to probe again soon.
func (g *group) observe(ctx context.Context, a netip.AddrPort, srv *apiServer, outcome probe.Outcome, err error) (State, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ctx.Err() != nil { // the watcher was stopped
		return srv.health.State, false
	}
	before, wasLost, wasSlow, answered := srv.health.State, srv.lost(), srv.health.slow(), srv.health.answering
	changed := srv.health.observe(outcome, time.Now())
	srv.err = ""
	if err != nil {
		srv.err = err.Error()
	}
	if skewed := outcome == probe.SkewedOK; skewed != srv.skewed {
		srv.skewed = skewed
		if skewed && !changed { // otherwise the line below contains it
			g.d.logf("%s: API server %s: %s", g.vip, a, outcome)
		}
	}
	if g.guarded() && srv.lost() != wasLost || srv.health.slow() != wasSlow || srv.health.answering != answered {
		wake(g.changed)
	}
	if srv.health.answering && !answered {
		time.AfterFunc(time.Until(srv.health.closeAt), func() { wake(g.changed) })
	}
	if changed {
		g.d.stats.transitions.Add(1)
		detail := outcome.String()
		if srv.err != "" {
			detail += ": " + srv.err
		}
		g.d.logf("%s: API server %s is %s, it was %s (%s)", g.vip, a, srv.health.State, before, detail)
		wake(g.changed)
		if srv.health.State == Up {
			g.retryLearning()
		}
		if named := srv.name != a.Addr().String(); named && before == Up {
			wake(g.list.resolveNow) // the API server's name may have another address now
		}
	}
	return srv.health.State, srv.health.probeSoon()
}

// apply chooses the real servers and passes them to the reconciler.
func (g *group) apply(ctx context.Context) {
	g.mu.Lock()
	s := g.server
	now, alone := time.Now(), g.count(Up) == 0
	candidates := make([]candidate, 0, len(g.apiServers))
	via := make([]netip.Addr, 0, len(g.apiServers))
	for a, srv := range g.apiServers {
		candidates = append(candidates, candidate{a, srv.health.State, srv.lost(), srv.health.slow(), srv.health.keeps(now, alone)})
		via = append(via, a.Addr())
	}
	judged := g.list.lookedUp && len(candidates) > 0 && g.count(Unknown) == 0
	slices.SortFunc(candidates, func(a, b candidate) int { return a.Addr.Compare(b.Addr) })
	slices.SortFunc(via, netip.Addr.Compare)
	dests := choose(candidates, g.lastDests, g.guarded())
	previous := g.serving()
	if g.lastDests = dests; len(g.serving()) > 0 { // if no API server serves, all stay listed
		g.lastDests = slices.DeleteFunc(slices.Clone(dests), func(d kernel.Dest) bool {
			srv := g.apiServers[d.Addr]
			return d.Weight == 0 && srv != nil && srv.health.State != Unknown // one without a verdict may still be draining
		})
	}
	last := g.serving()
	g.mu.Unlock()
	want := kernel.Service{VIP: s.VIP, Scheduler: s.Scheduler, Dests: dests}
	err := g.d.reconciler.set(ctx, want, routeSource{masters: via, source: s.Source})
	if ctx.Err() != nil {
		return
	}
	g.d.logChange(s.VIP.String(), err)
	if !slices.Equal(previous, last) {
		if len(last) == 0 {
			g.d.logf("%s: no API server is available for new connections", s.VIP)
		} else {
			g.d.logf("%s: new connections go to %v", s.VIP, last)
		}
	}
	if judged {
		g.mu.Lock()
		g.allJudged = true
		g.mu.Unlock()
	}
	wake(g.hostsChanged)
}

// reconcileHosts maintains the hosts file. It is a separate goroutine, so that a
// lock held by another program, or a slow disk, does not delay run.
func (g *group) reconcileHosts(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.hostsChanged:
		}
		g.mu.Lock()
		judged := g.allJudged
		g.mu.Unlock()
		g.hosts(ctx)
		if judged {
			g.once.Do(func() { close(g.judged) })
		}
	}
}

// hosts writes the name's line in the hosts file and removes the lines of former names. The line
// has the virtual address or, without IPVS, the address of a healthy API server.
func (g *group) hosts(ctx context.Context) {
	g.mu.Lock()
	s, old := g.server, g.hostsAddr
	at := g.vip.Addr()
	if g.d.absent.Load() {
		at = g.fallback(old)
	}
	g.hostsAddr = at
	var gone netip.AddrPort
	if g.d.absent.Load() && old.IsValid() && old != at {
		a := netip.AddrPortFrom(old, g.vip.Port())
		if srv := g.apiServers[a]; srv == nil || srv.health.State == Down && at != g.vip.Addr() || srv.health.State == Alien {
			gone = a
		}
	}
	g.mu.Unlock()
	if g.d.opt.HostsFile == "" {
		return
	}
	if err := g.keepLine(ctx, s, at); ctx.Err() == nil {
		g.d.logChange(fmt.Sprintf("%s: %s", g.vip, g.d.opt.HostsFile), err)
	}
	if gone.IsValid() && s.Host != "" && at.IsValid() {
		g.d.logChange(fmt.Sprintf("%s: closing connections to %s", g.vip, gone), g.d.reconciler.sever(ctx, gone))
	}
}

// keepLine writes the line in the hosts file if the virtual server has a name,
// and removes the lines of former names.
func (g *group) keepLine(ctx context.Context, s Server, at netip.Addr) error {
	if s.Host != "" && at.IsValid() {
		if err := g.d.addNote(s); err != nil {
			return err
		}
		changed, err := files.KeepHosts(ctx, g.d.opt.HostsFile, g.d.opt.RunDir, files.LineFor(s.Host, at))
		if err != nil {
			return err
		}
		if changed {
			g.d.logf("%s: %s now has the line %s %s", g.vip, g.d.opt.HostsFile, at, s.Host)
		}
	}
	return g.d.removeFormer(ctx, g.vip, s.Host)
}

// serving returns the API servers that accept new connections.
func (g *group) serving() []netip.AddrPort {
	var all []netip.AddrPort
	for _, d := range g.lastDests {
		if d.Weight > 0 {
			all = append(all, d.Addr)
		}
	}
	return all
}

// fallback returns the address for the hosts file if the kernel has no IPVS. It keeps the current
// address while that API server accepts connections. g.mu must be held.
func (g *group) fallback(present netip.Addr) netip.Addr {
	var usable []netip.Addr
	for _, a := range g.serving() {
		if a.Port() == g.vip.Port() { // a hosts file cannot change ports
			usable = append(usable, a.Addr())
		}
	}
	if len(usable) == 0 && present.IsValid() && g.guarded() {
		return g.vip.Addr() // without IPVS nothing answers at this address
	}
	if slices.Contains(usable, present) || len(usable) == 0 {
		return present
	}
	// At random, so that nodes are spread over the API servers.
	return usable[rand.IntN(len(usable))]
}
