package file

import (
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// telling are the file systems that know of everybody who has a file open. Those
// of a network refuse a lease for reasons of their own.
var telling = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.OVERLAYFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC}

// isOpenElsewhere asks for a lease to write, which the kernel grants only where
// nobody else has the file open, and only to its owner.
func isOpenElsewhere(f *os.File) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &st) != nil || !slices.Contains(telling, int64(st.Type)) {
		return false
	}
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err == nil {
		_, _ = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	}
	return errors.Is(err, unix.EAGAIN)
}
