// Package disktest is what the tests of disk formats share: the programs of
// others that judge our bytes, and blobs in memory. For tests only.
package disktest

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/ondisk/file"
	"github.com/edgebake/edgebake/configs/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
)

// Oracle runs a program that judges our work and returns what it prints.
// Without the program the test is skipped at a desk, and fails in CI.
func Oracle(t testing.TB, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		desk.Lacks(t, "the oracle %s is missing", name)
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Sum is the SHA-256 of a file, in hex.
func Sum(t testing.TB, path string) string {
	t.Helper()
	sum, err := file.SHA256(path)
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// Scratch is a directory for files that a test makes and removes many of, or
// large ones: in memory, where there is some for that.
func Scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "edgebake-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Blobs are blobs in memory, by name.
type Blobs map[string][]byte

// OpenBlob makes Blobs a tree.Blobs.
func (m Blobs) OpenBlob(name string) (tree.BlobFile, error) {
	b, ok := m[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return struct {
		io.ReaderAt
		io.Closer
	}{bytes.NewReader(b), io.NopCloser(nil)}, nil
}

// Mounted runs a test's body with a folder below which the script has mounted
// small or read-only file systems, "$0" in it: the test's program runs itself
// again in namespaces of its own.
func Mounted(t *testing.T, script string, body func(t *testing.T, dir string)) {
	t.Helper()
	const variable = "EDGEBAKE_TEST_SMALL_DISK"
	if dir := os.Getenv(variable); dir != "" {
		body(t, dir)
		return
	}
	dir := t.TempDir()
	cmd := exec.Command("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script+`; exec "$@"`,
		dir, os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+dir)
	out, err := cmd.CombinedOutput()
	if err == nil && strings.Contains(string(out), "--- PASS") {
		return
	}
	if !strings.Contains(string(out), "=== RUN") {
		desk.Lacks(t, "no namespaces here: %v\n%s", err, out)
	}
	t.Errorf("%v\n%s", err, out)
}
