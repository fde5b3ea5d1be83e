package builder

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/overlays"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// archive makes a Debian archive in a directory and returns its line for sources.list. The suite
// has the packages that a node needs, and vim, whose version is older for arm64.
func archive(t *testing.T, p *project) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{"dists/trixie/Release": "Suite: trixie\nCodename: trixie\nComponents: main\nArchitectures: amd64 arm64\n"}
	for arch, version := range map[string]string{"amd64": "2:9.1-1", "arm64": "2:9.0-1"} {
		img := p.image(t)
		img.Arch = arch
		var index strings.Builder
		for _, name := range append(overlays.Packages(img), "vim", "containerd") {
			fmt.Fprintf(&index, "Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: nobody\nFilename: pool/%[1]s.deb\nSize: 1\nSHA256: %064[4]d\nDescription: x\n\n", name, version, arch, 0)
		}
		files["dists/trixie/main/binary-"+arch+"/Packages"] = index.String()
	}
	for name, text := range files {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return "deb [trusted=yes] file:" + dir + " %s main"
}

// realApt removes the fake apt-get from PATH.
func realApt(t *testing.T) {
	t.Helper()
	bin := strings.Split(os.Getenv("PATH"), string(os.PathListSeparator))[0]
	if err := os.Remove(filepath.Join(bin, "apt-get")); err != nil {
		t.Fatal(err)
	}
}

// TestArchiveOfEachArchitecture checks that the error for a version that one architecture lacks
// lists the available versions, and that nothing is made for any architecture before this error.
func TestArchiveOfEachArchitecture(t *testing.T) {
	desk.NeedProgram(t, "apt-get", "apt")
	for packages, want := range map[string]string{
		"['vim=2:9.1-1']": "base.debian.packages[0]: suite trixie has no version 2:9.1-1 of vim for arm64: it has 2:9.0-1",
		"['vim=2:9.1-1 [amd64]', 'vim=2:9.0-1 [arm64]']": "",
		"['vim=2:9.1-1 [amd64]', 'emacs [arm64]']":       "base.debian.packages[1]: suite trixie has no package emacs for arm64",
	} {
		t.Run(packages, func(t *testing.T) {
			p := several(t, nil)
			realApt(t)
			runsForeign(t, true)
			line := fmt.Sprintf(archive(t, p), "trixie")
			p.change(t, "packages: [tcpdump]", "packages: "+packages+", sources: ['"+line+"']")
			_, err := p.buildEach(t, p.jobs(t))
			if (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
			if runs := p.runs(t); (runs == "") != (want != "") {
				t.Errorf("mmdebstrap ran: %s", runs)
			}
		})
	}
}

// TestNamesOfTheArchive checks that a wrong suite or package is reported with its field before
// mmdebstrap or a compiler starts.
func TestNamesOfTheArchive(t *testing.T) {
	desk.NeedProgram(t, "apt-get", "apt")
	tcpdump := "packages: [tcpdump]"
	for name, test := range map[string]struct {
		suite, packages string
		want            []string
	}{
		"right":   {"trixie", "packages: [vim]", nil},
		"package": {"trixie", "packages: [vim, containrd, vmi]", []string{`base.debian.packages[1]: suite trixie has no package containrd for amd64 (components: main); did you mean "containerd"?`, "base.debian.packages[2]: suite trixie has no package vmi for amd64"}},
		"version": {"trixie", "packages: ['vim=1']", []string{"base.debian.packages[0]: suite trixie has no version 1 of vim for amd64: it has 2:9.1-1"}},
		"release": {"trixie", "packages: [vim/forky]", []string{"base.debian.packages[0]: there is no vim for amd64 in forky"}},
		"suite":   {"trixi", "packages: [vim]", []string{"base.debian.sources[0]: ", `has no suite trixi; did you mean "trixie"?`}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), toDebian)
			standIn(t, p)
			ran := filepath.Join(p.dir, "runs")
			realApt(t)
			line := fmt.Sprintf(archive(t, p), test.suite)
			p = newProject(t, buildtest.Base(), func(s string) string {
				return strings.Replace(toDebian(s), tcpdump, test.packages+", sources: ['"+line+"']", 1)
			})
			_, err := p.build(t, filepath.Join(t.TempDir(), "x.raw"))
			if (err == nil) != (test.want == nil) {
				t.Fatalf("error: %v", err)
			}
			for _, w := range test.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q: %v", w, err)
				}
			}
			if _, made := os.Stat(ran); (made == nil) != (test.want == nil) {
				t.Errorf("mmdebstrap ran: %v, want %v", made == nil, test.want == nil)
			}
		})
	}
}
