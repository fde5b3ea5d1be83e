package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/fat"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

// program makes a source tree in which one of our programs is a small one.
func (c *cli) program(name string) {
	c.t.Helper()
	if err := os.MkdirAll(filepath.Join(c.dir, "cmd", name), 0o755); err != nil {
		c.t.Fatal(err)
	}
	c.file("go.mod", "module github.com/edgebake/edgebake\n\ngo 1.24\n")
	c.file("cmd/"+name+"/main.go", "package main\n\nfunc main() {}\n")
}

// installable is a directory of which an installer can be made.
func installable(t *testing.T) *cli {
	t.Helper()
	c := newCLI(t)
	if err := buildtest.Write(c.dir, buildtest.InstallableBase(), nil); err != nil {
		t.Fatal(err)
	}
	c.program("installer")
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst")
	c.disk("stick", 1<<30)
	return c
}

// TestFlashInstaller asks, makes a stick, and writes it verified.
func TestFlashInstaller(t *testing.T) {
	c := installable(t)
	c.runIn(t.Context(), "no\n", 1, "flash", "tiny.raw.zst", "--installer", "stick", "--site", "site.yaml")
	c.want(c.err, "stick, 1.0 GiB", "It gets an installer of tiny.raw.zst (tiny, Kubernetes v1.36.3) and site.yaml", "nothing was written", "--yes")
	image, err := os.ReadFile("tiny.raw.zst")
	if err != nil {
		t.Fatal(err)
	}
	clear(image[len(image)-64<<10:][:16<<10]) // behind the slot, before the table of the frames
	c.file("damaged.raw.zst", string(image))
	c.run(1, "installer", "damaged.raw.zst", "--netboot", "www", "--url", "http://10.0.0.1/edge")
	c.want(c.err, "verifying image damaged.raw.zst: ", "it is damaged or cut short: copy or build it again")
	c.run(1, "installer", "damaged.raw.zst", "--netboot", "stick/www", "--url", "http://10.0.0.1/edge")
	c.want(c.err, "making directory stick/www: there is a file of that name: name another directory")
	if err := os.Mkdir("old", 0o755); err != nil {
		t.Fatal(err)
	}
	c.run(1, "installer", "damaged.raw.zst", "--netboot", "old/new/www", "--url", "http://10.0.0.1/edge")
	c.there("old")
	c.notThere("www", "old/new")
	if b, err := exec.Command("head", "-c", "8", "stick").Output(); err != nil || string(b) != "old data" {
		t.Errorf("the stick has %q, %v", b, err)
	}
	c.runIn(t.Context(), "n\n", 1, "flash", "tiny.raw.zst", "--installer", "stick", "--site", "site.yaml")
	if warned, asked := strings.Index(c.err, "WARNING: tiny.raw.zst: its kernel"), strings.Index(c.err, "Write it?"); warned < 0 || warned > asked {
		t.Errorf("the stick that will not work is told too late:\n%s", c.err)
	}
	c.run(0, "flash", "tiny.raw.zst", "--installer", "stick", "--site", "site.yaml", "--yes", "--disk", "smallest-nvme", "--then", "reboot")
	c.want(c.out, "stick installs tiny.raw.zst (tiny, Kubernetes v1.36.3) and site.yaml: on disk smallest-nvme, then reboot", "read back and verified")
	c.want(c.err, "installer: compiling", "make: ", "write: ", "verify: ", "has no driver for USB sticks", "hardware: generic")
	if strings.Count(c.err, "no driver for USB") != 1 {
		t.Error(c.err)
	}
	if fi, err := os.Stat("stick"); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file with the token: %v %v", fi.Mode(), err)
	}
	guid := func() string {
		f, err := os.Open("stick")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		table, err := gpt.Read(f, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		if len(table.Partitions) != 2 || table.Partitions[1].Name != ondisk.LabelInstall || table.Size != 1<<30 {
			t.Errorf("%+v", table)
		}
		return table.GUID
	}
	first := guid()
	c.run(0, "flash", "tiny.raw.zst", "--installer", "stick", "--yes")
	c.want(c.err, "It has no Site")
	c.want(c.out, "(no Site): on disk only, then poweroff")
	if guid() == first {
		t.Error("two installers have one id: the second would take the first's work for its own")
	}
	c.run(1, "inspect", "stick")
	c.want(c.err, "not an edgebake image: it is an installer (edgebake flash --installer), which carries one: boot a machine from it, or name the image that it was made of")
}

// TestInstallerISO makes one that xorriso reads, with the Site in the image.
func TestInstallerISO(t *testing.T) {
	desk.NeedProgram(t, "xorriso", "xorriso")
	c := installable(t)
	for _, tc := range []struct {
		code int
		args string
		want []string
	}{
		{2, "installer tiny.raw.zst", []string{"--iso FILE"}},
		{2, "installer tiny.raw.zst --iso i.iso --disk x --then y", []string{"unknown term", "want poweroff or reboot"}},
		{1, "installer tiny.raw.zst --iso none/i.iso", []string{"none"}},
		{1, "installer tiny.raw.zst --iso site.yaml", []string{"site.yaml exists; --force replaces it"}},
		{1, "installer tiny.raw.zst --iso tiny.raw.zst --force", []string{"tiny.raw.zst is the image itself"}},
	} {
		c.run(tc.code, strings.Fields(tc.args)...)
		c.want(c.err, tc.want...)
	}
	c.run(0, "installer", "tiny.raw.zst", "--iso", "i.iso", "--site", "site.yaml")
	c.want(c.out, "i.iso installs tiny.raw.zst (tiny, Kubernetes v1.36.3) and site.yaml: on disk only, then poweroff")
	if fi, err := os.Stat("i.iso"); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file with the token: %v %v", fi.Mode(), err)
	}
	out, err := exec.Command("xorriso", "-indev", "i.iso", "-osirrox", "on", "-report_el_torito", "plain", "-extract", "/image.raw.zst", "out.raw.zst").CombinedOutput()
	if err != nil || !regexp.MustCompile(`El Torito boot img :\s+1\s+UEFI\s+y\s+none`).Match(out) {
		t.Errorf("%v\n%s", err, out)
	}
	checkElTorito(t, "i.iso")
	c.run(1, "inspect", "i.iso")
	c.want(c.err, "not an edgebake image: it is an installer (edgebake installer --iso), which carries one: boot a machine from it, or name the image that it was made of")
	c.run(0, "inspect", "out.raw.zst", "--verify")
	c.want(c.out, "berlin-7", "(verified)")
	c.run(1, "installer", "tiny.raw.zst", "--iso", "i.iso")
	c.want(c.err, "--force")
}

// TestInstallerWithoutRoom: a directory that is too small is named, with the fix, and
// nothing is left in it.
func TestInstallerWithoutRoom(t *testing.T) {
	desk.NeedProgram(t, "xorriso", "xorriso")
	desk.NeedRoot(t, "it mounts a small tmpfs")
	c := installable(t)
	if err := os.Mkdir("small", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", "small", "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount("small", 0) })
	for _, args := range []string{"--iso small/i.iso", "--netboot small --url http://10.0.0.1/edge"} {
		c.run(1, append([]string{"installer", "tiny.raw.zst", "--site", "site.yaml"}, strings.Fields(args)...)...)
		c.want(c.err, "no space left on device: directory small has 1 MiB free, too little for the installer of at least", "make room or write elsewhere")
		if left, err := os.ReadDir("small"); len(left) > 0 || err != nil || strings.Contains(c.err, "TMPDIR") {
			t.Errorf("%s: %v %v\n%s", args, left, err, c.err)
		}
	}
	if err := syscall.Mount("tmpfs", "small", "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	c.run(1, "installer", "tiny.raw.zst", "--site", "site.yaml", "--netboot", "small/www", "--url", "http://10.0.0.1/edge")
	c.want(c.err, "making directory small/www: read-only file system: directory small cannot be written by this user; write elsewhere")
}

// TestFailureLeavesNoDirectory: what was to hold the files of a command that fails is
// not left behind.
func TestFailureLeavesNoDirectory(t *testing.T) {
	desk.NeedRoot(t, "it mounts a small tmpfs")
	c := newCLI(t)
	c.file("site.yaml", site)
	c.file("office.key", plainKey)
	c.file("cluster.yaml", strings.Replace(clusterDocument, "manifests: [cni.yaml]\n", "", 1))
	c.run(0, "cluster", "new", "cluster.yaml", "--output", "minted")
	c.run(2, "cluster", "listen", "--dir", "here/reports", "--name", "bücher.example.com")
	c.notThere("here")
	if err := os.Mkdir("small", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", "small", "tmpfs", 0, "size=4k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount("small", 0) })
	c.file("small/full", strings.Repeat("x", 4<<10))
	for _, args := range []string{
		"init --dir small/a/b", "site sign site.yaml --key office.key --output small/a/b",
		"cluster sites minted --output small/a/b", "cluster new cluster.yaml --output small/a/b",
		"cluster listen --dir small/a/b --name 127.0.0.1 --listen 127.0.0.1:0 --page 127.0.0.1:0",
	} {
		c.run(1, strings.Fields(args)...)
		c.want(c.err, "no space left on device")
		c.notThere("small/a")
	}
}

// checkElTorito finds the EFI system partition as firmware does: where El Torito
// gives no size, it reaches to the end of the volume, so it must be in it.
func checkElTorito(t *testing.T, iso string) {
	t.Helper()
	f, err := os.Open(iso)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const block = 2048
	read := func(at uint32) []byte {
		b := make([]byte, block)
		if _, err := f.ReadAt(b, int64(at)*block); err != nil {
			t.Fatal(err)
		}
		return b
	}
	le := binary.LittleEndian
	volume := le.Uint32(read(16)[80:])
	catalog := read(le.Uint32(read(17)[71:]))
	at, count := le.Uint32(catalog[40:]), le.Uint16(catalog[38:])
	esp, err := fat.Open(io.NewSectionReader(f, int64(at)*block, 1<<40))
	if err != nil {
		t.Fatal(err)
	}
	if end := int64(at)*block + esp.Size(); count == 0 && end > int64(volume)*block {
		t.Errorf("the EFI system partition ends at %d, the volume at %d: firmware does not find it", end, int64(volume)*block)
	}
	if _, err := esp.ReadFile("EFI/BOOT/BOOTX64.EFI"); err != nil {
		t.Error(err)
	}
	// A stick with it boots by the table.
	want := regexp.MustCompile(fmt.Sprintf(`(?m)^ +\d+ +%d +\d+ .* EF00 `, int64(at)*block/512))
	if out := disktest.Oracle(t, "sgdisk", "-p", iso); !want.MatchString(out) {
		t.Errorf("no EFI system partition at %d:\n%s", int64(at)*block/512, out)
	}
}

// TestInstallerNetboot makes what firmware fetches, without any secret, and the
// image with the Site beside it.
func TestInstallerNetboot(t *testing.T) {
	c := installable(t)
	for _, tc := range []struct{ args, want string }{
		{"--netboot www", "--netboot DIR and --url URL go together"},
		{"--netboot www --iso i.iso --url http://10.0.0.1/", "cannot be given together"},
		{"--netboot www --url 10.0.0.1/edge", "want the address of a directory"},
		{"--netboot www --url ftp://10.0.0.1/edge", "want the address of a directory"},
		{"--netboot www --url http://10.0.0.1/edge?x=1", "want the address of a directory"},
		{"--netboot www --url http://me:hush@10.0.0.1/edge", "--url has a user name"},
	} {
		c.run(2, append([]string{"installer", "tiny.raw.zst"}, strings.Fields(tc.args)...)...)
		c.want(c.err, tc.want)
	}
	c.run(0, "installer", "tiny.raw.zst", "--netboot", "www", "--url", "http://10.0.0.1/edge/", "--site", "site.yaml")
	c.want(c.out, "www/boot.img installs tiny.raw.zst")
	c.want(c.err, "Only you may read www/image.raw.zst")
	boot, err := os.ReadFile("www/boot.img")
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{"abcdef.0123456789abcdef": false, `"url": "http://10.0.0.1/edge/image.raw.zst"`: true, "boot=edgebake panic=10": true, " ip=dhcp": true} {
		if strings.Contains(string(boot), text) != want {
			t.Errorf("boot.img has %q: %v", text, !want)
		}
	}
	c.file("none", strings.Repeat("\x00", 1<<20))
	for _, args := range []string{"inspect www/boot.img", "stamp www/boot.img site.yaml", "flash www/boot.img none --yes", "boot www/boot.img", "verify www/boot.img", "installer www/boot.img --iso i.iso"} {
		c.run(1, strings.Fields(args)...)
		c.want(c.err, "www/boot.img: not an edgebake image: it is the boot disk of an installer (edgebake installer --netboot), which firmware fetches: name the image.raw.zst beside it")
	}
	c.run(0, "inspect", "www/image.raw.zst", "--verify")
	c.want(c.out, "berlin-7", "(verified)")
	c.run(1, "installer", "tiny.raw.zst", "--netboot", "www", "--url", "http://10.0.0.1/edge/")
	c.want(c.err, "www/boot.img exists; --force replaces it", "www/image.raw.zst exists")
	c.run(0, "installer", "tiny.raw.zst", "--netboot", "www", "--url", "http://10.0.0.1/edge/", "--force")
	if left, err := os.ReadDir("www"); err != nil || len(left) != 2 {
		t.Errorf("%v %v", left, err)
	}
}

// TestFlashInstallerRefuses names every problem, and writes nothing.
func TestFlashInstallerRefuses(t *testing.T) {
	c := installable(t)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	c.disk("small", 1<<20)
	c.file("bad.yaml", "apiVersion: edgebake.io/v1alpha1\nkind: Site\n")
	c.run(0, "build", "image.yaml", "--output", "tiny.raw", "--force")
	for _, tc := range []struct {
		code int
		args string
		want []string
	}{
		{2, "flash tiny.raw.zst --disk smallest stick", []string{"--disk is for --installer"}},
		{2, "flash tiny.raw.zst disk --installer stick", []string{"give either the disk disk or --installer stick"}},
		{2, "flash tiny.raw.zst --installer stick --disk biggest --then sleep", []string{`unknown term "biggest"`, `--then "sleep": want poweroff or reboot`}},
		{2, "flash tiny.raw.zst --installer stick --log log", []string{"--log is for disks, not for --installer"}},
		{2, "flash tiny.raw.zst --installer stick --site -", []string{"add --yes"}},
		{1, "flash tiny.raw.zst --installer none --site bad.yaml --yes", []string{"flashing none: ", "masters", "credentials"}},
		{1, "flash tiny.raw.zst --installer tiny.raw.zst --yes", []string{"it is the image itself"}},
		{1, "flash tiny.raw --installer stick --yes", []string{"not compressed", ".raw.zst"}},
		{1, "flash site.yaml --installer stick --yes", []string{"not an edgebake image"}},
		{1, "flash tiny.raw.zst --installer small --yes", []string{"it has 1 MiB and the installer needs", "take a larger one"}},
		{1, "flash tiny.raw.zst --installer stick --inventory site.yaml --yes", []string{"is a Site: name it with --site"}},
	} {
		c.run(tc.code, strings.Fields(tc.args)...)
		c.want(c.err, tc.want...)
	}
	c.run(2, "installer", "tiny.raw.zst", "--netboot", "www", "--url", "ftp://10.0.0.1/edge", "--then", "sleep", "--disk", "size>=100X,model=")
	if want := `edgebake: --disk: rule "size>=100X,model=": size>=100X: "100X" is not a size, e.g. 100G or 64Gi
edgebake: --disk: rule "size>=100X,model=": model= is not a pattern, e.g. model=Samsung*
edgebake: --then "sleep": want poweroff or reboot
edgebake: --url ftp://10.0.0.1/edge: want the address of a directory, e.g. http://10.0.0.1/edge
`; c.err != want {
		t.Errorf("%s\nwant\n%s", c.err, want)
	}
	if b, err := exec.Command("head", "-c", "8", "stick").Output(); err != nil || string(b) != "old data" {
		t.Errorf("the stick has %q, %v", b, err)
	}
	left, err := filepath.Glob(filepath.Join(tmp, "edgebake-installer-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	// Without the source tree, and beside no other program, it says what is missing.
	if err := os.Remove("go.mod"); err != nil {
		t.Fatal(err)
	}
	c.run(1, "flash", "tiny.raw.zst", "--installer", "stick", "--yes")
	c.want(c.err, fmt.Sprintf("there is no installer-linux-%s beside edgebake", "amd64"), "put it there")
}
