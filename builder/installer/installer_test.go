package installer

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
)

// base returns a base from which an installer can be made.
func base(more ...buildtest.Entry) []buildtest.Entry {
	return append(buildtest.InstallableBase(), more...)
}

// image builds an image.
func image(t *testing.T, name string, base []buildtest.Entry) string {
	t.Helper()
	dir := t.TempDir()
	if err := buildtest.Write(dir, base, func(doc string) string {
		return doc + "kernel: {consoles: [ttyS1], args: [nomodeset, \"dyndbg=\\\"file a +p\\\"\"]}\n"
	}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "image.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := configs.ParseImages("image.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	img := parsed[0]
	cache, err := fetch.Open(filepath.Join(dir, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, name)
	if err := builder.BuildEach(t.Context(), []builder.Job{{Image: img, Options: builder.Options{Dir: dir, Cache: cache, Output: out}}}, func(int, *builder.Result) error { return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

const siteText = `apiVersion: edgebake.io/v1alpha1
kind: Site
nodeName: berlin-7
masters: ["10.0.0.1:6443"]
credentials: {token: abcdef.0123456789abcdef}
caCertHashes: ["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]
`

func site(t *testing.T) *media.Site {
	t.Helper()
	doc, err := configs.ParseSite("site.yaml", []byte(siteText))
	if err != nil {
		t.Fatal(err)
	}
	return &media.Site{Doc: doc}
}

func payload(t *testing.T, image string) *media.Payload {
	t.Helper()
	p, err := media.OpenPayload(image, site(t), media.StampOptions{Now: time.Now()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// TestStick checks a stick with independent programs. Its ESP must contain the image's boot loader,
// kernel and initrd, and the installer's files. Another partition must contain the image with its
// Site.
func TestStick(t *testing.T) {
	p := payload(t, image(t, "tiny.raw.zst", base()))
	if err := p.Verify(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, sector := range []int64{512, 4096} {
		stick := filepath.Join(dir, "stick.raw")
		o := Options{Payload: p, Program: []byte("the installer"),
			Install: ondisk.Install{ID: strings.Repeat("ab", 16), Disk: "smallest", Then: "poweroff"}}
		if err := Stick(t.Context(), stick, sector, o, func(int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		sum := disktest.Sum(t, stick)
		if sector == 512 {
			if out := disktest.Oracle(t, "sgdisk", "-v", stick); !strings.Contains(out, "No problems found") {
				t.Errorf("%s", out)
			}
		}
		parts := partitions(t, stick)
		disktest.Oracle(t, "fsck.fat", "-n", parts[ondisk.LabelESP])
		disktest.Oracle(t, "e2fsck", "-fn", parts[ondisk.LabelInstall])
		checkESP(t, parts[ondisk.LabelESP])
		checkImage(t, parts[ondisk.LabelInstall], p)
		if err := os.Remove(stick); err != nil {
			t.Fatal(err)
		}
		if err := Stick(t.Context(), stick, sector, o, func(int64, int64) {}); err != nil {
			t.Fatal(err)
		}
		if again := disktest.Sum(t, stick); again != sum {
			t.Errorf("the same installer has other bytes: %s, was %s", again, sum)
		}
		if err := os.Remove(stick); err != nil {
			t.Fatal(err)
		}
	}
}

// partitions copies each partition to a file, and returns label → file.
func partitions(t *testing.T, stick string) map[string]string {
	t.Helper()
	f, err := os.Open(stick)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	table, err := gpt.Read(f, fi.Size())
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range table.Partitions {
		to, err := os.Create(filepath.Join(t.TempDir(), "part"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(to, io.NewSectionReader(f, p.Start, p.Size)); err != nil {
			t.Fatal(err)
		}
		if out[p.Name] = to.Name(); p.Name == ondisk.LabelESP && p.Type != gpt.TypeESP {
			t.Errorf("the ESP has type %s", p.Type)
		}
		to.Close()
	}
	return out
}

func checkESP(t *testing.T, part string) {
	t.Helper()
	f, err := os.Open(part)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	esp, err := fat.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) []byte {
		b, err := esp.ReadFile(name)
		if err != nil {
			t.Error(err)
		}
		return b
	}
	for name, want := range map[string]string{"EFI/BOOT/BOOTX64.EFI": "MZ", espKernel: "kernel", espInitrd: "initrd"} {
		if b := read(name); string(b) != want {
			t.Errorf("%s is %q", name, b)
		}
	}
	entry := string(read(espEntry))
	for _, want := range []string{"linux /edgebake/linux\n", "initrd /edgebake/initrd\ninitrd /edgebake/installer.cpio\n",
		"options boot=edgebake panic=10 quiet loglevel=4 console=ttyS1 nomodeset dyndbg=\"file a +p\"\n"} {
		if !strings.Contains(entry, want) {
			t.Errorf("the boot entry has no %q:\n%s", want, entry)
		}
	}
	extra := read(espExtra)
	if bytes.Contains(extra, []byte("0123456789abcdef")) {
		t.Error("the token is in the initrd, which every user of the build computer may read")
	}
	files := unpack(t, extra)
	if string(files["edgebake/installer"]) != "the installer" || !bytes.Contains(files["scripts/edgebake"], []byte("mountroot()")) ||
		string(files["edgebake/modules/efivarfs.ko.xz"]) != "module" || files["edgebake/bin/lsblk"] == nil || files["edgebake/bin/wipefs"] == nil {
		t.Errorf("the archive has %d files", len(files))
	}
	var in ondisk.Install
	if err := json.Unmarshal(files["edgebake/install.json"], &in); err != nil || in.Disk != "smallest" || len(in.Golden) != 64 || len(in.Slot) != 64 || in.Need < 1<<30 || in.Sector != 512 || len(in.Partition) != 36 {
		t.Errorf("%+v %v", in, err)
	}
}

// unpack unpacks an archive with cpio, and returns path → content.
func unpack(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	if _, err := exec.LookPath("cpio"); err != nil {
		disktest.Oracle(t, "cpio", "--version")
	}
	dir := t.TempDir()
	cmd := exec.Command("cpio", "--extract", "--make-directories", "--no-absolute-filenames", "--quiet")
	cmd.Dir, cmd.Stdin = dir, bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	files := map[string][]byte{}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, _ := filepath.Rel(dir, p)
		files[name], err = os.ReadFile(p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// checkImage reads the image from the stick. Only its slot may differ from the build.
func checkImage(t *testing.T, part string, p *media.Payload) {
	t.Helper()
	f, err := os.Open(part)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fs, err := ext4.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	n, err := fs.Stat(ondisk.InstallImage)
	if err != nil || n.Mode&0o777 != 0o600 {
		t.Errorf("others may read the image, which has the token: %o %v", n.Mode, err)
	}
	b, err := fs.ReadFile(ondisk.InstallImage)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "image.raw.zst")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := media.ReadImageSlot(media.ImageSource{Name: file})
	if err != nil || !strings.Contains(string(s.Files[ondisk.SlotSite]), `nodeName: "berlin-7"`) || s.Info.Golden != p.Slot.Golden {
		t.Errorf("%+v %v", s, err)
	}
	if err := media.Verify(t.Context(), file, nil); err != nil {
		t.Error(err)
	}
}

// TestStickRefuses checks the errors for images from which no installer can be made.
func TestStickRefuses(t *testing.T) {
	without := func(name string) []buildtest.Entry {
		return slices.DeleteFunc(base(), func(e buildtest.Entry) bool { return strings.HasSuffix(e.Name, name) })
	}
	for _, c := range []struct {
		base []buildtest.Entry
		want string
	}{
		{without("initramfs-tools/init"), "the image's initrd is not from initramfs-tools"},
		{without("bin/lsblk"), "add the package util-linux"},
		{without("bin/wipefs"), "add the package util-linux"},
		{buildtest.Base(), "the image's initrd is not from initramfs-tools"},
	} {
		o := Options{Payload: payload(t, image(t, "tiny.raw.zst", c.base))}
		err := Stick(t.Context(), filepath.Join(t.TempDir(), "stick"), 512, o, func(int64, int64) {})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
}

// TestPayloadVerify checks that making an installer finds a damaged image.
func TestPayloadVerify(t *testing.T) {
	file := image(t, "tiny.raw.zst", base())
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p := payload(t, file)
	z, err := seekable.Open(f, p.Size())
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	e := z.Entry(z.Find(disk.Align)) // a frame of the ESP
	if _, err := f.WriteAt([]byte{0xff, 0xff, 0xff}, e.Offset+e.Compressed/2); err != nil {
		t.Fatal(err)
	}
	if err := p.Verify(t.Context(), nil); err == nil {
		t.Error("no error for the damaged image")
	}
}

// TestProgram checks that the result for lsblk contains its shared libraries, also through links.
func TestProgram(t *testing.T) {
	const lsblk = "/usr/bin/lsblk"
	b, err := os.ReadFile(lsblk)
	if err != nil {
		disktest.Oracle(t, "lsblk", "--version")
	}
	var libs []buildtest.Entry
	seen := map[string]bool{}
	out := disktest.Oracle(t, "ldd", lsblk)
	for line := range strings.Lines(out) {
		name, at, ok := strings.Cut(strings.TrimSpace(line), " => ")
		if !ok && strings.HasPrefix(name, "/lib64/ld-linux") {
			at, _, _ = strings.Cut(name, " ")
			name = filepath.Base(at)
		}
		at, _, _ = strings.Cut(at, " ")
		if at == "" || seen[name] {
			continue
		}
		seen[name] = true
		body, err := os.ReadFile(at)
		if err != nil {
			t.Fatal(err)
		}
		dir := "./usr/lib/x86_64-linux-gnu/"
		libs = append(libs, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: dir + name + ".9.9", Mode: 0o755}, Body: string(body)},
			buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: dir + name, Linkname: name + ".9.9", Mode: 0o777}})
	}
	all := slices.DeleteFunc(base(libs...), func(e buildtest.Entry) bool { return strings.HasSuffix(e.Name, "bin/lsblk") })
	all = append(all, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./usr/bin/lsblk", Mode: 0o755}, Body: string(b)})
	o := Options{Payload: payload(t, image(t, "tiny.raw.zst", all))}
	files, err := o.files(ondisk.Install{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	got := 0
	for name, m := range files {
		if rest, ok := strings.CutPrefix(name, "edgebake/lib/"); ok {
			got++
			if err := os.WriteFile(filepath.Join(dir, rest), m.data, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got < len(seen) {
		t.Errorf("%d libraries of %v", got, seen)
	}
	cmd := exec.Command(lsblk, "--version")
	cmd.Env = []string{"LD_LIBRARY_PATH=" + dir}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestOptions checks that quoted words of a kernel command line stay together.
func TestOptions(t *testing.T) {
	got := options(`root=PARTUUID=1 rootfstype=ext4 rootflags=noatime rw rootwait systemd.mount-extra=a:/b:c fsck.mode=auto panic=10 x="a root=b" quiet console=tty0 resume=/dev/x`)
	if want := `boot=edgebake panic=10 x="a root=b" quiet console=tty0`; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}
