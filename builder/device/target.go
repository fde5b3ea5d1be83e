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

// Target is an open disk, or a file that plays one, to be written whole. No
// other program can open a disk in a way that excludes others meanwhile: the
// kernel mounts nothing of it.
type Target struct {
	// Size and Sector in bytes. A file has no sectors: Sector is 0.
	Size, Sector int64

	f *os.File
	// block: it is a block device.
	block bool
	// direct: reads and writes pass the page cache.
	direct bool
	// zeroes: the device makes zeros faster than by being written to.
	zeroes bool
}

// ErrBusy says that somebody uses the device.
var ErrBusy = errors.New("another program, a mount or a holder uses it")

// ErrChanged says that a path does not lead where it led.
var ErrChanged = errors.New("it became something else after it was looked at, nothing was written: run edgebake again")

// sameKind checks that what was opened is what was decided on: a regular file,
// or a block device. Between the two somebody may have put another thing there.
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

// IsFile reports whether it is a regular file.
func (t *Target) IsFile() bool { return !t.block }

// IsFile reports whether path is a regular file.
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
		return false, fmt.Errorf("it is not a disk but a file in memory, made by a program that wrote to a disk that was not there: remove it (rm %s), and plug the disk in again", path)
	case fi.Mode().IsRegular():
		return true, nil
	case fi.Mode()&fs.ModeDevice != 0 && fi.Mode()&fs.ModeCharDevice == 0:
		return false, nil
	case fi.IsDir():
		return false, errors.New("it is a directory: name a disk")
	}
	return false, errors.New("it is neither a block device nor a file")
}

// amongDevices reports whether a path is where the kernel shows devices: what
// else is made there is in memory and gone at the next start. /dev/shm is there
// for files.
func amongDevices(path string) bool {
	path, err := filepath.Abs(path)
	return err == nil && strings.HasPrefix(path, "/dev/") && !strings.HasPrefix(path, "/dev/shm/")
}

// Hide makes a file one that only its owner may read, before secrets get into
// it. Who may read a disk is not ours to say.
func (t *Target) Hide() error {
	if t.block {
		return nil
	}
	return file.Hide(t.f)
}

// Close closes the disk.
func (t *Target) Close() error { return t.f.Close() }

// align is what buffers for direct reads and writes begin on.
const align = 4096
