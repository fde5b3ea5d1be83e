package seekable

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	rival "github.com/SaveTheRbtz/zstd-seekable-format-go/pkg"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/klauspost/compress/zstd"
)

// sample returns four frames: text, zeros, noise, and a short last one.
func sample() []byte {
	b := make([]byte, 3*FrameSize+12345)
	copy(b, bytes.Repeat([]byte("edgebake "), FrameSize/9))
	rand.NewChaCha8([32]byte{1}).Read(b[2*FrameSize+FrameSize/2:])
	return b
}

// pack compresses content. The frames listed in raw are stored raw.
func pack(t testing.TB, content []byte, raw ...int) []byte {
	t.Helper()
	enc, err := NewEncoder()
	if err != nil {
		t.Fatal(err)
	}
	var tab Table
	var out []byte
	for i := 0; i*FrameSize < len(content); i++ {
		c := content[i*FrameSize : min(len(content), (i+1)*FrameSize)]
		at := len(out)
		if slices.Contains(raw, i) {
			out = Raw(out, c)
			if len(out)-at != RawSize(len(c)) {
				t.Fatalf("raw frame has %d bytes, not %d", len(out)-at, RawSize(len(c)))
			}
		} else {
			out = enc.Encode(out, c)
		}
		if off := tab.Append(len(out)-at, len(c), Sum(c)); off != int64(at) {
			t.Fatalf("frame %d is at %d, the table says %d", i, at, off)
		}
	}
	return append(out, tab.Encode()...)
}

func TestRoundTrip(t *testing.T) {
	want := sample()
	file := pack(t, want, 0, 3)
	z, err := Open(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	got, err := io.ReadAll(io.NewSectionReader(z, 0, z.Size()))
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("content differs: %v", err)
	}
	for i, want := range []bool{true, false, false, true} {
		if raw, err := z.IsRaw(i); raw != want || err != nil {
			t.Errorf("frame %d: raw %v, %v", i, raw, err)
		}
	}
	for range 2 { // the second time from the cache
		if _, zero, err := z.Decode(1, nil); !zero || err != nil {
			t.Errorf("the frame of zeros: %v %v", zero, err)
		}
	}
	if b, zero, err := z.Decode(2, make([]byte, FrameSize)); zero || err != nil || !bytes.Equal(b, want[2*FrameSize:3*FrameSize]) {
		t.Errorf("frame 2: %v %v", zero, err)
	}
	if _, err := z.ReadAt(make([]byte, 10), z.Size()-5); err != io.EOF {
		t.Errorf("reading beyond the end: %v", err)
	}

	name := filepath.Join(t.TempDir(), "x.zst")
	if err := os.WriteFile(name, file, 0o644); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "zstd", "-t", name)
	disktest.Oracle(t, "zstd", "-d", "-q", name, "-o", name+".out")
	if got, err := os.ReadFile(name + ".out"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("zstd -d gives different content: %v", err)
	}
}

// TestAgainstAnotherImplementation exchanges files with the format's own library: each side reads a
// file of the other.
func TestAgainstAnotherImplementation(t *testing.T) {
	want := sample()
	file := pack(t, want, 0)
	dec, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	r, err := rival.NewReader(bytes.NewReader(file), dec)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the library reads different content: %v", err)
	}

	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	var theirs bytes.Buffer
	w, err := rival.NewWriter(&theirs, enc)
	if err != nil {
		t.Fatal(err)
	}
	for off := 0; off < len(want); off += FrameSize {
		if _, err := w.Write(want[off:min(len(want), off+FrameSize)]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	z, err := Open(bytes.NewReader(theirs.Bytes()), int64(theirs.Len()))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	if got, err := io.ReadAll(io.NewSectionReader(z, 0, z.Size())); err != nil || !bytes.Equal(got, want) {
		t.Errorf("we read the library's file differently: %v", err)
	}
}

// TestEncoderHasNoMemory checks that a frame's bytes do not depend on the frames before it or on
// other goroutines.
func TestEncoderHasNoMemory(t *testing.T) {
	enc, err := NewEncoder()
	if err != nil {
		t.Fatal(err)
	}
	s := sample()
	want := enc.Encode(nil, s[:FrameSize])
	done := make(chan bool)
	for i := range 8 {
		go func() {
			enc.Encode(nil, s[i*1000:][:FrameSize/2])
			done <- bytes.Equal(enc.Encode(nil, s[:FrameSize]), want)
		}()
	}
	for range 8 {
		if !<-done {
			t.Error("the bytes depend on what was compressed before")
		}
	}
}

func TestDamage(t *testing.T) {
	file := pack(t, sample()[:FrameSize+100], 1)
	for name, tc := range map[string]struct {
		change func([]byte) []byte
		want   string
	}{
		"truncated":    {func(b []byte) []byte { return b[:len(b)-100] }, "truncated"},
		"empty":        {func(b []byte) []byte { return nil }, "0 bytes"},
		"cut inside":   {func(b []byte) []byte { return append(b[:50], b[80:]...) }, "truncated or damaged"},
		"many frames":  {func(b []byte) []byte { b[len(b)-9+3] = 0x7f; return b }, "which is impossible in a file of"},
		"another kind": {func(b []byte) []byte { b[len(b)-5] = 0; return b }, "another program made it"},
	} {
		t.Run(name, func(t *testing.T) {
			b := tc.change(bytes.Clone(file))
			_, err := Open(bytes.NewReader(b), int64(len(b)))
			if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("a flipped bit", func(t *testing.T) {
		for _, at := range []int{30, len(file) - 8 - 9 - 24 - 50} {
			b := bytes.Clone(file)
			b[at] ^= 1
			z, err := Open(bytes.NewReader(b), int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(io.NewSectionReader(z, 0, z.Size())); err == nil {
				t.Errorf("a flipped bit at %d is not detected", at)
			}
			z.Close()
		}
	})
}

// framed compresses content in frames of these sizes, and inserts extra between the frames and the
// table.
func framed(t testing.TB, content []byte, sizes []int, extra []byte) []byte {
	t.Helper()
	enc, err := NewEncoder()
	if err != nil {
		t.Fatal(err)
	}
	var tab Table
	var out []byte
	for _, n := range sizes {
		at := len(out)
		out = enc.Encode(out, content[:n])
		tab.Append(len(out)-at, n, Sum(content[:n]))
		content = content[n:]
	}
	return slices.Concat(out, extra, tab.Encode())
}

// ragged returns sizes that divide sample into many different frames.
func ragged() (sizes []int) {
	rest, r := len(sample()), rand.New(rand.NewPCG(1, 2))
	for rest > 0 {
		n := min(rest, 1+r.IntN(700<<10))
		if r.IntN(20) == 0 {
			n = min(rest, FrameSize)
		}
		sizes = append(sizes, n)
		rest -= n
	}
	return sizes
}

func TestFramesOfAnySize(t *testing.T) {
	want := sample()
	file := framed(t, want, ragged(), nil)
	z, err := Open(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	got, err := io.ReadAll(io.NewSectionReader(z, 0, z.Size()))
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("content differs: %v", err)
	}
	r := rand.New(rand.NewPCG(3, 4))
	zeros := 0
	for range 200 {
		off := r.IntN(len(want))
		buf := bytes.Repeat([]byte{0xaa}, 1+r.IntN(min(FrameSize, len(want)-off)))
		zero, err := z.ReadRange(buf, int64(off))
		if err != nil {
			t.Fatal(err)
		}
		if zero {
			zeros++
			clear(buf)
		}
		if !bytes.Equal(buf, want[off:][:len(buf)]) {
			t.Fatalf("%d bytes at %d differ", len(buf), off)
		}
		if seems := z.SeemsZero(int64(off), int64(len(buf))); zero && !seems {
			t.Errorf("%d bytes at %d are zeros, but SeemsZero is false", len(buf), off)
		}
	}
	if zeros == 0 {
		t.Error("no range of zeros was found")
	}
	for _, off := range []int64{-1, z.Size() - 5} {
		if _, err := z.ReadRange(make([]byte, 10), off); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a range at %d beyond the content: %v", off, err)
		}
	}
	name := filepath.Join(t.TempDir(), "x.zst")
	if err := os.WriteFile(name, file, 0o644); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "zstd", "-t", name)
}

// TestCacheIsBounded checks that a Reader's cache is limited in bytes, for any size of frames.
func TestCacheIsBounded(t *testing.T) {
	want := sample()
	var sizes []int
	for range len(want) / 1000 {
		sizes = append(sizes, 1000)
	}
	sizes = append(sizes, len(want)%1000)
	for _, sizes := range [][]int{sizes, {FrameSize, FrameSize, FrameSize, 12345}} {
		file := framed(t, want, sizes, nil)
		z, err := Open(bytes.NewReader(file), int64(len(file)))
		if err != nil {
			t.Fatal(err)
		}
		defer z.Close()
		if _, err := io.Copy(io.Discard, io.NewSectionReader(z, 0, z.Size())); err != nil {
			t.Fatal(err)
		}
		held := 0
		for _, c := range z.cache {
			held += len(c.content)
		}
		if held > keep || held < FrameSize || int64(held) != z.kept {
			t.Errorf("%d frames: %d bytes are held, counted %d", len(sizes), held, z.kept)
		}
	}
}

func TestSkippableFrames(t *testing.T) {
	want := sample()
	const a, b = 0x184d2a5d, 0x184d2a53
	extra := Skippable(Skippable(nil, a, []byte("index")), b, nil)
	file := framed(t, want, ragged(), extra)
	z, err := Open(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	if got, err := io.ReadAll(z.Extra(a)); err != nil || string(got) != "index" {
		t.Errorf("got %q, %v", got, err)
	}
	if z.Extra(b) == nil || z.Extra(0x184d2a5c) != nil {
		t.Error("Extra returns the wrong frame, or none")
	}
	if got, err := io.ReadAll(io.NewSectionReader(z, 0, z.Size())); err != nil || !bytes.Equal(got, want) {
		t.Errorf("content differs: %v", err)
	}
	name := filepath.Join(t.TempDir(), "x.zst")
	if err := os.WriteFile(name, file, 0o644); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "zstd", "-t", name)
	for what, extra := range map[string][]byte{
		"no magic":   []byte("something else"),
		"too long":   append(le.AppendUint32(le.AppendUint32(nil, a), 1<<31), 1, 2, 3),
		"no length":  le.AppendUint32(nil, a),
		"very many":  bytes.Repeat(Skippable(nil, a, nil), maxExtras+1),
		"a half one": extra[:len(extra)-3],
	} {
		file := framed(t, want, ragged(), extra)
		if _, err := Open(bytes.NewReader(file), int64(len(file))); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestNewer checks that the file of a newer edgebake is not reported as damaged.
func TestNewer(t *testing.T) {
	file := pack(t, sample())
	for name, change := range map[string]func([]byte){
		"another table": func(b []byte) { b[len(b)-5] |= 0x40 },
		"large frames":  func(b []byte) { le.PutUint32(b[len(b)-9-entrySize+4:], 2*FrameSize) },
	} {
		b := bytes.Clone(file)
		change(b)
		_, err := Open(bytes.NewReader(b), int64(len(b)))
		var format *FormatError
		if !errors.As(err, &format) || !format.Newer || !strings.Contains(err.Error(), "a newer edgebake made this image") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(framed(f, sample(), ragged(), Skippable(nil, 0x184d2a5d, []byte("x"))))
	f.Add(pack(f, []byte("hello")))
	f.Add(pack(f, []byte("hello"), 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		z, err := Open(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		defer z.Close()
		z.ReadAt(make([]byte, 100), 0)
		z.ReadRange(make([]byte, 100), z.Size()/2)
		z.IsRaw(0)
	})
}

// endless pretends to be a file of any size, and has only the end of a table.
type endless struct {
	foot    []byte
	size    int64
	longest int
}

func (e *endless) ReadAt(p []byte, off int64) (int, error) {
	e.longest = max(e.longest, len(p))
	if off == e.size-int64(len(e.foot)) {
		return copy(p, e.foot), nil
	}
	return 0, io.EOF
}

// TestTableOfAnySize checks that a reader does not allocate memory for a table just because a file
// or a server claims a large one.
func TestTableOfAnySize(t *testing.T) {
	e := &endless{size: 1 << 40, foot: append(le.AppendUint32(nil, 1<<27), hasSums, 0xb1, 0xea, 0x92, 0x8f)}
	if _, err := Open(e, e.size); !errors.Is(err, ErrFormat) || e.longest > 1<<20 {
		t.Errorf("%v, asked for %d bytes at once", err, e.longest)
	}
}
