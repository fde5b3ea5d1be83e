package file

import (
	"errors"
	"os"
)

// ErrOpen says that a program has a file open.
var ErrOpen = errors.New("another program has it open, and would read what is written to it: close that first")

// Hide makes an open file one that only its owner may read, before secrets get
// into it. Who has it open already, from when others might read it, would read
// them too: that is ErrOpen, as far as the file system tells.
func Hide(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if others := st.Mode().Perm() & 0o077; others != 0 {
		if err := f.Chmod(st.Mode().Perm() &^ others); err != nil {
			return err
		}
	}
	if isOpenElsewhere(f) {
		return ErrOpen
	}
	return nil
}
