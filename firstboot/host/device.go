package host

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// device is a partition or a regular file.
type device struct{ *os.File }

// openDevice opens a partition or a file. To write to a partition, it opens it exclusively.
func openDevice(path string, write bool) (machine.Device, error) {
	flag := os.O_RDONLY
	if write {
		flag = os.O_RDWR
	}
	st, err := os.Stat(path)
	switch {
	case err == nil && st.Mode()&os.ModeDevice != 0 && write:
		flag |= unix.O_EXCL // opening a mounted device fails
	case errors.Is(err, os.ErrNotExist) && write:
		flag |= os.O_CREATE
	}
	f, err := os.OpenFile(path, flag|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, unix.EBUSY) {
		return nil, errors.New(path + " is mounted, or another program uses it")
	}
	if err != nil {
		return nil, err
	}
	return device{f}, nil
}

func (d device) Size() (int64, error) { return d.Seek(0, io.SeekEnd) }

// Sync also drops the kernel's cache of the device, so that later reads get the device's contents.
func (d device) Sync() error {
	if err := d.File.Sync(); err != nil {
		return err
	}
	if st, err := d.Stat(); err == nil && st.Mode()&os.ModeDevice != 0 {
		return unix.IoctlSetInt(int(d.Fd()), unix.BLKFLSBUF, 0)
	}
	return unix.Fadvise(int(d.Fd()), 0, 0, unix.FADV_DONTNEED)
}
