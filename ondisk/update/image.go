// Package update knows what an update takes of an image: it opens a compressed image of
// which only ranges can be read, and finds the frames that a machine needs. edgebake tells
// beforehand with it what a machine will fetch.
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

// Images that no machine can be updated to.
var (
	ErrNoIndex = errors.New("it has no index of its chunks: build it again as .raw.zst with this edgebake (edgebake build --output NAME.raw.zst)")
	ErrBoard   = errors.New("it is for boards whose own firmware starts the kernel, and these cannot be updated")
)

// Image is a compressed image of which ranges are read.
type Image struct {
	// Body and Signature are those of the index.
	Body      []byte
	Signature string
	// Index is nil until Decode was called.
	Index *chunk.Index
	// Head is how many bytes were read to open the image, in so many Requests.
	Head     int64
	Requests int

	table *seekable.Reader
}

// Open reads the end of an image of that size: the table of its frames and its index, of
// which it parses nothing. r is asked for few ranges.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	t := &tail{r: r, from: size, size: size}
	i := &Image{}
	if err := t.load(max(0, size-Tail)); err != nil {
		return nil, err
	}
	table, err := seekable.Open(t, size)
	if err != nil {
		return nil, err
	}
	table.Close() // its frames are decompressed by others
	i.table = table
	index := table.Extra(chunk.Magic)
	if index == nil {
		return nil, ErrNoIndex
	}
	if index.Size() > chunk.MaxIndex {
		return nil, fmt.Errorf("the index of its chunks has %d bytes, at most %d are accepted", index.Size(), chunk.MaxIndex)
	}
	content, err := io.ReadAll(index)
	if err != nil {
		return nil, err
	}
	if i.Body, i.Signature, err = chunk.Open(content); err != nil {
		return nil, err
	}
	i.Head, i.Requests = t.size-t.from, t.requests
	return i, nil
}

// Decode reads the index. If it does not match the frames, Index is set beside the error.
// Call it after its signature was checked.
func (i *Image) Decode() error {
	x, err := chunk.Decode(i.Body)
	if err != nil {
		return err
	}
	i.Index = x
	for _, p := range x.Parts {
		for k, c := range p.Chunks {
			if f := p.Frame + k; f >= i.table.Frames() || i.table.Entry(f).Size != c.Size {
				return fmt.Errorf("chunk %d of partition %s is not frame %d of the image: it is damaged, copy or build it again", k, p.Label, f)
			}
		}
	}
	return nil
}

// Place returns where the frame of chunk k of a part is in the compressed image.
func (i *Image) Place(p *chunk.Part, k int) Place {
	e := i.table.Entry(p.Frame + k)
	return Place{e.Offset, e.Offset + e.Compressed}
}

// tail reads the end of a file in few requests.
type tail struct {
	r        io.ReaderAt
	from     int64 // where b begins
	b        []byte
	size     int64
	requests int
}

// load reads what is missing from an offset on.
func (t *tail) load(from int64) error {
	if from >= t.from {
		return nil
	}
	if t.size-from > chunk.MaxIndex {
		return fmt.Errorf("the end of the image that describes it has %d bytes, at most %d are accepted", t.size-from, chunk.MaxIndex)
	}
	b := make([]byte, t.from-from)
	t.requests++
	if n, err := t.r.ReadAt(b, from); n < len(b) {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	t.b, t.from = append(b, t.b...), from
	return nil
}

func (t *tail) ReadAt(p []byte, off int64) (int, error) {
	if err := t.load(off); err != nil {
		return 0, err
	}
	return bytes.NewReader(t.b).ReadAt(p, off-t.from)
}

// SystemFiles are the files on the EFI system partition that belong to one system: its
// kernel and initrd, and the boot entry that the image has for it.
type SystemFiles struct {
	r     io.ReaderAt
	esp   *fat.Reader
	Dir   string // of the kernel and the initrd
	Files []fat.Entry
	Entry fat.Entry
}

// ReadSystem lists the files of the system with that plan. esp is an image's EFI system
// partition.
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

// Chunks returns the numbers of the chunks that hold the content of these files.
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

// Copy writes the content of one of the files to w.
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
		return fmt.Errorf("%s has %d bytes more than its clusters", e.Path, left)
	}
	return nil
}

// Read returns the content of one of the files, which must be small.
func (s *SystemFiles) Read(e fat.Entry) ([]byte, error) { return s.esp.Read(e) }
