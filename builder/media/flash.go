package media

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"syscall"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
)

// Medium is a disk that an image is written to.
type Medium interface {
	io.WriterAt
	// ReadAt reads what the medium has after a Sync, past every cache.
	io.ReaderAt
	// Zero makes a part read as zeros for good.
	Zero(off, n int64) error
	// Discard says that nothing is kept in a part; it may do nothing.
	Discard(off, n int64)
	Sync() error
}

// FlashOptions are how an image is written to a disk.
type FlashOptions struct {
	// Site to stamp on the way; nil leaves the image's slot as it is.
	Site *Site
	// Slot, where set, is the whole slot of this image as it is to be written, in
	// the place of the image's own: whoever has checked it wants no other.
	Slot []byte
	// Stamp says how: Now and Undated are used.
	Stamp StampOptions
	// Size of the disk, and of its sectors; 0: it has none, as a file.
	Size, Sector int64
	// Random makes the disk's own GUID.
	Random [16]byte
	// Keys, where there are any, are minisign public keys: one of them must have
	// signed the image.
	Keys []string
	// SkipVerify leaves out reading everything back.
	SkipVerify bool
	// Progress, where set, is told of the bytes done so far of a step: "write"
	// or "verify".
	Progress func(step string, done, total int64)
}

// Flash is an image that is ready to be written to a disk.
//
// A power cut while it writes leaves a disk that firmware and kernel find no
// partition table on, and of which Inspect says why: the first sector, which
// both look at before anything else, is overwritten first and gets its right
// content last, in one write, after all else is on the medium and was read
// back.
type Flash struct {
	Image ondisk.ImageInfo
	// Slot is what the slot will say.
	Slot ondisk.SlotInfo
	// State of the slot: SlotGolden, SlotSite or SlotInventory.
	State string
	// NodeName is the name, or the template of one, that its Site gives.
	NodeName string
	// Table is the partition table that the disk gets.
	Table gpt.Table
	// Shared: the disk keeps the image's GUIDs, since no boot entry of the
	// image names its partitions in a way that can be changed.
	Shared bool
	// End is where the last partition ends; behind it nothing is written but
	// the copy of the table.
	End int64

	m     *image
	o     FlashOptions
	slot  []byte // to be written; nil: the image's own
	edits []edit // of the boot entries, for the disk's own GUIDs
	// built and written are the digests of each chunk, as the golden digest
	// has it and as it is on the disk.
	built, written [][32]byte
	zeros          []byte   // a chunk of them
	zeroSum        [32]byte // its digest
	data           int64    // about so many bytes are to be written, holes left out
	plain          bool     // no image, but an installer: see PrepareInstaller
}

// Flashed is what was written.
type Flashed struct {
	// Golden is the digest of the image, computed from what was written.
	Golden string `json:"golden"`
	// DiskGUID is the disk's own.
	DiskGUID string `json:"diskGUID"`
	// Written and Zeroed bytes.
	Written int64 `json:"written"`
	Zeroed  int64 `json:"zeroed"`
	// Verified: all was read back from the medium.
	Verified bool `json:"verified"`
}

// unfinished is what the first sector of a disk says while it is flashed.
const unfinished = "edgebake: writing an image to this disk did not finish\n"

// ErrUnfinished says that flashing a disk was interrupted.
var ErrUnfinished = errors.New("writing an image to this disk did not finish: flash it again")

// ErrUntouched says that flashing was interrupted before the first write.
var ErrUntouched = errors.New("nothing was written")

const (
	// headRoom has a table of either kind of sectors.
	headRoom = 24 << 10
	// tailRoom is wiped at the end of the disk: the copy of a former table, and
	// what RAIDs and ZFS keep there.
	tailRoom = 1 << 20
)

// PrepareFlash reads the image, checks that it fits the disk and the site, and
// writes nothing. It returns everything that is wrong at once.
func PrepareFlash(path string, o FlashOptions) (*Flash, error) {
	m, err := open(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	return prepareFlash(m, o)
}

func prepareFlash(m *image, o FlashOptions) (*Flash, error) {
	f := &Flash{m: m, o: o, Image: m.info, zeros: make([]byte, disk.Align)}
	f.zeroSum = sha256.Sum256(f.zeros)
	if err := f.prepare(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Close closes the image.
func (f *Flash) Close() { f.m.close() }

func (f *Flash) prepare() error {
	m := f.m
	if m.f != nil {
		if err := lock(m.f, false); err != nil {
			return fmt.Errorf("reading image %s: another program is stamping it: try again (%w)", m.path, err)
		}
	}
	var errs []error
	bad := func(err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("flashing image %s: %w", m.path, err))
		}
	}
	bad(f.layout())
	bad(m.matches())
	bad(f.fits())
	bad(m.asBuilt())
	bad(f.fill())
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return f.identity()
}

// layout finds where the image's content ends.
func (f *Flash) layout() error {
	for _, p := range f.m.table.Partitions {
		if p.Start%disk.Align != 0 || p.Size%disk.Align != 0 || p.Start < disk.Align {
			return misplaced(p)
		}
		f.End = max(f.End, p.Start+p.Size)
	}
	n := f.End / disk.Align
	f.built, f.written = make([][32]byte, n), make([][32]byte, n)
	for i := range n {
		if off := i * disk.Align; f.at(off) != nil && !f.m.hole(int(i)) {
			f.data += disk.Align
		}
	}
	return nil
}

// fits compares the disk with the image.
func (f *Flash) fits() error {
	var errs []error
	if f.o.Size < f.End+tailRoom && f.plain {
		errs = append(errs, fmt.Errorf("it has %d MiB and the installer needs %d MiB: take a larger one", f.o.Size>>20, (f.End+tailRoom)>>20))
	} else if f.o.Size < f.End+tailRoom {
		errs = append(errs, fmt.Errorf("the disk has %d MiB and the image needs %d MiB: take a larger disk, or build the image with less (disk.root, disk.data, disk.reserve)",
			f.o.Size>>20, (f.End+tailRoom)>>20))
	}
	if have := f.m.table.SectorSize; f.o.Sector != 0 && f.o.Sector != have {
		fix := fmt.Sprintf("build it with disk.sector: %d", f.o.Sector)
		if f.o.Sector == gpt.Sector512 {
			fix = "build it without disk.sector"
		}
		errs = append(errs, fmt.Errorf("the image is for disks with sectors of %d bytes, this one has sectors of %d: %s", have, f.o.Sector, fix))
	}
	return errors.Join(errs...)
}

// fill makes the slot that the disk gets, or looks at the image's own.
func (f *Flash) fill() error {
	p, err := f.m.partition(ondisk.LabelSlot)
	if err != nil {
		return err
	}
	if f.o.Site != nil {
		f.Slot, f.slot, err = f.m.slotOf(*f.o.Site, f.o.Stamp)
		f.State = SlotSite
		if f.o.Site.Doc != nil {
			f.NodeName = f.o.Site.Doc.NodeName
		}
		if _, many := f.o.Site.Files[ondisk.SlotInventory]; many {
			f.State = SlotInventory
		}
	} else {
		own := io.ReaderAt(f.m.section(p))
		if f.slot = f.o.Slot; f.slot != nil {
			own = bytes.NewReader(f.slot)
		}
		var i Info
		if err = f.m.slot(&i); err != nil {
			return err
		}
		if f.State = i.Slot.State; f.State == SlotDamaged {
			return fmt.Errorf("%s: name a Site (--site), or stamp the image again", i.Slot.Error)
		}
		if i.Slot.Site != nil {
			f.NodeName = i.Slot.Site.NodeName
		}
		f.Slot, err = slot.ReadInfo(own)
	}
	if err == nil && f.Slot.Golden == "" {
		return errors.New("no golden digest to verify with, since the slot was damaged when it was stamped: take a copy of the golden image, or build it again")
	}
	if err != nil || len(f.o.Keys) == 0 {
		return err
	}
	if _, err = f.m.signedBy(f.Slot, f.o.Keys); err != nil || f.slot != nil {
		return err
	}
	return slot.Strays(f.m.section(p))
}

// identity gives the disk GUIDs of its own, so that it is never taken for
// another copy of the image in the same machine.
func (f *Flash) identity() error {
	f.Table = gpt.Table{GUID: disk.RandomGUID(f.o.Random), Size: f.o.Size, SectorSize: f.m.table.SectorSize}
	if rest := f.Table.Size % f.Table.SectorSize; rest != 0 {
		f.Table.Size -= rest // a file
	}
	own := map[string]string{}
	for _, p := range f.m.info.Partitions {
		own[p.GUID] = disk.PartitionGUID(f.Table.GUID, p.Label)
	}
	edits, named, err := f.m.rename(own)
	if err != nil {
		return fmt.Errorf("flashing image %s: %w", f.m.path, err)
	}
	if f.edits = edits; !named {
		f.edits, f.Shared = nil, true
	}
	for _, p := range f.m.table.Partitions {
		p.Type, p.Attributes = disk.TypeOf(f.m.info.Arch, p.Name)
		p.GUID = disk.PartitionGUID(f.Table.GUID, p.Name)
		if f.Shared {
			p.GUID = f.m.builtGUID(p.Name)
		}
		f.Table.Partitions = append(f.Table.Partitions, p)
	}
	return nil
}

// Write writes the image. What was on the disk is lost from the first write
// on; ErrUntouched says that there was none.
func (f *Flash) Write(ctx context.Context, d Medium) (*Flashed, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntouched, err)
	}
	r := &Flashed{DiskGUID: f.Table.GUID}
	for _, step := range []func(context.Context, Medium, *Flashed) error{f.wipe, f.stream, f.golden, f.readBack, f.finish} {
		if err := step(ctx, d, r); err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return nil, explainDevice(err)
		}
	}
	return r, nil
}

// wipe takes the old table away, and says in its place what is going on.
func (f *Flash) wipe(_ context.Context, d Medium, _ *Flashed) error {
	head := make([]byte, headRoom)
	copy(head, unfinished)
	if _, err := d.WriteAt(head, 0); err != nil {
		return fmt.Errorf("wiping the old partition table: %w", err)
	}
	// What was stays whole until this is on the medium.
	if err := d.Sync(); err != nil {
		return fmt.Errorf("wiping the old partition table: %w", err)
	}
	if _, err := d.WriteAt(make([]byte, tailRoom), f.Table.Size-tailRoom); err != nil {
		return fmt.Errorf("wiping the old partition table's copy: %w", err)
	}
	return nil
}

// piece is one chunk on its way to the disk.
type piece struct {
	b    []byte // nil: zeros
	room []byte // to be used again
	err  error
}

// stream writes all chunks, in order, since many devices are slow otherwise.
// They are read, decompressed and hashed side by side meanwhile.
func (f *Flash) stream(ctx context.Context, d Medium, r *Flashed) error {
	ctx, cancel := context.WithCancel(ctx)
	n := len(f.built)
	ready := make([]chan piece, n)
	for i := range ready {
		ready[i] = make(chan piece, 1)
	}
	ahead := 2*runtime.GOMAXPROCS(0) + 1
	rooms := make(chan []byte, ahead)
	for range ahead {
		rooms <- make([]byte, disk.Align)
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
				// The room before the number: whoever has the lowest number
				// never waits for room.
				var room []byte
				select {
				case room = <-rooms:
				case <-ctx.Done():
					return
				}
				i, ok := <-next
				if !ok {
					return
				}
				b, err := f.chunk(i, room)
				ready[i] <- piece{b, room, err}
			}
		})
	}
	return f.write(ctx, d, r, ready, rooms)
}

// maxZero is how much is zeroed at once: an interrupt waits for that long.
const maxZero = 256 << 20

// write takes the chunks in order.
func (f *Flash) write(ctx context.Context, d Medium, r *Flashed, ready []chan piece, rooms chan<- []byte) error {
	// The wiped head is zero already, but for the first sector.
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
			if at > from {
				if err := zero(); err != nil {
					return err
				}
			}
			if _, err := d.WriteAt(p.b, off); err != nil {
				return fmt.Errorf("writing %d bytes at %d: %w", len(p.b), off, err)
			}
			r.Written += disk.Align
			from = off + disk.Align
		}
		at = off + disk.Align
		rooms <- p.room
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
	// DATA will grow into the rest. A small rest is part of what Verify looks at.
	rest := f.Table.Size - tailRoom - f.End
	if rest > disk.Align {
		d.Discard(f.End, rest)
	} else if rest > 0 {
		if err := d.Zero(f.End, rest); err != nil {
			return fmt.Errorf("zeroing %d bytes at %d: %w", rest, f.End, err)
		}
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("waiting for the disk to store what was written: %w", err)
	}
	return nil
}

func (f *Flash) progress(step string, done, total int64) {
	if f.o.Progress != nil {
		f.o.Progress(step, done, total)
	}
}

// chunk makes what the disk shall have in its i-th chunk, nil for zeros, and
// notes its digests.
func (f *Flash) chunk(i int, room []byte) ([]byte, error) {
	off := int64(i) * disk.Align
	f.built[i], f.written[i] = f.zeroSum, f.zeroSum
	p := f.at(off)
	switch {
	case p == nil: // before the first partition, or between two
		return nil, nil
	case p.Name == ondisk.LabelSlot && f.slot != nil:
		b := f.slot[off-p.Start:][:disk.Align]
		f.written[i] = sha256.Sum256(b)
		return b, nil
	}
	b, zero, err := f.m.chunk(room, off, disk.Align)
	if err != nil {
		return nil, fmt.Errorf("reading image %s: %w: it is damaged or cut short, copy or build it again", f.m.path, err)
	}
	if zero || bytes.Equal(b, f.zeros) {
		return nil, nil
	}
	f.built[i] = sha256.Sum256(b)
	f.written[i] = f.built[i]
	if apply(f.edits, b, off) {
		f.written[i] = sha256.Sum256(b)
	}
	return b, nil
}

// at is the partition that has the byte at off.
func (f *Flash) at(off int64) *gpt.Partition {
	for i := range f.m.table.Partitions {
		if p := &f.m.table.Partitions[i]; off >= p.Start && off < p.Start+p.Size {
			return p
		}
	}
	return nil
}

// golden checks that what was read is what was built.
func (f *Flash) golden(_ context.Context, _ Medium, r *Flashed) error {
	got := disk.DigestOf(f.m.parts(), func(off, _ int64) [32]byte { return f.built[off/disk.Align] })
	r.Golden = got.Golden
	if !f.plain && r.Golden != f.Slot.Golden {
		return fmt.Errorf("image %s is damaged, or has booted: %w: copy or build it again", f.m.path, notAsBuilt(got, f.Slot))
	}
	return nil
}

// readBack reads everything from the medium and compares.
func (f *Flash) readBack(ctx context.Context, d Medium, r *Flashed) error {
	if f.o.SkipVerify {
		return nil
	}
	var mu sync.Mutex
	done := int64(0)
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
			// A hole is compared, which is ten times faster than hashing it.
			same := f.written[i] == f.zeroSum && bytes.Equal(buf, f.zeros)
			if !same && sha256.Sum256(buf) != f.written[i] {
				return fmt.Errorf("at %d the disk returns other bytes than were written to it: it is failing, or smaller than it says (a counterfeit): use another disk", off)
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

// finish writes the table, its first sector last, once the rest was read back:
// with that sector the disk boots. Where the disk does not return it, it is
// taken away again.
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
			return errors.Join(err, fmt.Errorf("taking the partition table away again: %w", failed))
		}
		if failed := d.Sync(); failed != nil {
			return errors.Join(err, fmt.Errorf("taking the partition table away again: %w", failed))
		}
	}
	return err
}

// extent is a part of the partition table, and its place.
type extent struct {
	b   []byte
	off int64
}

// errReadBack says that the disk does not keep the partition table.
var errReadBack = errors.New("reading the partition table back")

// store writes parts of the table, waits until they are on the medium, and
// reads them back.
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
			return fmt.Errorf("%w: at %d the disk returns other bytes than were written to it: it is failing: use another disk", errReadBack, p.off)
		}
	}
	return nil
}

// explainDevice adds what a person can do about a device's error.
func explainDevice(err error) error {
	for _, x := range []struct {
		is  syscall.Errno
		fix string
	}{
		{syscall.ENODEV, "the disk is gone: plug it in again, and flash it again"},
		{syscall.ENXIO, "the disk is gone: plug it in again, and flash it again"},
		{syscall.EIO, "the disk failed, or was unplugged: try another port or disk, and flash it again"},
		{syscall.ENOSPC, "it is full: make room, and flash it again"},
		{syscall.EROFS, "it became read-only, as cards do when they wear out: use another one"},
		{syscall.EPERM, "it became read-only: look for a write-protect switch"},
	} {
		if errors.Is(err, x.is) {
			return fmt.Errorf("%w: %s", err, x.fix)
		}
	}
	return err
}
