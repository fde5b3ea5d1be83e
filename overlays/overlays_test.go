package overlays

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func testFacts() Facts {
	return Facts{
		SourceDate: time.Unix(1767225600, 0),
		Containerd: "2.2.9",
		Info: ondisk.ImageInfo{
			Version: 1, Name: "test", Plan: strings.Repeat("ab", 32), Arch: "amd64",
			Partitions: []ondisk.PartitionInfo{
				{Label: ondisk.LabelESP, GUID: "11111111-1111-4111-8111-111111111111"},
				{Label: ondisk.LabelRootA, GUID: "22222222-2222-4222-8222-222222222222", Size: 1 << 30},
				{Label: ondisk.LabelData, GUID: "33333333-3333-4333-8333-333333333333"},
			},
		},
	}
}

func testImage() *configs.Image {
	return &configs.Image{
		Name: "test", Arch: "amd64", Hardware: "cloud",
		Containerd: configs.Containerd{Version: "2.2.9", Sandbox: "edgebake.test/pause:1"},
		CNI:        configs.CNI{Config: "bridge", PodCIDR: "10.244.0.0/24"},
		Kernel:     configs.Kernel{Consoles: []string{"tty0", "ttyS0,115200"}, Args: []string{"mitigations=off"}},
		Yurthub:    &configs.Yurthub{Version: "v1.7.0", Form: "unit"},
	}
}

func nodeMap(t *testing.T, nodes []tree.Node) map[string]tree.Node {
	t.Helper()
	m := map[string]tree.Node{}
	for _, n := range nodes {
		if _, ok := m[n.Path]; ok {
			t.Errorf("path %s appears twice", n.Path)
		}
		m[n.Path] = n
	}
	return m
}

func TestRootGolden(t *testing.T) {
	l, err := Root(testImage(), testFacts())
	if err != nil {
		t.Fatal(err)
	}
	nodeMap(t, l.Nodes)
	var s strings.Builder
	for _, n := range withDirs(&layer{nodes: l.Nodes}) {
		if strings.HasPrefix(n.Path, "usr/lib/systemd/system/") {
			continue // systemd itself checks these static files in TestUnitsVerify
		}
		s.WriteString(n.Path)
		switch {
		case n.IsSymlink():
			s.WriteString(" -> " + n.Target + "\n")
		case n.IsDir():
			s.WriteString("/\n")
		default:
			s.WriteString("\n" + indent(string(n.Data.Inline)))
		}
	}
	golden(t, "root.golden", s.String())
}

// TestRootIsContentOnly checks that the root has the same bytes on every disk.
func TestRootIsContentOnly(t *testing.T) {
	here, elsewhere := testFacts(), testFacts()
	elsewhere.Info.Partitions = []ondisk.PartitionInfo{{Label: "OTHER", GUID: "99999999-9999-4999-8999-999999999999"}}
	a, err := Root(testImage(), here)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Root(testImage(), elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	other := nodeMap(t, b.Nodes)
	for _, n := range a.Nodes {
		if got := string(other[n.Path].Data.Inline); got != string(n.Data.Inline) {
			t.Errorf("%s depends on the disk:\n%s", n.Path, got)
		}
		for _, p := range here.Info.Partitions {
			if strings.Contains(string(n.Data.Inline), p.GUID) {
				t.Errorf("%s names partition %s", n.Path, p.Label)
			}
		}
	}
}

// TestSSHKeys checks that host keys are made on DATA, survive a replaced root, and are made again
// if a power cut left an incomplete set.
func TestSSHKeys(t *testing.T) {
	desk.NeedProgram(t, "ssh-keygen", "openssh-client")
	dir := t.TempDir()
	etc, state := filepath.Join(dir, "etc"), filepath.Join(dir, "data")
	script, err := embedded.ReadFile("files/base/usr/lib/edgebake/sshkeys")
	if err != nil {
		t.Fatal(err)
	}
	here := strings.NewReplacer("/etc/ssh/", etc+"/", "/var/lib/edgebake", state).Replace(string(script))
	run := func() {
		t.Helper()
		if err := os.MkdirAll(etc, 0o755); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("sh", "-c", here).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	key := func() string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(etc, "ssh_host_ed25519_key"))
		if err != nil || len(b) == 0 {
			t.Fatalf("there is no host key: %v", err)
		}
		return string(b)
	}
	run()
	first := key()
	if st, err := os.Stat(filepath.Join(etc, "ssh_host_ed25519_key")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the key's permissions: %v %v", st, err)
	}
	if err := os.RemoveAll(etc); err != nil {
		t.Fatal(err)
	}
	run()
	if key() != first {
		t.Error("another root has other host keys")
	}
	kept := filepath.Join(state, "persist/etc/ssh/ssh_host_ed25519_key")
	for _, left := range []string{"", first[:len(first)/2]} {
		if err := os.WriteFile(kept, []byte(left), 0o600); err != nil {
			t.Fatal(err)
		}
		run()
		if got := key(); got == first || got == left {
			t.Errorf("a key of which %d bytes are left was not made anew", len(left))
		}
	}
	own := filepath.Join(etc, "ssh_host_ed25519_key")
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(own, []byte("the site's\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run()
	if key() != "the site's\n" {
		t.Error("the site's own key was replaced")
	}
}

// TestColdplug checks that every device is triggered either during boot or once the node is Ready,
// and that devices for disks, networks and consoles are triggered during boot.
func TestColdplug(t *testing.T) {
	const units = "files/base/usr/lib/systemd/system/"
	subsystems := func(file, flag string) []string {
		t.Helper()
		text, err := embedded.ReadFile(units + file)
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for _, m := range regexp.MustCompile(flag+`=(\S+)`).FindAllStringSubmatch(string(text), -1) {
			found = append(found, m[1])
		}
		return found
	}
	const boot, later = "systemd-udev-trigger.service.d/50-edgebake.conf", "edgebake-coldplug.service"
	left, taken := subsystems(boot, "--subsystem-nomatch"), subsystems(later, "--subsystem-match")
	if len(left) < 10 || !slices.Equal(left, taken) {
		t.Errorf("left out while booting:\n%v\nlooked at later:\n%v", left, taken)
	}
	for _, s := range []string{"acpi", "block", "drm", "hid", "i2c", "input", "misc", "mmc", "net", "nvme", "pci", "platform", "scsi", "tpmrm", "usb", "virtio", "vmbus", "xen"} {
		if slices.Contains(left, s) {
			t.Errorf("%s is left out while booting", s)
		}
	}
	if again := subsystems(boot, "--subsystem-match"); !slices.Equal(again, []string{"module", "tty"}) {
		t.Errorf("consoles that systemd has units for are to be looked at while booting, not %v", again)
	}
	l, err := Root(testImage(), testFacts())
	if err != nil {
		t.Fatal(err)
	}
	m := nodeMap(t, l.Nodes)
	for _, unit := range []string{"paths.target.wants/edgebake-coldplug.path", "timers.target.wants/edgebake-coldplug.timer"} {
		if n, ok := m["etc/systemd/system/"+unit]; !ok || !n.IsSymlink() {
			t.Errorf("%s is not there: nothing has the other devices looked at", unit)
		}
	}
	if path := subsystems("edgebake-coldplug.path", "PathExists"); !slices.Equal(path, []string{ondisk.HealthyFile}) {
		t.Errorf("edgebake-coldplug.path waits for %v, and first boot writes %s", path, ondisk.HealthyFile)
	}
}

// TestKubeletStart checks that kubelet's unit removes only --pod-infra-container-image from flags
// that an older kubeadm wrote to DATA: kubelet 1.35 and later rejects that flag.
func TestKubeletStart(t *testing.T) {
	unit, err := embedded.ReadFile("files/base/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ExecStartPre=-/bin/sh -c '(.*)'$`).FindSubmatch(unit)
	if m == nil {
		t.Fatalf("nothing runs before kubelet: %s", unit)
	}
	file := filepath.Join(t.TempDir(), "flags.env")
	script := strings.ReplaceAll(string(m[1]), "/var/lib/kubelet/kubeadm-flags.env", file)
	for before, after := range map[string]string{
		`KUBELET_KUBEADM_ARGS="--pod-infra-container-image=registry.k8s.io/pause:3.10 --node-ip=192.0.2.1"`: `KUBELET_KUBEADM_ARGS=" --node-ip=192.0.2.1"`,
		`KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1 --pod-infra-container-image=registry.k8s.io/pause:3.10"`: `KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1"`,
		`KUBELET_KUBEADM_ARGS="--register-with-taints=a=b:NoSchedule,c=:NoExecute --v=2"`:                   `KUBELET_KUBEADM_ARGS="--register-with-taints=a=b:NoSchedule,c=:NoExecute --v=2"`,
	} {
		if err := os.WriteFile(file, []byte(before+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != after+"\n" {
			t.Errorf("%s became %s (%v), want %s", before, got, err, after)
		}
	}
}

func indent(s string) string {
	if s == "" {
		return ""
	}
	return "\t" + strings.ReplaceAll(strings.TrimSuffix(s, "\n"), "\n", "\n\t") + "\n"
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	p := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(p, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs (run with -update after looking at why); got:\n%s", p, got)
	}
}

// TestUnitsVerify checks edgebake's units with systemd-analyze. The root has the units of this
// computer, and empty executables as programs.
func TestUnitsVerify(t *testing.T) {
	desk.NeedProgram(t, "systemd-analyze", "systemd")
	root := t.TempDir()
	l, err := Root(testImage(), testFacts())
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-r", "--parents", "/usr/lib/systemd/system", root).CombinedOutput(); err != nil {
		t.Fatalf("copying the host's units: %v\n%s", err, out)
	}
	var units []string
	for _, n := range l.Nodes {
		p := filepath.Join(root, n.Path)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if !n.IsRegular() || !strings.HasPrefix(n.Path, "usr/lib/") {
			continue
		}
		if err := os.WriteFile(p, n.Data.Inline, os.FileMode(n.Mode&0o777)); err != nil {
			t.Fatal(err)
		}
		if filepath.Dir(n.Path) == "usr/lib/systemd/system" {
			units = append(units, filepath.Base(n.Path))
		}
	}
	for _, p := range []string{
		"usr/bin/firstboot", "usr/bin/ipvscare", "usr/bin/kubelet", "usr/bin/containerd", "usr/local/bin/yurthub",
		"usr/bin/systemctl", "bin/sh", "bin/kill",
	} {
		p = filepath.Join(root, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if len(units) < 6 {
		t.Fatalf("found only the units %v", units)
	}
	cmd := exec.Command("systemd-analyze", append([]string{"verify", "--root=" + root, "--man=no", "--generators=no", "--recursive-errors=no"}, units...)...)
	out, err := cmd.CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

func TestESP(t *testing.T) {
	reg := func(p string, size int64) tree.Node {
		return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Content{Blob: p, Size: size}}}
	}
	base := []tree.Node{
		reg("boot/vmlinuz-6.12-cloud-amd64", 10), reg("boot/initrd.img-6.12-cloud-amd64", 20),
		reg("usr/lib/systemd/boot/efi/systemd-bootx64.efi.signed", 30),
	}
	nodes, err := ESP(testImage(), testFacts(), base)
	if err != nil {
		t.Fatal(err)
	}
	m := nodeMap(t, nodes)
	if got := m["EFI/BOOT/BOOTX64.EFI"].Data.Size; got != 30 {
		t.Errorf("without shim, BOOTX64.EFI is %d bytes, not systemd-boot's 30", got)
	}
	entry := string(m["loader/entries/edgebake-a.conf"].Data.Inline)
	for _, want := range []string{
		"sort-key edgebake\nversion 1\nlinux /edgebake/abababababababab/linux\n",
		"root=PARTUUID=22222222-2222-4222-8222-222222222222 ", " rw ",
		"systemd.mount-extra=PARTUUID=33333333-3333-4333-8333-333333333333:/var:ext4:",
		"systemd.mount-extra=PARTUUID=11111111-1111-4111-8111-111111111111:/efi:vfat:",
		"console=tty0 console=ttyS0,115200 mitigations=off\n",
	} {
		if !strings.Contains(entry, want) {
			t.Errorf("the boot entry lacks %q:\n%s", want, entry)
		}
	}
	if conf := string(m["loader/loader.conf"].Data.Inline); strings.Contains(conf, "default") {
		t.Errorf("a default wins over an entry's count of tries:\n%s", conf)
	}
	var info ondisk.ImageInfo
	if err := json.Unmarshal(m[ondisk.ESPImageInfo].Data.Inline, &info); err != nil || info.Partitions[1].Size != 1<<30 {
		t.Errorf("image.json does not hold the layout: %v %+v", err, info)
	}

	base = append(base, reg("usr/lib/shim/shimx64.efi.signed", 40), reg("usr/lib/shim/mmx64.efi.signed", 50))
	nodes, err = ESP(testImage(), testFacts(), base)
	if err != nil {
		t.Fatal(err)
	}
	m = nodeMap(t, nodes)
	if m["EFI/BOOT/BOOTX64.EFI"].Data.Size != 40 || m["EFI/BOOT/grubx64.efi"].Data.Size != 30 {
		t.Error("with shim, it comes first and starts the signed systemd-boot")
	}

	for name, test := range map[string]struct {
		nodes []tree.Node
		want  string
	}{
		"no kernel":        {nil, "boot/vmlinuz-* is missing"},
		"two kernels":      {append(base, reg("boot/vmlinuz-6.1", 1)), "several kernels"},
		"no loader":        {base[:2], "systemd-bootx64.efi, needed to boot; install systemd-boot-efi"},
		"empty kernel":     {append(slices.Clone(base[1:]), reg("boot/vmlinuz-6.12-cloud-amd64", 0)), "boot/vmlinuz-6.12-cloud-amd64 is empty"},
		"empty initrd":     {append(slices.Delete(slices.Clone(base), 1, 2), reg("boot/initrd.img-6.12-cloud-amd64", 0)), "boot/initrd.img-6.12-cloud-amd64, needed to boot, is empty"},
		"images elsewhere": {append(slices.Clone(base), tree.Node{Path: "var/lib/containerd", Layer: "base", Inode: &tree.Inode{Mode: tree.ModeSymlink | 0o777, Target: "/srv/containerd"}}), "layer base: var/lib/containerd: is a symbolic link to /srv/containerd, but must be a directory"},
	} {
		if _, err := ESP(testImage(), testFacts(), test.nodes); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v lacks %q", name, err, test.want)
		}
	}
}

// TestCheckPlaces checks that the error names the layer whose file takes the place of a directory.
func TestCheckPlaces(t *testing.T) {
	node := func(p string, mode uint32, target string) tree.Node {
		return tree.Node{Path: p, Layer: "base", Inode: &tree.Inode{Mode: mode, Target: target}}
	}
	sound := []tree.Node{
		node("var", tree.ModeDir, ""), node("var/run", tree.ModeSymlink, "/run"), node("var/lib", tree.ModeDir, ""),
		node("var/lib/containerd", tree.ModeDir, ""), node("usr/lib/sysimage", tree.ModeDir, ""), node("var/lib/dpkg", tree.ModeSymlink, "/usr/lib/dpkg"),
	}
	if err := CheckPlaces(sound); err != nil {
		t.Error(err)
	}
	for _, p := range []string{"var", "var/lib", "var/lib/containerd", "var/lib/kubelet", "var/lib/edgebake", "var/lib/edgebake/persist", "usr/lib/sysimage"} {
		for _, n := range []tree.Node{node(p, tree.ModeSymlink, "/elsewhere"), node(p, tree.ModeRegular, "")} {
			var of *tree.LayerError
			if err := CheckPlaces([]tree.Node{n}); !errors.As(err, &of) || of.Layer != "base" || of.Path != p || !strings.Contains(err.Error(), "must be") {
				t.Errorf("%s: %v", p, err)
			}
		}
	}
}

func TestSplit(t *testing.T) {
	dir := &tree.Inode{Mode: tree.ModeDir | 0o755}
	file := &tree.Inode{Mode: tree.ModeRegular | 0o644}
	root, data := Split([]tree.Node{
		{Path: ".", Inode: dir}, {Path: "boot", Inode: dir}, {Path: "boot/vmlinuz-6", Inode: file}, {Path: "boot/config-6", Inode: file},
		{Path: "usr", Inode: dir}, {Path: "var", Inode: dir}, {Path: "var/lib", Inode: dir}, {Path: "variant", Inode: file},
	})
	paths := func(nodes []tree.Node) string {
		var s []string
		for _, n := range nodes {
			s = append(s, n.Path)
		}
		return strings.Join(s, " ")
	}
	if got, want := paths(root), ". boot boot/config-6 usr var variant"; got != want {
		t.Errorf("root is %q, want %q", got, want)
	}
	if got, want := paths(data), ". lib"; got != want {
		t.Errorf("data is %q, want %q", got, want)
	}
}

// TestSplitSystemState checks that the package database is on the root and that DATA links to it.
// After an update, the link then leads to the database of the new root.
func TestSplitSystemState(t *testing.T) {
	dir := &tree.Inode{Mode: tree.ModeDir | 0o755}
	file := &tree.Inode{Mode: tree.ModeRegular | 0o644}
	link := &tree.Inode{Mode: tree.ModeSymlink | 0o777, Target: "/elsewhere"}
	root, data := Split([]tree.Node{
		{Path: ".", Inode: dir}, {Path: "usr", Inode: dir}, {Path: "usr/lib", Inode: dir}, {Path: "usr/share", Inode: dir},
		{Path: "var", Inode: dir}, {Path: "var/lib", Inode: dir}, {Path: "var/lib/apt", Inode: dir},
		{Path: "var/lib/apt/extended_states", Inode: file}, {Path: "var/lib/dpkg", Inode: dir}, {Path: "var/lib/dpkg-tool", Inode: dir},
		{Path: "var/lib/dpkg/info", Inode: dir}, {Path: "var/lib/dpkg/info/x.list", Inode: file}, {Path: "var/lib/kubelet", Inode: dir},
		{Path: "var/lib/ucf", Inode: link},
	})
	show := func(nodes []tree.Node) string {
		var s []string
		for _, n := range nodes {
			s = append(s, strings.TrimSuffix(n.Path+" -> "+n.Target, " -> "))
		}
		return strings.Join(s, "\n")
	}
	const base = "usr/lib/sysimage"
	if got, want := show(root), strings.Join([]string{".", "usr", "usr/lib", base, base + "/lib", base + "/lib/apt",
		base + "/lib/apt/extended_states", base + "/lib/dpkg", base + "/lib/dpkg/info", base + "/lib/dpkg/info/x.list",
		"usr/share", "var"}, "\n"); got != want {
		t.Errorf("root is\n%s\nwant\n%s", got, want)
	}
	if got, want := show(data), strings.Join([]string{".", "lib", "lib/apt",
		"lib/apt/extended_states -> /" + base + "/lib/apt/extended_states", "lib/dpkg -> /" + base + "/lib/dpkg", "lib/dpkg-tool",
		"lib/kubelet", "lib/ucf -> /elsewhere"}, "\n"); got != want {
		t.Errorf("data is\n%s\nwant\n%s", got, want)
	}
}

func TestFiles(t *testing.T) {
	img := testImage()
	img.Files = []configs.File{
		{Path: "/etc/motd", Contents: new("{{.Name}} on {{.Arch}}\n"), Template: true},
		{Path: "/etc/issue", Contents: new("x"), Replace: true, Mode: "0600", UID: 7},
		{Path: "/etc/link", Link: "motd"},
	}
	layers, err := Files(img, testFacts(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) != 2 || layers[0].Replace || !layers[1].Replace {
		t.Fatalf("files that replace are in a layer of their own; got %+v", layers)
	}
	if got := string(layers[0].Nodes[0].Data.Inline); got != "test on amd64\n" {
		t.Errorf("template gave %q", got)
	}
	if n := layers[1].Nodes[0]; n.Mode != tree.ModeRegular|0o600 || n.UID != 7 {
		t.Errorf("mode and owner are %o %d", n.Mode, n.UID)
	}
	img.Files = []configs.File{{Path: "/a", Contents: new("{{.Nope}}"), Template: true}, {Path: "/b", Mode: "rw", Contents: new("x")}}
	_, err = Files(img, testFacts(), nil, nil)
	if err == nil || !strings.Contains(err.Error(), "files[0]: ") || !strings.Contains(err.Error(), "files[1]: ") {
		t.Errorf("both problems are to be reported, got %v", err)
	}
}

// TestFresh checks that files which Debian's packages have already generated (hwdb, ld.so.cache)
// are marked as current, unless the user's layers add sources of such files.
func TestFresh(t *testing.T) {
	img := testImage()
	marks := func(l tree.Layer) (n int) {
		for _, node := range l.Nodes {
			if node.Path == "etc/.updated" || node.Path == "var/.updated" {
				n++
				// systemd compares this time with /usr. With an older one, it would generate the
				// files again.
				if node.MTime != testFacts().SourceDate {
					t.Errorf("%s is of %v", node.Path, node.MTime)
				}
			}
		}
		return n
	}
	root := func() tree.Layer {
		t.Helper()
		l, err := Root(img, testFacts())
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if n := marks(root()); n != 0 {
		t.Errorf("a base that edgebake did not make has %d marks", n)
	}
	img.Base.Debian = &configs.DebianBase{Suite: "trixie"}
	own := root()
	for _, c := range []struct {
		path string
		want int
	}{
		{"etc/motd", 2}, {"usr/bin/agent", 2}, {"opt/agent/share/so.txt", 2},
		{"usr/lib/sysusers.d/agent.conf", 0}, {"etc/udev/hwdb.d/70-scanner.hwdb", 0}, {"etc/ld.so.conf.d/agent.conf", 0},
		{"usr/lib/x86_64-linux-gnu/libagent.so.1", 0}, {"usr/local/lib/libagent.so", 0}, {"usr/lib/systemd/catalog/agent.catalog", 0},
	} {
		got := Fresh(own, []tree.Layer{{Name: "overlays[0]", Nodes: []tree.Node{{Path: "usr"}, {Path: c.path}}}})
		if n := marks(got); n != c.want {
			t.Errorf("with %s of the user's there are %d marks, want %d", c.path, n, c.want)
		}
	}
	if n := marks(own); n != 2 {
		t.Errorf("the layer itself has %d marks left", n)
	}
}

// TestUnitsKeepModes checks that units and tmpfiles.d give a directory the same mode. Otherwise,
// systemd would change the mode at each start of the unit, by default to 0755.
func TestUnitsKeepModes(t *testing.T) {
	const base = "files/base/usr/lib/"
	modes := map[string]string{}
	tmpfiles, err := os.ReadFile(base + "tmpfiles.d/edgebake.conf")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(tmpfiles)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "d" {
			modes[f[1]] = f[2]
		}
	}
	units, err := filepath.Glob(base + "systemd/system/*.service")
	if err != nil || len(units) == 0 {
		t.Fatal(err)
	}
	compared := 0
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		set := map[string]string{}
		for line := range strings.Lines(string(text)) {
			if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
				set[key] = value
			}
		}
		for key, parent := range map[string]string{"StateDirectory": "/var/lib/", "LogsDirectory": "/var/log/", "ConfigurationDirectory": "/etc/"} {
			for dir := range strings.FieldsSeq(set[key]) {
				mode := set[key+"Mode"]
				if mode == "" {
					mode = "0755"
				}
				if want, ok := modes[parent+dir]; ok {
					compared++
					if mode != want {
						t.Errorf("%s has %s with mode %s, tmpfiles.d with %s", filepath.Base(unit), parent+dir, mode, want)
					}
				}
			}
		}
	}
	if compared == 0 {
		t.Error("nothing was compared")
	}
}
