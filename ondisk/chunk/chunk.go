// Package chunk divides file systems into chunks by their content, so that two images that share
// most of their bytes also share most of their chunks. A compressed image has one frame per chunk,
// and an Index of the chunks. A machine divides the file systems on its own disk in the same way,
// and fetches only the frames of chunks that it does not have.
//
// The rules of division are part of the image format (docs/decisions/0042-chunks-by-content.md). If
// they change, updates from older images still work but fetch more.
package chunk

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"sync"
)

// Sizes of chunks in bytes.
const (
	// Block is the unit of holes; a hole is a chunk of zeros.
	Block = 4 << 10
	// MinSize, Average and MaxSize apply to chunks of data. A chunk before a
	// hole or at the end of the file system may be smaller.
	MinSize = 32 << 10
	Average = 128 << 10
	MaxSize = 512 << 10
	// MinHole is the minimum number of zero bytes, in whole blocks, that form a hole.
	MinHole = 64 << 10
	// HoleSize is the maximum size of a chunk that is a hole. A longer hole is divided at multiples
	// of HoleSize.
	HoleSize = 4 << 20
)

// window is the number of bytes before the end of a chunk that determine the end.
const window = 64

// Masks of the rolling hash. A chunk shorter than Average ends where the hash has zeros in all bits
// of hardMask, a longer chunk where it has zeros in all bits of easyMask. hardMask has
// log2(Average)+1 bits, easyMask log2(Average)-1, so sizes are closer to Average (FastCDC's
// normalized chunking, level 1).
const (
	bits     = 17 // log2(Average)
	hardMask = (1<<(bits+1) - 1) << (64 - bits - 1)
	easyMask = (1<<(bits-1) - 1) << (64 - bits + 1)
)

// gear maps each byte value to a fixed pseudo-random number for the rolling hash.
var gear = sync.OnceValue(func() *[256]uint64 {
	var g [256]uint64
	for i := range g {
		sum := sha256.Sum256(fmt.Appendf(nil, "edgebake gear 1 %d", i))
		g[i] = binary.LittleEndian.Uint64(sum[:])
	}
	return &g
})

// cut returns the size of the first chunk of b, which must not contain a hole.
func cut(b []byte) int {
	if len(b) <= MinSize {
		return len(b)
	}
	g, h := gear(), uint64(0)
	i := MinSize - window
	for ; i < MinSize; i++ {
		h = h<<1 + g[b[i]]
	}
	for mid := min(len(b), Average); i < mid; i++ {
		if h = h<<1 + g[b[i]]; h&hardMask == 0 {
			return i + 1
		}
	}
	for end := min(len(b), MaxSize); i < end; i++ {
		if h = h<<1 + g[b[i]]; h&easyMask == 0 {
			return i + 1
		}
	}
	return i
}

// cutter divides one file system, from its beginning to its end.
type cutter struct {
	off  int64 // offset of the next chunk
	hole bool  // the previous chunk was a hole
	data int64 // no hole begins between off and data
}

// next returns the size of the next chunk, which begins at b, and whether it is a hole. last means
// that b extends to the end of the file system. A size of 0 means that b is too short to decide: it
// has less than MaxSize+MinHole bytes of data, or ends in a hole that may continue.
func (c *cutter) next(b []byte, last bool) (n int, hole bool) {
	if c.off%Block == 0 && c.off >= c.data {
		run := zeros(b)
		ended := last || len(b)-run >= Block
		switch {
		case run >= MinHole, c.hole && run > 0:
			n = min(run, int(HoleSize-c.off%HoleSize))
			if n == run && !ended && (c.off+int64(n))%HoleSize != 0 {
				return 0, false
			}
			c.off, c.hole = c.off+int64(n), true
			return n, true
		case !ended:
			return 0, false
		}
	}
	end, known := c.dataEnd(b, last)
	if !known {
		return 0, false
	}
	n = cut(b[:end])
	c.off, c.hole = c.off+int64(n), false
	return n, false
}

// dataEnd returns the offset in b of the next hole, at most the maximum size of a chunk. known is
// false if b is too short to decide.
func (c *cutter) dataEnd(b []byte, last bool) (end int, known bool) {
	limit := min(len(b), MaxSize)
	at := int(max(c.data, c.off) - c.off)
	at += int(-(c.off + int64(at)) & (Block - 1)) // round up to the next block
	for at < limit {
		run := zeros(b[at:])
		if run >= MinHole {
			c.data = c.off + int64(at)
			return at, true
		}
		if run > 0 && !last && at+run+Block > len(b) {
			return 0, false // the zeros at the end may become a hole
		}
		at += run + Block
	}
	if len(b) < MaxSize && !last {
		return 0, false
	}
	c.data = c.off + int64(min(at, limit))
	return limit, true
}

// zeroBlock is a block of zeros for comparison.
var zeroBlock [Block]byte

// zeros returns the number of zero bytes at the beginning of b, in whole blocks.
func zeros(b []byte) (n int) {
	for len(b)-n >= Block && bytes.Equal(b[n:n+Block], zeroBlock[:]) {
		n += Block
	}
	return n
}

// Cut divides size bytes into chunks, and calls emit for each chunk in order. emit gets the
// content, which is valid until emit returns; for a hole it gets nil and the size. read fills b
// with the bytes at off; if it returns zero, all these bytes are zeros and b is undefined.
func Cut(size int64, read func(b []byte, off int64) (zero bool, err error), emit func(b []byte, n int) error) error {
	const room = 2 * MaxSize // more than the number of bytes that next leaves unused
	buf := make([]byte, room+HoleSize)
	var c cutter
	left := 0 // bytes before buf[room] that belong to the next chunk
	for off := int64(0); off < size; off += HoleSize {
		b := buf[room:][:min(HoleSize, size-off)]
		last := off+int64(len(b)) == size
		zero, err := read(b, off)
		if err != nil {
			return err
		}
		if zero && left == 0 && len(b) == HoleSize {
			c.off, c.hole = c.off+HoleSize, true
			if err := emit(nil, HoleSize); err != nil {
				return err
			}
			continue
		}
		if zero {
			clear(b)
		}
		b = buf[room-left : room+len(b)]
		for len(b) > 0 {
			n, hole := c.next(b, last)
			if n == 0 {
				break
			}
			content := b[:n]
			if hole {
				content = nil
			}
			if err := emit(content, n); err != nil {
				return err
			}
			b = b[n:]
		}
		left = copy(buf[room-len(b):], b)
	}
	return nil
}

// From returns a read function for Cut that reads from r.
func From(r io.ReaderAt) func([]byte, int64) (bool, error) {
	return func(b []byte, off int64) (bool, error) {
		n, err := r.ReadAt(b, off)
		if n == len(b) {
			err = nil
		}
		return false, err
	}
}
