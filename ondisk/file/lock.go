package file

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked means that another program has locked the file.
var ErrLocked = errors.New("another program has locked the file")

// Lock locks a file, exclusively or shared, until the file is closed. It does not wait: if another
// program has locked the file, Lock returns ErrLocked.
func Lock(f *os.File, exclusive bool) error {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return ErrLocked
	case err != nil:
		return fmt.Errorf("the file system cannot lock files (%w): use a local disk", err)
	}
	return nil
}
