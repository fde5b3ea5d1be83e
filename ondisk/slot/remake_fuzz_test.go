package slot

import (
	"bytes"
	"io"
	"testing"
)

// overlaid is a slot with other bytes in one place. It copies no data.
type overlaid struct {
	img, patch []byte
	at         int
}

func (p overlaid) ReadAt(b []byte, off int64) (int, error) {
	if off >= int64(len(p.img)) {
		return 0, io.EOF
	}
	n := copy(b, p.img[off:])
	if from := max(off, int64(p.at)); from < min(off+int64(n), int64(p.at+len(p.patch))) {
		copy(b[from-off:n], p.patch[from-int64(p.at):])
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// FuzzRemake remakes a damaged slot. The result must be a slot as edgebake writes it.
func FuzzRemake(f *testing.F) {
	img := mustMake(f, sample())
	reserved := int(img[14]) * 512
	f.Add(uint32(reserved), []byte{0xff, 0xff})
	f.Add(uint32(11), []byte{0, 16})
	f.Add(uint32(510), []byte{0, 0})
	f.Add(uint32(39), []byte("1234"))
	f.Add(uint32(len(img)-1), []byte{1})
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		p := overlaid{img: img, at: int(at) % len(img)}
		p.patch = patch[:min(len(patch), len(img)-p.at)]
		made, err := Remake(p)
		if err != nil {
			return
		}
		same := bytes.Equal(made[:p.at], img[:p.at]) && bytes.Equal(made[p.at:p.at+len(p.patch)], p.patch) && bytes.Equal(made[p.at+len(p.patch):], img[p.at+len(p.patch):])
		var r io.ReaderAt = bytes.NewReader(made)
		if same {
			r = p
		}
		if err := AsMade(r); err != nil {
			t.Errorf("what was made is not as edgebake writes it: %v", err)
		}
	})
}
