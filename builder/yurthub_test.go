package builder

import (
	"debug/elf"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/buildtest"
	"github.com/edgebake/edgebake/builder/disk/ext4"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs/ondisk"
)

const (
	hubUnit = "yurthub: {version: v1.7.0, binary: {file: programs/yurthub}, extraArgs: [--v=2]}\n"
	hubPod  = "yurthub:\n  version: v1.6.1\n  image: {ref: \"edgebake.test/pause:1\", layout: images}\n"
)

func withHub(t *testing.T, yurthub, program string) *project {
	t.Helper()
	p := newProject(t, buildtest.Base(), func(doc string) string {
		if yurthub == hubPod { // what yurthub 1.6 can serve
			doc = strings.NewReplacer("v1.36.3", "v1.30.3", "cni:", "  crictl: {version: v1.36.0, source: {file: {dir: programs}}}\ncni:").Replace(doc)
		}
		return doc + yurthub
	})
	if err := os.WriteFile(filepath.Join(p.dir, "programs/yurthub"), []byte(program), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.dir, "programs/crictl"), []byte(buildtest.ELF(elf.EM_X86_64)), 0o644); err != nil {
		t.Fatal(err)
	}
	return p
}

// rootFS opens the system of a written image.
func rootFS(t *testing.T, path string, info *media.Info) *ext4.Reader {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	for _, p := range info.Partitions {
		if p.Label == ondisk.LabelRootA {
			r, err := ext4.Open(io.NewSectionReader(f, p.Start, p.Size))
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
	}
	t.Fatal("there is no ROOT-A")
	return nil
}

// An image with yurthub as a unit: the program, the unit that starts it at
// every boot, and node types and facts that first boot goes by.
func TestYurthubUnit(t *testing.T) {
	program := buildtest.ELF(elf.EM_X86_64) + "yurthub"
	p := withHub(t, hubUnit, program)
	out := filepath.Join(t.TempDir(), "tiny.raw")
	if _, err := p.build(t, out); err != nil {
		t.Fatal(err)
	}
	info, err := media.Inspect(out)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"native", "edge", "cloud"}; !slices.Equal(info.Image.NodeTypes, want) {
		t.Errorf("node types %v, want %v", info.Image.NodeTypes, want)
	}
	y := info.Image.Yurthub
	if y == nil || y.Version != "v1.7.0" || y.Form != "unit" || y.LBMode != "priority" || y.Image != "" || !slices.Equal(y.ExtraArgs, []string{"--v=2"}) {
		t.Errorf("image.json says of yurthub: %+v", y)
	}
	root := rootFS(t, out, info)
	n, err := root.Stat("usr/local/bin/yurthub")
	if err != nil || n.Mode != 0o100755 || n.UID != 0 {
		t.Errorf("the program: %+v, %v", n.Inode, err)
	}
	if b, err := root.ReadFile("usr/local/bin/yurthub"); err != nil || string(b) != program {
		t.Errorf("the program is another one: %v", err)
	}
	if n, err := root.Stat("etc/systemd/system/multi-user.target.wants/yurthub.service"); err != nil || n.Target != "/usr/lib/systemd/system/yurthub.service" {
		t.Errorf("the unit does not start by itself: %+v, %v", n.Inode, err)
	}
	unit, err := root.ReadFile("usr/lib/systemd/system/yurthub.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"WantedBy=multi-user.target", "StartLimitIntervalSec=0", "Before=kubelet.service", "Restart=always"} {
		if !strings.Contains(string(unit), want) {
			t.Errorf("the unit lacks %s", want)
		}
	}
}

// An image with yurthub as a static pod has its container image on board and
// no unit.
func TestYurthubStaticPod(t *testing.T) {
	p := withHub(t, hubPod, "")
	out := filepath.Join(t.TempDir(), "tiny.raw")
	if _, err := p.build(t, out); err != nil {
		t.Fatal(err)
	}
	info, err := media.Inspect(out)
	if err != nil {
		t.Fatal(err)
	}
	if y := info.Image.Yurthub; y == nil || y.Form != "staticPod" || y.Image != "edgebake.test/pause:1" {
		t.Errorf("image.json says of yurthub: %+v", y)
	}
	if !slices.ContainsFunc(info.Image.Images, func(i ondisk.ImageRef) bool { return i.Ref == "edgebake.test/pause:1" }) {
		t.Errorf("yurthub's image is not on board: %+v", info.Image.Images)
	}
	if _, err := rootFS(t, out, info).Stat("usr/lib/systemd/system/yurthub.service"); err == nil {
		t.Error("the unit is there too")
	}
}

// What is not yurthub's program for this machine is refused, and before
// anything is compiled: while the inputs are pinned.
func TestYurthubRefused(t *testing.T) {
	for name, tt := range map[string]struct{ program, want string }{
		"another architecture": {buildtest.ELF(elf.EM_AARCH64), "yurthub.binary: usr/local/bin/yurthub is for arm64, the image for amd64"},
		"an archive":           {"\x1f\x8b" + strings.Repeat("gz", 100), "usr/local/bin/yurthub is not a program"},
		"empty":                {"", "usr/local/bin/yurthub is not a program"},
	} {
		t.Run(name, func(t *testing.T) {
			p := withHub(t, hubUnit, tt.program)
			_, err := Resolve(t.Context(), p.image(t), p.options(""))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}
