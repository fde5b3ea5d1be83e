package disk

import (
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

func unchanged() error { return nil }

// TestRememberedDigests: an image after a small change has the digest that it has
// without what is remembered of the one before, and few of its chunks are hashed.
func TestRememberedDigests(t *testing.T) {
	s, blobs := sample()
	dir := t.TempDir()
	write := func(name string, s Spec, o WriteOptions) (string, *Result) {
		t.Helper()
		path := filepath.Join(dir, name)
		o.Force = true
		_, r := build(t, path, s, blobs, o)
		return path, r
	}
	_, plain := write("plain", s, WriteOptions{})
	_, first := write("first", s, WriteOptions{Known: Sums{}, Unchanged: unchanged})
	if !reflect.DeepEqual(first.Digest, plain.Digest) || plain.Sums != nil || len(first.Sums) < 10 {
		t.Fatalf("first: %+v, %d sums; plain: %+v, %d sums", first.Digest, len(first.Sums), plain.Digest, len(plain.Sums))
	}

	// Another plan: all GUIDs, and with them what describes the files, are others.
	s.ID = "bb22"
	s.Partitions[2].Nodes[3] = inline("usr/small", "y")
	want, plain := write("plain", s, WriteOptions{})
	got, second := write("second", s, WriteOptions{Known: first.Sums, Unchanged: unchanged})
	if !reflect.DeepEqual(second.Digest, plain.Digest) || disktest.Sum(t, got) != disktest.Sum(t, want) {
		t.Errorf("second: %+v, plain: %+v", second.Digest, plain.Digest)
	}
	hits := 0
	for made := range second.Sums {
		if _, ok := first.Sums[made]; ok {
			hits++
		}
	}
	if hits < len(second.Sums)/2 || hits == len(second.Sums) {
		t.Errorf("%d of %d chunks were remembered", hits, len(second.Sums))
	}

	// Wrong memories count, or none of this is tested.
	wrong := Sums{}
	for made, sum := range second.Sums {
		sum[0]++
		wrong[made] = sum
	}
	if _, r := write("wrong", s, WriteOptions{Known: wrong, Unchanged: unchanged}); r.Golden == plain.Golden {
		t.Error("nothing was remembered")
	}

	// A compressed image has no use for it.
	if _, r := write("x.zst", s, WriteOptions{Zstd: true, Known: wrong, Unchanged: unchanged}); r.Golden != plain.Golden || len(r.Sums) > 0 {
		t.Error("a compressed image remembers")
	}
}

// TestChangedBlobs: of blobs that have changed no image appears, whatever its form and
// whether digests are remembered, and one that is there already stays.
func TestChangedBlobs(t *testing.T) {
	s, blobs := sample()
	changed := errors.New("a blob has changed")
	for name, o := range map[string]WriteOptions{
		"raw": {}, "remembering": {Known: Sums{}}, "zst": {Zstd: true}, "replacing": {Force: true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "image")
			if o.Force {
				if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			l, err := Compute(s)
			if err != nil {
				t.Fatal(err)
			}
			o.Unchanged = func() error { return changed }
			o.Slot = func(Digest) ([]byte, error) {
				t.Error("its digest is about to be signed")
				return nil, changed
			}
			if _, err := Write(t.Context(), path, s, l, blobs, o); !errors.Is(err, changed) {
				t.Errorf("it is written: %v", err)
			}
			files, err := os.ReadDir(filepath.Dir(path))
			if err != nil {
				t.Fatal(err)
			}
			if old, _ := os.ReadFile(path); o.Force && string(old) != "old" || len(files) > 0 != o.Force {
				t.Errorf("left: %v", files)
			}
		})
	}
	l, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Write(t.Context(), filepath.Join(t.TempDir(), "image"), s, l, blobs, WriteOptions{Known: Sums{}, Slot: func(Digest) ([]byte, error) { return nil, nil }}); err == nil {
		t.Error("digests are remembered of blobs that nobody watches")
	}
}

// TestCompositions writes what is partly of blobs in every order and across chunks,
// everything twice: whatever is remembered has the digest of what the file holds.
func TestCompositions(t *testing.T) {
	const size = 3*Align + Align/2
	rnd := rand.New(rand.NewPCG(3, 4))
	blob := make([]byte, 3<<20)
	for i := range blob {
		blob[i] = byte(rnd.Uint32())
	}
	known := Sums{}
	remembered := 0
	for range 10 {
		type write struct {
			b     []byte
			off   int64
			spans []tree.Span
		}
		var writes []write
		off := int64(0)
		for range 10 {
			w := write{b: make([]byte, 1+rnd.IntN(2<<20)), off: off}
			for i := range w.b {
				w.b[i] = byte(i >> 8)
			}
			for at := 0; at < len(w.b); {
				if n := 1 + rnd.IntN(len(w.b)-at); rnd.IntN(3) > 0 {
					s := tree.Span{At: at, Len: n, Blob: "b", Off: rnd.Int64N(1 << 20)}
					s.Size = rnd.IntN(min(n, 1<<20) + 1)
					copy(w.b[at:at+n], make([]byte, n))
					copy(w.b[at:], blob[s.Off:s.Off+int64(s.Size)])
					w.spans = append(w.spans, s)
					at += n
				} else {
					at += n
				}
			}
			if w.off+int64(len(w.b)) > size {
				w.off = 0
			}
			writes = append(writes, w)
			if off = w.off + int64(len(w.b)); rnd.IntN(4) == 0 {
				off = rnd.Int64N(size)
			}
		}
		for range 2 {
			f, err := os.Create(filepath.Join(t.TempDir(), "image"))
			if err != nil {
				t.Fatal(err)
			}
			if err := f.Truncate(size); err != nil {
				t.Fatal(err)
			}
			tr := newTracker(f, size, true, known)
			for _, w := range writes {
				if _, err := tr.write(w.b, w.off, w.spans, func() (int, error) { return f.WriteAt(w.b, w.off) }); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := tr.finish(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			whole := make([]byte, size)
			if _, err := f.ReadAt(whole, 0); err != nil {
				t.Fatal(err)
			}
			f.Close()
			for i := range tr.chunks {
				if !tr.written(i) {
					continue
				}
				if _, ok := tr.remembered(&tr.chunks[i]); ok {
					remembered++
				}
				if want := sha256.Sum256(whole[i*Align : min(size, (i+1)*Align)]); tr.chunks[i].sum != want {
					t.Errorf("chunk %d has another digest", i)
				}
			}
			for made, sum := range tr.sums() {
				if old, ok := known[made]; ok && old != sum {
					t.Error("one composition, two contents")
				}
				known[made] = sum
			}
		}
	}
	if remembered < 20 {
		t.Errorf("only %d chunks were remembered: the test is void", remembered)
	}
}

// TestCompose: what differs in any part is composed of something else.
func TestCompose(t *testing.T) {
	b := []byte("0123456789")
	span := func(at, n int, blob string, off int64, size int) []tree.Span {
		return []tree.Span{{At: at, Len: n, Blob: blob, Off: off, Size: size}}
	}
	seen := map[[32]byte]int{}
	for i, w := range []struct {
		b       []byte
		at, end int
		off     int64
		spans   []tree.Span
	}{
		{b, 0, 10, 0, nil}, {b, 0, 9, 0, nil}, {b, 1, 10, 0, nil}, {b, 0, 10, 1, nil},
		{b, 0, 10, 0, span(0, 10, "a", 0, 10)}, {b, 0, 10, 0, span(0, 10, "b", 0, 10)}, {b, 0, 10, 0, span(0, 10, "a", 1, 10)},
		{b, 0, 10, 0, span(0, 10, "a", 0, 9)}, {b, 0, 10, 0, span(0, 9, "a", 0, 9)}, {b, 0, 10, 0, span(1, 9, "a", 0, 9)},
		{b, 0, 10, 5, span(0, 10, "a", 0, 10)}, {b, 0, 5, 0, span(0, 10, "a", 0, 10)}, {b, 5, 10, 0, span(0, 10, "a", 0, 10)},
		{b, 0, 10, 0, append(span(0, 5, "a", 0, 5), span(5, 5, "a", 5, 5)...)},
	} {
		h := sha256.New()
		compose(h, w.b, w.at, w.end, w.off, w.spans)
		if j, ok := seen[[32]byte(h.Sum(nil))]; ok {
			t.Errorf("%d is composed of the same as %d", i, j)
		}
		seen[[32]byte(h.Sum(nil))] = i
	}
}
