package media

import (
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/update"
)

// UpdateCost is what a machine fetches to replace the system of one image by that of
// another. Bytes are those of the compressed image.
type UpdateCost struct {
	// Index is the index of the image's chunks and the table of its frames, Root the
	// root file system, Boot kernel and initrd.
	Index int64 `json:"index"`
	Root  int64 `json:"root"`
	Boot  int64 `json:"boot"`
	// Bytes are all of these, in so many Requests.
	Bytes    int64 `json:"bytes"`
	Requests int   `json:"requests"`
	// Image is the size of the whole compressed image.
	Image int64 `json:"image"`
	// Signed: its index has a signature.
	Signed bool `json:"signed"`
	// Images are container images that the machine lacks.
	Images []string `json:"images,omitempty"`
}

// CostOfUpdate finds what a machine with the system of the image, or disk, at one path
// fetches of the image at another.
func CostOfUpdate(from, to string) (*UpdateCost, error) {
	m, err := open(to, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer m.close()
	i, err := m.updateIndex()
	if err != nil {
		return nil, fmt.Errorf("reading image %s: %w", to, err)
	}
	have, images, err := seeds(from)
	if err != nil {
		return nil, err
	}
	c, err := m.updateCost(i, func(sum [32]byte) bool { return have[sum] })
	if err != nil {
		return nil, fmt.Errorf("reading image %s: %w", to, err)
	}
	for _, i := range m.info.Images {
		if !slices.ContainsFunc(images, func(x ondisk.ImageRef) bool { return x.Digest == i.Digest }) {
			c.Images = append(c.Images, i.Ref)
		}
	}
	return c, nil
}

// seeds returns the digests of the chunks that a machine with that image finds on its own
// disk, and its container images.
func seeds(path string) (map[[32]byte]bool, []ondisk.ImageRef, error) {
	m, err := open(path, os.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	defer m.close()
	have := map[[32]byte]bool{}
	for _, label := range []string{ondisk.LabelESP, ondisk.LabelRootA, ondisk.LabelRootB} {
		p, err := m.partition(label)
		if err != nil {
			continue // without a second root a machine takes no updates; admission says so
		}
		read := func(b []byte, off int64) (bool, error) {
			_, zero, err := m.chunk(b, p.Start+off, int64(len(b)))
			return zero, err
		}
		err = chunk.Cut(p.Size, read, func(b []byte, _ int) error {
			if b != nil {
				have[sha256.Sum256(b)] = true
			}
			return nil
		})
		if err != nil {
			return nil, nil, fmt.Errorf("reading image %s: %w", path, err)
		}
	}
	return have, m.info.Images, nil
}

// updateIndex opens the image as a machine does that is updated to it.
func (m *image) updateIndex() (*update.Image, error) {
	if len(m.info.Boards) > 0 {
		return nil, fmt.Errorf("%w (%s)", update.ErrBoard, strings.Join(m.info.Boards, ", "))
	}
	if m.z == nil {
		return nil, update.ErrNoIndex
	}
	i, err := update.Open(m.src, m.stored)
	if err != nil {
		return nil, err
	}
	return i, i.Decode()
}

// updateCost counts what is to be fetched where the chunks that have reports are there.
func (m *image) updateCost(i *update.Image, have func([32]byte) bool) (*UpdateCost, error) {
	root, esp := i.Index.Find(ondisk.LabelRootA), i.Index.Find(ondisk.LabelESP)
	if root == nil || esp == nil {
		return nil, fmt.Errorf("its index lacks partition %s or %s: build it again", ondisk.LabelRootA, ondisk.LabelESP)
	}
	c := &UpdateCost{Index: i.Head, Requests: i.Requests, Image: m.stored, Signed: i.Signature != ""}
	c.Root = c.spans(i, root, root.Missing(have))

	// What is read to find the files is fetched chunk by chunk, the files in ranges.
	fetched := map[int]bool{}
	view := update.NewView(esp, func(k int) ([]byte, error) {
		if !fetched[k] && !have(esp.Chunks[k].Sum) {
			fetched[k] = true
			c.Boot += c.spans(i, esp, []int{k})
		}
		return m.z.Frame(esp.Frame + k)
	})
	files, err := update.ReadSystem(view, m.info.Plan)
	if err != nil {
		return nil, err
	}
	chunks, err := files.Chunks(esp)
	if err != nil {
		return nil, err
	}
	chunks = slices.DeleteFunc(chunks, func(k int) bool { return fetched[k] || have(esp.Chunks[k].Sum) })
	c.Boot += c.spans(i, esp, chunks)
	c.Bytes = c.Index + c.Root + c.Boot
	return c, nil
}

// spans counts the requests for chunks of a part and returns their bytes.
func (c *UpdateCost) spans(i *update.Image, p *chunk.Part, chunks []int) (bytes int64) {
	for _, s := range update.Spans(chunks, func(k int) update.Place { return i.Place(p, k) }) {
		bytes += s.To - s.From
		c.Requests++
	}
	return bytes
}
