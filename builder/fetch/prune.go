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

// Stored is a blob in the cache.
type Stored struct {
	SHA256 string    `json:"sha256"`
	Size   int64     `json:"size"` // bytes, including executable copies
	Used   time.Time `json:"used"` // last use by a build
	owners []uint32  // owners of the blob and of the file in used/
	copies []string
}

// List returns the blobs, the most recently used first.
func (c *Cache) List() ([]Stored, error) {
	dir := filepath.Join(c.dir, "blobs")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing the cache: %w", err)
	}
	programs, err := c.programs()
	if err != nil {
		return nil, err
	}
	var out []Stored
	for _, e := range entries {
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // replaced or pruned meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("listing the cache: %w", err)
		}
		if fi.Mode().IsRegular() {
			s := Stored{SHA256: e.Name(), Size: fi.Size(), Used: fi.ModTime(), owners: []uint32{ownerOf(fi)}}
			if mark, err := os.Lstat(c.markPath(s.SHA256)); err == nil {
				s.Used, s.owners = mark.ModTime(), append(s.owners, ownerOf(mark))
			}
			for path, size := range programs {
				if isSHA256(s.SHA256) && strings.HasSuffix(path, programSuffix(s.SHA256)) {
					s.Size += size
					s.copies = append(s.copies, path)
				}
			}
			out = append(out, s)
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

// programs returns the paths of all executable copies of blobs, with their sizes in bytes.
func (c *Cache) programs() (map[string]int64, error) {
	return c.sizes("programs")
}

// sizes returns the paths of all files in a directory of the cache, with their sizes in bytes.
func (c *Cache) sizes(dir string) (map[string]int64, error) {
	out := map[string]int64{}
	err := filepath.WalkDir(filepath.Join(c.dir, dir), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return skipGone(err)
		}
		fi, err := e.Info()
		if err == nil {
			out[path] = fi.Size()
		}
		return skipGone(err)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the cache: %w", err)
	}
	return out, nil
}

// skipGone ignores the error for a file that another process has removed.
func skipGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Notes returns the total size of the cache's other files: keys, records, locks and unfinished
// blobs.
func (c *Cache) Notes() (int64, error) {
	var sum int64
	for _, dir := range []string{"keys", "sound", "used", "locks", "tmp"} {
		sizes, err := c.sizes(dir)
		if err != nil {
			return 0, err
		}
		for _, n := range sizes {
			sum += n
		}
	}
	return sum, nil
}

// Limits determines which blobs Prune removes. The zero value removes none.
type Limits struct {
	// UsedSince, if set, removes all blobs that were last used before it.
	UsedSince time.Time
	// Keep, if not nil, removes the least recently used blobs until at most this number of bytes is
	// left.
	Keep *int64
	// DryRun only reports what Prune would remove.
	DryRun bool
}

// Pruned is the result of Prune.
type Pruned struct {
	// Freed counts the removed blobs, and Left the others. InUse counts the blobs of Left that are
	// kept only because a running build may need them.
	Freed, Left, InUse Amount
}

// Amount is a number of blobs and their size.
type Amount struct {
	Blobs int   `json:"blobs"`
	Bytes int64 `json:"bytes"`
}

func (a *Amount) add(s Stored) {
	a.Blobs++
	a.Bytes += s.Size
}

// Prune removes blobs according to the limits. A build that starts while Prune runs waits for its
// end. A running build keeps the blobs that it has used, and fetches or makes other blobs again if
// it needs them.
func (c *Cache) Prune(l Limits) (Pruned, error) {
	var p Pruned
	// newSession and Has never hold both locks at once, so the order does not matter.
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
			for _, path := range append(s.copies, c.verifiedPath(s.SHA256), c.markPath(s.SHA256)) {
				if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
					errs = append(errs, fmt.Errorf("pruning the cache: %w", err))
				}
			}
		}
		p.Freed.add(s)
	}
	if !l.DryRun {
		errs = append(errs, c.dropKeys(), c.dropNotes(len(running) == 0))
	}
	return p, errors.Join(errs...)
}

// dropNotes removes the records and executable copies of removed blobs and, if no other session
// runs, the lock files.
func (c *Cache) dropNotes(alone bool) error {
	var errs []error
	drop := func(dir string, useless func(name string) bool) {
		entries, err := os.ReadDir(filepath.Join(c.dir, dir))
		errs = append(errs, err)
		for _, e := range entries {
			if useless(e.Name()) {
				errs = append(errs, os.RemoveAll(filepath.Join(c.dir, dir, e.Name())))
			}
		}
	}
	blobs, err := os.ReadDir(filepath.Join(c.dir, "blobs"))
	errs = append(errs, err)
	if err == nil {
		for _, dir := range []string{"sound", "used"} {
			drop(dir, func(name string) bool {
				return !slices.ContainsFunc(blobs, func(b fs.DirEntry) bool { return b.Name() == name })
			})
		}
		drop("programs", func(name string) bool {
			return !slices.ContainsFunc(blobs, func(b fs.DirEntry) bool {
				return isSHA256(b.Name()) && strings.HasSuffix(name, programSuffix(b.Name()))
			})
		})
	}
	if alone {
		drop("locks", func(string) bool { return true })
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("pruning the cache: %w", err)
	}
	return nil
}

// session is another open session of the cache.
type session struct {
	started time.Time
	owner   uint32
}

// mayUse reports whether the session may depend on a blob: either the blob was used since the
// session began, or another user owns its files, so that the session could not mark it as used.
func (r session) mayUse(s Stored) bool {
	return !s.Used.Before(r.started) || r.owner != 0 && slices.ContainsFunc(s.owners, func(o uint32) bool { return o != r.owner })
}

// others returns the other open sessions. The caller must hold the lock on tmp.
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
			unlock() // its process has ended
			continue
		}
		r := session{} // a session whose file cannot be read may use any blob
		if fi, err := os.Stat(filepath.Join(dir, startedFile)); err == nil {
			r = session{fi.ModTime(), ownerOf(fi)}
		} else if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
			continue // it has just ended
		}
		out = append(out, r)
	}
	return out, nil
}

// dropKeys removes the keys whose blobs have been removed.
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
			continue // replaced meanwhile
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

func groupOf(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Gid
	}
	return 0
}

func ownerOf(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}
