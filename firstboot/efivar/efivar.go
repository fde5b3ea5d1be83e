// Package efivar writes UEFI firmware variables.
package efivar

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Write writes the UEFI variable at path in efivarfs: its value, with the attributes non-volatile,
// boot services and runtime, in one write. Without efivarfs it returns errors.ErrUnsupported.
func Write(path string, value []byte) error {
	if _, err := os.Stat(filepath.Dir(path)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("setting %s: %w", path, errors.ErrUnsupported)
	}
	if err := mutable(path); err != nil {
		return fmt.Errorf("setting %s: %w", path, err)
	}
	const attributes = 1 | 2 | 4
	return os.WriteFile(path, append(binary.LittleEndian.AppendUint32(nil, attributes), value...), 0o600)
}

// mutable clears the immutable flag, which the kernel sets on unknown variables.
func mutable(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	const immutable = 0x10 // FS_IMMUTABLE_FL
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // the file system has no flags
	}
	if err != nil || flags&immutable == 0 {
		return err
	}
	return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags&^immutable)
}
