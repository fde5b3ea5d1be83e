package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/edgebake/edgebake/ipvs/files"
)

// lockTimeout limits the wait for a lock: the previous process may need some time to end.
const lockTimeout = 2 * time.Second

func lockPath(runDir string, vip netip.AddrPort) string {
	return filepath.Join(runDir, vip.String()+".lock")
}

// lockedBy reports whether an ipvscare daemon maintains the virtual server. pid is its process ID,
// or 0 if unknown.
func lockedBy(runDir string, vip netip.AddrPort) (pid int, locked bool) {
	path := lockPath(runDir, vip)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return 0, false
	}
	unlock, err := files.Lock(context.Background(), path, 0)
	if err == nil {
		unlock()
	}
	if !errors.Is(err, files.ErrHeld) {
		return 0, false
	}
	pid, _ = peer(socketPath(runDir, vip))
	return pid, true
}

// claim locks a virtual server and serves its status socket.
func (d *Daemon) claim(ctx context.Context, vip netip.AddrPort) (unlock func(), err error) {
	dir := d.opt.RunDir
	if dir == "" {
		return func() {}, nil
	}
	if err := files.UseRunDir(dir); err != nil {
		return nil, fmt.Errorf("locking %s: %w", vip, err)
	}
	unlockFile, err := files.Lock(ctx, lockPath(dir, vip), lockTimeout)
	if errors.Is(err, files.ErrHeld) {
		who := "another ipvscare"
		if pid, err := peer(socketPath(dir, vip)); err == nil {
			who += fmt.Sprintf(" (process %d)", pid)
		}
		return nil, fmt.Errorf("%s already maintains %s: stop it, or give this one another virtual address", who, vip)
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", vip, err)
	}
	hangUp, err := d.answerStatus(ctx, socketPath(dir, vip))
	if err != nil { // not fatal: IPVS works without the socket
		d.logChange("status", err)
		hangUp = func() {}
	}
	return func() { hangUp(); unlockFile() }, nil
}
