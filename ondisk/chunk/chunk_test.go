package chunk

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// disk returns random data with text, with holes, and with runs of zero blocks that are too short
// for a hole.
func disk(size int, seed byte) []byte {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	r := rand.New(rand.NewPCG(uint64(seed), 1))
	for at := 0; at < size; {
		n := r.IntN(2 << 20)
		from := at + n
		if from >= size {
			break
		}
		zero := r.IntN(40) * Block
		switch r.IntN(4) {
		case 0:
			zero = r.IntN(12 << 20) // not a multiple of the block size
		case 1:
			from -= from % Block
		}
		clear(b[from:min(size, from+zero)])
		at = from + zero
	}
	return b
}

// cutAll cuts b and checks that the joined chunks equal b.
func cutAll(t testing.TB, b []byte) []Chunk {
	t.Helper()
	var chunks []Chunk
	at := int64(0)
	err := Cut(int64(len(b)), From(bytes.NewReader(b)), func(content []byte, n int) error {
		c := Chunk{Size: int64(n), Hole: content == nil}
		want := b[at:][:n]
		if content == nil {
			content = make([]byte, n)
		} else {
			c.Sum = sha256.Sum256(content)
		}
		if len(content) != n || !bytes.Equal(content, want) {
			t.Fatalf("chunk %d of %d bytes at %d differs from the data", len(chunks), n, at)
		}
		chunks = append(chunks, c)
		at += int64(n)
		return nil
	})
	if err != nil || at != int64(len(b)) {
		t.Fatalf("%d of %d bytes were cut: %v", at, len(b), err)
	}
	return chunks
}

// slow is a second implementation of the rules, which divides all of b at once: first it finds the
// holes, then it cuts the data between them.
func slow(b []byte) (chunks []Chunk) {
	at := 0
	data := func(end int) {
		for at < end {
			n := cut(b[at:min(end, at+MaxSize)])
			chunks = append(chunks, Chunk{Size: int64(n), Sum: sha256.Sum256(b[at:][:n])})
			at += n
		}
	}
	for p := 0; p < len(b); {
		run := zeros(b[p:])
		if run < MinHole {
			p += run + Block
			continue
		}
		data(p)
		for p += run; at < p; {
			n := min(p-at, HoleSize-at%HoleSize)
			chunks = append(chunks, Chunk{Size: int64(n), Hole: true})
			at += n
		}
	}
	data(len(b))
	return chunks
}

// TestRules checks that the cuts depend only on the content, and not on how much of it is in
// memory.
func TestRules(t *testing.T) {
	for seed := range byte(6) {
		b := disk(40<<20+int(seed)*Block*100, seed)
		if got, want := cutAll(t, b), slow(b); !slices.Equal(got, want) {
			t.Fatalf("seed %d: %d chunks, by the rules %d", seed, len(got), len(want))
		}
	}
}

func TestSizes(t *testing.T) {
	b := make([]byte, 64<<20)
	rand.NewChaCha8([32]byte{7}).Read(b)
	chunks := cutAll(t, b)
	for i, c := range chunks {
		if c.Hole || c.Size > MaxSize || c.Size < MinSize && i < len(chunks)-1 {
			t.Errorf("chunk %d: %+v", i, c)
		}
	}
	if mean := len(b) / len(chunks); mean < Average*3/4 || mean > Average*5/4 {
		t.Errorf("the mean size is %d, expected about %d", mean, Average)
	}
	if got := cutAll(t, make([]byte, 10<<20)); len(got) != 3 || !got[2].Hole || got[2].Size != 2<<20 {
		t.Errorf("10 MiB of zeros: %+v", got)
	}
	if got := cutAll(t, nil); len(got) != 0 {
		t.Errorf("nothing: %+v", got)
	}
}

// TestFormat checks that the cuts never change. If they did, machines would fetch all data of the
// next update.
func TestFormat(t *testing.T) {
	h := sha256.New()
	for _, c := range cutAll(t, disk(24<<20, 3)) {
		fmt.Fprintf(h, "%d %v %x\n", c.Size, c.Hole, c.Sum)
	}
	if got, want := fmt.Sprintf("%x", h.Sum(nil)), "e97ecedf507704de3860d2410c85ac751231ee6bb9dbdc135f5380ceb4b93af2"; got != want {
		t.Errorf("the chunks have digest %s, were %s", got, want)
	}
}

// TestShifted checks that data at another offset keeps its chunks.
func TestShifted(t *testing.T) {
	b := disk(32<<20, 5)
	have := map[[32]byte]bool{}
	for _, c := range cutAll(t, b) {
		have[c.Sum] = true
	}
	other := slices.Concat(b[:9<<20], []byte("some bytes more"), b[9<<20:])
	missing := int64(0)
	for _, c := range cutAll(t, other) {
		if !have[c.Sum] {
			missing += c.Size
		}
	}
	// The chunks up to the next hole differ, because a hole consists of whole blocks.
	if missing > 2<<20 {
		t.Errorf("%d bytes are in no chunk of before", missing)
	}
}

func TestErrors(t *testing.T) {
	fail := errors.New("failed")
	if err := Cut(10<<20, func([]byte, int64) (bool, error) { return false, fail }, nil); err != fail {
		t.Error(err)
	}
	if err := Cut(10<<20, From(bytes.NewReader(make([]byte, 5<<20))), func([]byte, int) error { return nil }); err != io.EOF {
		t.Error(err)
	}
	if err := Cut(10<<20, func([]byte, int64) (bool, error) { return true, nil }, func([]byte, int) error { return fail }); err != fail {
		t.Error(err)
	}
}

func sample() *Index {
	x := &Index{Golden: "aa", ImageInfo: []byte("{}")}
	for i, label := range []string{"ESP", "ROOT-A"} {
		p := Part{Label: label, Start: int64(i) << 22, Frame: i * 100}
		for _, c := range slow(disk(5<<20, byte(i))) {
			p.Size += c.Size
			p.Chunks = append(p.Chunks, c)
		}
		x.Parts = append(x.Parts, p)
	}
	return x
}

func signed([]byte) (string, error) { return "signed", nil }

func TestIndex(t *testing.T) {
	x := sample()
	body, err := x.encode()
	if err != nil {
		t.Fatal(err)
	}
	for signature, sign := range map[string]func([]byte) (string, error){"": nil, "signed": signed} {
		sealed, err := x.Seal(sign)
		if err != nil {
			t.Fatal(err)
		}
		b, sig, err := Open(sealed)
		if err != nil || sig != signature || !bytes.Equal(b, body) {
			t.Errorf("%q, %v", sig, err)
		}
	}
	fail := errors.New("no key")
	if _, err := x.Seal(func([]byte) (string, error) { return "", fail }); err != fail {
		t.Error(err)
	}
	got, err := Decode(body)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := got.encode(); err != nil || !bytes.Equal(again, body) {
		t.Errorf("read and written it is another index: %v", err)
	}
	if p := got.Find("ROOT-A"); p == nil || !slices.Equal(p.Chunks, x.Parts[1].Chunks) || got.Find("DATA") != nil {
		t.Errorf("%+v", p)
	}
}

// manyParts returns an index of more partitions than an image has.
func manyParts(t *testing.T) []byte {
	t.Helper()
	x := &Index{}
	for i := range 1000 {
		x.Parts = append(x.Parts, Part{Label: fmt.Sprint(i)})
	}
	body, err := x.encode()
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func TestDamagedIndex(t *testing.T) {
	body, err := sample().encode()
	if err != nil {
		t.Fatal(err)
	}
	head := int(le.Uint32(body))
	change := func(at int, to ...byte) []byte { b := bytes.Clone(body); copy(b[at:], to); return b }
	for name, b := range map[string][]byte{
		"empty":         nil,
		"truncated":     body[:len(body)-1],
		"longer":        append(bytes.Clone(body), 0),
		"a long head":   change(0, 0xff, 0xff, 0xff, 0xff),
		"no JSON":       change(4, 'x'),
		"a small size":  change(4+head, 1, 0, 0, 0),
		"no size":       change(4+head, 0, 0, 0, 0),
		"a huge chunk":  change(4+head, 0, 0, 0, 0x7f),
		"many parts":    manyParts(t),
		"a label twice": bytes.Replace(body, []byte(`"ROOT-A"`), []byte(`"ESP"   `), 1),
	} {
		if _, err := Decode(b); !errors.Is(err, errDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	sealed, err := sample().Seal(signed)
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"empty": nil, "a long signature": append([]byte{1, 0, 0, 0, 255, 255, 255, 0}, body...), "no version": append(make([]byte, 8), body...)} {
		if _, _, err := Open(b); !errors.Is(err, errDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	sealed[0] = 2
	var newer *NewerError
	if _, _, err := Open(sealed); !errors.As(err, &newer) || !strings.Contains(err.Error(), "a newer edgebake made this image") {
		t.Error(err)
	}
	if _, err := Decode(bytes.Replace(body, []byte(`"version":1`), []byte(`"version":2`), 1)); !errors.As(err, &newer) {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	body, err := sample().encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Fuzz(func(t *testing.T, b []byte) {
		if x, err := Decode(b); err == nil {
			if _, err := x.encode(); err != nil {
				t.Error(err)
			}
		}
	})
}
