package file

import (
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// openNameless creates a file without a name in dir.
func openNameless(dir string, perm fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, perm)
	if err != nil {
		return nil, err
	}
	// Naming the file later requires /proc.
	if _, err := os.Stat(procPath(f)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// nameIt gives a name to a file that openNameless created. The name must not exist yet.
func nameIt(f *os.File, path string) error {
	return unix.Linkat(unix.AT_FDCWD, procPath(f), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// PunchHole frees the disk space of n bytes of the file that the caller does not need any more. It
// does nothing if the file system does not support that.
func (o *Output) PunchHole(off, n int64) {
	_ = unix.Fallocate(int(o.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

// writeBehind starts to write a range of the file to disk.
func writeBehind(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
