package firstboot

import (
	"encoding/base64"
	"encoding/pem"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

const untrustedUsers = "users: [{name: root, sshAuthorizedKeys: [\"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKHEChAsHYmTqiLyuQ3FqLqWUgFYmWlSTsZKEJpSMEiH x\"]}]"

// TestUnsignedStickAndALostIdentity checks that a node with an expired certificate or damaged
// credentials does not count as blank: an unsigned stick can repair it, but cannot add users.
func TestUnsignedStickAndALostIdentity(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*world){
		"certificate expired": func(w *world) { w.Now = w.Now.AddDate(2, 0, 0) },
		"credentials damaged": func(w *world) { w.Put(ondisk.KubeletConf, "") },
	} {
		t.Run(name, func(t *testing.T) {
			w := nativeWorld(t)
			w.setStickPolicy(ondisk.SitesRepair)
			w.MustBoot()
			lose(w)
			w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
			w.Cluster.NodeRevives = true
			w.Plug(w.Site(worldtest.WithToken, untrustedUsers))
			w.PowerOn()
			w.MustBoot()
			if w.Has("/root/.ssh/authorized_keys") || strings.Contains(w.SlotSite(worldtest.SlotDevice), "ssh-ed25519") {
				t.Errorf("the keys of the unsigned stick are in place:\n%s", w.SlotSite(worldtest.SlotDevice))
			}
			if w.Joins != 2 {
				t.Errorf("kubeadm joined %d times, want 2: the stick's token was not used", w.Joins)
			}
		})
	}
}

// TestUntrustedCluster checks that a node whose Site pins no CA stays in its cluster, whatever API
// servers and token are on an unsigned stick.
func TestUntrustedCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setStickPolicy(ondisk.SitesRepair)
	w.Stamp(worldtest.SlotDevice, unpin(w.Site(worldtest.WithToken)))
	w.MustBoot()
	w.Rebuild() // the attacker answers at the API servers' addresses now
	ca := w.Get(ondisk.KubeCA)
	w.Plug(unpin(w.Site(worldtest.WithToken, "network: {dns: [192.0.2.123]}")))
	w.PowerOn()
	if err := w.Boot(); err == nil {
		t.Error("first boot succeeded, want an error")
	}
	if w.Joins != 1 || w.Get(ondisk.KubeCA) != ca {
		t.Errorf("the machine joined the other cluster (%d joins)\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
	if got := w.SlotSite(worldtest.SlotDevice); !strings.Contains(got, "192.0.2.123") || !strings.Contains(got, "caCertHashes") {
		t.Errorf("the slot has\n%s", got)
	}
}

// TestBundleOfUntrustedCluster checks an attacker's cluster that publishes the node's pinned CA in
// addition to its own. A node with an expired certificate still joins only its own cluster.
func TestBundleOfUntrustedCluster(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(*testing.T) *world{
		"native": func(t *testing.T) *world { return nativeWorld(t) }, "static pod": podWorld,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := make(t)
			w.setStickPolicy(ondisk.SitesRepair)
			w.MustBoot()
			real := w.Rebuild()
			w.Cluster.ExtraCAs = real.CAPEM
			ca, conf := w.Get(ondisk.KubeCA), w.Get(ondisk.KubeletConf)
			w.Now = w.Now.AddDate(2, 0, 0)
			w.Plug(strings.Replace(w.SlotSite(worldtest.SlotDevice), "credentials: {}", "", 1) + worldtest.WithToken + "\nnetwork: {ntp: [192.0.2.123], dns: [192.0.2.124]}\n")
			w.PowerOn()
			if err := w.Boot(); err == nil || !w.ConsoleHas("the cluster's CA is not the one that caCertHashes pins") {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if w.Joins != 1 || w.Get(ondisk.KubeCA) != ca || w.Get(ondisk.KubeletConf) != conf {
				t.Errorf("the machine joined the other cluster (%d joins)", w.Joins)
			}
			if got := w.SlotSite(worldtest.SlotDevice); strings.Contains(got, "192.0.2.123") || !strings.Contains(got, "192.0.2.124") || !w.ConsoleHas("network.ntp") {
				t.Errorf("the unsigned stick changed the time servers:\n%s", got)
			}
			// The node is back in its own network, and its clock is right again.
			w.Cluster = real
			w.Now = w.Now.AddDate(-2, 0, 0)
			w.PowerOn()
			w.MustBoot()
			if w.Joins != 1 || member.Enrolled(w.Env()) != nil || w.Get(ondisk.KubeletConf) != conf {
				t.Errorf("the machine is not a member of its cluster (%d joins)", w.Joins)
			}
		})
	}
}

// TestAMemberJoinsItsOwnClusterAgain checks a Site that pins the CAs of several clusters, for
// machines that have not joined yet. A member joins only its own cluster again.
func TestAMemberJoinsItsOwnClusterAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := worldtest.NewCluster(t)
	site := strings.Replace(w.Site(worldtest.WithToken), "caCertHashes: [", "caCertHashes: ['"+other.Pin+"', ", 1)
	w.Stamp(worldtest.SlotDevice, site)
	w.MustBoot()
	own := w.Cluster
	w.Now = w.Now.AddDate(2, 0, 0)
	w.Cluster = other
	other.Attach(w.World)
	w.Stamp(worldtest.SlotDevice, site)
	w.PowerOn()
	if err := w.Boot(); err == nil || w.Joins != 1 || w.Get(ondisk.KubeCA) != string(own.CAPEM) || !w.ConsoleHas("FAILED discovery") {
		t.Errorf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
	}
	w.Cluster = own
	own.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	own.NodeRevives = true
	w.PowerOn()
	w.MustBoot()
	wantMember(t, w, 2)
}

// TestAMemberThatFailedToJoinAgain checks a machine whose failed join has removed its credentials,
// but not the record of its membership. It joins only its own cluster.
func TestAMemberThatFailedToJoinAgain(t *testing.T) {
	t.Parallel()
	for _, pinned := range []bool{true, false} {
		w := newWorld(t)
		other := worldtest.NewCluster(t)
		site := unpin(w.Site(worldtest.WithToken))
		if pinned {
			site = strings.Replace(w.Site(worldtest.WithToken), "caCertHashes: [", "caCertHashes: ['"+other.Pin+"', ", 1)
		}
		w.Stamp(worldtest.SlotDevice, site)
		w.MustBoot()
		own := w.Cluster
		w.Now = w.Now.AddDate(2, 0, 0)
		own.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
		own.NodeRevives = true
		w.JoinError = func(int) error { return errors.New("kubelet is not well") }
		w.Stamp(worldtest.SlotDevice, site)
		w.PowerOn()
		if err := w.Boot(); err == nil || member.HasCredentials(w.Env()) {
			t.Fatalf("the machine joined again: %v\n%s", err, strings.Join(w.Console, "\n"))
		}
		w.JoinError = nil
		w.Cluster = other
		other.Attach(w.World)
		w.PowerOn()
		took := func() bool { return w.Has(ondisk.KubeCA) && w.Get(ondisk.KubeCA) == string(other.CAPEM) }
		if err := w.Boot(); err == nil || took() || !w.ConsoleHas("FAILED discovery") {
			t.Errorf("pinned %v: %v, the machine accepted the other cluster's CA: %v\n%s", pinned, err, took(), strings.Join(w.Console, "\n"))
		}
		w.Cluster = own
		w.PowerOn()
		w.MustBoot()
		wantMember(t, w, w.Joins)
	}
}

// TestABundleOnTheDisk checks that a CA without a matching pin is not used. A former release copied
// it from cluster-info during an unfinished join.
func TestABundleOnTheDisk(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.JoinError = func(int) error { return errors.New("kubelet is not well") }
	w.Cluster.ExtraCAs = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: worldtest.NewCluster(t).CA.Raw})
	for _, site := range []string{w.Site(worldtest.WithToken), unpin(w.Site(worldtest.WithToken))} {
		w.Stamp(worldtest.SlotDevice, site)
		w.PowerOn()
		if err := w.Boot(); err == nil {
			t.Fatal("the machine joined the cluster")
		}
	}
	e := w.Env()
	bundle := w.Get(ondisk.KubeCA) // the CA of the Site without pins
	if len(member.CAPins([]byte(bundle))) != 2 {
		t.Fatalf("the CA is\n%s", bundle)
	}
	conf, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: "https://192.0.2.11:6443", CAData: base64.StdEncoding.EncodeToString([]byte(bundle))}, kubeapi.User{Token: worldtest.TestToken})
	if err != nil {
		t.Fatal(err)
	}
	w.Put(member.DiscoveryFile, string(conf))
	site, err := site.Parse([]byte(w.Site(worldtest.WithToken)))
	if err != nil {
		t.Fatal(err)
	}
	if !member.StaleCA(e, site) || member.Discovered(e, site) {
		t.Errorf("stale %v, discovered %v", member.StaleCA(e, site), member.Discovered(e, site))
	}
	w.JoinError = nil
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.PowerOn()
	w.MustBoot()
	wantMember(t, w, w.Joins)
}

// TestAStickOfTheFuture checks that the date of an unsigned stick neither sets a node's clock years
// ahead, nor makes newer Sites count as old.
func TestAStickOfTheFuture(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.setStickPolicy(ondisk.SitesRepair)
	w.MustBoot()
	w.Plug("")
	w.StampAt(worldtest.StickDevice, time.Date(2029, 6, 1, 0, 0, 0, 0, time.UTC).Unix(),
		map[string]string{ondisk.SlotSite: w.Site("network: {dns: [192.0.2.123]}")})
	for range 2 {
		w.PowerOn()
		w.MustBoot()
	}
	if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") {
		t.Error("the stick's Site was not used")
	}
	if w.Now.Year() != 2026 {
		t.Errorf("the clock shows %s", w.Now)
	}
	w.StampAt(worldtest.StickDevice, w.Now.Add(time.Hour).Unix(), map[string]string{ondisk.SlotSite: w.Site("network: {dns: [192.0.2.124]}")})
	w.PowerOn()
	w.MustBoot()
	if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.124") {
		t.Errorf("a correction counts as older than a stick with a date in the future\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestUnsignedStickAndASpoiltSlot checks that a node that cannot read its own Site applies nothing
// from an unsigned stick.
func TestUnsignedStickAndASpoiltSlot(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.setStickPolicy(ondisk.SitesRepair)
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, "")
	if err := os.Remove(w.HostPath(ondisk.SiteCopy)); err != nil {
		t.Fatal(err)
	}
	w.Plug(w.Site(untrustedUsers))
	w.PowerOn()
	if err := w.Boot(); err == nil || w.Has("/root/.ssh/authorized_keys") {
		t.Errorf("%v: the keys of the unsigned stick are in place", err)
	}
}
