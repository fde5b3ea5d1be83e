package efivar

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/desk"
)

// TestWrite checks that a variable has its attributes before its value, and can be set twice. A
// machine without UEFI returns ErrUnsupported.
func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "EdgebakeBorn-0")
	for _, value := range []string{"a longer value", "short"} {
		if err := Write(path, []byte(value)); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "\x07\x00\x00\x00"+value {
			t.Errorf("%q, %v", b, err)
		}
	}
	if err := Write(filepath.Join(path, "none", "var"), nil); !errors.Is(err, errors.ErrUnsupported) && !errors.Is(err, syscall.ENOTDIR) {
		t.Error(err)
	}
	if err := Write(filepath.Join(t.TempDir(), "none", "var"), nil); !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
}

// TestWriteImmutable checks that a variable that the kernel has made immutable is written. The
// kernel does this to unknown variables.
func TestWriteImmutable(t *testing.T) {
	desk.NeedRoot(t, "it makes a file immutable")
	path := filepath.Join(t.TempDir(), "BootNext-0")
	if err := os.WriteFile(path, []byte("\x07\x00\x00\x00old"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const immutable = 0x10
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, immutable); err != nil {
		desk.Lacks(t, "this file system has no immutable files: %v", err)
	}
	defer unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)
	if err := os.WriteFile(path, []byte("x"), 0o600); err == nil {
		t.Fatal("an immutable file was written")
	}
	if err := Write(path, []byte("new")); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "\x07\x00\x00\x00new" {
		t.Errorf("%q, %v", b, err)
	}
}
