// Package overlays turns an Image into what edgebake adds to the base: units,
// kernel settings, containerd's and kubelet's configuration, the mounts that
// hold the disk layout together, and the content of the EFI system partition.
// Static files live under files/ exactly as they appear on the node; what
// depends on the Image is rendered by pure functions. Nothing here reads the
// host or the clock, so the same Image gives the same nodes.
package overlays

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/tree"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

//go:embed all:files
var embedded embed.FS

// LayerName is how messages and reports call the layer Root makes.
const LayerName = "edgebake"

// Facts is what rendering needs beside the Image.
type Facts struct {
	SourceDate time.Time
	// Info describes the image; Info.Partitions must have at least labels
	// and GUIDs.
	Info ondisk.ImageInfo
	// Containerd is the version on board, "2.2.9"; it selects the form of
	// its configuration.
	Containerd string
	// CNI is the network configuration that the user brings; nil: none.
	CNI []byte
}

func (f Facts) guid(label string) (string, error) {
	for _, p := range f.Info.Partitions {
		if p.Label == label {
			return p.GUID, nil
		}
	}
	return "", fmt.Errorf("rendering the root file system: the layout has no partition %s", label)
}

// Packages are the Debian packages an image of this kind needs; the Image's
// own come on top.
func Packages(img *configs.Image) []string {
	pk := []string{
		"ca-certificates", "conntrack", "containernetworking-plugins", "dbus", "e2fsprogs", "ethtool",
		"initramfs-tools", "iproute2", "iptables", "kmod", "nftables", "procps", "runc", "socat",
		"systemd-boot-efi", "systemd-repart", "systemd-resolved", "systemd-sysv", "systemd-timesyncd",
		"udev", "zstd",
	}
	if img.Containerd.Debian {
		pk = append(pk, "containerd")
	}
	if img.Arch == "amd64" {
		pk = append(pk, "systemd-boot-efi-amd64-signed")
	} else {
		pk = append(pk, "systemd-boot-efi-arm64-signed")
	}
	if img.Hardware == "generic" {
		pk = append(pk, "linux-image-"+img.Arch, "shim-signed", "wpasupplicant", "iw", "wireless-regdb",
			"firmware-atheros", "firmware-bnx2", "firmware-bnx2x", "firmware-brcm80211", "firmware-iwlwifi",
			"firmware-mediatek", "firmware-misc-nonfree", "firmware-realtek")
		if img.Arch == "amd64" {
			pk = append(pk, "intel-microcode", "amd64-microcode")
		}
	} else {
		pk = append(pk, "linux-image-cloud-"+img.Arch)
	}
	slices.Sort(pk)
	return pk
}

// Components are the archive components those packages come from.
func Components(img *configs.Image) []string {
	if img.Hardware == "generic" {
		return []string{"main", "non-free-firmware"}
	}
	return []string{"main"}
}

// enabled lists the units that start by themselves, with the target that
// wants them.
var enabled = []struct{ unit, target string }{
	{"firstboot.service", "multi-user.target"},
	{"ipvscare.service", "multi-user.target"},
	{"containerd.service", "multi-user.target"},
	{"kubelet.service", "multi-user.target"},
	{"edgebake-certificates.service", "multi-user.target"},
	{"edgebake-sshkeys.service", "multi-user.target"},
	{"etc-kubernetes.mount", "local-fs.target"},
	{"systemd-networkd.service", "multi-user.target"},
	{"systemd-networkd.socket", "sockets.target"},
	{"systemd-networkd-wait-online.service", "network-online.target"},
	{"systemd-resolved.service", "sysinit.target"},
	{"systemd-timesyncd.service", "sysinit.target"},
	{"fstrim.timer", "timers.target"},
}

// masked units have no place on a machine whose system never changes under
// it, or wait for a person.
var masked = []string{
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
	"e2scrub_all.timer", "e2scrub_reap.service", "grub-common.service",
	"systemd-firstboot.service", "systemd-networkd-persistent-storage.service",
}

// removed is what the base may bring and no image should carry.
var removed = []string{
	"etc/.resolv.conf.systemd-resolved.bak",
	"initrd.img", "initrd.img.old", "vmlinuz", "vmlinuz.old",
	"usr/lib/grub", "etc/grub.d", "etc/default/grub", "etc/default/grub.d",
}

// Root makes the layer that lies over the base and the programs. It replaces
// what packages put in the same places.
func Root(img *configs.Image, f Facts) (tree.Layer, error) {
	b := &layer{now: f.SourceDate}
	errs := []error{
		b.embedded("files/base"),
		b.fstab(f),
		b.image(f),
		b.containerd(img, f),
		b.cni(img, f),
	}
	if img.Yurthub != nil && img.Yurthub.Form != "staticPod" {
		errs = append(errs, b.embedded("files/yurthub"))
		b.enable("yurthub.service", "multi-user.target")
	}
	for _, u := range enabled {
		b.enable(u.unit, u.target)
	}
	for _, u := range masked {
		b.link("etc/systemd/system/"+u, "/dev/null")
	}
	// D-Bus activation names that Debian's own enabling would make.
	b.link("etc/systemd/system/dbus-org.freedesktop.network1.service", "/usr/lib/systemd/system/systemd-networkd.service")
	b.link("etc/systemd/system/dbus-org.freedesktop.resolve1.service", "/usr/lib/systemd/system/systemd-resolved.service")
	b.link("etc/systemd/system/dbus-org.freedesktop.timesync1.service", "/usr/lib/systemd/system/systemd-timesyncd.service")
	b.link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")
	// Empty, not missing: systemd makes an id at first boot without running
	// all presets, which would enable what packages bring.
	b.file("etc/machine-id", 0o444, nil)
	b.file("etc/hostname", 0o644, []byte("localhost\n"))
	b.file("etc/hosts", 0o644, []byte("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n"))
	if len(img.Kernel.Modules) > 0 {
		b.file("usr/lib/modules-load.d/image.conf", 0o644, []byte(strings.Join(img.Kernel.Modules, "\n")+"\n"))
	}
	if len(img.Kernel.Sysctl) > 0 {
		var s strings.Builder
		for _, k := range sortedKeys(img.Kernel.Sysctl) {
			fmt.Fprintf(&s, "%s = %s\n", k, img.Kernel.Sysctl[k])
		}
		b.file("usr/lib/sysctl.d/81-image.conf", 0o644, []byte(s.String()))
	}
	b.dir("etc/edgebake", 0o755)
	b.dir("etc/kubernetes", 0o755)
	b.dir("opt/cni", 0o755)
	b.link("opt/cni/bin", "/usr/lib/cni")
	for _, d := range []string{
		"var/lib/edgebake", "var/lib/ipvscare",
		// Whoever writes here is root on the node: as kubeadm makes it.
		"var/lib/edgebake/persist/kubernetes/manifests",
	} {
		b.dir(d, 0o700)
	}
	for _, d := range []string{
		"var/lib/edgebake/persist", "var/lib/edgebake/persist/kubernetes",
		"var/lib/edgebake/persist/kubernetes/pki",
		"var/lib/kubelet", "var/lib/containerd",
	} {
		b.dir(d, 0o755)
	}
	b.dir("var/log/edgebake", 0o750)
	if img.Yurthub != nil {
		b.dir("var/lib/yurthub", 0o755)
	}
	if err := errors.Join(errs...); err != nil {
		return tree.Layer{}, err
	}
	return tree.Layer{Name: LayerName, Nodes: b.nodes, Replace: true, Remove: removed}, nil
}

// layer collects nodes that all belong to root and carry the source date.
type layer struct {
	now   time.Time
	nodes []tree.Node
}

func (b *layer) add(p string, i tree.Inode) {
	i.MTime = b.now
	b.nodes = append(b.nodes, tree.Node{Path: p, Layer: LayerName, Inode: &i})
}

func (b *layer) file(p string, mode uint32, data []byte) {
	b.add(p, tree.Inode{Mode: tree.ModeRegular | mode, Data: tree.Bytes(data)})
}

func (b *layer) dir(p string, mode uint32) { b.add(p, tree.Inode{Mode: tree.ModeDir | mode}) }

func (b *layer) link(p, target string) {
	b.add(p, tree.Inode{Mode: tree.ModeSymlink | 0o777, Target: target})
}

func (b *layer) enable(unit, target string) {
	b.link("etc/systemd/system/"+target+".wants/"+unit, "/usr/lib/systemd/system/"+unit)
}

// embedded adds a tree of files/. Embedding drops modes, so the place says
// what is a program.
func (b *layer) embedded(root string) error {
	return fs.WalkDir(embedded, root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := embedded.ReadFile(p)
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(p, root+"/")
		mode := uint32(0o644)
		if strings.HasPrefix(rel, "usr/lib/edgebake/") {
			mode = 0o755
		}
		b.file(rel, mode, data)
		return nil
	})
}

func (b *layer) fstab(f Facts) error {
	root, err := f.guid(ondisk.LabelRootA)
	if err != nil {
		return err
	}
	data, err := f.guid(ondisk.LabelData)
	if err != nil {
		return err
	}
	// A file system with errors ends in a restart and a check, never in a
	// machine that half works. DATA is on the disk that root was found on:
	// waiting for it is better than starting over.
	b.file("etc/fstab", 0o644, fmt.Appendf(nil,
		"PARTUUID=%s / ext4 rw,noatime,errors=panic 0 1\n"+
			"PARTUUID=%s /var ext4 rw,noatime,errors=panic,x-systemd.growfs,x-systemd.device-timeout=15min 0 2\n", root, data))
	return nil
}

func (b *layer) image(f Facts) error {
	info := f.Info
	// Sizes follow from the content, of which this file is a part: the copy
	// on the ESP has them.
	info.Partitions = nil
	for _, p := range f.Info.Partitions {
		info.Partitions = append(info.Partitions, ondisk.PartitionInfo{Label: p.Label, GUID: p.GUID, FS: p.FS})
	}
	data, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", ondisk.ImageInfoFile, err)
	}
	b.file(strings.TrimPrefix(ondisk.ImageInfoFile, "/"), 0o644, append(data, '\n'))
	return nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Split parts the merged tree into the system (ROOT-A) and what belongs to
// the machine (DATA, mounted on /var). What the boot loader has of its own on
// the ESP is left out of the system.
func Split(nodes []tree.Node) (root, data []tree.Node) {
	for _, n := range nodes {
		switch {
		case n.Path == "var":
			root = append(root, n)
			n.Path = "."
			data = append(data, n)
		case strings.HasPrefix(n.Path, "var/"):
			n.Path = strings.TrimPrefix(n.Path, "var/")
			data = append(data, n)
		case path.Dir(n.Path) == "boot" && (isKernel(n.Path) || isInitrd(n.Path)):
		default:
			root = append(root, n)
		}
	}
	return root, data
}
