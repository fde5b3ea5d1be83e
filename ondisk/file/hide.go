package file

import (
	"errors"
	"os"
)

// ErrOpen means that another program has the file open.
var ErrOpen = errors.New("another program has the file open and could read the new content: close that program first")

// Hide removes other users' access to an open file before a secret is written to it. If another
// program has the file open, and the file system can detect that, Hide returns ErrOpen.
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
