package ext4

import (
	"bytes"
	"fmt"
	"io"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// bufferSize is the size of one write in bytes. Smaller writes are slower; larger ones only need
// more memory.
const bufferSize = 1 << 20

// emitter writes blocks. It collects adjacent blocks in a buffer, which a second goroutine writes
// while the next buffer is filled.
type emitter struct {
	cur     chunk
	empty   chan []byte
	full    chan chunk
	done    chan struct{}
	failed  chan struct{} // closed once err is set
	err     error
	written int64 // valid after close
}

// chunk is a sequence of adjacent blocks to be written at offset off.
type chunk struct {
	b   []byte
	off int64
}

func newEmitter(w io.WriterAt) *emitter {
	e := &emitter{
		empty:  make(chan []byte, 3),
		full:   make(chan chunk, 3),
		done:   make(chan struct{}),
		failed: make(chan struct{}),
	}
	for range cap(e.empty) {
		e.empty <- make([]byte, 0, bufferSize)
	}
	e.cur.b = <-e.empty
	go e.writeChunks(w)
	return e
}

// writeChunks writes chunks until full is closed. After a failed write it writes nothing and only
// returns the buffers, so that the sender does not block.
func (e *emitter) writeChunks(w io.WriterAt) {
	defer close(e.done)
	for c := range e.full {
		if e.err == nil {
			n, err := writeSparse(w, c)
			e.written += n
			if err != nil {
				e.err = err
				close(e.failed)
			}
		}
		e.empty <- c.b[:0]
	}
}

var zeroBlock [blockSize]byte

// writeSparse writes the blocks of a chunk, except those that contain only zeros.
func writeSparse(w io.WriterAt, c chunk) (written int64, err error) {
	zero := func(i int) bool { return bytes.Equal(c.b[i:i+blockSize], zeroBlock[:]) }
	for i := 0; i < len(c.b); {
		if zero(i) {
			i += blockSize
			continue
		}
		end := i + blockSize
		for end < len(c.b) && !zero(end) {
			end += blockSize
		}
		n, err := w.WriteAt(c.b[i:end], c.off+int64(i))
		written += int64(n)
		if err != nil {
			return written, fmt.Errorf("writing %d bytes at offset %d: %w", end-i, c.off+int64(i), err)
		}
		i = end
	}
	return written, nil
}

// blocks returns memory for 1 to n blocks, starting with block at. The caller must fill all of it
// before the next call.
func (e *emitter) blocks(at, n int64) []byte {
	off := at * blockSize
	if len(e.cur.b) == cap(e.cur.b) || off != e.cur.off+int64(len(e.cur.b)) {
		e.flush()
		e.cur.off = off
	}
	from := len(e.cur.b)
	to := min(cap(e.cur.b), from+int(min(n*blockSize, bufferSize)))
	e.cur.b = e.cur.b[:to]
	return e.cur.b[from:to]
}

// block returns the memory for block at, filled with zeros.
func (e *emitter) block(at int64) []byte {
	b := e.blocks(at, 1)
	clear(b)
	return b
}

func (e *emitter) flush() {
	if len(e.cur.b) > 0 {
		e.full <- e.cur
		e.cur.b = <-e.empty
	}
}

// stopped reports whether a write has failed.
func (e *emitter) stopped() bool {
	select {
	case <-e.failed:
		return true
	default:
		return false
	}
}

// close writes the rest of the buffer and returns the first write error.
func (e *emitter) close() error {
	e.flush()
	close(e.full)
	<-e.done
	return e.err
}

// emit writes the whole volume: contents, then metadata, and last the primary superblock, so that
// an interrupted write cannot be mistaken for a file system.
func (v *volume) emit(e *emitter, src *source) error {
	v.emitResize(e)
	var p fileBlocks
	for _, d := range v.dirs {
		in := &v.inodes[d.number-1]
		v.locate(&p, d.number, in)
		if err := v.emitFile(e, src, d.number, in, &p); err != nil {
			return err
		}
	}
	for i := range v.inodes {
		in := &v.inodes[i]
		if in.node == nil || in.dir != nil || i+1 == resizeInode {
			continue
		}
		if e.stopped() {
			return nil // close returns the write error
		}
		v.locate(&p, uint32(i+1), in)
		if err := v.emitFile(e, src, uint32(i+1), in, &p); err != nil {
			return err
		}
	}
	v.emitGroups(e)
	return nil
}

// emitFile writes the blocks of a file in the order of their locations: extended attributes,
// content, extent tree.
func (v *volume) emitFile(e *emitter, src *source, number uint32, in *inode, p *fileBlocks) error {
	n := in.node
	if p.xattr != 0 {
		_, list, _ := planXattrs(n.Xattrs) // checkNode has handled the error
		putXattrBlock(e.block(p.xattr), list, v.seed, p.xattr)
	}
	switch {
	case in.dir != nil:
		rest := p.content
		var used int64
		v.emitDir(in.dir, func() []byte {
			if used == rest[0].n {
				rest, used = rest[1:], 0
			}
			used++
			return e.block(rest[0].start + used - 1)
		})
	case number == journalInode:
		putJournal(e.block(p.content[0].start), v.jblocks, v.opts.UUID)
	case n.IsRegular():
		if err := src.writeTo(e, n, p.content); err != nil {
			return fmt.Errorf("reading %s: %w", describe(n), err)
		}
	case len(p.content) > 0: // target of a long symbolic link
		copy(e.block(p.content[0].start), n.Target)
	}
	if len(p.tree) > 0 {
		_, nodes := extentTree(inodeSeed(v.seed, number, 0), p.content, p.tree)
		for i, b := range nodes {
			copy(e.block(p.tree[i]), b)
		}
	}
	return nil
}

// source reads contents from blobs. It keeps several blobs open, because in a tree with many
// layers, consecutive files come from different blobs.
type source struct {
	blobs tree.Blobs
	open  []openBlob // most recently used last
}

type openBlob struct {
	name string
	f    tree.BlobFile
}

const maxOpenBlobs = 32

// blob returns the blob of this name, and opens it if necessary.
func (s *source) blob(name string) (tree.BlobFile, error) {
	for i := len(s.open) - 1; i >= 0; i-- {
		if o := s.open[i]; o.name == name {
			if i < len(s.open)-1 {
				s.open = append(append(s.open[:i], s.open[i+1:]...), o)
			}
			return o.f, nil
		}
	}
	if s.blobs == nil {
		return nil, fmt.Errorf("blob %s is required, but no blobs were given", name)
	}
	if len(s.open) == maxOpenBlobs {
		s.open[0].f.Close()
		s.open = append(s.open[:0], s.open[1:]...)
	}
	f, err := s.blobs.OpenBlob(name)
	if err != nil {
		return nil, err
	}
	s.open = append(s.open, openBlob{name, f})
	return f, nil
}

func (s *source) close() (err error) {
	for _, o := range s.open {
		if e := o.f.Close(); e != nil && err == nil {
			err = fmt.Errorf("closing blob %s: %w", o.name, e)
		}
	}
	return err
}

// writeTo writes the content of n to its blocks.
func (s *source) writeTo(e *emitter, n *tree.Node, blocks []extent) error {
	if n.Data.Size == 0 {
		return nil
	}
	var r io.ReaderAt = bytes.NewReader(n.Data.Inline)
	if n.Data.Blob != "" {
		f, err := s.blob(n.Data.Blob)
		if err != nil {
			return err
		}
		r = f
	}
	off, left := n.Data.Off, n.Data.Size
	if n.Data.Blob == "" {
		off = 0
	}
	for _, ext := range blocks {
		for ext.n > 0 {
			if e.stopped() {
				return nil
			}
			b := e.blocks(ext.start, ext.n)
			k := min(int64(len(b)), left)
			if got, err := r.ReadAt(b[:k], off); int64(got) < k {
				if err == io.EOF {
					return fmt.Errorf("blob %s ends at %d, the content at %d", n.Data.Blob, off+int64(got), n.Data.Off+n.Data.Size)
				}
				return err
			}
			clear(b[k:])
			off += k
			left -= k
			ext.start += int64(len(b)) / blockSize
			ext.n -= int64(len(b)) / blockSize
		}
	}
	return nil
}
