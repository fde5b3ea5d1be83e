package media

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/mediatest"
)

// signed builds a signed image. It returns the slot's edgebake.json and the public key.
func signed(t *testing.T, path string) (meta ondisk.SlotInfo, key string) {
	t.Helper()
	golden(t, path, 4<<20, false)
	m, err := open(path, os.O_RDWR)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		t.Fatal(err)
	}
	if meta, err = slot.ReadInfo(m.section(p)); err != nil {
		t.Fatal(err)
	}
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	info, err := m.espFile(ondisk.ESPImageInfo)
	if err != nil {
		t.Fatal(err)
	}
	if meta.Signature, err = slot.SignImage(meta.Golden, info, private, built); err != nil {
		t.Fatal(err)
	}
	fill(t, m, meta)
	return meta, public.String()
}

// fill writes the image's slot again, with edgebake.json and more files.
func fill(t *testing.T, m *Image, meta ondisk.SlotInfo, more ...tree.Node) {
	t.Helper()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(meta)
	if err != nil {
		t.Fatal(err)
	}
	img := sliceWriterAt(make([]byte, ondisk.SlotSize))
	nodes := append([]tree.Node{inline(ondisk.SlotMeta, b)}, more...)
	if err := fat.Write(img, nodes, nil, fat.Options{Type: 16, Label: ondisk.LabelSlot, Size: ondisk.SlotSize, Time: built, SectorSize: 512}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.f.WriteAt(img, p.Start); err != nil {
		t.Fatal(err)
	}
}

type sliceWriterAt []byte

func (r sliceWriterAt) WriteAt(p []byte, off int64) (int, error) { return copy(r[off:], p), nil }

// TestWhatNoDigestCovers checks that verify and flash with a key reject an image that could boot
// something other than the build. No digest covers partition types and attributes, or files in the
// slot.
func TestWhatNoDigestCovers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw")
	meta, key := signed(t, path)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	loader := inline("EFI/BOOT/BOOTX64.EFI", []byte("MZ of somebody else"))
	efi := []tree.Node{dir("EFI"), dir("EFI/BOOT"), loader}
	const xbootldr = "bc13c2ff-59e6-4262-a352-b275fd6f7172"
	table := func(change func([]gpt.Partition)) func(*testing.T, *Image) {
		return func(t *testing.T, m *Image) {
			change(m.table.Partitions)
			head, tail, err := gpt.Encode(*m.table)
			if err != nil {
				t.Fatal(err)
			}
			for off, b := range map[int64][]byte{0: head, m.size - int64(len(tail)): tail} {
				if _, err := m.f.WriteAt(b, off); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	into := func(more ...tree.Node) func(*testing.T, *Image) {
		return func(t *testing.T, m *Image) { fill(t, m, meta, more...) }
	}
	hidden := func(short, long string, more ...tree.Node) func(*testing.T, *Image) {
		return func(t *testing.T, m *Image) {
			fill(t, m, meta, more...)
			rewrite(t, m, func(b []byte) { disktest.Disguise(t, b, short, long) })
		}
	}
	swap := table(func(p []gpt.Partition) { p[0].Type, p[1].Type = p[1].Type, p[0].Type })
	for _, tc := range []struct {
		name string
		do   func(*testing.T, *Image)
		want string // part of the error; empty if the image is accepted
		// site means that stamping a Site repairs the slot.
		site bool
	}{
		{"as it was built", func(*testing.T, *Image) {}, "", true},
		{"types of ESP and slot", swap, "type", false},
		{"types and a loader in the slot", func(t *testing.T, m *Image) { swap(t, m); into(efi...)(t, m) }, "type", false},
		{"the slot as XBOOTLDR", table(func(p []gpt.Partition) { p[1].Type = xbootldr }), "partition 2 (EDGEBAKE) has type " + xbootldr, false},
		{"two ESPs", table(func(p []gpt.Partition) { p[1].Type = gpt.TypeESP }), "partition 2 (EDGEBAKE)", false},
		{"ROOT-B as a root", table(func(p []gpt.Partition) { p[3].Type = gpt.TypeRootAMD64 }), "partition 4 (ROOT-B)", false},
		{"attributes", table(func(p []gpt.Partition) { p[4].Attributes = 0 }), "attributes", false},
		{"legacy boot", table(func(p []gpt.Partition) { p[1].Attributes |= 1 << 2 }), "attributes", false},
		{"names", table(func(p []gpt.Partition) { p[2].Name, p[3].Name = p[3].Name, p[2].Name }), "built as ROOT-A", false},
		{"a loader in the slot", into(efi...), `"EFI"`, true},
		{"one in other letters", into(dir("efi"), inline("efi/x", nil)), `"efi"`, true},
		{"boot entries in the slot", into(dir("loader"), dir("loader/entries"), inline("loader/entries/z.conf", []byte("linux /x"))), `"loader"`, true},
		{"a script of the shell", into(inline("startup.nsh", []byte("fs1:x"))), `"startup.nsh"`, true},
		{"a directory with a file's name", into(dir("site.yaml"), inline("site.yaml/x", nil)), `"site.yaml"`, true},
		{"a loader behind another name", hidden("EFI        ", "files", efi...), `"files", also named "EFI"`, true},
		{"one behind a name with a slash", hidden("EFI        ", "x/y", efi...), `"x/y" (an invalid file name)`, true},
		{"one behind a name of systems", hidden("EFI        ", ".Trashes", efi...), `".Trashes", also named "EFI"`, true},
		{"one behind the name of a file", hidden("EFI        ", "site.yaml", efi...), `"site.yaml"`, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			disktest.Write(t, path, whole)
			m, err := open(path, os.O_RDWR)
			if err != nil {
				t.Fatal(err)
			}
			tc.do(t, m)
			m.Close()
			check := func(what string, want string, err error) {
				t.Helper()
				if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
					t.Errorf("%s: %v", what, err)
				}
			}
			_, err = verifySignature(path, key)
			check("verify --key", tc.want, err)
			if !tc.site {
				check("verify", tc.want, Verify(t.Context(), path, nil))
			}
			one := site()
			for what, s := range map[string]*Site{"flash": nil, "flash with a Site": &one} {
				want := tc.want
				if s != nil && tc.site {
					want = ""
				}
				f, err := PrepareFlash(path, FlashOptions{Site: s, Stamp: StampOptions{Now: now}, Size: int64(len(whole)) + 8<<20, Random: random, Keys: []string{key}})
				check(what, want, err)
				if err == nil {
					f.Close()
				}
			}
		})
	}
	if now, err := os.ReadFile(path); err != nil || bytes.Equal(now, whole) {
		t.Errorf("the last case changed nothing: %v", err)
	}
}

// rewrite changes bytes in the image's slot.
func rewrite(t *testing.T, m *Image, change func([]byte)) {
	t.Helper()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, p.Size)
	if _, err := m.ReadAt(b, p.Start); err != nil {
		t.Fatal(err)
	}
	change(b)
	if _, err := m.f.WriteAt(b, p.Start); err != nil {
		t.Fatal(err)
	}
}

// TestSlotsOfOtherPrograms checks that verify --key rejects a slot that another program has
// changed, and that flash --key writes the slot as edgebake makes it, because firmware may read
// another program's FAT in another way.
func TestSlotsOfOtherPrograms(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw")
	meta, key := signed(t, path)
	size := int64(0)
	if st, err := os.Stat(path); err == nil {
		size = st.Size()
	}
	own := inline(ondisk.SlotIgnition, []byte(`{"ignition":{"version":"3.5.0"}}`))
	for name, do := range map[string]func(*testing.T, *Image){
		"what systems leave": func(t *testing.T, m *Image) {
			fill(t, m, meta, own, dir("System Volume Information"), inline(".DS_Store", nil), inline("._site.yaml", nil))
		},
		"a partition table in the partition": func(t *testing.T, m *Image) {
			fill(t, m, meta, own)
			rewrite(t, m, func(b []byte) { copy(b[446:], "\x80\x00\x01\x00\x0c\x00\x01\x00\x00\x40\x00\x00\x00\x20\x00\x00") })
		},
		"the second allocation table": func(t *testing.T, m *Image) {
			fill(t, m, meta, own)
			rewrite(t, m, func(b []byte) { b[int(b[14])*512+int(b[22])*512+100] ^= 1 })
		},
		"bytes that belong to no file": func(t *testing.T, m *Image) {
			fill(t, m, meta, own)
			rewrite(t, m, func(b []byte) { b[len(b)-1] = 1 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := open(path, os.O_RDWR)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			fill(t, m, meta, own)
			p, err := m.partition(ondisk.LabelSlot)
			if err != nil {
				t.Fatal(err)
			}
			want := make([]byte, p.Size)
			if _, err := m.ReadAt(want, p.Start); err != nil {
				t.Fatal(err)
			}
			if _, err := verifySignature(path, key); err != nil {
				t.Fatal(err)
			}
			do(t, m)
			if _, err := verifySignature(path, key); err == nil || !strings.Contains(err.Error(), "another program has changed the slot") {
				t.Errorf("verify --key: %v", err)
			}
			if _, err := m.Descriptor(); !errors.Is(err, ErrNotGolden) {
				t.Errorf("push: %v", err)
			}
			f, err := PrepareFlash(path, FlashOptions{Size: size + 8<<20, Random: random, Keys: []string{key}})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if !bytes.Equal(f.slot, want) {
				t.Error("flash --key writes another slot than one with the same files")
			}
		})
	}
}

func verifySignature(path, key string) (string, error) {
	g, err := Open(path)
	if err != nil {
		return "", err
	}
	defer g.Close()
	return g.VerifySignature([]string{key})
}

// TestVerifySignatureOfTheIndex checks that verify --key also checks the chunk index: its
// signature, and that it belongs to this image.
func TestVerifySignatureOfTheIndex(t *testing.T) {
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, stranger, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	made := func(id string, index *minisign.PrivateKey) string {
		i := mediatest.Image{ID: id, Data: 1 << 20, FreeRoot: 1 << 20, FreeData: 1 << 20,
			Sign: func(golden string, info []byte) (string, error) { return slot.SignImage(golden, info, private, built) }}
		if index != nil {
			i.SignIndex = func(body []byte) (string, error) { return slot.SignIndex(body, *index, built) }
		}
		path := filepath.Join(dir, fmt.Sprintf("%s-%t-%t.raw.zst", id, index == &private, index == &stranger))
		mediatest.Make(t, path, i)
		return path
	}
	good, other := made("good", &private), made("other", &private)
	// Combine the frames of one image with the index of another. Each index has a valid signature.
	a, indexA := openIndex(t, good)
	_, indexB := openIndex(t, other)
	mixed := filepath.Join(dir, "mixed.raw.zst")
	if err := os.WriteFile(mixed, bytes.Replace(a, seekable.Skippable(nil, chunk.Magic, indexA), seekable.Skippable(nil, chunk.Magic, indexB), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		good:                    "",
		made("good", nil):       "",
		made("good", &stranger): "the chunk index is signed by key",
		mixed:                   "belongs to another image",
	} {
		_, err := verifySignature(path, public.String())
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", filepath.Base(path), err)
		}
	}
}

// openIndex returns the bytes of a compressed image, and its chunk index.
func openIndex(t *testing.T, path string) (file, index []byte) {
	t.Helper()
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	z, err := seekable.Open(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	if index, err = io.ReadAll(z.Extra(chunk.Magic)); err != nil {
		t.Fatal(err)
	}
	return file, index
}
