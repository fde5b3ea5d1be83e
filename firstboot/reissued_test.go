package firstboot

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
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
	"github.com/edgebake/edgebake/openyurt"
)

// reissue returns a new certificate of a CA, signed with key, which may
// be the CA's own key or another one.
func reissue(t *testing.T, ca *x509.Certificate, key crypto.Signer, now time.Time) []byte {
	t.Helper()
	tmpl := *ca
	tmpl.SerialNumber, tmpl.NotBefore, tmpl.NotAfter = big.NewInt(7), now.Add(-time.Hour), now.AddDate(10, 0, 0)
	der, err := x509.CreateCertificate(rand.Reader, &tmpl, &tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// yearsLater advances the clock. kubelet has renewed its certificate meanwhile.
func (w *world) yearsLater(years int) {
	w.T.Helper()
	w.Now = w.Now.AddDate(years, 0, 0)
	own, err := os.Readlink(filepath.Join(w.Root, member.ClientCert))
	if err != nil {
		w.T.Fatal(err)
	}
	w.Put(own, w.Cluster.Client(member.NodeUser+member.NodeName(w.Env()), w.ClusterTime().AddDate(1, 0, 0)))
	w.PowerOn()
}

// TestWorkerTakesTheCAThatWasIssuedAgain checks that a worker accepts a CA with the same key from
// cluster-info, even of an unauthenticated server. It works after the former CA has expired.
func TestWorkerTakesTheCAThatWasIssuedAgain(t *testing.T) {
	t.Parallel()
	for name, newWorld := range map[string]func(*testing.T, ...string) *world{"native": nativeWorld, "edge": edgeWorld} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.mustBoot()
			former := w.Get(ondisk.KubeCA)
			w.yearsLater(7)
			w.mustBoot()
			if w.ConsoleHas("is valid until") || w.Get(ondisk.KubeCA) != former {
				t.Errorf("the message about it came too early\n%s", strings.Join(w.Console, "\n"))
			}
			w.yearsLater(2)
			w.mustBoot()
			if !w.ConsoleHas(ondisk.KubeCA+" is valid until 2036-11-20") || w.Units[ondisk.UnitAgain] != "active" {
				t.Errorf("the console has no message about it, or first boot's timer is %s\n%s", w.Units[ondisk.UnitAgain], strings.Join(w.Console, "\n"))
			}

			stranger, strangersKey := worldtest.NewCA(t, "kubernetes")
			ca, own := w.Cluster.CA, w.Cluster.CAPEM
			forged := *ca
			forged.NotAfter = w.Now.AddDate(10, 0, 0)
			der, err := x509.CreateCertificate(rand.Reader, &forged, stranger, ca.PublicKey, strangersKey)
			if err != nil {
				t.Fatal(err)
			}
			w.Cluster.CAPEM = append(reissue(t, stranger, strangersKey, w.Now), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
			w.mustBoot()
			if w.Get(ondisk.KubeCA) != former {
				t.Fatal("the machine accepted a CA that is not the cluster's")
			}
			w.Cluster.CAPEM = own

			renewed := reissue(t, ca, w.Cluster.Key, w.Now)
			w.Cluster.CAPEM = renewed
			w.EffectNames = nil
			w.mustBoot() // as firstboot-again.timer does
			if w.Get(ondisk.KubeCA) != string(renewed) || !bytes.Equal(worldtest.CAOf(t, w.Get(ondisk.KubeletConf)), renewed) {
				t.Error("the kubeconfig trusts the old CA")
			}
			if !slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) || name == "edge" && !slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
				t.Errorf("the programs were not restarted: %q", w.EffectNames)
			}
			if w.Units[ondisk.UnitAgain] == "active" {
				t.Error("first boot still looks every two hours")
			}
			w.EffectNames = nil
			w.mustBoot()
			if slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
				t.Errorf("again: %q", w.EffectNames)
			}
			w.yearsLater(3) // the former one has expired
			w.Cluster.TLS.ClientCAs.AppendCertsFromPEM(renewed)
			w.mustBoot()
		})
	}
}

// TestWorkerThatMissedTheEndOfTheCA checks that a worker that was off when the former CA expired
// accepts the reissued one.
func TestWorkerThatMissedTheEndOfTheCA(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.yearsLater(11)
	w.Cluster.CAPEM = reissue(t, w.Cluster.CA, w.Cluster.Key, w.Now.AddDate(-2, 0, 0))
	w.Cluster.TLS.ClientCAs.AppendCertsFromPEM(w.Cluster.CAPEM)
	w.mustBoot()
}

// TestMasterTakesTheCAsOfItsSite checks that a control-plane node installs and publishes the CAs of
// a newer Site, and makes its kubeconfigs again. An older Site does not undo this.
func TestMasterTakesTheCAsOfItsSite(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	older := *m.site
	m.yearsLater(9)
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
		pair.Cert = string(reissue(t, ca, key, m.Now))
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
// again later with the right clock. A control-plane node with the former CAs installs the later
// ones.
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
		w := newWorld(t, "testdata/machine.txtar")
		w.Now, w.ClockSynced = born.AddDate(0, 1, 0), true
		w.Put(ondisk.KubeCA, tt.disk.CA.Cert)
		if got := caFor(t, w, tt.site); got != tt.want {
			t.Errorf("%s: the machine has another CA", name)
		}
	}
}

// TestCAOfTheFutureReplacesNone checks that if a time server has set the clock, a CA that is not
// valid yet does not replace an earlier issue that is.
func TestCAOfTheFutureReplacesNone(t *testing.T) {
	t.Parallel()
	keys := *mintedSites(t, 1)[0].Site.Credentials.Keys
	ca, key := parsePair(t, keys.CA)
	valid := keys.CA.Cert
	w := newWorld(t, "testdata/machine.txtar")
	w.Put(ondisk.KubeCA, valid)
	keys.CA.Cert = string(reissue(t, ca, key, w.Now.AddDate(9, 0, 0)))
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
func caFor(t *testing.T, w *world, keys *configs.ClusterKeys) string {
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
