package update

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/update"
)

// chunkLocation is the location of a chunk on this machine's disk.
type chunkLocation struct {
	dev machine.Device
	off int64
}

// localChunks contains the locations of chunks on this machine's disk, by digest.
type localChunks map[[32]byte]chunkLocation

// scan adds the chunks of a device.
func (s localChunks) scan(ctx context.Context, dev machine.Device, size int64) error {
	off := int64(0)
	read := chunk.From(dev)
	return chunk.Cut(size, func(b []byte, off int64) (bool, error) {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		return read(b, off)
	}, func(b []byte, n int) error {
		if b != nil {
			s[sha256.Sum256(b)] = chunkLocation{dev, off}
		}
		off += int64(n)
		return nil
	})
}

// missing returns the chunks of a part that assemble downloads when it writes the part to the
// device target: those that are not on this machine's disk, and those that are only on target
// itself, where they are overwritten before they are needed.
func (s localChunks) missing(p *chunk.Part, target string) (out []int) {
	written := map[int64][32]byte{} // by offset
	off := int64(0)
	for k, c := range p.Chunks {
		if !c.Hole {
			at, ok := s[c.Sum]
			if ok && at.dev.Name() == target && at.off < off {
				ok = written[at.off] == c.Sum
			}
			if !ok {
				out = append(out, k)
			}
			written[off] = c.Sum
		}
		off += c.Size
	}
	return out
}

// fetcher gets chunks of an image from this machine's disk or from the source.
type fetcher struct {
	image  *update.Image
	src    Source
	onDisk localChunks
	dec    *zstd.Decoder
	// tell receives progress messages, at most one per tellEvery.
	tell func(format string, args ...any)
	now  func() time.Time

	buf       []byte
	damaged   int           // number of damaged chunks downloaded in all phases
	total     int64         // bytes to download in all phases, at most; 0: unknown
	fetched   int64         // bytes downloaded in all phases
	remaining time.Duration // estimate; 0: unknown
	// phaseStart is when this phase's download started, and phaseBase the value of fetched then.
	phaseStart time.Time
	phaseBase  int64
	lastTold   time.Time // when tell was called last
}

// tellEvery is the interval of progress messages.
const tellEvery = 5 * time.Second

func newFetcher(e *machine.Env, image *update.Image, src Source, tell func(format string, args ...any)) (*fetcher, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*chunk.HoleSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("setting up zstd: %w", err)
	}
	return &fetcher{image: image, src: src, onDisk: localChunks{}, dec: dec, tell: tell, now: e.Now, buf: make([]byte, chunk.HoleSize)}, nil
}

func (f *fetcher) close() { f.dec.Close() }

// local returns a verified chunk from this machine's disk. ok is false if the disk does not have
// that chunk.
func (f *fetcher) local(c chunk.Chunk) (b []byte, ok bool) {
	p, ok := f.onDisk[c.Sum]
	if !ok {
		return nil, false
	}
	b = f.buf[:c.Size]
	// A chunk that cannot be read, or was overwritten, is downloaded.
	if _, err := p.dev.ReadAt(b, p.off); err != nil || sha256.Sum256(b) != c.Sum {
		delete(f.onDisk, c.Sum)
		return nil, false
	}
	return b, true
}

// maxDamaged is the maximum number of damaged chunks in an update. After each one, the index is
// downloaded again, so a hostile server could otherwise make a machine download data forever.
const maxDamaged = 10

// fetch downloads and verifies chunks of a part, and calls take for each.
func (f *fetcher) fetch(ctx context.Context, p *chunk.Part, chunks []int, take func(k int, b []byte) error) error {
	for len(chunks) > 0 {
		n, err := f.span(ctx, p, f.image.Spans(p, chunks)[0], take)
		chunks = chunks[n:]
		switch {
		case err == nil:
			continue
		case ctx.Err() != nil:
			return ctx.Err()
		case !errors.Is(err, errDamaged):
			return err
		}
		// The chunk was damaged, or the image on the server was replaced.
		if err := f.sameImage(ctx); err != nil {
			return err
		}
		if f.damaged++; f.damaged > maxDamaged {
			return run.Advise(err, "run the same command again: it continues; if it fails in the same way, the image on the server is damaged: copy it there again")
		}
	}
	return nil
}

// span downloads one range and calls take for each chunk in it. n is the number of chunks for which
// take succeeded.
func (f *fetcher) span(ctx context.Context, p *chunk.Part, s update.Span, take func(k int, b []byte) error) (n int, err error) {
	answer, err := f.src.Open(ctx, s.From, s.To-s.From)
	if err != nil {
		return 0, err
	}
	defer answer.Close()
	body := &countingReader{answer, f.count}
	at := s.From
	var packed []byte
	for _, k := range s.Frames {
		from := f.image.Place(p, k)
		if _, err := io.CopyN(io.Discard, body, from.From-at); err != nil {
			return n, fmt.Errorf("reading %s: %w", f.src.Name(), err)
		}
		packed = append(packed[:0], make([]byte, from.To-from.From)...)
		if _, err := io.ReadFull(body, packed); err != nil {
			return n, fmt.Errorf("reading %s: %w", f.src.Name(), err)
		}
		at = from.To
		c := p.Chunks[k]
		b, err := f.dec.DecodeAll(packed, f.buf[:0])
		if err != nil || int64(len(b)) != c.Size || sha256.Sum256(b) != c.Sum {
			return n, fmt.Errorf("reading %s: chunk %d of %s: %w", f.src.Name(), k, p.Label, errDamaged)
		}
		if err := take(k, b); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// countingReader is a reader that reports the number of bytes read to count.
type countingReader struct {
	io.Reader
	count func(n int)
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.count(n)
	return n, err
}

// errDamaged means that a chunk does not match its digest in the index.
var errDamaged = errors.New("it does not match the index: it was damaged in transit, or at the source")

// sameImage returns an error if the image at the source was replaced. It compares the index,
// because an ETag may be missing, or differ between the servers behind one name.
func (f *fetcher) sameImage(ctx context.Context) error {
	again, err := openIndex(ctx, f.src, f.now, f.tell)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, new(*temporaryError)), errors.Is(err, errLimit):
		return err
	case err == nil && bytes.Equal(again.Body, f.image.Body):
		return nil
	case errors.Is(err, errReplaced):
		return err
	}
	return fmt.Errorf("reading %s: %w", f.src.Name(), errReplaced)
}

// count adds downloaded bytes, and reports the progress.
func (f *fetcher) count(n int) {
	if f.phaseStart.IsZero() {
		f.phaseStart, f.phaseBase = f.now(), f.fetched
	}
	f.fetched += int64(n)
	now := f.now()
	if f.fetched != f.total && now.Sub(f.lastTold) < tellEvery {
		return
	}
	f.lastTold, f.remaining = now, 0
	if f.total < f.fetched {
		f.tell("%s: %s", f.src.Name(), bytesize.MB(f.fetched))
		return
	}
	left := ""
	if took, came := now.Sub(f.phaseStart), f.fetched-f.phaseBase; took > tellEvery && came > 0 && f.fetched < f.total {
		rest := took.Seconds() * float64(f.total-f.fetched) / float64(came)
		f.remaining = time.Duration(rest) * time.Second
		left = ", " + f.remaining.String() + " left"
	}
	f.tell("%s: %s%s", f.src.Name(), bytesize.MBOf(f.fetched, f.total), left)
}

// expect starts a phase that downloads these chunks. It raises total if they exceed it.
func (f *fetcher) expect(p *chunk.Part, chunks []int) {
	f.total, f.phaseStart = max(f.total, f.fetched+update.Bytes(f.image.Spans(p, chunks))), time.Time{}
}

// assemble writes a part's file system to the beginning of dev, which nothing else may use. It
// keeps chunks that are in place, so it may be killed and run again.
func (f *fetcher) assemble(ctx context.Context, p *chunk.Part, dev machine.Device) error {
	write := func(off int64, b []byte) error {
		if _, err := dev.WriteAt(b, off); err != nil {
			return fmt.Errorf("writing %d bytes at %d of %s: %w", len(b), off, dev.Name(), err)
		}
		return nil
	}
	var need []int
	offs := make([]int64, len(p.Chunks))
	off := int64(0)
	for k, c := range p.Chunks {
		if err := ctx.Err(); err != nil {
			return err
		}
		offs[k] = off
		there, err := f.inPlace(dev, off, c)
		if err != nil {
			return err
		}
		if !there {
			if c.Hole {
				err = write(off, make([]byte, c.Size))
			} else if b, ok := f.local(c); ok {
				err = write(off, b)
			} else {
				need = append(need, k)
			}
		}
		if err != nil {
			return err
		}
		off += c.Size
	}
	f.expect(p, need)
	if err := f.fetch(ctx, p, need, func(k int, b []byte) error { return write(offs[k], b) }); err != nil {
		return err
	}
	if err := dev.Sync(); err != nil {
		return fmt.Errorf("syncing %s: %w", dev.Name(), err)
	}
	return f.verify(ctx, p, dev)
}

// errReadBack means that the disk returns other data than was written.
var errReadBack = errors.New("the disk returns other data than was written to it: the disk is failing: use another disk")

// verify reads a part's file system from dev, and compares it with the image.
func (f *fetcher) verify(ctx context.Context, p *chunk.Part, dev machine.Device) error {
	off := int64(0)
	for _, c := range p.Chunks {
		if err := ctx.Err(); err != nil {
			return err
		}
		there, err := f.inPlace(dev, off, c)
		if err != nil {
			return err
		}
		if !there {
			return fmt.Errorf("reading %s back at %d: %w", dev.Name(), off, errReadBack)
		}
		off += c.Size
	}
	return nil
}

// inPlace reports whether dev contains a chunk at an offset.
func (f *fetcher) inPlace(dev machine.Device, off int64, c chunk.Chunk) (bool, error) {
	b := f.buf[:c.Size]
	switch n, err := dev.ReadAt(b, off); {
	case n == len(b):
	case errors.Is(err, io.EOF): // the device ends before the chunk does
		return false, nil
	default:
		return false, fmt.Errorf("reading %d bytes at %d of %s: %w", len(b), off, dev.Name(), err)
	}
	if c.Hole {
		return seekable.IsZero(b), nil
	}
	return sha256.Sum256(b) == c.Sum, nil
}
