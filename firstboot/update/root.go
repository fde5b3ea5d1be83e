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

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/update"
)

// place is where a chunk is on this machine's disk.
type place struct {
	dev machine.Device
	off int64
}

// seeds are the chunks on this machine's disk, by digest.
type seeds map[[32]byte]place

// scan adds the chunks of a device.
func (s seeds) scan(ctx context.Context, dev machine.Device, size int64) error {
	off := int64(0)
	read := chunk.From(dev)
	return chunk.Cut(size, func(b []byte, off int64) (bool, error) {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		return read(b, off)
	}, func(b []byte, n int) error {
		if b != nil {
			s[sha256.Sum256(b)] = place{dev, off}
		}
		off += int64(n)
		return nil
	})
}

// fetcher brings chunks of an image, from this machine's disk or from where the image is.
type fetcher struct {
	image *update.Image
	src   Source
	seeds seeds
	dec   *zstd.Decoder
	// sleep and tell are the machine's.
	sleep func(context.Context, time.Duration) error
	tell  func(format string, args ...any)
	now   func() time.Time

	buf     []byte
	total   int64 // to be fetched
	fetched int64
	begun   time.Time
	told    time.Time
}

// tellEvery is how often progress is told.
const tellEvery = 5 * time.Second

func newFetcher(e *machine.Env, image *update.Image, src Source) (*fetcher, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*chunk.HoleSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("setting up zstd: %w", err)
	}
	return &fetcher{image: image, src: src, seeds: seeds{}, dec: dec, sleep: e.Sleep, tell: e.Waiting, now: e.Now, buf: make([]byte, chunk.HoleSize)}, nil
}

func (f *fetcher) close() { f.dec.Close() }

// local returns a chunk that is on this machine's disk, verified. ok: it is.
func (f *fetcher) local(c chunk.Chunk) (b []byte, ok bool) {
	p, ok := f.seeds[c.Sum]
	if !ok {
		return nil, false
	}
	b = f.buf[:c.Size]
	// A sector that cannot be read is a chunk to be fetched.
	if _, err := p.dev.ReadAt(b, p.off); err != nil || sha256.Sum256(b) != c.Sum {
		delete(f.seeds, c.Sum)
		return nil, false
	}
	return b, true
}

const (
	// patience is how often in a row a request may fail that brought nothing.
	patience = 20
	maxPause = time.Minute
)

// fetch fetches chunks of a part, verifies each, and calls take. Ranges that break are
// continued behind the last chunk that came whole.
func (f *fetcher) fetch(ctx context.Context, p *chunk.Part, chunks []int, take func(k int, b []byte) error) error {
	failures, damaged, pause := 0, 0, time.Second
	for len(chunks) > 0 {
		spans := update.Spans(chunks, func(k int) update.Place { return f.image.Place(p, k) })
		n, err := f.span(ctx, p, spans[0], take)
		chunks = chunks[n:]
		switch {
		case err == nil:
			failures, damaged, pause = 0, 0, time.Second
			continue
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, new(*final)):
			return err
		}
		if n > 0 {
			failures, damaged, pause = 0, 0, time.Second
		}
		if errors.Is(err, errDamaged) {
			// Damaged on the way, or another image: its end tells.
			if err := f.sameImage(ctx); err != nil {
				return err
			}
			damaged++
		}
		if failures++; failures > patience || damaged > 3 {
			return run.Advise(err, "run the same command again: it continues")
		}
		f.tell("the next try in %s: %s", pause, machine.OneLine(err))
		if err := f.sleep(ctx, pause); err != nil {
			return err
		}
		pause = min(2*pause, maxPause)
	}
	return nil
}

// span fetches one range, and returns how many of its chunks were taken.
func (f *fetcher) span(ctx context.Context, p *chunk.Part, s update.Span, take func(k int, b []byte) error) (n int, err error) {
	body, err := f.src.Open(ctx, s.From, s.To-s.From)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	at := s.From
	var packed []byte
	for _, k := range s.Frames {
		from := f.image.Place(p, k)
		if err := f.skip(body, from.From-at); err != nil {
			return n, err
		}
		packed = append(packed[:0], make([]byte, from.To-from.From)...)
		got, err := io.ReadFull(body, packed)
		f.count(int64(got))
		if err != nil {
			return n, fmt.Errorf("reading %s: %w", f.src.Name(), err)
		}
		at = from.To
		c := p.Chunks[k]
		b, err := f.dec.DecodeAll(packed, f.buf[:0])
		if err != nil || int64(len(b)) != c.Size || sha256.Sum256(b) != c.Sum {
			return n, fmt.Errorf("reading %s: chunk %d of %s: %w", f.src.Name(), k, p.Label, errDamaged)
		}
		if err := take(k, b); err != nil {
			return n, &final{err}
		}
		n++
	}
	return n, nil
}

// errDamaged is a chunk that is not the one of the index.
var errDamaged = errors.New("it is not the one that the index lists: it was damaged on the way, or where the image is")

// sameImage reports whether the image is still the one that it was at the beginning. Not
// every server tells it with a range.
func (f *fetcher) sameImage(ctx context.Context) error {
	again, err := update.Open(readerAt{ctx, f.src}, f.src.Size())
	if err == nil && bytes.Equal(again.Body, f.image.Body) || ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil && !errors.Is(err, seekable.ErrFormat) && !errors.Is(err, update.ErrNoIndex) && !errors.As(err, new(*final)) {
		return nil // the line is down
	}
	return &final{fmt.Errorf("reading %s: %w", f.src.Name(), errReplaced)}
}

func (f *fetcher) skip(body io.Reader, n int64) error {
	got, err := io.CopyN(io.Discard, body, n)
	f.count(got)
	if err != nil {
		return fmt.Errorf("reading %s: %w", f.src.Name(), err)
	}
	return nil
}

// count adds fetched bytes, and tells how it goes.
func (f *fetcher) count(n int64) {
	if f.begun.IsZero() {
		f.begun = f.now()
	}
	f.fetched += n
	now := f.now()
	if f.fetched < f.total && now.Sub(f.told) < tellEvery {
		return
	}
	f.told = now
	left := ""
	if took := now.Sub(f.begun); took > tellEvery && f.fetched > 0 && f.fetched < f.total {
		rest := took.Seconds() * float64(f.total-f.fetched) / float64(f.fetched)
		left = ", " + (time.Duration(rest) * time.Second).String() + " left"
	}
	f.tell("%s: %.1f of %.1f MB%s", f.src.Name(), float64(f.fetched)/1e6, float64(f.total)/1e6, left)
}

// expect adds the bytes of chunks to those that will be fetched.
func (f *fetcher) expect(p *chunk.Part, chunks []int) {
	for _, s := range update.Spans(chunks, func(k int) update.Place { return f.image.Place(p, k) }) {
		f.total += s.To - s.From
	}
}

// assemble writes a part's file system to the beginning of dev, which nobody else uses.
// What is there already stays. It may be killed at any point and run again.
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
		return fmt.Errorf("waiting for %s to store what was written: %w", dev.Name(), err)
	}
	return f.verify(ctx, p, dev)
}

// errReadBack is a disk that does not keep what it is given.
var errReadBack = errors.New("the disk returns other bytes than were written to it: it is failing")

// verify reads a part's file system back from dev.
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

// inPlace reports whether dev has a chunk at an offset.
func (f *fetcher) inPlace(dev machine.Device, off int64, c chunk.Chunk) (bool, error) {
	b := f.buf[:c.Size]
	switch n, err := dev.ReadAt(b, off); {
	case n == len(b):
	case errors.Is(err, io.EOF): // the device ends: what the buffer had before is not there
		return false, nil
	default:
		return false, fmt.Errorf("reading %d bytes at %d of %s: %w", len(b), off, dev.Name(), err)
	}
	if c.Hole {
		return len(bytes.TrimLeft(b, "\x00")) == 0, nil
	}
	return sha256.Sum256(b) == c.Sum, nil
}
