package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/ondisk/file"
)

// Target is an open disk, or a file used as one, that will be overwritten completely. While a disk
// is open, no other program can open it exclusively, and the kernel does not mount it.
type Target struct {
	// Size is in bytes. Sector is the size of a sector in bytes, or 0 for a file.
	Size, Sector int64

	f *os.File
	// block means that this is a block device.
	block bool
	// direct means that reads and writes bypass the page cache.
	direct bool
	// zeroes means that the device itself can zero ranges.
	zeroes bool
}

// ErrBusy means that the device is in use.
var ErrBusy = errors.New("a program, a mount or another device (LVM, RAID) uses the disk")

// ErrChanged means that the path leads to another disk or file than the one that was checked.
var ErrChanged = errors.New("the disk was replaced after edgebake had checked it; nothing was written: run edgebake again")

// sameKind checks that the opened file is a regular file or a disk, as IsFile reported before. The
// file at the path may have been replaced meanwhile.
func sameKind(f *os.File, isFile bool) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	block := fi.Mode()&fs.ModeDevice != 0 && fi.Mode()&fs.ModeCharDevice == 0
	if isFile && !fi.Mode().IsRegular() || !isFile && !block {
		return ErrChanged
	}
	return nil
}

// IsFile reports whether the target is a regular file.
func (t *Target) IsFile() bool { return !t.block }

// IsFile reports whether the file at path is a regular file, as opposed to a block device.
func IsFile(path string) (bool, error) {
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && amongDevices(path):
		return false, fmt.Errorf("%w: edgebake devices lists the disks", fs.ErrNotExist)
	case errors.Is(err, fs.ErrNotExist):
		return false, fmt.Errorf("%w: edgebake devices lists the disks; for a file, make one first (truncate -s 8G %s)", fs.ErrNotExist, path)
	case err != nil:
		return false, err
	case fi.Mode().IsRegular() && amongDevices(path):
		return false, fmt.Errorf("this is not a disk but a file in memory, left by a program that wrote to a missing disk: remove it (rm %s), and plug the disk in again", path)
	case fi.Mode().IsRegular():
		return true, nil
	case fi.Mode()&fs.ModeDevice != 0 && fi.Mode()&fs.ModeCharDevice == 0:
		return false, nil
	case fi.IsDir():
		return false, errors.New("this is a directory: name a disk")
	}
	return false, errors.New("this is neither a block device nor a file")
}

// amongDevices reports whether a path is in /dev. A new file there would be in memory and lost at a
// reboot. /dev/shm is meant for files and does not count.
func amongDevices(path string) bool {
	path, err := filepath.Abs(path)
	return err == nil && strings.HasPrefix(path, "/dev/") && !strings.HasPrefix(path, "/dev/shm/")
}

// Hide makes a file readable only by its owner, before secrets are written to it. It does nothing
// for a disk.
func (t *Target) Hide() error {
	if t.block {
		return nil
	}
	return file.Hide(t.f)
}

// Close closes the disk or file.
func (t *Target) Close() error { return t.f.Close() }

// align is the alignment of buffers for direct I/O, in bytes.
const align = 4096
