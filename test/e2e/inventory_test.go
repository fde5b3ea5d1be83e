package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/lab"
)

// TestOneStickForManyMachines checks that one stick with an Inventory of three Sites serves
// machines with different serial numbers: each becomes Ready under its own name, and a machine that
// matches no Site prints its facts. No disk may have data of another machine's Site.
func TestOneStickForManyMachines(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	names := []string{"shop-1", "shop-2", "shop-3"}
	serial := func(name string) string { return "EB-" + strings.ToUpper(name) }
	doc := "apiVersion: edgebake.io/v1alpha1\nkind: Inventory\nsites:\n"
	for i, name := range names {
		text, err := os.ReadFile(w.site(i, lab.Site{NodeName: name}))
		if err != nil {
			t.Fatal(err)
		}
		doc += "- match: {serial: " + serial(name) + "}\n"
		for line := range strings.Lines(string(text)) {
			if !regexp.MustCompile(`^(apiVersion|kind):`).MatchString(line) {
				doc += "  " + line
			}
		}
	}
	file := filepath.Join(w.lab.Dir, "inventory.yaml")
	if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	w.must(w.bin, "validate", file)
	stick := w.stickWith(ondisk.SlotInventory, file)

	stranger := w.start(lab.VMConfig{Name: "stranger", Image: w.golden, Sticks: qemu.SCSI, SerialNumber: "EB-NOBODY"})
	w.expect(stranger, 0, `edgebake: .*waiting for a Site: .*This machine: MAC [0-9a-f:]{17}.*, serial EB-NOBODY, `)
	if err := stranger.Plug(t.Context(), stick); err != nil {
		t.Fatal(err)
	}
	w.expect(stranger, 0, `edgebake: .*the inventory has no Site for this machine`)
	w.off(stranger)

	for i, name := range names {
		vm := w.start(lab.VMConfig{Name: name, Image: w.golden, Sticks: qemu.SCSI, SerialNumber: serial(name)})
		w.expect(vm, 0, `edgebake: .*waiting for a Site`)
		if err := vm.Plug(t.Context(), stick); err != nil {
			t.Fatal(err)
		}
		w.ready(vm, nil)
		w.off(vm)
		disk := w.disk(vm)
		w.noSecret(vm, disk)
		f, err := os.Open(disk)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, ondisk.SlotSize)
		_, err = f.ReadAt(b, w.partition(disk, ondisk.LabelSlot))
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		if others := serial(names[(i+1)%len(names)]); strings.Contains(string(b), others) {
			t.Errorf("the slot of %s contains %s, the serial number of another machine", name, others)
		}
	}
}
