package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/lab"
)

// TestArm64 builds images for amd64 and arm64 from one document with one command. The arm64 image
// must pass all disk checks, and have the same bytes from a cold cache and from an arm64 edgebake.
// It boots through UEFI and systemd-boot, joins through IPVS, and runs a baked container image.
func TestArm64(t *testing.T) {
	nightly(t)
	p := need(t)
	needArm64(t)
	w := newWorldOf(t, p, 1)
	if err := w.c.LetLogsBeRead(t.Context()); err != nil {
		t.Fatal(err)
	}
	document := w.severalDocument()
	both := func(name string, env []string, argv ...string) (arm64 string) {
		t.Helper()
		start := time.Now()
		out := filepath.Join(w.lab.Dir, name+".raw")
		w.mustIn(env, append(argv, document, "--output", out)...)
		t.Logf("%s: built in %.1f s", name, time.Since(start).Seconds())
		os.Remove(filepath.Join(w.lab.Dir, name+"-amd64.raw"))
		return filepath.Join(w.lab.Dir, name+"-arm64.raw")
	}
	golden := both("node", nil, w.bin, "build", "--export-base", filepath.Join(w.lab.Dir, "base.tar"))
	w.checkGolden(golden, "arm64")

	want := disktest.Sum(t, golden)
	same := func(how, image string) {
		t.Helper()
		if got := disktest.Sum(t, image); got != want {
			t.Errorf("%s: the image has other bytes than the first one", how)
		}
		os.Remove(image)
	}
	same("warm cache", both("warm", nil, w.bin, "build", "--locked"))
	one := filepath.Join(w.lab.Dir, "one.raw")
	base := filepath.Join(w.lab.Dir, "base-arm64.tar")
	cold := t.TempDir()
	w.mustIn([]string{"EDGEBAKE_CACHE=" + cold}, w.bin, "build", "--arch", "arm64", "--locked", "--base", base, document, "--output", one)
	same("cold cache, the base given", one)
	os.RemoveAll(cold)
	own := filepath.Join(w.lab.Dir, "edgebake-arm64")
	w.mustIn([]string{"GOARCH=arm64"}, "go", "build", "-trimpath", "-o", own, "./cmd/edgebake")
	w.mustIn(nil, own, "build", "--arch", "arm64", "--locked", document, "--output", one)
	same("built by an arm64 edgebake", one)

	parts := *w.parts
	parts.golden = golden
	w.parts = &parts
	vm := w.bootWith(lab.VMConfig{Arch: "arm64"}, 0, lab.Site{NodeName: "arm1"})
	node := w.ready(vm, nil)
	if got := node.Status.NodeInfo.Architecture; got != "arm64" {
		t.Errorf("the node is %s", got)
	}
	// The container images are part of the disk image, and there is no registry.
	w.makePod(vm, "hello")
	w.saysOnNode(vm, "uname -m; cat /proc/net/ip_vs; cat /sys/class/tty/console/active", "aarch64", "TCP ", "ttyAMA0")
	w.off(vm)
	disk := w.disk(vm)
	w.noSecret(vm, disk)
	w.checkDisk(disk)
}

// TestArm64Installer installs from a disc on an arm64 machine. The installer is an arm64 program
// that uses the image's libraries.
func TestArm64Installer(t *testing.T) {
	nightly(t)
	p := need(t)
	needArm64(t)
	w := newWorldOf(t, p, 1)
	image, iso := filepath.Join(w.lab.Dir, "several.raw.zst"), filepath.Join(w.lab.Dir, "install.iso")
	w.must(w.bin, "build", "--arch", "arm64", w.severalDocument(), "--output", image)
	w.must(w.bin, "installer", image, "--iso", iso, "--site", w.site(0, lab.Site{NodeName: "arm1"}))
	vm := w.start(lab.VMConfig{Arch: "arm64", Name: "arm1", Image: w.blank("arm1.raw", 8<<30), Disk: 8 << 30, CD: iso})
	w.expect(vm, 0, `edgebake: INSTALLED several on /dev/vda, .*read back and verified`)
	w.waitOff(vm)
	if err := media.Verify(t.Context(), w.disk(vm), nil); err != nil {
		t.Error(err)
	}
	w.startsWithout(vm)
}

// needArm64 skips the test if this computer cannot build or boot arm64; in CI that is a failure.
func needArm64(t *testing.T) {
	t.Helper()
	var missing []string
	if exec.Command("arch-test", "arm64").Run() != nil {
		missing = append(missing, "qemu-user-static registered with the kernel, and arch-test")
	}
	for _, tool := range []string{"qemu-system-aarch64", "e2fsck", "fsck.fat", "sgdisk"} {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	if len(missing) > 0 {
		desk.Lacks(t, "arm64 needs %s (`test/deps/install.sh demo arm64` installs and registers them)", strings.Join(missing, ", "))
	}
}

// severalDocument writes the quickstart's Image for both architectures.
func (w *world) severalDocument() string {
	w.t.Helper()
	return w.documentFor("[amd64, arm64]", "several", "configs/examples/quickstart.yaml", "")
}

// documentFor writes a copy of the Image in the file like, with another architecture and name, and
// with the text more appended.
func (w *world) documentFor(arch, name, like, more string) string {
	w.t.Helper()
	layout := filepath.Join(w.lab.Dir, "images")
	w.must("go", "run", "./test/images", "-arch", "amd64,arm64", "-o", layout)
	doc, err := os.ReadFile(filepath.Join(w.root, like))
	if err != nil {
		w.t.Fatal(err)
	}
	text := regexp.MustCompile(`(?m)^name: .*$`).ReplaceAllString(string(doc), "name: "+name+"\narch: "+arch)
	text = regexp.MustCompile(`layout: .*/build/images`).ReplaceAllString(text, "layout: "+layout)
	file := filepath.Join(w.lab.Dir, name+".yaml")
	if err := os.WriteFile(file, []byte(text+more), 0o644); err != nil {
		w.t.Fatal(err)
	}
	return file
}

// TestArm64SecureBoot boots the arm64 image for real hardware under firmware that enforces Secure
// Boot.
func TestArm64SecureBoot(t *testing.T) {
	nightly(t)
	p := need(t)
	needArm64(t)
	w := newWorldOf(t, p, 1)
	w.secureBoot("arm64", w.documentFor("arm64", "generic", "test/e2e/testdata/generic.yaml", ""))
}

// TestArm64Edge checks an arm64 edge node: it joins through IPVS although the first of two masters
// is dead, becomes Ready through yurthub, and runs a baked container image.
func TestArm64Edge(t *testing.T) {
	nightly(t)
	p := need(t)
	needArm64(t)
	w := &edgeWorld{world: newWorldOf(t, p, 2)}
	w.openYurt(lab.Approve, lab.NodePools)
	hub := filepath.Join(w.lab.Dir, "yurthub")
	w.mustIn([]string{"GOARCH=arm64"}, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", hub, "./test/yurthub")
	document := w.documentFor("arm64", "edge", "configs/examples/quickstart.yaml",
		fmt.Sprintf("yurthub:\n  version: v1.7.0\n  binary: {file: %q}\n", hub))
	parts := *w.parts
	parts.golden = filepath.Join(w.lab.Dir, "edge.raw")
	w.parts = &parts
	w.must(w.bin, "build", document, "--output", w.golden)

	w.c.APIServers[0].Kill()
	vm := w.bootWith(lab.VMConfig{Arch: "arm64"}, 0, lab.Site{NodeName: "edge1", NodeType: "edge", NodePool: pool})
	w.ready(vm, nil)
	w.firstPost("edge1", "true", pool)
	w.makePod(vm, "hello")
	w.throughHub(vm)
	w.saysOnNode(vm, "uname -m; cat /proc/net/ip_vs", "aarch64", "TCP ")
	w.off(vm)
	disk := w.disk(vm)
	w.noSecret(vm, disk)
	w.hubCached(disk)
	w.checkDisk(disk)
}

// mustIn is like must, with additional environment variables.
func (w *world) mustIn(env []string, argv ...string) {
	w.t.Helper()
	cmd := exec.CommandContext(w.t.Context(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = w.root, append(append(os.Environ(), "CGO_ENABLED=0"), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
}

// checkGolden checks, with other programs, an image that has never been booted.
func (w *world) checkGolden(image, arch string) {
	w.t.Helper()
	// The root partition's type (Discoverable Partitions Specification), and the loader that
	// firmware starts.
	rootType, loader := "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709", "BOOTX64  EFI"
	if arch == "arm64" {
		rootType, loader = "B921B045-1DF0-41C3-AF44-4C6F280D3FAE", "BOOTAA64 EFI"
	}
	info, err := media.Inspect(image)
	if err != nil {
		w.t.Fatal(err)
	}
	if info.Image.Arch != arch {
		w.t.Errorf("the image is for %s, want %s", info.Image.Arch, arch)
	}
	w.oracle("No problems found", "sgdisk", "-v", image)
	w.oracle(rootType, "sgdisk", "-i", "3", image)
	for _, p := range info.Partitions {
		switch p.FS {
		case "ext4":
			w.oracle("", "e2fsck", "-fn", fmt.Sprintf("%s?offset=%d", image, p.Start))
		case "fat32", "fat16", "fat12":
			part := filepath.Join(w.lab.Dir, p.Label+".fat")
			cut(w.t, image, part, p.Start, p.Size)
			w.oracle("", "fsck.fat", "-n", part)
			if p.Label == ondisk.LabelESP {
				w.oracle(loader, "mdir", "-i", part, "::EFI/BOOT")
			}
			os.Remove(part)
		}
	}
}

// cut copies a range of a file to another file.
func cut(t *testing.T, from, to string, start, size int64) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if _, err := io.Copy(out, io.NewSectionReader(in, start, size)); err != nil {
		t.Fatal(err)
	}
}

// saysOnNode checks the output of a script on the node.
func (w *world) saysOnNode(vm *lab.VM, script string, wants ...string) {
	w.t.Helper()
	said := w.mustOnNode(vm, script)
	w.t.Logf("on the node:\n%s", said)
	for _, want := range wants {
		if !strings.Contains(said, want) {
			w.t.Errorf("the node's output lacks %q", want)
		}
	}
}
