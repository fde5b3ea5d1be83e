package file

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestHide checks that only the owner can read the file, and that Hide detects a program that
// opened it before.
func TestHide(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, []byte("golden"), 0o644); err != nil {
		t.Fatal(err)
	}
	open := func(flag int) *os.File {
		f, err := os.OpenFile(path, flag, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	f, reader := open(os.O_RDWR), open(os.O_RDONLY)
	for range 2 {
		if err := Hide(f); !errors.Is(err, ErrOpen) {
			t.Errorf("with a reader: %v", err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	reader.Close()
	if err := Hide(f); err != nil {
		t.Errorf("without one: %v", err)
	}
	writer := open(os.O_RDWR)
	if err := Hide(f); !errors.Is(err, ErrOpen) {
		t.Errorf("with a writer: %v", err)
	}
	writer.Close()
	// The lease is released, so the next program to open the file does not wait.
	open(os.O_RDONLY).Close()
}
