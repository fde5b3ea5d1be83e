package firstboot

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

const slip = "192.0.2.91:6443"

// TestSlipInMasters checks a corrected list of API servers of which none answers. The former list
// stays in use, even after a restart, until an API server of the corrected list is verified.
func TestSlipInMasters(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		world func(*testing.T, ...string) *world
	}{{"native", nativeWorld}, {"edge", edgeWorld}} {
		t.Run(c.name, func(t *testing.T) {
			w := c.world(t)
			if err := w.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			node := strings.Split(w.SlotSite(worldtest.SlotDevice), "\n")
			var lines []string
			for _, l := range node {
				if strings.HasPrefix(l, "nodeType") || strings.HasPrefix(l, "nodePool") {
					lines = append(lines, l)
				}
			}
			w.Cluster.Down[slip] = true
			w.Stamp(worldtest.SlotDevice, w.SiteWithMasters(slip, lines...))
			for range 2 {
				w.PowerOn()
				if err := w.Boot(); err != nil {
					t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
				}
				for _, m := range []string{"192.0.2.11:6443", "192.0.2.13:6443", slip} {
					if !strings.Contains(w.Get(ondisk.IPVSConfig), m) {
						t.Errorf("ipvscare's configuration lacks %s:\n%s", m, w.Get(ondisk.IPVSConfig))
					}
				}
				if !w.ConsoleHas("no API server of the Site could be verified (" + slip + "): the previous ones stay") {
					t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
				}
			}
			// Another cluster's API server answers at the address. It proves nothing, because its
			// certificate is of another CA.
			other := worldtest.NewCluster(t)
			w.Cluster.OtherClusters = map[string]*worldtest.Cluster{slip: other}
			w.Cluster.Down[slip] = false
			w.PowerOn()
			if err := w.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if !strings.Contains(w.Get(ondisk.IPVSConfig), "192.0.2.11:6443") {
				t.Errorf("an API server of another cluster replaced the masters:\n%s", w.Get(ondisk.IPVSConfig))
			}
			// The list was correct after all.
			w.Cluster.OtherClusters = nil
			w.PowerOn()
			if err := w.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if conf := w.Get(ondisk.IPVSConfig); strings.Contains(conf, "192.0.2.11:6443") || !strings.Contains(conf, slip) {
				t.Errorf("the old masters are still in ipvscare's configuration:\n%s", conf)
			}
			if w.Joins != 1 {
				t.Errorf("kubeadm joined %d times", w.Joins)
			}
		})
	}
}

// TestSlipInMastersOffline checks a wrong list of API servers that arrives while no API server
// answers. The former list stays in use.
func TestSlipInMastersOffline(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, w.SiteWithMasters(slip))
	w.PowerOn()
	w.Offline, w.Patience = true, 5*time.Minute
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	w.PowerOn()
	w.Offline, w.Patience = false, 30*time.Minute
	w.Cluster.Down[slip] = true
	if err := w.Boot(); err != nil || !strings.Contains(w.Get(ondisk.IPVSConfig), "192.0.2.11:6443") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestOneOfTheNewMastersProves checks that if one API server of a corrected list answers, that list
// replaces the former one, even if another entry is wrong.
func TestOneOfTheNewMastersProves(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Cluster.Down[slip] = true
	w.Stamp(worldtest.SlotDevice, w.SiteWithMasters(slip+", 192.0.2.12:6443"))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if conf := w.Get(ondisk.IPVSConfig); strings.Contains(conf, "192.0.2.11:6443") || !strings.Contains(conf, "192.0.2.12:6443") {
		t.Errorf("masters:\n%s", conf)
	}
	// The next boot has nothing to do.
	w.PowerOn()
	if err := w.Boot(); err != nil || slices.ContainsFunc(w.EffectNames, func(n string) bool { return strings.Contains(n, member.ProvenFile) }) {
		t.Errorf("%v: %s", err, w.EffectNames)
	}
}

// namedAs simulates an API server of the same cluster at addr. Its
// certificate has only these names.
func (w *world) namedAs(addr string, names ...string) {
	w.T.Helper()
	c := w.Cluster
	m := &worldtest.Cluster{T: w.T, CA: c.CA, Key: c.Key, CAPEM: c.CAPEM, Names: names, TLS: new(tls.Config), Now: c.Now}
	m.Serve(w.T)
	c.OtherClusters = map[string]*worldtest.Cluster{addr: m}
}

// TestMasterComesBackWithoutTheName checks kubelet's tls-server-name if the certificate of the
// third API server has other names than the certificates of the other two. The third one is down at
// first, or is replaced later.
func TestMasterComesBackWithoutTheName(t *testing.T) {
	t.Parallel()
	const third = "192.0.2.13:6443"
	wantName := func(t *testing.T, w *world, want string) {
		t.Helper()
		if server, name, err := member.KubeletServer(w.Env()); err != nil || server != "https://apiserver.cluster.local:6443" || name != want {
			t.Errorf("kubelet connects to %s (%q), want %q; %v", server, name, want, err)
		}
	}
	start := func(t *testing.T) *world {
		w := newWorld(t, "apiserver.cluster.local")
		w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
		return w
	}
	t.Run("away during the join", func(t *testing.T) {
		w := start(t)
		w.Cluster.Down[third] = true
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		wantName(t, w, "")
		w.Cluster.Down[third] = false
		w.namedAs(third, "kubernetes")
		w.PowerOn()
		w.MustBoot()
		wantName(t, w, kubeapi.SharedName)
	})
	t.Run("all get the name", func(t *testing.T) { // kubelet joined with the shared name
		w := start(t)
		w.namedAs(third, "kubernetes")
		w.MustBoot()
		wantName(t, w, kubeapi.SharedName)
		w.Cluster.OtherClusters = nil
		w.Cluster.Down[third] = true
		w.PowerOn()
		w.MustBoot()
		wantName(t, w, kubeapi.SharedName) // the third's certificate may still lack it
		w.Cluster.Down[third] = false
		w.PowerOn()
		w.MustBoot()
		wantName(t, w, "")
		w.PowerOn()
		if w.MustBoot(); slices.Contains(w.EffectNames, "restart kubelet.service") {
			t.Errorf("kubelet was restarted once more: %s", w.EffectNames)
		}
	})
	t.Run("first boot runs again until it is back", func(t *testing.T) {
		w := start(t)
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		if w.Units[ondisk.UnitAgain] != "" {
			t.Errorf("all masters answer, but the timer is %s", w.Units[ondisk.UnitAgain])
		}
		w.PowerOn()
		w.Cluster.Down[third] = true
		for range 2 {
			if err := w.Boot(); err != nil || w.Units[ondisk.UnitAgain] != "active" {
				t.Fatalf("the timer is %q; %v\n%s", w.Units[ondisk.UnitAgain], err, strings.Join(w.Console, "\n"))
			}
		}
		// The timer has run first boot, and the third API server is back without the name.
		w.Cluster.Down[third] = false
		w.namedAs(third, "kubernetes")
		if err := w.Boot(); err != nil || w.Units[ondisk.UnitAgain] != "inactive" {
			t.Fatalf("the timer is %q; %v\n%s", w.Units[ondisk.UnitAgain], err, strings.Join(w.Console, "\n"))
		}
		wantName(t, w, kubeapi.SharedName)
	})
	t.Run("exchanged later", func(t *testing.T) {
		w := start(t)
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		wantName(t, w, "")
		w.namedAs(third, "kubernetes")
		w.PowerOn()
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		wantName(t, w, kubeapi.SharedName)
		if !slices.Contains(w.EffectNames, "restart kubelet.service") {
			t.Error("kubelet was not restarted")
		}
		w.PowerOn()
		if err := w.Boot(); err != nil || slices.Contains(w.EffectNames, "restart kubelet.service") {
			t.Errorf("kubelet was restarted a second time: %v %s", err, w.EffectNames)
		}
	})
	t.Run("only the endpoint's name", func(t *testing.T) {
		w := start(t)
		w.Cluster.Down[third] = true
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		w.Cluster.Down[third] = false
		w.namedAs(third, "apiserver.cluster.local")
		w.PowerOn()
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		wantName(t, w, "")
	})
	t.Run("neither name", func(t *testing.T) {
		w := start(t)
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		w.namedAs(third, "elsewhere")
		w.PowerOn()
		if err := w.Boot(); err != nil { // the others serve
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		wantName(t, w, "")
	})
}

// TestYurthubsEndpointIsLookedAtAgain checks that yurthub's list loses the endpoint if an API
// server that was down before turns out to have a certificate without the endpoint's name.
func TestYurthubsEndpointIsLookedAtAgain(t *testing.T) {
	const third = "192.0.2.13:6443"
	w := newWorld(t, "apiserver.cluster.local")
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, "nodeType: edge", "nodePool: shanghai"))
	w.Cluster.Down[third] = true
	w.MustBoot()
	if !strings.Contains(w.Get(hub.EnvFile), "--server-addr=https://apiserver.cluster.local:6443,") {
		t.Fatalf("yurthub's arguments:\n%s", w.Get(hub.EnvFile))
	}
	w.PowerOn()
	w.MustBoot()
	if slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
		t.Error("yurthub was restarted although the third API server has not answered")
	}
	w.Cluster.Down[third] = false
	w.namedAs(third, "kubernetes")
	w.PowerOn()
	w.MustBoot()
	if strings.Contains(w.Get(hub.EnvFile), "https://apiserver.cluster.local:6443") || !slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
		t.Errorf("yurthub's arguments have the endpoint, whose name the third API server's certificate lacks:\n%s", w.Get(hub.EnvFile))
	}
	w.PowerOn()
	w.MustBoot()
	if slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
		t.Error("yurthub was restarted once more")
	}
}

// TestRouteToFormerMasters checks that the former API servers stay in use if there is no route to
// the corrected list. Offline, a route to the former API servers is sufficient for a healthy boot.
func TestRouteToFormerMasters(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.SiteWithMasters("198.51.100.91:6443"))
	w.PowerOn()
	w.Offline, w.HasRoute = true, true
	w.Units[ondisk.UnitIPVSCare] = "active"
	e := w.Env()
	source := e.Source
	e.Source = func(ctx context.Context, to string) (netip.Addr, error) {
		if strings.HasPrefix(to, "198.51.100.") {
			return netip.Addr{}, errors.New("network is unreachable")
		}
		return source(ctx, to)
	}
	if err := w.Run(New(e)); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	if !w.Has(ondisk.HealthyFile) {
		t.Errorf("the masters have a route, but the boot is not marked as healthy:\n%s", w.Log.String())
	}
}

// TestFormerMastersAreNoneOfTheOtherCluster checks a machine that must move to a cluster that does
// not answer. It does not try the API servers of its old cluster.
func TestFormerMastersAreNoneOfTheOtherCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	own := w.Cluster.Pin
	w.Cluster.Down[slip] = true
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.SiteWithMasters(slip, worldtest.WithToken), own, worldtest.NewCluster(t).Pin, 1))
	w.PowerOn()
	if err := w.Boot(); err == nil {
		t.Fatal("the machine moved to a cluster that does not answer")
	}
	if !w.ConsoleHas("the Site's cluster to accept the token ("+slip+")") || w.ConsoleHas("belongs to another cluster") || w.ConsoleHas("192.0.2.11:6443") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

const learnedMaster = "192.0.2.21:6443"

// learn writes the list of API servers that ipvscare has learned for the list configured.
func (w *world) learn(configured ...string) {
	w.Put(ondisk.IPVSLearned, fmt.Sprintf(`{"version":1,"servers":[{"vip":"10.103.97.2:6443","configured":["%s"],"masters":["192.0.2.11:6443","%s"]}]}`,
		strings.Join(configured, `","`), learnedMaster))
}

var siteMasters = []string{"192.0.2.11:6443", "192.0.2.12:6443", "192.0.2.13:6443"}

// TestAllAPIServersWereReplaced checks a node whose API servers were all replaced, and whose
// ipvscare has learned one of the new ones. It counts as online, and with a new token it joins
// again after its certificate has expired.
func TestAllAPIServersWereReplaced(t *testing.T) {
	t.Parallel()
	for _, unpinned := range []bool{false, true} {
		t.Run(fmt.Sprintf("unpinned %v", unpinned), func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			site := func(lines ...string) string {
				s := w.Site(append(lines, "ipvs: {learnMasters: true}")...)
				if unpinned {
					s = strings.Replace(s, "caCertHashes: ['"+w.Cluster.Pin+"']", "unsafeSkipCAVerification: true", 1)
				}
				return s
			}
			w.Stamp(worldtest.SlotDevice, site(worldtest.WithToken))
			w.MustBoot()
			for _, m := range siteMasters {
				w.Cluster.Down[m] = true
			}
			w.learn(siteMasters...)
			conf := w.Get(ondisk.IPVSConfig)
			w.PowerOn()
			w.MustBoot()
			if w.Get(ondisk.IPVSConfig) != conf {
				t.Error("ipvscare's configuration has another list, so ipvscare drops the learned one")
			}
			w.Now, w.ClockSynced = w.Now.AddDate(2, 0, 0), true
			w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
			w.Cluster.NodeRevives = true
			w.Stamp(worldtest.SlotDevice, site(worldtest.WithToken))
			w.PowerOn()
			w.Patience = time.Hour
			if w.MustBoot(); w.Joins != 2 {
				t.Errorf("kubeadm joined %d times", w.Joins)
			}
		})
	}
}

// TestAddressOfAReplacedAPIServer checks that a node without pins in its Site still belongs to its
// own cluster when another cluster's API server gets the address of a replaced one.
func TestAddressOfAReplacedAPIServer(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken, "ipvs: {learnMasters: true}"), "caCertHashes: ['"+w.Cluster.Pin+"']", "unsafeSkipCAVerification: true", 1))
	w.MustBoot()
	w.Cluster.OtherClusters = map[string]*worldtest.Cluster{siteMasters[0]: worldtest.NewCluster(t)}
	for _, m := range siteMasters[1:] {
		w.Cluster.Down[m] = true
	}
	w.learn(siteMasters...)
	w.PowerOn()
	if w.MustBoot(); w.ConsoleHas("do not belong to the cluster that this machine has joined") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestSlipInMastersOfANodeThatLearned gives a new list of API servers, none of which answers, to a
// node whose former API servers were all replaced. The node keeps the learned ones.
func TestSlipInMastersOfANodeThatLearned(t *testing.T) {
	t.Parallel()
	const learns = "ipvs: {learnMasters: true}"
	w := nativeWorld(t, learns)
	w.MustBoot()
	for _, m := range append(slices.Clone(siteMasters), slip) {
		w.Cluster.Down[m] = true
	}
	w.learn(siteMasters...)
	w.Stamp(worldtest.SlotDevice, w.SiteWithMasters(slip, learns))
	for range 2 {
		w.PowerOn()
		w.MustBoot()
		for _, m := range []string{siteMasters[0], learnedMaster, slip} {
			if conf := w.Get(ondisk.IPVSConfig); strings.Count(conf, m) != 1 {
				t.Errorf("ipvscare's configuration lacks %s:\n%s", m, conf)
			}
		}
		w.Put(ondisk.IPVSLearned, `{"version":1,"servers":[{"vip":"10.103.97.2:6443"}]}`) // as ipvscare does
	}
	// The list was correct after all.
	w.Cluster.Down[slip] = false
	w.PowerOn()
	w.MustBoot()
	if conf := w.Get(ondisk.IPVSConfig); strings.Contains(conf, learnedMaster) || strings.Contains(conf, siteMasters[0]) || !strings.Contains(conf, slip) {
		t.Errorf("the old API servers are still in ipvscare's configuration:\n%s", conf)
	}
}

// TestEndpointIsAWay checks a node that reaches its API servers only through the endpoint, because
// ipvscare has another address for one of them, for example from an earlier DNS lookup.
func TestEndpointIsAWay(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	address := network.NodeAddress(w.Env())
	for _, m := range siteMasters {
		w.Cluster.Down[m] = true
	}
	w.PowerOn()
	if w.MustBoot(); network.NodeAddress(w.Env()) != address {
		t.Errorf("the address is %s", network.NodeAddress(w.Env()))
	}
}

// TestWhatIsLearnedCounts checks that first boot uses learned API servers only if ipvscare uses
// them too.
func TestWhatIsLearnedCounts(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "ipvs: {learnMasters: true}")
	learned := func(lines ...string) []string {
		site, err := site.Parse([]byte(w.Site(lines...)))
		if err != nil {
			t.Fatal(err)
		}
		return member.LearnedMasters(w.Env(), site)
	}
	const learns = "ipvs: {learnMasters: true}"
	w.learn(siteMasters...)
	if got := learned(learns); got != nil {
		t.Errorf("a machine that is in no cluster: %q", got)
	}
	w.MustBoot()
	w.learn(siteMasters...)
	if got := learned(learns); !slices.Equal(got, []string{learnedMaster}) {
		t.Errorf("%q", got)
	}
	for _, lines := range [][]string{{}, {"ipvs: {disabled: true, learnMasters: true}"}, {learns, "vip: 10.103.97.3"}} {
		if got := learned(lines...); got != nil {
			t.Errorf("%q: %q", lines, got)
		}
	}
	w.learn(siteMasters[:2]...)
	if got := learned(learns); got != nil {
		t.Errorf("learned from another list of API servers: %q", got)
	}
	for _, doc := range []string{"", "{", `{"version":2}`, `{"version":1,"servers":[{"vip":"10.103.97.2:6443","configured":["192.0.2.11:6443","192.0.2.12:6443","192.0.2.13:6443"],"masters":["x","[2001:db8::1]:6443"]}]}`} {
		w.Put(ondisk.IPVSLearned, doc)
		if got := learned(learns); got != nil {
			t.Errorf("%s: %q", doc, got)
		}
	}
}

// TestMarksLastUntilPowerOff checks that reports and attempts of an earlier run are not repeated
// when the timer runs first boot again, every two hours.
func TestMarksLastUntilPowerOff(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Cluster.ServiceSubnet = "10.96.0.0/12" // the VIP is in it
	w.MustBoot()
	w.Cluster.Down[slip] = true
	w.Stamp(worldtest.SlotDevice, w.SiteWithMasters(slip))
	w.FSUUIDs = map[string][16]byte{"/dev/vda3": {1}, "/dev/vda5": {1}} // and these UUIDs do not change
	w.PowerOn()
	w.MustBoot()
	warnings := []string{"the VIP 10.103.97.2 is in the cluster's service range", "previous ones stay in use too"}
	for _, words := range warnings {
		if !w.ConsoleHas(words) {
			t.Fatalf("the console does not have %q:\n%s", words, strings.Join(w.Console, "\n"))
		}
	}
	if w.EffectCount("run tune2fs") != 2 {
		t.Fatalf("%q", w.EffectNames)
	}
	ended := func() {
		t.Helper()
		if err := os.RemoveAll(filepath.Join(w.Root, ondisk.RunDir)); err != nil { // like RuntimeDirectory= at the end of first boot
			t.Fatal(err)
		}
		w.EffectNames, w.Console = nil, nil
		w.Now = w.Now.Add(2 * time.Hour)
	}
	for range 2 {
		ended()
		w.MustBoot()
		for _, words := range warnings {
			if w.ConsoleHas(words) {
				t.Errorf("the message is repeated: %s", words)
			}
		}
		if w.EffectCount(ondisk.UnitIPVSCare) != 0 || w.EffectCount("run tune2fs") != 0 {
			t.Errorf("%q", w.EffectNames)
		}
	}
	// Another wrong list is reported.
	ended()
	w.Cluster.Down["198.51.100.92:6443"] = true
	w.Stamp(worldtest.SlotDevice, w.SiteWithMasters("198.51.100.92:6443"))
	if w.MustBoot(); !w.ConsoleHas("(198.51.100.92:6443): the previous ones stay") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	// ipvscare is not restarted while it serves the endpoint, even if the phase has other work.
	w.EffectNames = nil
	site, err := site.Parse([]byte(w.SlotSite(worldtest.SlotDevice)))
	if err != nil {
		t.Fatal(err)
	}
	if err := join.StartIPVSCare(t.Context(), w.Env(), site, false); err != nil || len(w.EffectNames) != 0 {
		t.Errorf("%v, %q", err, w.EffectNames)
	}
	// Nor is it restarted during its delay after power-on.
	w.Cluster.Down[worldtest.Endpoint] = true
	w.Started[ondisk.UnitIPVSCare] = w.Now
	if err := join.StartIPVSCare(t.Context(), w.Env(), site, false); err != nil || len(w.EffectNames) != 0 {
		t.Errorf("%v, %q", err, w.EffectNames)
	}
	w.Now = w.Now.Add(site.Spread())
	if err := join.StartIPVSCare(t.Context(), w.Env(), site, false); w.EffectCount("restart "+ondisk.UnitIPVSCare) != 1 {
		t.Errorf("%v, %q", err, w.EffectNames)
	}
}

// TestMarksAreNotInRunDir checks that marks are outside of RunDir, which systemd removes at the end
// of first boot.
func TestMarksAreNotInRunDir(t *testing.T) {
	t.Parallel()
	for _, mark := range []string{network.AskedNTP, join.ReportedVIP, member.ReportedFormer, site.UUIDTried(ondisk.LabelData), join.RefusedArgs} {
		if strings.HasPrefix(mark, ondisk.RunDir+"/") {
			t.Errorf("%s is in RunDir, which systemd removes at the end of first boot", mark)
		}
	}
}
