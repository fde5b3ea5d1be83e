package builder

import (
	"crypto/sha256"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/test/buildtest"
)

const (
	hubUnit = "yurthub: {version: v1.7.0, binary: {file: programs/yurthub}, extraArgs: [--v=2]}\n"
	hubPod  = "yurthub:\n  version: v1.6.1\n  image: {ref: \"edgebake.test/pause:1\", layout: images}\n"
)

func withHub(t *testing.T, yurthub, program string) *project {
	t.Helper()
	p := newProject(t, buildtest.Base(), func(doc string) string {
		if yurthub == hubPod { // yurthub 1.6 supports these versions
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

// rootFS opens the root file system of a written image.
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

// TestYurthubUnit checks an image that runs yurthub as a unit: the program, its unit, and the node
// types and facts for first boot.
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
		t.Errorf("yurthub in image.json: %+v", y)
	}
	root := rootFS(t, out, info)
	n, err := root.Stat("usr/local/bin/yurthub")
	if err != nil || n.Mode != 0o100755 || n.UID != 0 {
		t.Errorf("the program: %+v, %v", n.Inode, err)
	}
	if b, err := root.ReadFile("usr/local/bin/yurthub"); err != nil || string(b) != program {
		t.Errorf("usr/local/bin/yurthub is not the program of the Image: %v", err)
	}
	if n, err := root.Stat("etc/systemd/system/multi-user.target.wants/yurthub.service"); err != nil || n.Target != "/usr/lib/systemd/system/yurthub.service" {
		t.Errorf("the unit is not enabled: %+v, %v", n.Inode, err)
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

// TestYurthubStaticPod checks that an image that runs yurthub as a static pod contains yurthub's
// container image but no unit.
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
		t.Errorf("yurthub in image.json: %+v", y)
	}
	if !slices.ContainsFunc(info.Image.Images, func(i ondisk.ImageRef) bool { return i.Ref == "edgebake.test/pause:1" }) {
		t.Errorf("the image lacks yurthub's container image: %+v", info.Image.Images)
	}
	if _, err := rootFS(t, out, info).Stat("usr/lib/systemd/system/yurthub.service"); err == nil {
		t.Error("the image also has a unit")
	}
}

// TestYurthubRefused checks that a file is rejected before anything is compiled if it is not
// yurthub for the image's architecture.
func TestYurthubRefused(t *testing.T) {
	for name, tt := range map[string]struct{ program, want string }{
		"another architecture": {buildtest.ELF(elf.EM_AARCH64), "yurthub.binary: programs/yurthub is for arm64, but the image is for amd64"},
		"an archive":           {"\x1f\x8b" + strings.Repeat("gz", 100), "programs/yurthub is not a program"},
		"empty":                {"", "programs/yurthub is not a program"},
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

// openYurtModule is OpenYurt's Go module.
const openYurtModule = "github.com/openyurtio/openyurt"

// openYurt links a program with the flags of OpenYurt's Makefile, and the given flags of go build.
func openYurt(t *testing.T, gitVersion string, flags ...string) string {
	t.Helper()
	dir := t.TempDir()
	for name, body := range map[string]string{
		"go.mod":                     "module " + openYurtModule + "\n\ngo 1.22\n",
		"cmd/yurthub/main.go":        "package main\n\nimport \"" + openYurtModule + "/pkg/projectinfo\"\n\nfunc main() { println(projectinfo.Version()) }\n",
		"pkg/projectinfo/project.go": "package projectinfo\n\nvar gitVersion = \"v0.0.0\"\n\nfunc Version() string { return gitVersion }\n",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	info := openYurtModule + "/pkg/projectinfo."
	cmd := exec.Command("go", slices.Concat([]string{"build", "-o", "yurthub", "-buildvcs=false",
		"-ldflags", "-s -w -X " + info + "projectPrefix=yurt -X " + info + "gitVersion=" + gitVersion + " -X " + info + "gitCommit=0a1b2c3"}, flags, []string{"./cmd/yurthub"})...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=", "GOWORK=off", "GOTOOLCHAIN=local")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "yurthub"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestYurthubOfAnotherVersion checks that a yurthub of another version is rejected: its unknown
// arguments would keep it from starting.
func TestYurthubOfAnotherVersion(t *testing.T) {
	const want = "yurthub.binary: programs/yurthub is v1.6.1, but yurthub.version is v1.7.0: use the program of v1.7.0, or set yurthub.version to v1.6.1 if the cluster runs that release of OpenYurt"
	other := openYurt(t, "v1.6.1")
	check := func(t *testing.T, err error, want string) {
		t.Helper()
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("error %q, want %q", got, want)
		}
	}
	for name, tt := range map[string]struct{ program, want string }{
		"another":           {other, want},
		"that one":          {openYurt(t, "v1.7.0"), ""},
		"a later patch":     {openYurt(t, "v1.7.3"), ""},
		"after a tag":       {openYurt(t, "v1.6.1-0a1b2c3"), ""},
		"which hides it":    {openYurt(t, "v1.6.1", "-trimpath"), ""},
		"which has no info": {buildtest.ELF(elf.EM_X86_64), ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := withHub(t, hubUnit, tt.program)
			_, err := Resolve(t.Context(), p.image(t), p.options(""))
			check(t, err, tt.want)
		})
	}

	t.Run("by URL", func(t *testing.T) {
		s := newServer(t)
		s.files["/yurthub"] = other
		unit := fmt.Sprintf("yurthub: {version: v1.7.0, binary: {url: %s/yurthub, sha256: %x}}\n", s.URL, sha256.Sum256([]byte(other)))
		p := withHub(t, unit, "")
		_, err := p.build(t, filepath.Join(t.TempDir(), "x.raw"))
		check(t, err, strings.Replace(want, "programs/yurthub", yurthubPath, 1))
	})
	t.Run("by a directory of the user's", func(t *testing.T) {
		p := withHub(t, hubUnit, openYurt(t, "v1.7.0"))
		if err := os.WriteFile(filepath.Join(p.dir, "overlay", yurthubPath), []byte(other), 0o755); err != nil {
			t.Fatal(err)
		}
		doc, err := os.ReadFile(filepath.Join(p.dir, "image.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		replace := strings.Replace(string(doc), "- dir: overlay", "- dir: overlay\n    replace: true", 1)
		if err := os.WriteFile(filepath.Join(p.dir, "image.yaml"), []byte(replace), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err = p.build(t, filepath.Join(t.TempDir(), "x.raw"))
		check(t, err, strings.Replace(want, "yurthub.binary: programs/yurthub", "overlays[0].dir: "+yurthubPath, 1))
	})
}
