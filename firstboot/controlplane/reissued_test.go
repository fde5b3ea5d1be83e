package controlplane_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestMasterTakesTheCAsOfItsSite checks that a control-plane node installs and publishes the CAs of
// a newer Site, and makes its kubeconfigs again. An older Site does not undo this.
func TestMasterTakesTheCAsOfItsSite(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	older := *m.site
	m.YearsLater(9)
	m.started = ""
	m.bootDone()
	for _, ca := range configs.ClusterCAs() {
		if file := member.PKIDir + "/" + ca.Base + ".crt"; !m.ConsoleHas(file + " is valid until 2036-11-") {
			t.Errorf("the console has no message about %s\n%s", file, strings.Join(m.Console, "\n"))
		}
	}

	newer, keys := *m.site, *m.site.Credentials.Keys
	newer.Credentials.Keys = &keys
	for _, of := range configs.ClusterCAs() {
		pair := of.Of(&keys)
		ca, key := parsePair(t, *pair)
		pair.Cert = string(worldtest.Reissue(t, ca, key, m.Now))
	}
	published := func() string {
		m.Cluster.Mu.Lock()
		defer m.Cluster.Mu.Unlock()
		return string(m.Cluster.CAPEM)
	}
	m.stampSite(&newer)
	m.EffectNames, m.Console = nil, nil
	pods := m.Get(controlplane.Pods[0])
	m.bootDone() // while the control plane runs, as with a signed stick
	if !m.ConsoleHas("etcd on this machine still uses the old certificate of its CA") {
		t.Errorf("the console does not ask for a restart of etcd\n%s", strings.Join(m.Console, "\n"))
	}
	for _, when := range []string{"with its Site", "restarted", "with an older Site"} {
		if when == "with an older Site" {
			m.stampSite(&older)
		}
		if when != "with its Site" {
			m.on()
			m.bootDone()
		}
		for _, of := range configs.ClusterCAs() {
			if m.Get(member.PKIDir+"/"+of.Base+".crt") != of.Of(&keys).Cert {
				t.Errorf("%s: the CA %s is the old one", when, of.Base)
			}
		}
		for _, conf := range append(slices.Clone(controlplane.Confs), ondisk.KubeletConf) {
			if string(worldtest.CAOf(t, m.Get(conf))) != keys.CA.Cert {
				t.Errorf("%s: %s trusts the old CA", when, conf)
			}
		}
		if published() != keys.CA.Cert {
			t.Errorf("%s: cluster-info has the old CA", when)
		}
		if m.Get(controlplane.Pods[0]) == pods {
			t.Errorf("%s: the API server was not restarted", when)
		}
		if said := m.ConsoleHas("is valid until"); said {
			t.Errorf("%s: the notes still say that the CAs end", when)
		}
	}
	if m.ConsoleHas("etcd on this machine still uses") {
		t.Error("etcd was restarted, but a note still asks for it")
	}
	m.SetClock(m.Now.AddDate(0, 0, -2)) // before the CAs were issued
	files, err := controlplane.PKIFilesFor(t.Context(), m.Env(), older.Credentials.Keys)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasSuffix(f.Path, ".crt") && string(f.Data) != m.Get(f.Path) {
			t.Errorf("with a clock that is behind, %s comes from the older Site", f.Path)
		}
	}
}

// TestCAsOfAClockThatWasAhead checks CAs that a computer reissued while its clock was ahead, and
// again later with the right clock. A control-plane node installs the CAs that were reissued last,
// and keeps them if the former Site is stamped again.
func TestCAsOfAClockThatWasAhead(t *testing.T) {
	t.Parallel()
	doc := "apiVersion: edgebake.io/v1alpha1\nkind: Cluster\nname: shops\nkubernetesVersion: v1.36.3\nkubeProxy: {mode: none}\nnodes: [{name: shop1}]\nmasters: [{name: m1, address: 192.0.2.11}]\n"
	dir, born := filepath.Join(t.TempDir(), "shops"), time.Date(2026, 11, 20, 9, 0, 0, 0, time.UTC)
	parsed, err := clusterdoc.Parse("cluster.yaml", []byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	keysAt := func(at time.Time) *configs.ClusterKeys {
		t.Helper()
		if _, err := mint.New(dir, parsed, mint.Options{Now: at}); err != nil {
			t.Fatal(err)
		}
		sites, err := mint.ControlPlaneSites(dir, sealed.Identity{}, at)
		if err != nil {
			t.Fatal(err)
		}
		return sites[0].Site.Credentials.Keys
	}
	keysAt(born)
	ahead, right := keysAt(born.AddDate(9, 0, 0)), keysAt(born.AddDate(0, 1, 0))
	for name, tt := range map[string]struct {
		disk, site *configs.ClusterKeys
		want       string
	}{
		"issued once more":      {ahead, right, right.CA.Cert},
		"the former Site again": {right, ahead, right.CA.Cert},
	} {
		w := newWorld(t)
		w.Now, w.ClockSynced = born.AddDate(0, 1, 0), true
		w.Put(ondisk.KubeCA, tt.disk.CA.Cert)
		if got := caFor(t, w, tt.site); got != tt.want {
			t.Errorf("%s: the machine has another CA", name)
		}
	}
}

// TestCAOfTheFutureReplacesNone checks that a reissued CA that is not valid yet does not replace
// the valid one if a time server has set the clock. Without a time server, the clock may be behind,
// so the reissued CA is installed.
func TestCAOfTheFutureReplacesNone(t *testing.T) {
	t.Parallel()
	keys := *mintedSites(t, 1)[0].Site.Credentials.Keys
	ca, key := parsePair(t, keys.CA)
	valid := keys.CA.Cert
	w := newWorld(t)
	w.Put(ondisk.KubeCA, valid)
	keys.CA.Cert = string(worldtest.Reissue(t, ca, key, w.Now.AddDate(9, 0, 0)))
	for _, synced := range []bool{true, false} {
		w.ClockSynced = synced
		want := valid
		if !synced { // the clock may be behind
			want = keys.CA.Cert
		}
		if got := caFor(t, w, &keys); got != want {
			t.Errorf("a clock that follows a time server %v: the CA is %s", synced, got)
		}
	}
}

// caFor returns the cluster CA that a machine would install from keys.
func caFor(t *testing.T, w *worldtest.World, keys *configs.ClusterKeys) string {
	t.Helper()
	files, err := controlplane.PKIFilesFor(t.Context(), w.Env(), keys)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if f.Path == ondisk.KubeCA {
			return string(f.Data)
		}
	}
	t.Fatal("no CA")
	return ""
}
