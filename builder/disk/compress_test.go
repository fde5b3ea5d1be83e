package disk

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/update"
)

// threeParts returns a disk with three indexed file systems that follow each other directly.
func threeParts() ([]byte, Archive) {
	const size = 192 << 10
	b := make([]byte, 3*size)
	rand.NewChaCha8([32]byte{4}).Read(b)
	a := Archive{Size: int64(len(b)), Read: func(p []byte, off int64) (bool, error) {
		copy(p, b[off:])
		return false, nil
	}}
	for i, label := range []string{ondisk.LabelESP, ondisk.LabelRootA, ondisk.LabelData} {
		a.Parts = append(a.Parts, ondisk.PartitionInfo{Label: label, Start: int64(i) * size, Size: size})
	}
	a.Index = func(parts []chunk.Part) ([]byte, error) {
		x := chunk.Index{Parts: parts}
		return x.Seal(nil)
	}
	return b, a
}

// TestIndexIsComplete repeatedly compresses short file systems: one goroutine then begins a part of
// the index while another still adds chunks to the part before.
func TestIndexIsComplete(t *testing.T) {
	b, a := threeParts()
	path := filepath.Join(t.TempDir(), "image")
	for range 40 {
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := Compress(t.Context(), f, a); err != nil {
			t.Fatal(err)
		}
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		i, err := update.Open(f, st.Size())
		if err != nil {
			t.Fatal(err)
		}
		if err := i.Decode(); err != nil {
			t.Fatal(err)
		}
		z, err := seekable.Open(f, st.Size())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range i.Index.Parts {
			off := p.Start
			for k, c := range p.Chunks {
				content, err := z.Frame(p.Frame + k)
				if err != nil || sha256.Sum256(content) != c.Sum || !bytes.Equal(content, b[off:off+c.Size]) {
					t.Fatalf("chunk %d of %s: another content, %v", k, p.Label, err)
				}
				off += c.Size
			}
		}
		z.Close()
		f.Close()
	}
}

// TestWrongIndexIsNoImage checks that Compress fails if the index does not match the frames.
func TestWrongIndexIsNoImage(t *testing.T) {
	for name, spoil := range map[string]func(p *chunk.Part){
		"a chunk is missing": func(p *chunk.Part) { p.Chunks = p.Chunks[1:] },
		"another frame":      func(p *chunk.Part) { p.Frame++ },
	} {
		_, a := threeParts()
		seal := a.Index
		a.Index = func(parts []chunk.Part) ([]byte, error) {
			spoil(&parts[1])
			return seal(parts)
		}
		f, err := os.Create(filepath.Join(t.TempDir(), "image"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := Compress(t.Context(), f, a); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
