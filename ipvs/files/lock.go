package files

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/ondisk"
)

// Locks are files in RunDir, locked with flock(2). Only root can open them, and the kernel unlocks
// them when the process ends. The files are never removed: otherwise two processes could hold the
// lock of the same name.

// ErrHeld means that another process holds the lock.
var ErrHeld = errors.New("held by another process")

// UseRunDir creates the directory, or checks that only root can write to it.
func UseRunDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	uid, _ := owner(st)
	switch {
	case !st.IsDir():
		return fmt.Errorf("%s is not a directory: remove it", dir)
	case uid >= 0 && uid != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d: remove it, or choose another directory with --run-dir", dir, uid)
	case dir == ondisk.IPVSRunDir && st.Mode().Perm() != 0o700:
		return os.Chmod(dir, 0o700) // an earlier version or kubelet made it readable for all users
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written to by others: `chmod 0700 %s`", dir, dir)
	}
	return nil
}

// Lock locks a file. It waits for the lock for at most patience.
func Lock(ctx context.Context, path string, patience time.Duration) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(patience); ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { f.Close() }, nil
		case !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR):
			f.Close()
			return nil, &os.PathError{Op: "flock", Path: path, Err: err}
		case time.Now().After(end):
			f.Close()
			return nil, fmt.Errorf("%s: %w", path, ErrHeld)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(patience / 40):
		}
	}
}
