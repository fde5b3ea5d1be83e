package firstboot

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// TestStampInTheMiddle checks that a Site that is stamped while first boot runs is applied as a
// whole in the next pass, or rejected if the machine has joined under another name by then. A
// rejected Site keeps its token.
func TestStampInTheMiddle(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		at   string // the effect before which it is stamped
	}{
		{"before the settings are in place", "hostname edge-sn0042"},
		{"before the network is used", "start ipvscare.service"},
		{"before kubeadm runs", "write " + member.JoinFile},
		{"before kubelet is turned", "restart kubelet.service"},
		{"before the token is forgotten", "write " + member.ReadyMark},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := nativeWorld(t, "labels: {zone: north}")
			other := strings.Replace(w.Site(worldtest.WithToken, "labels: {zone: south}", "kubeletExtraArgs: {v: '4'}"), "edge-{{.Serial}}", "other", 1)
			w.BeforeEffect = func(effect string) {
				if effect == tc.at && w.SlotSite(worldtest.SlotDevice) != other {
					w.Stamp(worldtest.SlotDevice, other)
				}
			}
			e := w.Env()
			err := w.Run(New(e))
			name, labels := "edge-sn0042", "north"
			if tc.at == "hostname edge-sn0042" { // the first Site made no node
				name, labels = "other", "south"
			}
			n := w.Cluster.Nodes[name]
			if len(w.Cluster.Nodes) != 1 || n == nil || n.Metadata.Labels["zone"] != labels {
				t.Fatalf("the machine joined as %v (%v)\n%s", w.Cluster.Nodes, err, strings.Join(w.Console, "\n"))
			}
			if name == "other" {
				if err != nil || strings.Contains(w.SlotSite(worldtest.SlotDevice), worldtest.TestToken) {
					t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
				}
				return
			}
			// The second Site renames the node, for which a person must reset it.
			if err == nil || !w.ConsoleHas("enrolled as edge-sn0042, but the Site names it other") {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if w.SlotSite(worldtest.SlotDevice) != other {
				t.Errorf("the Site stamped last was changed:\n%s", w.SlotSite(worldtest.SlotDevice))
			}
		})
	}
}

// TestSecretsOfTheActiveSite checks that only the secrets of the active Site are wiped from the
// slot.
func TestSecretsOfTheActiveSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	spec, other := w.Site(worldtest.WithToken), w.Site(worldtest.WithToken, "labels: {zone: south}")
	e := w.Env()
	w.Put(site.KeyFile, "key")
	image, err := site.ImageInfo(e)
	if err != nil {
		t.Fatal(err)
	}
	active, err := site.Read(e, image, nil)
	if err != nil {
		t.Fatal(err)
	}
	const ign = `{"ignition":{"version":"3.5.0"}}`
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  site.SlotCredentials
	}{
		{"the same", map[string]string{ondisk.SlotSite: spec}, site.SomeCredentials},
		{"the same in other words", map[string]string{ondisk.SlotSite: "# ours\n" + spec}, site.SomeCredentials},
		{"the same without its token", map[string]string{ondisk.SlotSite: w.Site()}, site.NoCredentials},
		{"another", map[string]string{ondisk.SlotSite: other}, site.NoCredentials},
		{"another Ignition config", map[string]string{ondisk.SlotSite: spec, ondisk.SlotIgnition: ign}, site.NoCredentials},
		{"half a Site", map[string]string{ondisk.SlotSite: spec + "labels: [zone\n"}, site.NoCredentials},
	} {
		w.StampAt(worldtest.SlotDevice, 0, tc.files)
		if got, err := site.CredentialsInSlot(e, active); err != nil || got != tc.want {
			t.Errorf("%s: %v, want %v (%v)", tc.name, got, tc.want, err)
		}
	}
}

// TestSlotReads checks that a pass over a finished node reads the slot at most four
// times.
func TestSlotReads(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	e := w.Env()
	reads, read := 0, e.ReadSlot
	e.ReadSlot = func(dev string) (*slot.Contents, error) {
		reads++
		return read(dev)
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatal(err)
	}
	// Four reads: two Checks of site-config, one of forget-token, and one by the pass itself.
	if reads > 4 {
		t.Errorf("the slot was read %d times", reads)
	}
}

func TestBrokenCorrectionKeepsTheFormerSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, "kind: Site\nmasters: nonsense\n")
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if w.SlotSite(worldtest.SlotDevice) != "kind: Site\nmasters: nonsense\n" {
		t.Error("a file that a person wrote was overwritten")
	}
	if !w.ConsoleHas("the Site in the slot is rejected, and the previous Site stays in use: the Site has problems") {
		t.Error("the console does not report that the Site was rejected")
	}
}

func TestSlotBlankedByAPowerCutIsMadeAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Slots[worldtest.SlotDevice].WriteAt(make([]byte, 512), 0); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.11:6443") {
		t.Error("the slot was not written again")
	}
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	for _, n := range w.EffectNames {
		if !strings.HasPrefix(n, "write "+ondisk.StateFile) && !strings.HasPrefix(n, "report") && n != "write "+ondisk.HealthyFile {
			t.Errorf("the next run did %s", n)
		}
	}
}
