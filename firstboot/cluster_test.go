package firstboot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// rebuild puts another cluster in place of the machine's, at the same
// addresses.
func (w *world) rebuild() (former *fakeCluster) {
	former = w.cluster
	w.cluster = newFakeCluster(w.t)
	w.cluster.pools = former.pools
	w.cluster.of(w)
	return former
}

func (w *world) mustBoot() {
	w.t.Helper()
	if err := w.boot(); err != nil {
		w.t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

const unpinnedSite = "unsafeSkipCAVerification: true"

// unpin takes the pins out of a site.
func unpin(site string) string {
	var out []string
	for line := range strings.Lines(site) {
		if strings.HasPrefix(line, "caCertHashes:") {
			line = unpinnedSite + "\n"
		}
		out = append(out, line)
	}
	return strings.Join(out, "")
}

func wantMember(t *testing.T, w *world, joins int) {
	t.Helper()
	if w.joins != joins || w.state().Result != ondisk.ResultDone || len(w.cluster.nodes) != 1 {
		t.Errorf("%d joins, result %s, nodes %v\n%s", w.joins, w.state().Result, w.cluster.nodes, strings.Join(w.console, "\n"))
	}
	if got := w.get(ondisk.KubeCA); got != string(w.cluster.pem) {
		t.Error("the CA on the disk is another cluster's")
	}
	k, err := member.Credentials(w.env())
	if err != nil {
		t.Fatal(err)
	}
	if c, err := k.Cluster(); err != nil {
		t.Error(err)
	} else if ca, err := c.CA(w.root); err != nil || string(ca) != string(w.cluster.pem) {
		t.Errorf("the kubeconfig trusts another CA (%v)", err)
	}
	for _, p := range []string{member.LeavingFile, ondisk.IPVSLearned} {
		if w.has(p) {
			t.Errorf("%s is there", p)
		}
	}
	noSecret(t, w)
}

// TestSiteOfAnotherCluster: the machine leaves its cluster for the one that
// the site pins, in every form.
func TestSiteOfAnotherCluster(t *testing.T) {
	t.Parallel()
	edge := []string{"nodeType: edge", "nodePool: shanghai"}
	for _, tc := range []struct {
		name  string
		world func(*testing.T) *world
		lines []string
		skip  bool
	}{
		{"native", func(t *testing.T) *world { return nativeWorld(t) }, nil, false},
		{"native, several pins", func(t *testing.T) *world { return nativeWorld(t) }, nil, false},
		{"native without pins", func(t *testing.T) *world { return nativeWorld(t) }, nil, true},
		{"edge", func(t *testing.T) *world { return edgeWorld(t) }, edge, false},
		{"static pod", podWorld, edge, false},
		{"static pod without pins", podWorld, edge, true},
		{"edge to native", func(t *testing.T) *world { return edgeWorld(t) }, nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := tc.world(t)
			w.mustBoot()
			w.put(ondisk.IPVSLearned, "{}")
			former := w.rebuild()
			next := w.site(append([]string{withToken}, tc.lines...)...)
			if strings.Contains(tc.name, "several") {
				next = strings.Replace(next, "caCertHashes: [", "caCertHashes: ['sha256:"+strings.Repeat("0", 64)+"', ", 1)
			}
			if tc.skip {
				next = unpin(next)
			}
			w.stamp(ownDev, next)
			w.powerOn()
			w.mustBoot()
			wantMember(t, w, 2)
			if !w.said("leaving the former one (CA "+former.pin+")") || !w.said("kubectl delete node edge-sn0042") {
				t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
			}
			if tc.name == "edge to native" && (w.has(hub.EnvFile) || member.Redirected(w.env())) {
				t.Error("yurthub is still there")
			}
			w.powerOn()
			w.mustBoot()
			if w.joins != 2 || w.said("leaving") {
				t.Errorf("it joined again\n%s", strings.Join(w.console, "\n"))
			}
		})
	}
}

// TestPowerCutWhileMoving ends in the other cluster wherever it happens.
func TestPowerCutWhileMoving(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"native", "unpinned", "unit", "staticPod"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			lines := []string{"nodeType: edge", "nodePool: shanghai"}
			w := nativeWorld(t)
			switch form {
			case "unit":
				w = edgeWorld(t)
			case "staticPod":
				w = podWorld(t)
			default:
				lines = nil
			}
			w.oneMaster()
			w.mustBoot()
			w.put(ondisk.IPVSLearned, "{}")
			w.rebuild()
			next := w.site(append(lines, withToken)...)
			if form == "unpinned" {
				next = unpin(next)
			}
			w.stamp(ownDev, next)
			w.powerOn()
			whole := w.clone(t)
			whole.mustBoot()
			// What comes after it is a first boot's way.
			left := slices.Index(whole.names, "remove "+member.LeavingFile)
			if left < 10 {
				t.Fatalf("it left after %d effects: %v", left, whole.names)
			}
			followed := map[[32]byte]bool{}
			for n := slices.Index(whole.names, "write "+member.LeavingFile); n < left+3; n++ {
				cut := w.clone(t)
				cut.cutAt = n + 1
				if err := cut.boot(); err == nil {
					t.Fatalf("cut at %d, it went on", n)
				}
				at := cut.names[len(cut.names)-1]
				cut.powerOn()
				left := cut.files()
				state := cut.snapshot(t, left)
				if followed[state] {
					continue // the very machine of another cut
				}
				followed[state] = true
				if err := cut.boot(); err != nil {
					t.Fatalf("cut at %s: %v\n%s", at, err, strings.Join(cut.console, "\n"))
				}
				wantMember(t, cut, cut.joins)
			}
		})
	}
}

// TestMoveWithoutAToken stops, says so, and leaves the node as it runs.
func TestMoveWithoutAToken(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	ipvs, former := w.get(ondisk.IPVSConfig), w.rebuild()
	w.stamp(ownDev, strings.Replace(w.site(), "192.0.2.13", "192.0.2.14", 1))
	for _, offline := range []bool{false, true} {
		w.powerOn()
		w.offline = offline
		if err := w.boot(); err == nil || !w.said("FAILED cluster: the Site is of another cluster") || !w.said(former.pin) || !w.said("put a token of the other cluster into site.yaml") {
			t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
		}
		if w.get(ondisk.IPVSConfig) != ipvs || w.get(ondisk.KubeCA) != string(former.pem) || member.Enrolled(w.env()) != nil || w.units[ondisk.UnitKubelet] != "active" {
			t.Error("the node was touched")
		}
	}
	// Without pins it may be something on the way that answers.
	w.stamp(ownDev, unpin(w.site()))
	w.powerOn()
	w.offline = false
	if err := w.boot(); err == nil || !w.said("the API servers are not of the cluster that this machine is enrolled in") || member.Enrolled(w.env()) != nil ||
		w.state().Result != ondisk.ResultWaiting || w.said("tried again") || w.said("FAILED") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if phases := w.state().Phases; phases[len(phases)-2].Status != ondisk.PhaseWaiting {
		t.Errorf("it stopped before it looked for its Node: %+v", phases)
	}
	// And offline an unpinned node goes on.
	w.powerOn()
	w.offline = true
	if err := w.boot(); err == nil || w.state().Result != ondisk.ResultWaiting || w.said("FAILED") || w.said("tried again") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestMoveWaitsForTheOtherCluster: until it shows itself, the node stays whole
// in its own, and keeps the token for the other.
func TestMoveWaitsForTheOtherCluster(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*world){
		"out of reach":    func(w *world) { w.cluster.allDown(true); w.cluster.down["192.0.2.14:6443"] = true },
		"token not valid": func(w *world) { w.cluster.revoked = true },
		"name taken":      func(w *world) { w.cluster.register("edge-sn0042", "", "another") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.mustBoot()
			w.rebuild()
			ipvs, ca := w.get(ondisk.IPVSConfig), w.get(ondisk.KubeCA)
			spoil(w)
			site := strings.Replace(w.site(withToken), "192.0.2.13", "192.0.2.14", 1)
			w.stamp(ownDev, site)
			w.powerOn()
			if err := w.boot(); err == nil {
				t.Fatal("it moved")
			}
			if w.get(ondisk.IPVSConfig) != ipvs || w.get(ondisk.KubeCA) != ca || member.Enrolled(w.env()) != nil || w.slotSite(ownDev) != site {
				t.Errorf("something was changed\n%s", strings.Join(w.console, "\n"))
			}
			w.cluster.down = map[string]bool{}
			w.cluster.revoked = false
			delete(w.cluster.nodes, "edge-sn0042")
			w.powerOn()
			w.mustBoot()
			wantMember(t, w, 2)
		})
	}
}

// TestSlipInThePins: a token and a wrong hash do not cost a node that runs.
func TestSlipInThePins(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	site := strings.Replace(w.site(withToken), w.cluster.pin, "sha256:"+strings.Repeat("0", 64), 1)
	w.stamp(ownDev, site)
	w.powerOn()
	if err := w.boot(); err == nil || !w.said("FAILED cluster") || !w.said("compare caCertHashes") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if member.Enrolled(w.env()) != nil || w.slotSite(ownDev) != site {
		t.Error("the node left its cluster, or the token is gone")
	}
}

// TestTwoClustersInReach: the former one still answers, and still shows the
// node as Ready.
func TestTwoClustersInReach(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	former := w.rebuild()
	w.stamp(ownDev, strings.ReplaceAll(w.site(withToken), "192.0.2.1", "192.0.2.2"))
	w.powerOn()
	e := w.env()
	e.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) {
		switch {
		case strings.HasPrefix(addr, "192.0.2.2"), strings.HasPrefix(addr, "apiserver") && strings.Contains(w.get(ondisk.IPVSConfig), "192.0.2.2"):
			return w.cluster.dial(ctx, "192.0.2.11:6443")
		case strings.HasPrefix(addr, "192.0.2.1"), strings.HasPrefix(addr, "apiserver"):
			return former.dial(ctx, addr)
		}
		return nil, errors.New("no route")
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	wantMember(t, w, 2)
}

// TestMoveUnderAnotherName: the machine keeps its name until it has left.
func TestMoveUnderAnotherName(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.rebuild()
	w.stamp(ownDev, strings.Replace(w.site(withToken), "edge-{{.Serial}}", "other", 1))
	w.powerOn()
	w.before = func(effect string) {
		if effect == "hostname other" && member.Enrolled(w.env()) == nil {
			t.Error("renamed while it was a member of the former cluster")
		}
	}
	w.mustBoot()
	wantMember(t, w, 2)
	if w.cluster.nodes["other"] == nil || strings.TrimSpace(w.get("/etc/hostname")) != "other" {
		t.Errorf("it is called %s, nodes %v", w.get("/etc/hostname"), w.cluster.nodes)
	}
}

// TestCAOfADiscoveryThatNeverJoined does not stand in the way of the next
// site.
func TestCAOfADiscoveryThatNeverJoined(t *testing.T) {
	t.Parallel()
	for _, pinned := range []bool{true, false} {
		w := nativeWorld(t)
		w.joinError = func(n int) error { return errors.New("kubelet is not well") }
		if err := w.boot(); err == nil || !w.has(ondisk.KubeCA) {
			t.Fatal("the CA is not there")
		}
		w.joinError = nil
		w.rebuild()
		site := w.site(withToken)
		if !pinned {
			site = unpin(site)
		}
		// ipvscare verifies the masters with the CA on the disk.
		e := w.env()
		dial := e.Dial
		e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if strings.HasPrefix(addr, "apiserver") && w.has(ondisk.KubeCA) && w.get(ondisk.KubeCA) != string(w.cluster.pem) {
				return nil, errors.New("connection refused")
			}
			return dial(ctx, network, addr)
		}
		w.stamp(ownDev, site)
		w.joins = 0
		w.powerOn()
		if err := w.run(New(e)); err != nil {
			t.Fatalf("pinned %v: %v\n%s", pinned, err, strings.Join(w.console, "\n"))
		}
		wantMember(t, w, 1)
	}
}

// TestDiscoveryOfAnotherSite: what this boot discovered for one site is not
// what the next one joins with.
func TestDiscoveryOfAnotherSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.before = func(effect string) {
		// After the discovery, before the join is begun.
		if effect == "write "+member.JoinedFile && w.joins == 0 && w.slotSite(ownDev) != "" {
			w.before = nil
			w.joinError = func(n int) error {
				w.joinError = nil
				w.rebuild()
				w.stamp(ownDev, w.site(withToken))
				return errors.New("kubelet is not well")
			}
		}
	}
	w.mustBoot()
	wantMember(t, w, 2)
}

// TestSlipInTheName: a member is not renamed, whatever else its site changes.
func TestSlipInTheName(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.stamp(ownDev, strings.Replace(w.site(), "edge-{{.Serial}}", "other", 1))
	for range 2 {
		w.powerOn()
		if err := w.boot(); err == nil || !w.said("enrolled as edge-sn0042, the Site calls it other") {
			t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
		}
		if name := w.get("/proc/sys/kernel/hostname") + w.get("/etc/hostname"); name != "edge-sn0042\nedge-sn0042\n" {
			t.Errorf("it is called %q", name)
		}
		if slices.ContainsFunc(w.names, func(n string) bool { return strings.HasPrefix(n, "hostname") && n != "hostname edge-sn0042" }) {
			t.Errorf("it was renamed on the way: %v", w.names)
		}
	}
}

// TestNewCardSortsFirst: the name came from the first card, which is another
// one now.
func TestNewCardSortsFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	site := func(lines ...string) string {
		return strings.Replace(w.site(lines...), "edge-{{.Serial}}", "edge-{{.MAC}}", 1)
	}
	w.stamp(ownDev, site(withToken))
	w.mustBoot()
	w.put("/sys/class/net/enp1s0/address", "52:54:00:00:00:01\n")
	w.put("/sys/class/net/enp1s0/device/vendor", "0x8086\n")
	for _, s := range []string{site(), site("report: {url: 'https://report.example/'}")} {
		w.stamp(ownDev, s)
		w.powerOn()
		w.mustBoot()
		if name := strings.TrimSpace(w.get("/proc/sys/kernel/hostname")); name != "edge-525400123456" || w.joins != 1 {
			t.Errorf("it is called %s, and joined %d times", name, w.joins)
		}
	}
	// A slip is one still.
	w.stamp(ownDev, strings.Replace(site(), "edge-{{.MAC}}", "shop-{{.MAC}}", 1))
	w.powerOn()
	if err := w.boot(); err == nil || !w.said("enrolled as edge-525400123456, the Site calls it shop-") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestNewCardAndAnExpiredCertificate: the machine joins again as what it was,
// and stays it.
func TestNewCardAndAnExpiredCertificate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	site := strings.Replace(w.site(withToken), "edge-{{.Serial}}", "edge-{{.MAC}}", 1)
	w.stamp(ownDev, site)
	w.mustBoot()
	w.put("/sys/class/net/enp1s0/address", "52:54:00:00:00:01\n")
	w.put("/sys/class/net/enp1s0/device/vendor", "0x8086\n")
	w.now = w.now.AddDate(2, 0, 0)
	w.cluster.nodes["edge-525400123456"].Status.Conditions[0].Status = "Unknown"
	w.cluster.revive = true
	w.joinError = func(n int) error {
		w.joinError = nil
		return errors.New("kubelet is not well")
	}
	w.stamp(ownDev, site)
	for range 2 {
		w.powerOn()
		w.mustBoot()
		wantMember(t, w, 3)
		if name := strings.TrimSpace(w.get("/proc/sys/kernel/hostname")); name != "edge-525400123456" {
			t.Errorf("it is called %s", name)
		}
	}
}

// TestNewTokenWhileOffline: it is kept until the cluster has seen the node.
func TestNewTokenWhileOffline(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(*world, bool){
		"offline":      func(w *world, on bool) { w.offline = on },
		"masters down": func(w *world, on bool) { w.cluster.allDown(on) },
	} {
		w := nativeWorld(t)
		w.mustBoot()
		w.stamp(ownDev, w.site(withToken))
		w.powerOn()
		away(w, true)
		if err := w.boot(); err == nil || !strings.Contains(w.slotSite(ownDev), testToken) {
			t.Errorf("%s: the token was forgotten unused (%v)\n%s", name, err, strings.Join(w.console, "\n"))
		}
		away(w, false)
		w.powerOn()
		w.mustBoot()
		noSecret(t, w)
	}
}

// TestRejoinIsSeenReady: what the cluster has seen of an enrolment says
// nothing of the next one, so that its token is not forgotten too soon.
func TestRejoinIsSeenReady(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.now = w.now.AddDate(2, 0, 0)
	w.cluster.nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.cluster.revive = true
	w.stamp(ownDev, w.site(withToken))
	w.powerOn()
	w.before = func(effect string) {
		if effect == "kubeadm ends" {
			w.offline = true
		}
	}
	if err := w.boot(); err == nil || !strings.Contains(w.slotSite(ownDev), testToken) || w.has(member.ReadyMark) {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

const ownEndpoint = "apiserver.cluster.local:6443"

// bearAgain has the cluster begin with nothing, with the keys that it has; so
// ipvscare gives its masters no traffic.
func (w *world) bearAgain() {
	w.cluster.births++
	w.cluster.nodes = map[string]*api.Node{}
	w.cluster.down[ownEndpoint] = true
}

// JoinedAs is the note of the cluster, and ipvscare's.
func (w *world) wantJoined(births int) {
	w.t.Helper()
	want := &ondisk.IPVSJoined{ClusterInfo: fmt.Sprint("info-", births), Node: "edge-sn0042", NodeUID: fmt.Sprint("node-", births), ServiceUID: fmt.Sprint("service-", births)}
	if got := member.ReadJoinedCluster(w.env()); got == nil || *got != *want {
		w.t.Errorf("the note is %+v, want %+v", got, want)
	}
	var conf ondisk.IPVS
	if err := json.Unmarshal([]byte(w.get(ondisk.IPVSConfig)), &conf); err != nil {
		w.t.Fatal(err)
	}
	if got := conf.Servers[0].Joined; got == nil || *got != *want {
		w.t.Errorf("ipvscare is told %+v, want %+v", got, want)
	}
}

// TestClusterBornAgain: a node does not follow a cluster that has its masters,
// their keys and none of its objects, and says so; with a token of it, it joins
// anew.
func TestClusterBornAgain(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"native", "unit", "staticPod"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			w, lines := nativeWorld(t), []string(nil)
			switch form {
			case "unit":
				w, lines = edgeWorld(t), []string{"nodeType: edge", "nodePool: shanghai"}
			case "staticPod":
				w, lines = podWorld(t), []string{"nodeType: edge", "nodePool: shanghai"}
			}
			w.mustBoot()
			w.wantJoined(0)
			w.bearAgain()
			for range 2 {
				w.powerOn()
				if err := w.boot(); err == nil || w.state().Result != ondisk.ResultWaiting || !w.said("the API servers are of another cluster with the same keys (cluster-info had UID info-0, Node edge-sn0042 node-0)") {
					t.Fatalf("%v, %s\n%s", err, w.state().Result, strings.Join(w.console, "\n"))
				}
				if w.said("FAILED") || w.joins != 1 || member.Enrolled(w.env()) != nil || w.units[ondisk.UnitKubelet] != "active" {
					t.Errorf("the node was touched: %d joins\n%s", w.joins, strings.Join(w.console, "\n"))
				}
				w.wantJoined(0)
			}
			w.stamp(ownDev, w.site(append(lines, withToken)...))
			w.before = func(effect string) {
				if effect == "remove "+member.JoinedCluster {
					w.cluster.mu.Lock()
					defer w.cluster.mu.Unlock()
					delete(w.cluster.down, ownEndpoint)
				}
			}
			w.powerOn()
			w.mustBoot()
			wantMember(t, w, 2)
			w.wantJoined(1)
			if !w.said("the cluster was born again with the same keys, and the Site has a token for it: joining it again") {
				t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
			}
		})
	}
}

// TestNotBornAgain: a person may make cluster-info anew, or delete the Node.
func TestNotBornAgain(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*fakeCluster){
		"cluster-info made anew": func(c *fakeCluster) { c.births++ },
		"Node deleted":           func(c *fakeCluster) { delete(c.nodes, "edge-sn0042") },
		"cluster-info hidden":    func(c *fakeCluster) { c.knownOnly = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.mustBoot()
			change(w.cluster)
			site, err := site.Parse([]byte(w.site()))
			if err != nil {
				t.Fatal(err)
			}
			if member.BornAgain(t.Context(), w.env(), site) {
				t.Error("it is taken for another cluster")
			}
			w.bearAgain()
			if name != "cluster-info hidden" && !member.BornAgain(t.Context(), w.env(), site) {
				t.Error("another cluster is taken for it")
			}
		})
	}
}

// TestBornAgainBeforeItPublishes: the Service that API servers make tells another cluster,
// although that has published nothing yet, and tells the same one where cluster-info was
// made anew and the Node deleted. A note of a former release has no Service.
func TestBornAgainBeforeItPublishes(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change    func(w *world)
		again     bool
		isUnclear bool
	}{
		"born again, and not published": {func(w *world) { w.bearAgain(); w.cluster.unpublished = true }, true, false},
		"born again a moment ago":       {func(w *world) { w.bearAgain(); w.cluster.unpublished, w.cluster.noService = true, true }, false, true},
		"cluster-info and the Node deleted": {func(w *world) {
			w.cluster.unpublished = true
			delete(w.cluster.nodes, "edge-sn0042")
		}, false, false},
		"not published, by an old note": {func(w *world) {
			w.put(member.JoinedCluster, strings.Replace(w.get(member.JoinedCluster), `,"serviceUID":"service-0"`, "", 1))
			w.bearAgain()
			w.cluster.unpublished = true
		}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.mustBoot()
			tt.change(w)
			site, err := site.Parse([]byte(w.site()))
			if err != nil {
				t.Fatal(err)
			}
			w.unregistered = false // ipvscare lets kubelet reach nobody
			if again, unclear := member.CheckBornAgain(t.Context(), w.env(), site); again != tt.again || (unclear != nil) != tt.isUnclear {
				t.Errorf("born again: %v, unclear: %v", again, unclear)
			}
		})
	}
}

// TestOldNoteGetsTheService: a node that was set up by a former release notes the third
// witness when it is Ready again; where it may not read that, it goes on with two.
func TestOldNoteGetsTheService(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		w := nativeWorld(t)
		w.cluster.noService = true
		w.mustBoot()
		want := ondisk.IPVSJoined{ClusterInfo: "info-0", Node: "edge-sn0042", NodeUID: "node-0"}
		w.wantNoted(want)
		if w.cluster.noService = hidden; !hidden {
			want.ServiceUID = "service-0"
		}
		w.powerOn()
		w.mustBoot()
		w.wantNoted(want)
		w.cluster.noService = true // for a while
		w.powerOn()
		w.mustBoot()
		w.wantNoted(want)
	}
}

// TestUnclearWhetherBornAgain: why an API server does not show its cluster is told,
// whatever the endpoint's own error.
func TestUnclearWhetherBornAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.cluster.knownOnly, w.cluster.noService = true, true
	w.bearAgain()
	site, err := site.Parse([]byte(w.site()))
	if err != nil {
		t.Fatal(err)
	}
	err = join.WaitForEndpoint(t.Context(), w.env(), site)
	for _, want := range []string{"does not answer on this machine", "they do not show which cluster they are of: ", ": /api/v1/namespaces/kube-public/configmaps/cluster-info answered 401"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
}

// TestBornAgainFarAway: by satellite a connection takes a second and a half, and an
// API server is asked over three.
func TestBornAgainFarAway(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.bearAgain()
	site, err := site.Parse([]byte(w.site()))
	if err != nil {
		t.Fatal(err)
	}
	e := w.env()
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(1500 * time.Millisecond):
			return dial(ctx, network, addr)
		}
	}
	if !member.BornAgain(t.Context(), e, site) {
		t.Error("another cluster is not recognized")
	}
}

// TestNodeOfAFormerRelease has no note: it gets one when it is Ready again, and
// goes on without where the cluster lets nobody read cluster-info.
func TestNodeOfAFormerRelease(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	if err := os.Remove(w.inside(member.JoinedCluster)); err != nil {
		t.Fatal(err)
	}
	hidden := w.clone(t)
	w.powerOn()
	w.mustBoot()
	w.wantJoined(0)

	hidden.cluster.knownOnly = true
	hidden.powerOn()
	hidden.mustBoot()
	if hidden.has(member.JoinedCluster) || strings.Contains(hidden.get(ondisk.IPVSConfig), "joined") {
		t.Error("what cannot be read was noted")
	}
}

// TestNoteOfTheClusterFollowsIt: cluster-info is made anew, and much later the Node is
// deleted, as the documentation tells to. Each of them is the only witness for a while.
func TestNoteOfTheClusterFollowsIt(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	site, err := site.Parse([]byte(w.site()))
	if err != nil {
		t.Fatal(err)
	}
	w.cluster.births++ // cluster-info's UID
	w.powerOn()
	w.mustBoot()
	w.wantNoted(ondisk.IPVSJoined{ClusterInfo: "info-1", Node: "edge-sn0042", NodeUID: "node-0", ServiceUID: "service-1"})

	own := *w.cluster.nodes["edge-sn0042"]
	delete(w.cluster.nodes, "edge-sn0042")
	if member.BornAgain(t.Context(), w.env(), site) {
		t.Error("its own cluster is taken for another one once the Node is deleted")
	}
	own.Metadata.UID = "node-anew" // kubelet registers again
	w.cluster.nodes["edge-sn0042"] = &own
	w.powerOn()
	w.mustBoot()
	w.wantNoted(ondisk.IPVSJoined{ClusterInfo: "info-1", Node: "edge-sn0042", NodeUID: "node-anew", ServiceUID: "service-1"})
}

// wantNoted is the note of the cluster, and ipvscare's.
func (w *world) wantNoted(want ondisk.IPVSJoined) {
	w.t.Helper()
	if got := member.ReadJoinedCluster(w.env()); got == nil || *got != want {
		w.t.Errorf("the note is %+v, want %+v", got, want)
	}
	var conf ondisk.IPVS
	if err := json.Unmarshal([]byte(w.get(ondisk.IPVSConfig)), &conf); err != nil {
		w.t.Fatal(err)
	}
	if got := conf.Servers[0].Joined; got == nil || *got != want {
		w.t.Errorf("ipvscare is told %+v, want %+v", got, want)
	}
}

// TestNoteIsNotTakenFromAnotherCluster: a cluster that shows neither witness is not
// noted, although the node's certificate is good there and its Node is Ready.
func TestNoteIsNotTakenFromAnotherCluster(t *testing.T) {
	t.Parallel()
	for _, disabled := range []bool{false, true} {
		var lines []string
		if disabled {
			lines = append(lines, "ipvs: {disabled: true}")
		}
		w := nativeWorld(t, lines...)
		w.mustBoot()
		before := w.get(member.JoinedCluster)
		w.cluster.births++
		w.cluster.nodes["edge-sn0042"].Metadata.UID = "node-1"
		w.powerOn()
		w.patience = time.Minute
		err := w.boot()
		if got := w.get(member.JoinedCluster); got != before {
			t.Errorf("IPVS disabled %v: noted %s, it was %s", disabled, got, before)
		}
		if said := w.said("the API servers are of another cluster with the same keys"); said == disabled || (err == nil) != disabled {
			t.Errorf("IPVS disabled %v: %v, said %v", disabled, err, said)
		}
	}
}

// TestNoteIsOfOneAPIServer: through the endpoint cluster-info may be another API
// server's than the Node.
func TestNoteIsOfOneAPIServer(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	reborn := newFakeClusterOf(t, w.cluster.ca, w.cluster.key)
	reborn.of(w)
	reborn.births = 7
	e := w.env()
	_, n, err := member.OwnNode(t.Context(), e, "edge-sn0042")
	if err != nil {
		t.Fatal(err)
	}
	w.cluster.mu.Lock()
	w.cluster.elsewhere = map[string]*fakeCluster{ownEndpoint: reborn, "192.0.2.13:6443": reborn}
	w.cluster.mu.Unlock()
	spec, err := site.Parse([]byte(w.site()))
	if err != nil {
		t.Fatal(err)
	}
	active := &site.Active{Site: spec, Node: "edge-sn0042"}
	if now, err := member.ClusterNow(t.Context(), e, n); err != nil || now.ClusterInfo != "info-7" {
		t.Fatalf("the endpoint shows %+v, %v", now, err)
	}
	if note, err := member.ClusterToNote(t.Context(), e, active.Site, n); err != nil || note != nil {
		t.Errorf("to be noted: %+v, %v", note, err)
	}
}

// TestDamagedIPVSConfigKeepsNobody: a machine leaves its cluster, or does without IPVS,
// and has ipvscare remove its rules, whatever has become of ipvs.json.
func TestDamagedIPVSConfigKeepsNobody(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "{", "{}", "\x00\x00", `{"version":7}`} {
		w := nativeWorld(t)
		w.mustBoot()
		cleaned := func(what string) {
			t.Helper()
			if n := slices.Index(w.names, "run ipvscare clean"); n < 0 {
				t.Errorf("%q, %s: the rules stay", text, what)
			}
			w.names = nil
		}
		w.put(ondisk.IPVSConfig, text)
		w.names = nil
		if _, err := w.reset(); err != nil || w.has(ondisk.IPVSConfig) {
			t.Errorf("%q: reset: %v; ipvs.json is there: %v", text, err, w.has(ondisk.IPVSConfig))
		}
		cleaned("reset")
		w.stamp(ownDev, w.site(withToken))
		delete(w.cluster.nodes, "edge-sn0042")
		w.powerOn()
		w.mustBoot()

		w.rebuild()
		w.put(ondisk.IPVSConfig, text)
		w.stamp(ownDev, w.site(withToken))
		w.powerOn()
		w.mustBoot()
		cleaned("move")

		w.stamp(ownDev, w.site("ipvs: {disabled: true}"))
		w.powerOn()
		w.put(ondisk.IPVSConfig, text)
		w.mustBoot()
		cleaned("without IPVS")
		if w.has(ondisk.IPVSConfig) {
			t.Errorf("%q: ipvs.json is left", text)
		}
	}
}
