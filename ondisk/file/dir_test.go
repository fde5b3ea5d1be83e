package file

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestMakeDir checks that undo removes the new directories that are still empty.
func TestMakeDir(t *testing.T) {
	t.Chdir(t.TempDir())
	there := func(want bool, names ...string) {
		t.Helper()
		for _, name := range names {
			if _, err := os.Lstat(name); (err == nil) != want {
				t.Errorf("%s is there: %v, %v", name, !want, err)
			}
		}
	}
	make := func(dir string) func() {
		t.Helper()
		undo, err := MakeDir(dir, 0o700)
		if err != nil {
			t.Fatal(err)
		}
		there(true, filepath.Clean(dir))
		return undo
	}
	if err := os.MkdirAll("old/empty", 0o755); err != nil {
		t.Fatal(err)
	}
	make("old/empty")()
	there(true, "old/empty")
	make("old/empty/a/b/")()
	there(true, "old/empty")
	there(false, "old/empty/a")
	make("./a/x/../b")()
	there(false, "a", "x")
	make(".")()
	there(true, ".")

	undo := make("a/b/c")
	if err := os.WriteFile("a/b/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	undo()
	there(true, "a/b/file")
	there(false, "a/b/c")

	// A directory below a file cannot be created, and its new parents are removed.
	if _, err := MakeDir("a/b/file/c/d", 0o700); !errors.Is(err, syscall.ENOTDIR) {
		t.Error(err)
	}
	if _, err := MakeDir("a/b/file", 0o700); !errors.Is(err, syscall.ENOTDIR) {
		t.Error(err)
	}
	if err := os.Symlink("nowhere", "link"); err != nil {
		t.Fatal(err)
	}
	if _, err := MakeDir("link", 0o700); err == nil {
		t.Error("a link to nowhere is a directory")
	}
	if err := os.Symlink(filepath.Join("old", "empty"), "to"); err != nil {
		t.Fatal(err)
	}
	make("to/d")()
	there(true, "to/.")
	there(false, "to/d")
	if _, err := os.Stat("nowhere"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
