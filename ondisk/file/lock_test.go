package file

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	opened := func() *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	a, b := opened(), opened()
	if err := errors.Join(Lock(a, false), Lock(b, false)); err != nil {
		t.Fatal(err)
	}
	if err := Lock(opened(), true); !errors.Is(err, ErrLocked) {
		t.Errorf("alone beside two others: %v", err)
	}
	a.Close()
	b.Close()
	if err := Lock(opened(), true); err != nil {
		t.Error(err)
	}
	if err := Lock(opened(), false); !errors.Is(err, ErrLocked) {
		t.Errorf("beside one that is alone: %v", err)
	}
	// Locking a closed file fails, but not because another program has locked it.
	if err := Lock(a, true); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("closed: %v", err)
	}
}
