//go:build linux

package guest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/edgebake/edgebake/ondisk"
)

const vip = "10.103.97.2:6443"

// lab is a bridge with masters and nodes, each in its own network namespace.
type lab struct {
	t       *testing.T
	home    netns.NsHandle
	bridge  *netlink.Bridge
	ca      *authority
	masters []*machine
	nodes   []*machine
	began   time.Time
}

// machine is one network namespace.
type machine struct {
	l    *lab
	name string
	ns   netns.NsHandle
	addr netip.Addr
	dir  string
	veth string // the end on the bridge

	cmd  *exec.Cmd // process of the master or of ipvscare
	log  *journal
	past []*journal // the journals of this process and of earlier ones
}

// journalled makes cmd the machine's process, and keeps its output in a journal.
func (m *machine) journalled(cmd *exec.Cmd) {
	m.log = &journal{since: m.l.began}
	m.past = append(m.past, m.log)
	cmd.Stdout, cmd.Stderr = m.log, m.log
	m.cmd = cmd
	m.start(cmd)
}

// journal keeps the output of a process with times.
type journal struct {
	mu    sync.Mutex
	lines []string
	rest  []byte
	since time.Time
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rest = append(j.rest, b...)
	for {
		i := bytes.IndexByte(j.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		j.lines = append(j.lines, fmt.Sprintf("%7.3f %s", time.Since(j.since).Seconds(), j.rest[:i]))
		j.rest = j.rest[i+1:]
	}
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "\n")
}

func (j *journal) count(text string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, l := range j.lines {
		if strings.Contains(l, text) {
			n++
		}
	}
	return n
}

// newLab makes nodes, and makes and starts masters.
func newLab(t *testing.T, masters, nodes int) *lab {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	check(err)
	l := &lab{t: t, home: home, ca: newAuthority("kubernetes"), began: time.Now()}
	la := netlink.NewLinkAttrs()
	la.Name = "br0"
	l.bridge = &netlink.Bridge{LinkAttrs: la}
	check(netlink.LinkAdd(l.bridge))
	check(netlink.LinkSetUp(l.bridge))
	t.Cleanup(l.close)
	for i := range masters {
		m := l.machine(fmt.Sprintf("m%d", i+1), netip.AddrFrom4([4]byte{10, 103, 0, byte(11 + i)}))
		l.masters = append(l.masters, m)
		m.certificate(l.ca, epoch.Add(-time.Hour), epoch.AddDate(10, 0, 0))
	}
	for i := range nodes {
		n := l.machine(fmt.Sprintf("n%d", i+1), netip.AddrFrom4([4]byte{10, 103, 0, byte(101 + i)}))
		// Nodes see only masters: an ARP request for the virtual address must not reach another
		// node under test.
		link, err := netlink.LinkByName(n.veth)
		check(err)
		check(netlink.LinkSetIsolated(link, true))
		l.nodes = append(l.nodes, n)
	}
	for _, m := range l.masters {
		m.serve()
	}
	for _, m := range l.masters {
		m.awaitServing()
	}
	return l
}

// bare makes a machine without network interfaces.
func (l *lab) bare(name string) *machine {
	m := &machine{l: l, name: name, dir: filepath.Join("/run/lab", name), veth: "v" + name}
	os.RemoveAll(m.dir)
	check(os.MkdirAll(m.dir, 0o755))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns, err := netns.New() // this also enters the namespace
	check(err)
	m.ns = ns
	check(netns.Set(l.home))
	return m
}

func (l *lab) machine(name string, addr netip.Addr) *machine {
	m := l.bare(name)
	m.addr = addr
	la := netlink.NewLinkAttrs()
	la.Name = m.veth
	v := &netlink.Veth{LinkAttrs: la, PeerName: "eth0", PeerNamespace: netlink.NsFd(m.ns)}
	check(netlink.LinkAdd(v))
	check(netlink.LinkSetMaster(v, l.bridge))
	check(netlink.LinkSetUp(v))
	m.in(func() {
		for _, name := range []string{"lo", "eth0"} {
			link, err := netlink.LinkByName(name)
			check(err)
			check(netlink.LinkSetUp(link))
			if name == "eth0" {
				check(netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(24, 32)}}))
				check(netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.IPv4(10, 103, 0, 1)}))
			}
		}
	})
	return m
}

// in runs f in the machine's network namespace.
func (m *machine) in(f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	check(netns.Set(m.ns))
	defer func() { check(netns.Set(m.l.home)) }()
	f()
}

// command prepares a program that runs in the machine. start starts it.
func (m *machine) command(argv ...string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = []string{"PATH=/bin:/sbin", "HOME=/"}
	return cmd
}

func (m *machine) start(cmd *exec.Cmd) {
	m.in(func() { check(cmd.Start()) })
}

// output runs a program to its end and returns its output.
func (m *machine) output(argv ...string) (string, error) {
	cmd := m.command(argv...)
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	m.start(cmd)
	err := cmd.Wait()
	return b.String(), err
}

func (m *machine) must(argv ...string) string {
	m.l.t.Helper()
	out, err := m.output(argv...)
	if err != nil {
		m.l.t.Fatalf("%s: %v: %v\n%s", m.name, argv, err, out)
	}
	return out
}

func (l *lab) close() {
	for _, m := range append(slices.Clone(l.nodes), l.masters...) {
		m.stopProcess()
		if l.t.Failed() && m.log != nil {
			l.t.Logf("%s said:\n%s", m.name, m.log)
		}
		// An open socket of a test would keep the namespace, and rules in it would keep the modules
		// loaded.
		m.output("/bin/ipvsadm", "-C")
		m.ns.Close()
		if link, err := netlink.LinkByName(m.veth); err == nil {
			netlink.LinkDel(link)
		}
	}
	netlink.LinkDel(l.bridge)
	l.home.Close()
	os.Remove("/run/configmap.json")
}

func (m *machine) stopProcess() {
	if m.cmd != nil {
		m.cmd.Process.Signal(syscall.SIGCONT)
		m.cmd.Process.Kill()
		m.cmd.Wait()
		m.cmd = nil
	}
}

// certificate makes the master's certificate, which it uses from its next start on.
func (m *machine) certificate(a *authority, from, to time.Time) {
	check(os.WriteFile(m.dir+"/tls.pem", a.issue([]net.IP{m.addr.AsSlice()}, from, to), 0o600))
}

// serve starts the master.
func (m *machine) serve() {
	os.Remove(m.dir + "/up")
	m.cmd = m.command("/init")
	m.cmd.Env = append(m.cmd.Env, "GUEST_ROLE=master", "GUEST_MASTER="+m.dir)
	m.cmd.Stdout, m.cmd.Stderr = os.Stdout, os.Stdout
	m.start(m.cmd)
}

func (m *machine) awaitServing() {
	m.l.t.Helper()
	eventually(m.l.t, m.name+" serves", func() bool {
		_, err := os.Stat(m.dir + "/up")
		return err == nil
	})
}

// kill kills the process with SIGKILL and waits for its end, so that its sockets are closed.
func (m *machine) kill() { m.stopProcess() }

func (m *machine) signal(s syscall.Signal) { check(m.cmd.Process.Signal(s)) }

// mode sets the master's response to /readyz.
func (m *machine) mode(s string) { check(os.WriteFile(m.dir+"/mode", []byte(s), 0o644)) }

// netem sets the loss in percent and the delay of both directions, or removes both if they are 0.
func (m *machine) netem(loss float32, delay time.Duration) {
	set := func(name string) {
		link, err := netlink.LinkByName(name)
		check(err)
		attrs := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
		if loss == 0 && delay == 0 {
			netlink.QdiscDel(netlink.NewNetem(attrs, netlink.NetemQdiscAttrs{}))
			return
		}
		q := netlink.NewNetem(attrs, netlink.NetemQdiscAttrs{Loss: loss, Latency: uint32(delay.Microseconds()), Limit: 10000})
		check(netlink.QdiscReplace(q))
	}
	set(m.veth)
	m.in(func() { set("eth0") })
}

// virtual returns the node's configuration with all masters, which a test may change.
func (l *lab) virtual() ondisk.IPVSVirtual {
	v := ondisk.IPVSVirtual{VIP: vip, Host: "apiserver.cluster.local", CAFile: "/run/lab/ca.crt"}
	for _, m := range l.masters {
		v.Masters = append(v.Masters, m.addr.String()+":6443")
	}
	check(os.WriteFile(v.CAFile, l.ca.pem, 0o644))
	return v
}

// configure replaces ipvs.json with a rename.
func (n *machine) configure(vs ...ondisk.IPVSVirtual) {
	b, err := json.Marshal(ondisk.IPVS{Version: 1, Servers: vs})
	check(err)
	check(os.WriteFile(n.dir+"/ipvs.json.tmp", b, 0o644))
	check(os.Rename(n.dir+"/ipvs.json.tmp", n.dir+"/ipvs.json"))
}

// care starts ipvscare on the node and waits until it is ready.
func (n *machine) care(args ...string) {
	n.l.t.Helper()
	n.careStart(args...)
	eventually(n.l.t, "ipvscare is ready", func() bool { return n.log.count("ready: ") > 0 })
}

func (n *machine) careStart(args ...string) {
	hosts := n.dir + "/hosts"
	if _, err := os.Stat(hosts); err != nil {
		check(os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"), 0o644))
	}
	n.journalled(n.command(append([]string{"/bin/ipvscare", "run", "--config", n.dir + "/ipvs.json", "--hosts", hosts, "--state", n.dir + "/state", "--run-dir", n.dir + "/run"}, args...)...))
}

// rules returns the node's kernel table, without connections.
func (n *machine) rules() string {
	b, err := n.procFile("ip_vs")
	if err != nil {
		return err.Error()
	}
	var out, dests []string
	flush := func() {
		slices.Sort(dests) // the kernel lists the newest first
		out = append(out, dests...)
		dests = nil
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch {
		case len(f) >= 3 && f[0] == "TCP":
			flush()
			out = append(out, strings.Join(f, " "))
		case len(f) >= 4 && f[0] == "->" && f[1] != "RemoteAddress:Port":
			dests = append(dests, fmt.Sprintf("%s %s %s", f[1], f[2], f[3]))
		}
	}
	flush()
	return strings.Join(out, "; ")
}

// procFile reads a file of /proc/net in the node's namespace.
func (n *machine) procFile(name string) (b []byte, err error) {
	n.in(func() { b, err = os.ReadFile("/proc/thread-self/net/" + name) })
	return b, err
}

// source returns the source address with which the node reaches dst.
func (n *machine) source(dst string) (src string) {
	n.in(func() {
		routes, err := netlink.RouteGet(net.ParseIP(dst))
		if err == nil && len(routes) > 0 {
			src = routes[0].Src.String()
		}
	})
	return src
}

// run is t.Run for a subtest that uses the lab.
func (l *lab) run(name string, f func(t *testing.T)) {
	outer := l.t
	outer.Run(name, func(t *testing.T) {
		l.t = t
		defer func() { l.t = outer }()
		f(t)
	})
}

func hexAddr(a netip.Addr) string {
	b := a.As4()
	return fmt.Sprintf("%02X%02X%02X%02X", b[0], b[1], b[2], b[3])
}

// serving returns the names of masters with weight 1.
func (n *machine) serving() string {
	rules := n.rules()
	var names []string
	for _, m := range n.l.masters {
		if strings.Contains(rules, hexAddr(m.addr)+":192B Masq 1") {
			names = append(names, m.name)
		}
	}
	return strings.Join(names, " ")
}

// expect waits until exactly these masters have weight 1.
func (n *machine) expect(want string) {
	n.l.t.Helper()
	eventually(n.l.t, fmt.Sprintf("%s serves %q", n.name, want), func() bool { return n.serving() == want })
}

// stays fails if another master serves, or if one of these stops serving. A missing response is an
// exception: an emulated machine may have stalled, so stays then only requires that the masters
// serve again.
func (n *machine) stays(want string, during time.Duration) {
	n.l.t.Helper()
	wanted := strings.Fields(want)
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		got := n.serving()
		if got == want {
			continue
		}
		stray := slices.ContainsFunc(strings.Fields(got), func(name string) bool { return !slices.Contains(wanted, name) })
		if stray || !n.heldUp() {
			n.l.t.Fatalf("%s serves %q, it should stay at %q", n.name, got, want)
		}
		n.l.t.Logf("%s serves %q for a while, since there was no answer in time", n.name, got)
		n.expect(want)
	}
}

// heldUp reports whether ipvscare considered a master down because of a missing response. Without a
// fault, the emulated machine had stalled for seconds, and the verdict was correct.
func (n *machine) heldUp() bool {
	return slices.ContainsFunc(n.past, func(j *journal) bool { return j.count("(no answer") > 0 })
}

// unbroken fails if a watch on a live master broke, unless that master had not answered ipvscare
// for seconds.
func (n *machine) unbroken(w *watch) {
	n.l.t.Helper()
	if w.brokenAt().IsZero() {
		return
	}
	for _, m := range n.l.masters {
		down := func(j *journal) bool {
			return j.count(fmt.Sprintf("API server %s:6443 is down, it was up (no answer", m.addr)) > 0
		}
		if m.name == w.master && slices.ContainsFunc(n.past, down) {
			n.l.t.Logf("a watch on %s broke, which did not answer for seconds", w.master)
			return
		}
	}
	n.l.t.Errorf("a watch on the live master %s broke", w.master)
}

// breaks waits until a watch on a dead master breaks, and returns the time.
func (n *machine) breaks(w *watch) time.Time {
	n.l.t.Helper()
	eventually(n.l.t, "the watch on "+w.master+" breaks", func() bool { return !w.brokenAt().IsZero() })
	return w.brokenAt()
}

// patience is the time limit for reaching a state. It is long because the VM is emulated on a busy
// machine; only benchmarks measure durations.
const patience = 3 * time.Minute

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// dial connects from the node, with a new socket in its namespace.
func (n *machine) dial(addr string, timeout time.Duration) (c net.Conn, err error) {
	n.in(func() { c, err = net.DialTimeout("tcp", addr, timeout) })
	return c, err
}

// ask makes one new connection to addr. It returns the connection and the name of the master that
// answers.
func (n *machine) ask(addr string, timeout time.Duration) (net.Conn, string, error) {
	end := time.Now().Add(timeout)
	c, err := n.dial(addr, timeout)
	if err != nil {
		return nil, "", err
	}
	c.SetDeadline(end)
	if _, err = c.Write([]byte("x")); err == nil {
		var b [16]byte
		var k int
		if k, err = c.Read(b[:]); err == nil {
			c.SetDeadline(time.Time{})
			return c, strings.TrimSpace(string(b[:k])), nil
		}
	}
	c.Close()
	return nil, "", err
}

// hammer makes new connections continuously until it is stopped.
type hammer struct {
	mu     sync.Mutex
	failed []time.Time
	ok     int
	stop   chan struct{}
	wg     sync.WaitGroup
}

func (n *machine) hammer(every, timeout time.Duration) *hammer {
	h := &hammer{stop: make(chan struct{})}
	h.wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-h.stop:
				return
			case <-tick.C:
			}
			h.wg.Go(func() {
				began := time.Now()
				c, _, err := n.ask(vip, timeout)
				if c != nil {
					c.Close()
				}
				h.mu.Lock()
				defer h.mu.Unlock()
				if err != nil {
					h.failed = append(h.failed, began)
				} else {
					h.ok++
				}
			})
		}
	})
	return h
}

// end stops the hammer. last is the time from since to the beginning of the last failed connection,
// and failed the number of connections that failed after since. ok is the number of all successful
// ones.
func (h *hammer) end(since time.Time) (last time.Duration, failed, ok int) {
	close(h.stop)
	h.wg.Wait()
	for _, at := range h.failed {
		if at.After(since) {
			failed++
			last = max(last, at.Sub(since))
		}
	}
	return last, failed, h.ok
}

// watch is an idle connection through the virtual address.
type watch struct {
	master string
	conn   net.Conn
	end    func() // of an HTTP/2 watch
	mu     sync.Mutex
	broken time.Time
}

func (n *machine) watch() *watch {
	n.l.t.Helper()
	w, err := n.tryWatch()
	if err != nil {
		n.l.t.Fatalf("%s: opening a watch: %v; rules: %s", n.name, err, n.rules())
	}
	return w
}

func (n *machine) tryWatch() (*watch, error) {
	c, master, err := n.ask(vip, time.Minute)
	if err != nil {
		return nil, err
	}
	w := &watch{master: master, conn: c}
	go w.await(c)
	return w, nil
}

// watchHTTP2 opens a watch as client-go does: TLS, HTTP/2, and a response without end.
func (n *machine) watchHTTP2(pings bool) *watch {
	n.l.t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(n.l.ca.cert)
	tr := &http.Transport{ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{},
		TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "apiserver.cluster.local"},
		DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			return n.dial(addr, time.Minute)
		}}
	if pings {
		tr.HTTP2.SendPingTimeout, tr.HTTP2.PingTimeout = 30*time.Second, 15*time.Second // client-go's
	}
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, "GET", "https://"+vip+"/watch", nil)
	check(err)
	resp, err := tr.RoundTrip(req)
	if err != nil {
		n.l.t.Fatalf("opening a watch: %v", err)
	}
	if resp.ProtoMajor != 2 {
		n.l.t.Fatalf("the watch is %s", resp.Proto)
	}
	var b [16]byte
	k, err := resp.Body.Read(b[:])
	check(err)
	w := &watch{master: strings.TrimSpace(string(b[:k])), end: func() { cancel(); tr.CloseIdleConnections() }}
	go w.await(resp.Body)
	return w
}

// await records when the watch ends.
func (w *watch) await(r io.Reader) {
	var b [1]byte
	r.Read(b[:])
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = time.Now()
}

func (w *watch) close() {
	if w.end != nil {
		w.end()
		return
	}
	w.conn.Close()
}

func (w *watch) brokenAt() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.broken
}
