package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/lab"
)

// TestInstaller checks a stick with an Inventory. Despite a power cut, it must install the matching
// Site on the smaller of a machine's two disks, and the disk must become a node. If the stick stays
// in the machine, the disk must boot. A machine that is not in the Inventory must not be changed.
func TestInstaller(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	image := filepath.Join(w.lab.Dir, "golden.raw.zst")
	w.must(w.bin, "build", "configs/examples/quickstart.yaml", "--output", image, "--lock", filepath.Join(w.lab.Dir, "golden.lock"))
	stick := w.blank("stick.raw", 1<<30)
	w.must(w.bin, "flash", image, "--installer", stick, "--inventory", w.inventory("shop-1", "EB-SHOP-1"), "--disk", "smallest", "--then", "reboot", "--yes")

	large := w.blank("large.raw", 12<<30)
	vm := w.start(lab.VMConfig{Name: "shop-1", Image: w.blank("small.raw", 8<<30), Disk: 8 << 30, More: []string{large}, Sticks: qemu.SCSI, Stick: stick, SerialNumber: "EB-SHOP-1"})
	w.expect(vm, 0, `edgebake: installing quickstart for shop-1 on /dev/vda, 8\.6 GB, virtio in 10 seconds`)
	w.expect(vm, 0, `edgebake: write: [4-9]0 %`)
	vm.Cut()
	if found, err := media.ReadDiskContent(w.disk(vm)); err != nil || !found.Unfinished {
		t.Errorf("after the power cut: %+v %v", found, err)
	}

	w.on(vm)
	w.expect(vm, 0, `edgebake: INSTALLED quickstart for shop-1 on /dev/vda, .*read back and verified`)
	mark := w.expect(vm, 0, `edgebake: starting it now`)
	node := w.ready(vm, nil)
	w.off(vm)
	w.on(vm)
	w.expect(vm, 0, `edgebake: this machine is installed: /dev/vda, .*has the edgebake image quickstart`)
	w.expect(vm, 0, `edgebake: starting it now`)
	w.readyAfter(vm, node)
	w.off(vm)
	if out := vm.Serial.Tail(10000); strings.Contains(out, "INSTALLED") {
		t.Errorf("the stick installed again (the first start ended at %d):\n%s", mark, out)
	}
	disk := w.disk(vm)
	w.noSecret(vm, disk)
	w.checkDisk(disk)
	w.empty(large)

	w.must("truncate", "--size=0", large)
	w.must("truncate", "--size=12G", large)
	small := w.blank("stranger.raw", 8<<30)
	stranger := w.start(lab.VMConfig{Name: "stranger", Image: small, Disk: 8 << 30, More: []string{large}, Sticks: qemu.SCSI, Stick: stick, SerialNumber: "EB-NOBODY"})
	w.expect(stranger, 0, `edgebake: the inventory has no Site for this machine, so nothing is installed\. This machine: MAC [0-9a-f:]{17}, serial EB-NOBODY`)
	stranger.Cut()
	w.empty(large)
	w.empty(w.disk(stranger))
}

// TestInstallerSecureBoot checks firmware that enforces Secure Boot: a USB stick installs and
// powers the machine off, and without the stick the disk boots and becomes a node.
func TestInstallerSecureBoot(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	image := filepath.Join(w.lab.Dir, "generic.raw.zst")
	w.must(w.bin, "build", "test/e2e/testdata/generic.yaml", "--output", image, "--lock", filepath.Join(w.lab.Dir, "generic.lock"))
	stick := w.blank("stick.raw", 2<<30)
	out := w.must(w.bin, "flash", image, "--installer", stick, "--site", w.site(0, lab.Site{NodeName: "box1"}), "--yes")
	if strings.Contains(out, "WARNING") {
		t.Errorf("%s", out)
	}
	vm := w.start(lab.VMConfig{Name: "box1", Image: w.blank("box1.raw", 8<<30), Disk: 8 << 30, Secure: true, Sticks: qemu.USB, Stick: stick})
	w.expect(vm, 0, `edgebake: INSTALLED generic on /dev/vda, .*read back and verified`)
	w.expect(vm, 0, `edgebake: powering off: remove the installer`)
	w.waitOff(vm)
	w.startsWithout(vm)
}

// TestInstallerISO installs from an ISO in an optical drive.
func TestInstallerISO(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	image, iso := filepath.Join(w.lab.Dir, "golden.raw.zst"), filepath.Join(w.lab.Dir, "install.iso")
	w.must(w.bin, "build", "configs/examples/quickstart.yaml", "--output", image, "--lock", filepath.Join(w.lab.Dir, "golden.lock"))
	w.must(w.bin, "installer", image, "--iso", iso, "--site", w.site(0, lab.Site{NodeName: "disc"}), "--disk", "size<=10G")
	large := w.blank("large.raw", 12<<30)
	vm := w.start(lab.VMConfig{Name: "disc", Image: w.blank("disc.raw", 8<<30), Disk: 8 << 30, More: []string{large}, CD: iso})
	w.expect(vm, 0, `edgebake: INSTALLED quickstart on /dev/vda, .*read back and verified`)
	w.waitOff(vm)
	if err := media.Verify(t.Context(), w.disk(vm), nil); err != nil {
		t.Error(err)
	}
	w.empty(large)
}

// TestInstallerNetboot checks a machine that boots from the network: the firmware downloads the
// installer by HTTP, and the installer downloads the image. The machine must become a node.
func TestInstallerNetboot(t *testing.T) {
	nightly(t)
	newWorld(t, 1).installsFromNet(nil)
}

// TestInstallerNetbootHTTPS is like TestInstallerNetboot, but with HTTPS: firmware and installer
// accept only a server whose certificate is signed by the given CA.
func TestInstallerNetbootHTTPS(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	ca, err := lab.NewHTTPSAuthority()
	if err != nil {
		t.Fatal(err)
	}
	w.installsFromNet(ca)
	other, err := lab.NewHTTPSAuthority()
	if err != nil {
		t.Fatal(err)
	}
	vm := w.start(lab.VMConfig{Name: "net2", Image: w.blank("net2.raw", 8<<30), Disk: 8 << 30, NetBoot: true, HTTPSCAs: w.written("others.esl", other.List)})
	w.expect(vm, 0, `Start HTTP Boot`)
	w.expect(vm, 0, `(?i)No bootable option|failed to (load|start) Boot.*HTTP|Unable to establish`)
	if said := vm.Serial.Tail(1000); strings.Contains(said, "edgebake: ") {
		t.Errorf("the machine booted from a server that it does not trust:\n%s", said)
	}
	vm.Cut()
}

// installsFromNet installs a machine from the network, with HTTPS if by is not nil.
func (w *world) installsFromNet(by *lab.HTTPSAuthority) {
	w.t.Helper()
	image, www := filepath.Join(w.lab.Dir, "golden.raw.zst"), filepath.Join(w.lab.Dir, "www")
	w.must(w.bin, "build", "configs/examples/quickstart.yaml", "--output", image, "--lock", filepath.Join(w.lab.Dir, "golden.lock"))
	url, err := w.lab.ServeNetBoot(w.t.Context(), w.net, www, ondisk.InstallBootImage, by)
	if err != nil {
		w.t.Fatal(err)
	}
	argv := []string{w.bin, "installer", image, "--netboot", www, "--url", url, "--site", w.site(0, lab.Site{NodeName: "net1"})}
	config := lab.VMConfig{Name: "net1", Image: w.blank("net1.raw", 8<<30), Disk: 8 << 30, NetBoot: true}
	if by != nil {
		argv = append(argv, "--ca-cert", w.written("ca.crt", by.CA))
		config.HTTPSCAs = w.written("ca.esl", by.List)
	}
	w.must(argv...)
	vm := w.start(config)
	w.expect(vm, 0, `Start HTTP Boot`)
	w.expect(vm, 0, `edgebake: INSTALLED quickstart on /dev/vda, .*read back and verified`)
	w.waitOff(vm)
	w.startsWithout(vm)
}

// written writes a file into the test's directory.
func (w *world) written(name string, b []byte) (path string) {
	w.t.Helper()
	path = filepath.Join(w.lab.Dir, name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// waitOff waits until the installer has powered the machine off.
func (w *world) waitOff(vm *lab.VM) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), 10*time.Minute)
	defer cancel()
	if err := vm.WaitOff(ctx); err != nil {
		w.t.Fatal(err)
	}
}

// startsWithout switches on an installed machine without its installer: the disk must become a
// node, and the token must be nowhere on it.
func (w *world) startsWithout(vm *lab.VM) {
	w.t.Helper()
	vm.Unplug()
	w.on(vm)
	w.ready(vm, nil)
	w.off(vm)
	w.noSecret(vm, w.disk(vm))
}

// on switches on a machine that was off.
func (w *world) on(vm *lab.VM) {
	w.t.Helper()
	if err := vm.On(); err != nil {
		w.t.Fatal(err)
	}
}

// blank makes an empty file that is used as a disk.
func (w *world) blank(name string, size int64) string {
	w.t.Helper()
	path := filepath.Join(w.lab.Dir, name)
	f, err := os.Create(path)
	if err == nil {
		err = f.Truncate(size)
		f.Close()
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return path
}

// empty checks that nothing but zeros was written to a disk.
func (w *world) empty(path string) {
	w.t.Helper()
	if !disktest.Empty(w.t, path) {
		w.t.Errorf("%s was changed", path)
	}
}

// inventory writes an Inventory with one Site, which matches a serial number.
func (w *world) inventory(name, serial string) string {
	w.t.Helper()
	text, err := os.ReadFile(w.site(0, lab.Site{NodeName: name}))
	if err != nil {
		w.t.Fatal(err)
	}
	doc := "apiVersion: edgebake.io/v1alpha1\nkind: Inventory\nsites:\n- match: {serial: " + serial + "}\n"
	for line := range strings.Lines(string(text)) {
		if !regexp.MustCompile(`^(apiVersion|kind):`).MatchString(line) {
			doc += "  " + line
		}
	}
	file := filepath.Join(w.lab.Dir, "inventory.yaml")
	if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return file
}
