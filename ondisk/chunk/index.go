package chunk

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// Magic is the magic number of the skippable frame with the index. That frame is between the last
// frame of a compressed image and the table of frames.
const Magic = 0x184d2a5d

// Version is the version of the format of Index.
const Version = 1

// MaxIndex limits the total size in bytes of an encoded index and of the table of frames. That is
// enough for 30 GiB of files. Both are read before a signature is checked, so a server could claim
// any size.
const MaxIndex = 16 << 20

// maxParts is the maximum number of parts; an image has three.
const maxParts = 16

const (
	entrySize = 4 + 32  // size, digest
	holeBit   = 1 << 31 // bit of the size that marks a hole
)

// Chunk is one chunk of a file system.
type Chunk struct {
	Size int64
	Hole bool
	// Sum is the SHA-256 of the content; zero for a hole.
	Sum [32]byte
}

// Part is one file system of an image, and its chunks in order.
type Part struct {
	Label string `json:"label"` // label of its partition
	Size  int64  `json:"size"`  // size of the file system in bytes
	Start int64  `json:"start"` // offset in the image in bytes
	// Frame is the number of the frame with the first chunk. The frames of the other chunks follow
	// it.
	Frame  int     `json:"frame"`
	Chunks []Chunk `json:"-"`
	// Count is the number of Chunks.
	Count int `json:"chunks"`
}

// Index lists the chunks of an image. Each chunk is one frame of the compressed image.
type Index struct {
	Version int `json:"version"`
	// Golden is the image's golden digest.
	Golden string `json:"golden"`
	// ImageInfo is the content of image.json in the image.
	ImageInfo []byte `json:"imageInfo"`
	Parts     []Part `json:"parts"`
}

// Find returns the part with a label, or nil.
func (x *Index) Find(label string) *Part {
	for i := range x.Parts {
		if x.Parts[i].Label == label {
			return &x.Parts[i]
		}
	}
	return nil
}

// Missing returns the numbers of the part's chunks for which have returns false. Holes are never
// missing.
func (p *Part) Missing(have func(sum [32]byte) bool) []int {
	var out []int
	for i, c := range p.Chunks {
		if !c.Hole && !have(c.Sum) {
			out = append(out, i)
		}
	}
	return out
}

var le = binary.LittleEndian

// encode returns the encoded index, which is the signed part of the frame.
func (x *Index) encode() ([]byte, error) {
	x.Version = Version
	for i := range x.Parts {
		x.Parts[i].Count = len(x.Parts[i].Chunks)
	}
	head, err := json.Marshal(x)
	if err != nil {
		return nil, fmt.Errorf("encoding the index: %w", err)
	}
	b := le.AppendUint32(nil, uint32(len(head)))
	b = append(b, head...)
	for _, p := range x.Parts {
		for _, c := range p.Chunks {
			size := uint32(c.Size)
			if c.Hole {
				size |= holeBit
			}
			b = append(le.AppendUint32(b, size), c.Sum[:]...)
		}
	}
	return b, nil
}

// Seal returns the content of the frame with the index. sign, if not nil, returns the signature of
// the encoded index.
func (x *Index) Seal(sign func(body []byte) (string, error)) ([]byte, error) {
	body, err := x.encode()
	if err != nil {
		return nil, err
	}
	signature := ""
	if sign != nil {
		if signature, err = sign(body); err != nil {
			return nil, err
		}
	}
	b := le.AppendUint32(nil, Version)
	b = le.AppendUint32(b, uint32(len(signature)))
	b = append(b, signature...)
	return append(b, body...), nil
}

// errDamaged means that the index cannot be decoded.
var errDamaged = errors.New("the chunk index is damaged: copy or build the image again")

// NewerError means that this program does not support the version of the index.
type NewerError struct{ Version uint32 }

func (e *NewerError) Error() string {
	return fmt.Sprintf("a newer edgebake made this image: the chunk index has version %d, but this edgebake supports only version %d: use the edgebake that made it, or a newer one", e.Version, Version)
}

// Open splits the content of the frame with the index into the encoded index and its signature. It
// decodes neither of them.
func Open(content []byte) (body []byte, signature string, err error) {
	if len(content) < 8 {
		return nil, "", errDamaged
	}
	version, n := le.Uint32(content), int64(le.Uint32(content[4:]))
	switch {
	case version > Version:
		return nil, "", &NewerError{version}
	case version == 0 || n > int64(len(content)-8):
		return nil, "", errDamaged
	}
	return content[8+n:], string(content[8 : 8+n]), nil
}

// Decode decodes the body that Open returned. The caller must check the signature first.
func Decode(body []byte) (*Index, error) {
	if len(body) < 4 || int64(le.Uint32(body)) > int64(len(body)-4) {
		return nil, errDamaged
	}
	n := le.Uint32(body)
	head, rest := body[4:4+n], body[4+n:]
	x := &Index{}
	if err := json.Unmarshal(head, x); err != nil {
		return nil, fmt.Errorf("%w (%w)", errDamaged, err)
	}
	if x.Version > Version {
		return nil, &NewerError{uint32(x.Version)}
	}
	if len(x.Parts) > maxParts {
		return nil, errDamaged
	}
	for i := range x.Parts {
		p := &x.Parts[i]
		if p.Count < 0 || p.Count > len(rest)/entrySize || p.Frame < 0 || p.Frame > math.MaxInt32 || p.Start < 0 || p.Size < 0 || x.Find(p.Label) != p {
			return nil, errDamaged
		}
		p.Chunks = make([]Chunk, p.Count)
		sum := int64(0)
		for k := range p.Chunks {
			e := rest[k*entrySize:]
			size := le.Uint32(e)
			c := Chunk{Size: int64(size &^ holeBit), Hole: size&holeBit != 0, Sum: [32]byte(e[4:entrySize])}
			if c.Size == 0 || c.Size > HoleSize {
				return nil, errDamaged
			}
			sum += c.Size
			p.Chunks[k] = c
		}
		if sum != p.Size {
			return nil, errDamaged
		}
		rest = rest[p.Count*entrySize:]
	}
	if len(rest) > 0 || x.Version < 1 {
		return nil, errDamaged
	}
	return x, nil
}
