package disk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/seekable"
)

// Digest identifies the contents of a disk, except its slot.
type Digest struct {
	// Golden covers all partitions except the slot.
	Golden string
	// Parts maps each partition's label to its digest, to find the partitions that differ.
	Parts map[string]string
}

// DigestOf combines the digests of chunks. sum returns the digest of the n bytes at off; n is at
// most Align. The format of Golden must not change (docs/decisions/0002-golden-digest.md).
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

// chunkSum returns the digest of a chunk. It checks for zeros first, which is faster than hashing:
// many chunks contain only zeros.
func chunkSum(b []byte) [32]byte {
	if len(b) == Align && seekable.IsZero(b) {
		return zeroSum()
	}
	return sha256.Sum256(b)
}

// zeroSum returns the digest of a full chunk of zeros.
var zeroSum = sync.OnceValue(func() [32]byte { return sha256.Sum256(make([]byte, Align)) })

// Source is a disk to hash.
type Source struct {
	// Read returns the n bytes at off, and may use buf. If zero is true, they are all zero, and b
	// is nil. Several goroutines call it.
	Read func(buf []byte, off, n int64) (b []byte, zero bool, err error)
	// Progress, if set, is called with the bytes hashed so far.
	Progress func(done, total int64)
	// Spare, if not nil, leaves one of several processors unused until it is closed.
	Spare <-chan struct{}
}

// Digests computes the digests of a disk with the given partitions.
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
				sums[i] = chunkSum(b)
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

// Parallel runs one worker per processor, and calls the workers with each number from 0 to n-1
// once. worker returns a new worker, with its own buffers. Parallel returns the first error.
func Parallel(ctx context.Context, n int, worker func() func(int) error) error {
	return parallel(ctx, n, nil, worker)
}

// parallel is like Parallel. If spare is not nil, the last of several workers starts only after
// spare is closed.
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

// tracker records which chunks are written. It hashes a chunk in the background when the writer
// continues with another one. If the chunk is written again later, it is hashed again at the end.
type tracker struct {
	f      io.ReaderAt
	size   int64
	mu     sync.Mutex // locked during a write
	chunks []tracked
	at     int // index of the chunk being written; -1 for none

	left  chan visit // chunks to hash; nil after stop
	ended chan struct{}
}

// tracked is the state of one chunk: its number of writes, and the digest that it had after sumOf
// writes.
type tracked struct {
	writes uint32
	sumOf  uint32
	sum    [32]byte
}

// visit is a chunk to hash, with its number of writes at that time.
type visit struct {
	chunk  int
	writes uint32
}

// newTracker returns a tracker of writes to f.
func newTracker(f io.ReaderAt, size int64) *tracker {
	t := &tracker{f: f, size: size, chunks: make([]tracked, (size+Align-1)/Align), at: -1}
	t.left, t.ended = make(chan visit, len(t.chunks)), make(chan struct{})
	go t.hash(t.left)
	return t
}

// hash hashes the chunks in left. It ignores read errors, because rehash reads such a chunk again
// and returns the error.
func (t *tracker) hash(left <-chan visit) {
	defer close(t.ended)
	buf := make([]byte, Align)
	for v := range left {
		if n, err := t.f.ReadAt(buf, int64(v.chunk)*Align); err == nil || err == io.EOF {
			c := &t.chunks[v.chunk]
			c.sum, c.sumOf = chunkSum(buf[:n]), v.writes
		}
	}
}

// write calls do, which writes b at off, and records the chunks that b covers.
func (t *tracker) write(b []byte, off int64, do func() (int, error)) (int, error) {
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
		t.chunks[i].writes++
		at = end
	}
	return n, err
}

// leave queues for hashing the chunk that was being written.
func (t *tracker) leave() {
	if t.at < 0 || t.left == nil {
		return
	}
	t.left <- visit{t.at, t.chunks[t.at].writes}
	t.at = -1
}

// rehash hashes a chunk unless its digest is current.
func (t *tracker) rehash(i int, buf []byte) error {
	c := &t.chunks[i]
	if c.writes == c.sumOf {
		return nil
	}
	n, err := t.f.ReadAt(buf, int64(i)*Align)
	if err != nil && err != io.EOF {
		return fmt.Errorf("hashing the image: %w", err)
	}
	c.sum, c.sumOf = chunkSum(buf[:n]), c.writes
	return nil
}

// written reports whether a chunk was ever written to. If not, it is a hole.
func (t *tracker) written(i int) bool { return t.chunks[i].writes > 0 }

// writtenIn reports whether a chunk that contains some of the n bytes at off was ever written to.
func (t *tracker) writtenIn(off, n int64) bool {
	for i := off / Align; i*Align < off+n; i++ {
		if t.written(int(i)) {
			return true
		}
	}
	return false
}

// stop ends the background hashing.
func (t *tracker) stop() {
	if t.left != nil {
		close(t.left)
		t.left = nil
		<-t.ended
	}
}

// finish hashes the remaining chunks and returns the digests. It must be called after the last
// write.
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
