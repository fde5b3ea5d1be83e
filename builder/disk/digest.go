package disk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// Digest tells one disk from another, without its slot.
type Digest struct {
	// Golden is made over all partitions.
	Golden string
	// Parts are made over one each, by label: they name the one that differs.
	Parts map[string]string
}

// DigestOf puts the digests together out of those of the chunks, of Align bytes
// each, that sum returns. The format of the golden one is described in
// docs/decisions/0002-golden-digest.md and must not change.
func DigestOf(parts []ondisk.PartitionInfo, sum func(off, n int64) [32]byte) Digest {
	d := Digest{Parts: map[string]string{}}
	h := sha256.New()
	io.WriteString(h, "edgebake golden v1\n")
	for _, p := range parts {
		if p.Label == ondisk.LabelSlot {
			continue
		}
		fmt.Fprintf(h, "%s %d\n", p.Label, p.Size)
		part := sha256.New()
		for off := int64(0); off < p.Size; off += Align {
			s := sum(p.Start+off, min(Align, p.Size-off))
			h.Write(s[:])
			part.Write(s[:])
		}
		d.Parts[p.Label] = hex.EncodeToString(part.Sum(nil))
	}
	d.Golden = hex.EncodeToString(h.Sum(nil))
	return d
}

// zeroSum is the digest of a whole chunk of zeros.
var zeroSum = sync.OnceValue(func() [32]byte { return sha256.Sum256(make([]byte, Align)) })

// Source is a disk to be hashed.
type Source struct {
	// Read returns n bytes at off, in buf where that is long enough. With
	// zero set they are all zero, and b is nil. It is called by several
	// goroutines.
	Read func(buf []byte, off, n int64) (b []byte, zero bool, err error)
	// Progress, where set, is told of the bytes hashed so far.
	Progress func(done, total int64)
	// Spare, where set, leaves one processor to others until it is closed, if
	// there are two.
	Spare <-chan struct{}
}

// Digests computes the digests of a disk with those partitions.
func Digests(ctx context.Context, src Source, parts []ondisk.PartitionInfo) (Digest, error) {
	type chunk struct{ off, n int64 }
	var chunks []chunk
	total := int64(0)
	index := map[int64]int{}
	for _, p := range parts {
		if p.Label == ondisk.LabelSlot {
			continue
		}
		for off := int64(0); off < p.Size; off += Align {
			index[p.Start+off] = len(chunks)
			chunks = append(chunks, chunk{p.Start + off, min(Align, p.Size-off)})
		}
		total += p.Size
	}
	sums := make([][32]byte, len(chunks))
	var mu sync.Mutex
	done := int64(0)
	err := parallel(ctx, len(chunks), src.Spare, func() func(int) error {
		buf := make([]byte, Align)
		return func(i int) error {
			c := chunks[i]
			b, zero, err := src.Read(buf, c.off, c.n)
			switch {
			case err != nil:
				return fmt.Errorf("hashing the image at %d: %w", c.off, err)
			case zero && c.n == Align:
				sums[i] = zeroSum()
			case zero:
				sums[i] = sha256.Sum256(make([]byte, c.n))
			default:
				sums[i] = sha256.Sum256(b)
			}
			if src.Progress != nil {
				mu.Lock()
				done += c.n
				src.Progress(done, total)
				mu.Unlock()
			}
			return nil
		}
	})
	if err != nil {
		return Digest{}, err
	}
	return DigestOf(parts, func(off, _ int64) [32]byte { return sums[index[off]] }), nil
}

// Parallel calls a worker with 0…n-1, on as many processors as there are.
// worker makes one with its own buffers. It returns the first error.
func Parallel(ctx context.Context, n int, worker func() func(int) error) error {
	return parallel(ctx, n, nil, worker)
}

// parallel is Parallel, whose last worker of several begins when spare is
// closed, where it is set.
func parallel(ctx context.Context, n int, spare <-chan struct{}, worker func() func(int) error) error {
	var next atomic.Int64
	var failed atomic.Bool
	errs := make([]error, min(n, runtime.GOMAXPROCS(0)))
	var wg sync.WaitGroup
	ended := make(chan struct{})
	end := sync.OnceFunc(func() { close(ended) })
	for w := range errs {
		wg.Go(func() {
			defer end()
			if spare != nil && w > 0 && w == len(errs)-1 {
				select {
				case <-spare:
				case <-ended:
				}
			}
			do := worker()
			for !failed.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				err := ctx.Err()
				if err == nil {
					err = do(i)
				}
				if err != nil {
					errs[w] = err
					failed.Store(true)
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// tracker notes what is written and, where it is told to, hashes each chunk
// from a copy, beside the writing. That works for a chunk
// that is written from its beginning to its end, with holes or without; one
// that the writer comes back to is read and hashed again at the end.
type tracker struct {
	f      io.ReaderAt
	size   int64
	mu     sync.Mutex // one write at a time
	chunks []tracked

	// The chunk being hashed: h has its bytes up to pos, from so many writes.
	h      hash.Hash // nil: only note what is written
	at     int       // -1: none
	pos    int64
	writes uint32
	hole   []byte // of zeros

	pieces chan piece    // copies of what is written, to be hashed
	free   chan []byte   // what they were copied into
	ended  chan struct{} // all are hashed
}

// tracked is one chunk: the digest is that of its first sumOf writes.
type tracked struct {
	writes, sumOf uint32
	sum           [32]byte
}

// piece is what is written at once.
type piece struct {
	b   []byte
	off int64
}

// The hashing may lag behind by this many pieces of this size at most. What is
// written is copied for it, which costs a tenth of hashing and lets the writer
// read and write on meanwhile.
const (
	hashLag   = 8
	hashPiece = 1 << 20
)

// newTracker returns a tracker that hashes, or only notes what is written.
func newTracker(f io.ReaderAt, size int64, hashing bool) *tracker {
	t := &tracker{f: f, size: size, chunks: make([]tracked, (size+Align-1)/Align), at: -1}
	if hashing {
		t.h, t.hole = sha256.New(), make([]byte, 64<<10)
		t.pieces, t.free, t.ended = make(chan piece, hashLag), make(chan []byte, hashLag), make(chan struct{})
		for range hashLag {
			t.free <- nil
		}
		go func(pieces <-chan piece) {
			defer close(t.ended)
			for p := range pieces {
				t.add(p.b, p.off)
				t.free <- p.b
			}
		}(t.pieces)
	}
	return t
}

// write carries out a write of b at off, and hashes b meanwhile.
func (t *tracker) write(b []byte, off int64, do func() (int, error)) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pieces == nil {
		t.add(b, off)
		return do()
	}
	for rest, at := b, off; len(rest) > 0; {
		buf := append((<-t.free)[:0], rest[:min(len(rest), hashPiece)]...)
		t.pieces <- piece{buf, at}
		rest, at = rest[len(buf):], at+int64(len(buf))
	}
	return do()
}

// add takes the bytes of one write in.
func (t *tracker) add(b []byte, off int64) {
	for len(b) > 0 {
		i := int(off / Align)
		n := int(min(int64(len(b)), int64(i+1)*Align-off))
		t.addTo(i, b[:n], off)
		b, off = b[n:], off+int64(n)
	}
}

func (t *tracker) addTo(i int, b []byte, off int64) {
	c := &t.chunks[i]
	c.writes++
	if t.h == nil {
		return
	}
	if i != t.at {
		t.leave()
		if c.writes > 1 {
			return
		}
		t.at, t.pos, t.writes = i, int64(i)*Align, 0
		t.h.Reset()
	}
	if off < t.pos {
		t.at = -1 // the writer went back
		return
	}
	t.zeros(off - t.pos)
	t.h.Write(b)
	t.pos = off + int64(len(b))
	t.writes++
}

// leave completes the digest of the chunk being hashed.
func (t *tracker) leave() {
	if t.at < 0 {
		return
	}
	t.zeros(min(int64(t.at+1)*Align, t.size) - t.pos)
	c := &t.chunks[t.at]
	t.h.Sum(c.sum[:0])
	c.sumOf = t.writes
	t.at = -1
}

// zeros hashes a hole.
func (t *tracker) zeros(n int64) {
	for ; n > 0; n -= int64(len(t.hole)) {
		t.h.Write(t.hole[:min(n, int64(len(t.hole)))])
	}
}

// rehash hashes a chunk that has no good digest.
func (t *tracker) rehash(i int, buf []byte) error {
	c := &t.chunks[i]
	if c.writes == c.sumOf {
		return nil
	}
	n, err := t.f.ReadAt(buf, int64(i)*Align)
	if err != nil && err != io.EOF {
		return fmt.Errorf("hashing the image: %w", err)
	}
	c.sum, c.sumOf = sha256.Sum256(buf[:n]), c.writes
	return nil
}

// written reports whether anything was written to a chunk; the others are
// holes.
func (t *tracker) written(i int) bool { return t.chunks[i].writes > 0 }

// stop ends the hashing.
func (t *tracker) stop() {
	if t.pieces != nil {
		close(t.pieces)
		t.pieces = nil
		<-t.ended
	}
}

// finish hashes what is left, after the last write.
func (t *tracker) finish(ctx context.Context, parts []ondisk.PartitionInfo) (Digest, error) {
	t.stop()
	t.leave()
	err := Parallel(ctx, len(t.chunks), func() func(int) error {
		buf := make([]byte, Align)
		return func(i int) error { return t.rehash(i, buf) }
	})
	if err != nil {
		return Digest{}, err
	}
	return DigestOf(parts, func(off, _ int64) [32]byte {
		if i := int(off / Align); t.written(i) {
			return t.chunks[i].sum
		}
		return zeroSum()
	}), nil
}
