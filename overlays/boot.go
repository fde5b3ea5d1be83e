package overlays

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

func isKernel(p string) bool { return strings.HasPrefix(p, "boot/vmlinuz-") }
func isInitrd(p string) bool { return strings.HasPrefix(p, "boot/initrd.img-") }

// KernelVersion returns the release (as in uname -r) of the only kernel in a merged tree.
func KernelVersion(nodes []tree.Node) (string, error) {
	var found []string
	empty := false
	for _, n := range nodes {
		if isKernel(n.Path) && n.IsRegular() {
			empty = n.Data.Size == 0
			found = append(found, strings.TrimPrefix(n.Path, "boot/vmlinuz-"))
		}
	}
	switch len(found) {
	case 1:
		if empty {
			return "", fmt.Errorf("the base's kernel boot/vmlinuz-%s is empty: fetch or make the base again", found[0])
		}
		return found[0], nil
	case 0:
		return "", errors.New("the base has no kernel: boot/vmlinuz-* is missing; add a linux-image package to it")
	}
	return "", fmt.Errorf("the base has several kernels (%s): keep only the one to boot", strings.Join(found, ", "))
}

//go:embed files/initrd/edgebake
var initrdScript string

// InitrdScript returns a script for initramfs-tools (scripts/local-bottom), which runs after the
// root is mounted. Without it, a newly written root gets the machine ID only at its second boot.
func InitrdScript() string { return initrdScript }

// CommandLine returns the kernel command line for the root partition with this label. Only the
// command line contains partition GUIDs, so that the content of the root is the same on every disk.
func CommandLine(img *configs.Image, f Facts, root string) (string, error) {
	guids := map[string]string{}
	var errs []error
	for _, label := range []string{root, ondisk.LabelData, ondisk.LabelESP} {
		var err error
		guids[label], err = f.guid(label)
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return "", err
	}
	args := []string{
		// After a file system error, restart and check the file system.
		// rootdelay is not set: it would delay every boot.
		"root=PARTUUID=" + guids[root], "rootfstype=ext4", "rootflags=noatime,errors=panic", "rw", "rootwait",
		// DATA is on the same disk as root, so it appears soon: wait for it rather than fail.
		"systemd.mount-extra=PARTUUID=" + guids[ondisk.LabelData] + ":/var:ext4:rw,noatime,errors=panic,x-systemd.growfs,x-systemd.device-timeout=15min",
		// The ESP is mounted only while a boot is marked as good or an update is installed, because
		// a power cut can damage a mounted FAT file system.
		"systemd.mount-extra=PARTUUID=" + guids[ondisk.LabelESP] + ":/efi:vfat:umask=0077,noauto,nofail,x-systemd.automount,x-systemd.idle-timeout=2min",
		// Nobody is at the machine: repair without asking, and restart after a panic.
		"fsck.mode=auto", "fsck.repair=yes", "panic=10",
		// The arguments above name all partitions. On a machine with two edgebake disks, the GPT
		// generator might mount a partition of the wrong disk.
		"systemd.gpt_auto=0",
		// sshd must listen only where the Image configures it. The SSH generator would make it
		// listen on a hypervisor's socket, or print a message on every console if there is none.
		"systemd.ssh_auto=no",
		"quiet", "loglevel=4", "systemd.show_status=auto",
	}
	for _, c := range img.Kernel.Consoles {
		args = append(args, "console="+c)
	}
	return strings.Join(append(args, img.Kernel.Args...), " "), nil
}

// efiNames contains the file names of the boot loaders for one architecture.
type efiNames struct{ sdboot, shim, second, mok string }

func efiFor(arch string) (efiNames, error) {
	switch arch {
	case "amd64":
		return efiNames{"systemd-bootx64.efi", "shimx64.efi.signed", "grubx64.efi", "mmx64.efi"}, nil
	case "arm64":
		return efiNames{"systemd-bootaa64.efi", "shimaa64.efi.signed", "grubaa64.efi", "mmaa64.efi"}, nil
	}
	return efiNames{}, fmt.Errorf("no boot loader is known for arch %q: use amd64 or arm64", arch)
}

// ESP returns the content of the EFI system partition: boot loader or firmware, kernel and initrd
// from the merged tree, the command line, and image.json.
func ESP(img *configs.Image, f Facts, merged []tree.Node) ([]tree.Node, error) {
	kver, err := KernelVersion(merged)
	if err != nil {
		return nil, err
	}
	if err := CheckPlaces(merged); err != nil {
		return nil, err
	}
	cmdline, err := CommandLine(img, f, ondisk.LabelRootA)
	if err != nil {
		return nil, err
	}
	e := newESP(f.SourceDate, merged)
	dir := ondisk.ESPSystemDir(f.Info.Plan)
	e.take("", dir+"/linux", "boot/vmlinuz-"+kver)
	e.take("", dir+"/initrd", "boot/initrd.img-"+kver)
	if img.Hardware == configs.RaspberryPi {
		e.raspberryPi(dir, kver, cmdline, f.Info.Boards)
	} else {
		e.uefi(img, dir, kver, cmdline)
	}
	info, err := json.MarshalIndent(f.Info, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encoding %s: %w", ondisk.ESPImageInfo, err)
	}
	e.file(ondisk.ESPImageInfo, 0o644, append(info, '\n'))
	if err := errors.Join(e.errs...); err != nil {
		return nil, err
	}
	return withDirs(&e.layer), nil
}

// esp collects the content of the EFI system partition.
type esp struct {
	layer
	from map[string]tree.Node
	errs []error
}

func newESP(now time.Time, merged []tree.Node) *esp {
	e := &esp{layer: layer{now: now}, from: make(map[string]tree.Node, len(merged))}
	for _, n := range merged {
		e.from[n.Path] = n
	}
	return e
}

// take copies a file of the base to the ESP: the first existing path of the list "from", to the path
// "to". If none exists, the error suggests the given fix.
func (e *esp) take(fix, to string, from ...string) {
	for _, p := range from {
		if n, ok := e.from[p]; ok && n.IsRegular() {
			if n.Data.Size == 0 {
				e.errs = append(e.errs, fmt.Errorf("the base's %s, needed to boot, is empty: fetch or make the base again", p))
			}
			e.add(to, tree.Inode{Mode: tree.ModeRegular | 0o644, Data: n.Data})
			return
		}
	}
	err := fmt.Errorf("the base lacks %s, needed to boot", strings.Join(from, " or "))
	if fix != "" {
		err = fmt.Errorf("%w; %s", err, fix)
	}
	e.errs = append(e.errs, err)
}

// uefi adds the boot loader and its entry. If the base has Debian's shim, the firmware starts
// shim and shim starts the signed systemd-boot, so that Secure Boot works.
func (e *esp) uefi(img *configs.Image, dir, kver, cmdline string) {
	efi, err := efiFor(img.Arch)
	if err != nil {
		e.errs = append(e.errs, err)
		return
	}
	take := func(to string, from ...string) {
		e.take("install systemd-boot-efi and, with shim-signed, systemd-boot-efi-"+img.Arch+"-signed", to, from...)
	}
	sdboot := "usr/lib/systemd/boot/efi/" + efi.sdboot
	if _, ok := e.from["usr/lib/shim/"+efi.shim]; ok {
		take(ondisk.Loader(img.Arch), "usr/lib/shim/"+efi.shim)
		take("EFI/BOOT/"+efi.second, sdboot+".signed")
		take("EFI/BOOT/"+efi.mok, "usr/lib/shim/"+efi.mok+".signed", "usr/lib/shim/"+efi.mok)
	} else {
		take(ondisk.Loader(img.Arch), sdboot+".signed", sdboot)
	}
	// Without a default entry, systemd-boot follows the order of the entries, in which an entry
	// with no tries left comes last.
	e.file("loader/loader.conf", 0o644, []byte("timeout 0\neditor no\nauto-entries no\nauto-firmware no\n"))
	e.file(ondisk.ESPEntryA, 0o644, fmt.Appendf(nil,
		"title %s (Linux %s)\nsort-key %s\nversion %d\nlinux /%s/linux\ninitrd /%s/initrd\noptions %s\n",
		img.Name, kver, ondisk.ESPSortKey, ondisk.ESPFirstVersion, dir, dir, cmdline))
}

// withDirs adds the parent directories of the nodes, parents first.
func withDirs(b *layer) []tree.Node {
	dirs, have := map[string]bool{".": true}, map[string]bool{}
	for _, n := range b.nodes {
		have[n.Path] = true
		for d := path.Dir(n.Path); !dirs[d]; d = path.Dir(d) {
			dirs[d] = true
		}
	}
	for _, d := range slices.Sorted(maps.Keys(dirs)) {
		if !have[d] {
			b.dir(d, 0o755)
		}
	}
	slices.SortFunc(b.nodes, func(x, y tree.Node) int { return comparePaths(x.Path, y.Path) })
	return b.nodes
}

// comparePaths orders parents before children; the root comes first.
func comparePaths(x, y string) int {
	switch {
	case x == y:
		return 0
	case x == ".":
		return -1
	case y == ".":
		return 1
	}
	return slices.Compare(strings.Split(x, "/"), strings.Split(y, "/"))
}
