package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// Files changes the files below Root. After a power cut, a file is either the old or the new one.
// Users with write access to a directory cannot redirect a change.
type Files struct{ Root string }

func (f Files) root() beneath.Root { return beneath.Root{Dir: f.Root} }

// WriteFile replaces a file atomically, and makes missing directories.
func (f Files) WriteFile(path string, data []byte, o machine.Owner) error {
	return f.root().WriteFile(path, data, o)
}

// Stream is like WriteFile, with contents produced by write.
func (f Files) Stream(path string, o machine.Owner, write func(io.Writer) error) error {
	return f.root().Stream(path, o, write)
}

// Rename moves a file or a directory. It fails if to exists.
func (f Files) Rename(from, to string) error { return f.root().Rename(from, to) }

// lockTimeout is how long Lock waits for another program.
const lockTimeout = 30 * time.Second

// Lock creates the file if it is missing, and locks it exclusively. The file is never removed:
// otherwise two programs could hold locks on two files of the same name. If another program holds
// the lock until ctx's deadline or for half a minute, the error is machine.ErrLocked.
func (f Files) Lock(ctx context.Context, path string) (unlock func(), err error) {
	p := filepath.Join(f.Root, path)
	if err := os.Mkdir(filepath.Dir(p), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	l, err := os.OpenFile(p, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for {
		err := unix.Flock(int(l.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { l.Close() }, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
			if err = Sleep(ctx, 50*time.Millisecond); err == nil {
				continue
			}
			if errors.Is(err, context.DeadlineExceeded) {
				err = machine.ErrLocked
			}
		}
		l.Close()
		return nil, fmt.Errorf("locking %s: %w", p, err)
	}
}

// Symlink makes path a link to target, atomically.
func (f Files) Symlink(target, path string) error { return f.root().Symlink(target, path) }

// Link makes path another name of target, atomically.
func (f Files) Link(target, path string) error { return f.root().Link(target, path) }

// Mkdir makes a directory, or sets owner and permissions of an existing one.
func (f Files) Mkdir(path string, o machine.Owner) error {
	return f.root().Mkdir(path, o)
}

// Remove removes a file, a link or an empty directory. It is no error if the directory is not empty
// or the path is missing.
func (f Files) Remove(path string) error { return f.root().Remove(path) }

// RemoveAll removes path and everything below it.
func (f Files) RemoveAll(path string) error { return f.root().RemoveAll(path) }

// Sync syncs each path and the whole file system that contains it, including changes by other
// programs. It also returns earlier write errors of the kernel.
func (f Files) Sync(paths ...string) error {
	var errs []error
	synced := map[uint64]bool{}
	for _, path := range paths {
		errs = append(errs, syncPath(filepath.Join(f.Root, path), synced))
	}
	return errors.Join(errs...)
}

func syncPath(p string, synced map[uint64]bool) error {
	file, err := os.Open(p)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return fmt.Errorf("finding the file system of %s: %w", p, err)
	}
	if synced[st.Dev] {
		return nil
	}
	synced[st.Dev] = true
	if err := unix.Syncfs(int(file.Fd())); err != nil {
		return fmt.Errorf("syncing the file system of %s: %w", p, err)
	}
	return nil
}
