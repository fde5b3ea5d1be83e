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

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

const unpinnedSite = "unsafeSkipCAVerification: true"

// unpin removes the pins from a Site.
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
	if w.Joins != joins || w.State().Result != ondisk.ResultDone || len(w.Cluster.Nodes) != 1 {
		t.Errorf("%d joins, result %s, nodes %v\n%s", w.Joins, w.State().Result, w.Cluster.Nodes, strings.Join(w.Console, "\n"))
	}
	if got := w.Get(ondisk.KubeCA); got != string(w.Cluster.CAPEM) {
		t.Error("the CA on the disk belongs to another cluster")
	}
	k, err := member.Credentials(w.Env())
	if err != nil {
		t.Fatal(err)
	}
	if c, err := k.Cluster(); err != nil {
		t.Error(err)
	} else if ca, err := c.CA(w.Root); err != nil || string(ca) != string(w.Cluster.CAPEM) {
		t.Errorf("the kubeconfig trusts another CA (%v)", err)
	}
	for _, p := range []string{member.LeavingFile, ondisk.IPVSLearned} {
		if w.Has(p) {
			t.Errorf("%s exists", p)
		}
	}
	w.NoSecret()
}

// TestSiteOfAnotherCluster checks that the machine moves to the cluster of its new Site, with one
// pin, several or none.
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
			w.MustBoot()
			w.Put(ondisk.IPVSLearned, "{}")
			former := w.Rebuild()
			next := w.Site(append([]string{worldtest.WithToken}, tc.lines...)...)
			if strings.Contains(tc.name, "several") {
				next = strings.Replace(next, "caCertHashes: [", "caCertHashes: ['sha256:"+strings.Repeat("0", 64)+"', ", 1)
			}
			if tc.skip {
				next = unpin(next)
			}
			w.Stamp(worldtest.SlotDevice, next)
			w.PowerOn()
			w.MustBoot()
			wantMember(t, w, 2)
			if !w.ConsoleHas("leaving the old one (CA "+former.Pin+")") || !w.ConsoleHas("kubectl delete node edge-sn0042") {
				t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
			}
			if tc.name == "edge to native" && (w.Has(hub.EnvFile) || member.Redirected(w.Env())) {
				t.Error("yurthub is still there")
			}
			w.PowerOn()
			w.MustBoot()
			if w.Joins != 2 || w.ConsoleHas("leaving") {
				t.Errorf("the machine joined again\n%s", strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestServingCertificateOfTheFormerCluster checks that kubelet's serving certificate is removed
// when the machine moves to another cluster, and kept when it joins the same one again.
func TestServingCertificateOfTheFormerCluster(t *testing.T) {
	t.Parallel()
	for name, moves := range map[string]bool{"another cluster": true, "the same": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			const current, dated = member.KubeletPKI + "/kubelet-server-current.pem", member.KubeletPKI + "/kubelet-server-2026-11-20-10-00-00.pem"
			w.Put(dated, w.Cluster.Client("system:node:edge-sn0042", w.ClusterTime().AddDate(5, 0, 0)))
			if err := os.Symlink(dated, w.Root+current); err != nil {
				t.Fatal(err)
			}
			if moves {
				w.Rebuild()
			} else {
				w.Now = w.Now.AddDate(2, 0, 0)
				delete(w.Cluster.Nodes, "edge-sn0042")
			}
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
			w.PowerOn()
			w.MustBoot()
			wantMember(t, w, 2)
			if w.Has(current) == moves || w.Has(dated) == moves {
				t.Errorf("the link is there: %v, the certificate: %v", w.Has(current), w.Has(dated))
			}
		})
	}
}

// TestPowerCutWhileMoving checks that after a power cut at any point the machine ends in the other
// cluster.
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
			w.UseSingleMaster()
			w.MustBoot()
			w.Put(ondisk.IPVSLearned, "{}")
			w.Rebuild()
			next := w.Site(append(lines, worldtest.WithToken)...)
			if form == "unpinned" {
				next = unpin(next)
			}
			w.Stamp(worldtest.SlotDevice, next)
			w.PowerOn()
			whole := w.Clone(t)
			whole.MustBoot()
			// The effects after this one are those of a first boot.
			left := slices.Index(whole.EffectNames, "remove "+member.LeavingFile)
			if left < 10 {
				t.Fatalf("the machine left its cluster after %d effects: %v", left, whole.EffectNames)
			}
			followed := map[[32]byte]bool{}
			for n := slices.Index(whole.EffectNames, "write "+member.LeavingFile); n < left+3; n += worldtest.EveryCut() {
				cut := w.Clone(t)
				cut.PowerCutAt = n + 1
				if err := cut.Boot(); err == nil {
					t.Fatalf("cut at %d: the machine continued after the power cut", n)
				}
				at := cut.EffectNames[len(cut.EffectNames)-1]
				cut.PowerOn()
				left := cut.Files()
				state := cut.Fingerprint(t, left)
				if followed[state] {
					continue // the state after another cut is the same
				}
				followed[state] = true
				if err := cut.Boot(); err != nil {
					t.Fatalf("cut at %s: %v\n%s", at, err, strings.Join(cut.Console, "\n"))
				}
				wantMember(t, cut, cut.Joins)
			}
		})
	}
}

// TestMoveWithoutAToken checks that first boot stops with an error, and does not change the node,
// if its Site names another cluster without a token.
func TestMoveWithoutAToken(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	ipvs, former := w.Get(ondisk.IPVSConfig), w.Rebuild()
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(), "192.0.2.13", "192.0.2.14", 1))
	for _, offline := range []bool{false, true} {
		w.PowerOn()
		w.Offline = offline
		if err := w.Boot(); err == nil || !w.ConsoleHas("FAILED cluster: the Site names another cluster") || !w.ConsoleHas(former.Pin) || !w.ConsoleHas("put a token of the other cluster into site.yaml") {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		if w.Get(ondisk.IPVSConfig) != ipvs || w.Get(ondisk.KubeCA) != string(former.CAPEM) || member.Enrolled(w.Env()) != nil || w.Units[ondisk.UnitKubelet] != "active" {
			t.Error("the node was changed")
		}
	}
	// Without pins, any server on the network path may have answered.
	w.Stamp(worldtest.SlotDevice, unpin(w.Site()))
	w.PowerOn()
	w.Offline = false
	if err := w.Boot(); err == nil || !w.ConsoleHas("the API servers do not belong to the cluster that this machine has joined") || member.Enrolled(w.Env()) != nil ||
		w.State().Result != ondisk.ResultWaiting || w.ConsoleHas("tried again") || w.ConsoleHas("FAILED") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if phases := w.State().Phases; phases[len(phases)-2].Status != ondisk.PhaseWaiting {
		t.Errorf("first boot stopped before it looked for the Node: %+v", phases)
	}
	// Offline, first boot of an unpinned node waits, and reports no failure.
	w.PowerOn()
	w.Offline = true
	if err := w.Boot(); err == nil || w.State().Result != ondisk.ResultWaiting || w.ConsoleHas("FAILED") || w.ConsoleHas("tried again") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestMoveWaitsForTheOtherCluster checks that the node stays unchanged in its own cluster until the
// other cluster answers, and that it keeps the other cluster's token.
func TestMoveWaitsForTheOtherCluster(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*world){
		"out of reach":    func(w *world) { w.Cluster.AllDown(true); w.Cluster.Down["192.0.2.14:6443"] = true },
		"token not valid": func(w *world) { w.Cluster.TokenRevoked = true },
		"name taken":      func(w *world) { w.Cluster.Register("edge-sn0042", "", "another") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			w.Rebuild()
			ipvs, ca := w.Get(ondisk.IPVSConfig), w.Get(ondisk.KubeCA)
			spoil(w)
			site := strings.Replace(w.Site(worldtest.WithToken), "192.0.2.13", "192.0.2.14", 1)
			w.Stamp(worldtest.SlotDevice, site)
			w.PowerOn()
			if err := w.Boot(); err == nil {
				t.Fatal("the machine moved to the other cluster")
			}
			if w.Get(ondisk.IPVSConfig) != ipvs || w.Get(ondisk.KubeCA) != ca || member.Enrolled(w.Env()) != nil || w.SlotSite(worldtest.SlotDevice) != site {
				t.Errorf("a file of the node was changed\n%s", strings.Join(w.Console, "\n"))
			}
			w.Cluster.Down = map[string]bool{}
			w.Cluster.TokenRevoked = false
			delete(w.Cluster.Nodes, "edge-sn0042")
			w.PowerOn()
			w.MustBoot()
			wantMember(t, w, 2)
		})
	}
}

// TestSlipInThePins checks that a token with a wrong pin does not remove a running node from its
// cluster.
func TestSlipInThePins(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	site := strings.Replace(w.Site(worldtest.WithToken), w.Cluster.Pin, "sha256:"+strings.Repeat("0", 64), 1)
	w.Stamp(worldtest.SlotDevice, site)
	w.PowerOn()
	if err := w.Boot(); err == nil || !w.ConsoleHas("FAILED cluster") || !w.ConsoleHas("compare caCertHashes") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if member.Enrolled(w.Env()) != nil || w.SlotSite(worldtest.SlotDevice) != site {
		t.Error("the node left its cluster, or the token is gone")
	}
}

// TestTwoClustersInReach checks a move while the former cluster still answers, and shows the node
// as Ready.
func TestTwoClustersInReach(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	former := w.Rebuild()
	w.Stamp(worldtest.SlotDevice, strings.ReplaceAll(w.Site(worldtest.WithToken), "192.0.2.1", "192.0.2.2"))
	w.PowerOn()
	e := w.Env()
	e.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) {
		switch {
		case strings.HasPrefix(addr, "192.0.2.2"), strings.HasPrefix(addr, "apiserver") && strings.Contains(w.Get(ondisk.IPVSConfig), "192.0.2.2"):
			return w.Cluster.Dial(ctx, "192.0.2.11:6443")
		case strings.HasPrefix(addr, "192.0.2.1"), strings.HasPrefix(addr, "apiserver"):
			return former.Dial(ctx, addr)
		}
		return nil, errors.New("no route")
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	wantMember(t, w, 2)
}

// TestMoveUnderAnotherName checks that the machine keeps its name until it has left its cluster.
func TestMoveUnderAnotherName(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Rebuild()
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken), "edge-{{.Serial}}", "other", 1))
	w.PowerOn()
	w.BeforeEffect = func(effect string) {
		if effect == "hostname other" && member.Enrolled(w.Env()) == nil {
			t.Error("the machine was renamed while it was a member of the old cluster")
		}
	}
	w.MustBoot()
	wantMember(t, w, 2)
	if w.Cluster.Nodes["other"] == nil || strings.TrimSpace(w.Get("/etc/hostname")) != "other" {
		t.Errorf("the host name is %s, the cluster has the nodes %v", w.Get("/etc/hostname"), w.Cluster.Nodes)
	}
}

// TestCAOfADiscoveryThatNeverJoined checks that the CA of a discovery without a join does not
// prevent the next Site's join.
func TestCAOfADiscoveryThatNeverJoined(t *testing.T) {
	t.Parallel()
	for _, pinned := range []bool{true, false} {
		w := nativeWorld(t)
		w.JoinError = func(n int) error { return errors.New("kubelet is not well") }
		if err := w.Boot(); err == nil || !w.Has(ondisk.KubeCA) {
			t.Fatal("the CA is missing")
		}
		w.JoinError = nil
		w.Rebuild()
		site := w.Site(worldtest.WithToken)
		if !pinned {
			site = unpin(site)
		}
		// ipvscare verifies the API servers with the CA on the disk.
		e := w.Env()
		dial := e.Dial
		e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if strings.HasPrefix(addr, "apiserver") && w.Has(ondisk.KubeCA) && w.Get(ondisk.KubeCA) != string(w.Cluster.CAPEM) {
				return nil, errors.New("connection refused")
			}
			return dial(ctx, network, addr)
		}
		w.Stamp(worldtest.SlotDevice, site)
		w.Joins = 0
		w.PowerOn()
		if err := w.Run(New(e)); err != nil {
			t.Fatalf("pinned %v: %v\n%s", pinned, err, strings.Join(w.Console, "\n"))
		}
		wantMember(t, w, 1)
	}
}

// TestDiscoveryOfAnotherSite checks that a join does not use the discovery that this boot made for
// another Site.
func TestDiscoveryOfAnotherSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.BeforeEffect = func(effect string) {
		// After the discovery, before the join begins.
		if effect == "write "+member.JoinedFile && w.Joins == 0 && w.SlotSite(worldtest.SlotDevice) != "" {
			w.BeforeEffect = nil
			w.JoinError = func(n int) error {
				w.JoinError = nil
				w.Rebuild()
				w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
				return errors.New("kubelet is not well")
			}
		}
	}
	w.MustBoot()
	wantMember(t, w, 2)
}

// TestSlipInTheName checks that a member is not renamed, whatever else its Site changes.
func TestSlipInTheName(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(), "edge-{{.Serial}}", "other", 1))
	for range 2 {
		w.PowerOn()
		if err := w.Boot(); err == nil || !w.ConsoleHas("enrolled as edge-sn0042, but the Site names it other") {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		if name := w.Get("/proc/sys/kernel/hostname") + w.Get("/etc/hostname"); name != "edge-sn0042\nedge-sn0042\n" {
			t.Errorf("the host name is %q", name)
		}
		if slices.ContainsFunc(w.EffectNames, func(n string) bool { return strings.HasPrefix(n, "hostname") && n != "hostname edge-sn0042" }) {
			t.Errorf("the machine was renamed meanwhile: %v", w.EffectNames)
		}
	}
}

// TestNewCardSortsFirst checks that a node keeps its name, which was made from the first network
// card, when another card becomes the first one.
func TestNewCardSortsFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	site := func(lines ...string) string {
		return strings.Replace(w.Site(lines...), "edge-{{.Serial}}", "edge-{{.MAC}}", 1)
	}
	w.Stamp(worldtest.SlotDevice, site(worldtest.WithToken))
	w.MustBoot()
	w.Put("/sys/class/net/enp1s0/address", "52:54:00:00:00:01\n")
	w.Put("/sys/class/net/enp1s0/device/vendor", "0x8086\n")
	for _, s := range []string{site(), site("report: {url: 'https://report.example/'}")} {
		w.Stamp(worldtest.SlotDevice, s)
		w.PowerOn()
		w.MustBoot()
		if name := strings.TrimSpace(w.Get("/proc/sys/kernel/hostname")); name != "edge-525400123456" || w.Joins != 1 {
			t.Errorf("the host name is %s, and kubeadm joined %d times", name, w.Joins)
		}
	}
	// A typing error in the name is still rejected.
	w.Stamp(worldtest.SlotDevice, strings.Replace(site(), "edge-{{.MAC}}", "shop-{{.MAC}}", 1))
	w.PowerOn()
	if err := w.Boot(); err == nil || !w.ConsoleHas("enrolled as edge-525400123456, but the Site names it shop-") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestNewCardAndAnExpiredCertificate checks that when the certificate has expired and another
// network card is the first one, the machine joins again under its former name, and keeps it.
func TestNewCardAndAnExpiredCertificate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	site := strings.Replace(w.Site(worldtest.WithToken), "edge-{{.Serial}}", "edge-{{.MAC}}", 1)
	w.Stamp(worldtest.SlotDevice, site)
	w.MustBoot()
	w.Put("/sys/class/net/enp1s0/address", "52:54:00:00:00:01\n")
	w.Put("/sys/class/net/enp1s0/device/vendor", "0x8086\n")
	w.Now = w.Now.AddDate(2, 0, 0)
	w.Cluster.Nodes["edge-525400123456"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	w.JoinError = func(n int) error {
		w.JoinError = nil
		return errors.New("kubelet is not well")
	}
	w.Stamp(worldtest.SlotDevice, site)
	for range 2 {
		w.PowerOn()
		w.MustBoot()
		wantMember(t, w, 3)
		if name := strings.TrimSpace(w.Get("/proc/sys/kernel/hostname")); name != "edge-525400123456" {
			t.Errorf("the host name is %s", name)
		}
	}
}

// TestNewTokenWhileOffline checks that a new token is kept until the cluster has reported the node
// as Ready.
func TestNewTokenWhileOffline(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(*world, bool){
		"offline":      func(w *world, on bool) { w.Offline = on },
		"masters down": func(w *world, on bool) { w.Cluster.AllDown(on) },
	} {
		w := nativeWorld(t)
		w.MustBoot()
		w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
		w.PowerOn()
		away(w, true)
		if err := w.Boot(); err == nil || !strings.Contains(w.SlotSite(worldtest.SlotDevice), worldtest.TestToken) {
			t.Errorf("%s: the token was forgotten unused (%v)\n%s", name, err, strings.Join(w.Console, "\n"))
		}
		away(w, false)
		w.PowerOn()
		w.MustBoot()
		w.NoSecret()
	}
}

// TestRejoinIsSeenReady checks that a Ready status from before a new join does not count, so the
// token is not removed too soon.
func TestRejoinIsSeenReady(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Now = w.Now.AddDate(2, 0, 0)
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.PowerOn()
	w.BeforeEffect = func(effect string) {
		if effect == "kubeadm ends" {
			w.Offline = true
		}
	}
	if err := w.Boot(); err == nil || !strings.Contains(w.SlotSite(worldtest.SlotDevice), worldtest.TestToken) || w.Has(member.ReadyMark) {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// wantJoined checks the records of the cluster that first boot and ipvscare have.
func (w *world) wantJoined(recreations int) {
	w.T.Helper()
	want := &ondisk.IPVSJoined{ClusterInfo: fmt.Sprint("info-", recreations), Node: "edge-sn0042", NodeUID: fmt.Sprint("node-", recreations), ServiceUID: fmt.Sprint("service-", recreations)}
	if got := member.ReadJoinedCluster(w.Env()); got == nil || *got != *want {
		w.T.Errorf("the record is %+v, want %+v", got, want)
	}
	var conf ondisk.IPVS
	if err := json.Unmarshal([]byte(w.Get(ondisk.IPVSConfig)), &conf); err != nil {
		w.T.Fatal(err)
	}
	if got := conf.Servers[0].Joined; got == nil || *got != *want {
		w.T.Errorf("ipvscare's configuration has %+v, want %+v", got, want)
	}
}

// TestClusterRecreated checks that a node does not follow a recreated cluster with the same API
// servers and keys, and reports it. With a token of that cluster it joins again.
func TestClusterRecreated(t *testing.T) {
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
			w.MustBoot()
			w.wantJoined(0)
			w.RecreateCluster()
			for range 2 {
				w.PowerOn()
				if err := w.Boot(); err == nil || w.State().Result != ondisk.ResultWaiting || !w.ConsoleHas("the API servers are of another cluster with the same keys (cluster-info had UID info-0, Node edge-sn0042 node-0)") {
					t.Fatalf("%v, %s\n%s", err, w.State().Result, strings.Join(w.Console, "\n"))
				}
				if w.ConsoleHas("FAILED") || w.Joins != 1 || member.Enrolled(w.Env()) != nil || w.Units[ondisk.UnitKubelet] != "active" {
					t.Errorf("the node was changed: kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
				}
				w.wantJoined(0)
			}
			w.Stamp(worldtest.SlotDevice, w.Site(append(lines, worldtest.WithToken)...))
			w.BeforeEffect = func(effect string) {
				if effect == "remove "+member.JoinedCluster {
					w.Cluster.Mu.Lock()
					defer w.Cluster.Mu.Unlock()
					delete(w.Cluster.Down, worldtest.Endpoint)
				}
			}
			w.PowerOn()
			w.MustBoot()
			wantMember(t, w, 2)
			w.wantJoined(1)
			if !w.ConsoleHas("the cluster was bootstrapped again with the same keys, and the Site has a token for it: joining it again") {
				t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
			}
		})
	}
}

// asIPVScare opens and closes the endpoint as ipvscare would,
// according to the cluster in ipvs.json.
func (w *world) asIPVScare() {
	guard := func() {
		e, c := w.Env(), w.Cluster
		accepted := member.Enrolled(e) == nil
		var conf ondisk.IPVS
		_ = json.Unmarshal(e.Contents(ondisk.IPVSConfig), &conf)
		c.Mu.Lock()
		defer c.Mu.Unlock()
		c.Down[worldtest.Endpoint] = false
		if len(conf.Servers) == 0 || conf.Servers[0].Joined == nil {
			return
		}
		j := conf.Servers[0].Joined
		n := c.Nodes[j.Node]
		info := !c.NoClusterInfo && j.ClusterInfo == fmt.Sprint("info-", c.Recreations)
		own := accepted && (n != nil && j.NodeUID == n.Metadata.UID || j.ServiceUID == fmt.Sprint("service-", c.Recreations))
		c.Down[worldtest.Endpoint] = !info && !own
	}
	guard()
	w.BeforeEffect = func(string) { guard() }
}

// TestExpiredWhileClusterInfoIsMadeAnew checks a node whose certificate has expired, so that no API
// server can prove its cluster to it. The node joins again only if the cluster accepts the Site's
// token.
func TestExpiredWhileClusterInfoIsMadeAnew(t *testing.T) {
	t.Parallel()
	edge := []string{"nodeType: edge", "nodePool: shanghai"}
	withCA := func(w *world) string {
		return "caCert: |\n  " + strings.ReplaceAll(strings.TrimSpace(string(w.Cluster.CAPEM)), "\n", "\n  ")
	}
	for name, tt := range map[string]struct {
		world       func(*testing.T) *world
		lines       []string
		recreations int
		change      func(*world)
		said        string // message if it does not join again
	}{
		"the same cluster-info":  {},
		"made anew":              {recreations: 1},
		"made anew, unit":        {recreations: 1, world: func(t *testing.T) *world { return edgeWorld(t) }, lines: edge},
		"made anew, static pod":  {recreations: 1, world: podWorld, lines: edge},
		"made anew, no time":     {recreations: 1, change: func(w *world) { w.ClockSynced = false }},
		"made anew, not pinned":  {recreations: 1, change: func(w *world) { w.Stamp(worldtest.SlotDevice, unpin(w.Site(worldtest.WithToken))) }},
		"made anew, two of them": {recreations: 1, change: func(w *world) { w.Cluster.Down["192.0.2.12:6443"] = true }},
		"hidden": {change: func(w *world) {
			w.Cluster.NoClusterInfo = true
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, withCA(w)))
		}},
		"made anew, no token": {recreations: 1, said: "FAILED discovery: this node's certificate has expired", change: func(w *world) {
			w.Stamp(worldtest.SlotDevice, w.Site())
		}},
		"made anew, no token and no time": {recreations: 1, said: "follows no time server", change: func(w *world) {
			w.Stamp(worldtest.SlotDevice, w.Site())
			w.ClockSynced = false
		}},
		"made anew, another token": {recreations: 1, said: "the cluster does not accept the bootstrap token", change: func(w *world) { w.Cluster.TokenRevoked = true }},
		"made anew, the clock is wrong": {recreations: 1, said: "its start timed out", change: func(w *world) { // by the cluster's clock the certificate is valid
			w.ClockSkew, w.ClockSynced = w.Now.Sub(worldtest.WorldStart)-time.Hour, false
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.world == nil {
				tt.world = func(t *testing.T) *world { return nativeWorld(t) }
			}
			w := tt.world(t)
			w.MustBoot()
			noted := w.Get(member.JoinedCluster)
			w.Now, w.ClockSynced = w.Now.AddDate(3, 0, 0), true
			w.Cluster.Recreations += tt.recreations
			delete(w.Cluster.Nodes, "edge-sn0042")
			w.Stamp(worldtest.SlotDevice, w.Site(append(tt.lines, worldtest.WithToken)...))
			if tt.change != nil {
				tt.change(w)
			}
			w.asIPVScare()
			w.PowerOn()
			joins := w.Joins
			err := w.Boot()
			if joined := w.Joins > joins; joined != (tt.said == "") || joined != (err == nil) {
				t.Fatalf("joined again: %v, %v\n%s", joined, err, strings.Join(w.Console, "\n"))
			}
			if tt.said == "" {
				if now := member.ReadJoinedCluster(w.Env()); !w.Cluster.NoClusterInfo && (now == nil || now.ClusterInfo != fmt.Sprint("info-", tt.recreations)) {
					t.Errorf("the record is %+v", now)
				}
				return
			}
			if !w.ConsoleHas(tt.said) && !strings.Contains(w.Log.String(), tt.said) || w.Get(member.JoinedCluster) != noted {
				t.Errorf("the record is %s, it was %s\n%s", w.Get(member.JoinedCluster), noted, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestDamagedIPVSConfigKeepsNobody checks that with a damaged ipvs.json, a machine can still leave
// its cluster or disable IPVS. ipvscare removes its rules then too.
func TestDamagedIPVSConfigKeepsNobody(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "{", "{}", "\x00\x00", `{"version":7}`} {
		w := nativeWorld(t)
		w.MustBoot()
		cleaned := func(what string) {
			t.Helper()
			if n := slices.Index(w.EffectNames, "run ipvscare clean"); n < 0 {
				t.Errorf("%q, %s: the rules are still there", text, what)
			}
			w.EffectNames = nil
		}
		w.Put(ondisk.IPVSConfig, text)
		w.EffectNames = nil
		if _, err := w.reset(); err != nil || w.Has(ondisk.IPVSConfig) {
			t.Errorf("%q: reset: %v; ipvs.json is there: %v", text, err, w.Has(ondisk.IPVSConfig))
		}
		cleaned("reset")
		w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
		delete(w.Cluster.Nodes, "edge-sn0042")
		w.PowerOn()
		w.MustBoot()

		w.Rebuild()
		w.Put(ondisk.IPVSConfig, text)
		w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
		w.PowerOn()
		w.MustBoot()
		cleaned("move")

		w.Stamp(worldtest.SlotDevice, w.Site("ipvs: {disabled: true}"))
		w.PowerOn()
		w.Put(ondisk.IPVSConfig, text)
		w.MustBoot()
		cleaned("without IPVS")
		if w.Has(ondisk.IPVSConfig) {
			t.Errorf("%q: ipvs.json still exists", text)
		}
	}
}
