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

// A blob's name is the digest of its bytes, and a disk may still give other
// bytes back: a bit has flipped, a file was cut short, somebody has edited
// it. So a session hashes a blob the first time it uses it, unless the blob's
// inode, size and change time are those noted when it was hashed last. With
// HashAll the note counts for nothing. A damaged blob is removed, and with
// that the input is fetched or made again.
//
// The session keeps the state in which it admitted each blob. What is read later
// is good only if the blob is still in that state: Unchanged tells, and a build
// asks it before its result gets a name.

// HashAll makes this session hash every blob on its first use, also those
// that look unchanged. Call it before the first use.
func (c *Cache) HashAll() { c.hashAll = true }

// Until makes reading blobs for their digests end with ctx: a blob can have
// gigabytes. Call it before the first use.
func (c *Cache) Until(ctx context.Context) { c.until = ctx }

// rederive forgets, where this session trusts nothing, what a key led to: a key
// may have been turned to another sound blob, and no lock knows this one.
func (c *Cache) rederive(key string) error {
	if !c.hashAll {
		return nil
	}
	if _, done := c.rederived.LoadOrStore(key, true); done {
		return nil
	}
	return c.Forget(key)
}

// OnDamage sets what is called, possibly from several goroutines, with the
// name of each damaged blob that was removed. Call it before the first use.
func (c *Cache) OnDamage(tell func(sha string)) { c.damaged = tell }

// verdict is what this session knows of a blob.
type verdict struct {
	mu sync.Mutex
	// admitted is the file as it was when it was found sound; nil: it was not.
	admitted fs.FileInfo
	// changed: it was in another state after it was admitted. What has been read
	// of it meanwhile may be anything.
	changed bool
}

// look compares the blob's file with the one that was admitted.
func (v *verdict) look(path string) {
	if v.admitted == nil {
		return
	}
	if fi, err := os.Lstat(path); err != nil || !sameState(fi, v.admitted) {
		v.admitted, v.changed = nil, true
	}
}

func (c *Cache) verdictOf(sha string) *verdict {
	v, _ := c.verdicts.LoadOrStore(sha, &verdict{})
	return v.(*verdict)
}

// Has reports whether the blob is there, complete and undamaged. If it is, it
// stays for as long as this session lasts.
func (c *Cache) Has(sha string) bool {
	v := c.verdictOf(sha)
	v.mu.Lock()
	defer v.mu.Unlock()
	return c.has(sha, v) == nil
}

// has is Has for who holds the verdict's lock. The error says what is wrong.
func (c *Cache) has(sha string, v *verdict) (err error) {
	if v.look(c.BlobPath(sha)); v.admitted == nil {
		v.admitted, err = c.admit(sha)
	}
	return err
}

// admit looks at a blob on its first use in this session, and marks it as
// used: nobody may prune it between the look and the mark. It returns the state in
// which the blob was found sound.
func (c *Cache) admit(sha string) (fs.FileInfo, error) {
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
	if c.hashAll || !c.noted(sha, fi) {
		fi, err = hashBlob(c.until, c.BlobPath(sha), sha)
		if errors.As(err, new(*DigestError)) {
			if removed, _ := c.drop(sha, fi); removed && c.damaged != nil {
				c.damaged(sha)
			}
		}
		if err != nil {
			return nil, err
		}
		c.note(sha, fi)
	}
	c.mark(sha)
	return fi, nil
}

// Unchanged reports, as an error, the blobs that have changed since this session
// admitted them: whatever was read of them counts for nothing.
func (c *Cache) Unchanged() error { return c.unchangedBut("") }

// unchangedBut is Unchanged without one blob, that nobody has read.
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
	return fmt.Errorf("cached input %s has changed while it was used (%s): run the build again, which fetches or makes it again where it is damaged; if this repeats, find the program that writes to the cache", sha, c.BlobPath(sha))
}

// drop removes a damaged blob, unless it is no longer the file that was found
// damaged.
func (c *Cache) drop(sha string, damaged fs.FileInfo) (removed bool, err error) {
	unlock, err := c.lockNames()
	if err != nil {
		return false, err
	}
	defer unlock()
	fi, err := os.Lstat(c.BlobPath(sha))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !sameState(fi, damaged) {
		return false, nil // removed or made again by another session
	}
	if err == nil {
		os.Remove(c.notePath(sha))
		err = os.Remove(c.BlobPath(sha))
	}
	return err == nil, err
}

// lockNames keeps other sessions from giving a blob its name, or taking it away.
// It is held for a moment only.
func (c *Cache) lockNames() (func(), error) {
	return lockDir(filepath.Join(c.dir, "sound"), unix.LOCK_EX)
}

// mark notes that the blob was used. The mark is a file of its own: one on the
// blob would change the state by which other sessions know it. Where marking is
// not ours to do, Prune knows by the owners.
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

func (c *Cache) notePath(sha string) string { return filepath.Join(c.dir, "sound", sha) }

// noted reports whether the file is the one that was hashed last.
func (c *Cache) noted(sha string, fi fs.FileInfo) bool {
	id := FileState(fi)
	b, err := os.ReadFile(c.notePath(sha))
	return err == nil && id != "" && string(b) == id
}

// note keeps that the blob has its digest in that state. Without the note it is
// hashed once more, so failing to write one is not an error.
func (c *Cache) note(sha string, fi fs.FileInfo) {
	id := FileState(fi)
	if id == "" || c.noted(sha, fi) {
		return
	}
	f, err := os.CreateTemp(c.session, "sound-")
	if err != nil {
		return
	}
	_, err = f.WriteString(id)
	if errors.Join(err, f.Chmod(0o644), f.Close()) != nil || os.Rename(f.Name(), c.notePath(sha)) != nil {
		os.Remove(f.Name())
	}
}

// errChanges says that a file did not keep still while it was hashed.
var errChanges = errors.New("it changes while it is read: find the program that writes to it")

// hashBlob reads a blob and returns the state that it was in from before the first
// byte until after the last. Bytes of another digest are a *DigestError.
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
			continue // what was written since may have left no trace
		}
		now, err := os.Lstat(path)
		if err != nil {
			return nil, err
		}
		if !sameState(now, before) {
			continue // which of its states was hashed is not known
		}
		if got != want {
			return before, &DigestError{Want: want, Got: got, Size: n}
		}
		return before, nil
	}
	return nil, fmt.Errorf("reading %s: %w", path, errChanges)
}

// hashFile returns the state of a file before it was read, and the digest and number
// of the bytes that were read.
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

// stampTime and coarseStampTime bound the time between two time stamps of a file system,
// the latter of one that has only whole seconds: FAT's are two seconds apart, Linux's
// clock for other file systems ticks at least 100 times a second.
const (
	stampTime       = 20 * time.Millisecond
	coarseStampTime = 2 * time.Second
)

// unsettled returns how long a write may still leave a file with the time stamp that it
// has: the stamp does not change with each write, only with each tick of a clock.
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

// settle dates a file back, so that every later write shows in its state.
func settle(f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	return os.Chtimes(f.Name(), time.Time{}, fi.ModTime().Add(-coarseStampTime))
}

// sameState reports whether nobody has replaced the file or written to it between
// two looks.
func sameState(a, b fs.FileInfo) bool {
	if id := FileState(a); id != "" {
		return id == FileState(b)
	}
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// Verified is what Verify found.
type Verified struct {
	Sound   Amount   `json:"sound"`
	Damaged []Stored `json:"damaged"` // removed, unless only looked for
}

// Verify hashes every blob. Damaged ones are removed unless dryRun is set:
// the next build that needs one fetches or makes it again. A blob that cannot
// be read is an error; the others are verified all the same.
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
		c.note(sha, fi)
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
