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
	"os"
	"path/filepath"

	"github.com/edgebake/edgebake/builder/tree"
	"golang.org/x/sys/unix"
)

// Cache is a directory of blobs and of keys that point to them:
//
//	blobs/<sha256>   the bytes
//	keys/<sha256>    names the blob that a recipe led to
//	locks/<sha256>   held while a recipe is being carried out
//	tmp/             unfinished blobs
type Cache struct{ dir string }

// Open makes the cache's folders below dir, where they are missing.
func Open(dir string) (*Cache, error) {
	for _, d := range []string{"blobs", "keys", "locks", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, fmt.Errorf("opening cache %s: %w", dir, err)
		}
	}
	return &Cache{dir}, nil
}

// DefaultDir is $EDGEBAKE_CACHE, else "edgebake" in the user's cache folder.
func DefaultDir() (string, error) {
	if d := os.Getenv("EDGEBAKE_CACHE"); d != "" {
		return d, nil
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache folder (set EDGEBAKE_CACHE to choose one): %w", err)
	}
	return filepath.Join(d, "edgebake"), nil
}

// BlobPath is where the blob with that SHA-256 (hex) is or would be.
func (c *Cache) BlobPath(sha string) string { return filepath.Join(c.dir, "blobs", sha) }

// Has reports whether the blob is there, complete.
func (c *Cache) Has(sha string) bool {
	_, err := os.Stat(c.BlobPath(sha))
	return err == nil
}

// OpenBlob opens a blob for reading.
func (c *Cache) OpenBlob(sha string) (tree.BlobFile, error) {
	f, err := os.Open(c.BlobPath(sha))
	if err != nil {
		return nil, fmt.Errorf("opening cached blob %s: %w", sha, err)
	}
	return f, nil
}

// TempDir makes a scratch folder on the cache's own file system. The caller
// removes it.
func (c *Cache) TempDir() (string, error) { return os.MkdirTemp(filepath.Join(c.dir, "tmp"), "") }

// Put stores what r yields. With want set, bytes of any other SHA-256 are
// refused with a *DigestError and nothing is stored.
func (c *Cache) Put(ctx context.Context, want string, r io.Reader) (sha string, size int64, err error) {
	f, err := os.CreateTemp(filepath.Join(c.dir, "tmp"), "blob-")
	if err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	h := sha256.New()
	size, err = io.Copy(io.MultiWriter(f, h), &ctxReader{ctx, r})
	if err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	sha = hex.EncodeToString(h.Sum(nil))
	if want != "" && sha != want {
		return "", 0, &DigestError{Want: want, Got: sha, Size: size}
	}
	if err := f.Chmod(0o444); err != nil {
		return "", 0, err
	}
	// Synced before the rename: after a power cut a name must not stand for
	// a file of zeros.
	if err := f.Sync(); err != nil {
		return "", 0, err
	}
	if err := os.Rename(f.Name(), c.BlobPath(sha)); err != nil {
		return "", 0, fmt.Errorf("storing in the cache: %w", err)
	}
	return sha, size, nil
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
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(recipe(ctx, pw)) }()
	sha, _, err = c.Put(ctx, "", pr)
	pr.CloseWithError(errors.New("cache write failed"))
	if err != nil {
		return "", err
	}
	tmp, err := os.CreateTemp(filepath.Join(c.dir, "tmp"), "key-")
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name())
	if _, err := tmp.WriteString(sha); err != nil {
		tmp.Close()
		return "", err
	}
	if err := errors.Join(tmp.Sync(), tmp.Close()); err != nil {
		return "", err
	}
	return sha, os.Rename(tmp.Name(), keyPath)
}

func (c *Cache) lookup(keyPath string) (string, bool) {
	b, err := os.ReadFile(keyPath)
	if err != nil || !c.Has(string(b)) {
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
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
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
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
