package update

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/seekable"
)

func TestSpans(t *testing.T) {
	// Frames of 100 kB, one after the other.
	place := func(f int) Place { return Place{int64(f) * 100e3, int64(f+1) * 100e3} }
	got := Spans([]int{1, 2, 4, 7}, place)
	want := [][]int{{1, 2}, {4}, {7}}
	if len(got) != 3 || got[0].Place != (Place{100e3, 300e3}) || got[1].Place != place(4) {
		t.Errorf("%+v", got)
	}
	for i := range want {
		if !slices.Equal(got[i].Frames, want[i]) {
			t.Errorf("span %d has frames %v", i, got[i].Frames)
		}
	}
	small := func(f int) Place { return Place{int64(f) * 10e3, int64(f+1) * 10e3} }
	if got := Spans([]int{0, 4, 9}, small); len(got) != 2 || !slices.Equal(got[0].Frames, []int{0, 4}) {
		t.Errorf("gaps of 30 and 40 kB: %+v", got)
	}
	var many []int
	for f := range 200 {
		many = append(many, f)
	}
	for _, s := range Spans(many, place) {
		if s.To-s.From > MaxSpan {
			t.Errorf("%+v", s.Place)
		}
	}
	if Spans(nil, place) != nil {
		t.Error("spans were returned for no frames")
	}
}

// sample returns a file system with holes, and its chunks.
func sample(t *testing.T) ([]byte, *chunk.Part) {
	t.Helper()
	b := make([]byte, 20<<20)
	rand.NewChaCha8([32]byte{9}).Read(b)
	clear(b[1<<20 : 7<<20])
	clear(b[8<<20+5 : 8<<20+200<<10])
	p := &chunk.Part{Label: "ROOT-A", Size: int64(len(b))}
	err := chunk.Cut(p.Size, chunk.From(bytes.NewReader(b)), func(content []byte, n int) error {
		c := chunk.Chunk{Size: int64(n), Hole: content == nil}
		if !c.Hole {
			c.Sum = sha256.Sum256(content)
		}
		p.Chunks = append(p.Chunks, c)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b, p
}

func TestView(t *testing.T) {
	b, p := sample(t)
	starts := NewView(p, nil).starts
	gets := 0
	fail := errors.New("no line")
	v := NewView(p, func(i int) ([]byte, error) {
		if gets++; p.Chunks[i].Hole {
			t.Errorf("chunk %d is a hole", i)
		}
		return b[starts[i]:][:p.Chunks[i].Size], nil
	})
	got, err := io.ReadAll(io.NewSectionReader(v, 0, p.Size))
	if err != nil || !bytes.Equal(got, b) {
		t.Errorf("the content differs: %v", err)
	}
	if data := len(p.Missing(func([32]byte) bool { return false })); gets != data {
		t.Errorf("%d chunks were read, there are %d", gets, data)
	}
	if n, err := v.ReadAt(make([]byte, 10), p.Size-4); n != 4 || err != io.EOF {
		t.Errorf("%d, %v", n, err)
	}
	i := p.Missing(func([32]byte) bool { return false })[0]
	if _, err := NewView(p, func(int) ([]byte, error) { return nil, fail }).ReadAt(make([]byte, 10), starts[i]); err != fail {
		t.Error(err)
	}
	if _, err := NewView(p, func(int) ([]byte, error) { return []byte("short"), nil }).ReadAt(make([]byte, 10), starts[i]); err == nil {
		t.Error("a short chunk is accepted")
	}
	all := map[[32]byte]bool{}
	for _, c := range p.Chunks {
		all[c.Sum] = true
	}
	if m := p.Missing(func(s [32]byte) bool { return all[s] }); len(m) != 0 {
		t.Errorf("%v", m)
	}
}

// claims is a file whose end claims that it has a table of many frames.
type claims struct{ size, most, read int64 }

func (c *claims) ReadAt(b []byte, off int64) (int, error) {
	c.most, c.read = max(c.most, int64(len(b))), c.read+int64(len(b))
	clear(b)
	foot := []byte{0, 0, 0x20, 0, 0x80, 0xb1, 0xea, 0x92, 0x8f} // 2 Mi frames of 12 bytes each
	if at := c.size - int64(len(foot)) - off; at < int64(len(b)) {
		copy(b[max(0, at):], foot)
	}
	return len(b), nil
}

// TestTableTooLarge checks the limit of the data that is read before the signature is checked.
func TestTableTooLarge(t *testing.T) {
	c := &claims{size: 1 << 30}
	if _, err := Open(c, c.size); err == nil || !strings.Contains(err.Error(), "lists 2097152 frames, at most 349525 are accepted") {
		t.Error(err)
	}
	if c.read > Tail {
		t.Errorf("%d bytes were read, %d at once", c.read, c.most)
	}
}

// TestHostileTable checks that tables of many frames need little memory before the signature is
// checked.
func TestHostileTable(t *testing.T) {
	for _, n := range []int{maxFrames, maxFrames + 1, 1_390_000} {
		var table seekable.Table
		for range n {
			table.Append(1, 1, 0)
		}
		index := make([]byte, max(0, chunk.MaxIndex-12*n-1000))
		file := append(make([]byte, n), seekable.Skippable(nil, chunk.Magic, index)...)
		file = append(file, table.Encode()...)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Open(bytes.NewReader(file), int64(len(file)))
		runtime.ReadMemStats(&after)
		if mb := (after.TotalAlloc - before.TotalAlloc) >> 20; err == nil || strings.Contains(err.Error(), "at most") != (n > maxFrames) || mb > 56 || n > maxFrames && mb > 1 {
			t.Errorf("%d frames: %d MiB, %v", n, mb, err)
		}
	}
}
