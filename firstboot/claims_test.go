package firstboot

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// bySerial is a Site for all machines with the serial number SN0042.
const bySerial = "- {name: berlin, match: {serial: SN0042}, credentials: {token: " + worldtest.TestToken + "}}"

// claimable plugs in a stick with an Inventory. The stick is made by `site sign` or, if size
// is 0, by a person, without space for claims.
func (w *world) claimable(size int, sites ...string) {
	w.T.Helper()
	w.Plug("")
	img := worldtest.NewMemDevice(make([]byte, 16<<20))
	file := func(name string, b []byte) tree.Node {
		return tree.Node{Path: name, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes(b)}}
	}
	nodes := []tree.Node{file(ondisk.SlotInventory, []byte(w.inventory(sites...)))}
	if size > 0 {
		nodes = append([]tree.Node{file(ondisk.SlotClaims, make([]byte, size))}, nodes...)
	}
	if err := fat.Write(img, nodes, nil, fat.Options{Type: 16, Label: ondisk.LabelSlot, Size: 16 << 20, SectorSize: 512}); err != nil {
		w.T.Fatal(err)
	}
	w.Slots[worldtest.StickDevice] = img
}

// another returns a second machine with the same serial number. It has the
// first machine's stick, with the claims.
func (w *world) another(t *testing.T, uuid, mac string) *world {
	t.Helper()
	o := first(t, 4096, bySerial)
	o.Put("/sys/class/dmi/id/product_uuid", uuid+"\n")
	o.Put("/sys/class/net/eth0/address", mac+"\n")
	claims, err := slot.ReadClaims(w.Slots[worldtest.StickDevice])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range claims {
		if err := slot.WriteClaim(o.Slots[worldtest.StickDevice], c); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

const (
	ownUUID   = "4c4c4544-0042-3510-8052-c7c04f4e4232"
	otherUUID = "4c4c4544-0077-3510-8052-c7c04f4e4232"
	ownMAC    = "52:54:00:12:34:56"
	otherMAC  = "52:54:00:77:77:77"
)

func first(t *testing.T, size int, sites ...string) *world {
	t.Helper()
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.claimable(size, sites...)
	return w
}

// TestTwoMachinesClaimOneSite checks that the second machine that matches a Site stops, names the
// first one, and applies nothing.
func TestTwoMachinesClaimOneSite(t *testing.T) {
	t.Parallel()
	w := first(t, 4096, bySerial)
	before := w.Slots[worldtest.StickDevice].Clone()
	w.MustBoot()
	claims, err := slot.ReadClaims(w.Slots[worldtest.StickDevice])
	if err != nil || len(claims) != 1 || claims[0].Site != "berlin" || claims[0].Serial != "SN0042" || claims[0].UUID != ownUUID || !slices.Contains(claims[0].MACs, ownMAC) {
		t.Fatalf("%+v %v", claims, err)
	}
	// Only the claim on the stick has changed.
	a, b := before.Written(), w.Slots[worldtest.StickDevice].Written()
	if i := bytes.Index(b, []byte("edgebake claim 1 ")); i < 0 || !bytes.Equal(a[:min(i, len(a))], b[:min(i, len(a))]) {
		t.Error("the stick has other changes")
	}
	for name, other := range map[string]*world{
		"another UUID":              w.another(t, otherUUID, otherMAC),
		"a card that went along":    w.another(t, otherUUID, ownMAC),
		"one UUID for all boards":   w.another(t, ownUUID, otherMAC),
		"no UUID, and another card": w.another(t, "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", otherMAC),
	} {
		if err := other.Boot(); err == nil {
			t.Errorf("%s: first boot succeeded, want an error", name)
		}
		if !other.ConsoleHas("another machine already uses its Site berlin (MAC "+ownMAC+", serial SN0042, UUID "+ownUUID) || !other.ConsoleHas("delete claims.txt from the stick") {
			t.Errorf("%s:\n%s", name, strings.Join(other.Console, "\n"))
		}
		if bytes.Contains(other.Slots[worldtest.SlotDevice].Written(), []byte(worldtest.TestToken)) || other.Joins != 0 {
			t.Errorf("%s: the second machine used the Site", name)
		}
		// Without the claim, this machine may use the Site.
		other.claimable(4096, bySerial)
		other.PowerOn()
		other.MustBoot()
		if s := other.State(); s.Node != "berlin" {
			t.Errorf("%s: node %s", name, s.Node)
		}
	}
}

// TestACardGoesFromBoardToBoard checks boards without a UUID, which are claimed by a network card
// that may be removable. A board with another serial number does not get the claimed Site.
func TestACardGoesFromBoardToBoard(t *testing.T) {
	t.Parallel()
	site := "- {name: berlin, match: {macs: [\"" + ownMAC + "\"]}, credentials: {token: " + worldtest.TestToken + "}}"
	board := func(serial string) *world {
		w := first(t, 4096, site)
		w.Put("/sys/class/dmi/id/product_uuid", "")
		w.Put("/sys/class/dmi/id/product_serial", serial+"\n")
		return w
	}
	w := board("10000000AAAA1111")
	w.MustBoot()
	claims, err := slot.ReadClaims(w.Slots[worldtest.StickDevice])
	if err != nil || len(claims) != 1 {
		t.Fatalf("%+v %v", claims, err)
	}
	for serial, same := range map[string]bool{"10000000BBBB2222": false, "10000000aaaa1111": true, "": true} {
		other := board(serial)
		if err := slot.WriteClaim(other.Slots[worldtest.StickDevice], claims[0]); err != nil {
			t.Fatal(err)
		}
		if err := other.Boot(); (err == nil) != same || other.ConsoleHas("another machine already uses its Site berlin") == same {
			t.Errorf("serial %q: %v\n%s", serial, err, strings.Join(other.Console, "\n"))
		}
	}
}

// TestTheSameMachineComesAgain checks that the machine gets its Site again after it was flashed
// again, whatever its clock shows.
func TestTheSameMachineComesAgain(t *testing.T) {
	t.Parallel()
	w := first(t, 4096, bySerial)
	w.MustBoot()
	for _, mac := range []string{ownMAC, otherMAC} {
		again := w.another(t, ownUUID, mac)
		if mac == otherMAC {
			// An additional network card does not make it another machine.
			again.Put("/sys/class/net/eth1/address", ownMAC+"\n")
			again.Put("/sys/class/net/eth1/device/vendor", "")
		}
		again.SetClock(again.Now.AddDate(-3, 0, 0))
		again.MustBoot()
		if s := again.State(); s.Node != "berlin" {
			t.Errorf("node %s", s.Node)
		}
		if claims, err := slot.ReadClaims(again.Slots[worldtest.StickDevice]); err != nil || len(claims) != 1 {
			t.Errorf("%+v %v", claims, err)
		}
	}
}

// TestReplacedMachine checks that a claim is ignored if the Inventory does not match its machine
// any more.
func TestReplacedMachine(t *testing.T) {
	t.Parallel()
	w := first(t, 4096, "- {name: berlin, match: {uuid: "+ownUUID+"}, credentials: {token: "+worldtest.TestToken+"}}")
	w.MustBoot()
	claims, err := slot.ReadClaims(w.Slots[worldtest.StickDevice])
	if err != nil || len(claims) != 1 {
		t.Fatalf("%v %v", claims, err)
	}
	o := first(t, 4096, "- {name: berlin, match: {uuid: "+otherUUID+"}, credentials: {token: "+worldtest.TestToken+"}}")
	if err := slot.WriteClaim(o.Slots[worldtest.StickDevice], claims[0]); err != nil {
		t.Fatal(err)
	}
	o.Put("/sys/class/dmi/id/product_uuid", otherUUID+"\n")
	o.Put("/sys/class/net/eth0/address", otherMAC+"\n")
	o.MustBoot()
	claims, err = slot.ReadClaims(o.Slots[worldtest.StickDevice])
	if err != nil || len(claims) != 1 || claims[0].UUID != otherUUID {
		t.Errorf("%+v %v", claims, err)
	}
}

// TestStickWithoutNotes checks that a stick without space for claims, or a read-only stick, is used
// anyway. Only write errors are reported.
func TestStickWithoutNotes(t *testing.T) {
	t.Parallel()
	w := first(t, 0, bySerial)
	w.MustBoot()
	if s := w.State(); s.Node != "berlin" || w.ConsoleHas("recording on stick") {
		t.Errorf("node %s\n%s", s.Node, strings.Join(w.Console, "\n"))
	}
	w = first(t, 4096, bySerial)
	w.ReadOnly = map[string]bool{worldtest.StickDevice: true}
	w.MustBoot()
	if s := w.State(); s.Node != "berlin" || !w.ConsoleHas("recording on stick /dev/sdb1 that this machine uses the Site berlin") {
		t.Errorf("node %s\n%s", s.Node, strings.Join(w.Console, "\n"))
	}
}

// TestPowerCutInAClaim checks that after any power cut the machine has its Site in the end, and the
// stick has one claim.
func TestPowerCutInAClaim(t *testing.T) {
	t.Parallel()
	w := first(t, 4096, bySerial)
	whole := w.Clone(t)
	whole.MustBoot()
	from := slices.Index(whole.EffectNames, "claim "+worldtest.StickDevice)
	if from < 0 || slices.Index(whole.EffectNames, "blank "+worldtest.SlotDevice) < from {
		t.Fatalf("the claim is not before the slot is written: %v", whole.EffectNames)
	}
	for n := from; n <= from+3; n++ {
		cut := w.Clone(t)
		cut.PowerCutAt = n + 1
		if err := cut.Boot(); err == nil {
			t.Fatalf("cut at %s: the machine continued after the power cut", whole.EffectNames[n])
		}
		cut.PowerOn()
		cut.MustBoot()
		claims, err := slot.ReadClaims(cut.Slots[worldtest.StickDevice])
		if s := cut.State(); s.Node != "berlin" || err != nil || len(claims) != 1 {
			t.Errorf("cut at %s: node %s, %+v, %v", whole.EffectNames[n], s.Node, claims, err)
		}
	}
}

// TestClaimsAreNoFileOfTheSite checks that claims are not part of the signed contents.
func TestClaimsAreNoFileOfTheSite(t *testing.T) {
	t.Parallel()
	w := first(t, 4096, bySerial)
	c, err := slot.Read(w.Slots[worldtest.StickDevice])
	if err != nil {
		t.Fatal(err)
	}
	if names := slices.Collect(maps.Keys(c.Files)); len(names) != 1 {
		t.Errorf("%v", names)
	}
}
