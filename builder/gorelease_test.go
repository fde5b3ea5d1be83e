package builder

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// otherGo puts a fake go on PATH, which copies program instead of compiling. is sets the release of
// the fake, and the one that the module requires. asked returns the fake's calls since the last
// call of is, one per line.
func otherGo(t *testing.T, program string) (is func(release, requires string), asked func() string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "asked")
	is = func(release, requires string) {
		script := fmt.Sprintf(`#!/bin/sh
echo "$*" >>%[1]s/asked
case $1 in
version) echo "go version %[2]s linux/amd64" ;;
env) if grep -q '^go ' go.mod 2>/dev/null; then echo %[3]s; else echo %[2]s; fi ;;
mod) printf 'module m\n\ngo 1.26.0\n' >%[1]s/mod; echo '{"GoMod": "%[1]s/mod"}' ;;
build) while [ "$1" != -o ]; do shift; done; cp %[4]s "$2" ;;
esac
`, dir, release, requires, program)
		desk.WriteProgram(t, filepath.Join(dir, "go"), script)
		if err := os.WriteFile(log, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	is(runtime.Version(), runtime.Version())
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return is, func() string {
		said, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return string(said)
	}
}

// hello compiles a small program for amd64 with the go that runs the test.
func hello(t *testing.T, says string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module hello\n\ngo 1.26\n", "main.go": "package main\n\nfunc main() { println(\"" + says + "\") }\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", "hello")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOARCH=amd64", "CGO_ENABLED=0", "GOFLAGS=")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	return filepath.Join(dir, "hello")
}

// TestLockNamesGo checks that a build fails before it compiles if Go's release differs from the
// lock's, since another release compiles to other bytes.
func TestLockNamesGo(t *testing.T) {
	program, agent := hello(t, "compiled"), hello(t, "firstboot")
	here := runtime.Version()
	is, asked := otherGo(t, program)
	p := newProject(t, buildtest.Base(), func(s string) string {
		i := strings.Index(s, "kubernetes:")
		return s[:i] + strings.Replace(s[i:], "file: {dir: programs}", "goModule: {}", 1)
	})
	firstboot, err := os.ReadFile(agent)
	if err != nil {
		t.Fatal(err)
	}
	desk.WriteProgram(t, filepath.Join(p.dir, "programs/firstboot"), string(firstboot))
	out := filepath.Join(t.TempDir(), "a.raw")
	made, err := p.build(t, out)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := made.Plan.Lock().Encode()
	if err != nil {
		t.Fatal(err)
	}
	lock, err := plan.DecodeLock(raw)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"kubelet": here, "kubeadm": here, "firstboot": here, "base": "", "containerd": ""} {
		if got := lock.Inputs[name].Go; got != want {
			t.Errorf("lock: %s was compiled by %q, want %q", name, got, want)
		}
	}
	if strings.Count(string(raw), `"go": "`) != 3 {
		t.Errorf("the lock:\n%s", raw)
	}

	build := func(edit func(l *plan.Lock), locked bool) (*Result, error) {
		t.Helper()
		l, err := plan.DecodeLock(raw)
		if err != nil {
			t.Fatal(err)
		}
		if edit != nil {
			edit(l)
		}
		o := p.options(out)
		o.Force, o.Lock, o.Locked = true, l, locked
		return Build(t.Context(), p.image(t), o)
	}
	forget := func() {
		t.Helper()
		var err error
		if p.cache, err = fetch.Open(t.TempDir()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.cache.Close() })
	}

	// A cached program needs no Go.
	is("go1.99.1", "go1.99.1")
	if _, err := build(nil, true); err != nil {
		t.Error(err)
	}
	if said := asked(); said != "" {
		t.Errorf("go ran with %q", said)
	}
	for _, c := range []struct {
		release, requires string
		compiles          bool
	}{
		{"go1.99.1", "go1.99.1", false},
		{"go1.21.0", "go1.21.5", false}, // the module requires a release that differs from the lock's
		{"go1.21.0", here, true},        // go fetches the required release, as it did for the lock
		{here, here, true},
	} {
		forget()
		is(c.release, c.requires)
		_, err := build(nil, true)
		said := asked()
		if c.compiles != strings.Contains(said, "build") {
			t.Errorf("go %s, module %s: compiled: %t, want %t: %s", c.release, c.requires, !c.compiles, c.compiles, said)
		}
		if c.compiles {
			if err != nil {
				t.Errorf("go %s, module %s: %v", c.release, c.requires, err)
			}
			continue
		}
		got := c.requires
		for _, want := range []string{"kubernetes.source: ", "kubeadm and kubelet", "compiled by " + here, "is " + got, "GOTOOLCHAIN=" + here, "without --locked"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("go %s, module %s: error lacks %q: %v", c.release, c.requires, want, err)
			}
		}
	}

	// When a lock without the field Go is renewed, it gets the field.
	silent, err := build(func(l *plan.Lock) {
		in := l.Inputs["kubelet"]
		in.Go = ""
		l.Inputs["kubelet"] = in
	}, false)
	if err != nil || silent.Plan.Lock().Inputs["kubelet"].Go != here {
		t.Errorf("%v: %+v", err, silent.Plan.Lock().Inputs["kubelet"])
	}

	// If the lock does not record the release, only the digest shows the difference.
	old := func(l *plan.Lock) {
		in := l.Inputs["kubelet"]
		in.Go, in.SHA256 = "", strings.Repeat("ab", 32)
		l.Inputs["kubelet"] = in
	}
	forget()
	_, err = build(old, true)
	for _, want := range []string{"the lock has abab", "compiled by " + here + " here", "the lock does not record its Go release"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	renewed, err := build(old, false)
	if err != nil {
		t.Fatal(err)
	}
	if in := renewed.Plan.Lock().Inputs["kubelet"]; in.Go != here {
		t.Errorf("renewed: %+v", in)
	}
	// For a program from the source tree, the digests are compared first. The error still names
	// both releases.
	_, err = build(func(l *plan.Lock) {
		in := l.Inputs["firstboot"]
		in.Go, in.SHA256 = "go1.99.1", strings.Repeat("ab", 32)
		l.Inputs["firstboot"] = in
	}, true)
	if want := "(compiled by " + here + ", locked by go1.99.1)"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error lacks %q: %v", want, err)
	}
	// If there is no go at all, the error names the release of the lock.
	forget()
	t.Setenv("PATH", t.TempDir())
	_, err = build(nil, true)
	if want := "(the lock was made with " + here + ")"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error lacks %q: %v", want, err)
	}
}

// TestUnknownVersionsFirst checks that all unknown versions of modules and all unknown packages are
// reported together, before the first program is compiled.
func TestUnknownVersionsFirst(t *testing.T) {
	dir := t.TempDir()
	script := fmt.Sprintf(`#!/bin/sh
echo "$*" >>%[1]s/asked
case $1 in
version) echo "go version %[2]s linux/amd64" ;;
env) echo %[2]s ;;
list)
	case $* in
	*-versions*kubernetes) echo "k8s.io/kubernetes v1.36.3 v1.37.2" ;;
	*-versions*containerd*) echo "github.com/containerd/containerd/v2 v2.2.9" ;;
	*) echo "not found: $*" >&2; exit 1 ;;
	esac ;;
*) exit 1 ;;
esac
`, dir, runtime.Version())
	desk.WriteProgram(t, filepath.Join(dir, "go"), script)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	p := newProject(t, buildtest.Base(), func(s string) string {
		return strings.NewReplacer("file: {dir: programs}", "goModule: {}", "version: v1.36.3", "version: v1.36.99", "version: 2.2.9", "version: 2.2.99").Replace(toDebian(s))
	})
	standIn(t, p)
	aptGet := strings.Split(os.Getenv("PATH"), ":")[0] + "/apt-get"
	desk.WriteProgram(t, aptGet, "#!/bin/sh\ncase $* in *install*) echo 'E: Unable to locate package tcpdump' >&2; exit 100 ;; esac\n")
	_, err := p.build(t, filepath.Join(t.TempDir(), "a.raw"))
	for _, want := range []string{
		"kubernetes.version: the Go module proxy has no k8s.io/kubernetes v1.36.99: the newest is v1.37.2, the newest of that minor version is v1.36.3",
		"containerd.version: the Go module proxy has no github.com/containerd/containerd/v2 v2.2.99: the newest is v2.2.9",
		"base.debian.packages[0]: ",
	} {
		if err == nil || strings.Count(err.Error(), want) != 1 {
			t.Errorf("want once %q: %v", want, err)
		}
	}
	said, err := os.ReadFile(filepath.Join(dir, "asked"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(said), "download") || strings.Contains(string(said), "build") {
		t.Errorf("something was fetched or compiled:\n%s", said)
	}
}

// TestCachedProgramsSayCached checks that the step of a cached program announces no wait and
// contacts no module proxy.
func TestCachedProgramsSayCached(t *testing.T) {
	_, asked := otherGo(t, hello(t, "compiled"))
	p := newProject(t, buildtest.Base(), func(s string) string {
		i := strings.Index(s, "kubernetes:")
		return s[:i] + strings.Replace(s[i:], "file: {dir: programs}", "goModule: {}", 1)
	})
	build := func() (kubelet, versions []string) {
		t.Helper()
		o := p.options(filepath.Join(t.TempDir(), "a.raw"))
		var mu sync.Mutex
		o.Events = func(e Event) {
			mu.Lock()
			defer mu.Unlock()
			switch e.Step {
			case "kubelet":
				kubelet = append(kubelet, e.State+" "+e.Text)
			case "versions":
				versions = append(versions, e.State+" "+e.Text)
			}
		}
		if _, err := Build(t.Context(), p.image(t), o); err != nil {
			t.Fatal(err)
		}
		return kubelet, versions
	}
	kubelet, versions := build()
	if len(kubelet) < 2 || kubelet[0] != "start compiling with Go: one to four minutes on two cores; the result is cached" || len(versions) != 2 {
		t.Errorf("the first time: %q, %q", kubelet, versions)
	}
	before := asked()
	kubelet, versions = build()
	if want := []string{"start cached", "done "}; !slices.Equal(kubelet, want) || len(versions) > 0 {
		t.Errorf("the second time: %q, want %q; %q", kubelet, want, versions)
	}
	if said := strings.TrimPrefix(asked(), before); strings.Contains(said, "list") || strings.Contains(said, "build") {
		t.Errorf("the second build ran go:\n%s", said)
	}
}
