package disk

import (
	"crypto/sha256"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// TestTracker writes in random order, across chunks and with holes. The digests must be those of
// the finished file.
func TestTracker(t *testing.T) {
	const size = 3*Align + Align/2
	rnd := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 2<<20)
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	straight := 0
	for range 30 {
		f, err := os.Create(filepath.Join(t.TempDir(), "image"))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		tr := newTracker(f, size)
		off := int64(0)
		for range 12 {
			n := 1 + rnd.IntN(len(data)-1)
			switch rnd.IntN(6) {
			case 0:
				n = 1 + rnd.IntN(64<<10)
			case 1:
				off = rnd.Int64N(size) // anywhere
			case 2:
				off += rnd.Int64N(Align) // leaves a hole
			}
			if off >= size {
				off = 0
			}
			b := data[:min(int64(n), size-off)]
			if _, err := tr.write(b, off, func() (int, error) { return f.WriteAt(b, off) }); err != nil {
				t.Fatal(err)
			}
			off += int64(len(b))
		}
		tr.leave()
		tr.stop()
		for i := range tr.chunks {
			if c := tr.chunks[i]; c.writes > 0 && c.writes == c.sumOf {
				straight++
			}
		}
		if _, err := tr.finish(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		whole := make([]byte, size)
		if _, err := f.ReadAt(whole, 0); err != nil {
			t.Fatal(err)
		}
		for i := range tr.chunks {
			want := sha256.Sum256(whole[i*Align : min(size, (i+1)*Align)])
			if tr.written(i) && tr.chunks[i].sum != want {
				t.Errorf("chunk %d has another digest", i)
			}
		}
		f.Close()
	}
	if straight < 10 {
		t.Errorf("only %d chunks were hashed while they were written, so the test checks nothing", straight)
	}
}
