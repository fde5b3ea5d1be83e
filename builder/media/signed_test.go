package media

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/fat"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/configs/ondisk/tree"
)

// signed builds an image that a key has signed, and returns the slot's
// edgebake.json with it.
func signed(t *testing.T, path string) (meta ondisk.SlotInfo, key string) {
	t.Helper()
	golden(t, path, 4<<20, false)
	m, err := open(path, os.O_RDWR)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
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

// fill writes the image's slot anew: edgebake.json and whatever else.
func fill(t *testing.T, m *image, meta ondisk.SlotInfo, more ...tree.Node) {
	t.Helper()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(meta)
	if err != nil {
		t.Fatal(err)
	}
	img := room(make([]byte, ondisk.SlotSize))
	nodes := append([]tree.Node{inline(ondisk.SlotMeta, b)}, more...)
	if err := fat.Write(img, nodes, nil, fat.Options{Type: 16, Label: ondisk.LabelSlot, Size: ondisk.SlotSize, Time: built, SectorSize: 512}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.f.WriteAt(img, p.Start); err != nil {
		t.Fatal(err)
	}
}

type room []byte

func (r room) WriteAt(p []byte, off int64) (int, error) { return copy(r[off:], p), nil }

// TestWhatNoDigestCovers: what a machine boots is what the owner of the key has
// built, or neither verify nor flash take the image. The partition types, their
// attributes and the slot's files are in no digest.
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
	table := func(change func([]gpt.Partition)) func(*testing.T, *image) {
		return func(t *testing.T, m *image) {
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
	into := func(more ...tree.Node) func(*testing.T, *image) {
		return func(t *testing.T, m *image) { fill(t, m, meta, more...) }
	}
	swap := table(func(p []gpt.Partition) { p[0].Type, p[1].Type = p[1].Type, p[0].Type })
	for _, tc := range []struct {
		name string
		do   func(*testing.T, *image)
		want string // "": it is taken
		// site: a Site in its place makes the slot a good one.
		site bool
	}{
		{"as it was built", func(*testing.T, *image) {}, "", true},
		{"types of ESP and slot", swap, "type", false},
		{"types and a loader in the slot", func(t *testing.T, m *image) { swap(t, m); into(efi...)(t, m) }, "type", false},
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
		{"what systems leave", into(dir("System Volume Information"), inline(".DS_Store", nil), inline("._site.yaml", nil)), "", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := os.WriteFile(path, whole, 0o600); err != nil {
				t.Fatal(err)
			}
			m, err := open(path, os.O_RDWR)
			if err != nil {
				t.Fatal(err)
			}
			tc.do(t, m)
			m.close()
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

func verifySignature(path, key string) (string, error) {
	g, err := OpenGolden(path)
	if err != nil {
		return "", err
	}
	defer g.Close()
	return g.VerifySignature([]string{key})
}
