package fetch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Stored is a blob of the cache.
type Stored struct {
	SHA256 string    `json:"sha256"`
	Size   int64     `json:"size"`
	Used   time.Time `json:"used"` // by a build, last
	owner  uint32
}

// List returns the blobs, those used last first.
func (c *Cache) List() ([]Stored, error) {
	dir := filepath.Join(c.dir, "blobs")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing the cache: %w", err)
	}
	var out []Stored
	for _, e := range entries {
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // replaced or pruned in the meantime
		}
		if err != nil {
			return nil, fmt.Errorf("listing the cache: %w", err)
		}
		if fi.Mode().IsRegular() {
			out = append(out, Stored{e.Name(), fi.Size(), fi.ModTime(), ownerOf(fi)})
		}
	}
	slices.SortStableFunc(out, func(a, b Stored) int {
		if d := b.Used.Compare(a.Used); d != 0 {
			return d
		}
		return strings.Compare(a.SHA256, b.SHA256)
	})
	return out, nil
}

// Limits are what Prune leaves. A zero value sets no limit.
type Limits struct {
	// UsedSince takes away what was not used since then.
	UsedSince time.Time
	// Keep takes away what was used longest ago, until no more than so many
	// bytes are left. Nil: no limit.
	Keep *int64
	// DryRun takes nothing away and reports what would go.
	DryRun bool
}

// Pruned is what Prune did.
type Pruned struct {
	// Freed went, Left stay. InUse is the part of Left that should have gone,
	// but a build that is running may need it.
	Freed, Left, InUse Amount
}

// Amount of blobs.
type Amount struct {
	Blobs int   `json:"blobs"`
	Bytes int64 `json:"bytes"`
}

func (a *Amount) add(s Stored) {
	a.Blobs++
	a.Bytes += s.Size
}

// Prune takes blobs away that were not used lately. It is safe beside builds:
// none begins while it works, and what a running one has used since it began,
// it keeps. What a running build has not come to yet may go; it makes or
// fetches that again.
func (c *Cache) Prune(l Limits) (Pruned, error) {
	var p Pruned
	// The order is that of newSession and Has, which never hold both.
	for _, d := range []string{"tmp", "blobs"} {
		unlock, err := lockDir(filepath.Join(c.dir, d), unix.LOCK_EX)
		if err != nil {
			return p, fmt.Errorf("pruning the cache: %w", err)
		}
		defer unlock()
	}
	running, err := c.others()
	if err != nil {
		return p, fmt.Errorf("pruning the cache: %w", err)
	}
	blobs, err := c.List()
	if err != nil {
		return p, err
	}
	var errs []error
	full := false
	for _, s := range blobs {
		full = full || l.Keep != nil && p.Left.Bytes+s.Size > *l.Keep
		if old := !l.UsedSince.IsZero() && s.Used.Before(l.UsedSince); !old && !full {
			p.Left.add(s)
			continue
		}
		if slices.ContainsFunc(running, func(r session) bool { return r.mayUse(s) }) {
			p.InUse.add(s)
			p.Left.add(s)
			continue
		}
		if !l.DryRun {
			if err := os.Remove(c.BlobPath(s.SHA256)); err != nil {
				errs = append(errs, fmt.Errorf("pruning the cache: %w", err))
				p.Left.add(s)
				continue
			}
			os.Remove(c.notePath(s.SHA256))
		}
		p.Freed.add(s)
	}
	if !l.DryRun {
		errs = append(errs, c.dropKeys())
	}
	return p, errors.Join(errs...)
}

// session is another process that has the cache open.
type session struct {
	started time.Time
	owner   uint32
}

// mayUse tells whether the session relies on a blob: it has used it since it
// began, or it could not leave a mark on it, since the blob is another
// user's.
func (r session) mayUse(s Stored) bool {
	return !s.Used.Before(r.started) || r.owner != 0 && r.owner != s.owner
}

// others lists the living sessions but this one. Whoever calls it holds the
// lock on tmp.
func (c *Cache) others() ([]session, error) {
	tmp := filepath.Join(c.dir, "tmp")
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return nil, err
	}
	var out []session
	for _, e := range entries {
		dir := filepath.Join(tmp, e.Name())
		if dir == c.session {
			continue
		}
		if unlock, err := lockDir(dir, unix.LOCK_EX|unix.LOCK_NB); err == nil {
			unlock() // its process is gone
			continue
		}
		r := session{} // one we cannot look into may use everything
		if fi, err := os.Stat(filepath.Join(dir, startedFile)); err == nil {
			r = session{fi.ModTime(), ownerOf(fi)}
		} else if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
			continue // it has just ended
		}
		out = append(out, r)
	}
	return out, nil
}

// dropKeys removes the keys whose blobs are gone.
func (c *Cache) dropKeys() error {
	dir := filepath.Join(c.dir, "keys")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("pruning the cache: %w", err)
	}
	var errs []error
	for _, e := range entries {
		p := filepath.Join(dir, e.Name())
		sha, err := os.ReadFile(p)
		if err != nil {
			continue // replaced in the meantime
		}
		if _, err := os.Lstat(c.BlobPath(string(sha))); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, os.Remove(p))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("pruning the cache: %w", err)
	}
	return nil
}

func ownerOf(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}
