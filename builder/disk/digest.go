package disk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
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

// Sums are digests of chunks, by what the chunks are composed of: bytes, and ranges
// of blobs that are named by their digests. See docs/decisions/0039.
type Sums map[[32]byte][32]byte

// tracker notes what is written and, where it is told to, hashes each chunk when the
// writer goes on to another, beside the writing, unless known has its digest. One that
// the writer comes back to is hashed again at the end.
type tracker struct {
	f      io.ReaderAt
	size   int64
	mu     sync.Mutex // one write at a time
	chunks []tracked
	at     int  // the chunk that is being written; -1: none
	known  Sums // nil: digests are not remembered

	left  chan visit // chunks to be hashed
	ended chan struct{}
}

// tracked is one chunk: the digest is that of its first sumOf writes.
type tracked struct {
	writes uint32
	made   hash.Hash // of what it is composed of
	sumOf  uint32
	sum    [32]byte
}

// visit is a chunk with so many writes.
type visit struct {
	chunk  int
	writes uint32
}

// newTracker returns a tracker that hashes, or only notes what is written.
func newTracker(f io.ReaderAt, size int64, hashing bool, known Sums) *tracker {
	t := &tracker{f: f, size: size, chunks: make([]tracked, (size+Align-1)/Align), at: -1}
	if hashing {
		t.known = known
		t.left, t.ended = make(chan visit, len(t.chunks)), make(chan struct{})
		go t.hash(t.left)
	}
	return t
}

// hash hashes chunks that the writer has left. An error is met again at the end.
func (t *tracker) hash(left <-chan visit) {
	defer close(t.ended)
	buf := make([]byte, Align)
	for v := range left {
		if n, err := t.f.ReadAt(buf, int64(v.chunk)*Align); err == nil || err == io.EOF {
			c := &t.chunks[v.chunk]
			c.sum, c.sumOf = sha256.Sum256(buf[:n]), v.writes
		}
	}
}

// write carries out a write of b at off. spans say which of it are blobs'.
func (t *tracker) write(b []byte, off int64, spans []tree.Span, do func() (int, error)) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, err := do()
	for at := 0; at < len(b); {
		i := int((off + int64(at)) / Align)
		end := min(len(b), at+int(int64(i+1)*Align-off-int64(at)))
		if i != t.at {
			t.leave()
			t.at = i
		}
		c := &t.chunks[i]
		c.writes++
		if t.known != nil {
			if c.made == nil {
				c.made = sha256.New()
			}
			spans = compose(c.made, b, at, end, (off+int64(at))%Align, spans)
		}
		at = end
	}
	return n, err
}

// compose adds the bytes from at to end, which are written at off, to what a chunk is
// composed of. It returns the spans behind them.
func compose(made hash.Hash, b []byte, at, end int, off int64, spans []tree.Span) []tree.Span {
	var head [40]byte
	add := func(blob string, n int, from int64, size int) {
		binary.LittleEndian.PutUint64(head[0:], uint64(off))
		binary.LittleEndian.PutUint64(head[8:], uint64(n))
		binary.LittleEndian.PutUint64(head[16:], uint64(from))
		binary.LittleEndian.PutUint64(head[24:], uint64(size))
		binary.LittleEndian.PutUint64(head[32:], uint64(len(blob))) // 0: the bytes follow
		made.Write(head[:])
		off += int64(n)
	}
	for at < end {
		next := end
		if len(spans) > 0 {
			s := spans[0]
			if s.At+s.Len <= at {
				spans = spans[1:]
				continue
			}
			if s.At <= at {
				skip := at - s.At
				n := min(s.Len-skip, end-at)
				add(s.Blob, n, s.Off+int64(skip), min(max(s.Size-skip, 0), n))
				io.WriteString(made, s.Blob)
				at += n
				continue
			}
			next = min(end, s.At)
		}
		add("", next-at, 0, 0)
		made.Write(b[at:next])
		at = next
	}
	return spans
}

// leave has the chunk that was written hashed, unless its digest is known.
func (t *tracker) leave() {
	if t.at < 0 || t.left == nil {
		return
	}
	c := &t.chunks[t.at]
	if _, ok := t.remembered(c); !ok {
		t.left <- visit{t.at, c.writes}
	}
	t.at = -1
}

// remembered is the digest of a chunk composed like this one.
func (t *tracker) remembered(c *tracked) (sum [32]byte, ok bool) {
	if c.made == nil {
		return sum, false
	}
	sum, ok = t.known[[32]byte(c.made.Sum(nil))]
	return sum, ok
}

// rehash hashes a chunk that has no good digest.
func (t *tracker) rehash(i int, buf []byte) error {
	c := &t.chunks[i]
	if c.writes == c.sumOf {
		return nil
	}
	if sum, ok := t.remembered(c); ok {
		c.sum, c.sumOf = sum, c.writes
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
	if t.left != nil {
		close(t.left)
		t.left = nil
		<-t.ended
	}
}

// finish hashes what is left, after the last write.
func (t *tracker) finish(ctx context.Context, parts []ondisk.PartitionInfo) (Digest, error) {
	t.leave()
	t.stop()
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

// sums are the digests of all chunks that were written, after finish.
func (t *tracker) sums() Sums {
	s := Sums{}
	for i := range t.chunks {
		if c := &t.chunks[i]; c.made != nil {
			s[[32]byte(c.made.Sum(nil))] = c.sum
		}
	}
	return s
}
