package walls

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestNoPrograms: what a compiler makes is not kept beside the source. `go build
// ./cmd/edgebake` leaves a program where it is called, and one that is committed is in
// every clone from then on.
func TestNoPrograms(t *testing.T) {
	const root = "../.."
	made := []string{filepath.Join(root, "bin"), filepath.Join(root, "build"), filepath.Join(root, ".git")}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		for _, dir := range made {
			if path == dir && d.IsDir() { // of a linked worktree .git is a file
				return fs.SkipDir
			}
		}
		if !d.Type().IsRegular() {
			return nil
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		head := make([]byte, 4)
		if n, err := io.ReadFull(f, head); n == len(head) && err == nil && string(head) == "\x7fELF" {
			t.Errorf("%s is a program: remove it", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
