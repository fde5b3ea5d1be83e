package media

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/seekable"
)

// Write writes the image. It destroys the disk's old content with its first write. ErrUntouched
// means that it wrote nothing.
func (f *Flash) Write(ctx context.Context, d Medium) (*Flashed, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntouched, err)
	}
	r := &Flashed{DiskGUID: f.Table.GUID}
	for _, step := range []func(context.Context, Medium, *Flashed) error{f.wipe, f.stream, f.readBack, f.golden, f.asPrepared, f.finish} {
		if err := step(ctx, d, r); err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return nil, explainDevice(err, f.o.Sector != 0)
		}
	}
	return r, nil
}

// wipe overwrites the old partition table, and writes the constant unfinished to the first sector.
func (f *Flash) wipe(_ context.Context, d Medium, _ *Flashed) error {
	head := make([]byte, headRoom)
	copy(head, unfinished)
	if _, err := d.WriteAt(head, 0); err != nil {
		return fmt.Errorf("wiping the old partition table: %w", err)
	}
	// Sync before the next write: after a power cut, the first sector then has its old content or
	// the constant unfinished.
	if err := d.Sync(); err != nil {
		return fmt.Errorf("wiping the old partition table: %w", err)
	}
	if _, err := d.WriteAt(make([]byte, tailRoom), f.Table.Size-tailRoom); err != nil {
		return fmt.Errorf("wiping the old backup partition table: %w", err)
	}
	return nil
}

// piece is one chunk to be written.
type piece struct {
	b   []byte // without zeros at both ends; nil if the chunk is zero
	at  int64  // offset of b in the chunk
	buf []byte // the buffer that contains b
	err error
}

// stream writes the chunks in order, because many devices are slow otherwise. Meanwhile, several
// workers read and decompress the next chunks.
func (f *Flash) stream(ctx context.Context, d Medium, r *Flashed) error {
	ctx, cancel := context.WithCancel(ctx)
	n := len(f.built)
	ready := make([]chan piece, n)
	for i := range ready {
		ready[i] = make(chan piece, 1)
	}
	ahead := 2*runtime.GOMAXPROCS(0) + 1
	buffers := make(chan []byte, ahead)
	for range ahead {
		buffers <- make([]byte, disk.Align)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	next := make(chan int)
	wg.Go(func() {
		defer close(next)
		for i := range n {
			select {
			case next <- i:
			case <-ctx.Done():
				return
			}
		}
	})
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				// Get a buffer before a chunk number. Otherwise the worker with the lowest number
				// might wait for a buffer while all buffers hold later chunks.
				var buf []byte
				select {
				case buf = <-buffers:
				case <-ctx.Done():
					return
				}
				i, ok := <-next
				if !ok {
					return
				}
				b, err := f.chunk(i, buf, f.hashes())
				at, b := trim(b)
				ready[i] <- piece{b, at, buf, err}
			}
		})
	}
	return f.write(ctx, d, r, ready, buffers)
}

// grain is the smallest part of a chunk, in bytes, that is zeroed instead of written. For smaller
// parts, writing is cheaper than a request to zero them.
const grain = 1 << 20

// trim removes zeros from both ends of a chunk. It returns the rest and its offset in the chunk.
func trim(b []byte) (at int64, rest []byte) {
	for len(b) > 0 && seekable.IsZero(b[:grain]) {
		at, b = at+grain, b[grain:]
	}
	for len(b) > 0 && seekable.IsZero(b[len(b)-grain:]) {
		b = b[:len(b)-grain]
	}
	return at, b
}

// maxZero is the largest number of bytes in one request to zero a range. A request cannot be
// interrupted.
const maxZero = 256 << 20

// write writes the chunks in order.
func (f *Flash) write(ctx context.Context, d Medium, r *Flashed, ready []chan piece, buffers chan<- []byte) error {
	// wipe has already zeroed the head, except for the first sector, which finish writes.
	from, at := int64(headRoom), int64(headRoom)
	zero := func() error {
		if err := d.Zero(from, at-from); err != nil {
			return fmt.Errorf("zeroing %d bytes at %d: %w", at-from, from, err)
		}
		r.Zeroed += at - from
		return nil
	}
	for i := range ready {
		var p piece
		select {
		case p = <-ready[i]:
		case <-ctx.Done():
			return ctx.Err()
		}
		if p.err != nil {
			return p.err
		}
		off := int64(i) * disk.Align
		if p.b != nil {
			if at = off + p.at; at > from {
				if err := zero(); err != nil {
					return err
				}
			}
			if _, err := d.WriteAt(p.b, at); err != nil {
				return fmt.Errorf("writing %d bytes at %d: %w", len(p.b), at, err)
			}
			r.Written += int64(len(p.b))
			from = at + int64(len(p.b))
		}
		at = off + disk.Align
		buffers <- p.buf
		if at-from >= maxZero || i == len(ready)-1 && at > from {
			if err := zero(); err != nil {
				return err
			}
			from = at
		}
		if p.b != nil {
			f.progress("write", min(r.Written, f.data), f.data)
		}
	}
	f.progress("write", f.data, f.data)
	// Discard the rest of the disk, into which DATA will grow. Verify reads a rest of at most one
	// chunk, so zero that instead.
	rest := f.Table.Size - tailRoom - f.End
	if rest > disk.Align {
		d.Discard(f.End, rest)
	} else if rest > 0 {
		if err := d.Zero(f.End, rest); err != nil {
			return fmt.Errorf("zeroing %d bytes at %d: %w", rest, f.End, err)
		}
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("syncing the disk: %w", err)
	}
	return nil
}

func (f *Flash) progress(step string, done, total int64) {
	if f.o.Progress != nil {
		f.o.Progress(step, done, total)
	}
}

// hashes reports whether every chunk must be hashed before it is written. If the disk is read back,
// the golden digest is computed from the bytes read back, and only the slot needs a digest before.
func (f *Flash) hashes() bool { return f.o.SkipVerify || f.kind == flashInstaller }

// chunk returns the content of the disk's i-th chunk, or nil for zeros. It records the digests of
// zeros and of the slot, and if hashes is set, the digests of all other chunks.
func (f *Flash) chunk(i int, buf []byte, hashes bool) ([]byte, error) {
	off := int64(i) * disk.Align
	f.built[i], f.written[i] = f.zeroSum, f.zeroSum
	p := f.at(off)
	switch {
	case p == nil: // between partitions, or before the first
		return nil, nil
	case p.Name == ondisk.LabelSlot && f.slot != nil:
		b := f.slot[off-p.Start:][:disk.Align]
		if bytes.Equal(b, f.zeros) {
			return nil, nil
		}
		f.written[i] = sha256.Sum256(b)
		return b, nil
	}
	b, zero, err := f.m.chunk(buf, off, disk.Align)
	if err != nil {
		return nil, &sourceError{f.m.path, err}
	}
	if zero || bytes.Equal(b, f.zeros) {
		return nil, nil
	}
	f.built[i], f.written[i] = unknown, unknown
	if !replaces(f.edits, b, off) {
		return nil, f.changed()
	}
	if hashes {
		f.built[i] = sha256.Sum256(b)
		f.written[i] = f.built[i]
	}
	if apply(f.edits, b, off) && hashes {
		f.written[i] = sha256.Sum256(b)
	}
	return b, nil
}

// unknown is the digest of a chunk that was not hashed. No chunk has this digest.
var unknown [32]byte

// at returns the partition that contains the byte at off, or nil.
func (f *Flash) at(off int64) *gpt.Partition {
	for i := range f.m.table.Partitions {
		if p := &f.m.table.Partitions[i]; off >= p.Start && off < p.Start+p.Size {
			return p
		}
	}
	return nil
}

// golden compares the golden digest of the written bytes with the one in the slot.
func (f *Flash) golden(ctx context.Context, _ Medium, r *Flashed) error {
	got := f.digest()
	if r.Golden = got.Golden; f.kind == flashInstaller || r.Golden == f.Slot.Golden {
		return nil
	}
	if !f.o.SkipVerify {
		r.Verified = false
		if err := f.causeOf(ctx); err != nil {
			return err
		}
	}
	return fmt.Errorf("image %s is damaged, or has booted: %w: copy or build it again", f.m.path, notAsBuilt(got, f.Slot))
}

// changed returns the error for an image that has changed since PrepareFlash read it.
func (f *Flash) changed() error {
	return fmt.Errorf("reading image %s: its %s or boot entries changed while they were read: another program writes to it, or its disk or server is broken", f.m.path, ondisk.ESPImageInfo)
}

// asPrepared returns an error if image.json or the boot entries on the disk differ from those that
// PrepareFlash read. PrepareFlash could not verify them: the golden digest covers only the bytes
// read back from the disk.
func (f *Flash) asPrepared(_ context.Context, d Medium, _ *Flashed) error {
	if f.kind == flashInstaller {
		return nil
	}
	m := &Image{src: d, table: f.m.table, edits: undone(f.edits)}
	var edits []edit
	var shared bool
	err := m.readInfo()
	if err == nil {
		edits, shared, err = f.ownEntries(m)
	}
	if isDeviceError(err) {
		return fmt.Errorf("reading the boot entries back: %w", err)
	} else if err != nil {
		return f.changed()
	}
	same := func(a, b edit) bool { return a.off == b.off && bytes.Equal(a.b, b.b) && bytes.Equal(a.was, b.was) }
	if !bytes.Equal(m.infoText, f.m.infoText) || shared != f.Shared || !slices.EqualFunc(edits, f.edits, same) {
		return f.changed()
	}
	return nil
}

// digest computes the golden digest from the digests in built.
func (f *Flash) digest() disk.Digest {
	return disk.DigestOf(f.m.parts(), func(off, _ int64) [32]byte { return f.built[off/disk.Align] })
}

// causeOf finds the cause of a wrong digest by reading the image again. It returns an error if the
// disk returned other bytes than were written, and nil if the image itself is damaged.
func (f *Flash) causeOf(ctx context.Context) error {
	returned := slices.Clone(f.written)
	err := disk.Parallel(ctx, len(f.written), func() func(int) error {
		buf := make([]byte, disk.Align)
		return func(i int) error {
			_, err := f.chunk(i, buf, true)
			return err
		}
	})
	if err != nil || f.digest().Golden != f.Slot.Golden {
		return err
	}
	for i := range returned {
		if returned[i] != f.written[i] {
			return otherBytes(int64(i) * disk.Align)
		}
	}
	return nil
}

// otherBytes returns the error for a disk that returned other bytes than were written at off.
func otherBytes(off int64) error {
	return fmt.Errorf("at byte %d the disk returns other data than was written to it: the disk is failing, or smaller than it claims (counterfeit): use another disk", off)
}

// readBack reads everything back from the medium. It compares each chunk whose digest is known, and
// records the digests of the others.
func (f *Flash) readBack(ctx context.Context, d Medium, r *Flashed) error {
	if f.o.SkipVerify {
		return nil
	}
	var mu sync.Mutex
	done := int64(0)
	back := undone(f.edits)
	err := disk.Parallel(ctx, len(f.written), func() func(int) error {
		buf := make([]byte, disk.Align)
		return func(i int) error {
			off, b := int64(i)*disk.Align, buf
			if i == 0 {
				off, b = headRoom, buf[headRoom:]
				clear(buf[:headRoom])
			}
			if _, err := d.ReadAt(b, off); err != nil {
				return fmt.Errorf("reading %d bytes at %d back: %w", len(b), off, err)
			}
			if !f.returned(i, buf, back) {
				return otherBytes(off)
			}
			mu.Lock()
			done += disk.Align
			f.progress("verify", done, f.End)
			mu.Unlock()
			return nil
		}
	})
	r.Verified = err == nil
	return err
}

// returned compares b, the i-th chunk as read back, with its digest, or records the digest if it is
// unknown. back reverts the edits, as the golden digest requires.
func (f *Flash) returned(i int, b []byte, back []edit) bool {
	if f.written[i] == f.zeroSum {
		return bytes.Equal(b, f.zeros) // much faster than hashing
	}
	sum := sha256.Sum256(b)
	if f.written[i] != unknown {
		return f.written[i] == sum
	}
	f.built[i], f.written[i] = sum, sum
	off := int64(i) * disk.Align
	if !replaces(back, b, off) {
		return false
	}
	if apply(back, b, off) {
		f.built[i] = sha256.Sum256(b)
	}
	return true
}

// finish writes the partition table after everything else was read back. It writes the first sector
// last, because that makes the disk bootable. If the sector cannot be read back, finish wipes it.
func (f *Flash) finish(_ context.Context, d Medium, _ *Flashed) error {
	head, tail, err := gpt.Encode(f.Table)
	if err != nil {
		return err
	}
	sector := f.Table.SectorSize
	first, rest := extent{head[:sector], 0}, extent{head[sector:], sector}
	if err := f.store(d, extent{tail, f.Table.Size - int64(len(tail))}, rest); err != nil {
		return err
	}
	err = f.store(d, first)
	if errors.Is(err, errReadBack) {
		back := make([]byte, sector)
		copy(back, unfinished)
		if _, failed := d.WriteAt(back, 0); failed != nil {
			return errors.Join(err, fmt.Errorf("removing the partition table again: %w", failed))
		}
		if failed := d.Sync(); failed != nil {
			return errors.Join(err, fmt.Errorf("removing the partition table again: %w", failed))
		}
	}
	return err
}

// extent is a part of the partition table, with its offset on the disk.
type extent struct {
	b   []byte
	off int64
}

// errReadBack means that the disk did not return the partition table as written.
var errReadBack = errors.New("reading the partition table back")

// store writes parts of the partition table, syncs, and reads them back.
func (f *Flash) store(d Medium, parts ...extent) error {
	for _, p := range parts {
		if _, err := d.WriteAt(p.b, p.off); err != nil {
			return fmt.Errorf("writing the partition table: %w", err)
		}
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("writing the partition table: %w", err)
	}
	if f.o.SkipVerify {
		return nil
	}
	for _, p := range parts {
		got := make([]byte, len(p.b))
		if _, err := d.ReadAt(got, p.off); err != nil {
			return fmt.Errorf("%w: %w", errReadBack, err)
		}
		if !bytes.Equal(got, p.b) {
			return fmt.Errorf("%w: at byte %d the disk returns other data than was written to it: the disk is failing: use another disk", errReadBack, p.off)
		}
	}
	return nil
}

// sourceError is an error in reading the image, as opposed to an error of the disk.
type sourceError struct {
	path string
	err  error
}

func (e *sourceError) Unwrap() error { return e.err }

func (e *sourceError) Error() string {
	fix := "check the stick, the share or the server that has the image"
	for _, damage := range []error{seekable.ErrDamaged, seekable.ErrFormat, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(e.err, damage) {
			fix = "the image is damaged or truncated: copy or build it again"
		}
	}
	return fmt.Sprintf("reading image %s: %v: %s", e.path, e.err, fix)
}

// explainDevice adds a fix to an error of the target. disk means that the target is a disk, not a
// file.
func explainDevice(err error, disk bool) error {
	if errors.As(err, new(*sourceError)) {
		return err
	}
	full := "the target is full: free space, and flash it again"
	if disk {
		full = "the disk is smaller than it claims: it is failing or counterfeit: use another disk"
	}
	for _, x := range []struct {
		is  syscall.Errno
		fix string
	}{
		{syscall.ENODEV, "the disk is gone: plug it in again, and flash it again"},
		{syscall.ENXIO, "the disk is gone: plug it in again, and flash it again"},
		{syscall.EIO, "the disk failed, or was unplugged: try another port or disk, and flash it again"},
		{syscall.ENOSPC, full},
		{syscall.EROFS, "the disk became read-only, as cards do when they wear out: use another disk"},
		{syscall.EPERM, "the disk became read-only: look for a write-protect switch"},
	} {
		if errors.Is(err, x.is) {
			return fmt.Errorf("%w: %s", err, x.fix)
		}
	}
	return err
}
