// Package media works on finished images, raw or .raw.zst, without mounting or unpacking them. It
// stamps Sites, describes contents, verifies images and flashes disks. A raw image may also be a
// block device.
//
// Stamping replaces only the slot. A compressed image stores the slot's frames uncompressed, so the
// new frames have the same size. image.json on the EFI system partition describes what the image
// supports: a Site that it does not support is rejected before anything is written.
package media

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// ErrNotOurs means that a file is not an edgebake image, or only a part of one.
var ErrNotOurs = errors.New("not an edgebake image")

// Formats of an image.
const (
	FormatRaw  = "raw"
	FormatZstd = "raw.zst"
)

// Image is an open image. Several goroutines may read it and encode slots for it.
type Image struct {
	f      *os.File    // nil for a remote image
	src    io.ReaderAt // f, or the remote image
	path   string
	format string
	size   int64 // bytes of the disk
	stored int64 // bytes of the file
	z      *seekable.Reader
	table  *gpt.Table
	info   ondisk.ImageInfo
	// infoText is the text of image.json.
	infoText []byte
	device   bool
	// system returns the image's files, against which Sites are checked. It opens them only once.
	system func() (siteconf.Root, error)
	// edits are applied to all bytes that are read.
	edits []edit
	// borrowed means that Close must not close the file.
	borrowed bool
}

// Open opens an image, or a device that holds one, for reading.
func Open(path string) (*Image, error) { return open(path, os.O_RDONLY) }

// OpenFile opens the image in a file that the caller closes. name is its name in messages.
func OpenFile(f *os.File, name string) (*Image, error) {
	m, err := readFile(f, name)
	if err != nil {
		return nil, err
	}
	m.borrowed = true
	return m, nil
}

// open opens an image and reads its description.
func open(path string, flag int) (*Image, error) {
	return openWith(path, flag, func(*os.File) error { return nil })
}

// openLocked locks an image and then opens it. It must lock first: open reads the checksums of the
// slot's frames, which stamping changes.
func openLocked(path string, flag int, exclusive bool) (*Image, error) {
	return openWith(path, flag, func(f *os.File) error { return lock(f, exclusive) })
}

func openWith(path string, flag int, ready func(*os.File) error) (*Image, error) {
	if st, err := os.Stat(path); err == nil && flag != os.O_RDONLY && st.Mode()&fs.ModeDevice != 0 {
		// With O_EXCL, opening a device that is in use fails: the cache of a mounted partition
		// would overwrite the slot.
		flag |= os.O_EXCL
	}
	f, err := os.OpenFile(path, flag, 0)
	if errors.Is(err, syscall.EBUSY) {
		return nil, fmt.Errorf("opening the image: %w: another program or a mount uses the device: unmount its partitions first", err)
	}
	if err != nil {
		if errors.Is(err, fs.ErrPermission) && flag != os.O_RDONLY {
			return nil, fmt.Errorf("opening the image: %w: changing it in place needs write permission", err)
		}
		if errors.Is(err, fs.ErrNotExist) {
			where := "edgebake build makes images"
			if strings.HasPrefix(path, "/dev/") {
				where = "edgebake devices lists the disks"
			}
			err = fmt.Errorf("%w: %s", err, where)
		}
		return nil, fmt.Errorf("opening the image: %w", err)
	}
	if err := ready(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("reading image %s: %w", path, err)
	}
	m, err := readFile(f, path)
	if err != nil {
		f.Close()
	}
	return m, err
}

// readFile reads the description of an image from an open file. It never closes the file.
func readFile(f *os.File, path string) (*Image, error) {
	m := &Image{f: f, src: f, path: path}
	m.system = sync.OnceValues(m.openRoot)
	if err := m.read(); err != nil {
		if m.z != nil {
			m.z.Close()
		}
		return nil, fmt.Errorf("reading image %s: %w", path, err)
	}
	return m, nil
}

// Close closes the image.
func (m *Image) Close() {
	if m.z != nil {
		m.z.Close()
	}
	if m.f != nil && !m.borrowed {
		m.f.Close()
	}
}

// foreign lists kinds of files that people mistake for images, with their first bytes.
var foreign = []struct{ magic, is string }{
	{"QFI\xfb", "a qcow2 image: convert it with qemu-img convert -O raw"},
	{"\x1f\x8b", "compressed with gzip: decompress it first"},
	{"\xfd7zXZ\x00", "compressed with xz: decompress it first"},
	{"BZh", "compressed with bzip2: decompress it first"},
	{"PK\x03\x04", "a zip archive: unpack it first"},
	{"KDMV", "a vmdk image: convert it with qemu-img convert -O raw"},
	{"conectix", "a vhd image: convert it with qemu-img convert -O raw"},
}

// Info returns the content of image.json.
func (m *Image) Info() ondisk.ImageInfo { return m.info }

func (m *Image) read() error {
	if err := m.readDisk(); err != nil {
		return err
	}
	return m.readInfo()
}

// readDisk reads the partition table of a raw or compressed disk.
func (m *Image) readDisk() error {
	if err := m.measure(); err != nil {
		return err
	}
	m.size, m.format = m.stored, FormatRaw
	head := make([]byte, 16)
	if n, err := m.src.ReadAt(head, 0); err != nil && err != io.EOF {
		return err
	} else {
		head = head[:n]
	}
	if strings.HasPrefix(unfinished, string(head)) && len(head) == cap(head) {
		return ErrUnfinished
	}
	for _, x := range foreign {
		if len(head) >= len(x.magic) && string(head[:len(x.magic)]) == x.magic {
			return fmt.Errorf("%w: it is %s", ErrNotOurs, x.is)
		}
	}
	if seekable.IsZstd(head) {
		m.format = FormatZstd
		z, err := seekable.Open(m.src, m.stored)
		if err != nil {
			return m.notSeekable(err)
		}
		m.z, m.size = z, z.Size()
	} else if m.f == nil {
		return fmt.Errorf("%w: it is not compressed", ErrNotOurs)
	}
	var err error
	m.table, err = gpt.Read(m, m.size)
	if cut := (*gpt.TruncatedError)(nil); errors.As(err, &cut) && ours(m) != nil {
		return &partError{fmt.Errorf("the edgebake image is truncated: it has %d of %d bytes: copy it again", cut.Size, cut.Disk)}
	} else if what := m.relative(); err != nil && what != "" {
		return fmt.Errorf("%w: it is %s", ErrNotOurs, what)
	} else if errors.Is(err, gpt.ErrNoTable) {
		return fmt.Errorf("%w: %w; name an image that edgebake build made", ErrNotOurs, err)
	} else if err != nil {
		return fmt.Errorf("%w: %w", ErrNotOurs, err)
	}
	return nil
}

// notSeekable returns the error for a compressed file that seekable cannot open.
func (m *Image) notSeekable(err error) error {
	var format *seekable.FormatError
	disk := make([]byte, gpt.HeadSize(gpt.Sector4096))
	if !errors.As(err, &format) || seekable.Head(m.src, m.stored, disk) != nil || ours(bytes.NewReader(disk)) == nil {
		return fmt.Errorf("%w: %w", ErrNotOurs, err)
	}
	head := make([]byte, min(seekable.FrameHead, m.stored))
	if _, err := m.src.ReadAt(head, 0); err != nil {
		return err
	}
	switch {
	case format.Newer:
		return &partError{fmt.Errorf("%s: use the edgebake that made it, or a newer one", format.Problem)}
	case format.NoTable && seekable.IsFrame(head):
		return &partError{fmt.Errorf("the edgebake image is truncated: it has %d bytes, and the table at its end is missing: copy it again", m.stored)}
	case format.NoTable:
		return &partError{errors.New("another program compressed this edgebake image: decompress it first (zstd -d), or build it again")}
	}
	return &partError{fmt.Errorf("the edgebake image is damaged: %s: copy or build it again", format.Problem)}
}

// relative describes another kind of file that edgebake makes, such as a slot, or returns "".
// People confuse these files with images.
func (m *Image) relative() string {
	if m.size == ondisk.SlotSize {
		if _, err := slot.ReadInfo(io.NewSectionReader(m, 0, m.size)); err == nil {
			return ASlot
		}
	}
	const volume = 32 << 10 // offset of an ISO 9660 file system
	head := make([]byte, 64)
	if _, err := m.ReadAt(head, volume); err != nil || string(head[1:6]) != "CD001" {
		return ""
	}
	if strings.HasPrefix(string(head[40:]), "EDGEBAKE_") {
		return "an installer (edgebake installer --iso), which contains an image: " + insteadOfInstaller
	}
	return "an ISO image"
}

// ASlot describes a slot file and its use, in errors about a slot file in place of another file.
const ASlot = "a slot (edgebake stamp --slots): edgebake stamp IMAGE --slot FILE writes it into an image or disk"

const insteadOfInstaller = "boot a machine from it, or name the image that it was made from"

// installer describes the disk of an installer, which has no slot. It returns "" for other disks.
func (m *Image) installer() string {
	if _, err := m.partition(ondisk.LabelInstall); err == nil {
		return "an installer (edgebake flash --installer), which contains an image: " + insteadOfInstaller
	}
	if esp, err := m.esp(); err == nil {
		if _, err := esp.Stat(ondisk.InstallArchive); err == nil {
			return fmt.Sprintf("the boot disk of an installer (edgebake installer --netboot), which firmware fetches: name the %s next to it", ondisk.InstallImage)
		}
	}
	return ""
}

// partError is the error for an edgebake image that is incomplete or damaged.
type partError struct{ error }

func (e *partError) Unwrap() error        { return e.error }
func (e *partError) Is(target error) bool { return target == ErrNotOurs }

// ours returns the partition table of an edgebake image from its first bytes, or nil for any other
// file.
func ours(head io.ReaderAt) *gpt.Table {
	t, err := gpt.Read(paddedReader{head}, 1<<50)
	if err != nil || !slices.ContainsFunc(t.Partitions, func(p gpt.Partition) bool { return p.Name == ondisk.LabelSlot }) {
		return nil
	}
	return t
}

// paddedReader reads as zeros after the end of the underlying reader.
type paddedReader struct{ io.ReaderAt }

func (r paddedReader) ReadAt(p []byte, off int64) (int, error) {
	n, err := r.ReaderAt.ReadAt(p, off)
	clear(p[n:])
	if err == io.EOF {
		err = nil
	}
	return len(p), err
}

// measure determines the size of the file or device.
func (m *Image) measure() error {
	if m.f == nil {
		return nil
	}
	st, err := m.f.Stat()
	if err != nil {
		return err
	}
	if st.IsDir() {
		return fmt.Errorf("%w: it is a directory", ErrNotOurs)
	}
	m.device = st.Mode()&fs.ModeDevice != 0
	// Stat reports no size for a block device, but seeking finds its end.
	m.stored, err = m.f.Seek(0, io.SeekEnd)
	return err
}

// ReadAt reads the disk and applies the edits.
func (m *Image) ReadAt(p []byte, off int64) (n int, err error) {
	if m.z != nil {
		n, err = m.z.ReadAt(p, off)
	} else {
		n, err = m.src.ReadAt(p, off)
	}
	apply(m.edits, p[:n], off)
	return n, err
}

// partition returns the partition with a label.
func (m *Image) partition(label string) (gpt.Partition, error) {
	for _, p := range m.table.Partitions {
		if p.Name == label {
			return p, nil
		}
	}
	return gpt.Partition{}, fmt.Errorf("%w: it has no partition %s; name an image that edgebake build made", ErrNotOurs, label)
}

func (m *Image) section(p gpt.Partition) *io.SectionReader {
	return io.NewSectionReader(m, p.Start, p.Size)
}

// readInfo reads image.json from the EFI system partition.
func (m *Image) readInfo() error {
	slot, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		if what := m.installer(); what != "" {
			return fmt.Errorf("%w: it is %s", ErrNotOurs, what)
		}
		return err
	}
	// Reject a second partition with the slot's name. No digest covers it, and another program
	// might use it as the slot.
	for _, p := range m.table.Partitions {
		if p.Name == ondisk.LabelSlot && p.GUID != slot.GUID {
			return fmt.Errorf("%w: it has two partitions %s", ErrNotOurs, ondisk.LabelSlot)
		}
	}
	if slot.Size != ondisk.SlotSize || slot.Start%disk.Align != 0 {
		return fmt.Errorf("%w: its partition %s has %d bytes at %d", ErrNotOurs, ondisk.LabelSlot, slot.Size, slot.Start)
	}
	m.infoText, err = m.espFile(ondisk.ESPImageInfo)
	if err != nil {
		return fmt.Errorf("%w: %w; it is damaged, copy or build it again", ErrNotOurs, err)
	}
	if err := json.Unmarshal(m.infoText, &m.info); err != nil {
		return fmt.Errorf("%s of the image is damaged: %w: copy or build the image again", ondisk.ESPImageInfo, err)
	}
	if m.info.Version < 1 {
		return fmt.Errorf("%s of the image has no version: it is damaged, copy or build the image again", ondisk.ESPImageInfo)
	}
	if m.info.Version > ondisk.ImageInfoVersion {
		return fmt.Errorf("a newer edgebake made this image: %s has version %d, but this edgebake supports only version %d: use the edgebake that made it, or a newer one", ondisk.ESPImageInfo, m.info.Version, ondisk.ImageInfoVersion)
	}
	return nil
}

// espFile reads a file of the EFI system partition. It limits the size, because no signature has
// been verified yet.
func (m *Image) espFile(name string) ([]byte, error) {
	fsys, err := m.esp()
	if err != nil {
		return nil, err
	}
	e, err := fsys.Stat(name)
	if err != nil {
		return nil, err
	}
	limit := int64(fat.MaxRead)
	switch {
	case name == ondisk.ESPImageInfo:
		limit = maxInfo
	case name == ondisk.ESPSBOM:
		limit = maxList
	case strings.HasSuffix(name, ".conf"):
		limit = 64 << 10
	}
	if e.Size > limit {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are allowed", name, e.Size, limit)
	}
	return fsys.Read(e)
}

const (
	maxInfo = 8 << 20  // size limit of image.json in bytes
	maxList = 64 << 20 // size limit of an SBOM and of dpkg's lists in bytes
)

func (m *Image) esp() (*fat.Reader, error) {
	p, err := m.partition(ondisk.LabelESP)
	if err != nil {
		return nil, err
	}
	fsys, err := fat.Open(m.section(p))
	if err != nil {
		return nil, fmt.Errorf("reading partition %s: %w", ondisk.LabelESP, err)
	}
	return fsys, nil
}

// chunk reads n bytes at off, as disk.Source.Read requires. It may use buf.
func (m *Image) chunk(buf []byte, off, n int64) ([]byte, bool, error) {
	if m.z == nil && isHole(m.f, off, n) {
		return nil, true, nil
	}
	b := buf[:n]
	if m.z != nil {
		zero, err := m.z.ReadRange(b, off)
		if err != nil || zero {
			return nil, zero, err
		}
		apply(m.edits, b, off)
		return b, false, nil
	}
	_, err := m.ReadAt(b, off)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return b, false, err
}

// hole estimates without reading whether the i-th chunk is zero.
func (m *Image) hole(i int) bool {
	if m.z != nil {
		return m.z.SeemsZero(int64(i)*disk.Align, disk.Align)
	}
	return isHole(m.f, int64(i)*disk.Align, disk.Align)
}
