package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/ondisk"
)

// Locks are files in RunDir, locked with flock(2). Only root can open them, and
// the kernel releases them when the process ends. The files are never removed,
// because two processes could then lock two files of the same name.

// lockTimeout is the time to wait for a lock, because the previous process may
// be ending.
const lockTimeout = 2 * time.Second

// errHeld means that another process holds the lock.
var errHeld = errors.New("held by another process")

// useRunDir creates the directory, or checks that only root can write to it.
func useRunDir(dir string) error {
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
		return fmt.Errorf("%s belongs to user %d: remove it, or give another one with --run-dir", dir, uid)
	case dir == ondisk.IPVSRunDir && st.Mode().Perm() != 0o700:
		return os.Chmod(dir, 0o700) // an earlier version or kubelet made it readable for all users
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written to by others: `chmod 0700 %s`", dir, dir)
	}
	return nil
}

// lockFile locks a file; it waits for at most patience.
func lockFile(ctx context.Context, path string, patience time.Duration) (release func(), err error) {
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
			return nil, fmt.Errorf("%s: %w", path, errHeld)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(patience / 40):
		}
	}
}

func lockPath(runDir string, vip netip.AddrPort) string {
	return filepath.Join(runDir, vip.String()+".lock")
}

// lockedBy reports whether an ipvscare maintains the virtual server, and its
// process ID, or 0 if unknown.
func lockedBy(runDir string, vip netip.AddrPort) (pid int, locked bool) {
	path := lockPath(runDir, vip)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return 0, false
	}
	release, err := lockFile(context.Background(), path, 0)
	if err == nil {
		release()
		return 0, false
	}
	if !errors.Is(err, errHeld) {
		return 0, false
	}
	pid, _ = peer(socketPath(runDir, vip))
	return pid, true
}

// claim locks a virtual server and serves its status socket.
func (d *Daemon) claim(ctx context.Context, vip netip.AddrPort) (release func(), err error) {
	dir := d.opt.RunDir
	if dir == "" {
		return func() {}, nil
	}
	if err := useRunDir(dir); err != nil {
		return nil, fmt.Errorf("locking %s: %w", vip, err)
	}
	unlock, err := lockFile(ctx, lockPath(dir, vip), lockTimeout)
	if errors.Is(err, errHeld) {
		who := "another ipvscare"
		if pid, err := peer(socketPath(dir, vip)); err == nil {
			who += fmt.Sprintf(" (process %d)", pid)
		}
		return nil, fmt.Errorf("%s already keeps %s: stop it, or give this one another virtual address", who, vip)
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", vip, err)
	}
	hangUp, err := d.answerStatus(ctx, socketPath(dir, vip))
	if err != nil { // not fatal: IPVS works without it
		d.logChange("status", err)
		hangUp = func() {}
	}
	return func() { hangUp(); unlock() }, nil
}
