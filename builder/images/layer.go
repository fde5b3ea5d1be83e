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
	"sync"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// sniff detects gzip and zstd by the first bytes, as containerd does. It returns "" for other data.
func sniff(b []byte) string {
	switch {
	case bytes.HasPrefix(b, []byte{0x1f, 0x8b}):
		return "gzip"
	case bytes.HasPrefix(b, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return "zstd"
	case len(b) >= 8 && b[0]&0xf0 == 0x50 && bytes.HasPrefix(b[1:], []byte{0x2a, 0x4d, 0x18}):
		return "zstd" // a skippable frame of zstd
	}
	return ""
}

// sniffLen is the number of bytes that sniff examines.
const sniffLen = 8

const (
	// maxWindow is the largest zstd window that containerd accepts, in bytes. Uncompressing needs
	// as much memory as the window. Therefore, only one layer at a time may have a window above
	// usualWindow, the window of zstd --long.
	maxWindow   = 512 << 20
	usualWindow = 128 << 20
)

var errLargeWindow = errors.New("the zstd window is too large")

func decompress(r io.Reader, compression string, window uint64) (io.ReadCloser, error) {
	switch compression {
	case "":
		return io.NopCloser(r), nil
	case "gzip":
		return gzip.NewReader(bufio.NewReaderSize(r, 1<<20))
	case "zstd":
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
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

// digestReader checks the digest and size of the bytes that it returns, when it reaches the end.
// Before that, the bytes must not be trusted.
type digestReader struct {
	r    io.Reader
	h    hash.Hash
	n    int64
	sha  string // expected SHA-256 in hex
	size int64  // expected size in bytes
	err  error  // the error that ended reading, or nil
}

var errDamagedSource = errors.New("the source is damaged, fetch it again or use another source")

func newDigestReader(r io.Reader, d Descriptor) *digestReader {
	return &digestReader{r: r, h: sha256.New(), sha: d.Digest.Hex(), size: d.Size}
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
		return n, fmt.Errorf("the blob is longer than the %d bytes in the manifest; %w", d.size, errDamagedSource)
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
		return fmt.Errorf("the blob ends after %d of %d bytes: %w", d.n, d.size, io.ErrUnexpectedEOF)
	}
	if got := hex.EncodeToString(d.h.Sum(nil)); got != d.sha {
		return &fetch.DigestError{Want: d.sha, Got: got, Size: d.n}
	}
	return nil
}

// layerReader returns the uncompressed bytes of a layer. It returns io.EOF only after all
// compressed bytes were read and match their digest.
type layerReader struct {
	raw  *digestReader
	un   io.ReadCloser
	done bool
}

func newLayerReader(r io.Reader, l Layer, window uint64) (*layerReader, error) {
	compressed, err := mayBeCompressed(l.MediaType)
	if err != nil {
		return nil, err
	}
	raw := newDigestReader(r, l.Descriptor)
	br := bufio.NewReaderSize(raw, 64<<10)
	compression := ""
	if compressed {
		// Like containerd, detect the compression from the bytes, and ignore the media type.
		first, err := br.Peek(sniffLen)
		if err != nil && err != io.EOF {
			return nil, err
		}
		compression = sniff(first)
	}
	un, err := decompress(br, compression, window)
	if err != nil {
		return nil, raw.explain(err)
	}
	return &layerReader{raw: raw, un: un}, nil
}

func (l *layerReader) Read(p []byte) (int, error) {
	n, err := l.un.Read(p)
	if err == io.EOF && !l.done {
		// The digest includes bytes after the compressed stream.
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

// explain returns the reason why a blob could not be uncompressed: it could not be read, its digest
// is wrong, or its content is invalid.
func (d *digestReader) explain(err error) error {
	if d.err == nil {
		io.Copy(io.Discard, d) // read to the end, to compute the digest
	}
	if d.err != nil && d.err != io.EOF {
		return d.err
	}
	// The digest is right, so fetching the blob again would not help.
	switch {
	case errors.Is(err, zstd.ErrWindowSizeExceeded):
		return fmt.Errorf("uncompressing the layer: %w: have the image pushed again with windows of at most %s (zstd --long=29), the limit of containerd", errLargeWindow, bytesize.Human(maxWindow))
	case errors.Is(err, zstd.ErrUnknownDictionary):
		return errors.New("uncompressing the layer: it was compressed with a zstd dictionary, which containerd does not support: have the image pushed again without one")
	}
	return fmt.Errorf("uncompressing the layer: %v; it was truncated or damaged before it was pushed (its digest is right): have the image built and pushed again", err)
}

// unpacker uncompresses the layers of one image within limits.
type unpacker struct {
	limit sizeLimit
	// large is locked while a layer with a window above usualWindow is uncompressed.
	large *sync.Mutex
}

// pairKey returns the cache key that records that a layer's blob was uncompressed to its diffID. It
// is not enough that the diffID is cached: another blob that claims the same diffID may be cut short
// or have additional bytes.
func pairKey(l Layer) string {
	return fmt.Sprintf("image layer, uncompressed 1\n%s %d %s", l.Digest, l.Size, l.MediaType)
}

// cached reports whether the cache already has a layer as fetchLayer would store it.
func (u unpacker) cached(c *fetch.Cache, l Layer, keep bool) (bool, error) {
	diff := l.DiffID.Hex()
	if sha, ok := c.Lookup(pairKey(l)); !ok || sha != diff || keep && !c.Has(l.Digest.Hex()) {
		return false, nil
	}
	size, err := c.Size(diff)
	if err != nil {
		return false, err
	}
	return true, u.limit.add(size)
}

// fetchLayer stores a layer in the cache, uncompressed and under its diffID. If keep is set, it
// also stores the compressed blob.
func (u unpacker) fetchLayer(ctx context.Context, c *fetch.Cache, src source, ref imageref.Ref, l Layer, keep bool) error {
	sha := l.Digest.Hex()
	if keep && !c.Has(sha) {
		err := src.fetch(ctx, ref, l.Descriptor, func(r io.Reader) error {
			_, _, err := c.Put(ctx, sha, newDigestReader(r, l.Descriptor))
			return err
		})
		if err != nil {
			return err
		}
	}
	err := u.uncompress(ctx, c, src, ref, l, usualWindow)
	if errors.Is(err, errLargeWindow) {
		u.large.Lock()
		defer u.large.Unlock()
		err = u.uncompress(ctx, c, src, ref, l, maxWindow)
	}
	if err != nil {
		return err
	}
	return c.Remember(pairKey(l), l.DiffID.Hex())
}

func (u unpacker) uncompress(ctx context.Context, c *fetch.Cache, src source, ref imageref.Ref, l Layer, window uint64) error {
	sha := l.Digest.Hex()
	if !c.Has(sha) {
		return src.fetch(ctx, ref, l.Descriptor, func(r io.Reader) error { return u.unpack(ctx, c, r, l, window) })
	}
	f, err := c.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer f.Close()
	return u.unpack(ctx, c, io.NewSectionReader(f, 0, l.Size+1), l, window)
}

// unpack uncompresses a layer's blob into the cache.
func (u unpacker) unpack(ctx context.Context, c *fetch.Cache, raw io.Reader, l Layer, window uint64) error {
	diff := l.DiffID.Hex()
	r, err := newLayerReader(contextReader{ctx, raw}, l, window)
	if err != nil {
		return err
	}
	defer r.Close()
	in := &limitedReader{r: r, limit: u.limit}
	if _, _, err = c.Put(ctx, diff, in); err != nil {
		in.giveBack()
	}
	var de *fetch.DigestError
	if errors.As(err, &de) && de.Want == diff {
		return fmt.Errorf("the uncompressed bytes do not match the diffID in the image's config: %v; have the image pushed again", err)
	}
	return err
}
