package file

import (
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// openNameless opens a file in dir that has no name.
func openNameless(dir string, perm fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, perm)
	if err != nil {
		return nil, err
	}
	// Naming it later goes through /proc.
	if _, err := os.Stat(procPath(f)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// nameIt names a file that openNameless opened. The name must be free.
func nameIt(f *os.File, path string) error {
	return unix.Linkat(unix.AT_FDCWD, procPath(f), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// Release returns the room of n bytes to the file system, if it can take it back. The
// caller does not need them any more.
func (o *Output) Release(off, n int64) {
	_ = unix.Fallocate(int(o.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

// writeBehind has the kernel begin to store some bytes, so that Commit, which
// waits for all of them, does not find them all still to be stored.
func writeBehind(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
