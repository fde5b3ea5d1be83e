package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sync"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// WriteOptions configures Write.
type WriteOptions struct {
	// Zstd writes the seekable zstd format instead of a raw image.
	Zstd bool
	// Force replaces an existing file.
	Force bool
	// Slot returns the bytes of the slot for these digests. It must be set if the layout has a
	// slot.
	Slot func(Digest) ([]byte, error)
	// ImageInfo is the text of image.json. If it is set, a compressed image gets a chunk index.
	ImageInfo []byte
	// SignIndex, if set, signs the encoded chunk index.
	SignIndex func(body []byte) (string, error)
	// Unchanged, if set, is called after the last read of a blob. If it returns an error, because a
	// blob has changed after its verification, no image is made.
	Unchanged func() error
	// Progress, if set, is called with the work done so far, in bytes.
	Progress func(done, total int64)
}

// Result describes a written image.
type Result struct {
	Digest
	Parts []PartResult
}

// PartResult describes a written partition.
type PartResult struct {
	Label string
	// Size is the size of the partition, Free the free space in its file system, and Written the
	// data, all in bytes. The rest of the partition is holes.
	Size, Free, Written int64
}

// Write writes the disk s with the layout l to the file at path.
func Write(ctx context.Context, path string, s Spec, l *Layout, blobs tree.Blobs, o WriteOptions) (*Result, error) {
	if err := check(s, l, o); err != nil {
		return nil, err
	}
	dir := filepath.Dir(path)
	out, err := file.Create(path, 0o666, o.Force)
	if err != nil {
		return nil, err
	}
	defer out.Discard()
	used := int64(0)
	for _, p := range l.Parts {
		used += p.Used
	}
	if err := file.CheckSpace(dir, used, "the image"); err != nil {
		return nil, fmt.Errorf("writing %s: %w", path, err)
	}
	raw := out
	if o.Zstd {
		// File systems are written in random order, but compression reads in order: make a raw
		// image first.
		if raw, err = file.Create(path, 0o600, o.Force); err != nil {
			return nil, err
		}
		defer raw.Discard()
	}
	w := &writer{ctx: ctx, raw: raw, spec: s, layout: l, blobs: blobs, opts: o}
	w.total = used
	if o.Zstd {
		w.total += l.Size
	}
	if err := w.write(out); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("writing %s: %w", path, file.Explain(err, dir))
	}
	if err := out.Commit(); err != nil {
		return nil, err
	}
	return &w.result, nil
}

// check returns an error if the layout does not belong to the spec.
func check(s Spec, l *Layout, o WriteOptions) error {
	var errs []error
	if len(s.Partitions) != len(l.Parts) {
		return fmt.Errorf("writing the image: the spec has %d partitions, the layout %d", len(s.Partitions), len(l.Parts))
	}
	for i, p := range l.Parts {
		if p.Label != s.Partitions[i].Label || p.FS != s.Partitions[i].FS || p.Start%Align != 0 || p.Size%Align != 0 {
			errs = append(errs, fmt.Errorf("writing the image: partition %d of the layout is %s, %s, %d bytes at %d, which does not match the spec", i+1, p.Label, p.FS, p.Size, p.Start))
		}
	}
	if l.Find(ondisk.LabelSlot) != nil && o.Slot == nil {
		errs = append(errs, errors.New("BUG: writing the image: there is no function for its slot"))
	}
	return errors.Join(errs...)
}

// writer is the state of one Write.
type writer struct {
	ctx    context.Context
	raw    *file.Output
	track  *tracker
	spec   Spec
	layout *Layout
	blobs  tree.Blobs
	opts   WriteOptions
	result Result

	mu          sync.Mutex
	done, total int64
}

// progress adds n bytes to the work done, but not beyond limit, and reports the sum.
func (w *writer) progress(n, limit int64) {
	if w.opts.Progress == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = min(w.done+n, limit)
	w.opts.Progress(w.done, w.total)
}

func (w *writer) write(out *file.Output) error {
	if err := w.raw.Truncate(w.layout.Size); err != nil {
		return err
	}
	w.track = newTracker(w.raw, w.layout.Size)
	defer w.track.stop()
	for i := range w.layout.Parts {
		if err := w.partition(&w.spec.Partitions[i], w.layout.Parts[i]); err != nil {
			return err
		}
	}
	head, tail, err := gpt.Encode(w.spec.table(w.layout))
	if err != nil {
		return err
	}
	whole := &region{w: w, name: "the disk", size: w.layout.Size}
	if _, err := whole.WriteAt(head, 0); err != nil {
		return err
	}
	if _, err := whole.WriteAt(tail, w.layout.Size-int64(len(tail))); err != nil {
		return err
	}
	if w.opts.Unchanged != nil {
		if err := w.opts.Unchanged(); err != nil {
			return err
		}
	}
	if w.result.Digest, err = w.track.finish(w.ctx, w.layout.Parts); err != nil {
		return err
	}
	if w.opts.Zstd {
		return w.compress(out)
	}
	slot, at, err := w.slot()
	if err != nil || slot == nil {
		return err
	}
	if err := WriteSparse(w.raw, slot, at); err != nil {
		return err
	}
	w.progress(w.total, w.total)
	return nil
}

// compress compresses the raw image into out.
func (w *writer) compress(out *file.Output) error {
	freed := int64(0)
	a := Archive{
		Size: w.layout.Size, Parts: w.layout.Parts,
		Read: func(b []byte, off int64) (bool, error) {
			if !w.track.writtenIn(off, int64(len(b))) {
				return true, nil
			}
			_, err := w.raw.ReadAt(b, off)
			return false, err
		},
		Slot: func() ([]byte, error) {
			b, _, err := w.slot()
			return b, err
		},
		Stored: func(off, n int64) {
			// Free the compressed part of the raw image, so that both files together need no
			// more space than the raw image alone. Free several chunks at a time, which is
			// faster.
			if end := (off + n) / Align * Align; end > freed {
				w.raw.PunchHole(freed, end-freed)
				freed = end
			}
			w.progress(n, w.total)
		},
	}
	if w.opts.ImageInfo != nil {
		a.Index = func(parts []chunk.Part) ([]byte, error) {
			x := chunk.Index{Golden: w.result.Golden, ImageInfo: w.opts.ImageInfo, Parts: parts}
			return x.Seal(w.opts.SignIndex)
		}
	}
	return Compress(w.ctx, out, a)
}

// slot returns the slot's bytes and their offset. The bytes are nil if the layout has no slot.
func (w *writer) slot() ([]byte, int64, error) {
	p := w.layout.Find(ondisk.LabelSlot)
	if p == nil {
		return nil, 0, nil
	}
	b, err := w.opts.Slot(w.result.Digest)
	if err != nil {
		return nil, 0, err
	}
	if int64(len(b)) != p.Size {
		return nil, 0, fmt.Errorf("the slot has %d bytes, but its partition has %d", len(b), p.Size)
	}
	return b, p.Start, nil
}

func (w *writer) partition(p *Partition, i ondisk.PartitionInfo) error {
	r := &region{w: w, name: "partition " + p.Label, start: i.Start, size: i.Size}
	result := PartResult{Label: p.Label, Size: i.Size}
	switch {
	case p.Label == ondisk.LabelSlot, p.FS == "":
	case p.FS == Ext4:
		o := w.spec.ext4Options(p)
		if o.Size = i.FSSize; o.Size == 0 {
			o.Size = i.Size
		}
		st, err := ext4.Write(r, p.Nodes, w.blobs, o)
		if err != nil {
			return err
		}
		result.Free = st.FreeBytes
	default:
		if err := fat.Write(r, p.Nodes, w.blobs, w.spec.fatOptions(p, i)); err != nil {
			return err
		}
		fs, err := fat.Open(io.NewSectionReader(w.raw, i.Start, i.Size))
		if err != nil {
			return err
		}
		if result.Free, err = fs.Free(); err != nil {
			return err
		}
	}
	result.Written = r.written
	w.result.Parts = append(w.result.Parts, result)
	return nil
}

// region is the part of the disk that one file system writer may write to. A write beyond its end
// fails, and so does every write after an interrupt.
type region struct {
	w           *writer
	name        string
	start, size int64
	written     int64
}

func (r *region) WriteAt(p []byte, off int64) (int, error) {
	if err := r.w.ctx.Err(); err != nil {
		return 0, err
	}
	if len(p) == 0 {
		return 0, nil
	}
	if off < 0 || off > r.size-int64(len(p)) {
		return 0, fmt.Errorf("BUG: %d bytes at %d are beyond the end of %s (%d bytes)", len(p), off, r.name, r.size)
	}
	off += r.start
	n, err := r.w.track.write(p, off, func() (int, error) { return r.w.raw.WriteAt(p, off) })
	r.written += int64(n)
	if !r.w.opts.Zstd { // with Zstd, the raw file is only temporary
		r.w.raw.WriteBehind(off)
	}
	r.w.progress(int64(n), r.w.total)
	return n, err
}

// SparseBlock is the size in bytes of the smallest hole that WriteSparse leaves.
const SparseBlock = 64 << 10

// WriteSparse writes b to w at offset at, but skips zeros. That range of w must contain only zeros.
func WriteSparse(w io.WriterAt, b []byte, at int64) error {
	for block := range slices.Chunk(b, SparseBlock) {
		if !seekable.IsZero(block) {
			if _, err := w.WriteAt(block, at); err != nil {
				return err
			}
		}
		at += SparseBlock
	}
	return nil
}
