package fetch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A session hashes each blob before its first use, unless the file's inode, size and times are the
// ones recorded after the blob was last hashed. HashAll ignores these records. A damaged blob is
// removed, and then fetched or made again.
//
// Bytes read from a blob are valid only if the file has not changed since the blob was verified.
// Therefore, a build calls Unchanged before it publishes its result.

// HashAll makes this session hash every blob before its first use, even if the blob seems
// unchanged. The caller must call it before the first use.
func (c *Cache) HashAll() { c.hashAll = true }

// Until lets ctx cancel the hashing of blobs, which may take long. The caller must call it before
// the first use.
func (c *Cache) Until(ctx context.Context) { c.until = ctx }

// rederive forgets the blob of a key, once in a session with HashAll. The lock does not contain the
// digest of such a blob, so somebody could have pointed the key to another valid blob.
func (c *Cache) rederive(key string) error {
	if !c.hashAll {
		return nil
	}
	if _, done := c.rederived.LoadOrStore(key, true); done {
		return nil
	}
	return c.Forget(key)
}

// OnDamage sets a function that is called with the digest of each damaged blob that was removed.
// Several goroutines may call it. The caller must call OnDamage before the first use.
func (c *Cache) OnDamage(tell func(sha string)) { c.damaged = tell }

// verdict is the state of a blob in a session.
type verdict struct {
	mu sync.Mutex
	// valid is the state of the file when the blob was verified, or nil if it was not.
	valid fs.FileInfo
	// changed means that the file's state has changed since then: bytes read from it may be wrong.
	changed bool
}

// look sets changed if the blob's file is no longer in the verified state.
func (v *verdict) look(path string) {
	if v.valid == nil {
		return
	}
	if fi, err := os.Lstat(path); err != nil || !sameState(fi, v.valid) {
		v.valid, v.changed = nil, true
	}
}

func (c *Cache) verdictOf(sha string) *verdict {
	v, _ := c.verdicts.LoadOrStore(sha, &verdict{})
	return v.(*verdict)
}

// Has reports whether the cache has a complete and undamaged blob. If so, Prune keeps the blob
// until the end of this session.
func (c *Cache) Has(sha string) bool {
	v := c.verdictOf(sha)
	v.mu.Lock()
	defer v.mu.Unlock()
	return c.has(sha, v) == nil
}

// has is like Has, for a caller that holds v.mu. It returns nil, or the reason why the blob cannot
// be used.
func (c *Cache) has(sha string, v *verdict) (err error) {
	if v.look(c.BlobPath(sha)); v.valid == nil {
		v.valid, err = c.verifyFirstUse(sha)
	}
	return err
}

// verifyFirstUse verifies a blob before its first use in this session, marks it as used, and
// returns its state. Meanwhile, Prune cannot remove the blob.
func (c *Cache) verifyFirstUse(sha string) (fs.FileInfo, error) {
	if !isSHA256(sha) {
		return nil, fs.ErrNotExist
	}
	unlock, err := lockDir(filepath.Join(c.dir, "blobs"), unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer unlock()
	fi, err := os.Lstat(c.BlobPath(sha))
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, errors.New("not a file")
	}
	if c.hashAll || !c.wasVerified(sha, fi) {
		fi, err = hashBlob(c.until, c.BlobPath(sha), sha)
		if errors.As(err, new(*DigestError)) {
			if removed, _ := c.drop(sha, fi); removed && c.damaged != nil {
				c.damaged(sha)
			}
		}
		if err != nil {
			return nil, err
		}
		c.saveVerified(sha, fi)
	}
	c.mark(sha)
	return fi, nil
}

// Unchanged returns an error for each blob that has changed since this session verified it: bytes
// read from it may be wrong.
func (c *Cache) Unchanged() error { return c.unchangedBut("") }

// unchangedBut is like Unchanged, for all blobs except one that the session did not read.
func (c *Cache) unchangedBut(one string) error {
	var changed []string
	c.verdicts.Range(func(sha, v any) bool {
		if sha == one {
			return true
		}
		blob := v.(*verdict)
		blob.mu.Lock()
		defer blob.mu.Unlock()
		if blob.look(c.BlobPath(sha.(string))); blob.changed {
			changed = append(changed, sha.(string))
		}
		return true
	})
	slices.Sort(changed)
	var errs []error
	for _, sha := range changed {
		errs = append(errs, c.changedError(sha))
	}
	return errors.Join(errs...)
}

func (c *Cache) changedError(sha string) error {
	return fmt.Errorf("cached input %s changed while it was in use (%s): run the build again, which replaces it if it is damaged; if this repeats, find the program that writes to the cache", sha, c.BlobPath(sha))
}

// drop removes a damaged blob, unless its file has changed since it was hashed.
func (c *Cache) drop(sha string, damaged fs.FileInfo) (removed bool, err error) {
	unlock, err := c.lockNames()
	if err != nil {
		return false, err
	}
	defer unlock()
	fi, err := os.Lstat(c.BlobPath(sha))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !sameState(fi, damaged) {
		return false, nil // another session has removed it or made it again
	}
	if err == nil {
		os.Remove(c.verifiedPath(sha))
		err = os.Remove(c.BlobPath(sha))
	}
	return err == nil, err
}

// lockNames keeps other sessions from naming or removing blobs. It must be held only briefly.
func (c *Cache) lockNames() (func(), error) {
	return lockDir(filepath.Join(c.dir, "sound"), unix.LOCK_EX)
}

// mark records the use of a blob in a separate file, since changing the blob's own time would
// change the state that other sessions compare. If another user owns that file, mark cannot change
// it, and Prune keeps the blob until this session ends.
func (c *Cache) mark(sha string) {
	path, at := c.markPath(sha), c.markTime()
	if err := os.Chtimes(path, time.Time{}, at); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return
	}
	f.Close()
	_ = os.Chtimes(path, time.Time{}, at)
}

func (c *Cache) markPath(sha string) string { return filepath.Join(c.dir, "used", sha) }

func isSHA256(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == sha256.Size
}

func (c *Cache) verifiedPath(sha string) string { return filepath.Join(c.dir, "sound", sha) }

// wasVerified reports whether the blob's file is in the state that was recorded after it was last
// hashed.
func (c *Cache) wasVerified(sha string, fi fs.FileInfo) bool {
	id := FileState(fi)
	b, err := os.ReadFile(c.verifiedPath(sha))
	return err == nil && id != "" && string(b) == id
}

// saveVerified records the state in which the blob had its digest. It ignores errors: without a
// record, the next session hashes the blob again.
func (c *Cache) saveVerified(sha string, fi fs.FileInfo) {
	id := FileState(fi)
	if id == "" || c.wasVerified(sha, fi) {
		return
	}
	f, err := os.CreateTemp(c.session, "sound-")
	if err != nil {
		return
	}
	_, err = f.WriteString(id)
	if errors.Join(err, f.Chmod(0o644), f.Close()) != nil || os.Rename(f.Name(), c.verifiedPath(sha)) != nil {
		os.Remove(f.Name())
	}
}

// errChanges means that a file changed while it was hashed.
var errChanges = errors.New("the file changes while it is read: find the program that writes to it")

// hashBlob hashes a blob and returns its state, if that is the same before and after hashing. If
// the digest is wrong, the error is a *DigestError.
func hashBlob(ctx context.Context, path, want string) (fs.FileInfo, error) {
	for range 5 {
		begun := time.Now()
		before, got, n, err := hashFile(ctx, path)
		if err != nil {
			return nil, err
		}
		if wait := unsettled(before.ModTime(), begun); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			continue // a write since then may have left the same time stamp
		}
		now, err := os.Lstat(path)
		if err != nil {
			return nil, err
		}
		if !sameState(now, before) {
			continue // it is unknown which state was hashed
		}
		if got != want {
			return before, &DigestError{Want: want, Got: got, Size: n}
		}
		return before, nil
	}
	return nil, fmt.Errorf("reading %s: %w", path, errChanges)
}

// hashFile returns the state of a file before reading it, and the digest and number of its bytes.
func hashFile(ctx context.Context, path string) (before fs.FileInfo, sha string, n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, "", 0, err
	}
	defer f.Close()
	if before, err = f.Stat(); err != nil {
		return nil, "", 0, err
	}
	h := sha256.New()
	n, err = io.Copy(h, &ctxReader{ctx: ctx, r: f})
	return before, hex.EncodeToString(h.Sum(nil)), n, err
}

// stampTime bounds the time between two ticks of a file system's clock. coarseStampTime is the
// bound for time stamps in whole seconds: FAT's clock ticks every two seconds.
const (
	stampTime       = 20 * time.Millisecond
	coarseStampTime = 2 * time.Second
)

// unsettled returns how long a write to a file may still leave the file's time stamp (at)
// unchanged, because the file system's clock has not ticked.
func unsettled(at, now time.Time) time.Duration {
	d := stampTime
	if at.Nanosecond() == 0 {
		d = coarseStampTime
	}
	if age := now.Sub(at); age > -d && age < d {
		return d - age
	}
	return 0
}

// settle sets a file's time back, so that every later write changes its state.
func settle(f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	return os.Chtimes(f.Name(), time.Time{}, fi.ModTime().Add(-coarseStampTime))
}

// sameState reports whether two states belong to the same file, without a write in between.
func sameState(a, b fs.FileInfo) bool {
	if id := FileState(a); id != "" {
		return id == FileState(b)
	}
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// Verified is the result of Verify.
type Verified struct {
	Sound   Amount   `json:"sound"`
	Damaged []Stored `json:"damaged"` // removed, except in a dry run
}

// Verify hashes every blob. Unless dryRun is set, it removes damaged blobs; the next build that
// needs one fetches or makes it again. If a blob cannot be read, Verify reports this and continues.
func (c *Cache) Verify(ctx context.Context, dryRun bool, progress func(done, total int64)) (Verified, error) {
	v := Verified{Damaged: []Stored{}}
	blobs, err := c.List()
	if err != nil {
		return v, err
	}
	var done, total int64
	for _, b := range blobs {
		total += b.Size
	}
	var errs []error
	for _, b := range blobs {
		if err := ctx.Err(); err != nil {
			return v, err
		}
		switch err := c.verify(ctx, b.SHA256, dryRun); {
		case err == nil:
			v.Sound.add(b)
		case errors.As(err, new(*DigestError)):
			v.Damaged = append(v.Damaged, b)
		case errors.Is(err, fs.ErrNotExist): // pruned meanwhile
		default:
			errs = append(errs, fmt.Errorf("verifying the cache: %w", err))
		}
		if done += b.Size; progress != nil {
			progress(done, total)
		}
	}
	return v, errors.Join(errs...)
}

func (c *Cache) verify(ctx context.Context, sha string, dryRun bool) error {
	unlock, err := lockDir(filepath.Join(c.dir, "blobs"), unix.LOCK_SH)
	if err != nil {
		return err
	}
	defer unlock()
	fi, err := hashBlob(ctx, c.BlobPath(sha), sha)
	if err == nil {
		c.saveVerified(sha, fi)
		return nil
	}
	if dryRun || !errors.As(err, new(*DigestError)) {
		return err
	}
	if _, rerr := c.drop(sha, fi); rerr != nil {
		return fmt.Errorf("removing a damaged input: %w", rerr)
	}
	return err
}
