package media

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/mediatest"
)

// TestFramesOfAnySize checks that images can be read and stamped whatever the size of their frames:
// frames need not match the chunks of the golden digest.
func TestFramesOfAnySize(t *testing.T) {
	d := t.TempDir()
	raw, packed := filepath.Join(d, "g.raw"), filepath.Join(d, "g.raw.zst")
	built := golden(t, raw, 8<<20, false)
	golden(t, packed, 8<<20, true)
	stamp(t, raw, StampOptions{Output: filepath.Join(d, "stamped.raw")})
	stamped := disktest.Sum(t, filepath.Join(d, "stamped.raw"))
	random := rand.New(rand.NewPCG(1, 2))
	for name, size := range map[string]func(int64) int64{
		"whole chunks":  func(int64) int64 { return seekable.FrameSize }, // the layout of older images
		"of every size": func(int64) int64 { return 1 + random.Int64N(600<<10) },
	} {
		t.Run(name, func(t *testing.T) {
			d := t.TempDir()
			at := func(name string) string { return filepath.Join(d, name) }
			mediatest.Reframe(t, packed, at("g.raw.zst"), size, seekable.Skippable(nil, 0x184d2a5c, []byte("more")))
			image, err := os.ReadFile(at("g.raw.zst"))
			if err != nil {
				t.Fatal(err)
			}
			if err := Verify(t.Context(), at("g.raw.zst"), nil); err != nil {
				t.Error(err)
			}
			if i, err := Inspect(at("g.raw.zst")); err != nil || i.Slot.Golden != built.Golden {
				t.Errorf("%+v, %v", i, err)
			}
			m := blank(t, 400<<20)
			if _, got, err := flashTo(t, at("g.raw.zst"), m, func(*FlashOptions) {}); err != nil || got.Golden != built.Golden {
				t.Errorf("flashed: %+v, %v", got, err)
			}
			pulled(t, image, disktest.Sum(t, raw), at("pulled.raw"))
			g, err := Open(at("g.raw.zst"))
			if err != nil {
				t.Fatal(err)
			}
			c, err := g.Descriptor()
			g.Close()
			if err != nil || c.Golden != built.Golden {
				t.Errorf("%+v, %v", c, err)
			}

			stamp(t, at("g.raw.zst"), StampOptions{Output: at("copy.raw")})
			stamp(t, at("g.raw.zst"), StampOptions{Output: at("copy.raw.zst")})
			stamp(t, at("g.raw.zst"), StampOptions{})
			for _, name := range []string{"copy", "g"} {
				if err := Verify(t.Context(), at(name+".raw.zst"), nil); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				disktest.Oracle(t, "zstd", "-q", "-d", at(name+".raw.zst"), "-o", at(name+".out"))
				if disktest.Sum(t, at(name+".out")) != stamped {
					t.Errorf("%s: the disk differs", name)
				}
			}
			if disktest.Sum(t, at("copy.raw")) != stamped {
				t.Error("the decompressed copy differs")
			}
			if _, err := Unstamp(at("g.raw.zst")); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(at("g.raw.zst")); err != nil || len(b) != len(image) || bytes.Contains(b, []byte(token)) {
				t.Errorf("unstamped, it has %d bytes of %d, or the token: %v", len(b), len(image), err)
			}
		})
	}
}

// pulled writes a disk from an image whose frames arrive one after another, as package carry does,
// and checks its digest.
func pulled(t *testing.T, image []byte, want, path string) {
	t.Helper()
	z, err := seekable.Open(bytes.NewReader(image), int64(len(image)))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	last := z.Entry(z.Frames() - 1)
	tail := image[last.Offset+last.Compressed:]
	arrived := make([]byte, len(image))
	c, err := NewChunks(bytes.NewReader(arrived), int64(len(image)), tail)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := out.Truncate(c.Size()); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, disk.Align)
	for i := range c.Len() {
		copy(arrived[:c.End(i)], image)
		for range 2 { // the second time as if the frames had arrived again
			if err := c.Take(i, buf, out); err != nil {
				t.Fatal(err)
			}
		}
	}
	if disktest.Sum(t, path) != want {
		t.Error("the pulled image gives a different disk")
	}
	g, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	g.Close()
}
