package images

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// sniff tells gzip and zstd by their first bytes.
func sniff(b []byte) string {
	switch {
	case bytes.HasPrefix(b, []byte{0x1f, 0x8b}):
		return "gzip"
	case bytes.HasPrefix(b, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return "zstd"
	}
	return ""
}

func decompress(r io.Reader, compression string) (io.ReadCloser, error) {
	switch compression {
	case "":
		return io.NopCloser(r), nil
	case "gzip":
		return gzip.NewReader(bufio.NewReaderSize(r, 1<<20))
	case "zstd":
		// One goroutine's window is all it may take: several layers are
		// uncompressed at a time.
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(256<<20))
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	}
	return nil, fmt.Errorf("unknown compression %q", compression)
}

type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// digestReader passes bytes on and, at their end, compares them with what was
// promised. Until then nothing may be made of them.
type digestReader struct {
	r    io.Reader
	h    hash.Hash
	n    int64
	sha  string // expected, hex
	size int64  // expected
	err  error  // with which reading ended
}

var errTooLong = errors.New("the source is damaged, fetch it again or use another")

func newDigestReader(r io.Reader, sha string, size int64) *digestReader {
	return &digestReader{r: r, h: sha256.New(), sha: sha, size: size}
}

func (d *digestReader) Read(p []byte) (n int, err error) {
	defer func() {
		if err != nil {
			d.err = err
		}
	}()
	n, err = d.r.Read(p)
	d.h.Write(p[:n])
	d.n += int64(n)
	if d.n > d.size {
		return n, fmt.Errorf("it is longer than the %d bytes the manifest says; %w", d.size, errTooLong)
	}
	if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
		if verr := d.verify(); verr != nil {
			return n, verr
		}
	}
	return n, err
}

func (d *digestReader) verify() error {
	if d.n != d.size {
		return fmt.Errorf("it ends after %d of %d bytes: %w", d.n, d.size, io.ErrUnexpectedEOF)
	}
	if got := hex.EncodeToString(d.h.Sum(nil)); got != d.sha {
		return &fetch.DigestError{Want: d.sha, Got: got, Size: d.n}
	}
	return nil
}

// layerReader yields a layer uncompressed. It ends with io.EOF only where the
// compressed bytes were all read and have the digest of the manifest.
type layerReader struct {
	raw  *digestReader
	un   io.ReadCloser
	done bool
}

func newLayerReader(r io.Reader, l Layer) (*layerReader, error) {
	sha, err := shaOf(l.Digest)
	if err != nil {
		return nil, err
	}
	compression, err := compressionOf(l.MediaType)
	if err != nil {
		return nil, err
	}
	raw := newDigestReader(r, sha, l.Size)
	un, err := decompress(raw, compression)
	if err != nil {
		return nil, raw.explain(err)
	}
	return &layerReader{raw: raw, un: un}, nil
}

func (l *layerReader) Read(p []byte) (int, error) {
	n, err := l.un.Read(p)
	if err == io.EOF && !l.done {
		// What follows the compressed stream belongs to the blob too.
		if _, err := io.Copy(io.Discard, l.raw); err != nil {
			return n, err
		}
		if err := l.raw.verify(); err != nil {
			return n, err
		}
		l.done = true
	}
	if err != nil && err != io.EOF {
		err = l.raw.explain(err)
	}
	return n, err
}

func (l *layerReader) Close() error { return l.un.Close() }

// explain finds out why the blob could not be uncompressed: because it could
// not be read, because it is not what was promised, or because what was
// promised is no good.
func (d *digestReader) explain(err error) error {
	if d.err == nil {
		io.Copy(io.Discard, d) // to the digest at its end
	}
	if d.err != nil && d.err != io.EOF {
		return d.err
	}
	// The bytes are right: fetching them again would not help.
	return fmt.Errorf("uncompressing it: %v; it was cut short or damaged before it was pushed (its digest is right): have the image built and pushed again", err)
}

// fetchLayer brings a layer into the cache, uncompressed under its diffID,
// and, if kept, as it is under its digest.
func fetchLayer(ctx context.Context, c *fetch.Cache, src source, ref Ref, l Layer, keep bool) error {
	sha, err := shaOf(l.Digest)
	if err != nil {
		return err
	}
	diff, err := shaOf(l.DiffID)
	if err != nil {
		return err
	}
	if keep && !c.Has(sha) {
		r, err := src.open(ctx, ref, l.Descriptor)
		if err != nil {
			return err
		}
		_, _, err = c.Put(ctx, sha, newDigestReader(r, sha, l.Size))
		r.Close()
		if err != nil {
			return err
		}
	}
	if c.Has(diff) {
		return nil
	}
	var raw io.ReadCloser
	if c.Has(sha) {
		f, err := c.OpenBlob(sha)
		if err != nil {
			return err
		}
		raw = struct {
			io.Reader
			io.Closer
		}{io.NewSectionReader(f, 0, l.Size+1), f}
	} else if raw, err = src.open(ctx, ref, l.Descriptor); err != nil {
		return err
	}
	defer raw.Close()
	r, err := newLayerReader(contextReader{ctx, raw}, l)
	if err != nil {
		return err
	}
	defer r.Close()
	_, _, err = c.Put(ctx, diff, r)
	var de *fetch.DigestError
	if errors.As(err, &de) && de.Want == diff {
		return fmt.Errorf("uncompressed it is not the diffID of the image's config: %v; the image is inconsistent, have it pushed again", err)
	}
	return err
}
