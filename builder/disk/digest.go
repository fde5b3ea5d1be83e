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

	"github.com/edgebake/edgebake/configs/ondisk"
)

// goldenOf puts the golden digest together out of the digests of the chunks,
// of Align bytes each, that sum returns. The format is described in
// docs/decisions/0002-golden-digest.md and must not change.
func goldenOf(parts []ondisk.PartitionInfo, sum func(off, n int64) [32]byte) string {
	h := sha256.New()
	io.WriteString(h, "edgebake golden v1\n")
	for _, p := range parts {
		if p.Label == ondisk.LabelSlot {
			continue
		}
		fmt.Fprintf(h, "%s %d\n", p.Label, p.Size)
		for off := int64(0); off < p.Size; off += Align {
			s := sum(p.Start+off, min(Align, p.Size-off))
			h.Write(s[:])
		}
	}
	return hex.EncodeToString(h.Sum(nil))
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
}

// Golden computes the golden digest of a disk with those partitions.
func Golden(ctx context.Context, src Source, parts []ondisk.PartitionInfo) (string, error) {
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
	err := Parallel(ctx, len(chunks), func() func(int) error {
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
		return "", err
	}
	return goldenOf(parts, func(off, _ int64) [32]byte { return sums[index[off]] }), nil
}

// Parallel calls a worker with 0…n-1, on as many processors as there are.
// worker makes one with its own buffers. It returns the first error.
func Parallel(ctx context.Context, n int, worker func() func(int) error) error {
	var next atomic.Int64
	var failed atomic.Bool
	errs := make([]error, min(n, runtime.GOMAXPROCS(0)))
	var wg sync.WaitGroup
	for w := range errs {
		wg.Go(func() {
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

// tracker hashes chunks of the image while it is being written. A chunk is
// hashed once the writer has gone on to another one; if it comes back, that
// digest is thrown away and the chunk hashed again at the end.
type tracker struct {
	f      io.ReaderAt
	chunks []tracked
	queue  chan int
	wg     sync.WaitGroup
	fail   error // of the queue's worker; valid once wg is done
}

// tracked counts the writes to one chunk. A digest is good if no write was
// under way when its bytes were read, and none has begun since.
type tracked struct {
	begun, ended atomic.Uint32
	sum          [32]byte
	at           uint32 // value of begun that sum belongs to; 0: none
}

// newTracker returns a tracker that hashes in the background, or, without
// hashing, only notes what is written.
func newTracker(f io.ReaderAt, size int64, hashing bool) *tracker {
	if !hashing {
		return &tracker{f: f, chunks: make([]tracked, (size+Align-1)/Align)}
	}
	queue := make(chan int, 64)
	t := &tracker{f: f, chunks: make([]tracked, (size+Align-1)/Align), queue: queue}
	t.wg.Go(func() {
		buf := make([]byte, Align)
		for i := range queue {
			if t.fail == nil {
				t.fail = t.hash(i, buf)
			}
		}
	})
	return t
}

// offer has a chunk hashed when there is time. Where there is none it waits
// for finish.
func (t *tracker) offer(i int) {
	select {
	case t.queue <- i:
	default:
	}
}

func (t *tracker) hash(i int, buf []byte) error {
	c := &t.chunks[i]
	begun := c.begun.Load()
	if begun == 0 || begun == c.at || c.ended.Load() != begun {
		return nil
	}
	n, err := t.f.ReadAt(buf, int64(i)*Align)
	if err != nil && err != io.EOF {
		return fmt.Errorf("hashing the image: %w", err)
	}
	sum := sha256.Sum256(buf[:n])
	if c.begun.Load() == begun {
		c.sum, c.at = sum, begun
	}
	return nil
}

// written reports whether anything was written to a chunk; the others are
// holes.
func (t *tracker) written(i int) bool { return t.chunks[i].begun.Load() > 0 }

// stop ends the hashing in the background.
func (t *tracker) stop() {
	if t.queue != nil {
		close(t.queue)
		t.queue = nil
	}
	t.wg.Wait()
}

// finish hashes what is left, after the last write.
func (t *tracker) finish(ctx context.Context, parts []ondisk.PartitionInfo) (string, error) {
	t.stop()
	if t.fail != nil {
		return "", t.fail
	}
	err := Parallel(ctx, len(t.chunks), func() func(int) error {
		buf := make([]byte, Align)
		return func(i int) error { return t.hash(i, buf) }
	})
	if err != nil {
		return "", err
	}
	return goldenOf(parts, func(off, _ int64) [32]byte {
		if i := int(off / Align); t.written(i) {
			return t.chunks[i].sum
		}
		return zeroSum()
	}), nil
}
