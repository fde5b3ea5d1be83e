package media

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// Descriptor identifies a golden image: its digest, its description and their signature.
type Descriptor struct {
	Golden    string `json:"golden"`
	Signature string `json:"signature,omitempty"`
	// ImageInfo is the exact text of image.json, which the signature covers.
	ImageInfo []byte `json:"imageInfo"`
}

// SignedBy returns the ID of the first of these minisign public keys that verifies the image's
// signature. It is an error if none does.
func (c *Descriptor) SignedBy(keys []string) (string, error) {
	return slot.VerifyImage(ondisk.SlotInfo{Golden: c.Golden, Signature: c.Signature}, c.ImageInfo, keys)
}

// ErrNotGolden means that an image contains data that its build did not write, which may be secret.
var ErrNotGolden = errors.New("not a golden image")

// LockShared locks the image so that it cannot be stamped until Close.
func (m *Image) LockShared() error {
	if err := lock(m.f, false); err != nil {
		return fmt.Errorf("reading image %s: %w", m.path, err)
	}
	return nil
}

// Descriptor returns the descriptor of an image to be pushed. It rejects an image that is stamped
// or has booted: no digest covers the slot, which may contain secrets.
func (m *Image) Descriptor() (Descriptor, error) {
	var i Info
	if err := m.readSlot(&i); err != nil {
		return Descriptor{}, err
	}
	who := "a Site"
	if i.Slot.Site != nil && i.Slot.Site.NodeName != "" {
		who = "the Site " + i.Slot.Site.NodeName
	}
	const fix = "use the golden image that it was made from, and stamp copies of that"
	if err := m.neverFlashed(); err != nil {
		return Descriptor{}, fmt.Errorf("%w: %w: use the image that was written to this disk", ErrNotGolden, err)
	}
	switch s := i.Slot; {
	case s.State == SlotDamaged:
		return Descriptor{}, fmt.Errorf("%w: the slot cannot be read (%s): use a copy of the golden image, or build it again", ErrNotGolden, s.Error)
	case s.State == SlotInventory:
		return Descriptor{}, fmt.Errorf("%w: the image is stamped with an Inventory, which has join tokens: %s", ErrNotGolden, fix)
	case s.State == SlotSite:
		return Descriptor{}, fmt.Errorf("%w: the image is stamped with %s, which has a join token: %s", ErrNotGolden, who, fix)
	case len(s.Files) > 0:
		return Descriptor{}, fmt.Errorf("%w: the slot has %s, which no golden image has: %s", ErrNotGolden, s.Files[0].Name, fix)
	case s.Report != "":
		return Descriptor{}, fmt.Errorf("%w: a machine has booted the image and wrote a report into it: %s", ErrNotGolden, fix)
	case s.Golden == "":
		return Descriptor{}, fmt.Errorf("%w: the slot has no golden digest: use a copy of the golden image, or build it again", ErrNotGolden)
	}
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return Descriptor{}, err
	}
	err = errors.Join(slot.Strays(m.section(p)), leftovers(m.section(p)))
	if err == nil {
		err = slot.AsMade(m.section(p))
	}
	if err != nil {
		return Descriptor{}, fmt.Errorf("%w: %w", ErrNotGolden, err)
	}
	info, err := slot.ReadInfo(m.section(p))
	if err != nil {
		return Descriptor{}, err
	}
	b, err := m.espFile(ondisk.ESPImageInfo)
	return Descriptor{Golden: info.Golden, Signature: info.Signature, ImageInfo: b}, err
}

// neverFlashed returns an error for a copy of a flashed disk. Such a disk has its own GUIDs. A
// larger one may also have old data after the last partition, which no digest covers.
func (m *Image) neverFlashed() error {
	if m.ownGUIDs() {
		return errors.New("this is a flashed disk with its own GUIDs")
	}
	end := int64(0)
	for _, p := range m.table.Partitions {
		end = max(end, p.Start+p.Size)
	}
	if m.size != m.table.Size || m.size-end > disk.Align {
		return fmt.Errorf("the image is on a larger disk, of %s, and old data after the image would be pushed too: push the image file", bytesize.MiB(m.size))
	}
	return nil
}

// leftovers returns an error if the slot's free clusters are not empty. They may contain a deleted
// Site, with its secrets.
func leftovers(slot *io.SectionReader) error {
	b := make([]byte, slot.Size())
	if _, err := io.ReadFull(slot, b); err != nil {
		return err
	}
	if hasToken(b) || bytes.Contains(b, []byte(" PRIVATE KEY-----")) {
		return errors.New("a Site was deleted from the slot, and its token or keys can still be read there: use the golden image that this image was made from")
	}
	fsys, err := fat.Open(bytes.NewReader(b))
	if err == nil && fsys.Size() != slot.Size() {
		err = fmt.Errorf("the slot's file system has %d bytes, expected %d: copy or build the image again", fsys.Size(), slot.Size())
	}
	if err != nil {
		return err
	}
	// Other secrets, such as a password in an Ignition config, cannot be recognized. Therefore all
	// free clusters must be zero.
	return fsys.EachFree(func(x fat.Extent) error {
		if !seekable.IsZero(b[x.Off:][:x.Len]) {
			return errors.New("a file was deleted from the slot, and can still be read there: use the golden image that this image was made from")
		}
		return nil
	})
}

// hasToken reports whether b contains a bootstrap token of kubeadm: six characters, a dot and
// sixteen characters, which are letters or digits. Searching for dots is much faster than a regular
// expression.
func hasToken(b []byte) bool {
	const id, secret = 6, 16
	for from := 0; ; {
		i := bytes.IndexByte(b[from:], '.')
		if i < 0 {
			return false
		}
		dot := from + i
		from = dot + 1
		begin, end := dot-id, dot+1+secret
		if begin < 0 || end > len(b) || begin > 0 && isWord(b[begin-1]) || end < len(b) && isWord(b[end]) {
			continue
		}
		if allOf(b[begin:dot], isTokenByte) && allOf(b[dot+1:end], isTokenByte) {
			return true
		}
	}
}

func isTokenByte(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }

func isWord(c byte) bool { return isTokenByte(c) || c >= 'A' && c <= 'Z' || c == '_' }

func allOf(b []byte, is func(byte) bool) bool {
	for _, c := range b {
		if !is(c) {
			return false
		}
	}
	return true
}

// Frames returns the offsets in the file at which the frames of a compressed image end, or nil for
// a raw image.
func (m *Image) Frames() []int64 {
	if m.z == nil {
		return nil
	}
	ends := make([]int64, m.z.Frames())
	for i := range ends {
		e := m.z.Entry(i)
		ends[i] = e.Offset + e.Compressed
	}
	return ends
}

// Stored returns the size of the image's file in bytes.
func (m *Image) Stored() int64 { return m.stored }

// File returns the image's file, raw or compressed.
func (m *Image) File() io.ReaderAt { return m.f }

// PackFile compresses a raw image into a temporary file that has no name.
func (m *Image) PackFile(ctx context.Context, progress func(done, total int64)) (*os.File, error) {
	dir := os.TempDir()
	f, err := os.CreateTemp(dir, ".edgebake-*")
	if err != nil {
		return nil, fmt.Errorf("%w: set TMPDIR to a directory with enough space, or build the image as .raw.zst", err)
	}
	os.Remove(f.Name())
	if err := m.Pack(ctx, f, progress); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w; set TMPDIR to another directory, or build the image as .raw.zst", file.Explain(err, dir))
	}
	return f, nil
}

// Pack compresses a raw image into the empty file out, in the same way as a build. It does not sign
// the chunk index.
func (m *Image) Pack(ctx context.Context, out disk.File, progress func(done, total int64)) error {
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return err
	}
	info, err := slot.ReadInfo(m.section(p))
	if err != nil {
		return err
	}
	done := int64(0)
	return disk.Compress(ctx, out, disk.Archive{
		Size: m.size, Parts: m.info.Partitions,
		Read: func(b []byte, off int64) (bool, error) {
			_, zero, err := m.chunk(b, off, int64(len(b)))
			return zero, err
		},
		Slot: func() ([]byte, error) {
			b := make([]byte, p.Size)
			_, err := io.ReadFull(m.section(p), b)
			return b, err
		},
		Index: func(parts []chunk.Part) ([]byte, error) {
			x := chunk.Index{Golden: info.Golden, ImageInfo: m.infoText, Parts: parts}
			return x.Seal(nil)
		},
		Stored: func(_, n int64) {
			if done += n; progress != nil {
				progress(done, m.size)
			}
		},
	})
}

// Chunks hashes the chunks of a compressed image, disk.Align bytes each, while the image is
// downloaded.
type Chunks struct {
	z    *seekable.Reader
	sums [][32]byte
	seen []bool // chunks that Take has processed: the output may have older data, so write zeros too
	zero [32]byte
}

// NewChunks returns the Chunks of a compressed image that is being written to f and will have size
// bytes. tail is the end of the file, after the last frame.
func NewChunks(f io.ReaderAt, size int64, tail []byte) (*Chunks, error) {
	z, err := seekable.Open(ahead{f, tail, size - int64(len(tail))}, size)
	if err != nil {
		return nil, err
	}
	if last := z.Entry(z.Frames() - 1); last.Offset+last.Compressed != size-int64(len(tail)) {
		z.Close()
		return nil, errors.New("the frame table is not at the end of the image")
	}
	n := (z.Size() + disk.Align - 1) / disk.Align
	return &Chunks{z: z, sums: make([][32]byte, n), seen: make([]bool, n), zero: sha256.Sum256(make([]byte, disk.Align))}, nil
}

// ahead reads a file while its first part, up to the offset at, is still being written to f. tail
// holds the rest.
type ahead struct {
	f    io.ReaderAt
	tail []byte
	at   int64
}

func (a ahead) ReadAt(p []byte, off int64) (int, error) {
	if off >= a.at {
		return bytes.NewReader(a.tail).ReadAt(p, off-a.at)
	}
	return a.f.ReadAt(p, off)
}

// Close closes the decoder.
func (c *Chunks) Close() { c.z.Close() }

// Len returns the number of chunks, and Size the size of the disk in bytes.
func (c *Chunks) Len() int    { return len(c.sums) }
func (c *Chunks) Size() int64 { return c.z.Size() }

// End returns the offset in the file at which the last frame of chunk i ends.
func (c *Chunks) End(i int) int64 {
	e := c.z.Entry(c.z.Find(min(int64(i+1)*disk.Align, c.z.Size()) - 1))
	return e.Offset + e.Compressed
}

// Take hashes chunk i, whose frames must have arrived. If out is not nil, it also writes the chunk
// to out, with holes for zeros. It may be called concurrently, and again if the frames arrived
// again.
func (c *Chunks) Take(i int, buf []byte, out io.WriterAt) error {
	off := int64(i) * disk.Align
	b := buf[:min(disk.Align, c.z.Size()-off)]
	zero, err := c.z.ReadRange(b, off)
	if err != nil {
		return err
	}
	needed := out != nil && (!zero || c.seen[i])
	whole := len(b) == disk.Align
	if zero && (needed || !whole) {
		clear(b)
	}
	if c.sums[i] = c.zero; !zero || !whole {
		c.sums[i] = sha256.Sum256(b)
	}
	if needed {
		_, err = out.WriteAt(b, off)
	}
	c.seen[i] = true
	return err
}

// VerifyChunks does the work of Verify with the digests of chunks that c has already computed.
func (m *Image) VerifyChunks(ctx context.Context, c *Chunks) error {
	if m.z == nil || m.z.Frames() != c.z.Frames() || m.z.Size() != c.Size() {
		return fmt.Errorf("verifying image %s: %w: the frame table of the image differs from the frame table in the config", m.path, ErrNotOurs)
	}
	for i := range c.z.Frames() {
		if m.z.Entry(i) != c.z.Entry(i) {
			return fmt.Errorf("verifying image %s: %w: the frame table of the image differs from the frame table in the config", m.path, ErrNotOurs)
		}
	}
	if err := m.aligned(); err != nil {
		return fmt.Errorf("verifying image %s: %w", m.path, err)
	}
	return m.verifyWith(ctx, func(context.Context) (disk.Digest, error) {
		return disk.DigestOf(m.parts(), func(off, _ int64) [32]byte { return c.sums[off/disk.Align] }), nil
	})
}

// aligned returns an error unless every partition consists of complete chunks.
func (m *Image) aligned() error {
	for _, p := range m.table.Partitions {
		if p.Start%disk.Align != 0 || p.Size%disk.Align != 0 || p.Start < disk.Align || p.Start+p.Size > m.size {
			return misplaced(p)
		}
	}
	return nil
}

func misplaced(p gpt.Partition) error {
	return fmt.Errorf("%w: partition %s has %d bytes at %d, but edgebake makes no such partition", ErrNotOurs, p.Name, p.Size, p.Start)
}

// IsCompressed reports whether a file name has the extension of a compressed image.
func IsCompressed(name string) bool { return strings.HasSuffix(name, ".zst") }
