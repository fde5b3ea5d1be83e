package controlplane_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestMasterLosesKeys checks that first boot requests keys again if they are lost after they were
// removed from the slot.
func TestMasterLosesKeys(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(member.PKIDir+"/front-proxy-ca.key", "")
	m.on()
	if err := m.Boot(); err == nil || !m.ConsoleHas("FAILED keys") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.stampSite(m.site)
	m.on()
	m.bootDone()
}

// TestMasterLosesItsDirectory checks a machine that has lost the source of the bind mount
// /etc/kubernetes. With keys from a stick, everything is restored, and etcd keeps its data.
func TestMasterLosesItsDirectory(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	if err := errors.Join(os.RemoveAll(m.HostPath(ondisk.KubernetesDir)), os.Mkdir(m.HostPath(ondisk.KubernetesDir), 0o755)); err != nil {
		t.Fatal(err)
	}
	m.on()
	if err := m.Boot(); err == nil || !m.ConsoleHas("FAILED keys") {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.stampSite(m.site)
	m.on()
	m.bootDone()
	if len(m.starts) != 1 || m.started != "has data\n" {
		t.Errorf("etcd was started as %q, and is %q", m.starts, m.started)
	}
}

// TestMasterTakesLostKeysFromAStick checks that a control-plane node accepts keys from a stick with
// its own Site of any date, but only its own cluster's, and only if its keys are lost.
func TestMasterTakesLostKeysFromAStick(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, tt := range map[string]struct {
		before bool // the stick set the machine up, and is still plugged in
		own    int64
		policy string
	}{
		"a new stick":                {},
		"the stick it was set up by": {before: true},
		"an older stick":             {own: worldtest.Day(21)},
		"any stick will do":          {policy: ondisk.SitesAlways},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.SetStickPolicy(tt.policy)
			text, err := configs.EncodeSlot(m.site)
			if err != nil {
				t.Fatal(err)
			}
			files := map[string]string{ondisk.SlotSite: string(text)}
			m.StampAt(worldtest.SlotDevice, max(tt.own, worldtest.Day(19)), files)
			if tt.before {
				m.Plug("")
				m.StampAt(worldtest.StickDevice, worldtest.Day(19), files)
			}
			m.bootDone()
			m.Put(member.PKIDir+"/etcd/ca.key", "")
			m.on()
			if !tt.before {
				if err := m.Boot(); err == nil || !m.ConsoleHas("FAILED keys") {
					t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
				}
				m.Plug("")
				m.StampAt(worldtest.StickDevice, worldtest.Day(19), files)
			}
			m.bootDone()
			if !m.ConsoleHas("the cluster's keys stay on stick") {
				t.Errorf("the console does not report that keys stay on the stick:\n%s", strings.Join(m.Console, "\n"))
			}
			m.keysOnlyInPlace()
			m.on()
			m.bootDone()
			if m.ConsoleHas("using the Site of stick") {
				t.Error("the stick's Site was used again although all keys are in place")
			}
		})
	}
}

// TestWordsFromAStick checks that requests about lost control-plane nodes are accepted from a stick
// only if it also has the cluster's keys: otherwise anybody could have written them.
func TestWordsFromAStick(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for _, keys := range []bool{false, true} {
		s := *m.site
		c := *s.ControlPlane
		c.ContinueFrom, c.RequestedAt = "m1", m.Now.UTC().Format(time.RFC3339)
		s.ControlPlane = &c
		if !keys {
			s.Credentials = configs.Credentials{}
		}
		text, err := configs.EncodeSlot(&s)
		if err != nil {
			t.Fatal(err)
		}
		m.Plug(string(text))
		m.on()
		m.bootDone()
		if taken := strings.Contains(m.SlotSite(worldtest.SlotDevice), `continueFrom: "m1"`); taken != keys {
			t.Fatalf("with keys: %v, taken: %v\n%s", keys, taken, strings.Join(m.Console, "\n"))
		}
	}
	if !m.ConsoleHas("etcd continues with this machine's data alone") || !strings.HasPrefix(controlplane.ReadMembership(m.Env()).Continued, "m1 ") {
		t.Errorf("note %+v\n%s", controlplane.ReadMembership(m.Env()), strings.Join(m.Console, "\n"))
	}
	m.keysOnlyInPlace()
}

func TestMasterTakesNoOthersKeys(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(member.PKIDir+"/etcd/ca.key", "")
	text, err := configs.EncodeSlot(mintedSites(t, 1)[0].Site)
	if err != nil {
		t.Fatal(err)
	}
	m.Plug(string(text))
	m.on()
	if err := m.Boot(); err == nil || !m.ConsoleHas("FAILED keys") || m.ConsoleHas("using the Site") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
}

// TestKeysAreWipedBeforeReady checks that the keys are removed from the slot as soon as they are
// not needed, even before a network add-on makes the Node Ready.
func TestKeysAreWipedBeforeReady(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.NotReady = true
	if err := m.Boot(); err == nil || !m.ConsoleHas("not Ready") {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.keysOnlyInPlace()
}

// TestResetForgetsKeys checks that a reset before kubeadm has made anything removes all keys of the
// cluster.
func TestResetForgetsKeys(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.KubeadmInit = func(machine.Cmd) error { return errHalf }
	if err := m.Boot(); err == nil || !m.Has(member.PKIDir+"/ca.key") {
		t.Fatalf("%v, but the machine has no key to remove", err)
	}
	if _, err := firstboot.Reset(t.Context(), m.Env(), func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	for _, f := range controlplane.Files() {
		if m.Has(f) {
			t.Errorf("%s still exists", f)
		}
	}
}

// TestSecretsOfAMaster checks that the cluster's secrets in a Site, including the nodes' tokens,
// are never shown.
func TestSecretsOfAMaster(t *testing.T) {
	t.Parallel()
	spec := mintedSites(t, 1)[0].Site
	hidden := strings.Join(site.SecretsOf(spec), "\n")
	for i, secret := range spec.Credentials.Keys.Secrets() {
		for line := range strings.Lines(strings.TrimSpace(secret.Reveal())) {
			if line = strings.TrimSpace(line); len(line) >= 24 && !strings.HasPrefix(line, "-----") && !strings.Contains(hidden, line) {
				t.Errorf("secret %d is printed: %.20s...", i, line)
			}
		}
	}
}

// TestKeysOfUnsignedStick checks that an unsigned stick does not replace the keys of a
// control-plane node, whether its Site has a CA or a CA hash.
func TestKeysOfUnsignedStick(t *testing.T) {
	t.Parallel()
	stranger := mintedSites(t, 1)[0].Site.Credentials
	for _, inSite := range []string{"caCertHashes", "caCert"} {
		m := newControlPlane(t, mintedSites(t, 1))
		m.bootDone()
		m.SetStickPolicy(ondisk.SitesRepair)
		own := *m.site
		if inSite == "caCert" {
			own.CACert, own.CACertHashes = own.Credentials.Keys.CA.Cert, nil
		}
		own.Credentials = configs.Credentials{}
		m.stampSite(&own)
		m.on()
		m.bootDone()
		before := m.Get(member.PKIDir+"/ca.key") + m.Get(member.PKIDir+"/sa.key")

		stick := own
		stick.Credentials = stranger
		stick.CACert, stick.CACertHashes = stranger.Keys.CA.Cert, nil
		stick.Network.DNS = []string{"192.0.2.123"}
		text, err := configs.EncodeSlot(&stick)
		if err != nil {
			t.Fatal(err)
		}
		m.Plug("")
		m.StampAt(worldtest.StickDevice, worldtest.Day(21), map[string]string{"site.yaml": string(text)})
		m.on()
		m.bootDone()
		if m.Get(member.PKIDir+"/ca.key")+m.Get(member.PKIDir+"/sa.key") != before || !m.ConsoleHas("stick /dev/sdb1 is ignored: the Site has problems") {
			t.Errorf("%s: %s", inSite, strings.Join(m.Console, "\n"))
		}
	}
}
