package walls

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestNoPrograms checks that no compiled program is in the source tree. `go build ./cmd/edgebake`
// writes one to the current directory, and once committed it would be in every clone.
func TestNoPrograms(t *testing.T) {
	const root = "../.."
	made := []string{filepath.Join(root, "bin"), filepath.Join(root, "build"), filepath.Join(root, ".git")}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		for _, dir := range made {
			if path == dir && d.IsDir() { // in a linked worktree .git is a file
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
