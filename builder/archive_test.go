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

// archive makes a Debian archive of one suite in a folder, with the packages
// that a node needs and vim, and returns its line of sources.list.
func archive(t *testing.T, p *project) string {
	t.Helper()
	dir := t.TempDir()
	var index strings.Builder
	for _, name := range append(overlays.Packages(p.image(t)), "vim", "containerd") {
		fmt.Fprintf(&index, "Package: %s\nVersion: 2:9.1-1\nArchitecture: amd64\nMaintainer: nobody\nFilename: pool/%[1]s.deb\nSize: 1\nSHA256: %064d\nDescription: x\n\n", name, 0)
	}
	at := filepath.Join(dir, "dists/trixie/main/binary-amd64")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		filepath.Join(at, "Packages"): index.String(), filepath.Join(dir, "dists/trixie/Release"): "Suite: trixie\nCodename: trixie\nComponents: main\nArchitectures: amd64\n",
	} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return "deb [trusted=yes] file:" + dir + " %s main"
}

// TestNamesOfTheArchive: a wrong name is told, with its place, before
// mmdebstrap or a compiler begins.
func TestNamesOfTheArchive(t *testing.T) {
	desk.NeedProgram(t, "apt-get", "apt")
	tcpdump := "packages: [tcpdump]"
	for name, test := range map[string]struct {
		suite, packages string
		want            []string
	}{
		"right":   {"trixie", "packages: [vim]", nil},
		"package": {"trixie", "packages: [vim, containrd, vmi]", []string{`base.debian.packages[1]: suite trixie has no package containrd (components: main); did you mean "containerd"?`, "base.debian.packages[2]: suite trixie has no package vmi"}},
		"version": {"trixie", "packages: ['vim=1']", []string{"base.debian.packages[0]: suite trixie has no version 1 of vim: it has 2:9.1-1"}},
		"release": {"trixie", "packages: [vim/forky]", []string{"base.debian.packages[0]: there is no vim in forky"}},
		"suite":   {"trixi", "packages: [vim]", []string{"base.debian.sources[0]: ", `has no suite trixi; did you mean "trixie"?`}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), toDebian)
			standIn(t, p)
			ran := filepath.Join(p.dir, "runs")
			bin := strings.Split(os.Getenv("PATH"), string(os.PathListSeparator))[0]
			if err := os.Remove(filepath.Join(bin, "apt-get")); err != nil {
				t.Fatal(err)
			}
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
				t.Errorf("whether mmdebstrap ran: %v", made)
			}
		})
	}
}
