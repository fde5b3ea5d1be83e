package media

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// Site is a Site or an Inventory to be stamped, with the other files of the slot.
type Site struct {
	// Doc is a single Site. Inventory contains several Sites for one slot. One of them is set.
	Doc       *configs.Site
	Inventory *configs.Inventory
	// Source is the document that Doc or Inventory was read from.
	Source SiteSource
	// Files are the other files of the slot: config.ign, and files in files/ and pki/.
	Files map[string][]byte
	// DefaultSpread is the default of spreadSeconds in the Inventory that Doc comes from. If Doc
	// has the default, images that do not know the field get a Site without it.
	DefaultSpread int
}

// SlotFiles returns the files of the slot, including the Site or the Inventory.
func (s Site) SlotFiles() (map[string][]byte, error) { return s.slotFiles(configs.SiteFields()) }

// slotFiles is like SlotFiles, for an image that knows only the given fields of a Site.
func (s Site) slotFiles(known []string) (map[string][]byte, error) {
	files := map[string][]byte{}
	maps.Copy(files, s.Files)
	var err error
	if s.Doc != nil {
		files[ondisk.SlotSite], err = configs.EncodeSlotFor(s.Doc, known)
	}
	if s.Inventory != nil && err == nil {
		files[ondisk.SlotInventory], err = configs.EncodeSlotInventory(s.Inventory)
	}
	return files, err
}

// version returns the version of the document, such as "v1alpha1".
func (s Site) version() string {
	if s.Doc != nil {
		return path.Base(s.Doc.APIVersion)
	}
	return path.Base(s.Inventory.APIVersion)
}

// SiteSource contains the source text of the documents, so that errors can name a place in them.
type SiteSource struct {
	Name     string // file of the Site or Inventory; if empty, errors name only the field
	Data     []byte
	Ignition string // file of the Ignition config
}

// StampOptions configures stamping.
type StampOptions struct {
	// Output is the file to create. If it is empty, the image is stamped in place.
	Output string
	// Force replaces an existing Output.
	Force bool
	// Now is the time of stamping. The node never sets its clock to an earlier time.
	Now time.Time
	// Undated leaves the time of stamping out of the slot.
	Undated bool
}

// Stamped is the result of Stamp.
type Stamped struct {
	Path  string
	Image ondisk.ImageInfo
	// Slot is the new description in the slot. Golden is empty if the old slot could not be read;
	// then Verify has nothing to compare with.
	Slot ondisk.SlotInfo
	// Before is the state of the slot before Unstamp. Stamp does not set it.
	Before string
}

// Stamp writes a Site into an image's slot.
func Stamp(ctx context.Context, path string, s Site, o StampOptions) (*Stamped, error) {
	inPlace := o.Output == ""
	if !inPlace && file.Same(path, o.Output) {
		return nil, fmt.Errorf("stamping image %s: %w: name another file, or change the image itself (--in-place)", path, errIsImage(o.Output))
	}
	flag := os.O_RDONLY
	if inPlace {
		flag = os.O_RDWR
	}
	m, err := openLocked(path, flag, inPlace)
	if inPlace && errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; or stamp a copy (--output)", err)
	}
	if err != nil {
		return nil, err
	}
	defer m.Close()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return nil, fmt.Errorf("stamping image %s: %w", path, err)
	}
	c, img, err := m.encodeSlot(s, o)
	if err != nil {
		return nil, m.stamping(err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	result := &Stamped{Path: path, Image: m.info, Slot: c.Info}
	if inPlace {
		return result, m.stampInPlace(p, img)
	}
	result.Path = o.Output
	return result, m.stampCopy(ctx, p, img, o)
}

// stampInPlace replaces the slot of the open image.
func (m *Image) stampInPlace(p gpt.Partition, img []byte) error {
	// The slot of a sparse file may be a hole: find a full disk before overwriting the old slot.
	err := m.reserve(p)
	if err == nil {
		err = m.hide()
	}
	if err == nil {
		err = m.put(window{m.f, p.Start, true}, p, img)
		if m.device && errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: it is read-only: look for a write-protect switch", err)
		}
	}
	if err != nil {
		return fmt.Errorf("stamping image %s: %w", m.path, file.Explain(err, filepath.Dir(m.path)))
	}
	return nil
}

// Unstamp writes a slot as the build made it, without a Site, an Ignition config or a machine's
// report.
func Unstamp(path string) (*Stamped, error) {
	m, err := openLocked(path, os.O_RDWR, true)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return nil, fmt.Errorf("unstamping image %s: %w", path, err)
	}
	before, _ := slotState(m.section(p))
	info := m.goldenSlot(p)
	img, err := slot.Encode(slot.Contents{Info: info})
	if err != nil {
		return nil, fmt.Errorf("unstamping image %s: %w", path, err)
	}
	return &Stamped{Path: path, Image: m.info, Slot: info, Before: before.State}, m.stampInPlace(p, img)
}

// goldenSlot returns the description in the slot as the build wrote it.
func (m *Image) goldenSlot(p gpt.Partition) ondisk.SlotInfo {
	info, err := slot.ReadInfo(m.section(p))
	if err != nil || info.Plan != m.info.Plan {
		// The slot is damaged: its digests are lost.
		info = ondisk.SlotInfo{Version: ondisk.SlotInfoVersion, Plan: m.info.Plan}
	}
	info.SiteVersions, info.Stamped = m.info.SiteVersions, 0
	if info.SectorSize == 0 && m.table.SectorSize != gpt.Sector512 {
		info.SectorSize = m.table.SectorSize
	}
	return info
}

// slotOf checks a Site against the image and returns the contents of the new slot.
func (m *Image) slotOf(s Site, o StampOptions) (slot.Contents, error) {
	files, err := m.filesFor(s)
	if err != nil {
		return slot.Contents{}, err
	}
	probs, err := m.serves(s)
	if err := errors.Join(err, append(probs, s.tooLarge(files)...).Err()); err != nil {
		return slot.Contents{}, err
	}
	date, err := m.stampDate(o)
	if err != nil {
		return slot.Contents{}, err
	}
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return slot.Contents{}, err
	}
	info := m.goldenSlot(p)
	info.Stamped = date
	fileTime := o.Now
	if o.Undated {
		fileTime = time.Unix(m.info.SourceDate, 0)
	}
	return slot.Contents{Info: info, Files: files, Time: fileTime}, nil
}

// filesFor returns the files of the slot. It leaves out fields of the Site that the image does not
// support; serves has checked that they have their defaults.
func (m *Image) filesFor(s Site) (map[string][]byte, error) {
	known := m.info.SiteFields
	if known == nil {
		// The image does not list its fields. It may not know spreadSeconds, so leave that field
		// out if it has its default.
		known = configs.SiteFields()
		if s.Doc != nil && s.Doc.SpreadSeconds == s.DefaultSpread {
			known = slices.DeleteFunc(known, func(f string) bool { return f == configs.SpreadField })
		}
	}
	return s.slotFiles(known)
}

// encodeSlot is like slotOf, but also returns the bytes from slot.Encode.
func (m *Image) encodeSlot(s Site, o StampOptions) (slot.Contents, []byte, error) {
	c, err := m.slotOf(s, o)
	if err != nil {
		return c, nil, err
	}
	img, err := slot.Encode(c)
	return c, img, err
}

// tooLarge reports a document that does not fit into a slot. It names the user's file, not the file
// in the slot.
func (s Site) tooLarge(files map[string][]byte) configs.Problems {
	for _, name := range []string{ondisk.SlotSite, ondisk.SlotInventory} {
		if size, limit := int64(len(files[name])), slot.SizeLimit(name); size > limit && s.Source.Name != "" {
			return configs.Problems{{File: s.Source.Name, Msg: fmt.Sprintf("needs %s in a slot, but a slot has only %s for this file: %s", bytesize.Human(size), bytesize.Human(limit), slot.Smaller(name))}}
		}
	}
	return nil
}

// stampDate returns the time of stamping for the slot, or 0. The node never sets its clock to an
// earlier time, so this computer's clock must be plausible.
func (m *Image) stampDate(o StampOptions) (int64, error) {
	first, last := m.info.StampDates()
	now := o.Now.UTC()
	built := time.Unix(m.info.SourceDate, 0).UTC().Format(time.DateOnly)
	switch {
	case o.Undated:
		return 0, nil
	case now.Before(first):
		return 0, fmt.Errorf("this computer's clock shows %s, which is before the image's date (sourceDate %s): set the clock or, if it is right, leave the time out of the slot (--undated); the node's clock is then set to sourceDate at least", now.Format(time.DateOnly), built)
	case now.After(last):
		return 0, fmt.Errorf("this computer's clock shows %s, years after the image's date (sourceDate %s): set the clock or, if it is right, leave the time out of the slot (--undated)", now.Format(time.DateOnly), built)
	}
	return now.Unix(), nil
}

// reserve reserves space in a sparse file for the slot.
func (m *Image) reserve(p gpt.Partition) error {
	if m.device || m.z != nil {
		return nil
	}
	return allocate(m.f, p.Start, p.Size)
}

// hide makes the file readable only by its owner, before secrets are written to it. It does nothing
// for a device.
func (m *Image) hide() error {
	if m.device {
		return nil
	}
	err := file.Hide(m.f)
	switch {
	case errors.Is(err, file.ErrOpen):
		return fmt.Errorf("%w, or stamp a copy (--output)", err)
	case err != nil:
		return fmt.Errorf("other users can read the file, which will contain the Site's secrets, and this user cannot change that (%w): ask its owner to run chmod 600, or stamp a copy (--output)", err)
	}
	return nil
}

// errIsImage returns the error for an output that is the image itself.
func errIsImage(output string) error { return fmt.Errorf("%s is the image itself", output) }

func oneSite(site, inventory bool) error {
	switch {
	case site && inventory:
		return fmt.Errorf("%w: remove one of them", slot.ErrBothSites)
	case !site && !inventory:
		return fmt.Errorf("there is neither a %s nor an %s to stamp", ondisk.SlotSite, ondisk.SlotInventory)
	}
	return nil
}

// reads returns an error unless the image supports the version of the Site document.
func (m *Image) reads(version string) error {
	if slices.Contains(m.info.SiteVersions, version) {
		return nil
	}
	return fmt.Errorf("the image supports Site %s, but this Site is %q: build the image with this edgebake, or stamp with the older edgebake", strings.Join(m.info.SiteVersions, ", "), version)
}

// put writes the slot into a file that has the same format as the image.
func (m *Image) put(w window, p gpt.Partition, img []byte) error {
	if m.z == nil {
		return putRaw(w, w.sync, img)
	}
	if err := m.putFrames(w.f, p, img); err != nil {
		return err
	}
	return w.Sync()
}

// putRaw writes the slot of an uncompressed image.
func putRaw(d slot.Device, inPlace bool, img []byte) error {
	if inPlace {
		return slot.Replace(d, img)
	}
	return slot.WriteWhole(d, img)
}

// putFrames replaces the slot's frames in a compressed image. If img is shorter than the slot,
// zeros follow it.
func (m *Image) putFrames(f io.WriterAt, p gpt.Partition, img []byte) error {
	frames, err := m.slotFrames(p)
	if err != nil {
		return err
	}
	var frame []byte
	buf := make([]byte, seekable.FrameSize)
	for _, i := range frames {
		e := m.z.Entry(i)
		b := buf[:e.Size]
		clear(b[copy(b, img[min(int(e.Start-p.Start), len(img)):]):])
		frame = seekable.Raw(frame[:0], b)
		if _, err := f.WriteAt(frame, e.Offset); err != nil {
			return err
		}
		sum := seekable.Sum(b)
		if _, err := f.WriteAt([]byte{byte(sum), byte(sum >> 8), byte(sum >> 16), byte(sum >> 24)}, m.z.SumOffset(i)); err != nil {
			return err
		}
	}
	return nil
}

// slotFrames returns the frames of the slot, which must be uncompressed and contain only the slot.
func (m *Image) slotFrames(p gpt.Partition) (frames []int, err error) {
	end := p.Start + p.Size
	for i := m.z.Find(p.Start); i < m.z.Frames() && m.z.Entry(i).Start < end; i++ {
		e := m.z.Entry(i)
		raw, err := m.z.IsRaw(i)
		if err != nil {
			return nil, err
		}
		if !raw || e.Start < p.Start || e.Start+e.Size > end {
			return nil, fmt.Errorf("%w: its slot is compressed, so another program made this .zst: decompress it with zstd -d and stamp the result", ErrNotOurs)
		}
		frames = append(frames, i)
	}
	return frames, nil
}

// window is the slot in a file or device. In place, each step is synced before the next, so that a
// power cut leaves the old or the new slot. In a compressed image it may leave an unreadable slot,
// because the checksums are in a separate table.
type window struct {
	f    *os.File
	off  int64
	sync bool // the slot is written in place: sync each step
}

func (w window) ReadAt(p []byte, off int64) (int, error) { return w.f.ReadAt(p, w.off+off) }

func (w window) WriteAt(p []byte, off int64) (int, error) { return w.f.WriteAt(p, w.off+off) }

// Coherent reports whether reads see the writes of other programs. For a device, that is not
// certain, since it may also be open under another name, which has its own cache.
func (w window) Coherent() bool {
	st, err := w.f.Stat()
	return err == nil && st.Mode().IsRegular()
}

func (w window) Sync() error {
	if !w.sync {
		return nil
	}
	return w.f.Sync()
}

// stampCopy writes a stamped copy of the image. Only its owner may read it, since it contains
// secrets.
func (m *Image) stampCopy(ctx context.Context, p gpt.Partition, img []byte, o StampOptions) error {
	unpack := m.z != nil && !strings.HasSuffix(o.Output, ".zst")
	if m.z == nil && strings.HasSuffix(o.Output, ".zst") {
		return fmt.Errorf("stamping image %s: %s would have to be compressed, which stamping does not do: name an output that does not end in .zst", m.path, o.Output)
	}
	if err := m.spaceForCopies([]string{o.Output}, unpack); err != nil {
		return m.stamping(err)
	}
	out, err := file.Create(o.Output, 0o600, o.Force)
	if err != nil {
		return err
	}
	defer out.Discard()
	if unpack {
		if err = m.unpack(ctx, out.File); err == nil {
			err = slot.WriteWhole(window{out.File, p.Start, false}, img)
		}
	} else {
		if err = clone(ctx, out.File, m.f, m.stored); err == nil {
			err = m.put(window{out.File, p.Start, false}, p, img)
		}
	}
	if err != nil {
		return fmt.Errorf("stamping image %s into %s: %w", m.path, o.Output, file.Explain(err, filepath.Dir(o.Output)))
	}
	return out.Commit()
}

// unpack writes the uncompressed disk, and leaves holes for zeros.
func (m *Image) unpack(ctx context.Context, out *os.File) error {
	if err := out.Truncate(m.size); err != nil {
		return err
	}
	return disk.Parallel(ctx, m.z.Frames(), func() func(int) error {
		buf := make([]byte, seekable.FrameSize)
		return func(i int) error {
			b, zero, err := m.z.Decode(i, buf)
			if err != nil || zero {
				return err
			}
			_, err = out.WriteAt(b, m.z.Entry(i).Start)
			return err
		}
	})
}

// copyRange copies n bytes at off by reading and writing.
func copyRange(dst, src *os.File, off, n int64) error {
	done, err := io.CopyBuffer(io.NewOffsetWriter(dst, off), io.NewSectionReader(src, off, n), make([]byte, 1<<20))
	if err == nil && done < n {
		err = shorter(src, off+n)
	}
	return err
}

// shorter returns the error for a file that has been truncated to fewer than size bytes.
func shorter(src *os.File, size int64) error {
	return fmt.Errorf("reading %s: %w: it has become shorter than %d bytes: find the program that writes to it", src.Name(), io.ErrUnexpectedEOF, size)
}

// checkLength returns an error if a file has fewer than size bytes.
func checkLength(src *os.File, size int64) error {
	fi, err := src.Stat()
	if err == nil && fi.Size() < size {
		err = shorter(src, size)
	}
	return err
}
