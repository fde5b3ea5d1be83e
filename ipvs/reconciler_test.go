package ipvs

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/test/kerneltest"
)

// memKernel is a kernel in memory that records the steps applied to it.
type memKernel struct {
	kerneltest.Table
	t       *testing.T
	absent  bool
	conns   []kernel.Conn
	source  netip.Addr
	steps   []string
	history []string // the table after each step
	severed []kernel.Conn
	remotes []netip.AddrPort
	stuck   []netip.AddrPort
	// untracked are the real servers that were passed to Untrack.
	untracked []netip.AddrPort
	wake      func()
}

func newMemKernel(t *testing.T) *memKernel {
	return &memKernel{t: t, source: netip.MustParseAddr("10.0.0.100")}
}

func (k *memKernel) Ready() error {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	if k.absent {
		return kernel.ErrNoIPVS
	}
	return nil
}

func (k *memKernel) Service(vip netip.AddrPort) (*kernel.Service, error) {
	if err := k.Ready(); err != nil {
		return nil, err
	}
	return k.Table.Service(vip)
}

func (k *memKernel) Apply(op kernel.Op) error {
	if err := k.Ready(); err != nil {
		return err
	}
	k.Mu.Lock()
	defer k.Mu.Unlock()
	k.steps = append(k.steps, op.String())
	if err := k.Perform(op); err != nil {
		k.t.Error(err)
		return err
	}
	k.history = append(k.history, k.table())
	return nil
}

func (k *memKernel) Conns(vip, dest netip.AddrPort) ([]kernel.Conn, error) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	var mine []kernel.Conn
	for _, c := range k.conns {
		if c.Virtual == vip && c.Dest == dest {
			mine = append(mine, c)
		}
	}
	return mine, nil
}

func (k *memKernel) Sever(conns []kernel.Conn) (int, error) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	k.severed = append(k.severed, conns...)
	return len(conns), nil
}

func (k *memKernel) Untrack(vip, dest netip.AddrPort) error {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	k.untracked = append(k.untracked, dest)
	return nil
}

func (k *memKernel) Stuck(netip.AddrPort) ([]netip.AddrPort, error) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	return k.stuck, nil
}

func (k *memKernel) SeverRemote(a netip.AddrPort) (int, error) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	k.remotes = append(k.remotes, a)
	return 1, nil
}

func (k *memKernel) Source(netip.Addr) (netip.Addr, error) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	return k.source, nil
}

func (k *memKernel) Watch(_ context.Context, wake func()) error {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	k.wake = wake
	return nil
}

// change changes the kernel's state as another program would.
func (k *memKernel) change(f func()) {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	f()
}

// mark returns the current position in the history, to be passed to since.
func (k *memKernel) mark() int {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	return len(k.history)
}

func (k *memKernel) since(mark int) []string {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	return slices.Clone(k.history[mark:])
}

func (k *memKernel) text() string {
	k.Mu.Lock()
	defer k.Mu.Unlock()
	return k.table()
}

func (k *memKernel) table() string {
	var s []string
	for _, svc := range k.Services {
		s = append(s, fmt.Sprintf("%s %s", svc.VIP, svc.Scheduler))
		for _, d := range byAddress(svc.Dests) {
			s = append(s, fmt.Sprintf("%s=%d", d.Addr.Addr(), d.Weight))
		}
	}
	return strings.Join(s, " ")
}

// world is a daemon that uses a kernel in memory. Its masters are listeners of this process. Their
// addresses are set directly, because a configuration rejects 127.0.0.x.
type world struct {
	t       *testing.T
	kernel  *memKernel
	daemon  *Daemon
	hosts   string
	run     string
	state   string
	cert    string // the node's
	mu      sync.Mutex
	lines   []string
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan error
	masters []*loopMaster
	spread  time.Duration
}

func (w *world) log(line string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, line)
}

func (w *world) said(text string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, l := range w.lines {
		if strings.Contains(l, text) {
			n++
		}
	}
	return n
}

// patience is the timeout for real sockets on a busy machine.
const patience = 2 * time.Minute

// eventually waits until ok returns true, because other goroutines work over real sockets.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.t.Fatalf("never: %s\nkernel: %s\n%s", what, w.kernel.text(), strings.Join(w.lines, "\n"))
		}
	}
}

func newWorld(t *testing.T, masters int) *world {
	dir := t.TempDir()
	w := &world{t: t, kernel: newMemKernel(t), hosts: filepath.Join(dir, "hosts"), run: filepath.Join(dir, "run"), state: filepath.Join(dir, "state")}
	if err := os.WriteFile(w.hosts, []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range masters {
		w.masters = append(w.masters, newLoopMaster(t))
	}
	return w
}

// testServer returns a virtual server.
func testServer(t *testing.T, last byte) Server {
	t.Helper()
	s := Server{VIP: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 103, 97, last}), 6443), Host: "apiserver.cluster.local",
		Scheduler: "rr", Profile: LAN(), Rise: 2, Fall: 2, Probe: probe.Spec{Method: "GET", Path: "/readyz"}}
	s.Profile.Retry, s.Profile.Ready = 50*time.Millisecond, 100*time.Millisecond
	s.Profile.RetryMax, s.Profile.Spread = s.Profile.Retry, s.Profile.Retry
	// Masters stop by closing their connections. Timeouts are long, so that no master goes down
	// because this machine is slow.
	s.Profile.Ticks, s.Profile.ReadyTimeout = int(patience/s.Profile.Tick), patience
	return s
}

func (w *world) start(servers ...Server) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w.ctx, w.cancel, w.done = ctx, cancel, make(chan error, 1)
	ready := make(chan struct{})
	w.daemon = NewDaemon(Options{Spread: w.spread, Servers: servers, HostsFile: w.hosts, RunDir: w.run, StateDir: w.state, ClientCert: w.cert, Kernel: w.kernel, Log: w.log,
		Ready: func() { close(ready) }})
	go func() { w.done <- w.daemon.Run(ctx) }()
	w.t.Cleanup(func() { w.stop() })
	select {
	case <-ready:
	case err := <-w.done:
		w.cancel = nil
		w.t.Fatalf("the daemon ended: %v", err)
	case <-time.After(patience):
		w.t.Fatal("the daemon did not become ready")
	}
}

func (w *world) stop() error {
	if w.cancel == nil {
		return nil
	}
	w.cancel()
	w.cancel = nil
	return <-w.done
}

func TestDaemon(t *testing.T) {
	w := newWorld(t, 2)
	s := testServer(t, 200)
	for _, m := range w.masters {
		s.Masters = append(s.Masters, m.master())
	}
	a, b := w.masters[0], w.masters[1]
	both := fmt.Sprintf("%s rr %s=1 %s=1", s.VIP, a.addr.Addr(), b.addr.Addr())
	onlyB := fmt.Sprintf("%s rr %s=1", s.VIP, b.addr.Addr())
	w.start(s)
	w.eventually("both serve", func() bool { return w.kernel.text() == both })
	if src := w.kernel.Routes[s.VIP.Addr()]; src != w.kernel.source {
		t.Errorf("the route's source is %v", src)
	}
	hosts := func(want string) func() bool {
		return func() bool {
			got, _ := os.ReadFile(w.hosts)
			return string(got) == "127.0.0.1 localhost\n"+want
		}
	}
	w.eventually("the hosts line is there", hosts(s.VIP.Addr().String()+" apiserver.cluster.local # ipvscare\n"))

	mine := kernel.Conn{Client: netip.MustParseAddrPort("10.0.0.100:1"), Virtual: s.VIP, Dest: a.addr}
	other := kernel.Conn{Client: netip.MustParseAddrPort("10.0.0.100:2"), Virtual: s.VIP, Dest: b.addr}
	w.kernel.change(func() { w.kernel.conns = []kernel.Conn{mine, other} })
	a.stop()
	w.eventually("one is out", func() bool { return w.kernel.text() == onlyB })
	w.kernel.change(func() {
		if !slices.Equal(w.kernel.severed, []kernel.Conn{mine}) {
			t.Errorf("severed %v", w.kernel.severed)
		}
		if !slices.Equal(w.kernel.untracked, []netip.AddrPort{a.addr}) {
			t.Errorf("Untrack was called for %v", w.kernel.untracked)
		}
		last := w.kernel.steps[len(w.kernel.steps)-2:]
		if !strings.HasPrefix(last[0], "update-dest") || !strings.Contains(last[0], "weight 0") || !strings.HasPrefix(last[1], "del-dest") {
			t.Errorf("the last steps are %q, want weight 0 and the removal", last)
		}
	})
	mark := w.kernel.mark()
	b.stop()
	w.eventually("the other is seen to be down", func() bool { return w.said("is down, it was up") == 2 })
	a.start()
	w.eventually("the healed one serves alone", func() bool {
		return w.kernel.text() == fmt.Sprintf("%s rr %s=1", s.VIP, a.addr.Addr())
	})
	for _, was := range w.kernel.since(mark) { // by now the failed one is removed
		if !strings.Contains(was, "=1") {
			t.Errorf("the last real server was removed: %s", was)
		}
	}

	w.kernel.change(func() {
		if len(w.kernel.remotes) > 0 {
			t.Errorf("severed all sockets to %v", w.kernel.remotes)
		}
		w.kernel.Services = nil
	})
	w.eventually("after a flush, the rules are restored and the sockets closed", func() bool {
		w.kernel.Mu.Lock()
		told := slices.Equal(w.kernel.remotes, []netip.AddrPort{s.VIP})
		w.kernel.Mu.Unlock()
		return told && strings.Contains(w.kernel.text(), "=1")
	})
	w.kernel.change(func() { clear(w.kernel.Routes); w.kernel.wake() })
	w.eventually("the route is repaired", func() bool {
		w.kernel.Mu.Lock()
		defer w.kernel.Mu.Unlock()
		return w.kernel.Routes[s.VIP.Addr()] == w.kernel.source
	})
	before := w.kernel.text()
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if got := w.kernel.text(); got != before {
		t.Errorf("stopping changed the rules to %s", got)
	}

	// A new process takes over the existing rules without a step.
	steps := len(w.kernel.steps)
	w.start(s)
	if len(w.kernel.steps) != steps {
		t.Errorf("the restart did %v", w.kernel.steps[steps:])
	}
	m := string(w.daemon.Metrics())
	for _, want := range []string{"ipvscare_ipvs 1\n", fmt.Sprintf("ipvscare_real_server{vip=%q,master=%q} 1\n", s.VIP, a.addr),
		fmt.Sprintf("ipvscare_master_state{vip=%q,master=%q,state=\"down\"} 1\n", s.VIP, b.addr)} {
		if !strings.Contains(m, want) {
			t.Errorf("metrics lack %q:\n%s", want, m)
		}
	}
}

// TestRestartWhileOneDrains checks that an API server that shuts down keeps its connections when
// ipvscare is restarted.
func TestRestartWhileOneDrains(t *testing.T) {
	w := newWorld(t, 2)
	a, b := w.masters[0], w.masters[1]
	b.stop()
	b.handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.WriteHeader(500)
		io.WriteString(rw, "[-]shutdown failed\n")
	})
	b.start()
	s := testServer(t, 200)
	s.Masters = []Master{a.master(), b.master()}
	drains := fmt.Sprintf("%s rr %s=1 %s=0", s.VIP, a.addr.Addr(), b.addr.Addr())
	mine := kernel.Conn{Client: netip.MustParseAddrPort("10.0.0.100:1"), Virtual: s.VIP, Dest: b.addr}
	w.kernel.change(func() {
		w.kernel.conns = []kernel.Conn{mine}
		w.kernel.Services = []kernel.Service{{VIP: s.VIP, Scheduler: "rr", Dests: []kernel.Dest{{Addr: a.addr, Weight: 1, Forward: kernel.Masq}, {Addr: b.addr, Weight: 0, Forward: kernel.Masq}}}}
	})
	w.start(s)
	w.eventually("both have verdicts", func() bool { return w.said("is up, it was unknown") == 1 && w.said("is draining, it was unknown") == 1 })
	if len(w.kernel.since(0)) > 0 || w.kernel.text() != drains {
		t.Errorf("the start led to %q, then %s", w.kernel.since(0), w.kernel.text())
	}
	w.kernel.change(func() {
		if len(w.kernel.severed) > 0 {
			t.Errorf("severed %v", w.kernel.severed)
		}
	})
}

// TestReadyInLongSpread checks that the daemon is ready before systemd's timeout for its start,
// however long the spread is, and that it sends nothing before the spread is over.
func TestReadyInLongSpread(t *testing.T) {
	unit, err := os.ReadFile("../overlays/files/base/usr/lib/systemd/system/ipvscare.service")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(unit), "\nTimeoutStartSec=")
	seconds, _, _ := strings.Cut(rest, "\n")
	limit, err := time.ParseDuration(seconds + "s")
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 0)
		s := testServer(t, 12)
		s.Masters = []Master{{Host: "192.0.2.11", Port: 6443}}
		began, readyAfter := time.Now(), atomic.Int64{}
		d := NewDaemon(Options{Spread: 10 * time.Minute, Servers: []Server{s}, Kernel: w.kernel, Log: w.log,
			Ready: func() { readyAfter.Store(int64(time.Since(began))) }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- d.Run(ctx) }()
		time.Sleep(9 * time.Minute)
		if ready := time.Duration(readyAfter.Load()); ready == 0 || ready > limit*3/4 || d.stats.wire[countDial].Load() > 0 {
			t.Errorf("ready after %s (0: not yet), systemd waits %s; %d connections", ready, limit, d.stats.wire[countDial].Load())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestDaemonSpread checks that probing starts with a delay after power-on, but at once after a
// restart of the program, when the rules exist.
func TestDaemonSpread(t *testing.T) {
	w := newWorld(t, 1)
	s := testServer(t, 200)
	s.Masters = append(s.Masters, w.masters[0].master())
	w.spread = 400 * time.Millisecond
	begin := time.Now()
	w.start(s)
	w.eventually("it serves", func() bool { return strings.HasSuffix(w.kernel.text(), "=1") })
	if took := time.Since(begin); took < w.spread {
		t.Errorf("asked after %v, want %v", took, w.spread)
	}
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	w.spread = time.Hour
	begin = time.Now()
	w.start(s)
	if took := time.Since(begin); took > w.spread/2 {
		t.Errorf("the restart took %v", took)
	}
}

func TestDaemonWithoutIPVS(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	s := testServer(t, 201)
	for _, m := range w.masters {
		s.Masters = append(s.Masters, m.master())
	}
	s.VIP = netip.AddrPortFrom(s.VIP.Addr(), w.masters[0].addr.Port())
	w.kernel.absent = true
	w.start(s)
	named := func() *loopMaster {
		b, _ := os.ReadFile(w.hosts)
		for _, m := range w.masters {
			if strings.Contains(string(b), m.addr.Addr().String()+" apiserver.cluster.local") {
				return m
			}
		}
		return nil
	}
	w.eventually("the hosts file names a master", func() bool { return named() != nil })
	first := named()
	first.stop()
	w.eventually("the hosts file names the other", func() bool { return named() != nil && named() != first })
	w.eventually("connections to the dead one are closed", func() bool {
		w.kernel.Mu.Lock()
		defer w.kernel.Mu.Unlock()
		return slices.Equal(w.kernel.remotes, []netip.AddrPort{first.addr})
	})
	w.kernel.change(func() { w.kernel.absent = false })
	select {
	case err := <-w.done:
		if err != ErrRestart {
			t.Errorf("the daemon ended with %v", err)
		}
		w.cancel = nil
	case <-time.After(patience):
		t.Error("the daemon did not notice that IP_VS was loaded")
	}
}

// spoiltKernel is a kernel that fails to read some virtual servers.
type spoiltKernel struct {
	*memKernel
	fails func(vip netip.AddrPort) bool
}

func (k spoiltKernel) Service(vip netip.AddrPort) (*kernel.Service, error) {
	if k.fails(vip) {
		return nil, syscall.EAFNOSUPPORT
	}
	return k.memKernel.Service(vip)
}

// TestOneVirtualServerFails checks that a virtual server that the kernel cannot read does not
// prevent the repair of another one.
func TestOneVirtualServerFails(t *testing.T) {
	m := newMemKernel(t)
	six, four := netip.MustParseAddrPort("[fd00::2]:6443"), netip.MustParseAddrPort("10.103.97.2:6443")
	k := newReconciler(spoiltKernel{m, func(vip netip.AddrPort) bool { return vip == six }}, t.Logf, new(stats), nil)
	k.want = []kernel.Service{{VIP: six, Scheduler: "rr"}, {VIP: four, Scheduler: "rr", Dests: []kernel.Dest{{Addr: addrAt(1), Weight: 1}}}}
	k.tick(false)
	if m.text() == "" {
		t.Error("the other virtual server was not made")
	}
}

// TestFlushBeforeAChange checks that the sockets of a virtual server that another program removed
// are closed, even if ipvscare notices the removal only when it applies a change.
func TestFlushBeforeAChange(t *testing.T) {
	m := newMemKernel(t)
	vip := netip.MustParseAddrPort("10.103.97.2:6443")
	k := newReconciler(m, t.Logf, new(stats), nil)
	k.want = []kernel.Service{{VIP: vip, Scheduler: "rr", Dests: []kernel.Dest{dest(addrAt(1), 1)}}}
	for _, dests := range []int{1, 2} {
		if err := k.reconcile(false); err != nil || len(m.remotes) > 0 {
			t.Fatalf("without a flush: %v, closed the sockets to %v", err, m.remotes)
		}
		k.want[0].Dests = append(k.want[0].Dests, dest(addrAt(byte(dests+1)), 1))
	}
	m.Services = nil
	if err := k.reconcile(false); err != nil || !slices.Equal(m.remotes, []netip.AddrPort{vip}) {
		t.Errorf("after a flush: %v, closed the sockets to %v", err, m.remotes)
	}
}

// TestRouteIsRestored checks that the route to the virtual address is restored soon, even if other
// routes change all the time.
func TestRouteIsRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemKernel(t)
		m.Routes = map[netip.Addr]netip.Addr{}
		vip := netip.MustParseAddrPort("10.103.97.2:6443")
		k := newReconciler(m, t.Logf, new(stats), nil)
		k.ticks = tickTimes{time.Now()}
		k.want = []kernel.Service{{VIP: vip, Scheduler: "rr"}}
		k.via[vip] = routeSource{masters: []netip.Addr{addrAt(1).Addr()}}
		ctx, cancel := context.WithCancel(t.Context())
		go k.run(ctx)
		time.Sleep(5 * time.Second)
		m.change(func() { m.wake() })
		time.Sleep(time.Second)
		m.change(func() { delete(m.Routes, vip.Addr()) })
		for range 10 { // other routes change every 90 ms
			m.change(func() { m.wake() })
			time.Sleep(90 * time.Millisecond)
		}
		restored := false
		m.change(func() { _, restored = m.Routes[vip.Addr()] })
		if !restored {
			t.Error("the route was not restored within a second")
		}
		cancel()
	})
}

// TestTakeOverFailsOnce checks that the real servers of an earlier process are kept, even if the
// kernel's table cannot be read at first and no API server is up.
func TestTakeOverFailsOnce(t *testing.T) {
	w := newWorld(t, 1)
	s := testServer(t, 230)
	s.Masters = []Master{w.masters[0].master()}
	w.masters[0].stop()
	w.kernel.Services = []kernel.Service{{VIP: s.VIP, Scheduler: "rr", Dests: []kernel.Dest{{Addr: w.masters[0].addr, Weight: 1}}}}
	before := w.kernel.text()
	var reads atomic.Int64
	k := spoiltKernel{w.kernel, func(netip.AddrPort) bool { return reads.Add(1) == 1 }}
	ctx, cancel := context.WithCancel(t.Context())
	d := NewDaemon(Options{Servers: []Server{s}, HostsFile: w.hosts, RunDir: w.run, StateDir: w.state, Kernel: k, Log: w.log})
	done := make(chan error)
	go func() { done <- d.Run(ctx) }()
	for reads.Load() < 4 {
		time.Sleep(10 * time.Millisecond)
	}
	if got := w.kernel.text(); !strings.Contains(got, w.masters[0].addr.Addr().String()) {
		t.Errorf("the table was %q and is %q; steps %q", before, got, w.kernel.since(0))
	}
	cancel()
	<-done
}
