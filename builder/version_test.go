package builder

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/edgebake/edgebake/test/buildtest"
)

// goProgram links a program with the given version. It depends on another module, whose version is
// the argument module.
func goProgram(t *testing.T, version, module string) string {
	t.Helper()
	dir := t.TempDir()
	for name, body := range map[string]string{
		"go.mod":   "module example.test/kubelet\n\ngo 1.22\n\nrequire example.test/m " + module + "\n\nreplace example.test/m " + module + " => ./m\n",
		"main.go":  "package main\n\nimport \"example.test/m\"\n\nvar gitVersion = \"v0.0.0-master\"\n\nfunc main() { m.F(); println(gitVersion) }\n",
		"m/go.mod": "module example.test/m\n\ngo 1.22\n",
		"m/m.go":   "package m\n\nfunc F() {}\n",
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "build", "-o", "program", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w -X main.gitVersion="+version, ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=", "GOWORK=off", "GOTOOLCHAIN=local", "GOPROXY=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "program"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestProgramsOfAnotherVersion checks that a local program of another version is rejected: the
// image would otherwise claim the Image's version.
func TestProgramsOfAnotherVersion(t *testing.T) {
	other := goProgram(t, "v1.35.1", "v1.36.3") // its module dependency has the Image's version
	later := goProgram(t, "v1.36.30", "v1.0.0") // its version begins with the Image's version
	ctr := goProgram(t, "v2.2.9", "v1.0.0")
	for name, tt := range map[string]struct{ kubelet, ctr, want string }{
		"those":            {goProgram(t, "v1.36.3", "v1.0.0"), ctr, ""},
		"which do not say": {buildtest.Program("amd64"), buildtest.Program("amd64"), ""},
		"one of a later patch release": {later, ctr,
			"kubernetes.source: programs/kubelet is not version v1.36.3: use a program of that version, or set kubernetes.version to the version that `programs/kubelet --version` prints"},
		"others": {other, goProgram(t, "v2.2.8", "v1.0.0"),
			"kubernetes.source: programs/kubelet is not version v1.36.3: use a program of that version, or set kubernetes.version to the version that `programs/kubelet --version` prints\n" +
				"containerd.source: programs/ctr is not version 2.2.9: use a program of that version, or set containerd.version to the version that `programs/ctr --version` prints"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), nil)
			for f, body := range map[string]string{"kubelet": tt.kubelet, "ctr": tt.ctr} {
				if err := os.WriteFile(filepath.Join(p.dir, "programs", f), []byte(body), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			got := ""
			if _, err := Resolve(t.Context(), p.image(t), p.options("")); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("error %q, want %q", got, tt.want)
			}
		})
	}
}

// TestHasVersion reads a program in pieces of every possible size.
func TestHasVersion(t *testing.T) {
	body := bytes.Repeat([]byte("x"), 1<<20+64)
	for text, want := range map[string]bool{
		"kubernetes v1.36.3":       true,
		"1.36.3":                   true,
		"dep\tx.test/m\tv1.36.3\t": false,
		"dep\tx.test/m\t1.36.3":    false,
		"\tv1.36.3 v1.36.3":        true,
		"x.test/m@v1.36.3/a.go":    false,
		"v1.36.30":                 false,
		"v1.36.30 v1.36.3":         true,
		"11.36.3":                  true, // the linker put another string before the version
		"2.1.36.3":                 true,
		"2v1.36.3":                 true, // text before the version is ignored
		"v1.36.3-rc.1":             false,
		"v1.36.3-alpha.0":          false,
		"v1.36.3-eks-113cf36":      true,
		"v1.36.3+k3s1":             true,
		"v1.36":                    false,
	} {
		for before := range 12 {
			for _, pad := range []int{0, 1<<20 - 24, 1<<20 - 12} {
				copy(body[pad+before:], text)
				if got, err := hasVersion(bytes.NewReader(body[:pad+before+len(text)]), "v1.36.3"); got != want || err != nil {
					t.Errorf("%q behind %d bytes: %v, %v", text, pad+before, got, err)
				}
				copy(body[pad+before:], strings.Repeat("x", len(text)))
			}
		}
		if got, err := hasVersion(iotest.OneByteReader(strings.NewReader(text)), "v1.36.3"); got != want || err != nil {
			t.Errorf("%q read byte by byte: %v, %v", text, got, err)
		}
	}
}
