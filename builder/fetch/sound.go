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
	mu    sync.Mutex
	sound bool
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
	if v.sound {
		_, err := os.Stat(c.BlobPath(sha))
		return err == nil
	}
	v.sound = c.admit(sha)
	return v.sound
}

// admit looks at a blob on its first use in this session, and marks it as
// used: nobody may prune it between the look and the mark.
func (c *Cache) admit(sha string) bool {
	unlock, err := lockDir(filepath.Join(c.dir, "blobs"), unix.LOCK_SH)
	if err != nil {
		return false
	}
	defer unlock()
	if !isSHA256(sha) {
		return false
	}
	fi, err := os.Lstat(c.BlobPath(sha))
	if err != nil || !fi.Mode().IsRegular() {
		return false
	}
	if c.hashAll || !c.noted(sha, fi) {
		switch err := hashBlob(c.until, c.BlobPath(sha), sha); {
		case errors.As(err, new(*DigestError)):
			c.drop(sha)
			return false
		case err != nil:
			return false // unreadable; whoever makes it again says so
		}
		// What was written meanwhile was not hashed.
		if now, err := os.Lstat(c.BlobPath(sha)); err != nil || FileState(now) != FileState(fi) {
			return false
		}
	}
	// Where marking is not ours to do, as with a blob that root put there,
	// Prune knows by its owner.
	if err := os.Chtimes(c.BlobPath(sha), time.Time{}, c.markTime()); errors.Is(err, fs.ErrNotExist) {
		return false
	}
	c.note(sha)
	return true
}

// Untouched reports whether the blob's file is as it was when it was hashed last.
func (c *Cache) Untouched(sha string) bool {
	fi, err := os.Lstat(c.BlobPath(sha))
	return err == nil && c.noted(sha, fi)
}

// drop removes a damaged blob.
func (c *Cache) drop(sha string) {
	os.Remove(c.notePath(sha))
	if os.Remove(c.BlobPath(sha)) == nil && c.damaged != nil {
		c.damaged(sha)
	}
}

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

// note keeps that the blob, as it is now, has its digest. Without the note it
// is hashed once more, so failing to write one is not an error.
func (c *Cache) note(sha string) {
	fi, err := os.Lstat(c.BlobPath(sha))
	if err != nil {
		return
	}
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

// hashBlob reads a blob; bytes of another digest are a *DigestError.
func hashBlob(ctx context.Context, path, want string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, &ctxReader{ctx: ctx, r: f})
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return &DigestError{Want: want, Got: got, Size: n}
	}
	return nil
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
	err = hashBlob(ctx, c.BlobPath(sha), sha)
	if err == nil {
		c.note(sha)
		return nil
	}
	if dryRun || !errors.As(err, new(*DigestError)) {
		return err
	}
	os.Remove(c.notePath(sha))
	if rerr := os.Remove(c.BlobPath(sha)); rerr != nil {
		return fmt.Errorf("removing a damaged input: %w", rerr)
	}
	return err
}
