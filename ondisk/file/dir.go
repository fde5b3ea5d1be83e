package file

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// MakeDir creates a directory for outputs, including missing parents. undo removes those of the new
// directories that are still empty. Defer undo, so that failed work leaves no directories behind.
func MakeDir(dir string, perm fs.FileMode) (undo func(), err error) {
	dir = filepath.Clean(dir)
	var missing, made []string
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Lstat(d); err == nil || !errors.Is(err, fs.ErrNotExist) || d == filepath.Dir(d) {
			break
		}
		missing = append(missing, d)
	}
	undo = func() {
		for _, d := range slices.Backward(made) {
			if os.Remove(d) != nil {
				return
			}
		}
	}
	for _, d := range slices.Backward(missing) {
		err := os.Mkdir(d, perm)
		if err == nil {
			made = append(made, d)
		} else if !errors.Is(err, fs.ErrExist) { // another program may have created it in the meantime
			undo()
			return nil, err
		}
	}
	fi, err := os.Stat(dir)
	if err == nil && !fi.IsDir() {
		err = &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
	}
	if err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}
