package media

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/update"
)

// UpdateCost is the amount of data that a machine fetches for an update from one image to another,
// in bytes of the compressed image.
type UpdateCost struct {
	// Index is the chunk index with the frame table, Root the root file system, Boot the kernel and
	// initrd, and Data the container images.
	Index int64 `json:"index"`
	Root  int64 `json:"root"`
	Boot  int64 `json:"boot"`
	Data  int64 `json:"data"`
	// Requests is the number of requests. Each costs another update.RequestBytes.
	Requests int `json:"requests"`
	// Bytes is the total, including update.RequestBytes for each request.
	Bytes int64 `json:"bytes"`
	// Image is the size of the whole compressed image.
	Image int64 `json:"image"`
	// Signed means that the chunk index is signed.
	Signed bool `json:"signed"`
	// Images lists the container images that the machine lacks.
	Images []string `json:"images,omitempty"`
	// Rejected lists reasons for which a machine with the old image rejects the new one.
	Rejected []string `json:"rejected,omitempty"`
}

// UpdateTarget describes the image to which machines are updated.
type UpdateTarget struct {
	Golden string
	Info   ondisk.ImageInfo
	// Signed means that the image's chunk index has a signature, which machines verify.
	Signed bool
}

// ReadUpdate reads the description of an image from its chunk index.
func ReadUpdate(s ImageSource) (*UpdateTarget, error) {
	m, err := s.open()
	if err != nil {
		return nil, err
	}
	defer m.Close()
	i, err := m.updateIndex()
	if err != nil {
		return nil, fmt.Errorf("reading image %s: %w", s.Name, err)
	}
	t := &UpdateTarget{Golden: i.Index.Golden, Signed: i.Signature != ""}
	if err := json.Unmarshal(i.Index.ImageInfo, &t.Info); err != nil {
		return nil, fmt.Errorf("reading image %s: its image.json is damaged: build it again", s.Name)
	}
	return t, nil
}

// CostOfUpdate computes how much of the image s a machine fetches. from is the image that the
// machine has, or its disk. If the disk has two systems, it assumes the one that image.json
// describes.
func CostOfUpdate(from string, s ImageSource) (*UpdateCost, error) {
	to := s.Name
	m, i, err := s.openIndexed()
	if err == nil {
		defer m.Close()
	}
	old, root, errOld := openWithRoot(from)
	if errOld == nil {
		defer old.Close()
	}
	if err := joined.Distinct(errOld, err); err != nil {
		return nil, err
	}
	have := localChunks{}
	for _, label := range []string{ondisk.LabelESP, root} {
		if err := have.add(old, label, math.MaxInt64); err != nil {
			return nil, fmt.Errorf("reading image %s: %w", from, err)
		}
	}
	c, err := m.updateCost(i, have)
	if err != nil {
		return nil, fmt.Errorf("reading image %s: %w", to, err)
	}
	if c.Images = update.Lacks(old.info, m.info); len(c.Images) > 0 {
		if err := m.imagesCost(c, i, old, have); err != nil {
			return nil, fmt.Errorf("reading the container images of %s and %s: %w", from, to, err)
		}
	}
	c.Bytes = c.Index + c.Root + c.Boot + c.Data + c.overhead()
	c.Rejected = rejections(old.info, m.info, i)
	return c, nil
}

// openIndexed opens an image and reads its chunk index.
func (s ImageSource) openIndexed() (*Image, *update.Image, error) {
	m, err := s.open()
	if err != nil {
		return nil, nil, err
	}
	i, err := m.updateIndex()
	if err != nil {
		m.Close()
		return nil, nil, fmt.Errorf("reading image %s: %w", s.Name, err)
	}
	return m, i, nil
}

// openWithRoot opens an image or a disk, and returns its rootLabel.
func openWithRoot(path string) (*Image, string, error) {
	m, err := Open(path)
	if err != nil {
		return nil, "", err
	}
	root, err := m.rootLabel()
	if err != nil {
		m.Close()
		return nil, "", fmt.Errorf("reading image %s: %w", path, err)
	}
	return m, root, nil
}

// rejections returns the reasons why a machine with the image old rejects the image now. It checks
// only the settings in the images' `updates`.
func rejections(old, now ondisk.ImageInfo, i *update.Image) (out []string) {
	if now.UpdateSerial < old.UpdateSerial {
		out = append(out, fmt.Sprintf("its serial is %d, but that of the present image is %d: raise updates.serial", now.UpdateSerial, old.UpdateSerial))
	}
	if len(old.UpdateKeys) > 0 {
		if _, err := slot.VerifyIndex(i.Body, i.Signature, old.UpdateKeys); err != nil {
			out = append(out, err.Error())
		}
	}
	return out
}

// rootLabel returns the label of the root partition with the system that image.json describes: the
// one whose boot entry names this system's kernel. It is ROOT-A without such an entry, as with other
// boot loaders.
func (m *Image) rootLabel() (string, error) {
	fsys, err := m.esp()
	if err != nil {
		return "", err
	}
	names, err := bootEntries(fsys)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if !strings.HasPrefix(path.Base(name), "edgebake-b") {
			continue
		}
		text, err := m.espFile(name)
		if err != nil {
			return "", fmt.Errorf("reading %s: %w", name, err)
		}
		if strings.Contains(string(text), "/"+ondisk.ESPSystemDir(m.info.Plan)+"/") {
			return ondisk.LabelRootB, nil
		}
	}
	return ondisk.LabelRootA, nil
}

// overhead returns the bytes that the requests themselves cost.
func (c *UpdateCost) overhead() int64 { return int64(c.Requests) * update.RequestBytes }

// localChunks is the set of digests of the chunks that a machine already has.
type localChunks map[[32]byte]bool

func (s localChunks) has(sum [32]byte) bool { return s[sum] }

// add adds the chunks in the first size bytes of a partition, unless the partition is missing.
func (s localChunks) add(m *Image, label string, size int64) error {
	p, err := m.partition(label)
	if err != nil {
		return nil // the machine has no chunks of this partition
	}
	read := func(b []byte, off int64) (bool, error) {
		_, zero, err := m.chunk(b, p.Start+off, int64(len(b)))
		return zero, err
	}
	return chunk.Cut(min(p.Size, size), read, func(b []byte, _ int) error {
		if b != nil {
			s[sha256.Sum256(b)] = true
		}
		return nil
	})
}

// updateIndex opens the chunk index as a machine does for an update.
func (m *Image) updateIndex() (*update.Image, error) {
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

// updateCost counts the data that a machine fetches for the new system. have contains the chunks on
// its disk.
func (m *Image) updateCost(i *update.Image, have localChunks) (*UpdateCost, error) {
	root, esp := i.Index.Find(ondisk.LabelRootA), i.Index.Find(ondisk.LabelESP)
	if root == nil || esp == nil {
		return nil, fmt.Errorf("the chunk index lacks partition %s or %s: build it again", ondisk.LabelRootA, ondisk.LabelESP)
	}
	c := &UpdateCost{Index: i.Head, Requests: 1 + i.Requests, Image: m.stored, Signed: i.Signature != ""}
	c.Root = c.add(i, root, root.Missing(have.has))
	r := m.countFetches(c, &c.Boot, i, esp, have)
	files, err := update.ReadSystem(r.view, m.info.Plan)
	if err != nil {
		return nil, err
	}
	chunks, err := files.Chunks(esp)
	if err != nil {
		return nil, err
	}
	r.rest(chunks)
	return c, nil
}

// imagesCost counts the data that a machine fetches for container images that it lacks. old is the
// image that the machine has.
func (m *Image) imagesCost(c *UpdateCost, i *update.Image, old *Image, have localChunks) error {
	data := i.Index.Find(ondisk.LabelData)
	if data == nil {
		return fmt.Errorf("the chunk index lacks partition %s: build it again", ondisk.LabelData)
	}
	now := &store.State{}
	if p, err := old.partition(ondisk.LabelData); err != nil {
		return err
	} else if images, err := update.ReadImages(old.section(p)); err == nil {
		now = images.State
	} else if !errors.Is(err, update.ErrArchives) {
		return err
	}
	r := m.countFetches(c, &c.Data, i, data, have)
	images, err := update.ReadImages(r.view)
	if err != nil {
		return err
	}
	chunks, _, err := images.Chunks(data, now.Lacks(images.State))
	if err != nil {
		return err
	}
	// A machine hashes the chunks of its own DATA only after it has read the new list of images.
	if err := have.add(old, ondisk.LabelData, data.Size); err != nil {
		return err
	}
	r.rest(chunks)
	return nil
}

// fetchCounter counts the data that a machine fetches from one partition. While the machine
// searches for files, it requests chunks one by one. Then it requests the chunks of these files in
// ranges.
type fetchCounter struct {
	view  *update.View
	count func(chunks []int)
	got   map[int]bool
	part  *chunk.Part
	have  localChunks
}

func (m *Image) countFetches(c *UpdateCost, bytes *int64, i *update.Image, p *chunk.Part, have localChunks) *fetchCounter {
	r := &fetchCounter{got: map[int]bool{}, part: p, have: have}
	r.count = func(chunks []int) { *bytes += c.add(i, p, chunks) }
	r.view = update.NewView(p, func(k int) ([]byte, error) {
		if !r.got[k] && !have[p.Chunks[k].Sum] {
			r.got[k] = true
			r.count([]int{k})
		}
		return m.z.Frame(p.Frame + k)
	})
	return r
}

func (r *fetchCounter) rest(chunks []int) {
	r.count(slices.DeleteFunc(chunks, func(k int) bool { return r.got[k] || r.have[r.part.Chunks[k].Sum] }))
}

// add counts the requests for chunks of a part, and returns the bytes of their responses.
func (c *UpdateCost) add(i *update.Image, p *chunk.Part, chunks []int) int64 {
	spans := i.Spans(p, chunks)
	c.Requests += len(spans)
	return update.Bytes(spans)
}
