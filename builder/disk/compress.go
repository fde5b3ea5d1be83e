package disk

import (
	"context"
	"crypto/sha256"
	"errors"
	"runtime"
	"sync"

	"github.com/edgebake/edgebake/builder/disk/seekable"
	"github.com/edgebake/edgebake/ondisk"
)

// compressor turns the raw image into frames: workers pack chunks of Align
// bytes side by side, and one writer appends them to the archive in order.
type compressor struct {
	w     *writer
	enc   *seekable.Encoder
	slot  *ondisk.PartitionInfo // nil: there is none
	table seekable.Table
	// frames has one for each chunk, packed and not yet written.
	frames []chan frame
	// sums are the chunks' digests, for the golden digest.
	sums    [][32]byte
	buffers sync.Pool // of *[]byte, for frames
	// ahead holds workers back that would fill the memory.
	ahead *window
}

// frame is one chunk, packed.
type frame struct {
	packed []byte
	size   int // of the chunk
	sum    uint32
	shared bool // packed is not this frame's alone
}

// compress writes the raw image as frames, and computes the golden digest on
// the way.
func (w *writer) compress(out *Output) error {
	enc, err := seekable.NewEncoder()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	n := len(w.track.chunks)
	c := &compressor{
		w: w, enc: enc, slot: w.layout.Find(ondisk.LabelSlot),
		frames: make([]chan frame, n), sums: make([][32]byte, n),
		buffers: sync.Pool{New: func() any { return new([]byte) }},
		ahead:   newWindow(ctx, 2*runtime.GOMAXPROCS(0)+1),
	}
	for i := range c.frames {
		c.frames[i] = make(chan frame, 1)
	}
	stored := make(chan error, 1)
	go func() {
		err := c.store(ctx, out)
		if err != nil {
			cancel() // nobody takes what is packed any more
		}
		stored <- err
	}()
	err = Parallel(ctx, n, func() func(int) error {
		buf := make([]byte, Align)
		return func(i int) error { return c.pack(i, buf) }
	})
	if err != nil {
		cancel()
	}
	// The file's error is the cause where both failed.
	if errFile := <-stored; errFile != nil && (err == nil || !errors.Is(errFile, context.Canceled)) {
		err = errFile
	}
	if err != nil {
		return err
	}
	w.result.Digest = DigestOf(w.layout.Parts, func(off, _ int64) [32]byte { return c.sums[off/Align] })
	return c.finish(out)
}

func (c *compressor) inSlot(i int) bool {
	off := int64(i) * Align
	return c.slot != nil && off >= c.slot.Start && off < c.slot.Start+c.slot.Size
}

// pack makes the frame of chunk i; buf has room for a chunk.
func (c *compressor) pack(i int, buf []byte) error {
	b := buf[:min(Align, c.w.layout.Size-int64(i)*Align)]
	f := frame{size: len(b)}
	if err := c.ahead.wait(i); err != nil {
		return err
	}
	switch {
	case c.inSlot(i): // made at the end
	case !c.w.track.written(i) && len(b) == Align:
		f.packed, f.shared, f.sum, c.sums[i] = c.enc.Zero(), true, zeroFrameSum(), zeroSum()
	default:
		if _, err := c.w.raw.ReadAt(b, int64(i)*Align); err != nil {
			return err
		}
		c.sums[i], f.sum = sha256.Sum256(b), seekable.Sum(b)
		f.packed = c.enc.Encode((*c.buffers.Get().(*[]byte))[:0], b)
	}
	c.frames[i] <- f
	return nil
}

// store appends the frames to the archive, in order.
func (c *compressor) store(ctx context.Context, out *Output) error {
	for i := range c.frames {
		var f frame
		select {
		case f = <-c.frames[i]:
		case <-ctx.Done():
			return ctx.Err()
		}
		if c.inSlot(i) {
			c.table.Append(seekable.RawSize(f.size), f.size, 0)
		} else if err := c.add(out, i, f); err != nil {
			return err
		}
		c.ahead.advance()
		c.w.progress(int64(f.size), c.w.total)
	}
	return nil
}

func (c *compressor) add(out *Output, i int, f frame) error {
	at := c.table.Append(len(f.packed), f.size, f.sum)
	if _, err := out.WriteAt(f.packed, at); err != nil {
		return err
	}
	// From here on it takes room in the archive, and no more in the raw
	// image: both together need no more than that one.
	c.w.raw.release(int64(i)*Align, int64(f.size))
	if !f.shared {
		c.buffers.Put(&f.packed)
	}
	return nil
}

// finish writes the slot, which holds the golden digest, raw into the place
// that was left for it, and the table behind all frames.
func (c *compressor) finish(out *Output) error {
	content, at, err := c.w.slot()
	if err != nil {
		return err
	}
	for off := 0; off < len(content); off += Align {
		i := int(at+int64(off)) / Align
		b := content[off:][:Align]
		c.table.SetSum(i, seekable.Sum(b))
		if _, err := out.WriteAt(seekable.Raw(nil, b), c.table.Entry(i).Offset); err != nil {
			return err
		}
	}
	last := c.table.Entry(len(c.frames) - 1)
	_, err = out.WriteAt(c.table.Encode(), last.Offset+last.Compressed)
	return err
}

// zeroFrameSum is the checksum of a whole frame of zeros.
var zeroFrameSum = sync.OnceValue(func() uint32 { return seekable.Sum(make([]byte, Align)) })

// window holds back whoever is too far ahead.
type window struct {
	ctx   context.Context
	mu    sync.Mutex
	moved *sync.Cond
	limit int
}

func newWindow(ctx context.Context, size int) *window {
	w := &window{ctx: ctx, limit: size}
	w.moved = sync.NewCond(&w.mu)
	context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.moved.Broadcast()
	})
	return w
}

// wait returns when number i is within the window, or the context has ended.
func (w *window) wait(i int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i >= w.limit && w.ctx.Err() == nil {
		w.moved.Wait()
	}
	return w.ctx.Err()
}

// advance moves the window on by one.
func (w *window) advance() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit++
	w.moved.Broadcast()
}
