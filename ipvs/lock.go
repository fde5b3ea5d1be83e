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

// Locks are files below RunDir, held by flock(2). Nobody but root can open
// them, so nobody else can hold them; the kernel releases them with the
// process, however it ends. The files stay: removing one would let two
// processes hold locks on two files of the same name.

// lockPatience is how long a lock may be held by somebody else: a predecessor
// that is about to end, or another program that edits the hosts file.
const lockPatience = 2 * time.Second

// errHeld means that another process holds a lock.
var errHeld = errors.New("held by another process")

// useRunDir makes the directory, or checks that nobody but root can put files
// into it.
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
		return os.Chmod(dir, 0o700) // an earlier version or kubelet made it for all to read
	case st.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written to by others: `chmod 0700 %s`", dir, dir)
	}
	return nil
}

// lockFile waits for the lock on a file as long as patience says.
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

// lockedBy reports whether an ipvscare keeps the virtual server, and which
// process it is; 0 if that cannot be found out.
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

// claim takes the lock on a virtual server and answers on its socket.
func (d *Daemon) claim(ctx context.Context, vip netip.AddrPort) (release func(), err error) {
	dir := d.opt.RunDir
	if dir == "" {
		return func() {}, nil
	}
	if err := useRunDir(dir); err != nil {
		return nil, fmt.Errorf("locking %s: %w", vip, err)
	}
	unlock, err := lockFile(ctx, lockPath(dir, vip), lockPatience)
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
	if err != nil { // what counts is the way to the API servers
		d.say("status", err)
		hangUp = func() {}
	}
	return func() { hangUp(); unlock() }, nil
}
