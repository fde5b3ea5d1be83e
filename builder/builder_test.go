package builder

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"

	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/dpkg"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/klauspost/compress/zstd"
	spdxjson "github.com/spdx/tools-golang/json"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "rewrite golden files")

// project is an Image document with the files that its build needs.
type project struct {
	dir   string
	cache *fetch.Cache
}

func newProject(t *testing.T, base []buildtest.Entry, edit func(string) string) *project {
	t.Helper()
	return projectBy(t, buildtest.Write, base, edit)
}

// projectBy makes a project whose files come from the function write.
func projectBy(t *testing.T, write func(dir string, base []buildtest.Entry, edit func(string) string) error, base []buildtest.Entry, edit func(string) string) *project {
	t.Helper()
	p := &project{dir: t.TempDir()}
	if err := write(p.dir, base, edit); err != nil {
		t.Fatal(err)
	}
	var err error
	if p.cache, err = fetch.Open(filepath.Join(t.TempDir(), "cache")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cache.Close() })
	return p
}

func (p *project) image(t *testing.T) *configs.Image {
	t.Helper()
	name := filepath.Join(p.dir, "image.yaml")
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := configs.ParseImages("image.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	return parsed[0]
}

func (p *project) options(out string) Options {
	return Options{Dir: p.dir, Cache: p.cache, Version: "test", Output: out}
}

func (p *project) build(t *testing.T, out string) (*Result, error) {
	t.Helper()
	return Build(t.Context(), p.image(t), p.options(out))
}

func TestPlanGolden(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	pl, err := Resolve(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	// A change to any rendered file changes this digest. The tests of package overlays show which
	// file changed.
	if len(pl.Rendered) != 64 {
		t.Errorf("rendered: %q", pl.Rendered)
	}
	pl.Rendered = "rendered"
	got, err := pl.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(got, []byte(p.dir)) {
		t.Error("the plan holds a path of this machine")
	}
	golden := filepath.Join("testdata", "plan.json")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the plan is not testdata/plan.json (go test -update rewrites it):\n%s", got)
	}
}

// TestVersionDecidesNothing checks that edgebake's own version does not change the image.
func TestVersionDecidesNothing(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	var golden, plans []string
	for _, v := range []string{"(devel)", "0.0.0-20260101000000-0123456789ab+dirty", "1.2.3"} {
		o := p.options(filepath.Join(t.TempDir(), "tiny.raw"))
		o.Version = v
		res, err := Build(t.Context(), p.image(t), o)
		if err != nil {
			t.Fatal(err)
		}
		if res.Report.Builder != v {
			t.Errorf("report.Builder is %q", res.Report.Builder)
		}
		golden, plans = append(golden, res.Report.Golden), append(plans, res.Report.Plan)
	}
	if len(slices.Compact(golden)) != 1 || len(slices.Compact(plans)) != 1 {
		t.Errorf("golden digests %q of plans %q", golden, plans)
	}
}

func TestBuild(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	out := filepath.Join(t.TempDir(), "tiny.raw")
	res, err := p.build(t, out)
	if err != nil {
		t.Fatal(err)
	}
	info, err := media.Inspect(out)
	if err != nil {
		t.Fatal(err)
	}
	if info.Image.Plan != res.Report.Plan || info.Slot.Golden != res.Report.Golden || info.Slot.State != media.SlotGolden {
		t.Errorf("image and report differ: %+v", info.Slot)
	}
	if info.Image.Kernel != buildtest.Kernel || len(info.Image.Images) != 1 || !slices.Equal(info.Image.SiteFields, configs.SiteFields()) {
		t.Errorf("image.json: %+v", info.Image)
	}
	if err := media.Verify(t.Context(), out, nil); err != nil {
		t.Error(err)
	}
	for _, part := range res.Report.Partitions {
		switch part.Label {
		case ondisk.LabelRootA:
			if part.Free < minRootHead {
				t.Errorf("ROOT-A has %d bytes free, want at least %d", part.Free, minRootHead)
			}
			if part.Room != part.FSSize+256<<20 || part.Size <= part.Room {
				t.Errorf("ROOT-A has no room to grow: %+v", part)
			}
		case ondisk.LabelData:
			if part.Free < minDataHead {
				t.Errorf("DATA has %d bytes free, want at least %d", part.Free, minDataHead)
			}
		}
	}
	doc, err := spdxjson.Read(bytes.NewReader(res.SBOM))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, pkg := range doc.Packages {
		names = append(names, pkg.PackageName+" "+pkg.PackageVersion)
	}
	for _, want := range []string{"systemd 257.1-1+b2", "kubelet ", "edgebake.test/pause:1 " + info.Image.Images[0].Digest} {
		if !slices.Contains(names, want) {
			t.Errorf("the SBOM lacks %q: %q", want, names)
		}
	}
	if slices.Contains(names, "gone 1") {
		t.Error("the SBOM has a package that was removed")
	}
}

// TestRoomOfMachinesInTheField checks that the build warns if the root file system is larger than
// the root partitions of machines in the field.
func TestRoomOfMachinesInTheField(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	dir := t.TempDir()
	var warned []string
	build := func(room int64) *Report {
		t.Helper()
		o := p.options(filepath.Join(dir, "x.raw"))
		o.Force, o.RootRoom = true, room
		o.Events = func(e Event) {
			if e.State == StateWarning && strings.Contains(e.Text, "space for") {
				warned = append(warned, e.Text)
			}
		}
		res, err := Build(t.Context(), p.image(t), o)
		if err != nil {
			t.Fatal(err)
		}
		return res.Report
	}
	r := build(0)
	root := r.Partitions[2].FSSize
	if build(root); len(warned) > 0 {
		t.Errorf("unexpected warning for a root of %d bytes: %q", root, warned)
	}
	if build(root - 1<<20); len(warned) != 1 || !strings.Contains(warned[0], fmt.Sprintf("%d MiB", root>>20)) {
		t.Errorf("no warning for a root of %d bytes: %q", root, warned)
	}
	lock := &plan.Lock{}
	for _, room := range []int64{0, 700, 800, 600} {
		lock.NarrowRoom(room)
	}
	if lock.RootRoom != 600 {
		t.Errorf("rootRoom in the lock is %d", lock.RootRoom)
	}
}

// TestPlannedRoom checks that a root size in the Image also limits updates, and that a disk without
// a second root has no limit.
func TestPlannedRoom(t *testing.T) {
	for name, test := range map[string]struct {
		disk configs.Disk
		grow bool
		n    int
	}{
		"computed":    {configs.Disk{Reserve: "same"}, true, 5},
		"chosen":      {configs.Disk{Reserve: "same", Root: "2GiB"}, false, 5},
		"one of them": {configs.Disk{Reserve: "none"}, false, 4},
	} {
		parts, err := partitions(&configs.Image{Disk: test.disk})
		if err != nil || len(parts) != test.n {
			t.Fatalf("%s: %v %v", name, parts, err)
		}
		if root := parts[2]; (root.Grow != nil) != test.grow || !root.HashTree {
			t.Errorf("%s: %+v", name, root)
		}
		if data := parts[len(parts)-1]; data.Label != ondisk.LabelData || data.Gap != luksGap {
			t.Errorf("%s: %+v", name, data)
		}
	}
	grow := plan.Grow{Percent: 50, AtLeast: 256 << 20}
	if grow.Of(100<<20) != 256<<20 || grow.Of(2<<30) != 1<<30 || (*plan.Grow)(nil).Of(1) != 0 {
		t.Error("Grow.Of is not half the content or 256 MiB, whichever is larger")
	}
}

// TestTree lists the merged tree, read with the code that writes it to the disk.
func TestTree(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	b := start(t, p.image(t), p.options(""))
	id, err := b.plan.ID()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.makeInputs(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := b.compose(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range c.merged {
		got = append(got, fmt.Sprintf("%s %o %d:%d", n.Path, n.Mode, n.UID, n.GID))
	}
	for _, want := range []string{
		"usr/bin/kubelet 100755 0:0",
		"usr/lib/firmware/blob 100644 0:0", // the overlay has lib/firmware/blob, and lib is a link to usr/lib in the base
		"usr/local/bin/tool 100755 0:0",
		"tmp 41777 0:0", // an overlay has files in tmp, but does not change its mode
		"opt/site/notes 100600 0:0",
		"usr/bin/su 104755 0:0",
		"etc/machine-id 100444 0:0",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("the tree lacks %s", want)
		}
	}
	for _, n := range c.merged {
		switch n.Path {
		case "etc/machine-id":
			if n.Data.Size != 0 {
				t.Error("the machine-id is not empty")
			}
		case "etc/motd":
			if string(n.Data.Inline) != "tiny on amd64\n" {
				t.Errorf("etc/motd is %q", n.Data.Inline)
			}
		case "etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub", "var/lib/systemd/random-seed", "var/lib/dbus/machine-id",
			"var/log/dpkg.log", "var/cache/apt/pkgcache.bin", "etc/passwd-":
			t.Errorf("%s is still there", n.Path)
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	without := func(name string) []buildtest.Entry {
		return slices.DeleteFunc(buildtest.Base(), func(e buildtest.Entry) bool { return strings.HasPrefix(e.Name, "./"+name) })
	}
	with := func(name, body string) []buildtest.Entry {
		return append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, Body: body})
	}
	same := func(s string) string { return s }
	replace := func(old, new string) func(string) string {
		return func(s string) string { return strings.Replace(s, old, new, 1) }
	}
	tests := []struct {
		name string
		base []buildtest.Entry
		edit func(string) string
		prep func(dir string) error
		want []string
	}{
		{name: "no kernel", base: without("boot/vmlinuz"), want: []string{"the base has no kernel"}},
		{name: "two kernels", base: with("boot/vmlinuz-6.13", ""), want: []string{"several kernels"}},
		{name: "no systemd, no initrd, no modules", base: slices.DeleteFunc(without("usr/lib/systemd/systemd"), func(e buildtest.Entry) bool {
			return strings.Contains(e.Name, "initrd") || strings.Contains(e.Name, "modules")
		}), want: []string{"the base has no systemd", "no initrd for it", "but not its modules"}},
		{name: "an old systemd", base: with("usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-252.so", ""), want: []string{"the base has systemd 252", "254 or later"}},
		{name: "a program that is none", base: with("usr/local/bin/yurthub", "<html>not found</html>"), want: []string{"usr/local/bin/yurthub is not a program for Linux"}},
		{name: "another architecture", base: with("usr/bin/arm", buildtest.ELF(elf.EM_AARCH64)), want: []string{"usr/bin/arm is for arm64, but the image is for amd64"}},
		{name: "up and out", base: with("../x", ""), want: []string{"base.tar: ../x", "path leads out of the tree"}},
		{name: "twice", base: with("usr/bin/su", ""), want: []string{"usr/bin/su: path occurs twice"}},
		{name: "loop", base: append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "opt", Linkname: "opt"}}), want: []string{"opt/site/notes: symbolic links loop"}},
		{name: "identities of the user", prep: func(dir string) error {
			for _, f := range []string{"etc/machine-id", "etc/ssh/ssh_host_rsa_key", "var/lib/systemd/random-seed"} {
				p := filepath.Join(dir, "overlay", f)
				os.MkdirAll(filepath.Dir(p), 0o755)
				if err := os.WriteFile(p, []byte("mine"), 0o600); err != nil {
					return err
				}
			}
			return nil
		}, edit: replace("- dir: overlay", "- dir: overlay\n    replace: true"), want: []string{
			"etc/machine-id identifies a single machine", "ssh_host_rsa_key identifies a single machine", "random-seed identifies a single machine"}},
		{name: "conflict", prep: func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "overlay/usr/local/bin/kubelet"), nil, 0o644)
		}, edit: replace("path: /etc/motd", "path: /usr/bin/kubelet"), want: []string{"files[0].path: usr/bin/kubelet: layer kubelet already has it"}},
		{name: "missing inputs, all of them", prep: func(dir string) error {
			return errorsJoin(os.Remove(filepath.Join(dir, "programs/kubelet")), os.Remove(filepath.Join(dir, "programs/firstboot")),
				os.Remove(filepath.Join(dir, "notes.txt")), os.RemoveAll(filepath.Join(dir, "overlay")), os.Remove(filepath.Join(dir, "base.tar")))
		}, want: []string{"programs/kubelet", "agents.firstboot", "files[1].source", "overlays[0].dir: ", "base.tar:"}},
		{name: "wrong digest", edit: replace("file: base.tar", "file: base.tar\n    sha256: "+strings.Repeat("ab", 32)), want: []string{"base.tar:", "expected " + strings.Repeat("ab", 32)}},
		{name: "archive truncated", prep: func(dir string) error {
			return os.Truncate(filepath.Join(dir, "base.tar"), 5000)
		}, want: []string{"base.tar: the tar is truncated after ./"}},
		{name: "archive is something else", prep: func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "base.tar"), bytes.Repeat([]byte("no tar "), 1000), 0o644)
		}, want: []string{"base.tar: not a tar archive"}},
		{name: "an attribute that no ext4 holds", base: func() []buildtest.Entry {
			return append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Name: "usr/bin/heavy", Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.user.x": strings.Repeat("v", 5000)}}})
		}(), want: []string{"base.tar: usr/bin/heavy: extended attributes need"}},
		{name: "attributes and times, on both file systems", base: func() []buildtest.Entry {
			heavy := map[string]string{"SCHILY.xattr.user.x": strings.Repeat("v", 5000)}
			return append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Name: "var/lib/heavy", PAXRecords: heavy}},
				buildtest.Entry{Header: tar.Header{Name: "usr/bin/late", ModTime: time.Date(2500, 1, 1, 0, 0, 0, 0, time.UTC)}})
		}(), want: []string{"base.tar: usr/bin/late: modification time", "base.tar: lib/heavy: extended attributes need"}},
		{name: "capabilities that are none", base: func() []buildtest.Entry {
			return append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Name: "usr/bin/ping", PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}}})
		}(), want: []string{"base.tar: usr/bin/ping: file capabilities of 1 bytes"}},
		{name: "disk too small", edit: func(s string) string { return s + "disk: {root: 64MiB}\n" }, want: []string{"disk.root: 64MiB is too small"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.base == nil {
				tt.base = buildtest.Base()
			}
			if tt.edit == nil {
				tt.edit = same
			}
			p := newProject(t, tt.base, tt.edit)
			if tt.prep != nil {
				if err := tt.prep(p.dir); err != nil {
					t.Fatal(err)
				}
			}
			outDir := t.TempDir()
			_, err := p.build(t, filepath.Join(outDir, "tiny.raw"))
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q:\n%v", want, err)
				}
			}
			if left, _ := os.ReadDir(outDir); len(left) > 0 {
				t.Errorf("a failed build left %v", left)
			}
		})
	}
}

func errorsJoin(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestOutput(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	dir := t.TempDir()
	there := filepath.Join(dir, "there.raw")
	if err := os.WriteFile(there, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	for out, want := range map[string]string{
		there:                               "exists; --force replaces it",
		filepath.Join(dir, "x.img"):         "must end in .raw or .raw.zst",
		filepath.Join(dir, "none", "x.raw"): "make directory " + filepath.Join(dir, "none") + " first",
		"":                                  "no output is named",
	} {
		if err := CheckOutput(out, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", out, err, want)
		}
	}
	if _, err := p.build(t, there); err == nil {
		t.Error("an existing file was replaced without --force")
	}
	if b, err := os.ReadFile(there); err != nil || string(b) != "mine" {
		t.Errorf("the existing file is now %q, %v", b, err)
	}
	o := p.options(there)
	o.Force = true
	if _, err := Build(t.Context(), p.image(t), o); err != nil {
		t.Fatal(err)
	}
	if _, err := media.Inspect(there); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	o.Output = filepath.Join(dir, "cancelled.raw")
	o.Events = func(e Event) {
		if e.Step == "write" {
			cancel()
		}
	}
	if _, err := Build(ctx, p.image(t), o); err == nil {
		t.Error("a cancelled build succeeded")
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("a cancelled build left %v (%v)", left, err)
	}
}

func TestLock(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	out := filepath.Join(t.TempDir(), "tiny.raw")
	res, err := p.build(t, out)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := res.Plan.Lock().Encode()
	if err != nil {
		t.Fatal(err)
	}
	lock, err := plan.DecodeLock(raw)
	if err != nil {
		t.Fatal(err)
	}
	o := p.options(out)
	o.Locked, o.Force = true, true
	if _, err := Build(t.Context(), p.image(t), o); err == nil || !strings.Contains(err.Error(), "there is no lock next to the Image") {
		t.Errorf("without a lock: %v", err)
	}
	o.Lock = lock
	again, err := Build(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if again.Report.Golden != res.Report.Golden || again.Report.Plan != res.Report.Plan {
		t.Error("a locked build is another image")
	}
	if err := os.WriteFile(filepath.Join(p.dir, "programs/kubelet"), []byte(buildtest.ELF(elf.EM_X86_64)+"changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.dir, "overlay/new"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = Build(t.Context(), p.image(t), o)
	for _, want := range []string{"input kubelet has sha256", "input overlay 0 has sha256"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("changed inputs: error lacks %q: %v", want, err)
		}
	}
}

// TestPlacesDoNotShow checks that the image depends neither on the paths of its inputs nor on the
// order of the container images in the document.
func TestPlacesDoNotShow(t *testing.T) {
	base := buildtest.Base()
	for _, p := range []string{"ptp", "static"} {
		base = append(base, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./usr/lib/cni/" + p, Mode: 0o755}, Body: buildtest.ELF(elf.EM_X86_64)})
	}
	build := func(edit func(string) string, move map[string]string) *Result {
		p := newProject(t, base, edit)
		for _, name := range []string{"a", "b"} {
			img := imagetest.Image{Ref: "edgebake.test/" + name + ":1", Layers: []imagetest.Layer{imagetest.Script(imagetest.File(name, 0o644, 0, 0, name))}}
			if _, err := imagetest.WriteLayout(filepath.Join(p.dir, "more", name), img); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(p.dir, "net.conflist"), []byte(conflist), 0o644); err != nil {
			t.Fatal(err)
		}
		for from, to := range move {
			to = filepath.Join(p.dir, to)
			if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.Rename(filepath.Join(p.dir, from), to)); err != nil {
				t.Fatal(err)
			}
		}
		res, err := p.build(t, filepath.Join(t.TempDir(), "tiny.raw"))
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	const pause = "  - ref: edgebake.test/pause:1\n    layout: images\n"
	const a, b = "  - {ref: \"edgebake.test/a:1\", layout: more/a}\n", "  - {ref: \"edgebake.test/b:1\", layout: more/b}\n"
	cni := strings.NewReplacer("config: bridge, podCIDR: 10.244.0.0/16", "config: net.conflist")
	first := build(func(s string) string { return cni.Replace(strings.Replace(s, pause, pause+a+b, 1)) }, nil)
	second := build(func(s string) string {
		s = strings.Replace(s, pause, strings.ReplaceAll(b+pause+a, "more/", "else/where/"), 1)
		return strings.NewReplacer("dir: overlay", "dir: x/mine", "source: notes.txt", "source: x/y", "net.conflist", "x/z.conflist").Replace(cni.Replace(s))
	}, map[string]string{"overlay": "x/mine", "notes.txt": "x/y", "net.conflist": "x/z.conflist", "more": "else/where"})
	if first.Report.Plan != second.Report.Plan {
		x, _ := first.Plan.Encode()
		y, _ := second.Plan.Encode()
		t.Errorf("two plans:\n%s\n%s", x, y)
	}
	if first.Report.Golden != second.Report.Golden || !bytes.Equal(first.SBOM, second.SBOM) {
		t.Error("the builds made different images")
	}
	// If a rendered path changes the content of a file, the plan's ID changes.
	third := build(func(s string) string {
		return cni.Replace(strings.Replace(strings.Replace(s, pause, pause+a+b, 1), "{{.Name}} on", "{{(index .Overlays 0).Dir}} on", 1))
	}, nil)
	if third.Report.Plan == first.Report.Plan {
		t.Error("a changed file in the image has the same plan")
	}
}

const conflist = `{"cniVersion": "1.0.0", "name": "mine", "plugins": [{"type": "ptp", "ipam": {"type": "static"}}]}`

func TestCNIConfig(t *testing.T) {
	for _, tt := range []struct {
		name, doc string
		plugins   []string // in the image
		want      string   // part of the error; empty if the build succeeds
	}{
		{"good", conflist, []string{"ptp", "static"}, ""},
		{"plugin missing", conflist, []string{"ptp"}, "cni.config: net.conflist uses plugin static, which is not in /opt/cni/bin or not executable"},
		{"not JSON", "plugins: []", nil, "cni.config: reading net.conflist: not a CNI configuration list"},
		{"all that lacks", `{"plugins": [{}]}`, nil, "plugins[0].type is required"},
		{"no plugins", `{"cniVersion": "1.0.0", "name": "x"}`, nil, "plugins is empty"},
		{"no file", "", nil, "cni.config: open "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			base := buildtest.Base()
			for _, p := range tt.plugins {
				base = append(base, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./usr/lib/cni/" + p, Mode: 0o755}, Body: buildtest.ELF(elf.EM_X86_64)})
			}
			p := newProject(t, base, func(s string) string {
				return strings.Replace(s, "config: bridge, podCIDR: 10.244.0.0/16", "config: net.conflist", 1)
			})
			if tt.doc != "" {
				if err := os.WriteFile(filepath.Join(p.dir, "net.conflist"), []byte(tt.doc), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			out := filepath.Join(t.TempDir(), "tiny.raw")
			_, err := p.build(t, out)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("error lacks %q: %v", tt.want, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			info, err := media.Inspect(out)
			if err != nil {
				t.Fatal(err)
			}
			got, err := rootFS(t, out, info).ReadFile("etc/cni/net.d/90-edgebake.conflist")
			if err != nil || string(got) != tt.doc {
				t.Errorf("the image has %q, %v", got, err)
			}
		})
	}
}

// TestDamagedCache damages each cached input in turn. No build may use damaged bytes; each build
// repairs the inputs that it needs.
func TestDamagedCache(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	out := filepath.Join(t.TempDir(), "tiny.raw")
	first, err := p.build(t, out)
	if err != nil {
		t.Fatal(err)
	}
	dir := p.cache.Dir()
	blobs, err := p.cache.List()
	if err != nil || len(blobs) < 5 {
		t.Fatalf("%d blobs, %v", len(blobs), err)
	}
	for i, b := range blobs {
		p.cache.Close()
		path := p.cache.BlobPath(b.SHA256)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if len(data) > 0 && i%2 == 0 {
			data[len(data)/2] ^= 1
		} else {
			data = nil
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o444); err != nil {
			t.Fatal(err)
		}
		if p.cache, err = fetch.Open(dir); err != nil {
			t.Fatal(err)
		}
		o := p.options(out)
		o.Force, o.Lock, o.Locked = true, first.Plan.Lock(), i%3 == 0
		res, err := Build(t.Context(), p.image(t), o)
		if err != nil {
			t.Fatalf("blob %s: %v", b.SHA256, err)
		}
		if res.Report.Golden != first.Report.Golden {
			t.Errorf("blob %s: another golden image was built", b.SHA256)
		}
	}
	// Remove damaged files that no build needed.
	if _, err := p.cache.Verify(t.Context(), false, nil); err != nil {
		t.Error(err)
	}
}

func TestExportBase(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	file := filepath.Join(t.TempDir(), "base.tar")
	pl, err := Resolve(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	if err := ExportBase(t.Context(), pl, p.options(""), file); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(p.dir, "base.tar"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the exported base differs from the base (%v)", err)
	}
}

// TestLockedMadeBase builds with a lock and an exported base, after the Debian archive has changed.
func TestLockedMadeBase(t *testing.T) {
	toDebian := func(s string) string {
		return strings.Replace(s, "  tar:\n    file: base.tar\n", "  debian: {suite: trixie}\n", 1)
	}
	p := newProject(t, buildtest.Base(), toDebian)
	img := p.image(t)
	out := filepath.Join(t.TempDir(), "tiny.raw")
	o := p.options(out)
	o.Base = filepath.Join(p.dir, "base.tar")
	first, err := Build(t.Context(), img, o)
	if err != nil {
		t.Fatal(err)
	}
	o.Lock, o.Locked, o.Force = first.Plan.Lock(), true, true
	// On another computer, the cache is empty, and the exported base was compressed by hand.
	if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	defer o.Cache.Close()
	raw, err := os.ReadFile(o.Base)
	if err != nil {
		t.Fatal(err)
	}
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	o.Base += ".zst"
	if err := os.WriteFile(o.Base, enc.EncodeAll(raw, nil), 0o644); err != nil {
		t.Fatal(err)
	}
	second, err := Build(t.Context(), img, o)
	if err != nil {
		t.Fatal(err)
	}
	if first.Report.Golden != second.Report.Golden {
		t.Error("the images differ")
	}
	other, err := buildtest.Tar(buildtest.Base()[:30])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.Base, other, 0o644); err != nil {
		t.Fatal(err)
	}
	// The locked base is in the cache, but --base takes precedence and is rejected.
	if _, err := Build(t.Context(), img, o); err == nil || !strings.Contains(err.Error(), "use the base that was exported") {
		t.Errorf("no error for a --base with another digest: %v", err)
	}
	if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	defer o.Cache.Close()
	if _, err := Build(t.Context(), img, o); err == nil || !strings.Contains(err.Error(), "use the base that was exported") {
		t.Errorf("a --base with another digest is accepted: %v", err)
	}
}

// TestDoubleBuild builds one plan in processes with different environments, users and directories.
func TestDoubleBuild(t *testing.T) {
	if dir := os.Getenv("EDGEBAKE_TEST_BUILD"); dir != "" {
		buildChild(t, dir)
		return
	}
	p := newProject(t, buildtest.Base(), nil)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	warm := t.TempDir()
	variants := []struct {
		name, umask, cache, cwd string
		env                     []string
		uid                     uint32
	}{
		{name: "plain", umask: "022", cache: warm, cwd: p.dir, env: []string{"TZ=UTC", "GOMAXPROCS=1"}},
		{name: "warm cache, other zone", umask: "077", cache: warm, cwd: "/", env: []string{"TZ=Asia/Kathmandu", "GOMAXPROCS=7", "LC_ALL=tr_TR.UTF-8"}},
		{name: "other user, cold cache", umask: "002", cwd: os.TempDir(), env: []string{"TZ=America/St_Johns", "GOMAXPROCS=3", "HOME=/nowhere"}, uid: 65534},
	}
	for _, ext := range []string{".raw", ".raw.zst"} {
		var want string
		for _, v := range variants {
			out := t.TempDir()
			if v.cache == "" {
				v.cache = filepath.Join(out, "cache")
			}
			cmd := exec.Command("/bin/sh", "-c", "umask "+v.umask+`; exec "$0" -test.run '^TestDoubleBuild$' -test.v`, exe)
			cmd.Dir = v.cwd
			cmd.Env = append(os.Environ(), append(v.env, "EDGEBAKE_TEST_BUILD="+p.dir, "EDGEBAKE_TEST_OUT="+filepath.Join(out, "x"+ext), "EDGEBAKE_CACHE="+v.cache)...)
			if os.Geteuid() == 0 && v.uid != 0 {
				copied, dir := filepath.Join(out, "test"), t.TempDir()
				for _, d := range []string{out, dir} {
					if err := os.Chown(d, int(v.uid), int(v.uid)); err != nil {
						t.Fatal(err)
					}
				}
				// Another user may be unable to read the test program at its own path.
				program, err := os.ReadFile(exe)
				if err != nil {
					t.Fatal(err)
				}
				desk.WriteProgram(t, copied, string(program))
				cmd.Args[len(cmd.Args)-1] = copied
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: v.uid, Gid: v.uid}}
				openUp(t, out, p.dir)
			}
			if said, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", v.name, err, said)
			}
			got := digestOf(t, filepath.Join(out, "x"+ext))
			if want == "" {
				want = got
			}
			if got != want {
				t.Errorf("%s%s: %s, the first build gave %s", v.name, ext, got, want)
			}
		}
	}
}

// buildChild runs one build of TestDoubleBuild in a child process.
func buildChild(t *testing.T, dir string) {
	cacheDir, err := fetch.DefaultDir()
	if err != nil {
		t.Fatal(err)
	}
	cache, err := fetch.Open(cacheDir)
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	p := &project{dir: dir, cache: cache}
	if _, err := p.build(t, os.Getenv("EDGEBAKE_TEST_OUT")); err != nil {
		t.Fatal(err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	fmt.Println("VmHWM:", strings.Fields(peak)[0])
}

// openUp lets other users enter all paths and their parent directories, and read the files in the
// last path.
func openUp(t *testing.T, paths ...string) {
	t.Helper()
	err := filepath.WalkDir(paths[len(paths)-1], func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		return os.Chmod(p, st.Mode().Perm()|0o044)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		for d := p; strings.HasPrefix(d, os.TempDir()+string(os.PathSeparator)); d = filepath.Dir(d) {
			st, err := os.Stat(d)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(d, st.Mode().Perm()|0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// digestOf hashes a file's non-zero chunks with their offsets.
func digestOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "size %d\n", st.Size())
	const size = 1 << 20
	chunk, zero := make([]byte, size), make([]byte, size)
	for at := int64(0); at < st.Size(); at += size {
		// Skip holes: a disk consists mostly of holes.
		data, err := f.Seek(at, unix.SEEK_DATA)
		if err != nil {
			break // only a hole follows
		}
		at = data / size * size
		n, err := f.ReadAt(chunk, at)
		if err != nil && err != io.EOF {
			t.Fatal(err)
		}
		if !bytes.Equal(chunk[:n], zero[:n]) {
			fmt.Fprintf(h, "%d %d\n", at, n)
			h.Write(chunk[:n])
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestTwoBuildsAtOnce runs two builds that share a cache.
func TestTwoBuildsAtOnce(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	dir := t.TempDir()
	errs := make(chan error)
	for i := range 2 {
		go func() {
			c, err := fetch.Open(filepath.Join(dir, "cache"))
			if err != nil {
				errs <- err
				return
			}
			defer c.Close()
			o := p.options(filepath.Join(dir, fmt.Sprintf("%d.raw", i)))
			o.Cache = c
			_, err = Build(context.Background(), p.image(t), o)
			errs <- err
		}()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if digestOf(t, filepath.Join(dir, "0.raw")) != digestOf(t, filepath.Join(dir, "1.raw")) {
		t.Error("the two images differ")
	}
}

func TestDpkgStatus(t *testing.T) {
	var status string
	for _, e := range buildtest.Base() {
		if e.Name == "./"+dpkgStatusPath {
			status = e.Body
		}
	}
	got, err := dpkg.ParseStatus(strings.NewReader(status))
	if err != nil {
		t.Fatal(err)
	}
	want := []dpkg.Package{
		{Name: "containerd", Version: "1.7.24~ds1-6+b4", Arch: "amd64"},
		{Name: "systemd", Version: "257.1-1+b2", Arch: "amd64", Source: "systemd (257.1-1)", Homepage: "https://systemd.io"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v", got)
	}
	b := &executor{img: &configs.Image{Containerd: configs.Containerd{Debian: true}}}
	if v, err := b.containerdVersion(got); err != nil || v != "1.7.24" {
		t.Errorf("containerd is %q, %v", v, err)
	}
}

// TestCheckPlugins checks that a plugin without execute permission counts as missing.
func TestCheckPlugins(t *testing.T) {
	node := func(path string, mode uint32) tree.Node {
		return tree.Node{Path: path, Inode: &tree.Inode{Mode: mode}}
	}
	nodes := []tree.Node{
		node("opt/cni/bin/bridge", tree.ModeRegular|0o755),
		node("opt/cni/bin/ptp", tree.ModeRegular|0o644),
		node("opt/cni/bin/macvlan", tree.ModeDir|0o755),
		node("usr/lib/cni/host-local", tree.ModeSymlink|0o777),
		node("usr/bin/tuning", tree.ModeRegular|0o755),
	}
	err := checkPlugins(nodes, []string{"bridge", "ptp", "macvlan", "host-local", "tuning", "tuning"}, "net.conflist")
	var missing []string
	for _, e := range joined.Errors(err) {
		missing = append(missing, strings.Fields(e.Error())[4])
	}
	if want := []string{"ptp,", "macvlan,", "tuning,"}; !slices.Equal(missing, want) {
		t.Errorf("missing are %q, want %q: %v", missing, want, err)
	}
}

// TestCheckHidden checks that it is an error if an overlay has a file where the booted machine
// mounts something.
func TestCheckHidden(t *testing.T) {
	node := func(layer, path string, mode uint32) tree.Node {
		return tree.Node{Layer: layer, Path: path, Inode: &tree.Inode{Mode: mode}}
	}
	err := errors.Join(checkHidden([]tree.Node{
		node(inputBase, "run/motd", tree.ModeRegular),
		node("overlay 0", "run", tree.ModeDir),
		node("overlay 0", "run/web.conf", tree.ModeRegular),
		node("overlay 0", "etc/kubernetes/manifests", tree.ModeDir),
		node("overlay 1", "etc/kubernetes/manifests/web.yaml", tree.ModeRegular),
		node("overlay 1", "etc/kubernetes-web.yaml", tree.ModeRegular),
		node("overlay 1", "var/lib/edgebake/persist/kubernetes/manifests/web.yaml", tree.ModeRegular),
	})...)
	if got := joined.Errors(err); len(got) != 2 || !strings.Contains(got[0].Error(), "overlay 0: run/web.conf") ||
		!strings.Contains(got[1].Error(), "put the file below /var/lib/edgebake/persist/kubernetes") {
		t.Errorf("%v", err)
	}
}

// FuzzPinned checks that readPinned accepts a cache entry only if it is for exactly the requested
// container images.
func FuzzPinned(f *testing.F) {
	wanted := []configs.ContainerImage{{Ref: "registry.example/a:1", Digest: "sha256:" + strings.Repeat("a", 64)}}
	ref, err := imageref.Parse(wanted[0].Ref)
	if err != nil {
		f.Fatal(err)
	}
	blob := images.Descriptor{Digest: imageref.Digest(wanted[0].Digest)}
	good, err := json.Marshal([]images.Pinned{{Ref: ref, Source: wanted[0], Target: blob, Manifest: blob, Config: blob}})
	if err != nil {
		f.Fatal(err)
	}
	if p, err := readPinned(good, wanted); err != nil || len(p) != 1 {
		f.Fatal(p, err)
	}
	f.Add(good)
	f.Add([]byte("[]"))
	f.Add([]byte("null"))
	f.Add(bytes.Replace(good, []byte("registry.example/a:1"), []byte("registry.example/b:1"), 2))
	f.Fuzz(func(t *testing.T, b []byte) {
		pinned, err := readPinned(b, wanted)
		if err != nil {
			return
		}
		if len(pinned) != 1 || pinned[0].Source != wanted[0] {
			t.Errorf("accepted %+v", pinned)
		}
	})
}

func FuzzDpkgStatus(f *testing.F) {
	f.Add("Package: a\nStatus: install ok installed\nVersion: 1\n\n")
	f.Add("Package: a\n b: c\nStatus:")
	f.Fuzz(func(t *testing.T, s string) {
		packages, err := dpkg.ParseStatus(strings.NewReader(s))
		for _, p := range packages {
			if err == nil && p.Name == "" {
				t.Errorf("a package without a name: %+v", p)
			}
		}
	})
}

func TestDebianArguments(t *testing.T) {
	parsed, err := configs.ParseImages("x", []byte(strings.Replace(buildtest.Document, "  tar:\n    file: base.tar\n",
		"  debian:\n    suite: trixie\n    packages: [tcpdump]\n    run: [\"echo 'it'\"]\n", 1)))
	if err != nil {
		t.Fatal(err)
	}
	img := parsed[0]
	r := newDebianRecipe(img, img.SourceTime(), []string{"aa"})
	args := r.args([]string{"/keys/a.gpg"})
	for _, want := range []string{"--variant=minbase", "--architectures=amd64", "--keyring=/keys/a.gpg", `--customize-hook=chroot "$1" /bin/sh -euc 'echo '\''it'\'''`, "trixie"} {
		if !slices.Contains(args, want) {
			t.Errorf("arguments lack %s: %q", want, args)
		}
	}
	if !slices.Contains(r.Packages, "tcpdump") || !slices.Contains(r.Packages, "systemd-sysv") || !slices.IsSorted(r.Packages) {
		t.Errorf("packages: %q", r.Packages)
	}
}

// TestMissingTools checks that all missing programs are reported together, each with the input that
// needs it, before anything is made.
func TestMissingTools(t *testing.T) {
	p := newProject(t, buildtest.Base(), func(s string) string {
		s = strings.Replace(s, "  tar:\n    file: base.tar\n", "  debian: {suite: trixie}\n", 1)
		return strings.ReplaceAll(s, "file: {dir: programs}", "goModule: {}")
	})
	t.Setenv("PATH", t.TempDir())
	_, err := p.build(t, filepath.Join(t.TempDir(), "a.raw"))
	found := map[string]string{}
	for _, e := range joined.Errors(err) {
		if field := (*configs.FieldError)(nil); errors.As(e, &field) {
			found[field.Path] += field.Err.Error()
		}
	}
	for field, want := range map[string]string{
		"base.debian":       "apt-get install mmdebstrap",
		"kubernetes.source": "compiling kubeadm needs Go",
		"containerd.source": "compiling containerd needs Go",
	} {
		if !strings.Contains(found[field], want) {
			t.Errorf("%s: want %q in %v", field, want, err)
		}
	}
}

func TestDebianHints(t *testing.T) {
	for log, want := range map[string]string{
		"E: Unable to locate package foo":                                                                  "check base.debian.packages",
		"The following signatures ... NO_PUBKEY 6ED0E7B82643E131":                                          "debian-archive-keyring",
		"Temporary failure resolving 'x'":                                                                  "--base",
		"cp: No space left on device":                                                                      "set TMPDIR",
		"E: Release file for http://x/InRelease is expired (invalid since 16d 20h)":                        "set the clock",
		"E: Release file for http://x/InRelease is not valid yet (invalid for another 3h)":                 "set the clock",
		"E: arm64 can neither be executed natively nor via qemu user emulation with binfmt_misc":           "qemu-user-static",
		"I: arm64 cannot be executed natively, but transparently using qemu-user binfmt emulation\nE: odd": "",
		"cannot find /usr/bin/qemu-aarch64-static":                                                         "replace qemu-user-binfmt",
		"all is well": "",
	} {
		if got := debianHint(log); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", log, got, want)
		}
	}
}

// Build builds one image.
func Build(ctx context.Context, img *configs.Image, o Options) (*Result, error) {
	var res *Result
	err := BuildEach(ctx, []Job{{Image: img, Options: o}}, func(_ int, r *Result) error {
		res = r
		return nil
	})
	return res, err
}
