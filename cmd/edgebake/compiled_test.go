package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/pace"
)

// TestCompiledInTwoWays checks that two builds of edgebake with the same commit and inputs make the
// same golden digest: this test, which has no version, and `go build` in a repository.
func TestCompiledInTwoWays(t *testing.T) {
	pace.Takes(t, 10*time.Second)
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	repository := repositoryOf(t, root)
	c := newCLI(t)
	c.project(nil)
	bin := filepath.Join(t.TempDir(), "edgebake")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=true", "-o", bin, "./cmd/edgebake")
	cmd.Dir = repository
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as in `make build`, so that its compiled packages are reused
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var versions, golden []string
	for _, edgebake := range []func(args ...string) []byte{
		func(args ...string) []byte { c.run(0, args...); return []byte(c.out) },
		func(args ...string) []byte { return output(t, bin, args...) },
	} {
		var v struct{ Version string }
		if err := json.Unmarshal(edgebake("version", "-o", "json"), &v); err != nil {
			t.Fatal(err)
		}
		edgebake("build", "image.yaml", "--force", "--quiet")
		raw, err := os.ReadFile("tiny.report.json")
		if err != nil {
			t.Fatal(err)
		}
		var report struct{ Golden string }
		if err := json.Unmarshal(raw, &report); err != nil {
			t.Fatal(err)
		}
		versions, golden = append(versions, v.Version), append(golden, report.Golden)
	}
	if versions[0] == versions[1] {
		t.Errorf("both builds have version %q, so the test compares nothing", versions[0])
	}
	if golden[0] != golden[1] || golden[0] == "" {
		t.Errorf("golden digests %q of versions %q", golden, versions)
	}
}

// repositoryOf copies the source tree into a new repository. In a repository, Go records a version
// in the programs that it compiles.
func repositoryOf(t *testing.T, root string) string {
	t.Helper()
	dir := t.TempDir()
	git := desk.NeedProgram(t, "git", "git")
	// In CI the clone may belong to another user.
	list := exec.Command(git, "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = root
	names, err := list.Output()
	if err != nil {
		desk.Lacks(t, "the source tree is not in a Git repository: %v", err)
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(names), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the file was removed, and the removal is not committed
		}
		to := filepath.Join(dir, name)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, text, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "-A"}, {"-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "x"}} {
		cmd := exec.Command(git, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	return dir
}

func output(t *testing.T, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v", name, args, err)
	}
	return out
}
