package media

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays/siteconf"
	"github.com/edgebake/edgebake/test/disktest"
)

var (
	built = time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)
	now   = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)
)

func dir(p string) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: built}}
}

func inline(p string, b []byte) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: built, Data: tree.Bytes(b)}}
}

func blob(p string, size int64) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: built, Data: tree.Content{Blob: "b", Size: size}}}
}

const sbom = `{"spdxVersion":"SPDX-2.3","packages":[{"name":"runc","versionInfo":"1.1.15"},{"name":"base-files","versionInfo":"13"}]}`

func TestMain(m *testing.M) {
	code := m.Run()
	if goldens.dir != "" {
		os.RemoveAll(goldens.dir)
	}
	os.Exit(code)
}

// goldens caches the images that golden makes. Each is built once and then copied.
var goldens struct {
	sync.Mutex
	dir string
	of  map[string]*disk.Result
}

// golden makes a golden image whose root file system has a file of data bytes.
func golden(t testing.TB, path string, data int64, zstd bool) *disk.Result {
	t.Helper()
	goldens.Lock()
	defer goldens.Unlock()
	if goldens.dir == "" {
		dir, err := os.MkdirTemp("", "edgebake-media-")
		if err != nil {
			t.Fatal(err)
		}
		goldens.dir, goldens.of = dir, map[string]*disk.Result{}
	}
	name := filepath.Join(goldens.dir, fmt.Sprintf("%d-%t", data, zstd))
	if goldens.of[name] == nil {
		goldens.of[name] = goldenWith(t, name, data, zstd, nil, nil)
	}
	disktest.Copy(t, name, path)
	return goldens.of[name]
}

// goldenWith makes a golden image with more files in its root and in DATA.
func goldenWith(t testing.TB, path string, data int64, zstd bool, root, state []tree.Node) *disk.Result {
	t.Helper()
	return goldenFor(t, path, data, zstd, 512, root, state)
}

// goldenFor makes a golden image for disks with the given sector size.
func goldenFor(t testing.TB, path string, data int64, zstd bool, sector int64, root, state []tree.Node) *disk.Result {
	t.Helper()
	esp := int64(64 << 20)
	if sector == 4096 {
		esp = 264 << 20 // 4 KiB clusters, of which FAT32 requires at least 65,525
	}
	noise := make([]byte, data)
	rand.NewChaCha8([32]byte{1}).Read(noise[:data/2])
	info := ondisk.ImageInfo{
		Version: 1, Name: "test", Plan: "aa11", Arch: "amd64", SourceDate: built.Unix(),
		NodeTypes: []string{"edge", "native"}, SiteVersions: []string{"v1alpha1"},
		Kubernetes: "v1.36.3", Images: []ondisk.ImageRef{{Ref: "edgebake.test/pause:1", Digest: "sha256:00", Size: 5}},
		Yurthub: &ondisk.YurthubInfo{Version: "v1.7.0", Form: "unit"},
	}
	spec := disk.Spec{ID: info.Plan, Arch: info.Arch, SourceDate: built, SectorSize: sector, Partitions: []disk.Partition{
		{Label: ondisk.LabelESP, FS: disk.FAT32, Size: esp, Nodes: []tree.Node{dir("."), blob("linux", min(data/4, 32<<20)), inline("edgebake/sbom.spdx.json", []byte(sbom))}},
		{Label: ondisk.LabelSlot, FS: disk.FAT16},
		{Label: ondisk.LabelRootA, FS: disk.Ext4, FreeBytes: 8 << 20, Nodes: append([]tree.Node{dir("."), blob("data", data)}, root...)},
		{Label: ondisk.LabelRootB},
		{Label: ondisk.LabelData, FS: disk.Ext4, FreeBytes: 8 << 20, Nodes: append([]tree.Node{dir("."), dir("lib")}, state...)},
	}}
	l, err := disk.Compute(spec)
	if err != nil {
		t.Fatal(err)
	}
	info.Partitions = l.Parts
	entry := fmt.Sprintf("title test\noptions root=PARTUUID=%s rw systemd.mount-extra=PARTUUID=%s:/var:ext4 systemd.mount-extra=PARTUUID=%s:/efi:vfat quiet\n",
		l.Find(ondisk.LabelRootA).GUID, l.Find(ondisk.LabelData).GUID, l.Find(ondisk.LabelESP).GUID)
	spec.Partitions[0].Nodes = append(spec.Partitions[0].Nodes, inline(ondisk.ESPEntryA, []byte(entry)))
	b, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	spec.Partitions[0].Nodes = append(spec.Partitions[0].Nodes, inline("edgebake/image.json", b))
	r, err := disk.Write(t.Context(), path, spec, l, disktest.Blobs{"b": noise}, disk.WriteOptions{Zstd: zstd, ImageInfo: b, Slot: func(d disk.Digest) ([]byte, error) {
		return slot.Make(slot.Contents{Info: ondisk.SlotInfo{Plan: info.Plan, Golden: d.Golden, Parts: d.Parts, SiteVersions: info.SiteVersions, SectorSize: sector}, Time: built})
	}})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

const token = "abcdef.0123456789abcdef"

const siteText = `apiVersion: edgebake.io/v1alpha1
kind: Site
nodeType: edge
nodePool: shops
arch: amd64
masters: ["192.0.2.11:6443"]
unsafeSkipCAVerification: true
credentials: {token: ` + token + `}
`

func site() Site {
	doc, err := configs.ParseSite("site.yaml", []byte(siteText))
	if err != nil {
		panic(err)
	}
	return Site{
		Doc:   doc,
		Files: map[string][]byte{"files/motd": []byte("hello")},
	}
}

func inventory(t testing.TB) *configs.Inventory {
	t.Helper()
	inv, err := configs.ParseInventory("i.yaml", []byte("apiVersion: edgebake.io/v1alpha1\nkind: Inventory\ndefaults: {masters: [192.0.2.11:6443], nodeType: edge, nodePool: shops, unsafeSkipCAVerification: true, credentials: {token: bcdefa.0123456789abcdef}}\nsites: [{name: a, match: {serial: SN1}}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func stamp(t testing.TB, path string, o StampOptions) *Stamped {
	t.Helper()
	o.Now = now
	r, err := Stamp(t.Context(), path, site(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// failingWriter is a slot that stores a limited number of writes and then fails.
type failingWriter struct {
	window
	left int
}

func (d *failingWriter) WriteAt(p []byte, off int64) (int, error) {
	if d.left--; d.left < 0 {
		return 0, errors.New("the power is gone")
	}
	return d.window.WriteAt(p, off)
}

// TestStampingIsCut cuts the power while a device is stamped. The golden digest and its signature,
// which only the slot contains, must not be lost.
func TestStampingIsCut(t *testing.T) {
	path := filepath.Join(disktest.Scratch(t), "i.raw")
	golden(t, path, 1<<20, false)
	want := stamp(t, path, StampOptions{}).Slot.Golden
	cut := func(writes int) error {
		m, err := open(path, os.O_RDWR)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		p, err := m.partition(ondisk.LabelSlot)
		if err != nil {
			t.Fatal(err)
		}
		_, img, err := m.encodeSlot(site(), StampOptions{Now: now.Add(time.Hour)})
		if err != nil {
			t.Fatal(err)
		}
		return putRaw(&failingWriter{window{m.f, p.Start, true}, writes}, true, img)
	}
	for writes := 0; ; writes++ {
		if err := cut(writes); err == nil {
			if writes < 4 {
				t.Errorf("%d writes", writes)
			}
			break
		}
		if again := stamp(t, path, StampOptions{}).Slot.Golden; again != want || want == "" {
			t.Fatalf("cut after %d writes: golden digest %q, was %q", writes, again, want)
		}
	}
}

// TestEveryWayOfStampingGivesTheSameDisk compares the results of stamping raw and compressed
// images, in place and into new files.
func TestEveryWayOfStampingGivesTheSameDisk(t *testing.T) {
	d := t.TempDir()
	at := func(name string) string { return filepath.Join(d, name) }
	r := golden(t, at("g.raw"), 8<<20, false)
	golden(t, at("g.raw.zst"), 8<<20, true)
	before := disktest.Sum(t, at("g.raw"))
	beforeZ := disktest.Sum(t, at("g.raw.zst"))

	got := stamp(t, at("g.raw"), StampOptions{Output: at("new.raw")})
	if got.Path != at("new.raw") || got.Slot.Golden != r.Golden || got.Slot.Plan != "aa11" || got.Slot.Stamped != now.Unix() {
		t.Errorf("%+v", got)
	}
	stamp(t, at("g.raw.zst"), StampOptions{Output: at("new.raw.zst")})
	stamp(t, at("g.raw.zst"), StampOptions{Output: at("unpacked.raw")})
	if disktest.Sum(t, at("g.raw")) != before || disktest.Sum(t, at("g.raw.zst")) != beforeZ {
		t.Error("the golden image changed")
	}
	size, err := os.Stat(at("g.raw.zst"))
	if err != nil {
		t.Fatal(err)
	}
	stamp(t, at("g.raw"), StampOptions{})
	stamp(t, at("g.raw.zst"), StampOptions{})
	if st, err := os.Stat(at("g.raw.zst")); err != nil || st.Size() != size.Size() {
		t.Errorf("the compressed image's size changed: %v", err)
	}
	for _, name := range []string{"new", "g"} {
		disktest.Oracle(t, "zstd", "-q", "-t", at(name+".raw.zst"))
		disktest.Oracle(t, "zstd", "-q", "-d", at(name+".raw.zst"), "-o", at(name+".out"))
	}
	want := disktest.Sum(t, at("g.raw"))
	if want == before {
		t.Error("stamping changed nothing")
	}
	for _, name := range []string{"new.raw", "unpacked.raw", "new.out", "g.out"} {
		if disktest.Sum(t, at(name)) != want {
			t.Errorf("%s: the disk differs", name)
		}
	}
	for _, name := range []string{"new.raw", "unpacked.raw", "new.raw.zst", "g.raw", "g.raw.zst"} {
		if st, err := os.Stat(at(name)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s holds a token and has mode %v", name, st.Mode())
		}
	}
	for _, name := range []string{"new.raw", "unpacked.raw", "new.raw.zst", "g.raw", "g.raw.zst"} {
		if err := Verify(t.Context(), at(name), nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if out := disktest.Oracle(t, "sgdisk", "-v", at("new.raw")); !strings.Contains(out, "No problems found") {
		t.Errorf("sgdisk: %s", out)
	}
	// After the second stamping, no part of the first Site may be left.
	second := site()
	second.Doc.Credentials.Token, second.Files = configs.NewSecret("bcdefa.0123456789abcdef"), nil
	for _, name := range []string{"new.raw", "new.raw.zst"} {
		if _, err := Stamp(t.Context(), at(name), second, StampOptions{Now: now}); err != nil {
			t.Fatal(err)
		}
		if disktest.Contains(t, at(name), token) {
			t.Errorf("%s: the first site's token is still there", name)
		}
	}
	if entries, err := os.ReadDir(d); err != nil || len(entries) != 7 {
		t.Errorf("left behind: %v", entries)
	}
}

func TestInspect(t *testing.T) {
	for _, format := range []string{FormatRaw, FormatZstd} {
		path := filepath.Join(t.TempDir(), "i")
		r := golden(t, path, 8<<20, format == FormatZstd)
		i, err := Inspect(path)
		if err != nil {
			t.Fatal(err)
		}
		if i.Format != format || i.Size < 100<<20 || i.Stored > i.Size/2 || i.Image.Kubernetes != "v1.36.3" || len(i.Image.Images) != 1 {
			t.Errorf("%+v", i)
		}
		if i.Slot.State != SlotGolden || i.Slot.Golden != r.Golden || !i.Slot.Stamped.IsZero() || len(i.Slot.Files) > 0 {
			t.Errorf("slot: %+v", i.Slot)
		}
		if want := []Package{{"base-files", "13"}, {"runc", "1.1.15"}}; !slices.Equal(i.Packages, want) {
			t.Errorf("packages: %v", i.Packages)
		}
		if len(i.Boot) != 4 || i.Boot[0].Name != "edgebake/image.json" || i.Boot[2] != (File{"linux", 2 << 20}) {
			t.Errorf("boot: %v", i.Boot)
		}
		for n, want := range []struct {
			label, fs string
			free      int64
		}{{"ESP", "fat32", 50 << 20}, {"EDGEBAKE", "fat16", 15 << 20}, {"ROOT-A", "ext4", 8 << 20}, {"ROOT-B", "", 0}, {"DATA", "ext4", 8 << 20}} {
			p := i.Partitions[n]
			if p.Label != want.label || p.FS != want.fs || p.Free < want.free || p.Error != "" {
				t.Errorf("partition: %+v", p)
			}
		}
		stamp(t, path, StampOptions{})
		if i, err = Inspect(path); err != nil || i.Slot.State != SlotSite || !i.Slot.Stamped.Equal(now) || len(i.Slot.Files) != 2 {
			t.Errorf("stamped: %+v %v", i, err)
		}
		b, err := json.Marshal(i)
		if err != nil || bytes.Contains(b, []byte(token)) || strings.Contains(fmt.Sprintf("%+v", i), token) {
			t.Errorf("the token shows: %v", err)
		}
	}
}

func TestSitesThatTheImageCannotServe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw")
	golden(t, path, 1<<20, false)
	before := disktest.Sum(t, path)
	out := filepath.Join(t.TempDir(), "out")
	for name, tc := range map[string]struct {
		change func(*Site)
		want   []string
	}{
		"everything": {func(s *Site) {
			s.Doc.Arch, s.Doc.NodeType, s.Doc.APIVersion = "arm64", "cloud", "edgebake.io/v2"
		}, []string{"the Site is for arm64", `type "cloud", only edge, native`, `supports Site v1alpha1, but this Site is "v2"`}},
		"organizations": {func(s *Site) { s.Doc.Organizations = []string{"openyurt:tenant:a"} }, []string{"organizations would have no effect: yurthub v1.7.0 of this image"}},
		"none":          {func(s *Site) { s.Doc = nil }, []string{"neither a site.yaml nor an inventory.yaml"}},
		"both":          {func(s *Site) { s.Inventory = inventory(t) }, []string{"both exist"}},
		"odd file":      {func(s *Site) { s.Files["x"] = nil }, []string{"x does not belong"}},
		"too large":     {func(s *Site) { s.Files["files/x"] = make([]byte, 20<<20) }, []string{"room"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := site()
			tc.change(&s)
			for _, o := range []StampOptions{{Now: now}, {Now: now, Output: out}} {
				_, err := Stamp(t.Context(), path, s, o)
				if err == nil {
					t.Fatal("stamped")
				}
				for _, w := range tc.want {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("error lacks %q: %v", w, err)
					}
				}
			}
		})
	}
	if disktest.Sum(t, path) != before {
		t.Error("the image changed")
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("an output was made")
	}
}

// TestYurthubArgsThatTheImageCannotServe checks that arguments are rejected if the image's yurthub
// does not have them: they would keep yurthub from starting.
func TestYurthubArgsThatTheImageCannotServe(t *testing.T) {
	at := func(version string) *ondisk.YurthubInfo { return &ondisk.YurthubInfo{Version: version} }
	for name, tc := range map[string]struct {
		yurthub *ondisk.YurthubInfo
		want    string
	}{
		"before the flag":  {at("v1.6.0"), "yurthub.extraArgs[1]: --pool-scope-resources is not a flag of yurthub v1.6.0 and would keep it from starting: remove it, or build the Image with yurthub v1.6.1 or later"},
		"with the flag":    {at("v1.6.1"), ""},
		"after it":         {at("v1.7.0"), ""},
		"a later edgebake": {at("v1.9.0"), ""},
		"no yurthub":       {nil, ""}, // the node type is reported instead
	} {
		t.Run(name, func(t *testing.T) {
			m := &Image{info: ondisk.ImageInfo{Arch: "amd64", NodeTypes: []string{"edge"}, SiteVersions: []string{"v1alpha1"}, Yurthub: tc.yurthub}}
			s := site()
			m.system = func() (siteconf.Root, error) { return nil, nil }
			s.Doc.Yurthub.ExtraArgs = []string{"--v=4", "--pool-scope-resources=services"}
			got := ""
			probs, err := m.serves(s)
			if err := errors.Join(err, probs.Err()); err != nil {
				got = err.Error()
			}
			if got != tc.want {
				t.Errorf("says %q, want %q", got, tc.want)
			}
		})
	}
}

func TestFilesThatAreNoImage(t *testing.T) {
	d := t.TempDir()
	raw, packed := filepath.Join(d, "g.raw"), filepath.Join(d, "g.raw.zst")
	golden(t, raw, 1<<20, false)
	golden(t, packed, 1<<20, true)
	read := func(p string) []byte {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	good, goodZ := read(raw), read(packed)
	cut := func(b []byte, n int) []byte { return b[:len(b)-n] }
	nameless := slices.Clone(good)
	for i := 0; ; {
		// Hide image.json by renaming its directory in the FAT.
		k := bytes.Index(nameless[i:], []byte("EDGEBAKE   \x10"))
		if k < 0 {
			break
		}
		i += k
		nameless[i] = 'X'
		clearLong(nameless[i-32 : i])
	}
	// An image.json that claims to have 16 MiB must be rejected: no signature has been checked yet.
	huge := slices.Clone(good)
	found := 0
	for i := 8; ; i++ {
		k := bytes.Index(huge[i:], []byte("JSO"))
		if k < 0 {
			break
		}
		if i += k; bytes.HasPrefix(huge[i-8:], []byte("IMAGE")) {
			binary.LittleEndian.PutUint32(huge[i-8+28:], 16<<20)
			found++
		}
	}
	if found == 0 {
		t.Fatal("image.json is not found")
	}
	twice := slices.Clone(good)
	table, err := gpt.Read(bytes.NewReader(good), int64(len(good)))
	if err != nil {
		t.Fatal(err)
	}
	table.Partitions[len(table.Partitions)-1].Name = ondisk.LabelSlot
	head, tail, err := gpt.Encode(*table)
	if err != nil {
		t.Fatal(err)
	}
	copy(twice, head)
	copy(twice[len(twice)-len(tail):], tail)
	plain := filepath.Join(d, "plain.zst")
	disktest.Oracle(t, "zstd", "-q", raw, "-o", plain)

	for name, tc := range map[string]struct {
		content []byte
		want    string
	}{
		"empty":               {nil, "no GUID partition table"},
		"zeros":               {make([]byte, 1<<20), "no GUID partition table"},
		"text":                {[]byte(strings.Repeat("hello\n", 10000)), "no GUID partition table"},
		"raw truncated":       {cut(good, 1<<20), "truncated"},
		"raw cut to nothing":  {good[:1000], "no GUID partition table"},
		"zst truncated":       {cut(goodZ, 5000), "truncated"},
		"zst without a table": {read(plain), "another program compressed this edgebake image"},
		"no image.json":       {nameless, "file does not exist"},
		"two slots":           {twice, "two partitions"},
		"huge image.json":     {huge, "has 16777216 bytes"},
		"gzip":                {[]byte("\x1f\x8b\x08"), "gzip"},
		"qcow2":               {[]byte("QFI\xfb1234"), "qemu-img convert"},
	} {
		t.Run(name, func(t *testing.T) {
			p := filepath.Join(t.TempDir(), "image")
			disktest.Write(t, p, tc.content)
			before := disktest.Sum(t, p)
			_, errInspect := Inspect(p)
			_, errStamp := Stamp(t.Context(), p, site(), StampOptions{Now: now})
			errVerify := Verify(t.Context(), p, nil)
			for _, err := range []error{errInspect, errStamp, errVerify} {
				if !errors.Is(err, ErrNotOurs) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v", err)
				}
			}
			if disktest.Sum(t, p) != before {
				t.Error("the file was changed")
			}
		})
	}
	t.Run("what is there of an image", func(t *testing.T) {
		for name, tc := range map[string]struct {
			content []byte
			want    string
		}{
			"zst whole":    {cut(goodZ, 5000), fmt.Sprintf(": the edgebake image is truncated: it has %d bytes, and the table at its end is missing: copy it again", len(goodZ)-5000)},
			"zst early":    {goodZ[:1<<20], "the edgebake image is truncated: it has 1048576 bytes, and the table at its end is missing: copy it again"},
			"zst damaged":  {append(bytes.Clone(goodZ[:1<<20]), goodZ[1<<20+1:]...), "the edgebake image is damaged: "},
			"other zst":    {read(plain), ": another program compressed this edgebake image: decompress it first (zstd -d), or build it again"},
			"raw":          {cut(good, 1<<20), fmt.Sprintf("the edgebake image is truncated: it has %d of %d bytes: copy it again", len(good)-1<<20, len(good))},
			"another disk": {cut(bytes.ReplaceAll(good[:1<<20], []byte("E\x00D\x00G\x00E\x00"), []byte("O\x00D\x00G\x00E\x00")), 1), "not an edgebake image"},
		} {
			p := filepath.Join(t.TempDir(), "image")
			disktest.Write(t, p, tc.content)
			_, err := Inspect(p)
			if !errors.Is(err, ErrNotOurs) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "not an edgebake image") != (name == "another disk") {
				t.Errorf("%s: %v", name, err)
			}
			if said := strings.ReplaceAll(err.Error(), p, "my-edge.raw.zst"); len(said) > 190 {
				t.Errorf("%s: %d characters: %s", name, len(said), said)
			}
		}
	})
	t.Run("directory", func(t *testing.T) {
		if _, err := Inspect(t.TempDir()); !errors.Is(err, ErrNotOurs) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("nothing", func(t *testing.T) {
		if _, err := Inspect(filepath.Join(d, "no")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("slot compressed by another program", func(t *testing.T) {
		p := filepath.Join(t.TempDir(), "x.zst")
		recompress(t, raw, p)
		if i, err := Inspect(p); err != nil || i.Slot.State != SlotGolden {
			t.Errorf("Inspect: %v", err)
		}
		if _, err := Stamp(t.Context(), p, site(), StampOptions{Now: now}); !errors.Is(err, ErrNotOurs) || !strings.Contains(err.Error(), "zstd -d") {
			t.Errorf("Stamp: %v", err)
		}
		// An output without the extension .zst is not compressed.
		out := filepath.Join(t.TempDir(), "x.raw")
		if _, err := Stamp(t.Context(), p, site(), StampOptions{Now: now, Output: out}); err != nil {
			t.Error(err)
		} else if err := Verify(t.Context(), out, nil); err != nil {
			t.Error(err)
		}
	})
}

// clearLong deletes a directory entry that is part of a long name, so that the short name applies.
func clearLong(entry []byte) {
	if entry[11] == 0x0f {
		entry[0] = 0xe5
	}
}

// recompress compresses all frames of an image, including the slot's.
func recompress(t *testing.T, raw, out string) {
	t.Helper()
	b, err := os.ReadFile(raw)
	if err != nil {
		t.Fatal(err)
	}
	enc, err := seekable.NewEncoder()
	if err != nil {
		t.Fatal(err)
	}
	var tab seekable.Table
	var packed []byte
	for len(b) > 0 {
		c := b[:min(len(b), seekable.FrameSize)]
		at := len(packed)
		packed = enc.Encode(packed, c)
		tab.Append(len(packed)-at, len(c), seekable.Sum(c))
		b = b[len(c):]
	}
	if err := os.WriteFile(out, append(packed, tab.Encode()...), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestVerifyTellsOfAFrame checks that the error for a damaged frame contains a fix.
func TestVerifyTellsOfAFrame(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw.zst")
	golden(t, path, 8<<20, true)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// Find the last frame with content, which is after the slot.
	magic := []byte{0x28, 0xb5, 0x2f, 0xfd}
	at := len(b)
	for next := at; at >= 0 && (next-at < 4<<10 || next == len(b)); {
		next = at
		at = bytes.LastIndex(b[:at], magic)
	}
	if at < 0 {
		t.Fatal("no frame was found")
	}
	b[at] ^= 1
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Verify(t.Context(), path, nil); err == nil || !strings.Contains(err.Error(), "decompressing frame") || !strings.Contains(err.Error(), "copy or build it again") {
		t.Errorf("%v", err)
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw")
	golden(t, path, 8<<20, false)
	info, err := Inspect(path)
	if err != nil {
		t.Fatal(err)
	}
	flip := func(off int64) {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, off); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
	var last int64
	if err := Verify(t.Context(), path, func(done, total int64) { last = total - done }); err != nil || last != 0 {
		t.Errorf("before: %v, %d bytes left", err, last)
	}
	for label, off := range map[string]int64{"ESP": 40 << 20, "ROOT-A": 5 << 20, "ROOT-B": 3 << 20, "DATA": 6 << 20} {
		for _, p := range info.Partitions {
			if p.Label != label {
				continue
			}
			flip(p.Start + off)
			if err := Verify(t.Context(), path, nil); err == nil || !strings.Contains(err.Error(), "golden digest") {
				t.Errorf("a flipped bit in %s is not detected: %v", label, err)
			}
			flip(p.Start + off)
		}
	}
	end := info.Partitions[len(info.Partitions)-1]
	for where, off := range map[string]int64{
		"before partition ESP": 1 << 20, "right behind the table": gpt.HeadSize(512), "behind the last partition": end.Start + end.Size,
		"before the table's copy": info.Size - gpt.TailSize(512) - 1,
	} {
		flip(off)
		if err := Verify(t.Context(), path, nil); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("byte %d of the disk should be zero", off)) {
			t.Errorf("a flipped bit %s is not detected: %v", where, err)
		}
		flip(off)
	}
	if err := Verify(t.Context(), path, nil); err != nil {
		t.Errorf("after the repair: %v", err)
	}
	flip(info.Size - 512) // in the backup partition table
	flip(info.Partitions[1].Start + 20)
	err = Verify(t.Context(), path, nil)
	if err == nil || !strings.Contains(err.Error(), "backup partition table is damaged") || !strings.Contains(err.Error(), "golden digest is lost with the slot") {
		t.Errorf("two kinds of damage: %v", err)
	}
	// A damaged slot can be stamped again, but it has lost the golden digest.
	r := stamp(t, path, StampOptions{})
	if r.Slot.Golden != "" || r.Slot.Plan != "aa11" {
		t.Errorf("%+v", r.Slot)
	}
	if i, err := Inspect(path); err != nil || i.Slot.State != SlotSite {
		t.Errorf("%+v %v", i, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	flip(info.Size - 512)
	fresh := filepath.Join(t.TempDir(), "g2.raw")
	golden(t, fresh, 8<<20, false)
	cancel()
	if err := Verify(ctx, fresh, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

func TestOutputs(t *testing.T) {
	d := t.TempDir()
	raw := filepath.Join(d, "g.raw")
	golden(t, raw, 1<<20, false)
	there := filepath.Join(d, "there")
	if err := os.WriteFile(there, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Stamp(t.Context(), raw, site(), StampOptions{Now: now, Output: there}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("exists: %v", err)
	}
	if b, _ := os.ReadFile(there); string(b) != "precious" {
		t.Error("the existing file was changed")
	}
	if _, err := Stamp(t.Context(), raw, site(), StampOptions{Now: now, Output: there, Force: true}); err != nil {
		t.Error(err)
	}
	if _, err := Stamp(t.Context(), raw, site(), StampOptions{Now: now, Output: filepath.Join(d, "x.zst")}); err == nil || !strings.Contains(err.Error(), "compressed") {
		t.Errorf("raw to zst: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Stamp(ctx, raw, site(), StampOptions{Now: now, Output: filepath.Join(d, "y")}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	if list, err := os.ReadDir(d); err != nil || len(list) != 2 {
		t.Errorf("left behind: %v", list)
	}
	// Two programs must not stamp one file at the same time.
	f, err := os.Open(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := lock(f, true); err != nil {
		t.Fatal(err)
	}
	if _, err := Stamp(t.Context(), raw, site(), StampOptions{Now: now}); err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("locked: %v", err)
	}
}

// TestStampingAtOnce copies an image while other programs stamp it in place. Each copy must be
// complete, with the right golden digest, or fail.
func TestStampingAtOnce(t *testing.T) {
	t.Chdir(t.TempDir())
	golden(t, "g.raw.zst", 1<<20, true)
	m, err := Open("g.raw.zst")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		t.Fatal(err)
	}
	var slots [2][]byte
	for i := range slots {
		if _, slots[i], err = m.encodeSlot(site(), StampOptions{Now: now.Add(time.Duration(i) * time.Hour)}); err != nil {
			t.Fatal(err)
		}
	}
	end, ended := make(chan bool), make(chan bool)
	go func() {
		defer close(ended)
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			default:
			}
			f, err := os.OpenFile("g.raw.zst", os.O_RDWR, 0)
			if err == nil && lock(f, true) == nil {
				err = m.putFrames(f, p, slots[i%2])
			}
			if err := errors.Join(err, f.Close()); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Millisecond)
		}
	}()
	for range 120 {
		r, err := Stamp(t.Context(), "g.raw.zst", site(), StampOptions{Now: now, Output: "copy.raw.zst", Force: true})
		if err != nil && !errors.Is(err, file.ErrLocked) {
			t.Error(err)
		}
		if err == nil && r.Slot.Golden == "" {
			t.Error("the copy has no golden digest")
		}
	}
	close(end)
	<-ended
}

// TestCopyWithoutHelp copies as on a file system without reflinks and without holes.
func TestCopyWithoutHelp(t *testing.T) {
	d := t.TempDir()
	want := make([]byte, 5<<20)
	rand.NewChaCha8([32]byte{3}).Read(want[1<<20 : 2<<20])
	src, err := os.Create(filepath.Join(d, "src"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if err := src.Truncate(int64(len(want))); err != nil {
		t.Fatal(err)
	}
	if _, err := src.WriteAt(want[1<<20:2<<20], 1<<20); err != nil {
		t.Fatal(err)
	}
	for name, copy := range map[string]func(dst *os.File) error{
		"clone":     func(dst *os.File) error { return clone(t.Context(), dst, src, int64(len(want))) },
		"copyRange": func(dst *os.File) error { return copyRange(dst, src, 0, int64(len(want))) },
	} {
		dst, err := os.Create(filepath.Join(d, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := copy(dst); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		dst.Close()
		if got, err := os.ReadFile(dst.Name()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: content differs, %v", name, err)
		}
	}
}

func benchmarkStamp(b *testing.B, zstd bool, output string) {
	d := b.TempDir()
	path := filepath.Join(d, "g")
	golden(b, path, 496<<20, zstd)
	o := StampOptions{}
	if output != "" {
		o = StampOptions{Output: filepath.Join(d, output), Force: true}
	}
	for b.Loop() {
		stamp(b, path, o)
	}
}

func BenchmarkStampRawInPlace(b *testing.B)  { benchmarkStamp(b, false, "") }
func BenchmarkStampZstdInPlace(b *testing.B) { benchmarkStamp(b, true, "") }
func BenchmarkStampRawCopy(b *testing.B)     { benchmarkStamp(b, false, "o.raw") }
func BenchmarkStampZstdCopy(b *testing.B)    { benchmarkStamp(b, true, "o.raw.zst") }

func BenchmarkVerify(b *testing.B) {
	for _, zstd := range []bool{false, true} {
		b.Run(fmt.Sprintf("zstd=%v", zstd), func(b *testing.B) {
			path := filepath.Join(b.TempDir(), "g")
			golden(b, path, 496<<20, zstd)
			for b.Loop() {
				if err := Verify(b.Context(), path, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestStampDate checks that a date from a wrong clock is not stamped, since the node would set its
// own clock by it.
func TestStampDate(t *testing.T) {
	p := filepath.Join(t.TempDir(), "g.raw")
	golden(t, p, 1<<20, false)
	for _, c := range []struct {
		now     time.Time
		undated bool
		want    string // part of the error; empty if stamping succeeds
	}{
		{now, false, ""},
		{built.Add(-time.Hour), false, ""}, // a small difference between clocks
		{built.AddDate(0, 0, -2), false, "before the image's date"},
		{time.Unix(0, 0), false, "before the image's date"},
		{time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC), false, "shows 2031-01-01, years after the image's date"},
		{time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC), true, ""},
		{time.Unix(0, 0), true, ""},
	} {
		done, err := Stamp(t.Context(), p, site(), StampOptions{Now: c.now, Undated: c.undated})
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v", c.now, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", c.now, err)
		}
		info, err := Inspect(p)
		if err != nil {
			t.Fatal(err)
		}
		if want := c.now.Unix(); c.undated && done.Slot.Stamped != 0 || !c.undated && (done.Slot.Stamped != want || info.Slot.Stamped.Unix() != want) {
			t.Errorf("%s: stamped %d", c.now, done.Slot.Stamped)
		}
	}
}

// TestSBOMPackages checks that a program's version is left out if Go does not record it, and that
// the image itself and container images are not listed.
func TestSBOMPackages(t *testing.T) {
	doc := []byte(`{"packages": [{"name": "tiny", "versionInfo": "0123456789ab", "primaryPackagePurpose": "OPERATING-SYSTEM"},
		{"name": "edge.test/app:1", "versionInfo": "sha256:01", "primaryPackagePurpose": "CONTAINER"},
		{"name": "firstboot", "versionInfo": "(devel)", "packageFileName": "usr/bin/firstboot"}, {"name": "kubelet", "versionInfo": "v1.36.3"}]}`)
	want := []sbomPackage{{Name: "firstboot", File: "usr/bin/firstboot"}, {Name: "kubelet", Version: "v1.36.3"}}
	if got, err := decodeSBOM(doc); err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	listed := []Package{{"firstboot", ""}, {"kubelet", "v1.36.3"}}
	if got, err := readSBOM(doc); err != nil || !slices.Equal(got, listed) {
		t.Errorf("%+v, %v", got, err)
	}
}

// FuzzSBOM checks that reading any SBOM succeeds or returns an error.
func FuzzSBOM(f *testing.F) {
	f.Add([]byte(`{"packages": [{"name": "b", "versionInfo": "2"}, {"name": "a", "versionInfo": "1"}, {"versionInfo": "3"}]}`))
	f.Add([]byte(`{"packages": {"name": "a"}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		packages, err := readSBOM(doc)
		if err != nil && packages != nil {
			t.Error("readSBOM returned both an error and packages")
		}
		for n, p := range packages {
			if p.Name == "" || n > 0 && p.Name < packages[n-1].Name {
				t.Errorf("package %d of %+v", n, packages)
			}
		}
	})
}

// TestStampingKeepsWords checks that an error that wraps several errors keeps its text, and that
// joined errors are reported separately.
func TestStampingKeepsWords(t *testing.T) {
	m := &Image{path: "i.raw"}
	a, b := errors.New("one"), errors.New("another")
	for want, err := range map[string]error{
		"stamping image i.raw, nothing was written: one, because of another":                                 fmt.Errorf("%w, because of %w", a, b),
		"stamping image i.raw, nothing was written: one\nstamping image i.raw, nothing was written: another": errors.Join(a, b),
	} {
		if got := m.stamping(err); got.Error() != want || !errors.Is(got, a) || !errors.Is(got, b) {
			t.Errorf("%v\nwant %s", got, want)
		}
	}
}

// TestCopyOfWhatBecameShorter checks that each way of copying fails if the source is truncated
// meanwhile: otherwise the missing end would read as zeros.
func TestCopyOfWhatBecameShorter(t *testing.T) {
	d := t.TempDir()
	src, err := os.Create(filepath.Join(d, "src"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	const had = 5 << 20
	for _, left := range []int64{0, 1 << 20, had - 1} {
		for what, data := range map[string]int64{"data": left, "a hole at its end": left / 2} {
			if err := errors.Join(src.Truncate(0), src.Truncate(left)); err != nil {
				t.Fatal(err)
			}
			if _, err := src.WriteAt(bytes.Repeat([]byte{1}, int(data)), 0); err != nil {
				t.Fatal(err)
			}
			if isHole(src, left, had-left) || isHole(src, had, 1) {
				t.Errorf("%d bytes are left, %s: beyond the end there is a hole", left, what)
			}
			for name, copy := range map[string]func(dst *os.File) error{
				"clone":     func(dst *os.File) error { return clone(t.Context(), dst, src, had) },
				"copyRange": func(dst *os.File) error { return copyRange(dst, src, 0, had) },
			} {
				dst, err := os.Create(filepath.Join(d, name))
				if err != nil {
					t.Fatal(err)
				}
				err = copy(dst)
				dst.Close()
				if !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), src.Name()) {
					t.Errorf("%s, %d bytes are left, %s: %v", name, left, what, err)
				}
			}
		}
	}
}
