package carry

import (
	"context"
	"io"
	"runtime"
	"sync"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk/file"
)

// hasher hashes the image's chunks during the download, as soon as their frames are complete. If a
// part has a wrong digest, its chunks are hashed again later.
type hasher struct {
	chunks *media.Chunks
	raw    io.WriterAt // the uncompressed disk to write, or nil

	mu      sync.Mutex
	changed *sync.Cond
	next    int // index of the next chunk to hash
	there   int // number of complete chunks
	busy    int
	stopped bool
	errs    []error // error of each chunk
	workers sync.WaitGroup
}

func newHasher(c *media.Chunks, raw *file.Output, dir string, cancel context.CancelCauseFunc) *hasher {
	h := &hasher{chunks: c, errs: make([]error, c.Len())}
	if raw != nil {
		h.raw = rawDisk{raw.File, dir, cancel}
	}
	h.changed = sync.NewCond(&h.mu)
	// Leave one processor to the download, which would otherwise be slow.
	for range max(1, runtime.GOMAXPROCS(0)-1) {
		h.workers.Go(h.work)
	}
	return h
}

func (h *hasher) work() {
	buf := make([]byte, disk.Align)
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		for h.next >= h.there && !h.stopped {
			h.changed.Wait()
		}
		if h.stopped {
			return
		}
		i := h.next
		h.next++
		h.busy++
		h.mu.Unlock()
		err := h.chunks.Take(i, buf, h.raw)
		h.mu.Lock()
		h.errs[i] = err
		h.busy--
		h.changed.Broadcast()
	}
}

// ready records that the first size bytes of the file are valid.
func (h *hasher) ready(size int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.there < h.chunks.Len() && h.chunks.End(h.there) <= size {
		h.there++
		h.changed.Broadcast()
	}
}

// rewind records that only the first size bytes of the file are valid.
func (h *hasher) rewind(size int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.there > 0 && h.chunks.End(h.there-1) > size {
		h.there--
	}
	for h.busy > 0 {
		h.changed.Wait()
	}
	h.next = min(h.next, h.there)
}

// wait waits until all chunks are hashed, and returns the first error. It adds a worker, because
// the download no longer needs a processor.
func (h *hasher) wait() error {
	h.workers.Go(h.work)
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.next < h.there || h.busy > 0 {
		h.changed.Wait()
	}
	for _, err := range h.errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// stop ends the workers.
func (h *hasher) stop() {
	h.mu.Lock()
	h.stopped = true
	h.changed.Broadcast()
	h.mu.Unlock()
	h.workers.Wait()
}
