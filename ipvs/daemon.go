package ipvs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

// Options configure a Daemon.
type Options struct {
	// ConfigFile is the path of ipvs.json; Run applies its changes. It is ignored if Servers is
	// set.
	ConfigFile string
	Servers    []Server
	HostsFile  string // path of the hosts file; empty: none is maintained
	StateDir   string // directory for learned API servers and addresses; empty: none
	// RunDir is the directory of locks, sockets and notes; a reboot empties it. If empty, there are
	// none.
	RunDir  string
	Metrics string // loopback address that serves metrics; empty: none
	// ClientCert is the file with the node's certificate and key; default: kubelet's certificate.
	ClientCert string
	// LearnEvery overrides Profile.Learn.
	LearnEvery time.Duration
	Kernel     kernel.Kernel
	// Spread is the delay before the first probe if the kernel has no real servers yet. It spreads
	// the load when many machines boot at once after a power cut.
	Spread time.Duration
	// Lookup resolves names; default: net.DefaultResolver.
	Lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	// Log logs one line.
	Log func(string)
	// Ready is called once: when the rules reflect the first verdicts, or when waiting for them has
	// taken too long.
	Ready func()
	// Alive is called every few seconds while the daemon works.
	Alive func()
	// Reload triggers a reload of all files.
	Reload <-chan os.Signal
	// Once makes Run return when the rules reflect the first verdicts.
	Once bool
}

const (
	// verdictTime is how long after the delay of the first probes (see maxReadySpread) Ready is
	// called even without all verdicts.
	verdictTime = 3 * time.Second
	// maxReadySpread limits the part of Spread by which Ready is delayed. With verdictTime it must
	// stay well below TimeoutStartSec of ipvscare.service.
	maxReadySpread = 30 * time.Second
	// lookTime is the interval between checks of the files for changes, at a tick.
	lookTime = 2 * keepTick
)

// Daemon maintains virtual servers.
type Daemon struct {
	opt        Options
	reconciler *reconciler
	stats      stats
	started    time.Time
	absent     atomic.Bool // the kernel has no IP_VS
	learnMu    sync.Mutex
	slots      chan struct{}

	mu     sync.Mutex
	groups map[netip.AddrPort]*runningServer
	// retiring are the virtual servers that are being removed.
	retiring map[netip.AddrPort]*runningServer
	logged   map[string]string

	namesMu sync.Mutex
	names   map[netip.AddrPort][]string // as in the notes
	hosts   map[netip.AddrPort]string   // as configured
}

// runningServer is a virtual server that is maintained or, if its group is nil, being removed.
type runningServer struct {
	*group
	unlock func() // the lock
	cancel context.CancelFunc
	done   chan struct{}
}

// claimedServer is a virtual server that is locked for a group that has not started.
type claimedServer struct {
	unlock func() // the lock
	// wasRetiring is set if the virtual server was being removed.
	wasRetiring bool
}

// NewDaemon returns a daemon that Run starts.
func NewDaemon(opt Options) *Daemon {
	return &Daemon{opt: opt, groups: make(map[netip.AddrPort]*runningServer), retiring: make(map[netip.AddrPort]*runningServer), logged: make(map[string]string),
		names: make(map[netip.AddrPort][]string), slots: make(chan struct{}, maxHandshakes)}
}

func (d *Daemon) logf(format string, args ...any) { d.opt.Log(fmt.Sprintf(format, args...)) }

// logChange logs the error of a subject if it differs from the subject's last one, and logs "fixed"
// when the error is gone.
func (d *Daemon) logChange(subject string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	msg := ""
	if err != nil {
		msg = printable.WithoutLocalAddr(err.Error())
	}
	switch {
	case d.logged[subject] == msg:
	case msg == "":
		delete(d.logged, subject)
		d.logf("%s: fixed", subject)
	default:
		d.logged[subject] = msg
		d.logf("%s: %s", subject, msg)
	}
}

// forgetLogged clears the errors of all subjects that begin with prefix, except those whose
// remaining text is in but.
func (d *Daemon) forgetLogged(prefix string, but ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.logged, func(subject, _ string) bool {
		rest, ours := strings.CutPrefix(subject, prefix)
		return ours && !slices.Contains(but, rest)
	})
}

func readRoots(file string) (*probe.Roots, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return probe.ParseRoots(file, data)
}

// ReadConfig reads and validates ipvs.json; see FromVirtual. If the file does not exist, the error
// is fs.ErrNotExist.
func ReadConfig(file string) ([]Server, error) {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the configuration: %w: firstboot writes it; by hand, see docs/ipvscare.md", err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	return parseConfig(file, data)
}

// Run maintains the virtual servers until the context ends, and then leaves the rules in place. If
// it returns ErrRestart, the caller must call it again in a new process.
func (d *Daemon) Run(ctx context.Context) error {
	d.started = time.Now()
	config := &watchedFile{path: d.opt.ConfigFile}
	config.changed() // before reading it, so that later changes are noticed
	servers, err := d.configured()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	claims, err := d.claimNew(ctx, servers)
	if err != nil {
		return err
	}
	defer d.unlockAll(claims) // deferred first, so it runs last: the next daemon may start once the locks are free
	if err := d.openKernel(); err != nil {
		return err
	}
	d.reconciler = newReconciler(d.opt.Kernel, d.logf, &d.stats, func(err error) {
		d.logf("%v", err)
		cancel(ErrRestart)
	})
	d.reconciler.absent, d.reconciler.ticks = d.absent.Load(), tickTimes{d.started}
	d.reconciler.used = func(vip netip.AddrPort, dests []netip.AddrPort) {
		if r := d.kept()[vip]; r != nil {
			r.used(dests)
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { d.reconciler.run(ctx) })
	if err := d.begin(ctx, servers, claims); err != nil {
		return err
	}
	wg.Go(func() {
		d.awaitVerdicts(ctx)
		if d.opt.Once {
			cancel(context.Canceled)
		}
	})
	d.follow(ctx, config)
	for _, r := range d.all() {
		r.cancel()
		<-r.done
	}
	d.stopAllRetiring()
	if err := context.Cause(ctx); errors.Is(err, ErrRestart) {
		return err
	}
	return nil
}

// configured returns the servers to maintain. With Once, a damaged CA file is an error; otherwise the
// groups wait until it is readable (see loadCA).
func (d *Daemon) configured() ([]Server, error) {
	servers := d.opt.Servers
	if servers == nil {
		var err error
		if servers, err = ReadConfig(d.opt.ConfigFile); err != nil {
			return nil, err
		}
	}
	for _, s := range servers {
		if !d.opt.Once || s.Probe.CAFile == "" || s.Probe.Unsafe || s.Probe.Plain {
			continue
		}
		if _, err := readRoots(s.Probe.CAFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return servers, nil
}

// openKernel checks whether the kernel has IPVS. Without IPVS only the hosts file is maintained; if
// there is no hosts file either, openKernel returns an error.
func (d *Daemon) openKernel() error {
	err := d.opt.Kernel.Ready()
	if errors.Is(err, kernel.ErrNoIPVS) && !d.opt.Once && d.opt.HostsFile != "" {
		d.absent.Store(true)
		d.logf("%v; until then %s names a healthy API server", err, d.opt.HostsFile)
		return nil
	}
	return err
}

// begin serves metrics, starts the groups, and removes the virtual servers of an earlier
// configuration.
func (d *Daemon) begin(ctx context.Context, servers []Server, claims map[netip.AddrPort]claimedServer) error {
	if d.opt.Metrics != "" {
		d.logChange("metrics", d.serveMetrics(ctx, d.opt.Metrics))
	}
	if err := d.apply(ctx, servers, claims); err != nil {
		return err
	}
	for vip := range readNotes(d.opt.RunDir) {
		if slices.ContainsFunc(servers, func(s Server) bool { return s.VIP == vip }) {
			continue
		}
		if _, locked := lockedBy(d.opt.RunDir, vip); locked {
			continue // another daemon maintains it
		}
		unlock, err := d.claim(ctx, vip)
		if err != nil {
			d.logChange(vip.String(), err)
			continue
		}
		d.retire(ctx, vip, unlock)
	}
	return nil
}

// unlockAll unlocks all groups, and the claims without a group.
func (d *Daemon) unlockAll(claims map[netip.AddrPort]claimedServer) {
	for _, r := range d.all() {
		r.unlock()
	}
	for _, c := range claims {
		c.unlock()
	}
}

func (d *Daemon) all() []*runningServer { return slices.Collect(maps.Values(d.kept())) }

// follow checks the files every lookTime, and reads all of them on a reload.
func (d *Daemon) follow(ctx context.Context, config *watchedFile) {
	hosts := &watchedFile{path: d.opt.HostsFile}
	cas := make(map[netip.AddrPort]*watchedFile)
	hosts.changed()
	tick := time.NewTimer(d.reconciler.ticks.after(0))
	defer tick.Stop()
	for {
		all := false
		select {
		case <-ctx.Done():
			return
		case <-d.opt.Reload:
			all = true
			d.logf("reading all files again")
		case <-tick.C:
			tick.Reset(d.reconciler.ticks.after(lookTime - keepTick))
		}
		if (config.changed() || all) && d.opt.Servers == nil {
			d.reload(ctx)
		}
		hostsChanged := hosts.changed()
		for _, r := range d.all() {
			f := cas[r.vip]
			if file := r.config().Probe.CAFile; f == nil || f.path != file {
				f = &watchedFile{path: file}
				cas[r.vip] = f
			}
			if f.changed() || all {
				r.loadCA()
			}
			if hostsChanged {
				wake(r.hostsChanged)
			}
			if all {
				wake(r.changed)
				wake(r.renew)
			}
		}
		// If the reconciler's goroutine hangs, Alive is not called and systemd's
		// watchdog restarts the daemon.
		if d.reconciler.call(ctx, func() error { return nil }) == nil && d.opt.Alive != nil {
			d.opt.Alive()
		}
	}
}

// watchedFile detects changes of a file's content or read error. Modification times are not
// sufficient: two writes within one tick of the kernel's clock get the same time.
type watchedFile struct {
	path string
	sum  [sha256.Size]byte // of the content or the error; zero if the file does not exist
}

func (f *watchedFile) changed() bool {
	if f.path == "" {
		return false
	}
	var sum [sha256.Size]byte
	switch data, err := os.ReadFile(f.path); {
	case err == nil:
		sum = sha256.Sum256(data)
	case !errors.Is(err, fs.ErrNotExist):
		sum = sha256.Sum256([]byte(err.Error()))
	}
	old := f.sum
	f.sum = sum
	return sum != old
}

// reload applies a changed configuration. An invalid one changes nothing.
func (d *Daemon) reload(ctx context.Context) {
	servers, err := ReadConfig(d.opt.ConfigFile)
	if err == nil {
		err = d.replace(ctx, servers)
	}
	if err != nil {
		err = fmt.Errorf("%w\nkeeping the previous configuration", err)
	} else {
		d.stats.reloads.Add(1)
	}
	d.logChange(d.opt.ConfigFile, err)
}

// replace replaces the virtual servers. If it fails, it gives back the new claims, because the next
// configuration may need those virtual servers.
func (d *Daemon) replace(ctx context.Context, servers []Server) error {
	claims, err := d.claimNew(ctx, servers)
	if err != nil {
		return err
	}
	if err := d.apply(ctx, servers, claims); err != nil {
		d.giveBackClaims(ctx, claims)
		return err
	}
	return nil
}

// giveBackClaims gives back claims that have no group: it unlocks them, or continues the removal
// that the claim interrupted.
func (d *Daemon) giveBackClaims(ctx context.Context, claims map[netip.AddrPort]claimedServer) {
	for vip, c := range claims {
		if c.wasRetiring {
			d.retire(ctx, vip, c.unlock)
		} else {
			c.unlock()
		}
	}
}

// claimNew locks the virtual servers that have no group yet. It locks all of them or none.
func (d *Daemon) claimNew(ctx context.Context, servers []Server) (map[netip.AddrPort]claimedServer, error) {
	claims := make(map[netip.AddrPort]claimedServer)
	kept := d.kept()
	for _, s := range servers {
		if kept[s.VIP] != nil {
			continue
		}
		unlock, wasRetiring := d.stopRetiring(s.VIP)
		if !wasRetiring {
			var err error
			if unlock, err = d.claim(ctx, s.VIP); err != nil {
				d.giveBackClaims(ctx, claims)
				return nil, err
			}
		}
		claims[s.VIP] = claimedServer{unlock, wasRetiring}
	}
	return claims, nil
}

// kept returns the running groups by virtual server.
func (d *Daemon) kept() map[netip.AddrPort]*runningServer {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.groups)
}

// apply starts, changes and stops groups so that exactly these servers are maintained. claims holds
// the locks of the new ones. If apply fails, no group has changed.
func (d *Daemon) apply(ctx context.Context, servers []Server, claims map[netip.AddrPort]claimedServer) error {
	// First, so that no group takes the new names for former ones and removes their lines.
	restore := d.configure(servers)
	present, notes := d.kept(), readNotes(d.opt.RunDir)
	var added []netip.AddrPort // virtual servers without a note before
	for _, s := range servers {
		if err := d.addNote(s); err != nil {
			restore()
			for _, vip := range added {
				err = errors.Join(err, d.deleteNote(vip))
			}
			return err
		}
		if _, noted := notes[s.VIP]; !noted && present[s.VIP] == nil {
			added = append(added, s.VIP)
		}
	}
	var fresh []Server
	for _, s := range servers {
		if r := present[s.VIP]; r != nil {
			r.update(s)
			delete(present, s.VIP)
		} else {
			fresh = append(fresh, s)
		}
	}
	for _, s := range fresh {
		gctx, cancel := context.WithCancel(ctx)
		r := &runningServer{group: newGroup(d, s), unlock: claims[s.VIP].unlock, cancel: cancel, done: make(chan struct{})}
		d.mu.Lock()
		d.groups[s.VIP] = r
		d.mu.Unlock()
		go func() {
			defer close(r.done)
			r.run(gctx)
		}()
	}
	for vip, r := range present {
		r.cancel()
		<-r.done
		d.mu.Lock()
		delete(d.groups, vip)
		d.mu.Unlock()
		d.retire(ctx, vip, r.unlock)
	}
	return nil
}

// retire removes a virtual server. A goroutine removes its lines in the hosts file, because another
// program may hold the lock on that file. Until then the virtual server stays locked.
func (d *Daemon) retire(ctx context.Context, vip netip.AddrPort, unlock func()) {
	d.reconciler.drop(ctx, vip) // forget, below, reports the error
	ctx, cancel := context.WithCancel(ctx)
	p := &runningServer{unlock: unlock, cancel: cancel, done: make(chan struct{})}
	d.mu.Lock()
	d.retiring[vip] = p
	d.mu.Unlock()
	go func() {
		defer close(p.done)
		defer cancel()
		for !d.forget(ctx, vip) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(files.HostsTimeout):
			}
		}
		d.mu.Lock()
		mine := d.retiring[vip] == p // false if the virtual server was configured again
		if mine {
			delete(d.retiring, vip)
		}
		d.mu.Unlock()
		if mine {
			unlock()
		}
	}()
}

// stopRetiring stops the removal of a virtual server, if there is one, and
// returns the function that unlocks it.
func (d *Daemon) stopRetiring(vip netip.AddrPort) (unlock func(), ok bool) {
	d.mu.Lock()
	p := d.retiring[vip]
	delete(d.retiring, vip)
	d.mu.Unlock()
	if p == nil {
		return nil, false
	}
	p.cancel()
	<-p.done
	return p.unlock, true
}

func (d *Daemon) stopAllRetiring() {
	d.mu.Lock()
	vips := slices.Collect(maps.Keys(d.retiring))
	d.mu.Unlock()
	for _, vip := range vips {
		if unlock, ok := d.stopRetiring(vip); ok {
			unlock()
		}
	}
}

// forget removes a virtual server, its names and its note, and reports whether
// all of it is gone.
func (d *Daemon) forget(ctx context.Context, vip netip.AddrPort) bool {
	err := errors.Join(d.reconciler.drop(ctx, vip), d.removeFormer(ctx, vip, ""))
	if err == nil {
		err = d.deleteNote(vip)
	}
	if ctx.Err() != nil {
		return false
	}
	d.logChange(vip.String(), err)
	if err == nil {
		d.forgetLogged(vip.String() + ": ")
		d.logf("%s: removed: it is no longer configured", vip)
	}
	return err == nil
}

// Leftovers describes the state that Clean removes.
type Leftovers struct {
	Servers   []Server // virtual servers, identified by their VIP
	Noted     bool     // also the virtual servers with a note in RunDir
	HostsFile string   // path; empty if none was written
	RunDir    string   // directory with the daemons' locks and notes
}

// Clean removes everything that ipvscare added: rules, routes and lines of the hosts file. If a
// daemon maintains one of the virtual servers, Clean fails and removes nothing. It logs one line
// per removed virtual server; the error has one line per virtual server that could not be removed.
func Clean(ctx context.Context, machine kernel.Kernel, l Leftovers, log func(string)) error {
	names := make(map[netip.AddrPort][]string)
	notes := readNotes(l.RunDir)
	if l.Noted {
		maps.Copy(names, notes)
	}
	for _, s := range l.Servers {
		names[s.VIP] = addName(notes[s.VIP], s.Host)
	}
	for vip := range names {
		for _, name := range files.NamesAt(l.HostsFile, vip.Addr()) {
			if !inOtherNotes(notes, names, name) {
				names[vip] = addName(names[vip], name)
			}
		}
	}
	vips := slices.SortedFunc(maps.Keys(names), netip.AddrPort.Compare)
	for _, vip := range vips {
		if pid, locked := lockedBy(l.RunDir, vip); locked {
			return fmt.Errorf("process %d maintains %s: stop it first with `systemctl stop ipvscare`", pid, vip)
		}
	}
	if err := machine.Ready(); err != nil && !errors.Is(err, kernel.ErrNoIPVS) {
		return err
	}
	var errs []error
	for _, vip := range vips {
		err := removeService(machine, vip, false)
		for _, name := range names[vip] {
			if l.HostsFile != "" {
				_, herr := files.KeepHosts(ctx, l.HostsFile, l.RunDir, files.NoLineFor(name, vip.Addr()))
				err = errors.Join(err, herr)
			}
		}
		if err == nil { // keep the note until everything is removed
			err = removeNote(l.RunDir, vip)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing %s: %w", vip, err))
			continue
		}
		log(fmt.Sprintf("%s: removed", vip))
	}
	return errors.Join(errs...)
}

// awaitVerdicts calls Ready when every group has its first verdicts, or verdictTime after Spread. If
// Spread is longer than maxReadySpread, it does not wait for the rest: systemd would stop the daemon,
// and kubelet would not start the node's Pods.
func (d *Daemon) awaitVerdicts(ctx context.Context) {
	limit := time.NewTimer(min(d.opt.Spread, maxReadySpread) + verdictTime)
	defer limit.Stop()
	var awaited []<-chan struct{}
	for _, r := range d.all() {
		awaited = append(awaited, r.judged)
	}
	if d.opt.Once { // with Once, no later run of this process would complete the removals
		d.mu.Lock()
		for _, p := range d.retiring {
			awaited = append(awaited, p.done)
		}
		d.mu.Unlock()
	}
	late := false
	for _, done := range awaited {
		if late {
			break
		}
		select {
		case <-done:
		case <-ctx.Done():
			return
		case <-limit.C:
			late = true
		}
	}
	for _, r := range d.all() {
		r.mu.Lock()
		d.logf("ready: %s balances to %v", r.vip, r.serving())
		r.mu.Unlock()
	}
	if d.opt.Ready != nil {
		d.opt.Ready()
	}
}
