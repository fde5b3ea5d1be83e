// Package fetch brings inputs into a content-addressed cache: downloaded
// files, compiled binaries, made base systems, uncompressed layers. A blob is
// named by the SHA-256 of its bytes, appears under that name only once it is
// complete and verified, and is never changed. The cache is safe when several
// builds share it and after a kill at any moment: an unfinished blob is a
// temporary file that the next writer ignores.
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

// Cache is a directory of blobs and of keys that point to them:
//
//	blobs/<sha256>   the bytes
//	sound/<sha256>   the state of the blob's file when it was hashed last
//	used/<sha256>    its modification time is when a session used the blob last
//	keys/<sha256>    names the blob that a recipe led to
//	locks/<sha256>   held while a recipe is being carried out
//	programs/<name>-<start of sha256>  copies of blobs that are run from here
//	tmp/<session>/   unfinished blobs of one process
//
// A session's directory is locked for as long as its process lives; directories
// that killed processes left behind are removed by whoever opens the cache
// next. The times in used are exact to one session. A blob without one was used
// last at its own modification time, at which older versions left their mark.
type Cache struct {
	dir     string
	session string
	held    *os.File  // the lock on session
	started time.Time // when the session began, by the file system's clock

	until    context.Context // ends hashing
	hashAll  bool
	damaged  func(sha string)
	verdicts sync.Map // of blobs used in this session: sha → *verdict
	// rederived are the keys that this session has carried out anew.
	rederived sync.Map
}

// Open makes the cache's directories below dir, where they are missing, and rejects
// those that other users could have written to. Close gives up what Open took.
func Open(dir string) (*Cache, error) {
	// Programs that are called work in directories of their own.
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("opening cache: %w", err)
	}
	c := &Cache{dir: dir, until: context.Background()}
	if err := private(dir); err != nil {
		return nil, fmt.Errorf("opening cache (--cache or EDGEBAKE_CACHE choose another): %w", err)
	}
	if err := c.newSession(); err != nil {
		return nil, fmt.Errorf("opening cache %s (--cache or EDGEBAKE_CACHE choose another): %w", dir, err)
	}
	return c, nil
}

// startedFile lies in a session's directory; its modification time is when the
// session began.
const startedFile = "started"

// newSession sweeps what dead sessions left and makes a directory for this one.
// The lock on tmp itself keeps a sweeper from taking a directory for dead that
// is just being made.
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
			continue // another user's, or gone
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

// lockDir takes a lock on a directory of the cache itself.
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

// Close removes what is unfinished. Blobs stay.
func (c *Cache) Close() error {
	return errors.Join(os.RemoveAll(c.session), c.held.Close())
}

// DefaultDir is $EDGEBAKE_CACHE, else "edgebake" in the user's cache directory.
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

// Dir is the cache's directory.
func (c *Cache) Dir() string { return c.dir }

// BlobPath is where the blob with that SHA-256 (hex) is or would be.
func (c *Cache) BlobPath(sha string) string { return filepath.Join(c.dir, "blobs", sha) }

// markTime is the current time, and never one before the session began,
// whatever the clock does: no byte of an image depends on it.
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
	case v.changed: // other parts of the build may have read it before
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

// Size is that of a blob.
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

// ReadBlob returns a blob's bytes. They are compared with its digest, whatever
// happens to the file.
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

// Program lays a blob down as a program that can be run from here, and returns
// its path. It goes with the blob. A copy that is there already is compared with
// the blob's digest.
func (c *Cache) Program(sha, name string) (string, error) {
	path := filepath.Join(c.dir, "programs", name+programSuffix(sha))
	in, err := c.OpenBlob(sha) // which marks the use
	if err != nil {
		return "", err
	}
	defer in.Close()
	if c.isProgram(path, sha) {
		return path, nil
	}
	if err := c.layDown(path, sha, in); err != nil {
		return "", fmt.Errorf("laying down the program %s: %w", name, err)
	}
	return path, nil
}

// isProgram reports whether there is a whole copy of a blob that can be run.
func (c *Cache) isProgram(path, sha string) bool {
	fi, err := os.Lstat(path)
	if err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o500 != 0o500 {
		return false
	}
	_, got, _, err := hashFile(c.until, path)
	return err == nil && got == sha
}

// layDown copies a blob to path, where it appears once it is complete and verified.
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
	// Synced before the rename: after a power cut a name must not stand for a file
	// of zeros.
	if err := errors.Join(err, tmp.Chmod(0o755), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return replace(tmp.Name(), path)
}

// programSuffix ends the name of a blob's copies: a file of that name is the
// program, whole.
func programSuffix(sha string) string { return "-" + sha[:12] }

// TempDir makes a scratch directory on the cache's own file system. The caller
// removes it.
func (c *Cache) TempDir() (string, error) { return os.MkdirTemp(c.session, "dir-") }

// NoRoom reports whether a disk, or somebody's share of it, is full.
func NoRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// Put stores what r yields. With want set, bytes of any other SHA-256 are
// rejected with a *DigestError and nothing is stored.
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
		if NoRoom(err) {
			err = fmt.Errorf("%w: the cache %s has no room left; make some with `edgebake cache prune`, or choose another with --cache", err, c.dir)
		}
	}()
	h := sha256.New()
	in := &ctxReader{ctx: ctx, r: r}
	size, err = io.Copy(io.MultiWriter(f, h), in)
	if in.err != nil {
		return "", 0, in.err // the source's, whose words say what is wrong
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
	// Synced before the rename: after a power cut a name must not stand for
	// a file of zeros.
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

// publish gives a complete blob its name. A sound one that has the name already
// stays, since other sessions may be reading it.
func (c *Cache) publish(f *os.File, sha string, v *verdict) error {
	for range 3 { // others may remove and publish it too
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

// place gives a blob its name, if that is free or force replaces what has it.
func (c *Cache) place(f *os.File, sha string, v *verdict, force bool) (placed bool, err error) {
	// In the order of admit: Prune must not come before the mark.
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
	fi, err := f.Stat() // renaming has changed it
	if err != nil {
		return false, err
	}
	c.note(sha, fi)
	c.mark(sha)
	v.admitted = fi
	return true, nil
}

// Make returns the blob that key's recipe leads to, and carries the recipe
// out where that was not done before. Key is any text that determines the
// result. One builder at a time works on a key; others wait for it.
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
	was, _ := os.ReadFile(keyPath) // what is made anew since it is damaged, or gone
	pr, pw := io.Pipe()
	var made sync.WaitGroup
	made.Go(func() { pw.CloseWithError(recipe(ctx, pw)) })
	sha, _, err = c.Put(ctx, "", pr)
	// Where storing failed, the recipe must end too before anybody else may
	// begin with it.
	pr.CloseWithError(fmt.Errorf("storing failed: %w", err))
	made.Wait()
	if err != nil {
		return "", err
	}
	// What was made of a blob that changed meanwhile may be anything, and this build
	// ends with that error. The next one would take it for the key's.
	if err := c.unchangedBut(string(was)); err != nil {
		return "", err
	}
	return sha, c.setKey(keyPath, sha)
}

// Lookup returns the blob that Make made for key, without making it.
func (c *Cache) Lookup(key string) (sha string, ok bool) {
	sum := sha256.Sum256([]byte(key))
	return c.lookup(filepath.Join(c.dir, "keys", hex.EncodeToString(sum[:])))
}

// Remember has Lookup return that blob for key from now on.
func (c *Cache) Remember(key, sha string) error {
	sum := sha256.Sum256([]byte(key))
	return c.setKey(filepath.Join(c.dir, "keys", hex.EncodeToString(sum[:])), sha)
}

// Forget makes the next Make of key carry out its recipe again. The blob stays
// for who has it by its digest.
func (c *Cache) Forget(key string) error {
	sum := sha256.Sum256([]byte(key))
	err := os.Remove(filepath.Join(c.dir, "keys", hex.EncodeToString(sum[:])))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forgetting a made input: %w", err)
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

// replace renames from to to. A directory that stands there is not ours and would
// stop every build.
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

// DigestError says that bytes were not the ones asked for.
type DigestError struct {
	Want, Got string // SHA-256, hex
	Size      int64  // bytes read
}

func (e *DigestError) Error() string {
	return fmt.Sprintf("sha256 is %s (%d bytes), expected %s", e.Got, e.Size, e.Want)
}

// lock takes an exclusive lock that ends with the process, so that a killed
// build never blocks the next one.
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
	err error // with which reading ended; nil at the end of r
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
