package media

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// Medium is a disk that an image is written to.
type Medium interface {
	io.WriterAt
	// ReadAt must read from the medium itself after a Sync, not from a cache.
	io.ReaderAt
	// Zero makes a range read as zeros, also after a power cut.
	Zero(off, n int64) error
	// Discard declares that a range is unused. It may do nothing.
	Discard(off, n int64)
	Sync() error
}

// FlashOptions configures how an image is written to a disk.
type FlashOptions struct {
	// Site is stamped onto the disk. If it is nil, the disk gets the image's slot.
	Site *Site
	// Slot, if set, replaces the image's slot. The caller must have checked it.
	Slot []byte
	// Stamp configures the stamping. Only Now and Undated are used.
	Stamp StampOptions
	// Size is the size of the disk in bytes, and Sector the size of its sectors. Sector is 0 for a
	// file.
	Size, Sector int64
	// Random determines the disk's own GUIDs.
	Random [16]byte
	// Keys are minisign public keys. Unless the list is empty, one of them must have signed the
	// image.
	Keys []string
	// SkipVerify means that the disk is not read back.
	SkipVerify bool
	// Progress, if set, is called during the steps "write" and "verify" with the bytes done so far.
	Progress func(step string, done, total int64)
}

// Flash is an image that is ready to be written to a disk.
//
// Write overwrites the disk's first sector first, and writes the sector's final content last, after
// everything else was read back. Therefore, after a power cut, firmware and the kernel find no
// partition table, and Inspect reports that flashing was interrupted.
type Flash struct {
	Image ondisk.ImageInfo
	// Slot is the description in the slot of the written disk.
	Slot ondisk.SlotInfo
	// State is the state of that slot: SlotGolden, SlotSite or SlotInventory.
	State string
	// NodeName is the node name in the slot's Site, or its template.
	NodeName string
	// Table is the partition table of the written disk.
	Table gpt.Table
	// Shared means that the disk keeps the image's GUIDs, since edgebake cannot edit the boot
	// entries.
	Shared bool
	// End is the end of the last partition in bytes. After it, only the backup partition table is
	// written.
	End int64

	m     *Image
	o     FlashOptions
	slot  []byte // the bytes to write; nil for an installer
	edits []edit // change the boot entries to the disk's own GUIDs
	// built contains the digest of each chunk with the build's GUIDs, for the golden digest.
	// written contains the digest of each chunk as stored on the disk. See hashes for when they
	// are known.
	built, written [][32]byte
	zeros          []byte   // one chunk of zeros
	zeroSum        [32]byte // digest of zeros
	data           int64    // estimated number of bytes to write, without holes
	kind           flashKind
}

// flashKind is the kind of image to be written.
type flashKind int

const (
	flashImage     flashKind = iota // has a golden digest, a slot, and boot entries with the disk's GUIDs
	flashInstaller                  // has none of these: see PrepareInstaller
)

// Flashed describes the written disk.
type Flashed struct {
	// Golden is the golden digest, computed from the written bytes.
	Golden string `json:"golden"`
	// DiskGUID is the GUID of the disk.
	DiskGUID string `json:"diskGUID"`
	// Written and Zeroed are in bytes.
	Written int64 `json:"written"`
	Zeroed  int64 `json:"zeroed"`
	// Verified means that everything was read back from the medium and is correct.
	Verified bool `json:"verified"`
}

// unfinished is the content of a disk's first sector while it is flashed.
const unfinished = "edgebake: writing an image to this disk did not finish\n"

// ErrUnfinished means that flashing a disk was interrupted.
var ErrUnfinished = errors.New("writing an image to this disk did not finish: flash it again")

// ErrUntouched means that flashing was interrupted before the first write.
var ErrUntouched = errors.New("nothing was written")

const (
	// headRoom is the number of bytes that are wiped at the beginning of the disk, enough for a
	// partition table with either sector size.
	headRoom = 24 << 10
	// tailRoom is the number of bytes that are wiped at the end of the disk, where an old backup
	// table or metadata of RAID or ZFS may be.
	tailRoom = 1 << 20
)

// PrepareFlash checks that the image fits the disk and the Site. It writes nothing and reports all
// errors together.
func PrepareFlash(path string, o FlashOptions) (*Flash, error) {
	m, err := openLocked(path, os.O_RDONLY, false)
	if err != nil {
		return nil, err
	}
	return prepareFlash(m, o)
}

func prepareFlash(m *Image, o FlashOptions) (*Flash, error) {
	f := &Flash{m: m, o: o, Image: m.info, zeros: make([]byte, disk.Align)}
	f.zeroSum = sha256.Sum256(f.zeros)
	if err := f.prepare(); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Close closes the image.
func (f *Flash) Close() { f.m.Close() }

func (f *Flash) prepare() error {
	m := f.m
	if m.f != nil {
		if err := lock(m.f, false); err != nil {
			return fmt.Errorf("reading image %s: %w", m.path, err)
		}
	}
	var errs []error
	bad := func(err error) {
		if err != nil {
			errs = append(errs, withAction("flashing image "+m.path, err))
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

// layout checks the positions of the partitions and sets End.
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

// fits checks the image against the size and the sector size of the disk.
func (f *Flash) fits() error {
	var errs []error
	if f.o.Size < f.End+tailRoom && f.kind == flashInstaller {
		errs = append(errs, fmt.Errorf("the disk has %s, but the installer needs %s: use a larger one", bytesize.MiB(f.o.Size), bytesize.MiB(f.End+tailRoom)))
	} else if f.o.Size < f.End+tailRoom {
		errs = append(errs, fmt.Errorf("the disk has %s, but the image needs %s: use a larger disk, or build a smaller image (disk.root, disk.data, disk.reserve)",
			bytesize.MiB(f.o.Size), bytesize.MiB(f.End+tailRoom)))
	}
	if have := f.m.table.SectorSize; f.o.Sector != 0 && f.o.Sector != have {
		fix := fmt.Sprintf("build it with disk.sector: %d", f.o.Sector)
		if f.o.Sector == gpt.Sector512 {
			fix = "build it without disk.sector"
		}
		errs = append(errs, fmt.Errorf("the image is for disks with sectors of %d bytes, but this disk has sectors of %d: %s", have, f.o.Sector, fix))
	}
	return errors.Join(errs...)
}

// fill sets the slot to write: a new one for the Site, or FlashOptions.Slot or the image's own slot
// after checking it.
func (f *Flash) fill() error {
	p, err := f.m.partition(ondisk.LabelSlot)
	if err != nil {
		return err
	}
	if f.o.Site != nil {
		var c slot.Contents
		if c, err = f.m.slotOf(*f.o.Site, f.o.Stamp); err == nil {
			f.Slot = c.Info
			f.slot, err = slot.Make(c)
		} else if own, unread := slot.ReadInfo(f.m.section(p)); unread == nil && len(f.o.Keys) > 0 {
			_, wrong := f.m.signedBy(own, f.o.Keys) // report it together with the Site's problems
			return errors.Join(err, wrong)
		}
		f.State = SlotSite
		if f.o.Site.Doc != nil {
			f.NodeName = f.o.Site.Doc.NodeName
		}
		if f.o.Site.Inventory != nil {
			f.State = SlotInventory
		}
	} else {
		// Read the slot only once: no digest covers it, so another read might return unchecked
		// bytes.
		if f.slot = f.o.Slot; f.slot == nil {
			f.slot = make([]byte, p.Size)
			if _, err := io.ReadFull(f.m.section(p), f.slot); err != nil {
				return fmt.Errorf("reading the slot: %w", err)
			}
		}
		own, _ := slotState(bytes.NewReader(f.slot))
		if f.State = own.State; f.State == SlotDamaged {
			return fmt.Errorf("%s: name a Site (--site), or %s", own.Error, own.Fix)
		}
		if own.Site != nil {
			f.NodeName = own.Site.NodeName
		}
		f.Slot, err = slot.ReadInfo(bytes.NewReader(f.slot))
	}
	if err == nil && f.Slot.Golden == "" {
		return errors.New("there is no golden digest to verify with, since the slot was damaged when it was stamped: use a copy of the golden image, or build it again")
	}
	if err != nil || len(f.o.Keys) == 0 {
		return err
	}
	if _, err = f.m.signedBy(f.Slot, f.o.Keys); err != nil {
		return err
	}
	if err = slot.Strays(bytes.NewReader(f.slot)); err != nil || f.o.Site != nil {
		return err
	}
	// If keys are required, rebuild the slot from edgebake's files, so that firmware finds no
	// others.
	f.slot, err = slot.Remake(bytes.NewReader(f.slot))
	return err
}

// identity gives the disk its own GUIDs, so that two disks with the same image in one machine are
// not mistaken for each other.
func (f *Flash) identity() error {
	f.Table = gpt.Table{GUID: disk.RandomGUID(f.o.Random), Size: f.o.Size, SectorSize: f.m.table.SectorSize}
	if rest := f.Table.Size % f.Table.SectorSize; rest != 0 {
		f.Table.Size -= rest // a file may have any size
	}
	var err error
	if f.edits, f.Shared, err = f.ownEntries(f.m); err != nil {
		return fmt.Errorf("flashing image %s: %w", f.m.path, err)
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

// ownEntries returns the edits that change the boot entries of m to the disk's own GUIDs. shared
// means that the entries cannot be edited.
func (f *Flash) ownEntries(m *Image) (edits []edit, shared bool, err error) {
	var own []guidChange
	for _, p := range m.info.Partitions {
		own = append(own, guidChange{p.Label, p.GUID, disk.PartitionGUID(f.Table.GUID, p.Label)})
	}
	edits, named, err := m.rename(own)
	if err != nil || !named {
		return nil, true, err
	}
	slices.SortFunc(edits, func(a, b edit) int { return cmp.Compare(a.off, b.off) })
	return edits, false, nil
}
