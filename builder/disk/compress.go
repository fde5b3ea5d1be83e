package disk

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/update"
	"golang.org/x/sync/errgroup"
)

// Archive is a disk to be compressed. Each file system, and each gap between file systems, is cut
// into content-defined chunks (package chunk), with one frame for each. The slot's frames are not
// compressed, so that stamping can replace their content.
type Archive struct {
	Size  int64
	Parts []ondisk.PartitionInfo
	// Read reads len(b) bytes at off into b. If zero is true, they are all zero, and b is
	// undefined. Read is not called for the slot.
	Read func(b []byte, off int64) (zero bool, err error)
	// Slot returns the bytes of the slot. It is called after all calls of Read.
	Slot func() ([]byte, error)
	// Index, if set, returns the frame with the chunk index. It is called after Slot.
	Index func([]chunk.Part) ([]byte, error)
	// Stored, if set, is called in order for each range of the disk that has been stored.
	Stored func(off, n int64)
}

// indexed reports whether the chunk index lists the chunks of the partition with this label.
func indexed(label string) bool {
	return label == ondisk.LabelESP || label == ondisk.LabelRootA || label == ondisk.LabelData
}

// piece is one chunk to be added to the archive.
type piece struct {
	off     int64 // offset on the disk
	n       int
	content []byte      // nil for a hole or a part of the slot
	part    *chunk.Part // the part of the index that lists the chunk, or nil
	slot    bool

	packed []byte
	sum    uint32
	digest [32]byte
	packer chan struct{} // closed when the chunk is packed
}

// compressor writes an Archive. One goroutine cuts the disk into pieces, workers pack them in
// parallel, and one goroutine stores them in order.
type compressor struct {
	*Archive
	out   File
	enc   *seekable.Encoder
	table seekable.Table
	parts []*chunk.Part // cut adds the parts, and store adds their chunks
	slots []int         // indexes of the slot's frames

	ctx     context.Context
	work    chan *piece
	stored  chan *piece
	rooms   sync.Pool // of *[]byte, for contents
	packets sync.Pool // of *[]byte, for packed frames
}

// File is the file to which an archive is written. Compress reads the index back from it.
type File interface {
	io.ReaderAt
	io.WriterAt
}

// Compress writes the archive to out, which must be empty.
func Compress(ctx context.Context, out File, a Archive) error {
	enc, err := seekable.NewEncoder()
	if err != nil {
		return err
	}
	const ahead = 32 // pieces in memory, each of at most chunk.MaxSize
	g, ctx := errgroup.WithContext(ctx)
	c := &compressor{Archive: &a, out: out, enc: enc, ctx: ctx, work: make(chan *piece, ahead), stored: make(chan *piece, ahead)}
	c.rooms.New = func() any {
		b := make([]byte, 0, chunk.MaxSize)
		return &b
	}
	c.packets.New = func() any {
		b := make([]byte, 0, seekable.RawSize(chunk.MaxSize))
		return &b
	}
	g.Go(func() error {
		defer close(c.work)
		defer close(c.stored)
		return c.cut()
	})
	for range runtime.GOMAXPROCS(0) {
		g.Go(func() error {
			for p := range c.work {
				c.pack(p)
			}
			return nil
		})
	}
	g.Go(c.store)
	if err := g.Wait(); err != nil {
		return err
	}
	return c.finish()
}

// cut cuts the whole disk into pieces, and sends them to the workers.
func (c *compressor) cut() error {
	parts := slices.SortedFunc(slices.Values(c.Parts), func(a, b ondisk.PartitionInfo) int { return cmp.Compare(a.Start, b.Start) })
	at := int64(0)
	for _, p := range parts {
		fs := cmp.Or(p.FSSize, p.Size)
		if err := c.region(at, p.Start, ""); err != nil {
			return err
		}
		if err := c.region(p.Start, p.Start+fs, p.Label); err != nil {
			return err
		}
		if err := c.region(p.Start+fs, p.Start+p.Size, ""); err != nil {
			return err
		}
		at = p.Start + p.Size
	}
	return c.region(at, c.Size, "")
}

// region cuts one range of the disk: the file system in the partition with this label or, if label
// is empty, a gap.
func (c *compressor) region(from, to int64, label string) error {
	if from > to || from%chunk.Block != 0 {
		return fmt.Errorf("BUG: partition %q, or the gap before it, has bytes %d to %d", label, from, to)
	}
	var part *chunk.Part
	if indexed(label) {
		part = &chunk.Part{Label: label, Start: from, Size: to - from}
		c.parts = append(c.parts, part)
	}
	at := from
	if label == ondisk.LabelSlot {
		for ; at < to; at += Align {
			if err := c.send(&piece{off: at, n: int(min(Align, to-at)), slot: true}, nil); err != nil {
				return err
			}
		}
		return nil
	}
	return chunk.Cut(to-from, func(b []byte, off int64) (bool, error) { return c.Read(b, from+off) }, func(b []byte, n int) error {
		p := &piece{off: at, n: n, part: part}
		at += int64(n)
		return c.send(p, b)
	})
}

// send queues a piece with a copy of its content.
func (c *compressor) send(p *piece, content []byte) error {
	p.packer = make(chan struct{})
	if content != nil {
		room := c.rooms.Get().(*[]byte)
		p.content = append((*room)[:0], content...)
	}
	for _, to := range []chan *piece{c.stored, c.work} {
		select {
		case to <- p:
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
	}
	return nil
}

// pack makes the frame of a piece.
func (c *compressor) pack(p *piece) {
	defer close(p.packer)
	switch {
	case p.slot: // finish writes it
	case p.content == nil && p.n == seekable.FrameSize:
		p.packed, p.sum = c.enc.Zero(), zeroFrameSum()
	case p.content == nil:
		zeros := make([]byte, p.n)
		p.packed, p.sum = c.enc.Encode(nil, zeros), seekable.Sum(zeros)
	default:
		if p.part != nil {
			p.digest = sha256.Sum256(p.content)
		}
		p.sum = seekable.Sum(p.content)
		p.packed = c.enc.Encode((*c.packets.Get().(*[]byte))[:0], p.content)
	}
}

// store appends the frames to the file in order.
func (c *compressor) store() error {
	frame := 0
	for p := range c.stored {
		select {
		case <-p.packer:
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
		if p.slot {
			c.table.Append(seekable.RawSize(p.n), p.n, 0)
			c.slots = append(c.slots, frame)
		} else if _, err := c.out.WriteAt(p.packed, c.table.Append(len(p.packed), p.n, p.sum)); err != nil {
			return err
		}
		if p.part != nil {
			c.note(p, frame)
		}
		if p.content != nil {
			c.rooms.Put(&p.content)
			c.packets.Put(&p.packed)
		}
		if c.Stored != nil {
			c.Stored(p.off, int64(p.n))
		}
		frame++
	}
	return c.ctx.Err()
}

// note adds a piece to the chunk index.
func (c *compressor) note(p *piece, frame int) {
	if len(p.part.Chunks) == 0 {
		p.part.Frame = frame
	}
	p.part.Chunks = append(p.part.Chunks, chunk.Chunk{Size: int64(p.n), Hole: p.content == nil, Sum: p.digest})
}

// finish writes the slot into its reserved frames, and then the index and the frame table at the
// end.
func (c *compressor) finish() error {
	if len(c.slots) > 0 {
		content, err := c.Slot()
		if err != nil {
			return err
		}
		for _, frame := range c.slots {
			e := c.table.Entry(frame)
			b := content[e.Start-c.table.Entry(c.slots[0]).Start:][:e.Size]
			c.table.SetSum(frame, seekable.Sum(b))
			if _, err := c.out.WriteAt(seekable.Raw(nil, b), e.Offset); err != nil {
				return err
			}
		}
	}
	var tail []byte
	if c.Index != nil {
		parts := make([]chunk.Part, len(c.parts))
		for i, p := range c.parts {
			parts[i] = *p
		}
		index, err := c.Index(parts)
		if err != nil {
			return err
		}
		tail = seekable.Skippable(nil, chunk.Magic, index)
	}
	tail = append(tail, c.table.Encode()...)
	if _, err := c.out.WriteAt(tail, c.table.End()); err != nil || c.Index == nil {
		return err
	}
	return c.verify(c.table.End() + int64(len(tail)))
}

// verify reads the index as an update does, and compares it with the frames: a wrong index cannot
// be repaired once the image is in use.
func (c *compressor) verify(size int64) error {
	i, err := update.Open(c.out, size)
	if err == nil {
		err = i.Decode()
	}
	if err != nil {
		return fmt.Errorf("reading the new chunk index back: %w", err)
	}
	return nil
}

// zeroFrameSum returns the checksum of a full frame of zeros.
var zeroFrameSum = sync.OnceValue(func() uint32 { return seekable.Sum(make([]byte, seekable.FrameSize)) })
