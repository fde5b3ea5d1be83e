package fetch

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// compressions are told by the first bytes, whatever a file is called.
var compressions = []struct {
	name, magic string
	open        func(io.Reader) (io.Reader, error)
}{
	{"gzip", "\x1f\x8b", func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
	{"zstd", "\x28\xb5\x2f\xfd", openZstd},
	{"xz", "\xfd7zXZ\x00", func(r io.Reader) (io.Reader, error) { return xz.NewReader(r) }},
	{"bzip2", "BZh", func(r io.Reader) (io.Reader, error) { return bzip2.NewReader(r), nil }},
}

func openZstd(r io.Reader) (io.Reader, error) {
	d, err := zstd.NewReader(r)
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}

// Uncompressed returns the blob that holds sha's bytes uncompressed: sha
// itself where it is not compressed at all. A few kilobytes can uncompress to
// any size; what has more than limit bytes is refused.
func Uncompressed(ctx context.Context, c *Cache, sha string, limit int64) (string, error) {
	f, err := c.OpenBlob(sha)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head := make([]byte, 8)
	if n, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return "", fmt.Errorf("reading cached blob %s: %w", sha, err)
	} else {
		head = head[:n]
	}
	for _, z := range compressions {
		if !bytes.HasPrefix(head, []byte(z.magic)) {
			continue
		}
		key := "uncompress " + sha
		if err := c.rederive(key); err != nil {
			return "", err
		}
		out, err := c.Make(ctx, key, func(ctx context.Context, w io.Writer) error {
			r, err := z.open(bufio.NewReaderSize(io.NewSectionReader(f, 0, 1<<62), 1<<20))
			if err != nil {
				return err
			}
			if rc, ok := r.(io.Closer); ok {
				defer rc.Close()
			}
			n, err := io.Copy(w, io.LimitReader(r, limit+1))
			if err == nil && n > limit {
				return fmt.Errorf("it has more than %d MiB uncompressed: check that it is the archive that is meant; if it is, give it uncompressed", limit>>20)
			}
			return err
		})
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return "", fmt.Errorf("uncompressing (%s): %w: it is cut short; fetch it again", z.name, err)
		}
		if err != nil {
			return "", fmt.Errorf("uncompressing (%s): %w", z.name, err)
		}
		return out, nil
	}
	return sha, nil
}
