// Package overlays generates what edgebake adds to the base for an Image:
// units, kernel settings, the configuration of containerd and kubelet, mounts,
// and the content of the EFI system partition. Static files are in files/ with
// the same paths as on the node; files that depend on the Image are rendered by
// pure functions. It reads neither the host nor the clock, so the same Image
// gives the same nodes.
package overlays

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/openyurt"
)

//go:embed all:files
var embedded embed.FS

// LayerName is the name of Root's layer in messages and reports.
const LayerName = "edgebake"

// Facts contains the inputs of rendering that are not in the Image.
type Facts struct {
	SourceDate time.Time
	// Info describes the image. For ESP, Info.Partitions needs labels and
	// GUIDs.
	Info ondisk.ImageInfo
	// Containerd is the version of containerd, for example "2.2.9"; it
	// determines the format of its configuration.
	Containerd string
	// CNI is the user's network configuration; nil if there is none.
	CNI []byte
}

func (f Facts) guid(label string) (string, error) {
	for _, p := range f.Info.Partitions {
		if p.Label == label {
			return p.GUID, nil
		}
	}
	return "", fmt.Errorf("rendering the boot entry: the layout has no partition %s", label)
}

// Packages returns the Debian packages that an image needs, without those
// listed in the Image.
func Packages(img *configs.Image) []string {
	pk := []string{
		"ca-certificates", "conntrack", "containernetworking-plugins", "dbus", "e2fsprogs", "ethtool",
		"initramfs-tools", "iproute2", "iptables", "kmod", "nftables", "procps", "runc", "socat",
		"systemd-repart", "systemd-resolved", "systemd-sysv", "systemd-timesyncd",
		"udev", "zstd",
	}
	if img.Containerd.Debian {
		pk = append(pk, "containerd")
	}
	if img.Hardware == configs.RaspberryPi {
		pk = append(pk, "linux-image-"+img.Arch, "raspi-firmware", "wpasupplicant", "iw", "wireless-regdb",
			// for built-in Wi-Fi and USB network cards
			"firmware-brcm80211", "firmware-mediatek", "firmware-realtek")
		slices.Sort(pk)
		return pk
	}
	pk = append(pk, "systemd-boot", "systemd-boot-efi", "systemd-boot-efi-"+img.Arch+"-signed")
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

// Components returns the archive components that contain these packages.
func Components(img *configs.Image) []string {
	if img.Hardware == "cloud" {
		return []string{"main"}
	}
	return []string{"main", "non-free-firmware"}
}

// enabled lists the units that are started at boot, and the targets that want
// them.
var enabled = []struct{ unit, target string }{
	{ondisk.UnitFirstboot, "multi-user.target"},
	{ondisk.UnitIPVSCare, "multi-user.target"},
	{ondisk.UnitContainerd, "multi-user.target"},
	{ondisk.UnitKubelet, "multi-user.target"},
	{"edgebake-certificates.service", "multi-user.target"},
	{"edgebake-sshkeys.service", "multi-user.target"},
	{ondisk.UnitRelease, "multi-user.target"},
	{"etc-kubernetes.mount", "local-fs.target"},
	{"systemd-networkd.service", "multi-user.target"},
	{"systemd-networkd.socket", "sockets.target"},
	{"systemd-networkd-wait-online.service", "network-online.target"},
	{"systemd-resolved.service", "sysinit.target"},
	{"systemd-timesyncd.service", "sysinit.target"},
	{"edgebake-coldplug.path", "paths.target"},
	{"edgebake-coldplug.timer", "timers.target"},
	{ondisk.UnitOrdersTimer, "timers.target"},
	{"fstrim.timer", "timers.target"},
}

// masked lists units that are useless on a machine whose packages are never updated in place, or
// that wait for a person.
var masked = []string{
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
	"e2scrub_all.timer", "e2scrub_reap.service", "grub-common.service",
	"systemd-firstboot.service", "systemd-networkd-persistent-storage.service",
	// They write to the ESP at every boot.
	"systemd-boot-random-seed.service", "systemd-boot-update.service",
	// Modules that the boot does not use; the kernel loads each of them on
	// demand. Six modprobes during udev's first pass over all devices would
	// delay the partitions.
	"modprobe@configfs.service", "modprobe@dm_mod.service", "modprobe@drm.service",
	"modprobe@fuse.service", "modprobe@loop.service",
}

// noGenerators lists systemd's generators for features that no image uses. systemd runs each of
// them before any unit and at each daemon-reload, which kubeadm does several times. They are masked
// with a link to /dev/null, which an overlay can replace.
var noGenerators = []string{
	"systemd-gpt-auto-generator",         // the boot entry names all partitions
	"systemd-hibernate-resume-generator", // no machine hibernates
	"systemd-ssh-generator",              // see systemd.ssh_auto of CommandLine
	"systemd-system-update-generator",    // packages are never updated in place
}

// removed lists paths of the base that no image should contain.
var removed = []string{
	"etc/.resolv.conf.systemd-resolved.bak",
	"initrd.img", "initrd.img.old", "vmlinuz", "vmlinuz.old",
	"boot/firmware", // created by raspi-firmware; the ESP has edgebake's own files
	"usr/lib/grub", "etc/grub.d", "etc/default/grub", "etc/default/grub.d",
}

// Root returns the layer that is added to the base and the programs. It
// replaces files of packages.
func Root(img *configs.Image, f Facts) (tree.Layer, error) {
	b := &layer{now: f.SourceDate}
	errs := []error{
		b.embedded("files/base"),
		b.image(f),
		b.containerd(img, f),
		b.cni(img, f),
	}
	b.units(img)
	b.settings(img)
	b.directories(img)
	if err := errors.Join(errs...); err != nil {
		return tree.Layer{}, err
	}
	return tree.Layer{Name: LayerName, Nodes: b.nodes, Replace: true, Remove: removed}, nil
}

// units enables and masks units.
func (b *layer) units(img *configs.Image) {
	if img.Yurthub != nil && img.Yurthub.Form != openyurt.FormStaticPod {
		b.file("usr/lib/systemd/system/"+openyurt.Unit, 0o644, []byte(openyurt.UnitFile))
		b.enable(openyurt.Unit, "multi-user.target")
	}
	for _, u := range enabled {
		b.enable(u.unit, u.target)
	}
	for _, u := range masked {
		b.link("etc/systemd/system/"+u, "/dev/null")
	}
	for _, g := range noGenerators {
		b.link("etc/systemd/system-generators/"+g, "/dev/null")
	}
	// Create the D-Bus names that enabling these units in Debian would create.
	b.link("etc/systemd/system/dbus-org.freedesktop.network1.service", "/usr/lib/systemd/system/systemd-networkd.service")
	b.link("etc/systemd/system/dbus-org.freedesktop.resolve1.service", "/usr/lib/systemd/system/systemd-resolved.service")
	b.link("etc/systemd/system/dbus-org.freedesktop.timesync1.service", "/usr/lib/systemd/system/systemd-timesyncd.service")
	// A boot on trial is complete only when the node is as good as before.
	b.link("etc/systemd/system/boot-complete.target.requires/"+ondisk.UnitHealthy, "/usr/lib/systemd/system/"+ondisk.UnitHealthy)
}

// settings adds files of /etc, and the Image's modules and sysctls.
func (b *layer) settings(img *configs.Image) {
	b.link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")
	// Empty, not missing: then systemd creates an ID at first boot without
	// applying all presets, which would enable units of packages.
	b.file("etc/machine-id", 0o444, nil)
	if img.Base.Debian != nil {
		for _, mark := range updated {
			b.file(mark, 0o644, nil)
		}
	}
	b.file("etc/fstab", 0o644, []byte("# The boot entry on the ESP lists the mounts.\n"))
	b.file("etc/hostname", 0o644, []byte("localhost\n"))
	b.file("etc/hosts", 0o644, []byte("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n"))
	if len(img.Kernel.Modules) > 0 {
		b.file("usr/lib/modules-load.d/image.conf", 0o644, []byte(strings.Join(img.Kernel.Modules, "\n")+"\n"))
	}
	if len(img.Kernel.Sysctl) > 0 {
		var s strings.Builder
		for _, k := range slices.Sorted(maps.Keys(img.Kernel.Sysctl)) {
			fmt.Fprintf(&s, "%s = %s\n", k, img.Kernel.Sysctl[k])
		}
		b.file("usr/lib/sysctl.d/81-image.conf", 0o644, []byte(s.String()))
	}
}

// directories adds mount points and the directories of the machine's state.
func (b *layer) directories(img *configs.Image) {
	b.dir("efi", 0o700) // the boot entry mounts the ESP here
	b.dir(strings.TrimPrefix(ondisk.EtcDir, "/"), 0o755)
	b.dir(strings.TrimPrefix(ondisk.KubernetesDir, "/"), 0o755)
	b.dir("opt/cni", 0o755)
	b.link("opt/cni/bin", "/usr/lib/cni")
	for _, d := range []string{
		ondisk.StateDir, ondisk.IPVSStateDir,
		// 0700 because write access to it means root on the node; kubeadm uses
		// the same mode.
		ondisk.PersistDir + "/kubernetes/manifests",
	} {
		b.dir(strings.TrimPrefix(d, "/"), 0o700)
	}
	for _, d := range []string{
		ondisk.PersistDir, ondisk.PersistDir + "/kubernetes", ondisk.PersistDir + "/kubernetes/pki",
		"/var/lib/kubelet", "/var/lib/containerd",
	} {
		b.dir(strings.TrimPrefix(d, "/"), 0o755)
	}
	b.dir("var/log/edgebake", 0o750)
	if img.Yurthub != nil {
		b.dir(strings.TrimPrefix(openyurt.Root, "/"), 0o755)
	}
}

// layer collects nodes that belong to root and have the source date.
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

// embedded adds a directory of files/. Embedded files have no modes, so
// programs are recognised by their directory.
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

func (b *layer) image(f Facts) error {
	info := f.Info
	// Leave out the partitions, since this system can be written to either root partition of any
	// disk. The copy of the file on the ESP describes the disk's layout.
	info.Partitions = nil
	data, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", ondisk.ImageInfoFile, err)
	}
	b.file(strings.TrimPrefix(ondisk.ImageInfoFile, "/"), 0o644, append(data, '\n'))
	return nil
}

// systemState lists files of packages in /var that describe the system:
// installed packages and the files generated from /usr and /etc. They must be
// replaced together with the root.
var systemState = []string{
	"var/cache/debconf",
	"var/lib/apt/extended_states",
	"var/lib/dpkg",
	"var/lib/initramfs-tools",
	"var/lib/pam",
	"var/lib/shells.state",
	"var/lib/systemd/deb-systemd-helper-enabled",
	"var/lib/systemd/deb-systemd-helper-masked",
	"var/lib/systemd/deb-systemd-user-helper-enabled",
	"var/lib/ucf",
}

// sysimage is the directory of systemState on the root; DATA has links to it.
const sysimage = "usr/lib/sysimage"

// stateDirs lists the directories with the machine's state and container images, which are on DATA.
// If one of them were a link in the base, its content would be on the root, which updates replace.
var stateDirs = []string{ondisk.StateDir, ondisk.IPVSStateDir, ondisk.PersistDir, ondisk.ImportImageDir, "/var/lib/kubelet", "/var/lib/containerd", openyurt.Root}

// CheckPlaces returns an error for each path of the tree that should be a directory and is not:
// mount points, the machine's state, the parents of systemState.
func CheckPlaces(nodes []tree.Node) error {
	want := map[string]string{} // path of a directory: the reason
	for _, d := range append(stateDirs, "/var") {
		for p := strings.TrimPrefix(d, "/"); p == "var" || strings.HasPrefix(p, "var/"); p = path.Dir(p) {
			want[p] = "its contents are on DATA"
		}
	}
	for p := sysimage; p != "."; p = path.Dir(p) {
		want[p] = "the state of packages is kept there"
	}
	var errs []error
	for _, n := range nodes {
		why, ok := want[n.Path]
		switch {
		case !ok || n.IsDir():
			continue
		case n.IsSymlink():
			errs = append(errs, &tree.LayerError{Layer: n.Layer, Path: n.Path, Err: fmt.Errorf("is a symbolic link to %s, but must be a directory, since %s: remove the link", n.Target, why)})
		default:
			errs = append(errs, &tree.LayerError{Layer: n.Layer, Path: n.Path, Err: fmt.Errorf("is not a directory, but must be one, since %s: remove it", why)})
		}
	}
	return errors.Join(errs...)
}

// ofSystem returns the entry of systemState that contains path.
func ofSystem(path string) (entry string, ok bool) {
	for _, s := range systemState {
		if path == s || strings.HasPrefix(path, s+"/") {
			return s, true
		}
	}
	return "", false
}

// Split divides the merged tree into the system (a root partition) and the
// machine's files (DATA, mounted on /var). Files of the boot loader that are on
// the ESP are omitted from the system.
func Split(nodes []tree.Node) (root, data []tree.Node) {
	dirs := map[string]*tree.Inode{} // needed for sysimage
	for _, n := range nodes {
		entry, system := ofSystem(n.Path)
		if system && n.Path == entry && n.IsSymlink() {
			system = false // the base itself has moved it
		}
		switch {
		case n.Path == "var":
			root = append(root, n)
			n.Path = "."
			data = append(data, n)
		case system:
			below := strings.TrimPrefix(n.Path, "var/")
			if n.Path == entry {
				link := tree.Inode{Mode: tree.ModeSymlink | 0o777, MTime: n.MTime, Target: "/" + sysimage + "/" + below}
				data = append(data, tree.Node{Path: below, Layer: n.Layer, Inode: &link})
				for d := path.Dir(sysimage + "/" + below); d != path.Dir(sysimage); d = path.Dir(d) {
					dirs[d] = &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: n.MTime}
				}
			}
			n.Path = sysimage + "/" + below
			root = append(root, n)
		case strings.HasPrefix(n.Path, "var/"):
			n.Path = strings.TrimPrefix(n.Path, "var/")
			data = append(data, n)
		case path.Dir(n.Path) == "boot" && (isKernel(n.Path) || isInitrd(n.Path)):
		default:
			root = append(root, n)
		}
	}
	for _, d := range slices.Sorted(maps.Keys(dirs)) {
		if !slices.ContainsFunc(root, func(n tree.Node) bool { return n.Path == d }) {
			root = append(root, tree.Node{Path: d, Layer: LayerName, Inode: dirs[d]})
		}
	}
	slices.SortStableFunc(root, func(x, y tree.Node) int { return comparePaths(x.Path, y.Path) })
	return root, data
}
