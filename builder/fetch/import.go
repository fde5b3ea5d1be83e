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
	"time"
)

// readAgain is how often Import and ImportFile read a source that changes while they read it.
const readAgain = 3

// Import stores the bytes that read writes. It calls read twice, since a person may be editing the
// source, and stores the bytes only if both readings agree.
func (c *Cache) Import(ctx context.Context, read func(ctx context.Context, w io.Writer) error) (sha string, err error) {
	for range readAgain {
		h := sha256.New()
		if err := read(ctx, h); err != nil {
			return "", err
		}
		sha := hex.EncodeToString(h.Sum(nil))
		if c.Has(sha) {
			return sha, nil
		}
		pr, pw := io.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			pw.CloseWithError(read(ctx, pw))
		}()
		_, _, err := c.Put(ctx, sha, pr)
		pr.CloseWithError(err)
		<-ended
		if !errors.As(err, new(*DigestError)) {
			return sha, err
		}
	}
	return "", errChanges
}

// ImportFile imports an open file. Unless anew is set, a file that has not
// changed since its last import is not read again.
func (c *Cache) ImportFile(ctx context.Context, f *os.File, anew bool) (sha string, err error) {
	for range readAgain {
		now := time.Now()
		before, err := f.Stat()
		if err != nil {
			return "", err
		}
		key := importKey(before, now)
		if key != "" && !anew {
			if sha, ok := c.Lookup(key); ok {
				return sha, nil
			}
		}
		sha, err := c.Import(ctx, func(ctx context.Context, w io.Writer) error {
			_, err := io.Copy(w, &ctxReader{ctx: ctx, r: io.NewSectionReader(f, 0, 1<<62)})
			return err
		})
		if err != nil {
			return "", err
		}
		after, err := f.Stat()
		if err != nil {
			return "", err
		}
		if !sameState(before, after) {
			continue
		}
		if key != "" {
			err = c.Remember(key, sha)
		}
		return sha, err
	}
	return "", errChanges
}

// importKey returns the cache key for a file's content, made from the file's state. now is a time
// before the state was read. If a later write could leave the same state, importKey returns "".
func importKey(fi fs.FileInfo, now time.Time) string {
	id, times := FileState(fi), changedAt(fi)
	if id == "" || len(times) == 0 {
		return ""
	}
	for _, at := range times {
		if unsettled(at, now) > 0 {
			return ""
		}
	}
	return fmt.Sprintf("import 2 %s", id)
}
