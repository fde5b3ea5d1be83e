package file

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked says that another program has a file locked.
var ErrLocked = errors.New("another program has it locked")

// Lock takes a file for as long as it is open, alone or with others that share
// it. It does not wait: ErrLocked. Any other error says what to do.
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
		return fmt.Errorf("its file system cannot lock files (%w): use a local disk", err)
	}
	return nil
}
