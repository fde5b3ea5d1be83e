package media

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// An installer is a disk that contains an image as a file, and boots with the image's own boot
// loader, kernel and initrd.

// Payload is the image in an installer: a compressed file with a Site in its slot. The image's own
// file is not changed: ReadAt applies patches to it.
type Payload struct {
	Image ondisk.ImageInfo
	Slot  ondisk.SlotInfo
	// State is the state of the slot: SlotGolden, SlotSite or SlotInventory.
	State string
	// Need is the smallest size of a target disk in bytes.
	Need int64
	// Sector is the sector size of the target disks in bytes.
	Sector int64
	// SlotSum is the SHA-256 of the slot in hex, since the golden digest does not cover the slot.
	SlotSum string

	f       *Flash
	patches []edit // changes to the compressed file that replace the slot
	system  func() (*ext4.Reader, error)
}

// OpenPayload opens an image and checks the Site against it, as PrepareFlash does.
func OpenPayload(file string, site *Site, o StampOptions, keys []string) (*Payload, error) {
	f, err := PrepareFlash(file, FlashOptions{Site: site, Stamp: o, Keys: keys, Size: 1 << 62})
	if err != nil {
		return nil, err
	}
	p := &Payload{Image: f.Image, Slot: f.Slot, State: f.State, Need: f.End + tailRoom, Sector: f.m.table.SectorSize, f: f}
	p.system = sync.OnceValues(p.openSystem)
	if err := p.prepareSlot(); err != nil {
		f.Close()
		return nil, fmt.Errorf("making an installer of image %s: %w", file, err)
	}
	return p, nil
}

// Close closes the image.
func (p *Payload) Close() { p.f.Close() }

// prepareSlot computes SlotSum, and the patches that replace the slot in the compressed file.
func (p *Payload) prepareSlot() error {
	m := p.f.m
	if boards := p.Image.Boards; len(boards) > 0 {
		return fmt.Errorf("the image is for %s, whose firmware cannot start installers: write the image to the board's card or drive with edgebake flash", strings.Join(boards, " and "))
	}
	sum := sha256.Sum256(p.f.slot)
	p.SlotSum = hex.EncodeToString(sum[:])
	if m.z == nil {
		return nil // Verify compresses the image first
	}
	part, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return err
	}
	own := make([]byte, part.Size)
	if _, err := io.ReadFull(m.section(part), own); err != nil {
		return fmt.Errorf("reading the slot: %w", err)
	}
	// PrepareFlash made a new slot if there is a Site or if keys are required.
	if !bytes.Equal(own, p.f.slot) {
		if p.patches, err = m.slotEdits(part, p.f.slot); err != nil {
			return err
		}
	}
	return nil
}

// compress replaces a raw image with a compressed copy in a temporary file that has no name.
func (p *Payload) compress(ctx context.Context, progress func(done, total int64)) error {
	path := p.f.m.path
	tmp, err := p.f.m.PackFile(ctx, progress)
	if err != nil {
		return err
	}
	m, err := readFile(tmp, path)
	if err != nil {
		tmp.Close()
		return err
	}
	p.f.m.Close()
	p.f.m, p.system = m, sync.OnceValues(p.openSystem)
	return p.prepareSlot()
}

// slotEdits returns the changes that stamping makes to a compressed file.
func (m *Image) slotEdits(p gpt.Partition, img []byte) ([]edit, error) {
	w := &editor{}
	err := m.putFrames(w, p, img)
	return w.edits, err
}

// editor records all writes as edits.
type editor struct{ edits []edit }

func (w *editor) WriteAt(b []byte, off int64) (int, error) {
	w.edits = append(w.edits, edit{off: off, b: bytes.Clone(b)})
	return len(b), nil
}

// Verify reads the whole image and compares its golden digest, so that damage is found before the
// installer is used. It first compresses a raw image.
func (p *Payload) Verify(ctx context.Context, progress func(step string, done, total int64)) error {
	of := func(step string) func(done, total int64) {
		return func(done, total int64) {
			if progress != nil {
				progress(step, done, total)
			}
		}
	}
	if !p.Compressed() {
		if err := p.compress(ctx, of("compressing")); err != nil {
			return fmt.Errorf("compressing image %s: %w", p.f.m.path, err)
		}
	}
	got, err := disk.Digests(ctx, disk.Source{Read: p.f.m.chunk, Progress: of("image")}, p.f.m.parts())
	if err != nil && ctx.Err() == nil {
		err = unreadable(err)
	}
	if err == nil && got.Golden != p.Slot.Golden {
		err = fmt.Errorf("%w: the image is damaged, or has booted; copy or build it again", notAsBuilt(got, p.Slot))
	}
	if err != nil {
		return fmt.Errorf("verifying image %s: %w", p.f.m.path, err)
	}
	return nil
}

// Compressed reports whether the image is compressed. Verify compresses a raw image.
func (p *Payload) Compressed() bool { return p.f.m.z != nil }

// Size returns the size of the compressed file in bytes.
func (p *Payload) Size() int64 { return p.f.m.stored }

// ReadAt reads the compressed file, with the payload's slot in it.
func (p *Payload) ReadAt(b []byte, off int64) (int, error) {
	n, err := p.f.m.src.ReadAt(b, off)
	apply(p.patches, b[:n], off)
	return n, err
}

// ESPFile reads a file of the EFI system partition.
func (p *Payload) ESPFile(name string) ([]byte, error) { return p.f.m.espFile(name) }

// ESPFiles lists the files of a directory of the EFI system partition.
func (p *Payload) ESPFiles(dir string) ([]string, error) {
	fsys, err := p.f.m.esp()
	if err != nil {
		return nil, err
	}
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if !e.Dir {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// SystemFile reads a file of the root file system.
func (p *Payload) SystemFile(name string) ([]byte, error) {
	r, err := p.system()
	if err != nil {
		return nil, err
	}
	return r.ReadFile(name)
}

func (p *Payload) openSystem() (*ext4.Reader, error) {
	part, err := p.f.m.partition(ondisk.LabelRootA)
	if err != nil {
		return nil, err
	}
	r, err := ext4.Open(p.f.m.section(part))
	if err != nil {
		return nil, fmt.Errorf("reading partition %s: %w: the image is damaged; copy or build it again", ondisk.LabelRootA, err)
	}
	return r, nil
}

// PrepareInstaller prepares to write an installer to a stick. An installer is a raw disk image, but
// has no slot and no golden digest. Flash.Write works as for an image: it reads the stick back, and
// marks an incomplete stick as unfinished.
func PrepareInstaller(file string, o FlashOptions) (*Flash, error) {
	r, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	m := &Image{f: r, src: r, path: file}
	f := &Flash{m: m, o: o, kind: flashInstaller, zeros: make([]byte, disk.Align)}
	f.zeroSum = sha256.Sum256(f.zeros)
	if err = m.readDisk(); err == nil {
		err = errors.Join(f.layout(), f.fits())
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	f.Table = *m.table
	f.Table.Size = o.Size - o.Size%m.table.SectorSize
	return f, nil
}

// DiskContent describes the content of a disk.
type DiskContent struct {
	// Unfinished means that flashing the disk was interrupted.
	Unfinished bool
	// Ours means that the disk has the partitions of an edgebake image.
	Ours bool
	// Name and Golden describe the image. They are empty if they cannot be read.
	Name, Golden string
	// GUID is the GUID of the disk.
	GUID string
	// ESP is the EFI system partition, and ESPNumber its number, or 0 if there is none.
	ESP       gpt.Partition
	ESPNumber int
	Sector    int64
}

// ReadDiskContent describes the content of a disk. It returns an error only if it cannot read the
// disk.
func ReadDiskContent(file string) (DiskContent, error) {
	f, err := os.Open(file)
	if err != nil {
		return DiskContent{}, err
	}
	m := &Image{f: f, src: f, path: file}
	defer m.Close()
	switch err := m.readDisk(); {
	case errors.Is(err, ErrUnfinished):
		return DiskContent{Unfinished: true}, nil
	case m.table == nil && isDeviceError(err):
		return DiskContent{}, err
	case m.table == nil:
		return DiskContent{}, nil // empty, or not an edgebake disk
	}
	found := DiskContent{GUID: m.table.GUID, Sector: m.table.SectorSize}
	labels := map[string]bool{}
	for i, p := range m.table.Partitions {
		if labels[p.Name] = true; p.Type == gpt.TypeESP && found.ESPNumber == 0 {
			found.ESP, found.ESPNumber = p, i+1
		}
	}
	found.Ours = labels[ondisk.LabelSlot] && labels[ondisk.LabelRootA] && labels[ondisk.LabelData]
	if !found.Ours || m.readInfo() != nil {
		return found, nil
	}
	found.Name = m.info.Name
	if p, err := m.partition(ondisk.LabelSlot); err == nil {
		if info, err := slot.ReadInfo(m.section(p)); err == nil {
			found.Golden = info.Golden
		}
	}
	return found, nil
}

// isDeviceError reports whether err is an error of the device, as opposed to invalid content.
func isDeviceError(err error) bool {
	var e *fs.PathError
	return errors.As(err, &e) && !errors.Is(err, io.EOF)
}

// DiskGUID returns the disk GUID that flashing derives from these random bytes.
func DiskGUID(random [16]byte) string { return disk.RandomGUID(random) }

// ImageSlot is the content of an image's slot.
type ImageSlot struct {
	Info  ondisk.SlotInfo
	Files map[string][]byte
	Bytes []byte // the whole slot
}

// ImageSource is an image to read: a file, or remote data with random access.
type ImageSource struct {
	// Name is the file, or the name of Remote in messages.
	Name   string
	Remote io.ReaderAt // nil for a file
	Size   int64       // size of Remote in bytes
}

func (s ImageSource) open() (*Image, error) {
	if s.Remote == nil {
		return Open(s.Name)
	}
	m := &Image{src: s.Remote, path: s.Name, stored: s.Size}
	m.system = sync.OnceValues(m.openRoot)
	if err := m.read(); err != nil {
		m.Close()
		return nil, fmt.Errorf("reading image %s: %w", s.Name, err)
	}
	return m, nil
}

// PrepareFlashFrom is like PrepareFlash, for an ImageSource.
func PrepareFlashFrom(s ImageSource, o FlashOptions) (*Flash, error) {
	m, err := s.open()
	if err != nil {
		return nil, err
	}
	return prepareFlash(m, o)
}

// ReadImageSlot reads an image's slot. Without a Site, the result has no files.
func ReadImageSlot(from ImageSource) (*ImageSlot, error) {
	m, err := from.open()
	if err != nil {
		return nil, err
	}
	defer m.Close()
	part, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return nil, err
	}
	s := &ImageSlot{Bytes: make([]byte, part.Size)}
	if _, err := m.ReadAt(s.Bytes, part.Start); err != nil {
		return nil, fmt.Errorf("reading the slot of %s: %w", from.Name, err)
	}
	c, err := slot.Read(bytes.NewReader(s.Bytes))
	if err != nil && !errors.Is(err, slot.ErrNoSite) {
		return nil, fmt.Errorf("reading the slot of %s: %w", from.Name, err)
	}
	s.Files = c.Files
	s.Info, err = slot.ReadInfo(bytes.NewReader(s.Bytes))
	return s, err
}
