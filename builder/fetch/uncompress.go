package fetch

import (
	"bufio"
	"compress/bzip2"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"github.com/ulikunitz/xz/lzma"
)

// compressions lists the supported compressions. They are detected by the first bytes, not by the
// file name.
var compressions = []struct {
	name   string
	magics []string
	open   func(*bufio.Reader) (io.Reader, error)
}{
	{"gzip", []string{"\x1f\x8b\x08"}, func(r *bufio.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
	{"zstd", []string{"\x28\xb5\x2f\xfd"}, openZstd},
	{"xz", []string{"\xfd7zXZ\x00"}, openXZ},
	// A bzip2 file begins with a block or, if the content is empty, with the end mark. In both
	// magics, the digit for the block size is left out (see magicOf).
	{"bzip2", []string{"BZh1AY&SY", "BZh\x17\x72\x45\x38\x50\x90"}, func(r *bufio.Reader) (io.Reader, error) { return bzip2.NewReader(r), nil }},
}

// magicOf returns the first bytes of a file, without bzip2's digit for the block size.
func magicOf(head []byte) string {
	s := string(head)
	if len(s) > 3 && strings.HasPrefix(s, "BZh") && s[3] >= '1' && s[3] <= '9' {
		return s[:3] + s[4:]
	}
	return s
}

const tarHeader = 512

// isTar reports whether a file begins with a tar header. The header's checksum is the sum of its
// bytes, with blanks in place of the checksum.
func isTar(head []byte) bool {
	if len(head) < tarHeader {
		return false
	}
	const at, end = 148, 156
	want, err := strconv.ParseInt(strings.Trim(string(head[at:end]), " \x00"), 8, 64)
	if err != nil {
		return false
	}
	sum := int64((end - at) * ' ')
	for i, b := range head[:tarHeader] {
		if i < at || i >= end {
			sum += int64(b)
		}
	}
	return sum == want
}

// maxWindow limits how far compressed data may refer back, in bytes. The memory for uncompressing
// grows with it. xz -9 uses 64 MiB and zstd --long=27 uses 128 MiB, but a header can claim
// gigabytes.
const maxWindow = 512 << 20

var errWindow = fmt.Errorf("uncompressing needs more than %s of memory: compress it again with a smaller dictionary or window", bytesize.MiB(maxWindow))

// openXZ checks the dictionary size in the header of the first block, which the library does not
// limit.
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
	for _, has := range []byte{0x40, 0x80} { // the compressed and uncompressed sizes, which are optional
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

// Uncompressed returns the digest of the uncompressed blob of sha, or sha itself if it is not
// compressed. It rejects more than limit bytes, because a few kilobytes can uncompress to any size.
func Uncompressed(ctx context.Context, c *Cache, sha string, limit int64) (string, error) {
	f, err := c.OpenBlob(sha)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head := make([]byte, tarHeader)
	if n, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return "", fmt.Errorf("reading cached blob %s: %w", sha, err)
	} else {
		head = head[:n]
	}
	if isTar(head) {
		return sha, nil // a tar: the name of its first file may look like compressed data
	}
	start := magicOf(head)
	for _, z := range compressions {
		if !slices.ContainsFunc(z.magics, func(m string) bool { return strings.HasPrefix(start, m) }) {
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
				return fmt.Errorf("the archive has more than %s uncompressed: check that it is the right archive; if it is, use it uncompressed", bytesize.MiB(limit))
			}
			return err
		})
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return "", fmt.Errorf("uncompressing (%s): %w: the file is truncated: fetch it again", z.name, err)
		}
		if err != nil {
			return "", fmt.Errorf("uncompressing (%s): %w", z.name, err)
		}
		return out, nil
	}
	return sha, nil
}
