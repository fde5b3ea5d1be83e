// Package fetch puts inputs into a content-addressed cache: downloaded files, compiled programs,
// base systems, uncompressed layers. A blob has the SHA-256 of its bytes as its name. It gets the
// name only when it is complete and verified, and never changes. Several builds can share the
// cache. A build may be killed at any time: the next one removes its temporary files.
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

	"github.com/edgebake/edgebake/ondisk/tree"
	"golang.org/x/sys/unix"
)

// Cache is a directory of blobs, and of keys that point to them. An open Cache is a session.
// The directory contains:
//
//	blobs/<sha256>   the bytes
//	sound/<sha256>   the state of the blob's file when it was last hashed
//	used/<sha256>    an empty file; its modification time is the last use of the blob
//	keys/<sha256>    the digest of the blob that a recipe produced
//	locks/<sha256>   locked while a recipe runs
//	programs/<name>-<start of sha256>  executable copies of blobs
//	tmp/<session>/   unfinished blobs of one process
//
// The directory of a session is locked while its process runs. The next session removes directories
// that are not locked. A session records only its first use of a blob. If used/ has no file for a
// blob, the blob's own modification time is its last use.
type Cache struct {
	dir     string
	session string
	held    *os.File  // the lock on session
	started time.Time // start of the session, by the file system's clock

	until    context.Context // cancels hashing
	hashAll  bool
	damaged  func(sha string)
	verdicts sync.Map // SHA-256 of each blob used in this session → *verdict
	// rederived contains the keys whose recipes this session has run again.
	rederived sync.Map
}

// Open opens the cache in dir. It creates missing directories, and rejects directories that other
// users could write to. The caller must call Close.
func Open(dir string) (*Cache, error) {
	// Make the path absolute: external programs have other working directories.
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("opening cache: %w", err)
	}
	c := &Cache{dir: dir, until: context.Background()}
	if err := makePrivateDirs(dir); err != nil {
		return nil, fmt.Errorf("opening cache (--cache or EDGEBAKE_CACHE choose another): %w", err)
	}
	if err := c.newSession(); err != nil {
		return nil, fmt.Errorf("opening cache %s (--cache or EDGEBAKE_CACHE choose another): %w", dir, err)
	}
	return c, nil
}

// startedFile is a file in a session's directory. Its modification time is the start of the
// session.
const startedFile = "started"

// newSession removes the directories of sessions whose processes have ended, and creates one for
// this session. It holds the lock on tmp, so that no other process removes the new directory before
// it is locked.
func (c *Cache) newSession() error {
	tmp := filepath.Join(c.dir, "tmp")
	unlock, err := lockDir(tmp, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	old, err := os.ReadDir(tmp)
	if err != nil {
		return err
	}
	for _, e := range old {
		p := filepath.Join(tmp, e.Name())
		f, err := os.Open(p)
		if err != nil {
			continue // belongs to another user, or was removed meanwhile
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(p)
		}
		f.Close()
	}
	if c.session, err = os.MkdirTemp(tmp, "session-"); err != nil {
		return err
	}
	if c.held, err = os.Open(c.session); err != nil {
		return err
	}
	if err := unix.Flock(int(c.held.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	name := filepath.Join(c.session, startedFile)
	if err := os.WriteFile(name, nil, 0o644); err != nil {
		return err
	}
	fi, err := os.Stat(name)
	if err != nil {
		return err
	}
	c.started = fi.ModTime()
	return nil
}

// lockDir locks a directory of the cache.
func lockDir(dir string, how int) (func(), error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	return func() { f.Close() }, nil
}

// Close ends the session and removes its unfinished blobs.
func (c *Cache) Close() error {
	return errors.Join(os.RemoveAll(c.session), c.held.Close())
}

// DefaultDir returns $EDGEBAKE_CACHE, or else "edgebake" in the user's cache
// directory.
func DefaultDir() (string, error) {
	if d := os.Getenv("EDGEBAKE_CACHE"); d != "" {
		return d, nil
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache directory (set EDGEBAKE_CACHE to choose one): %w", err)
	}
	return filepath.Join(d, "edgebake"), nil
}

// Dir returns the cache's directory.
func (c *Cache) Dir() string { return c.dir }

// BlobPath returns the path of the blob with this SHA-256 in hex. The blob may not exist.
func (c *Cache) BlobPath(sha string) string { return filepath.Join(c.dir, "blobs", sha) }

// markTime returns the current time, or the start of the session if the clock was set back. No byte
// of an image depends on it.
func (c *Cache) markTime() time.Time {
	if now := time.Now(); now.After(c.started) {
		return now
	}
	return c.started
}

// OpenBlob opens a blob for reading.
func (c *Cache) OpenBlob(sha string) (tree.BlobFile, error) {
	v := c.verdictOf(sha)
	v.mu.Lock()
	defer v.mu.Unlock()
	switch err := c.has(sha, v); {
	case v.changed: // other parts of the build may have read the changed bytes
		return nil, c.changedError(sha)
	case errors.Is(err, fs.ErrNotExist), errors.As(err, new(*DigestError)):
		return nil, fmt.Errorf("opening cached input %s: it is missing, or was damaged and has been removed: run the build again, which fetches or makes it again", sha)
	case err != nil:
		return nil, fmt.Errorf("opening cached input %s: %w", sha, err)
	}
	f, err := os.Open(c.BlobPath(sha))
	if err != nil {
		return nil, fmt.Errorf("opening cached input %s: %w", sha, err)
	}
	return f, nil
}

// Size returns the size of a blob in bytes.
func (c *Cache) Size(sha string) (int64, error) {
	f, err := c.OpenBlob(sha)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	fi, err := f.(*os.File).Stat()
	if err != nil {
		return 0, fmt.Errorf("reading cached input %s: %w", sha, err)
	}
	return fi.Size(), nil
}

// ReadBlob returns the bytes of a blob, after checking their digest.
func (c *Cache) ReadBlob(sha string) ([]byte, error) {
	f, err := c.OpenBlob(sha)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<62))
	if err == nil {
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != sha {
			return nil, c.changedError(sha)
		}
	}
	return b, err
}

// Program returns the path of an executable copy of a blob. It verifies an existing copy. Prune
// removes copies together with their blob.
func (c *Cache) Program(sha, name string) (string, error) {
	path := filepath.Join(c.dir, "programs", name+programSuffix(sha))
	in, err := c.OpenBlob(sha) // also marks the blob as used
	if err != nil {
		return "", err
	}
	defer in.Close()
	if c.isProgram(path, sha) {
		return path, nil
	}
	if err := c.layDown(path, sha, in); err != nil {
		return "", fmt.Errorf("copying the program %s: %w", name, err)
	}
	return path, nil
}

// isProgram reports whether path is an intact, executable copy of a blob.
func (c *Cache) isProgram(path, sha string) bool {
	fi, err := os.Lstat(path)
	if err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o500 != 0o500 {
		return false
	}
	_, got, _, err := hashFile(c.until, path)
	return err == nil && got == sha
}

// layDown copies a blob to path. It creates the file only when the copy is complete and verified.
func (c *Cache) layDown(path, sha string, blob io.ReaderAt) error {
	tmp, err := os.CreateTemp(c.session, "program-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(tmp, h), io.NewSectionReader(blob, 0, 1<<62))
	if got := hex.EncodeToString(h.Sum(nil)); err == nil && got != sha {
		err = &DigestError{Want: sha, Got: got, Size: n}
	}
	// Without syncing first, a power cut after the rename could leave a file of zeros.
	if err := errors.Join(err, tmp.Chmod(0o755), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return replace(tmp.Name(), path)
}

// programSuffix returns the end of the file names of executable copies of a blob.
func programSuffix(sha string) string { return "-" + sha[:12] }

// TempDir creates a temporary directory on the cache's file system. The caller must remove it.
func (c *Cache) TempDir() (string, error) { return os.MkdirTemp(c.session, "dir-") }

// NoSpace reports whether err means that a disk or a quota is full.
func NoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// Put stores the bytes of r as a blob. If want is not empty and the bytes have another SHA-256, it
// stores nothing and returns a *DigestError.
func (c *Cache) Put(ctx context.Context, want string, r io.Reader) (sha string, size int64, err error) {
	f, err := os.CreateTemp(c.session, "blob-")
	if err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
		if NoSpace(err) {
			err = fmt.Errorf("%w: the cache %s has no space left; free some with `edgebake cache prune`, or choose another with --cache", err, c.dir)
		}
	}()
	h := sha256.New()
	in := &ctxReader{ctx: ctx, r: r}
	size, err = io.Copy(io.MultiWriter(f, h), in)
	if in.err != nil {
		return "", 0, in.err // an error of r, which has the cause
	}
	if err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	sha = hex.EncodeToString(h.Sum(nil))
	if want != "" && sha != want {
		return "", 0, &DigestError{Want: want, Got: sha, Size: size}
	}
	if err := f.Chmod(0o444); err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	if err := settle(f); err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	// Without syncing first, a power cut after the rename could leave a file of zeros.
	if err := f.Sync(); err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	v := c.verdictOf(sha)
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := c.publish(f, sha, v); err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	return sha, size, nil
}

// publish gives a complete blob its name. If a valid blob already has the name, publish keeps the
// existing file, because other sessions may be reading it.
func (c *Cache) publish(f *os.File, sha string, v *verdict) error {
	for range 3 { // other sessions may meanwhile remove or publish this blob
		if c.has(sha, v) == nil {
			return os.Remove(f.Name())
		}
		placed, err := c.place(f, sha, v, false)
		if placed || err != nil {
			return err
		}
	}
	_, err := c.place(f, sha, v, true)
	return err
}

// place gives a blob its name if the name is free, or if force is set.
func (c *Cache) place(f *os.File, sha string, v *verdict, force bool) (placed bool, err error) {
	// Take the same lock as verifyFirstUse, so that Prune waits until the blob is marked as used.
	unlock, err := lockDir(filepath.Join(c.dir, "blobs"), unix.LOCK_SH)
	if err != nil {
		return false, err
	}
	defer unlock()
	unlockNames, err := c.lockNames()
	if err != nil {
		return false, err
	}
	defer unlockNames()
	if _, err := os.Lstat(c.BlobPath(sha)); err == nil && !force {
		return false, nil
	}
	if err := replace(f.Name(), c.BlobPath(sha)); err != nil {
		return false, err
	}
	fi, err := f.Stat() // renaming changed the state of the file
	if err != nil {
		return false, err
	}
	c.saveVerified(sha, fi)
	c.mark(sha)
	v.valid = fi
	return true, nil
}

// Make returns the blob for key. If the cache has none, it runs the recipe, whose result must
// depend only on key. Only one process runs the recipe of a key at a time; others wait for it.
func (c *Cache) Make(ctx context.Context, key string, recipe func(ctx context.Context, w io.Writer) error) (sha string, err error) {
	sum := sha256.Sum256([]byte(key))
	name := hex.EncodeToString(sum[:])
	keyPath := filepath.Join(c.dir, "keys", name)
	if sha, ok := c.lookup(keyPath); ok {
		return sha, nil
	}
	unlock, err := lock(ctx, filepath.Join(c.dir, "locks", name))
	if err != nil {
		return "", err
	}
	defer unlock()
	if sha, ok := c.lookup(keyPath); ok {
		return sha, nil
	}
	was, _ := os.ReadFile(keyPath) // the digest of the damaged or missing blob
	pr, pw := io.Pipe()
	var made sync.WaitGroup
	made.Go(func() { pw.CloseWithError(recipe(ctx, pw)) })
	sha, _, err = c.Put(ctx, "", pr)
	// If storing failed, the recipe must also end before another process may start it.
	pr.CloseWithError(fmt.Errorf("storing failed: %w", err))
	made.Wait()
	if err != nil {
		return "", err
	}
	// If an input blob changed meanwhile, the result may be wrong: do not store it for later
	// builds.
	if err := c.unchangedBut(string(was)); err != nil {
		return "", err
	}
	return sha, c.setKey(keyPath, sha)
}

// Lookup returns the blob that Make or Remember has stored for key.
func (c *Cache) Lookup(key string) (sha string, ok bool) {
	sum := sha256.Sum256([]byte(key))
	return c.lookup(filepath.Join(c.dir, "keys", hex.EncodeToString(sum[:])))
}

// Remember makes Lookup return the blob sha for key.
func (c *Cache) Remember(key, sha string) error {
	sum := sha256.Sum256([]byte(key))
	return c.setKey(filepath.Join(c.dir, "keys", hex.EncodeToString(sum[:])), sha)
}

// Forget makes the next Make of key run its recipe again. It does not remove the blob.
func (c *Cache) Forget(key string) error {
	sum := sha256.Sum256([]byte(key))
	err := os.Remove(filepath.Join(c.dir, "keys", hex.EncodeToString(sum[:])))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing the record of a made input: %w", err)
	}
	return nil
}

func (c *Cache) setKey(keyPath, sha string) error {
	tmp, err := os.CreateTemp(c.session, "key-")
	if err != nil {
		return fmt.Errorf("storing in the cache: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(sha)
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return fmt.Errorf("storing in the cache: %w", err)
	}
	if err := replace(tmp.Name(), keyPath); err != nil {
		return fmt.Errorf("storing in the cache: %w", err)
	}
	return nil
}

// replace renames the file from to the path to. If to is a directory, replace removes it, since it
// would make every build fail.
func replace(from, to string) error {
	err := os.Rename(from, to)
	if fi, statErr := os.Lstat(to); err == nil || statErr != nil || !fi.IsDir() {
		return err
	}
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return os.Rename(from, to)
}

func (c *Cache) lookup(keyPath string) (string, bool) {
	b, err := os.ReadFile(keyPath)
	if err != nil || len(b) != 2*sha256.Size || !c.Has(string(b)) {
		return "", false
	}
	return string(b), true
}

// DigestError means that bytes have another digest than expected.
type DigestError struct {
	Want, Got string // SHA-256 in hex
	Size      int64  // number of bytes that were read
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("sha256 is %s (%d bytes), expected %s", e.Got, e.Size, e.Want)
}

// lock takes an exclusive lock, which ends with the process: a killed build does not block the next
// one.
func lock(ctx context.Context, path string) (func(), error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	got := make(chan error, 1)
	go func() { got <- unix.Flock(int(f.Fd()), unix.LOCK_EX) }()
	select {
	case err := <-got:
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		return func() { f.Close() }, nil
	case <-ctx.Done():
		go func() { <-got; f.Close() }()
		return nil, ctx.Err()
	}
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
	err error // the error that ended reading; nil at the end of r
}

func (c *ctxReader) Read(p []byte) (n int, err error) {
	if err = c.ctx.Err(); err == nil {
		n, err = c.r.Read(p)
	}
	if err != nil && err != io.EOF {
		c.err = err
	}
	return n, err
}
