// Package seekable reads and writes the zstd seekable format: a zstd file of independent frames,
// and a table of their sizes. Any zstd program can decompress the file. With the table, a reader
// can read or replace a single frame.
//
// A frame may be raw: it has the format of zstd, but its content is not compressed. The size of a
// raw frame depends only on the size of its content, so the content can be replaced in place. The
// slot of an image is stored in raw frames.
//
// The format is defined in zstd's contrib/seekable_format (zstd_seekable_compression_format.md),
// and the frames in RFC 8878.
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

// FrameSize is the maximum size of a frame's content in bytes.
const FrameSize = 4 << 20

// ErrDamaged means that the content of a frame does not match its checksum.
var ErrDamaged = errors.New("the file is damaged")

// maxZeros is the number of different compressed frames of zeros that a Reader keeps. It can be
// small because most holes are frames of FrameSize zeros, whose compressed form is the same.
const maxZeros = 8

// smallFrame is a compressed size in bytes. All frames of zeros are smaller, and almost all other
// frames are larger.
const smallFrame = 1024

const (
	magicFrame = 0xfd2fb528
	magicSkip  = 0x184d2a50 // first of the 16 magic numbers of skippable frames, which decoders ignore
	tableFrame = 0x184d2a5e // magic number of the skippable frame with the table
	magicTable = 0x8f92eab1 // last four bytes of the table

	footerSize = 9  // number of frames, descriptor, magic number
	entrySize  = 12 // compressed size, uncompressed size, checksum
	hasSums    = 0x80

	maxBlock = 128 << 10 // maximum size of a zstd block

	// maxFrames is enough for 16 TiB. A limit is needed because a sparse file may claim any size.
	maxFrames = 1 << 22

	// maxExtras is the maximum number of skippable frames before the table.
	maxExtras = 16
)

// ErrFormat means that a file does not have the format. The error is a FormatError with the reason.
var ErrFormat = errors.New("not a seekable zstd file")

// FormatError describes what is wrong with the table of a file.
type FormatError struct {
	Problem string
	// NoTable is set if the file does not end with a table.
	NoTable bool
	// Newer is set if a newer edgebake made the file.
	Newer bool
}

func (e *FormatError) Error() string        { return ErrFormat.Error() + ": " + e.Problem }
func (e *FormatError) Is(target error) bool { return target == ErrFormat }

func badFormat(format string, args ...any) error {
	return &FormatError{Problem: fmt.Sprintf(format, args...)}
}

// newer returns the error for a table that this edgebake is too old to read.
func newer(format string, args ...any) error {
	return &FormatError{Problem: "a newer edgebake made this image: " + fmt.Sprintf(format, args...), Newer: true}
}

var le = binary.LittleEndian

// Entry describes one frame.
type Entry struct {
	Offset     int64 // offset in the compressed file
	Compressed int64
	Start      int64 // offset in the content
	Size       int64
	sum        uint32
}

// Encoder compresses frames. It is safe for concurrent use. Its output depends only on the content.
type Encoder struct {
	pool sync.Pool
	zero []byte
}

// NewEncoder returns an encoder.
func NewEncoder() (*Encoder, error) {
	// Create an encoder here, because the pool's function New cannot return an error.
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

// Encode compresses content and appends the frame to dst.
func (e *Encoder) Encode(dst, content []byte) []byte {
	w := e.pool.Get().(*zstd.Encoder)
	defer e.pool.Put(w)
	return w.EncodeAll(content, dst)
}

// Zero returns the frame of FrameSize zeros, which was compressed in advance.
func (e *Encoder) Zero() []byte { return e.zero }

// RawSize returns the size of a raw frame with n bytes of content.
func RawSize(n int) int {
	blocks := max(1, (n+maxBlock-1)/maxBlock)
	return 4 + 1 + 4 + 3*blocks + n + 4
}

// Raw appends a raw frame with the content to dst.
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

// rawHeader appends a frame header for n bytes: content size in four bytes, single segment,
// checksum at the end.
func rawHeader(dst []byte, n int) []byte {
	dst = le.AppendUint32(dst, magicFrame)
	dst = append(dst, 2<<6|1<<5|1<<2)
	return le.AppendUint32(dst, uint32(n))
}

// rawBlock appends the header of a raw block of n bytes.
func rawBlock(dst []byte, n int, last bool) []byte {
	header := uint32(n) << 3 // block type 0: raw
	if last {
		header |= 1
	}
	return append(dst, byte(header), byte(header>>8), byte(header>>16))
}

// Sum returns the checksum of a frame's content.
func Sum(content []byte) uint32 { return uint32(xxhash.Sum64(content)) }

// Table collects the entries of a file that is being written.
type Table struct{ entries []Entry }

// Append adds the next frame and returns its offset in the file.
func (t *Table) Append(compressed, size int, sum uint32) int64 {
	e := Entry{Compressed: int64(compressed), Size: int64(size), sum: sum}
	if n := len(t.entries); n > 0 {
		last := t.entries[n-1]
		e.Offset, e.Start = last.Offset+last.Compressed, last.Start+last.Size
	}
	t.entries = append(t.entries, e)
	return e.Offset
}

// SetSum sets the checksum of a frame that was added before its content was known.
func (t *Table) SetSum(frame int, sum uint32) { t.entries[frame].sum = sum }

// Entry returns a frame's entry.
func (t *Table) Entry(frame int) Entry { return t.entries[frame] }

// End returns the offset of the end of the last frame in the file.
func (t *Table) End() int64 {
	if len(t.entries) == 0 {
		return 0
	}
	last := t.entries[len(t.entries)-1]
	return last.Offset + last.Compressed
}

// Encode returns the encoded table, which must follow the last frame.
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

// Reader reads the content of a compressed file at any offset. It is safe for
// concurrent use.
type Reader struct {
	r       io.ReaderAt
	entries []Entry
	extras  []extra
	size    int64 // size of the content
	table   int64 // offset of the table's first entry in the file
	dec     *zstd.Decoder

	mu    sync.Mutex
	cache []cached // most recently used frames, newest first
	kept  int64    // number of bytes in cache
	zeros [][]byte // up to maxZeros compressed frames whose content is only zeros

	packed sync.Pool // *[]byte buffers for compressed frames
}

type cached struct {
	frame   int
	content []byte
}

// keep is the maximum size in bytes of the frames that a Reader caches.
const keep = 4 * FrameSize

// extra is a skippable frame between the last frame and the table.
type extra struct {
	magic        uint32
	offset, size int64
}

// IsZstd reports whether b begins like a zstd file.
func IsZstd(b []byte) bool { return len(b) >= 4 && le.Uint32(b) == magicFrame }

// Open reads the table of a compressed file that has size bytes.
func Open(r io.ReaderAt, size int64) (*Reader, error) { return OpenAtMost(r, size, maxFrames) }

// OpenAtMost is Open for a file that is not trusted. It rejects more than this number of frames,
// before it allocates memory for them.
func OpenAtMost(r io.ReaderAt, size, frames int64) (*Reader, error) {
	z := &Reader{r: r}
	if err := z.readTable(size, frames); errors.Is(err, ErrFormat) {
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

// Head reads the first len(b) bytes of the content of a file. The file may be incomplete; the table
// is not used.
func Head(r io.ReaderAt, size int64, b []byte) error {
	dec, err := zstd.NewReader(io.NewSectionReader(r, 0, size), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*FrameSize), zstd.WithDecoderLowmem(true))
	if err != nil {
		return fmt.Errorf("setting up zstd: %w", err)
	}
	defer dec.Close()
	_, err = io.ReadFull(dec, b)
	return err
}

// FrameHead is the number of bytes of a file that IsFrame needs.
const FrameHead = zstd.HeaderMaxSize

// IsFrame reports whether a file that begins with head can be an edgebake image: its
// first frame has at most FrameSize bytes of content. Other programs usually write one large frame.
func IsFrame(head []byte) bool {
	var h zstd.Header
	return h.Decode(head) == nil && h.HasFCS && h.FrameContentSize <= FrameSize
}

func (z *Reader) readTable(size, most int64) error {
	foot := make([]byte, footerSize)
	if size < 8+footerSize {
		return badFormat("the file has only %d bytes", size)
	}
	if _, err := z.r.ReadAt(foot, size-footerSize); err != nil {
		return err
	}
	if le.Uint32(foot[5:]) != magicTable {
		return &FormatError{Problem: "the table at its end is missing; the file is truncated, or another program compressed it", NoTable: true}
	}
	n, sums := int64(le.Uint32(foot)), foot[4]&hasSums != 0
	if foot[4]&0x7c != 0 {
		return newer("the frame table has a format (%#x) that this edgebake does not support", foot[4])
	}
	if !sums {
		return badFormat("the table has no checksums, so another program made it")
	}
	tableSize := n*entrySize + footerSize
	at := size - tableSize - 8
	if at < 0 || n == 0 {
		return badFormat("the table lists %d frames, which is impossible in a file of %d bytes", n, size)
	}
	if n > most {
		return badFormat("the table lists %d frames, at most %d are accepted", n, most)
	}
	b := make([]byte, 8+n*entrySize)
	if _, err := z.r.ReadAt(b, at); err != nil {
		return err
	}
	if le.Uint32(b) != tableFrame || int64(le.Uint32(b[4:])) != tableSize {
		return badFormat("the table does not begin at the expected place")
	}
	off := int64(0)
	z.entries = make([]Entry, 0, n)
	for i := range int(n) {
		e := b[8+i*entrySize:]
		x := Entry{Offset: off, Compressed: int64(le.Uint32(e)), Start: z.size, Size: int64(le.Uint32(e[4:])), sum: le.Uint32(e[8:])}
		if x.Size > FrameSize {
			return newer("frame %d holds %d bytes, but this edgebake supports at most %d", i, x.Size, FrameSize)
		}
		if x.Size == 0 || x.Compressed > int64(RawSize(FrameSize)) {
			return badFormat("frame %d has an invalid size: %d bytes, %d compressed", i, x.Size, x.Compressed)
		}
		off += x.Compressed
		z.size += x.Size
		z.entries = append(z.entries, x)
	}
	z.table = at + 8
	return z.readExtras(off, at)
}

// readExtras finds the skippable frames between the last frame and the table.
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
			return badFormat("the frames have %d bytes, but the table lists %d; the file is truncated or damaged", table, frames)
		}
		z.extras = append(z.extras, x)
	}
	return nil
}

// Extra returns the content of the skippable frame with this magic number, which is between the
// last frame and the table. It returns nil if there is none.
func (z *Reader) Extra(magic uint32) *io.SectionReader {
	for _, x := range z.extras {
		if x.magic == magic {
			return io.NewSectionReader(z.r, x.offset, x.size)
		}
	}
	return nil
}

// Skippable appends a skippable frame to dst. Decoders ignore such frames.
func Skippable(dst []byte, magic uint32, content []byte) []byte {
	dst = le.AppendUint32(dst, magic)
	dst = le.AppendUint32(dst, uint32(len(content)))
	return append(dst, content...)
}

// Close frees the decoder. It does not close the underlying file.
func (z *Reader) Close() { z.dec.Close() }

// Size returns the size of the content in bytes.
func (z *Reader) Size() int64 { return z.size }

// Frames returns the number of frames.
func (z *Reader) Frames() int { return len(z.entries) }

// Entry returns a frame's entry.
func (z *Reader) Entry(frame int) Entry { return z.entries[frame] }

// SumOffset returns the offset in the file of a frame's checksum, which is in the table.
func (z *Reader) SumOffset(frame int) int64 {
	return z.table + int64(frame)*entrySize + 8
}

// IsRaw reports whether a frame is raw, so that its content can be replaced in place.
func (z *Reader) IsRaw(frame int) (bool, error) {
	e := z.entries[frame]
	if e.Compressed != int64(RawSize(int(e.Size))) {
		return false, nil
	}
	// Compare the headers too, because a compressed frame may by chance have the same size.
	first := int(min(e.Size, maxBlock))
	want := rawBlock(rawHeader(nil, int(e.Size)), first, int64(first) == e.Size)
	got := make([]byte, len(want))
	if _, err := z.r.ReadAt(got, e.Offset); err != nil {
		return false, fmt.Errorf("reading frame %d: %w", frame, err)
	}
	return bytes.Equal(got, want), nil
}

// Frame returns the content of a frame, which the caller must not change.
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

// Decode reads a frame without the cache, into buf if buf is large enough. If the frame contains
// only zeros, zero is true and content is nil.
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
		if len(z.zeros) < maxZeros && e.Size == FrameSize { // most frames of zeros have this size
			z.zeros = append(z.zeros, packed)
		}
		z.mu.Unlock()
		return nil, true, nil
	}
	return content, false, nil
}

// IsZero reports whether all bytes are zero. It compares b with itself shifted by one byte, because
// bytes.Equal is fast.
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
		return nil, fmt.Errorf("decompressing frame %d: its content does not match the table; %w", frame, ErrDamaged)
	}
	return b, nil
}

// Find returns the number of the frame that contains offset off of the content.
func (z *Reader) Find(off int64) int {
	i, found := slices.BinarySearchFunc(z.entries, off, func(e Entry, off int64) int { return cmp.Compare(e.Start, off) })
	if !found {
		i--
	}
	return i
}

// ReadAt reads from the uncompressed content.
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

// ReadRange fills buf with the content at off, without the cache. If the range contains only zeros,
// zero is true and buf is undefined.
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
		var room []byte // buffer for frames that are only partly needed; a whole frame is decompressed directly into buf
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

// SeemsZero reports whether the n bytes at off are probably zeros: all frames that contain them are
// smaller than smallFrame. It reads nothing from the file.
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
