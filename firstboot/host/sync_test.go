package host

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestSync(t *testing.T) {
	f := Files{Root: t.TempDir()}
	if err := os.WriteFile(filepath.Join(f.Root, "file"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync("/file", "/"); err != nil {
		t.Error(err)
	}
	if err := f.Sync("/file", "/gone"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}
