package builder

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// runsForeign makes this computer appear able or unable to run programs of other architectures.
func runsForeign(t *testing.T, yes bool) {
	t.Helper()
	code := "1"
	if yes {
		code = "0"
	}
	dir := t.TempDir()
	desk.WriteProgram(t, filepath.Join(dir, "arch-test"), "#!/bin/sh\nexit "+code+"\n")
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// several makes a project with a Debian base and programs for two architectures.
func several(t *testing.T, edit func(string) string) *project {
	t.Helper()
	p := newProject(t, buildtest.Base(), func(s string) string {
		s = buildtest.Several(toDebian(s))
		if edit != nil {
			s = edit(s)
		}
		return s
	})
	for _, arch := range []string{"amd64", "arm64"} {
		if err := buildtest.WriteFor(p.dir, arch); err != nil {
			t.Fatal(err)
		}
	}
	standIn(t, p)
	return p
}

// change replaces text in the document.
func (p *project) change(t *testing.T, old, new string) {
	t.Helper()
	name := filepath.Join(p.dir, "image.yaml")
	doc, err := os.ReadFile(name)
	if err != nil || !strings.Contains(string(doc), old) {
		t.Fatalf("no %q in the document: %v", old, err)
	}
	if err := os.WriteFile(name, []byte(strings.Replace(string(doc), old, new, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// jobs returns one job for each architecture in the project's document.
func (p *project) jobs(t *testing.T) []Job {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(p.dir, "image.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	images, err := configs.ParseImages("image.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	var jobs []Job
	for _, img := range images {
		o := p.options(filepath.Join(t.TempDir(), img.Arch+".raw"))
		jobs = append(jobs, Job{Image: img, Options: o})
	}
	return jobs
}

func (p *project) buildEach(t *testing.T, jobs []Job) ([]*Result, error) {
	t.Helper()
	var all []*Result
	err := BuildEach(t.Context(), jobs, func(i int, r *Result) error {
		if i != len(all) {
			t.Errorf("image %d is complete, want %d", i, len(all))
		}
		all = append(all, r)
		return nil
	})
	return all, err
}

// TestForeignBaseIsMadeOnce checks that a base of another architecture is made again only if its
// packages change: in emulation, the packages' scripts take minutes.
func TestForeignBaseIsMadeOnce(t *testing.T) {
	p := several(t, nil)
	runsForeign(t, true)
	results, err := p.buildEach(t, p.jobs(t))
	if err != nil {
		t.Fatal(err)
	}
	for i, arch := range []string{"amd64", "arm64"} {
		if r := results[i]; r.Report.Info.Arch != arch || r.Plan.Arch != arch {
			t.Errorf("image %d is for %s", i, r.Report.Info.Arch)
		}
	}
	if results[0].Report.Golden == results[1].Report.Golden || results[0].Report.Plan == results[1].Report.Plan {
		t.Error("both architectures have the same image")
	}
	runs := p.runs(t)
	if strings.Count(runs, "\n") != 2 {
		t.Fatalf("mmdebstrap ran:\n%s", runs)
	}
	// From now on, this computer cannot emulate other architectures.
	runsForeign(t, false)
	for _, c := range []struct{ what, old, new string }{
		{"a version of Kubernetes", "v1.36.3", "v1.36.2"},
		{"a version of containerd", "2.2.9", "2.2.8"},
		{"a file", "  - path: /etc/motd\n", "  - path: /etc/more\n    contents: more\n  - path: /etc/motd\n"},
		{"no pause image", "  sandbox: edgebake.test/pause:1\n", ""},
		{"no container images", "images:\n  - ref: edgebake.test/pause:1\n    layout: 'images-{arch}'\n", ""},
		{"no overlays", "overlays:\n  - dir: overlay\n", ""},
		{"the kernel's settings", "kind: Image\n", "kind: Image\nkernel: {args: [nosmt], modules: [dummy]}\n"},
		{"the disk", "kind: Image\n", "kind: Image\ndisk: {reserve: none}\n"},
		{"the name", "name: tiny", "name: other"},
	} {
		p.change(t, c.old, c.new)
		jobs := p.jobs(t)
		for i := range jobs {
			jobs[i].Options.Lock = results[i].Plan.Lock() // the lock that the previous build wrote
		}
		if results, err = p.buildEach(t, jobs); err != nil || p.runs(t) != runs {
			t.Fatalf("with %s: %v, mmdebstrap ran:\n%s", c.what, err, p.runs(t))
		}
	}
	// Other packages need a new base.
	p.change(t, "packages: [tcpdump]", "packages: [tcpdump, vim]")
	_, err = p.buildEach(t, p.jobs(t))
	var field *configs.FieldError
	if !errors.As(err, &field) || field.Path != "base.debian" || !strings.Contains(err.Error(), "making the Debian base for arm64 runs arm64 programs, which this computer cannot run: install qemu-user-static") || p.runs(t) != runs {
		t.Errorf("without emulation: %v, mmdebstrap ran:\n%s", err, p.runs(t))
	}
}

// TestWrongForOneArchitecture checks that the problems of all images are reported before the first
// one is built, and that a common problem is reported once.
func TestWrongForOneArchitecture(t *testing.T) {
	p := several(t, func(s string) string { return strings.Replace(s, "notes.txt", "missing.txt", 1) })
	runsForeign(t, true)
	for _, f := range []string{"programs/arm64/kubelet", "programs/arm64/ctr", "programs/arm64/firstboot"} {
		if err := os.WriteFile(filepath.Join(p.dir, f), []byte(buildtest.Program("amd64")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(p.dir, "images-arm64")); err != nil {
		t.Fatal(err)
	}
	if err := buildtest.WriteImages(filepath.Join(p.dir, "images-arm64"), "amd64"); err != nil {
		t.Fatal(err)
	}
	_, err := p.buildEach(t, p.jobs(t))
	for _, want := range []string{
		"kubernetes.source: programs/arm64/kubelet is for amd64, but the image is for arm64",
		"containerd.source: programs/arm64/ctr is for amd64, but the image is for arm64",
		"agents.firstboot: programs/arm64/firstboot is for amd64, but the image is for arm64",
		"images[0]", "linux/amd64", "not for linux/arm64", "missing.txt",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
	if err != nil && strings.Count(err.Error(), "missing.txt") != 1 {
		t.Errorf("the message appears twice:\n%v", err)
	}
	if p.runs(t) != "" {
		t.Error("mmdebstrap ran")
	}
}

// TestBaseForAnotherArchitecture checks that a base of another architecture is rejected first.
func TestBaseForAnotherArchitecture(t *testing.T) {
	p := newProject(t, buildtest.BaseFor("arm64"), nil)
	const want = "its usr/lib/systemd/systemd is for arm64, but the image is for amd64"
	if _, err := p.build(t, filepath.Join(t.TempDir(), "x.raw")); err == nil || err.Error() != "base.tar: "+want+"; use a program for amd64" {
		t.Errorf("%v", err)
	}
	// An exported base is rejected as well.
	base := filepath.Join(p.dir, "base.tar")
	q := newProject(t, buildtest.Base(), toDebian)
	o := q.options(filepath.Join(t.TempDir(), "x.raw"))
	o.Base = base
	if _, err := Build(t.Context(), q.image(t), o); err == nil || !strings.HasPrefix(err.Error(), "--base "+base+": "+want) {
		t.Errorf("%v", err)
	}
}
