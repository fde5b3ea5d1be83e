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
	"github.com/ulikunitz/xz/lzma"
)

// compressions are told by the first bytes, whatever a file is called.
var compressions = []struct {
	name, magic string
	open        func(*bufio.Reader) (io.Reader, error)
}{
	{"gzip", "\x1f\x8b", func(r *bufio.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
	{"zstd", "\x28\xb5\x2f\xfd", openZstd},
	{"xz", "\xfd7zXZ\x00", openXZ},
	{"bzip2", "BZh", func(r *bufio.Reader) (io.Reader, error) { return bzip2.NewReader(r), nil }},
}

// maxWindow is how much of its output a compression may refer back to, and
// with that the memory that uncompressing takes. xz -9 asks for 64 MiB, zstd
// --long=27 for 128 MiB; a header may claim gigabytes.
const maxWindow = 512 << 20

var errWindow = fmt.Errorf("it asks for more than %d MiB of memory: compress it again with a smaller dictionary or window", maxWindow>>20)

// openXZ looks at the first block's header for the size of its dictionary,
// which the library takes as it is.
func openXZ(r *bufio.Reader) (io.Reader, error) {
	head, err := r.Peek(12 + 2 + 2*9 + 3)
	if len(head) < 12+2 { // too short for a block
		return xz.NewReader(r)
	}
	if err != nil && err != io.EOF {
		return nil, err
	}
	block := head[12:]
	at := 2
	for _, has := range []byte{0x40, 0x80} { // compressed and uncompressed size
		for more := block[1]&has != 0; more && at < len(block); at++ {
			more = block[at]&0x80 != 0
		}
	}
	if at+2 < len(block) && block[at] == 0x21 {
		if size, err := lzma.DecodeDictCap(block[at+2]); err == nil && size > maxWindow {
			return nil, errWindow
		}
	}
	return xz.NewReader(r)
}

func openZstd(r *bufio.Reader) (io.Reader, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}

// Uncompressed returns the blob that holds sha's bytes uncompressed: sha
// itself where it is not compressed at all. A few kilobytes can uncompress to
// any size; what has more than limit bytes is rejected.
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
			if errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded) {
				return errWindow
			}
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
