package firstboot

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

const othersToken = "fedcba.fedcba9876543210"

// inventory returns an Inventory of two other machines and the given Sites.
func (w *world) inventory(sites ...string) string {
	return strings.Join(append([]string{
		"apiVersion: edgebake.io/v1alpha1", "kind: Inventory", "defaults:",
		"  masters: [192.0.2.11:6443, 192.0.2.12:6443, 192.0.2.13:6443]",
		"  caCertHashes: ['" + w.Cluster.Pin + "']",
		"sites:",
		"- {name: paris, match: {serial: SN0099}, credentials: {token: " + othersToken + "}}",
		"- {name: rome, match: {uuid: 4c4c4544-0099-3510-8052-c7c04f4e4232}, credentials: {token: " + othersToken + "}}",
	}, sites...), "\n") + "\n"
}

const berlin = "- {name: berlin, match: {serial: sn0042, macs: [52-54-00-12-34-56]}, credentials: {token: " + worldtest.TestToken + "}}"

// carry writes an inventory to a slot.
func (w *world) carry(dev string, sites ...string) {
	w.T.Helper()
	w.StampAt(dev, worldtest.Day(1), map[string]string{ondisk.SlotInventory: w.inventory(sites...)})
}

// onlyItsOwn checks that the disk has no secrets of other machines.
func (w *world) onlyItsOwn() {
	w.T.Helper()
	for _, others := range []string{othersToken, "paris", "SN0099"} {
		if bytes.Contains(w.Slots[worldtest.SlotDevice].Written(), []byte(others)) {
			w.T.Errorf("the slot still has %q", others)
		}
		filepath.WalkDir(w.Root, func(p string, d os.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte(others)) {
					w.T.Errorf("%s has %q", p, others)
				}
			}
			return nil
		})
	}
	if strings.Contains(w.Log.String(), othersToken) {
		w.T.Error("the log has another machine's token")
	}
}

// TestInventoryInTheSlot checks that the machine reduces the inventory in its slot to its own Site
// before it applies that Site.
func TestInventoryInTheSlot(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.carry(worldtest.SlotDevice, berlin)
	e := w.Env()
	w.BeforeEffect = func(effect string) {
		if strings.HasPrefix(effect, "hostname") && bytes.Contains(w.Slots[worldtest.SlotDevice].Written(), []byte(othersToken)) {
			t.Error("the Site was applied before the others were wiped")
		}
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if s := w.State(); s.Result != ondisk.ResultDone || s.Node != "berlin" {
		t.Errorf("result %s, node %s", s.Result, s.Node)
	}
	w.onlyItsOwn()
	w.PowerOn()
	w.MustBoot()
	if w.Joins != 1 || w.ConsoleHas("inventory") {
		t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
}

// TestPowerCutInAnInventory checks that after a power cut at any point, the machine becomes a node
// under its own name, and has no secret of the others.
func TestPowerCutInAnInventory(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.carry(worldtest.SlotDevice, berlin)
	whole := w.Clone(t)
	whole.MustBoot()
	from := slices.Index(whole.EffectNames, "write slot "+worldtest.SlotDevice)
	to := slices.Index(whole.EffectNames, "hostname berlin")
	if from < 0 || to < from {
		t.Fatalf("the expected effects are missing: %q", whole.EffectNames)
	}
	for n := from; n <= to+1; n++ {
		cut := w.Clone(t)
		cut.PowerCutAt = n + 1
		if err := cut.Boot(); err == nil {
			t.Fatalf("cut at %s: the machine continued after the power cut", whole.EffectNames[n])
		}
		if _, err := slot.Read(cut.Slots[worldtest.SlotDevice]); err != nil {
			t.Errorf("cut at effect %d, %s: %v", n, whole.EffectNames[n], err)
		}
		cut.PowerOn()
		cut.MustBoot()
		if s := cut.State(); s.Node != "berlin" || cut.Joins != 1 {
			t.Errorf("cut at %s: node %s", whole.EffectNames[n], s.Node)
		}
		cut.onlyItsOwn()
	}
}

// TestNoSiteForThisMachine checks that a machine that no Site matches reports its identity, waits,
// and reads the inventory again.
func TestNoSiteForThisMachine(t *testing.T) {
	w := nativeWorld(t)
	w.Put("/sys/class/dmi/id/chassis_asset_tag", "AT-7\n")
	w.carry(worldtest.SlotDevice)
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded, want an error")
	}
	if !w.ConsoleHas("waiting for a Site; there is no Site in the slot (" + worldtest.SlotDevice + ": the inventory has no Site for this machine): stamp one onto this disk, or plug in a stick named EDGEBAKE that holds site.yaml or inventory.yaml. This machine: MAC 52:54:00:12:34:56, serial SN0042, UUID 4c4c4544-0042-3510-8052-c7c04f4e4232, asset tag AT-7") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	w.BeforeEffect = func(effect string) {
		if w.BeforeEffect = nil; effect != "" {
			w.carry(worldtest.SlotDevice, "- {name: berlin, match: {assetTag: AT-7}, credentials: {token: "+worldtest.TestToken+"}}")
		}
	}
	w.PowerOn()
	w.MustBoot()
	if s := w.State(); s.Node != "berlin" {
		t.Errorf("node %s", s.Node)
	}
	w.onlyItsOwn()
}

// TestJunkMatchesNobody checks that a machine without a unique identity matches no Site.
func TestJunkMatchesNobody(t *testing.T) {
	w := nativeWorld(t)
	w.Put("/sys/class/dmi/id/product_serial", "To Be Filled By O.E.M.\n")
	w.Put("/sys/class/dmi/id/product_uuid", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF\n")
	w.carry(worldtest.SlotDevice, "- {name: berlin, match: {serial: SN0042}, credentials: {token: "+worldtest.TestToken+"}}")
	if err := w.Boot(); err == nil || !w.ConsoleHas("serial none, UUID none, asset tag none") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestTwoSitesForOneMachine checks that if two Sites match the machine, it stops until the
// inventory is corrected.
func TestTwoSitesForOneMachine(t *testing.T) {
	w := nativeWorld(t)
	w.carry(worldtest.SlotDevice, berlin, "- {name: bonn, match: {uuid: 4c4c4544-0042-3510-8052-c7c04f4e4232}, credentials: {token: "+worldtest.TestToken+"}}")
	if err := w.Boot(); err == nil || !w.ConsoleHas("the Sites berlin, bonn all match this machine (MAC") {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.PowerOn()
	w.MustBoot()
}

// TestOneStickForManyMachines checks that each machine applies its own Site from one stick, which
// keeps all of them.
func TestOneStickForManyMachines(t *testing.T) {
	sites := []string{berlin, "- {name: bonn, match: {serial: SN0043}, credentials: {token: " + worldtest.TestToken + "}}"}
	for serial, name := range map[string]string{"SN0042": "berlin", "SN0043": "bonn"} {
		w := nativeWorld(t)
		w.Stamp(worldtest.SlotDevice, "")
		w.Put("/sys/class/dmi/id/product_serial", serial+"\n")
		w.Plug("")
		w.carry(worldtest.StickDevice, sites...)
		before := w.Slots[worldtest.StickDevice].Clone()
		w.MustBoot()
		if s := w.State(); s.Node != name {
			t.Errorf("%s is %s", serial, s.Node)
		}
		w.onlyItsOwn()
		if !bytes.Equal(before.Written(), w.Slots[worldtest.StickDevice].Written()) {
			t.Error("the stick was changed")
		}
		// The next machine's Site on the stick is corrected. This machine's Site stays.
		w.carry(worldtest.StickDevice, slices.Concat(sites, []string{"- {name: cologne, match: {serial: SN0044}}"})...)
		w.PowerOn()
		w.MustBoot()
		if w.ConsoleHas("using the Site of stick") || w.Joins != 1 {
			t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
		}
	}
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.Plug("")
	w.carry(worldtest.StickDevice)
	if err := w.Boot(); err == nil || !w.ConsoleHas("waiting for a Site; stick /dev/sdb1 is ignored: the inventory has no Site for this machine. This machine: MAC") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestInventoryOnANode checks that a member applies a corrected Site from an inventory, and keeps
// its own if the inventory has none for it. From a stick, it applies only the fields that the Image
// permits.
func TestInventoryOnANode(t *testing.T) {
	w := nativeWorld(t)
	w.MustBoot()
	w.carry(worldtest.SlotDevice)
	w.PowerOn()
	w.MustBoot()
	if s := w.State(); s.Node != "edge-sn0042" || w.Joins != 1 {
		t.Errorf("node %s, %d joins", s.Node, w.Joins)
	}
	w.carry(worldtest.SlotDevice, "- {name: berlin, match: {serial: SN0042}, nodeName: edge-sn0042, network: {dns: [192.0.2.123]}}")
	w.PowerOn()
	w.MustBoot()
	if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") || w.Joins != 1 {
		t.Errorf("the slot has\n%s", w.SlotSite(worldtest.SlotDevice))
	}
	w.onlyItsOwn()
	w.setStickPolicy(ondisk.SitesRepair)
	w.Plug("")
	w.carry(worldtest.StickDevice, "- {name: berlin, match: {serial: SN0042}, nodeName: other, network: {dns: [192.0.2.124]}}")
	w.PowerOn()
	w.MustBoot()
	if got := w.SlotSite(worldtest.SlotDevice); !strings.Contains(got, "192.0.2.124") || strings.Contains(got, "other") {
		t.Errorf("the slot has\n%s", got)
	}
}

// TestSignedInventory checks that an Image that requires signatures accepts a signed Inventory, but
// not one that was changed after it was signed.
func TestSignedInventory(t *testing.T) {
	key := newSiteKey(t)
	for _, tamper := range []bool{false, true} {
		w := nativeWorld(t)
		w.Stamp(worldtest.SlotDevice, "")
		w.setStickPolicy(ondisk.SitesSigned, key)
		w.signed(key, worldtest.Day(2), func(c *slot.Contents) {
			if tamper {
				c.Files[ondisk.SlotInventory] = append(c.Files[ondisk.SlotInventory], "# changed\n"...)
			}
		}, map[string]string{ondisk.SlotInventory: w.inventory(berlin)})
		err := w.Boot()
		if (err == nil) == tamper {
			t.Fatalf("tampered with %v: %v\n%s", tamper, err, strings.Join(w.Console, "\n"))
		}
		if s := w.State(); !tamper && s.Node != "berlin" {
			t.Errorf("node %s", s.Node)
		}
	}
}

// TestOthersAreWipedInAnyCase checks that the other Sites are wiped even if the machine's own
// cannot be applied.
func TestOthersAreWipedInAnyCase(t *testing.T) {
	w := nativeWorld(t)
	w.carry(worldtest.SlotDevice, "- {name: berlin, match: {serial: SN0042}, arch: arm64, credentials: {token: "+worldtest.TestToken+"}}")
	if err := w.Boot(); err == nil || !w.ConsoleHas("FAILED site-config: the Site does not fit this image") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w.onlyItsOwn()
}

// TestOthersAreWipedFromAMember checks that a node rejects its own Site of the inventory, keeps the
// former one, and wipes the others.
func TestOthersAreWipedFromAMember(t *testing.T) {
	const bad = "- {name: berlin, match: {serial: SN0042}, nodeName: edge-sn0042, arch: arm64}"
	w := nativeWorld(t)
	w.MustBoot()
	w.carry(worldtest.SlotDevice, bad)
	w.PowerOn()
	w.MustBoot()
	if !w.ConsoleHas("the Site in the slot is rejected, and the previous Site stays in use") || w.Joins != 1 {
		t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
	if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "arm64") {
		t.Errorf("the slot has\n%s", w.SlotSite(worldtest.SlotDevice))
	}
	w.onlyItsOwn()

	// A slot that cannot be written does not stop a node.
	w.carry(worldtest.SlotDevice, bad)
	w.PowerOn()
	e := w.Env()
	e.WriteSlot = func(string, *slot.Contents) error { return errors.New("input/output error") }
	if err := w.Run(New(e)); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if s := w.State(); s.Result != ondisk.ResultDone || !strings.Contains(w.Log.String(), "input/output error") {
		t.Errorf("result %s", s.Result)
	}
}

// TestSiteTooLargeForASlot checks that a Site that is too large for a slot needs a person, because
// no retry makes room.
func TestSiteTooLargeForASlot(t *testing.T) {
	w := nativeWorld(t)
	large := strings.Repeat("x", 300<<10)
	w.carry(worldtest.SlotDevice, strings.Replace(berlin, "credentials:", `ignition: '{"ignition": {"version": "3.4.0"}, "storage": {"files": [{"path": "/etc/large", "contents": {"source": "data:,`+large+`"}}]}}', credentials:`, 1))
	err := w.Boot()
	if err == nil || !w.ConsoleHas("FAILED site-config: the Site berlin of the inventory has") {
		t.Errorf("%v\n%.2000s", err, strings.Join(w.Console, "\n"))
	}
}

// TestWaitingSaysWhatWentWrong checks that a Site that was found but could not be saved is not
// reported as missing.
func TestWaitingSaysWhatWentWrong(t *testing.T) {
	w := nativeWorld(t)
	w.carry(worldtest.SlotDevice)
	e := w.Env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		w.carry(worldtest.SlotDevice, berlin)
		return sleep(ctx, d)
	}
	e.WriteSlot = func(string, *slot.Contents) error { return errors.New("input/output error") }
	image, err := site.ImageInfo(e)
	if err != nil {
		t.Fatal(err)
	}
	err = site.Phase(&site.Reader{Image: image}, nil).Run(t.Context(), e)
	if err == nil || errors.Is(err, site.ErrNoSite) || !strings.Contains(err.Error(), "input/output error") || run.Advice(err) == "" {
		t.Error(err)
	}
}

// TestJunkSerialOfAMember checks that a serial number that no longer counts as an identity does not
// change a member's name.
func TestJunkSerialOfAMember(t *testing.T) {
	w := nativeWorld(t)
	w.MustBoot()
	w.Put("/sys/class/dmi/id/product_serial", "To Be Filled By O.E.M.\n")
	w.Stamp(worldtest.SlotDevice, w.Site("network: {dns: [192.0.2.123]}"))
	w.PowerOn()
	w.MustBoot()
	if s := w.State(); s.Node != "edge-sn0042" || w.Joins != 1 || w.ConsoleHas("is ignored") {
		t.Errorf("node %s, %d joins\n%s", s.Node, w.Joins, strings.Join(w.Console, "\n"))
	}
}
