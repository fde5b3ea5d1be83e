package update

import (
	"fmt"
	"io"
	"slices"

	"github.com/edgebake/edgebake/ondisk/chunk"
)

// Limits of requests.
const (
	// MaxGap is the maximum size in bytes of an unneeded range that is downloaded to save a
	// request.
	MaxGap = 32 << 10
	// MaxSpan is the maximum size of a request in bytes. It is limited so that a lost connection
	// costs little.
	MaxSpan = 8 << 20
	// RequestBytes is the assumed cost of a request in bytes, in addition to its body: the
	// connection, TLS and the headers.
	RequestBytes = 8 << 10
	// Tail is the number of bytes at the end of a compressed image that are read first. It is
	// enough for the index and the table of frames of most images.
	Tail = 256 << 10
)

// Place is the range of bytes that a frame has in a compressed image.
type Place struct{ From, To int64 }

// Span is a range of a compressed image that is downloaded with one request. Frames are the numbers
// of the needed frames in it.
type Span struct {
	Place
	Frames []int
}

// Spans combines frames, given in ascending order, into ranges to request.
func Spans(frames []int, place func(frame int) Place) []Span {
	var out []Span
	for _, f := range frames {
		p := place(f)
		if n := len(out) - 1; n >= 0 && p.From-out[n].To <= MaxGap && p.To-out[n].From <= MaxSpan {
			out[n].To = p.To
			out[n].Frames = append(out[n].Frames, f)
			continue
		}
		out = append(out, Span{p, []int{f}})
	}
	return out
}

// Bytes returns the size of all spans.
func Bytes(spans []Span) (n int64) {
	for _, s := range spans {
		n += s.To - s.From
	}
	return n
}

// View reads the file system of a part through its chunks. It is not safe for concurrent use.
type View struct {
	part   *chunk.Part
	starts []int64
	get    func(i int) ([]byte, error)
	last   int // number of the chunk whose content is in now
	now    []byte
}

// NewView returns a View. get returns the content of a chunk; it is not called for holes.
func NewView(p *chunk.Part, get func(i int) ([]byte, error)) *View {
	v := &View{part: p, get: get, last: -1}
	at := int64(0)
	for _, c := range p.Chunks {
		v.starts = append(v.starts, at)
		at += c.Size
	}
	return v
}

// find returns the number of the chunk that contains the offset off.
func (v *View) find(off int64) int {
	i, exact := slices.BinarySearch(v.starts, off)
	if !exact {
		i--
	}
	return i
}

// each calls f with the number of each chunk in a range, except for holes.
func (v *View) each(off, n int64, f func(k int)) {
	for k := v.find(off); k < len(v.starts) && v.starts[k] < off+n; k++ {
		if !v.part.Chunks[k].Hole {
			f(k)
		}
	}
}

// ReadAt reads from the part's file system.
func (v *View) ReadAt(b []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("reading at %d: negative offset", off)
	}
	for n < len(b) {
		at := off + int64(n)
		if at >= v.part.Size {
			return n, io.EOF
		}
		i := v.find(at)
		c := v.part.Chunks[i]
		dst := b[n:min(int64(len(b)), int64(n)+v.starts[i]+c.Size-at)]
		if c.Hole {
			clear(dst)
		} else {
			if v.last != i {
				if v.now, err = v.get(i); err != nil {
					return n, err
				}
				if int64(len(v.now)) != c.Size {
					return n, fmt.Errorf("reading chunk %d of %s: it has %d bytes, expected %d", i, v.part.Label, len(v.now), c.Size)
				}
				v.last = i
			}
			copy(dst, v.now[at-v.starts[i]:])
		}
		n += len(dst)
	}
	return n, nil
}
