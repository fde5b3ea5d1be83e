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
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
)

// FrameSize is the largest content of a frame in bytes. Readers accept frames of any
// size up to it.
const FrameSize = 4 << 20

// ErrDamaged is a frame whose content is not what was written.
var ErrDamaged = errors.New("the file is damaged")

// maxZeros bounds how many different frames of zeros a Reader remembers. Most holes
// of an image are whole frames of FrameSize, which are all equal.
const maxZeros = 8

// smallFrame is more than a frame of zeros takes. Hardly any other is smaller.
const smallFrame = 1024

const (
	magicFrame = 0xfd2fb528
	magicSkip  = 0x184d2a50 // begins the 16 magics of skippable frames, which decoders pass over
	tableFrame = 0x184d2a5e // the skippable frame that holds the table
	magicTable = 0x8f92eab1 // the table's last four bytes

	footerSize = 9  // frames, descriptor, magic
	entrySize  = 12 // compressed size, size, checksum
	hasSums    = 0x80

	maxBlock = 128 << 10 // of a zstd block

	// maxFrames is 16 TiB in frames of FrameSize. A server, or a sparse file, may claim
	// any size.
	maxFrames = 1 << 22

	// maxExtras is how many skippable frames may come before the table.
	maxExtras = 16
)

// ErrFormat says that a file is not in the format: a FormatError says why.
var ErrFormat = errors.New("not a seekable zstd file")

// FormatError is what is wrong with the table of a file.
type FormatError struct {
	Problem string
	// NoTable: the table at the file's end is missing.
	NoTable bool
	// Newer: a newer edgebake made the file.
	Newer bool
}

func (e *FormatError) Error() string        { return ErrFormat.Error() + ": " + e.Problem }
func (e *FormatError) Is(target error) bool { return target == ErrFormat }

func badFormat(format string, args ...any) error {
	return &FormatError{Problem: fmt.Sprintf(format, args...)}
}

// newer returns the error for a table that only a newer edgebake can read.
func newer(format string, args ...any) error {
	return &FormatError{Problem: "a newer edgebake made it: " + fmt.Sprintf(format, args...), Newer: true}
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

// End is where the last frame ends.
func (t *Table) End() int64 {
	if len(t.entries) == 0 {
		return 0
	}
	last := t.entries[len(t.entries)-1]
	return last.Offset + last.Compressed
}

// Encode renders the table, which goes behind the last frame.
func (t *Table) Encode() []byte {
	n := len(t.entries)*entrySize + footerSize
	b := make([]byte, 0, 8+n)
	b = le.AppendUint32(b, tableFrame)
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
	extras  []extra
	size    int64 // of the content
	table   int64 // where the table's first entry is in the file
	dec     *zstd.Decoder

	mu    sync.Mutex
	cache []cached // the frames used last, newest first
	kept  int64    // bytes in cache
	zeros [][]byte // at most maxZeros compressed frames known to hold nothing but zeros

	packed sync.Pool // of *[]byte, for frames as they are in the file
}

type cached struct {
	frame   int
	content []byte
}

// keep is how many bytes of decompressed frames a Reader holds.
const keep = 4 * FrameSize

// extra is the content of a skippable frame between the last frame and the table.
type extra struct {
	magic        uint32
	offset, size int64
}

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
	return h.Decode(head) == nil && h.HasFCS && h.FrameContentSize <= FrameSize
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
		return &FormatError{Problem: "the table at its end is missing; the file is cut short, or another program compressed it", NoTable: true}
	}
	n, sums := int64(le.Uint32(foot)), foot[4]&hasSums != 0
	if foot[4]&0x7c != 0 {
		return newer("the table of its frames has a form (%#x) that this edgebake does not know", foot[4])
	}
	if !sums {
		return badFormat("the table has no checksums, so another program made it")
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
	if le.Uint32(b) != tableFrame || int64(le.Uint32(b[4:])) != tableSize {
		return badFormat("the table's beginning is not where it should be")
	}
	off := int64(0)
	z.entries = make([]Entry, 0, n) // there are as many bytes of the table
	for i := range int(n) {
		e := b[8+i*entrySize:]
		x := Entry{Offset: off, Compressed: int64(le.Uint32(e)), Start: z.size, Size: int64(le.Uint32(e[4:])), sum: le.Uint32(e[8:])}
		if x.Size > FrameSize {
			return newer("frame %d holds %d bytes, and this edgebake knows at most %d", i, x.Size, FrameSize)
		}
		if x.Size == 0 || x.Compressed > int64(RawSize(FrameSize)) {
			return badFormat("frame %d holds %d bytes in %d", i, x.Size, x.Compressed)
		}
		off += x.Compressed
		z.size += x.Size
		z.entries = append(z.entries, x)
	}
	z.table = at + 8
	return z.readExtras(off, at)
}

// readExtras finds the skippable frames between the end of the last frame and the table.
func (z *Reader) readExtras(off, table int64) error {
	for frames := off; off != table; {
		head := make([]byte, 8)
		if off <= table-8 {
			if _, err := z.r.ReadAt(head, off); err != nil {
				return err
			}
		}
		x := extra{le.Uint32(head), off + 8, int64(le.Uint32(head[4:]))}
		if off = x.offset + x.size; x.magic&^0xf != magicSkip || off > table || len(z.extras) == maxExtras {
			return badFormat("its frames have %d bytes, the table says %d; the file is cut short or damaged", table, frames)
		}
		z.extras = append(z.extras, x)
	}
	return nil
}

// Extra returns the content of the skippable frame with that magic between the last frame
// and the table; nil if there is none.
func (z *Reader) Extra(magic uint32) *io.SectionReader {
	for _, x := range z.extras {
		if x.magic == magic {
			return io.NewSectionReader(z.r, x.offset, x.size)
		}
	}
	return nil
}

// Skippable appends a skippable frame, which decoders pass over.
func Skippable(dst []byte, magic uint32, content []byte) []byte {
	dst = le.AppendUint32(dst, magic)
	dst = le.AppendUint32(dst, uint32(len(content)))
	return append(dst, content...)
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
	z.cache = slices.Insert(z.cache, 0, cached{frame, b})
	for z.kept += int64(len(b)); z.kept > keep; {
		last := len(z.cache) - 1
		z.kept -= int64(len(z.cache[last].content))
		z.cache = slices.Delete(z.cache, last, last+1)
	}
	return b, nil
}

// Decode reads a frame into buf, if it is large enough, past the cache. With
// zero it reports that the frame holds nothing but zeros, and content is nil.
func (z *Reader) Decode(frame int, buf []byte) (content []byte, zero bool, err error) {
	e := z.entries[frame]
	small := e.Compressed < smallFrame
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
	if small && IsZero(content) {
		z.mu.Lock()
		if len(z.zeros) < maxZeros && e.Size == FrameSize { // each is compared with every small frame
			z.zeros = append(z.zeros, packed)
		}
		z.mu.Unlock()
		return nil, true, nil
	}
	return content, false, nil
}

// IsZero reports whether all bytes are zero: the first is, and each is the one
// before it, which comparing finds out many at a time.
func IsZero(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
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

// Find returns the frame that holds the byte at off, which must be within the content.
func (z *Reader) Find(off int64) int {
	i, found := slices.BinarySearchFunc(z.entries, off, func(e Entry, off int64) int { return cmp.Compare(e.Start, off) })
	if !found {
		i--
	}
	return i
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
		i := z.Find(at)
		b, err := z.Frame(i)
		if err != nil {
			return n, err
		}
		n += copy(p[n:], b[at-z.entries[i].Start:])
	}
	return n, nil
}

// ReadRange fills buf with the content at off, past the cache. With zero it reports that
// the range holds nothing but zeros, and the content of buf is undefined.
func (z *Reader) ReadRange(buf []byte, off int64) (zero bool, err error) {
	if off < 0 || off+int64(len(buf)) > z.size {
		return false, fmt.Errorf("reading %d bytes at %d of %d: %w", len(buf), off, z.size, io.ErrUnexpectedEOF)
	}
	zero = true
	for n := 0; n < len(buf); {
		i := z.Find(off + int64(n))
		e := z.entries[i]
		from := int(off + int64(n) - e.Start)
		dst := buf[n:][:min(int(e.Size)-from, len(buf)-n)]
		var room []byte // a whole frame is decompressed into its place
		if len(dst) == int(e.Size) {
			room = dst[:0:len(dst)]
		}
		b, none, err := z.Decode(i, room)
		switch {
		case err != nil:
			return false, err
		case none && !zero:
			clear(dst)
		case !none:
			if zero {
				clear(buf[:n])
				zero = false
			}
			copy(dst, b[from:])
		}
		n += len(dst)
	}
	return zero, nil
}

// SeemsZero reports whether the frames with n bytes at off are as small as those of zeros
// are. It reads nothing.
func (z *Reader) SeemsZero(off, n int64) bool {
	if off+n > z.size {
		return false
	}
	for end := off + n; off < end; {
		e := z.entries[z.Find(off)]
		if e.Compressed >= smallFrame {
			return false
		}
		off = e.Start + e.Size
	}
	return true
}
