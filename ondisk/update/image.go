// Package update determines which parts of a compressed image an update needs. It reads the image
// with range requests, and finds the frames that a machine lacks. edgebake uses it to report the
// size of a download in advance.
package update

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/seekable"
)

// Errors for images that cannot be used for updates.
var (
	ErrNoIndex = errors.New("the image has no chunk index: build it again as .raw.zst with this edgebake (edgebake build --output NAME.raw.zst)")
	ErrBoard   = errors.New("the image is for boards whose own firmware starts the kernel, and such boards cannot be updated")
)

// Image is a compressed image that is read through range requests.
type Image struct {
	// Body and Signature are the two parts of the frame that contains the index.
	Body      []byte
	Signature string
	// Index is nil until Decode is called.
	Index *chunk.Index
	// Head is the number of bytes that Open has read, and Requests the number of its requests.
	Head     int64
	Requests int

	table *seekable.Reader
}

// maxFrames limits the memory for the table of frames, which is read before the signature is checked.
// Each frame of a file system needs 36 bytes in the index and 12 in the table.
const maxFrames = chunk.MaxIndex / (36 + 12)

// Open reads the table of frames and the index, which it does not decode, from the end of an image
// of size bytes. It makes few requests to r.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	t := &tail{r: r, from: size, size: size}
	i := &Image{}
	if err := t.load(max(0, size-Tail)); err != nil {
		return nil, err
	}
	table, err := seekable.OpenAtMost(t, size, maxFrames)
	if err != nil {
		return nil, err
	}
	table.Close() // the reader was needed only for the table
	i.table = table
	index := table.Extra(chunk.Magic)
	if index == nil {
		return nil, ErrNoIndex
	}
	if index.Size() > chunk.MaxIndex {
		return nil, fmt.Errorf("the chunk index has %d bytes, at most %d are accepted", index.Size(), chunk.MaxIndex)
	}
	content := make([]byte, index.Size())
	if _, err := io.ReadFull(index, content); err != nil {
		return nil, err
	}
	if i.Body, i.Signature, err = chunk.Open(content); err != nil {
		return nil, err
	}
	i.Head, i.Requests = t.size-t.from, t.requests
	return i, nil
}

// Decode decodes the index. It sets Index even if the index does not match the frames, which is an
// error. The caller must verify the signature first.
func (i *Image) Decode() error {
	x, err := chunk.Decode(i.Body)
	if err != nil {
		return err
	}
	i.Index = x
	for _, p := range x.Parts {
		for k, c := range p.Chunks {
			if f := p.Frame + k; f >= i.table.Frames() || i.table.Entry(f).Size != c.Size {
				return fmt.Errorf("chunk %d of partition %s does not match frame %d: the image is damaged; copy or build it again", k, p.Label, f)
			}
		}
	}
	return nil
}

// Place returns the range, in the compressed image, of the frame that contains chunk k of part p.
func (i *Image) Place(p *chunk.Part, k int) Place {
	e := i.table.Entry(p.Frame + k)
	return Place{e.Offset, e.Offset + e.Compressed}
}

// Spans returns the ranges to request for chunks of part p.
func (i *Image) Spans(p *chunk.Part, chunks []int) []Span {
	return Spans(chunks, func(k int) Place { return i.Place(p, k) })
}

// tail reads the end of a file with few requests.
type tail struct {
	r        io.ReaderAt
	from     int64 // offset of b in the file
	b        []byte
	size     int64
	requests int
}

// load reads the bytes between the offset from and the bytes that were already read.
func (t *tail) load(from int64) error {
	if from >= t.from {
		return nil
	}
	if t.size-from > chunk.MaxIndex {
		return fmt.Errorf("the index and frame table at the end of the image have %d bytes, at most %d are accepted", t.size-from, chunk.MaxIndex)
	}
	b := make([]byte, t.size-from)
	t.requests++
	if n, err := t.r.ReadAt(b[:t.from-from], from); int64(n) < t.from-from {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	copy(b[t.from-from:], t.b)
	t.b, t.from = b, from
	return nil
}

func (t *tail) ReadAt(p []byte, off int64) (int, error) {
	if err := t.load(off); err != nil {
		return 0, err
	}
	return bytes.NewReader(t.b).ReadAt(p, off-t.from)
}

// SystemFiles are the files of one system on the EFI system partition: its kernel, its initrd and
// its boot entry.
type SystemFiles struct {
	r     io.ReaderAt
	esp   *fat.Reader
	Dir   string // directory of the kernel and the initrd
	Files []fat.Entry
	Entry fat.Entry
}

// ReadSystem lists the files of the system with this plan's ID. esp is an EFI system partition.
func ReadSystem(esp io.ReaderAt, plan string) (*SystemFiles, error) {
	r, err := fat.Open(esp)
	if err != nil {
		return nil, err
	}
	s := &SystemFiles{r: esp, esp: r, Dir: ondisk.ESPSystemDir(plan)}
	entries, err := r.ReadDir(s.Dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.Dir {
			s.Files = append(s.Files, e)
		}
	}
	if len(s.Files) == 0 {
		return nil, fmt.Errorf("there are no files in %s", s.Dir)
	}
	if s.Entry, err = r.Stat(ondisk.ESPEntryA); err != nil {
		return nil, err
	}
	return s, nil
}

// Chunks returns the numbers of the chunks of p that contain these files.
func (s *SystemFiles) Chunks(p *chunk.Part) ([]int, error) {
	v, found := NewView(p, nil), map[int]bool{}
	for _, e := range append(slices.Clone(s.Files), s.Entry) {
		extents, err := s.esp.Extents(e.Path)
		if err != nil {
			return nil, err
		}
		for _, x := range extents {
			v.each(x.Off, x.Len, func(k int) { found[k] = true })
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// Copy writes the content of a file to w.
func (s *SystemFiles) Copy(w io.Writer, e fat.Entry) error {
	extents, err := s.esp.Extents(e.Path)
	if err != nil {
		return err
	}
	left := e.Size
	for _, x := range extents {
		n, err := io.Copy(w, io.NewSectionReader(s.r, x.Off, min(x.Len, left)))
		if err != nil {
			return err
		}
		left -= n
	}
	if left != 0 {
		return fmt.Errorf("%s: its size exceeds its clusters by %d bytes: the image is damaged, copy or build it again", e.Path, left)
	}
	return nil
}

// Read returns the content of a small file.
func (s *SystemFiles) Read(e fat.Entry) ([]byte, error) { return s.esp.Read(e) }
