package ipvs

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ipvs/probe"
)

const (
	oldInfo, newInfo = "11111111-aaaa", "22222222-bbbb"
	oldNode, newNode = "33333333-cccc", "44444444-dddd"
	oldSvc, newSvc   = "55555555-eeee", "66666666-ffff"
)

// joinedOld is a record written by an earlier release. joinedNow has all three UIDs.
var (
	joinedOld = Joined{ClusterInfo: oldInfo, Node: "shop-1", NodeUID: oldNode}
	joinedNow = Joined{ClusterInfo: oldInfo, Node: "shop-1", NodeUID: oldNode, ServiceUID: oldSvc}
)

// shows has an API server's answers to requests for the objects that identify its cluster. Each
// answer is a UID, or the digits of an HTTP status.
type shows struct {
	mu         sync.Mutex
	info, node string
	service    string
	asked      int
	unwell     atomic.Bool
}

func (s *shows) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

func (s *shows) set(info, node string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info, s.node = info, node
}

func (s *shows) setService(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.service = uid
}

func (s *shows) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := map[string]string{clusterInfoPath: s.info, nodePath + "shop-1": s.node, servicePath: s.service}[r.URL.Path]
	if answer == "" {
		if s.unwell.Load() {
			w.WriteHeader(500)
		}
		io.WriteString(w, "ok")
		return
	}
	s.asked++
	if status := map[string]int{"401": 401, "403": 403, "404": 404, "503": 503}[answer]; status != 0 {
		w.WriteHeader(status)
		return
	}
	if !strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata") {
		answer += " asked for with all its contents"
	}
	io.WriteString(w, `{"kind":"PartialObjectMetadata","metadata":{"name":"x","uid":"`+answer+`"}}`)
}

// TestJoinedCheck checks which answers prove the cluster that the node joined.
func TestJoinedCheck(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, tt := range []struct {
		name, info, node string
		outcome          probe.Outcome
		hidden           bool
	}{
		{"as it was", oldInfo, oldNode, probe.OK, false},
		{"the Node was deleted, as a person may do", oldInfo, "404", probe.OK, false},
		{"the Node is another's by now", oldInfo, newNode, probe.OK, false},
		{"cluster-info was made anew", newInfo, oldNode, probe.OK, false},
		{"cluster-info was deleted", "404", oldNode, probe.OK, false},
		{"nobody reads anonymously any more", "401", oldNode, probe.OK, false},
		{"recreated", newInfo, "404", probe.Recreated, false},
		{"recreated, with a machine of that name", newInfo, newNode, probe.Recreated, false},
		{"recreated, and still starting", newInfo, "403", probe.Unshown, false},
		{"recreated, and not published yet", "403", "404", probe.Unshown, true},
		{"both are gone", "404", "404", probe.Unshown, true},
		{"hidden, and the node's certificate has expired", "403", "401", probe.Unshown, true},
		{"starting", "503", "503", probe.Busy, false},
		{"cluster-info cannot be read, and the Node is as it was", "", oldNode, probe.OK, false},
		{"cluster-info cannot be read, and the Node is another's", "", newNode, probe.Closed, false},
		{"cluster-info was made anew, and the Node cannot be read", newInfo, "", probe.Closed, false},
		{"cluster-info was made anew, and the node's certificate has expired", newInfo, "401", probe.Unshown, false},
		{"starting, and the Node is not there", "503", "404", probe.Busy, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeMaster(t, cert)
				m.http.Handler = &shows{info: tt.info, node: tt.node}
				m.start()
				outcome, err := joinedOld.check(t.Context(), probe.Target{Addr: addrAt(1), SNI: "apiserver.cluster.local", Roots: c.roots(t), Dial: m.dial})
				if outcome != tt.outcome || (err == nil) != (outcome == probe.OK) || err != nil && strings.Contains(err.Error(), "it shows neither") != tt.hidden {
					t.Errorf("got %v: %v", outcome, err)
				}
				m.stop()
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestJoinedCheckWithService checks a configuration with the Service's UID: a re-created cluster is
// recognized even before it has published cluster-info. An API server without the Node is not
// trusted after maxHidden either.
func TestJoinedCheckWithService(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, tt := range []struct {
		name, info, node, service string
		outcome                   probe.Outcome
		hidden                    bool
	}{
		{"as it was", oldInfo, oldNode, oldSvc, probe.OK, false},
		{"the Service was made anew", oldInfo, "404", newSvc, probe.OK, false},
		{"the Service and cluster-info were made anew", newInfo, oldNode, newSvc, probe.OK, false},
		{"cluster-info was made anew, and the Node deleted", newInfo, "404", oldSvc, probe.OK, false},
		{"cluster-info was deleted, and the Node is another's", "404", newNode, oldSvc, probe.OK, false},
		{"cluster-info cannot be read, and the Node was deleted", "", "404", oldSvc, probe.OK, false},
		{"recreated", newInfo, "404", newSvc, probe.Recreated, false},
		{"recreated, and not published yet", "403", "404", newSvc, probe.Recreated, false},
		{"recreated, and never published", "404", newNode, newSvc, probe.Recreated, false},
		{"recreated a moment ago", "403", "404", "404", probe.Unshown, false},
		{"recreated, and nodes may not read Services", newInfo, "404", "403", probe.Recreated, false},
		{"all are hidden", "403", "404", "403", probe.Unshown, false},
		{"hidden, and the node's certificate has expired", "403", "401", "401", probe.Unshown, true},
		{"cluster-info and the Service cannot be read", "", "404", "", probe.Closed, false},
		{"the Service cannot be read", "404", "404", "", probe.Closed, false},
		{"starting", "503", "503", "503", probe.Busy, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeMaster(t, cert)
				m.http.Handler = &shows{info: tt.info, node: tt.node, service: tt.service}
				m.start()
				outcome, err := joinedNow.check(t.Context(), probe.Target{Addr: addrAt(1), SNI: "apiserver.cluster.local", Roots: c.roots(t), Dial: m.dial})
				if outcome != tt.outcome || (err == nil) != (outcome == probe.OK) || errors.Is(err, errHidden) != tt.hidden {
					t.Errorf("got %v: %v", outcome, err)
				}
				m.stop()
				time.Sleep(time.Minute)
			})
		})
	}
}

// TestPublishingTakesLong checks that the only API server gets no traffic if it returns in a
// re-created cluster: neither while that cluster publishes nothing for an hour, nor afterwards.
func TestPublishingTakesLong(t *testing.T) {
	w := newGuardedWorld(t)
	w.s.Joined = joinedNow
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))
	w.m.stop()
	w.eventually("the API server has weight 0", w.serves("0"))
	g := w.daemon.kept()[w.s.VIP]
	g.mu.Lock()
	for _, m := range g.apiServers {
		m.hiddenSince = time.Now().Add(-time.Hour)
	}
	g.mu.Unlock()
	w.says.set("403", "404")
	w.says.setService("404")
	before := w.says.count()
	w.m.start()
	w.eventually("it is asked", func() bool { return w.says.count() > before+6 })
	if !w.serves("0")() {
		t.Errorf("before the Service exists: %s", w.kernel.text())
	}
	w.says.setService(newSvc)
	w.eventually("the API server is alien", w.serves(""))
	if w.said("trusting it as an API server of the cluster") > 0 {
		t.Error("the API server was accepted")
	}
}

// TestHiddenForLong checks that an API server that shows nothing is trusted after maxHidden and not
// before. Another result in between restarts the time.
func TestHiddenForLong(t *testing.T) {
	now := time.Now()
	var m apiServer
	for _, step := range []struct {
		after time.Duration
		err   error
		want  bool
	}{
		{0, errHidden, false},
		{maxHidden - time.Second, errHidden, false},
		{time.Second, errHidden, true},
		{time.Hour, errHidden, true},
		{time.Second, nil, false},
		{time.Second, errHidden, false},
		{time.Minute, io.EOF, false},
		{maxHidden - time.Second, errHidden, false},
	} {
		now = now.Add(step.after)
		if got := m.hiddenForLong(step.err, now); got != step.want {
			t.Errorf("%s later, with %v: %v", step.after, step.err, got)
		}
	}
}

// TestTrustedAnywayIsLoggedOnce checks that an API server that has shown nothing for maxHidden is trusted on each
// new connection, and that this is logged once.
func TestTrustedAnywayIsLoggedOnce(t *testing.T) {
	w := newGuardedWorld(t)
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))
	w.says.set("403", "404")
	g := w.daemon.kept()[w.s.VIP]
	for n := range 3 {
		w.m.stop()
		w.eventually("the API server has weight 0", w.serves("0"))
		if n == 0 {
			g.mu.Lock()
			for _, m := range g.apiServers {
				m.hiddenSince = time.Now().Add(-maxHidden)
			}
			g.mu.Unlock()
		}
		w.m.start()
		w.eventually("it serves again", w.serves("1"))
	}
	if n := w.said("trusting it as an API server of the cluster"); n != 1 {
		t.Errorf("the message was logged %d times", n)
	}
	// If the recorded UIDs change, the API server must match the new ones.
	s := w.s
	s.Joined.NodeUID = newNode
	w.m.stop()
	w.eventually("the API server has weight 0", w.serves("0"))
	g.update(s)
	before := w.says.count()
	w.m.start()
	w.eventually("it is asked", func() bool { return w.says.count() > before+4 })
	if !w.serves("0")() {
		t.Errorf("the API server showed none of the recorded UIDs: %s", w.kernel.text())
	}
}

// TestUIDsChangeOneByOne changes the cluster's UIDs one after the other. The API server must
// keep serving, because one UID always matches and first boot records the changed one again.
func TestUIDsChangeOneByOne(t *testing.T) {
	w := newGuardedWorld(t)
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))
	g, mark := w.daemon.kept()[w.s.VIP], w.kernel.mark()
	again := func() { // on a new connection
		t.Helper()
		before := w.says.count()
		g.mu.Lock()
		for _, m := range g.apiServers {
			wake(m.renew)
		}
		g.mu.Unlock()
		w.eventually("it is asked again", func() bool { return w.says.count() > before })
	}
	s := w.s
	w.says.set(newInfo, oldNode)
	again()
	s.Joined.ClusterInfo = newInfo
	g.update(s)
	w.says.set(newInfo, newNode)
	again()
	s.Joined.NodeUID = newNode
	g.update(s)
	w.says.set("404", newNode)
	again()
	if since := w.kernel.since(mark); len(since) > 0 || w.said("is alien") > 0 || w.said("is down") > 0 {
		t.Errorf("the rules changed: %q", since)
	}
}

// TestRecordedUIDsChange checks that the daemon uses the new UIDs once first boot has rewritten them
// in the configuration.
func TestRecordedUIDsChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	file := filepath.Join(t.TempDir(), "ipvs.json")
	write := func(joined Joined) {
		text := `{"version":1,"servers":[{"vip":"10.103.97.211:6443","masters":["192.0.2.11:6443"],` +
			`"joined":{"clusterInfo":"` + joined.ClusterInfo + `","node":"` + joined.Node + `","nodeUID":"` + joined.NodeUID + `","serviceUID":"` + joined.ServiceUID + `"}}]}` + "\n"
		if err := files.Replace(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(joinedOld)
	d := NewDaemon(Options{ConfigFile: file, Kernel: w.kernel, Log: w.log, Ready: func() {}})
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- d.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	uses := func(joined Joined) func() bool {
		return func() bool {
			for _, g := range d.kept() {
				g.mu.Lock()
				defer g.mu.Unlock()
				return g.server.Joined == joined
			}
			return false
		}
	}
	w.eventually("the daemon uses the recorded UIDs", uses(joinedOld))
	for _, joined := range []Joined{{newInfo, "shop-1", oldNode, oldSvc}, {newInfo, "shop-1", newNode, newSvc}} {
		write(joined)
		w.eventually("the daemon uses the new recorded UIDs", uses(joined))
	}
}

// guardedWorld is a daemon with one API server. That API server may belong to another cluster when
// it starts again.
type guardedWorld struct {
	*world
	ca   *ca
	m    *loopMaster
	says *shows
	s    Server
}

func newGuardedWorld(t *testing.T) *guardedWorld {
	t.Helper()
	from, to := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	w := &guardedWorld{world: newWorld(t, 1), ca: newCA(t, from, to), says: &shows{info: oldInfo, node: oldNode, service: oldSvc}}
	file := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(file, w.ca.pem, 0o600); err != nil {
		t.Fatal(err)
	}
	w.m = w.masters[0]
	w.m.handler, w.m.cert = w.says, w.ca.issue(t, from, to, "kubernetes")
	w.m.stop()
	w.m.start()
	w.s = testServer(t, 210)
	w.s.Probe.CAFile, w.s.Joined = file, joinedOld
	w.s.Masters = []Master{w.m.master()}
	return w
}

func (w *guardedWorld) serves(weight string) func() bool {
	want := w.s.VIP.String() + " rr"
	if weight != "" {
		want += " " + w.m.addr.Addr().String() + "=" + weight
	}
	return func() bool { return w.kernel.text() == want }
}

// TestRecreatedCluster checks the only API server when it returns in a cluster that was re-created with
// the same keys. It gets no new connections; existing ones stay until it has shown another cluster.
// When the joined cluster returns, it gets traffic at once.
func TestRecreatedCluster(t *testing.T) {
	w := newGuardedWorld(t)
	mine := kernel.Conn{Client: netip.MustParseAddrPort("10.0.0.100:1"), Virtual: w.s.VIP, Dest: w.m.addr}
	w.kernel.change(func() { w.kernel.conns = []kernel.Conn{mine} })
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))

	w.m.stop()
	w.eventually("it keeps its connections and gets no others", w.serves("0"))
	w.kernel.change(func() {
		if len(w.kernel.severed) > 0 {
			t.Errorf("severed %v", w.kernel.severed)
		}
	})
	w.says.set("403", "404") // the API server starts
	before := w.says.count()
	w.m.start()
	w.eventually("it is asked", func() bool { return w.says.count() > before+4 })
	if !w.serves("0")() {
		t.Errorf("before the API server showed its cluster: %s", w.kernel.text())
	}
	w.says.set(newInfo, "404")
	w.eventually("the API server is alien", w.serves(""))
	w.kernel.change(func() {
		if !slices.Equal(w.kernel.severed, []kernel.Conn{mine}) {
			t.Errorf("severed %v", w.kernel.severed)
		}
	})
	st := w.daemon.Status().Servers[0].Masters[0]
	if st.State != "alien" || st.Serving || !strings.Contains(st.Last, "a Site with a token of that cluster") || !strings.Contains(st.Error, newInfo) {
		t.Errorf("status: %+v", st)
	}

	// A restart of ipvscare changes nothing; other UIDs in the configuration do.
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	w.start(w.s)
	w.eventually("it is still another's", func() bool { return w.said("is alien, it was") == 2 })
	if !w.serves("")() {
		t.Errorf("after a restart: %s", w.kernel.text())
	}
	accepted := w.s
	accepted.Joined = Joined{ClusterInfo: newInfo, Node: "shop-1", NodeUID: newNode}
	w.daemon.all()[0].update(accepted)
	w.eventually("the new cluster serves", w.serves("1"))
}

// TestRestartInAnOutage checks that a restart of ipvscare changes nothing while the only API server
// does not answer but keeps its connections.
func TestRestartInAnOutage(t *testing.T) {
	w := newGuardedWorld(t)
	mine := kernel.Conn{Client: netip.MustParseAddrPort("10.0.0.100:1"), Virtual: w.s.VIP, Dest: w.m.addr}
	w.kernel.change(func() { w.kernel.conns = []kernel.Conn{mine} })
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))
	w.m.stop()
	w.eventually("it keeps its connections and gets no others", w.serves("0"))
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	mark := w.kernel.mark()
	w.start(w.s)
	w.eventually("it is down", func() bool { return w.said("is down, it was unknown") == 1 })
	if since := w.kernel.since(mark); len(since) > 0 || !w.serves("0")() {
		t.Errorf("the restart led to %q, then %s", since, w.kernel.text())
	}
	w.m.start()
	w.eventually("it serves again", w.serves("1"))
	w.kernel.change(func() {
		if len(w.kernel.severed) > 0 {
			t.Errorf("severed %v", w.kernel.severed)
		}
	})
}

// TestSameClusterComesBack checks that an API server that did not answer gets its traffic back, and
// that the last API server keeps its traffic while it answers with errors.
func TestSameClusterComesBack(t *testing.T) {
	t.Parallel()
	w := newGuardedWorld(t)
	w.start(w.s)
	w.eventually("it serves", w.serves("1"))
	w.m.stop()
	w.eventually("the API server has weight 0", w.serves("0"))
	w.m.start()
	w.eventually("it serves again", func() bool { return w.said("is up, it was down") == 1 && w.serves("1")() })
	mark := w.kernel.mark()
	w.says.unwell.Store(true)
	w.eventually("it is down", func() bool { return w.said("is down, it was up (server error") == 1 })
	w.says.unwell.Store(false)
	w.eventually("it is well", func() bool { return w.said("is up, it was down") == 2 })
	for _, was := range w.kernel.since(mark) {
		if !strings.Contains(was, "=1") {
			t.Errorf("the only API server that answers: %s", was)
		}
	}
	if !w.serves("1")() {
		t.Errorf("the API server is up again, but the rules are %s", w.kernel.text())
	}
}

// TestRecreatedClusterWithoutIPVS checks that without IPVS, no API server of a re-created cluster gets
// into /etc/hosts.
func TestRecreatedClusterWithoutIPVS(t *testing.T) {
	t.Parallel()
	w := newGuardedWorld(t)
	w.kernel.absent = true
	w.s.VIP = netip.AddrPortFrom(w.s.VIP.Addr(), w.m.addr.Port()) // a hosts file cannot change ports
	names := func(addr string) func() bool {
		return func() bool {
			got, _ := os.ReadFile(w.hosts)
			return strings.Contains(string(got), addr+" apiserver.cluster.local")
		}
	}
	w.start(w.s)
	w.eventually("the name is the master's", names(w.m.addr.Addr().String()))
	w.m.stop()
	w.says.set(newInfo, "404")
	w.m.start()
	w.eventually("the name leads nowhere", names(w.s.VIP.Addr().String()))
	w.eventually("the API server is alien", func() bool { return w.said("is alien") == 1 })
	w.says.set(oldInfo, oldNode)
	w.eventually("the name is the master's again", names(w.m.addr.Addr().String()))
}

// TestDamagedCA checks that ipvscare keeps the rules of an earlier process if the CA file is
// damaged when it starts, and that it gives no traffic to API servers that it cannot verify. It
// probes API servers once the file is readable. The same applies if a new configuration names
// another file.
func TestDamagedCA(t *testing.T) {
	for _, served := range []bool{false, true} {
		t.Run(map[bool]string{false: "empty", true: "served"}[served], func(t *testing.T) { // short, because it is part of a Unix socket's path
			t.Parallel()
			testDamagedCA(t, served)
		})
	}
}

func testDamagedCA(t *testing.T, served bool) {
	w := newGuardedWorld(t)
	write := func(file string, pem []byte) {
		t.Helper()
		if err := os.WriteFile(file, pem, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(w.s.Probe.CAFile, w.ca.pem[:len(w.ca.pem)/2])
	weight := ""
	if served {
		weight = "1"
		w.kernel.Services = []kernel.Service{{VIP: w.s.VIP, Scheduler: "rr", Dests: []kernel.Dest{{Addr: w.m.addr, Weight: 1, Forward: kernel.Masq}}}}
	}
	w.start(w.s)
	w.kernel.change(func() { w.kernel.Services = nil; w.kernel.wake() })
	w.eventually("the rules are kept", w.serves(weight))
	waits := func() {
		t.Helper()
		if st := w.daemon.Status(); st.Servers[0].Verified || !slices.ContainsFunc(st.Problems, func(p string) bool { return strings.Contains(p, "; probing no API server until it can be read") }) {
			t.Errorf("status: %+v", st)
		}
		if m := string(w.daemon.Metrics()); !strings.Contains(m, "ipvscare_problems 1\n") {
			t.Errorf("problems: %q", w.daemon.Status().Problems)
		}
	}
	waits()
	if dials := w.daemon.stats.wire[countDial].Load(); dials > 0 {
		t.Errorf("%d connections without a CA", dials)
	}
	if err := os.Remove(w.s.Probe.CAFile); err != nil { // a node that has joined has a CA
		t.Fatal(err)
	}
	w.eventually("the missing file is reported", func() bool {
		return slices.ContainsFunc(w.daemon.Status().Problems, func(p string) bool { return strings.Contains(p, "no such file") })
	})
	time.Sleep(4 * w.s.Profile.Ready)
	if dials := w.daemon.stats.wire[countDial].Load(); dials > 0 {
		t.Errorf("%d connections without a CA file", dials)
	}
	write(w.s.Probe.CAFile, w.ca.pem)
	w.eventually("it is verified and serves", func() bool {
		st := w.daemon.Status().Servers[0]
		return st.Verified && st.Masters[0].State == "up" && w.serves("1")()
	})

	other := w.s
	other.Probe.CAFile = filepath.Join(t.TempDir(), "other.crt")
	write(other.Probe.CAFile, []byte("nonsense"))
	if err := w.daemon.replace(w.ctx, []Server{other}); err != nil {
		t.Fatal(err)
	}
	waits()
	asked := w.says.count()
	time.Sleep(4 * w.s.Profile.Ready)
	if !w.serves("1")() || w.says.count() > asked+1 {
		t.Errorf("with another, damaged file: %d requests, %s", w.says.count()-asked, w.kernel.text())
	}
	write(other.Probe.CAFile, w.ca.pem)
	w.eventually("the problem is gone", func() bool { return len(w.daemon.Status().Problems) == 0 && w.says.count() > asked+1 })
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
}
