package file

import (
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// leaseFileSystems lists the file systems that refuse a lease only if another program has the file
// open. Network file systems also refuse leases for other reasons.
var leaseFileSystems = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.OVERLAYFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC}

// isOpenElsewhere requests a write lease, which the kernel grants only if no other program has the
// file open.
func isOpenElsewhere(f *os.File) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &st) != nil || !slices.Contains(leaseFileSystems, int64(st.Type)) {
		return false
	}
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err == nil {
		_, _ = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	}
	return errors.Is(err, unix.EAGAIN)
}
