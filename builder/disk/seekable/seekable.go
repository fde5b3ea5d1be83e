// Package seekable reads and writes the zstd seekable format: a zstd file of
// independent frames, followed by a table that says where each begins. Any zstd
// decompresses the whole file. With the table, a reader can read or replace one
// frame alone.
//
// A frame may be stored raw: wrapped as zstd, not compressed. The length of such
// a frame depends on the length of its content alone, so new content replaces the
// old without moving anything else. The slot of an image is stored so.
//
// The format is defined in zstd's contrib/seekable_format
// (zstd_seekable_compression_format.md), frames in RFC 8878.
package seekable

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
)

// FrameSize is how many bytes of the image one frame holds; the last frame
// may hold fewer.
const FrameSize = 4 << 20

// ErrDamaged is a frame whose content is not what was written.
var ErrDamaged = errors.New("the file is damaged")

// maxZeros bounds the kinds of frames of zeros that are known: an image that one
// program wrote has one or two.
const maxZeros = 8

// SmallFrame is more than a frame of zeros takes. Hardly any other is smaller.
const SmallFrame = 1024

const (
	magicFrame = 0xfd2fb528
	magicSkip  = 0x184d2a5e // a skippable frame, which decoders pass over
	magicTable = 0x8f92eab1 // the table's last four bytes

	footerSize = 9  // frames, descriptor, magic
	entrySize  = 12 // compressed size, size, checksum
	hasSums    = 0x80

	maxBlock = 128 << 10 // of a zstd block

	// maxFrames is 16 TiB. A server, or a sparse file, may claim any size.
	maxFrames = 1 << 22
)

// ErrFormat says that a file is not in the format: a FormatError says why.
var ErrFormat = errors.New("not a seekable zstd file")

// FormatError is what is wrong with the table of a file.
type FormatError struct {
	Problem string
	// NoTable: the table at the file's end is missing.
	NoTable bool
}

func (e *FormatError) Error() string        { return ErrFormat.Error() + ": " + e.Problem }
func (e *FormatError) Is(target error) bool { return target == ErrFormat }

func badFormat(format string, args ...any) error {
	return &FormatError{Problem: fmt.Sprintf(format, args...)}
}

var le = binary.LittleEndian

// Entry describes one frame.
type Entry struct {
	Offset     int64 // in the compressed file
	Compressed int64
	Start      int64 // in the content
	Size       int64
	sum        uint32
}

// Encoder compresses frames. It is safe for concurrent use, and the bytes do
// not depend on what it compressed before or on who else uses it.
type Encoder struct {
	pool sync.Pool
	zero []byte
}

// NewEncoder returns an encoder.
func NewEncoder() (*Encoder, error) {
	// Tried once here, so that the pool needs no way to fail.
	if _, err := newZstd(); err != nil {
		return nil, fmt.Errorf("setting up zstd: %w", err)
	}
	e := &Encoder{}
	e.pool.New = func() any {
		w, err := newZstd()
		if err != nil {
			panic(fmt.Sprintf("BUG: zstd options were accepted before: %v", err))
		}
		return w
	}
	e.zero = e.Encode(nil, make([]byte, FrameSize))
	return e, nil
}

func newZstd() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(FrameSize), zstd.WithLowerEncoderMem(true))
}

// Encode appends the compressed frame to dst.
func (e *Encoder) Encode(dst, content []byte) []byte {
	w := e.pool.Get().(*zstd.Encoder)
	defer e.pool.Put(w)
	return w.EncodeAll(content, dst)
}

// Zero is the frame of FrameSize zeros, made once: holes cost nothing.
func (e *Encoder) Zero() []byte { return e.zero }

// RawSize is the length of a raw frame for n bytes of content.
func RawSize(n int) int {
	blocks := max(1, (n+maxBlock-1)/maxBlock)
	return 4 + 1 + 4 + 3*blocks + n + 4
}

// Raw appends a frame that holds content as it is.
func Raw(dst, content []byte) []byte {
	dst = slices.Grow(dst, RawSize(len(content)))
	dst = rawHeader(dst, len(content))
	for rest := content; ; {
		n := min(len(rest), maxBlock)
		dst = rawBlock(dst, n, n == len(rest))
		dst = append(dst, rest[:n]...)
		if rest = rest[n:]; len(rest) == 0 {
			break
		}
	}
	return le.AppendUint32(dst, Sum(content))
}

// rawHeader appends a frame's header: a content size of four bytes, a single
// segment, a checksum at the end.
func rawHeader(dst []byte, n int) []byte {
	dst = le.AppendUint32(dst, magicFrame)
	dst = append(dst, 2<<6|1<<5|1<<2)
	return le.AppendUint32(dst, uint32(n))
}

// rawBlock appends the header of a raw block.
func rawBlock(dst []byte, n int, last bool) []byte {
	header := uint32(n) << 3 // block type 0: raw
	if last {
		header |= 1
	}
	return append(dst, byte(header), byte(header>>8), byte(header>>16))
}

// Sum is the checksum of a frame's content.
func Sum(content []byte) uint32 { return uint32(xxhash.Sum64(content)) }

// Table gathers the entries of a file being written.
type Table struct{ entries []Entry }

// Append notes the next frame and returns where in the file it belongs.
func (t *Table) Append(compressed, size int, sum uint32) int64 {
	e := Entry{Compressed: int64(compressed), Size: int64(size), sum: sum}
	if n := len(t.entries); n > 0 {
		last := t.entries[n-1]
		e.Offset, e.Start = last.Offset+last.Compressed, last.Start+last.Size
	}
	t.entries = append(t.entries, e)
	return e.Offset
}

// SetSum sets the checksum of a frame whose content came later.
func (t *Table) SetSum(frame int, sum uint32) { t.entries[frame].sum = sum }

// Entry returns a frame's entry.
func (t *Table) Entry(frame int) Entry { return t.entries[frame] }

// Encode renders the table, which goes behind the last frame.
func (t *Table) Encode() []byte {
	n := len(t.entries)*entrySize + footerSize
	b := make([]byte, 0, 8+n)
	b = le.AppendUint32(b, magicSkip)
	b = le.AppendUint32(b, uint32(n))
	for _, e := range t.entries {
		b = le.AppendUint32(b, uint32(e.Compressed))
		b = le.AppendUint32(b, uint32(e.Size))
		b = le.AppendUint32(b, e.sum)
	}
	b = le.AppendUint32(b, uint32(len(t.entries)))
	b = append(b, hasSums)
	return le.AppendUint32(b, magicTable)
}

// Reader reads the content of a file at any offset. It is safe for
// concurrent use.
type Reader struct {
	r       io.ReaderAt
	entries []Entry
	size    int64 // of the content
	table   int64 // where the table's first entry is in the file
	dec     *zstd.Decoder

	mu    sync.Mutex
	cache []cached // the frames used last, newest first
	zeros [][]byte // at most maxZeros compressed frames known to hold nothing but zeros

	packed sync.Pool // of *[]byte, for frames as they are in the file
}

type cached struct {
	frame   int
	content []byte
}

// keep is how many decompressed frames a Reader holds.
const keep = 4

// IsZstd reports whether a file that begins with b is a zstd file.
func IsZstd(b []byte) bool { return len(b) >= 4 && le.Uint32(b) == magicFrame }

// Open reads the table of a compressed file of that size.
func Open(r io.ReaderAt, size int64) (*Reader, error) {
	z := &Reader{r: r}
	if err := z.readTable(size); errors.Is(err, ErrFormat) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("reading the table of the compressed image: %w", err)
	}
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(2*FrameSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("setting up zstd: %w", err)
	}
	z.dec = dec
	return z, nil
}

// Head reads the first bytes of what may be no whole file, and so has no table.
func Head(r io.ReaderAt, size int64, b []byte) error {
	dec, err := zstd.NewReader(io.NewSectionReader(r, 0, size), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*FrameSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		return fmt.Errorf("setting up zstd: %w", err)
	}
	defer dec.Close()
	_, err = io.ReadFull(dec, b)
	return err
}

// FrameHead is as much as IsFrame looks at.
const FrameHead = zstd.HeaderMaxSize

// IsFrame reports whether the beginning of a file is that of a frame as edgebake
// makes it, and not that of all that another program compressed.
func IsFrame(head []byte) bool {
	var h zstd.Header
	return h.Decode(head) == nil && h.HasFCS && h.FrameContentSize == FrameSize
}

func (z *Reader) readTable(size int64) error {
	foot := make([]byte, footerSize)
	if size < 8+footerSize {
		return badFormat("it has %d bytes", size)
	}
	if _, err := z.r.ReadAt(foot, size-footerSize); err != nil {
		return err
	}
	if le.Uint32(foot[5:]) != magicTable {
		return &FormatError{"the table at its end is missing; the file is cut short, or another program compressed it", true}
	}
	n, sums := int64(le.Uint32(foot)), foot[4]&hasSums != 0
	if foot[4]&0x7c != 0 || !sums {
		return badFormat("the table is of a kind that edgebake does not write")
	}
	tableSize := n*entrySize + footerSize
	at := size - tableSize - 8
	if at < 0 || n == 0 || n > maxFrames {
		return badFormat("the table names %d frames, more than the file has or an image can have", n)
	}
	b := make([]byte, 8+n*entrySize)
	if _, err := z.r.ReadAt(b, at); err != nil {
		return err
	}
	if le.Uint32(b) != magicSkip || int64(le.Uint32(b[4:])) != tableSize {
		return badFormat("the table's beginning is not where it should be")
	}
	off := int64(0)
	for i := range int(n) {
		e := b[8+i*entrySize:]
		x := Entry{Offset: off, Compressed: int64(le.Uint32(e)), Start: z.size, Size: int64(le.Uint32(e[4:])), sum: le.Uint32(e[8:])}
		last := i == int(n)-1
		if x.Size == 0 || x.Size > FrameSize || !last && x.Size != FrameSize || x.Compressed > int64(RawSize(FrameSize)) {
			return badFormat("frame %d holds %d bytes in %d", i, x.Size, x.Compressed)
		}
		off += x.Compressed
		z.size += x.Size
		z.entries = append(z.entries, x)
	}
	if off != at {
		return badFormat("its frames have %d bytes, the table says %d; the file is cut short or damaged", at, off)
	}
	z.table = at + 8
	return nil
}

// Close lets go of the decoder; the file stays open.
func (z *Reader) Close() { z.dec.Close() }

// Size of the content.
func (z *Reader) Size() int64 { return z.size }

// Frames is their number.
func (z *Reader) Frames() int { return len(z.entries) }

// Entry returns a frame's entry.
func (z *Reader) Entry(frame int) Entry { return z.entries[frame] }

// SumOffset is where in the file a frame's checksum is, in the table.
func (z *Reader) SumOffset(frame int) int64 {
	return z.table + int64(frame)*entrySize + 8
}

// IsRaw reports whether a frame is stored raw, so that other content of the
// same length can take its place.
func (z *Reader) IsRaw(frame int) (bool, error) {
	e := z.entries[frame]
	if e.Compressed != int64(RawSize(int(e.Size))) {
		return false, nil
	}
	// What tells is the header; a compressed block could have this length
	// by chance.
	first := int(min(e.Size, maxBlock))
	want := rawBlock(rawHeader(nil, int(e.Size)), first, int64(first) == e.Size)
	got := make([]byte, len(want))
	if _, err := z.r.ReadAt(got, e.Offset); err != nil {
		return false, fmt.Errorf("reading frame %d: %w", frame, err)
	}
	return bytes.Equal(got, want), nil
}

// Frame returns a frame's content. It must not be changed.
func (z *Reader) Frame(frame int) ([]byte, error) {
	z.mu.Lock()
	for i, c := range z.cache {
		if c.frame == frame {
			copy(z.cache[1:i+1], z.cache[:i])
			z.cache[0] = c
			z.mu.Unlock()
			return c.content, nil
		}
	}
	z.mu.Unlock()
	b, err := z.decode(frame, nil)
	if err != nil {
		return nil, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	z.cache = append([]cached{{frame, b}}, z.cache[:min(len(z.cache), keep-1)]...)
	return b, nil
}

// Decode reads a frame into buf, if it is large enough, past the cache. With
// zero it reports that the frame holds nothing but zeros, and content is nil.
func (z *Reader) Decode(frame int, buf []byte) (content []byte, zero bool, err error) {
	e := z.entries[frame]
	small := e.Compressed < SmallFrame
	var packed []byte
	if small {
		packed = make([]byte, e.Compressed)
		if _, err := z.r.ReadAt(packed, e.Offset); err != nil {
			return nil, false, fmt.Errorf("reading frame %d: %w", frame, err)
		}
		z.mu.Lock()
		for _, k := range z.zeros {
			zero = zero || bytes.Equal(k, packed)
		}
		z.mu.Unlock()
		if zero {
			return nil, true, nil
		}
	}
	content, err = z.decode(frame, buf)
	if err != nil {
		return nil, false, err
	}
	if small && len(bytes.TrimLeft(content, "\x00")) == 0 {
		z.mu.Lock()
		if len(z.zeros) < maxZeros { // each is compared with every small frame
			z.zeros = append(z.zeros, packed)
		}
		z.mu.Unlock()
		return nil, true, nil
	}
	return content, false, nil
}

func (z *Reader) decode(frame int, buf []byte) ([]byte, error) {
	e := z.entries[frame]
	room, _ := z.packed.Get().(*[]byte)
	if room == nil {
		room = new([]byte)
	}
	defer z.packed.Put(room)
	*room = slices.Grow((*room)[:0], int(e.Compressed))
	packed := (*room)[:e.Compressed]
	if _, err := z.r.ReadAt(packed, e.Offset); err != nil {
		return nil, fmt.Errorf("reading frame %d: %w", frame, err)
	}
	if int64(cap(buf)) < e.Size {
		buf = make([]byte, 0, e.Size)
	}
	b, err := z.dec.DecodeAll(packed, buf[:0])
	if err != nil {
		return nil, fmt.Errorf("decompressing frame %d: %w; %w", frame, err, ErrDamaged)
	}
	if int64(len(b)) != e.Size || Sum(b) != e.sum {
		return nil, fmt.Errorf("decompressing frame %d: its content is not what the table says; %w", frame, ErrDamaged)
	}
	return b, nil
}

// ReadAt reads the content.
func (z *Reader) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("reading at %d: negative offset", off)
	}
	for n < len(p) {
		at := off + int64(n)
		if at >= z.size {
			return n, io.EOF
		}
		b, err := z.Frame(int(at >> bits.TrailingZeros(FrameSize)))
		if err != nil {
			return n, err
		}
		n += copy(p[n:], b[at%FrameSize:])
	}
	return n, nil
}
