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

// readAgain is how often a changing source is read before Import and ImportFile give up.
const readAgain = 3

// Import stores the bytes that read writes. Because a person may be editing the source, it calls
// read twice, and stores the bytes only if they are the same.
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

// ImportFile stores the content of an open file. If the file is unchanged since its last import,
// ImportFile reads it only if anew is set.
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

// importKey returns a cache key for a file, made from its state. now must be a time before the
// state was read. It returns "" if a later write could leave the state unchanged.
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
