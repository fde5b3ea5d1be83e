// Package overlays generates the files that edgebake adds to the base: units, kernel settings, the
// configuration of containerd and kubelet, mount points, and the content of the EFI system
// partition. Static files are in files/, with the same paths as on the node. The package reads
// neither the computer nor the clock, so the same Image always gives the same files.
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
	// Info describes the image. ESP also needs the labels and GUIDs in Info.Partitions.
	Info ondisk.ImageInfo
	// Containerd is the version of containerd, such as "2.2.9". It determines the format of
	// containerd's configuration.
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

// Packages returns the Debian packages that edgebake adds to those listed in the Image.
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

// Components returns the archive components that contain the packages of Packages.
func Components(img *configs.Image) []string {
	if img.Hardware == "cloud" {
		return []string{"main"}
	}
	return []string{"main", "non-free-firmware"}
}

// enabled lists the units that are started at boot, each with the target that starts it.
var enabled = []struct{ unit, target string }{
	{ondisk.UnitFirstboot, "multi-user.target"},
	{ondisk.UnitIPVSCare, "multi-user.target"},
	{ondisk.UnitContainerd, "multi-user.target"},
	{ondisk.UnitKubelet, "multi-user.target"},
	{"edgebake-certificates.service", "multi-user.target"},
	{"edgebake-sshkeys.service", "multi-user.target"},
	{ondisk.UnitUpdateFinish, "multi-user.target"},
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

// masked lists units that must not start, for example those of apt and dpkg, because the packages of
// a machine are never updated in place, and systemd-firstboot, because nobody is there to answer it.
var masked = []string{
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
	"e2scrub_all.timer", "e2scrub_reap.service", "grub-common.service",
	"systemd-firstboot.service", "systemd-networkd-persistent-storage.service",
	// These write to the ESP at every boot.
	"systemd-boot-random-seed.service", "systemd-boot-update.service",
	// The kernel loads these modules on demand. Loading them during udev's first pass over all
	// devices would delay the partitions.
	"modprobe@configfs.service", "modprobe@dm_mod.service", "modprobe@drm.service",
	"modprobe@fuse.service", "modprobe@loop.service",
}

// noGenerators lists systemd's generators for features that no image uses. They would run at
// each boot and daemon-reload. A link to /dev/null masks them; an overlay can replace the link.
var noGenerators = []string{
	"systemd-gpt-auto-generator",         // CommandLine names all partitions
	"systemd-hibernate-resume-generator", // no machine hibernates
	"systemd-ssh-generator",              // see systemd.ssh_auto in CommandLine
	"systemd-system-update-generator",    // packages are never updated in place
}

// removed lists paths of the base that no image should contain.
var removed = []string{
	"etc/.resolv.conf.systemd-resolved.bak",
	"initrd.img", "initrd.img.old", "vmlinuz", "vmlinuz.old",
	"boot/firmware", // created by raspi-firmware; edgebake writes its own files to the ESP
	"usr/lib/grub", "etc/grub.d", "etc/default/grub", "etc/default/grub.d",
}

// Root returns edgebake's own layer. Its files replace those of Debian packages.
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
	// Create the D-Bus names that systemctl enable would create for these units.
	b.link("etc/systemd/system/dbus-org.freedesktop.network1.service", "/usr/lib/systemd/system/systemd-networkd.service")
	b.link("etc/systemd/system/dbus-org.freedesktop.resolve1.service", "/usr/lib/systemd/system/systemd-resolved.service")
	b.link("etc/systemd/system/dbus-org.freedesktop.timesync1.service", "/usr/lib/systemd/system/systemd-timesyncd.service")
	// A new system on trial is accepted only if the node is as healthy as before the update.
	b.link("etc/systemd/system/boot-complete.target.requires/"+ondisk.UnitHealthy, "/usr/lib/systemd/system/"+ondisk.UnitHealthy)
}

// settings adds general files of /etc, and the Image's modules and sysctls.
func (b *layer) settings(img *configs.Image) {
	b.link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")
	// An empty file, unlike a missing one, makes systemd create an ID at first boot without
	// applying presets, which would enable units of packages.
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
	b.dir("efi", 0o700) // the mount point of the ESP
	b.dir(strings.TrimPrefix(ondisk.EtcDir, "/"), 0o755)
	b.dir(strings.TrimPrefix(ondisk.KubernetesDir, "/"), 0o755)
	b.dir("opt/cni", 0o755)
	b.link("opt/cni/bin", "/usr/lib/cni")
	for _, d := range []string{
		ondisk.StateDir, ondisk.IPVSStateDir,
		// Write access to this directory gives root on the node. kubeadm uses the same mode.
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

// embedded adds a directory of files/. Embedded files have no mode, so the directory determines
// which of them are executable.
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
	// Leave out the partitions: this system may be written to either root partition of any disk.
	// Only the ESP's copy of the file describes the layout of its disk.
	info.Partitions = nil
	data, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", ondisk.ImageInfoFile, err)
	}
	b.file(strings.TrimPrefix(ondisk.ImageInfoFile, "/"), 0o644, append(data, '\n'))
	return nil
}

// systemState lists the paths in /var that describe the system: the package database, and files
// that packages generate from /usr and /etc. An update must replace them together with the root.
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

// sysimage is the directory on the root that holds systemState. DATA has links to it.
const sysimage = "usr/lib/sysimage"

// stateDirs lists the directories on DATA for the machine's state and container images. If the base
// had a link in place of one of them, an update could replace the contents.
var stateDirs = []string{ondisk.StateDir, ondisk.IPVSStateDir, ondisk.PersistDir, ondisk.ImportImageDir, "/var/lib/kubelet", "/var/lib/containerd", openyurt.Root}

// CheckPlaces returns an error for each path of the tree that must be a directory but is not one:
// the directories of stateDirs in /var, sysimage, and their parents.
func CheckPlaces(nodes []tree.Node) error {
	want := map[string]string{} // path of a directory → why it must be one
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

// Split divides the merged tree into the files of a root partition and the files of DATA, which is
// mounted on /var. It omits the kernel and the initrd from the root, since they are on the ESP.
func Split(nodes []tree.Node) (root, data []tree.Node) {
	dirs := map[string]*tree.Inode{} // parents of the files in sysimage
	for _, n := range nodes {
		entry, system := ofSystem(n.Path)
		if system && n.Path == entry && n.IsSymlink() {
			system = false // the base itself keeps these files elsewhere
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
