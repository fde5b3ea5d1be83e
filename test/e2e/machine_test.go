package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/lab"
)

// TestCorrectedSite checks mistakes in a Site, and how they are corrected:
//
//   - With a token that the cluster does not know, first boot stops and prints the fix.
//   - A stick with another Site is accepted. This Site has a wrong CA hash, and edgebake inspect
//     shows the failure in the report on the disk.
//   - Stamped again, the machine joins. Then a Site has an address without a connection, and the
//     machine returns to the previous address.
func TestCorrectedSite(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	const name = "edge1"
	image := filepath.Join(w.lab.Dir, name+".raw")
	w.must(w.bin, "stamp", w.golden, w.site(0, lab.Site{NodeName: name, Token: "abcdef.0123456789abcdef"}), "--output", image)
	vm := w.start(lab.VMConfig{Name: name, Image: image, Sticks: qemu.SCSI})
	mark := w.expect(vm, 0, `edgebake: FAILED discovery: .*token`)
	mark = w.expect(vm, mark, `edgebake: +to fix: .*kubeadm token create`)

	pin := w.c.CAHash
	w.c.CAHash = "sha256:" + strings.Repeat("0", 64)
	stick := w.stick(w.site(0, lab.Site{NodeName: name}))
	w.c.CAHash = pin
	if err := vm.Plug(t.Context(), stick); err != nil {
		t.Fatal(err)
	}
	mark = w.expect(vm, mark, `edgebake: another Site was found`)
	mark = w.expect(vm, mark, `edgebake: using the Site of stick /dev/sd`)
	w.expect(vm, mark, `edgebake: FAILED discovery: .*caCertHashes`)
	w.off(vm)

	// A person takes the disk to a computer, and back to the machine.
	disk := w.disk(vm)
	report := w.must(w.bin, "inspect", disk)
	for _, want := range []string{"result:  failed", "discovery        failed", "fix: compare caCertHashes in site.yaml"} {
		if !strings.Contains(report, want) {
			t.Errorf("edgebake inspect does not show %q of the machine's report:\n%s", want, report)
		}
	}
	w.must(w.bin, "stamp", disk, w.site(0, lab.Site{NodeName: name}), "--in-place")
	vm = w.start(lab.VMConfig{Name: name, Image: disk})
	node := w.ready(vm, nil)
	w.off(vm)
	joined := w.disk(vm)
	w.noSecret(vm, joined)
	w.checkDisk(joined)

	w.must(w.bin, "stamp", joined, w.site(0, lab.Site{NodeName: name, Address: "192.0.2.77/24", Gateway: "192.0.2.1"}), "--in-place")
	vm = w.start(lab.VMConfig{Name: name, Image: joined})
	w.expect(vm, 0, `edgebake: the new network settings do not reach an API server: the previous settings are back`)
	again := w.ready(vm, node)
	if again.Metadata.UID != node.Metadata.UID || again.Status.Addresses[0].Address != w.net.GuestAddr(0).String() {
		t.Errorf("the Node has UID %s and addresses %v, want UID %s and %s first", again.Metadata.UID, again.Status.Addresses, node.Metadata.UID, w.net.GuestAddr(0))
	}
	w.off(vm)
	w.noSecret(vm, w.disk(vm))
}

// must runs a command that a person would type.
func (w *world) must(argv ...string) string {
	w.t.Helper()
	out, err := w.output(argv...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

func (w *world) output(argv ...string) (string, error) {
	cmd := exec.CommandContext(w.t.Context(), argv[0], argv[1:]...)
	cmd.Dir = w.root
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out), nil
}

// stick makes a USB stick as sold in shops, with one FAT32 partition in an MBR, and puts a Site on
// it as site.yaml.
func (w *world) stick(site string) string { return w.stickWith("site.yaml", site) }

// stickWith makes a stick with a document under this name.
func (w *world) stickWith(name, document string) string {
	w.t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.stickOf(64<<20, ondisk.LabelSlot, name, text)
}

// stickOf makes a stick of this size and label with one file.
func (w *world) stickOf(size int64, label, name string, text []byte) string {
	w.t.Helper()
	const start = 1 << 20
	size = size >> 20 << 20
	path := filepath.Join(w.lab.Dir, "stick.raw")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	mbr := make([]byte, 512)
	entry := mbr[446:]
	entry[4] = 0x0c // FAT32 with LBA
	binary.LittleEndian.PutUint32(entry[8:], start/512)
	binary.LittleEndian.PutUint32(entry[12:], uint32(size/512))
	mbr[510], mbr[511] = 0x55, 0xaa
	nodes := []tree.Node{{Path: name, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes(text)}}}
	_, err = f.WriteAt(mbr, 0)
	err = errors.Join(err, f.Truncate(start+size),
		fat.Write(offset{f, start}, nodes, nil, fat.Options{Type: 32, Label: label, Size: size}))
	if err != nil {
		w.t.Fatal(err)
	}
	return path
}

// offset is a WriterAt of a part of a file.
type offset struct {
	*os.File
	start int64
}

func (o offset) WriteAt(p []byte, at int64) (int, error) { return o.File.WriteAt(p, o.start+at) }

// partition returns the offset of a partition on a disk.
func (w *world) partition(disk, label string) int64 {
	w.t.Helper()
	info, err := media.Inspect(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range info.Partitions {
		if p.Label == label {
			return p.Start
		}
	}
	w.t.Fatalf("%s has no partition %s", disk, label)
	return 0
}

// TestSecureBoot boots an image for real hardware under firmware that enforces Secure Boot: the
// golden image as baked, which waits for a Site, and a USB stick.
func TestSecureBoot(t *testing.T) {
	nightly(t)
	newWorld(t, 1).secureBoot("amd64", "test/e2e/testdata/generic.yaml")
}

// secureBoot boots the image of a document for an architecture.
func (w *world) secureBoot(arch, document string) {
	w.t.Helper()
	if err := w.c.LetLogsBeRead(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	golden := filepath.Join(w.lab.Dir, "generic.raw")
	w.must(w.bin, "build", document, "--output", golden, "--lock", filepath.Join(w.lab.Dir, "generic.lock"))
	w.checkGolden(golden, arch)
	vm := w.start(lab.VMConfig{Arch: arch, Name: "box1", Image: golden, Secure: true, Sticks: qemu.USB})
	w.expect(vm, 0, `edgebake: .*waiting for a Site: stamp one onto this disk, or plug in a stick`)
	if err := vm.Plug(w.t.Context(), w.stick(w.site(0, lab.Site{NodeName: "box1"}))); err != nil {
		w.t.Fatal(err)
	}
	w.expect(vm, 0, `edgebake: using the Site of stick /dev/sd`)
	w.ready(vm, nil)
	seen := w.mustOnNode(vm, secureBootSeen)
	w.t.Logf("on %s:\n%s", vm.Node, seen)
	for _, want := range []string{`(?m)^SecureBoot: +6 +0 +0 +0 +1$`, `(?i)secure boot enabled`, `\[integrity\]|\[confidentiality\]`} {
		if !regexp.MustCompile(want).MatchString(seen) {
			w.t.Errorf("the output lacks %q", want)
		}
	}
	w.off(vm)
	w.noSecret(vm, w.disk(vm))

	// A kernel with a wrong signature does not start.
	spoilt := filepath.Join(w.lab.Dir, "spoilt.raw")
	w.must("cp", "--sparse=always", golden, spoilt)
	w.spoilKernel(spoilt)
	vm = w.start(lab.VMConfig{Arch: arch, Name: "box2", Image: spoilt, Secure: true})
	w.expect(vm, 0, `(?i)bad shim signature|security violation|security policy violation|access denied`)
	if out := vm.Serial.Tail(1000); strings.Contains(out, "edgebake: ") {
		w.t.Errorf("the machine booted a changed kernel:\n%s", out)
	}
	vm.Cut()
}

// secureBootSeen prints the state of Secure Boot as firmware and kernel see it. Four bytes of
// attributes precede a variable's value.
const secureBootSeen = `mountpoint -q /sys/firmware/efi/efivars || mount -t efivarfs efivarfs /sys/firmware/efi/efivars
echo "SecureBoot: $(od -An -tu1 /sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c)"
journalctl -k -b --no-pager -o cat | grep -iE 'secure ?boot|locked down'
cat /sys/kernel/security/lockdown`

// spoilKernel changes one bit of the kernel on the ESP.
func (w *world) spoilKernel(image string) {
	w.t.Helper()
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	start := w.partition(image, ondisk.LabelESP)
	esp, err := fat.Open(io.NewSectionReader(f, start, 1<<40))
	if err != nil {
		w.t.Fatal(err)
	}
	spoilt := false
	err = esp.Walk(func(e fat.Entry) error {
		if e.Name() != "linux" {
			return nil
		}
		ext, err := esp.Extents(e.Path)
		if err != nil {
			return err
		}
		at := start + ext[0].Off + ext[0].Len/2
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		b[0] ^= 1
		_, err = f.WriteAt(b, at)
		spoilt = true
		return err
	})
	if err != nil || !spoilt {
		w.t.Fatalf("changing the kernel of %s (found: %v): %v", image, spoilt, err)
	}
}

// TestComesUpByItself checks that damaged file systems are repaired at boot, and that the watchdog
// restarts a machine that hangs.
func TestComesUpByItself(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	if err := w.c.LetLogsBeRead(t.Context()); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(w.lab.Dir, "edge1.raw")
	w.must(w.bin, "stamp", w.golden, w.site(0, lab.Site{NodeName: "edge1"}), "--output", image)
	for _, label := range []string{ondisk.LabelRootA, ondisk.LabelData} {
		w.damage(image, label)
	}
	vm := w.start(lab.VMConfig{Name: "edge1", Image: image, Watchdog: true})
	node := w.ready(vm, nil)
	w.tellsEverywhere(vm)
	t.Logf("on %s:\n%s", vm.Node, w.mustOnNode(vm, `cat /run/initramfs/fsck.log
journalctl -b --no-pager -o cat -u 'systemd-fsck*'
journalctl -b --no-pager -o cat _PID=1 | grep -i watchdog
systemd-analyze blame --no-pager | head -n 20`))

	mark := vm.Serial.Mark()
	// As after an update: kubeadm up to 1.34 wrote this flag, which the new system's kubelet rejects.
	w.mustOnNode(vm, `sed -i 's|^KUBELET_KUBEADM_ARGS="|&--pod-infra-container-image=registry.k8s.io/pause:3.10 |' /var/lib/kubelet/kubeadm-flags.env && sync
grep pod-infra /var/lib/kubelet/kubeadm-flags.env`)
	// Without systemd, nothing keeps the watchdog from restarting the machine.
	w.mustOnNode(vm, "systemd-run --collect /bin/sh -c 'sleep 20; echo 1 >/sys/fs/cgroup/init.scope/cgroup.freeze'")
	mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
	w.readyAgain(vm, mark, node)
	w.off(vm)
	w.checkDisk(w.disk(vm))
}

// tellsEverywhere checks the places where first boot reports its result, except the serial console,
// which was checked before.
func (w *world) tellsEverywhere(vm *lab.VM) {
	w.t.Helper()
	for _, place := range []struct{ name, script, want string }{
		{"firstboot status", "firstboot status", `(?m)^result: +done$`},
		{"firstboot status -o json", "firstboot status -o json", `"result": "done"`},
		{"the journal", "journalctl --no-pager -o cat -u firstboot.service", `node edge1 is Ready`},
		{"systemd's status", "systemctl show -p Result firstboot.service", `Result=success`},
		{"the screen", "fold -w $(stty -F /dev/tty1 size | cut -d' ' -f2) /dev/vcs1", `edgebake: node edge1 is Ready`},
	} {
		out := w.mustOnNode(vm, place.script)
		if !regexp.MustCompile(place.want).MatchString(out) {
			w.t.Errorf("%s does not have %q:\n%s", place.name, place.want, out)
		}
	}
}

// readyAgain is like ready, for a later boot that began at this mark of the console.
func (w *world) readyAgain(vm *lab.VM, mark int, before *lab.Object) *lab.Object {
	w.t.Helper()
	w.expect(vm, mark, lab.FirstBootDone.String())
	return w.readyAfter(vm, before)
}

// readyAfter waits until the node is Ready in a later boot than that of before.
func (w *world) readyAfter(vm *lab.VM, before *lab.Object) *lab.Object {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), bootLimit)
	defer cancel()
	node, err := w.c.WaitNode(ctx, vm, vm.Node, func(o *lab.Object) (bool, string) {
		if o.Status.NodeInfo.BootID == before.Status.NodeInfo.BootID {
			return false, "the Node has the boot ID of the previous boot"
		}
		return lab.Ready(o)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("%6.1f s from power-on: Ready again", vm.Serial.Note("").At.Seconds())
	return node
}

// damage changes a file system as a fault of the disk or the kernel would: counts, bitmaps, a group
// descriptor's checksum, an inode's link count.
func (w *world) damage(disk, label string) {
	w.t.Helper()
	fs := fmt.Sprintf("%s?offset=%d", disk, w.partition(disk, label))
	cmd := exec.Command("debugfs", "-w", "-f", "-", fs)
	cmd.Stdin = strings.NewReader(`set_super_value free_blocks_count 7
set_super_value free_inodes_count 7
set_super_value state 2
freeb 5000 200
set_bg 1 free_blocks_count 3
set_bg 1 checksum 0xbad
set_inode_field / links_count 1
`)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("debugfs %s: %v\n%s", fs, err, out)
	}
	out, err := exec.Command("e2fsck", "-fn", fs).CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("Free blocks count wrong")) {
		w.t.Fatalf("%s was not damaged: %v\n%s", label, err, out)
	}
	w.t.Logf("%s is damaged:\n%s", label, out)
}
