package fat

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

var date = time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)

func folder(p string) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: date}}
}

func regular(p string, b []byte) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: date, Data: tree.Bytes(b)}}
}

// sample returns names of every kind, and contents from inline bytes and blobs.
func sample() ([]tree.Node, disktest.Blobs) {
	rnd := rand.NewChaCha8([32]byte{1})
	blob := make([]byte, 3<<20)
	rnd.Read(blob)
	blobs := disktest.Blobs{"b": blob}
	nodes := []tree.Node{
		folder("."), folder("EFI"), folder("EFI/BOOT"), folder("empty"),
		regular("EFI/BOOT/BOOTX64.EFI", []byte("loader")),
		regular("loader/entries/edgebake-6.12.0.conf", []byte("title x\n")),
		regular("empty/none", nil),
		regular("Ünïcode naïve 文件.txt", []byte("u")),
		regular(strings.Repeat("l", 255), []byte("long")),
		regular(".hidden", []byte("h")),
		regular(" leading blank.txt", []byte("b")),
		regular("a+b,c;d=e[f].x", []byte("signs")),
		{Path: "vmlinuz", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: date,
			Data: tree.Content{Blob: "b", Off: 12345, Size: 2<<20 + 777}}},
	}
	for i := range 300 {
		nodes = append(nodes, regular(fmt.Sprintf("many/file number %d", i), fmt.Appendf(nil, "%d", i)))
	}
	return nodes, blobs
}

func content(n tree.Node, blobs disktest.Blobs) []byte {
	if n.Data.Blob == "" {
		return n.Data.Inline
	}
	return blobs[n.Data.Blob][n.Data.Off:][:n.Data.Size]
}

func build(t *testing.T, nodes []tree.Node, blobs tree.Blobs, o Options) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "fat.img")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(o.Size); err != nil {
		t.Fatal(err)
	}
	if err := Write(f, nodes, blobs, o); err != nil {
		t.Fatal(err)
	}
	return name
}

var kinds = []Options{
	{Type: 16, Label: "EDGEBAKE", VolumeID: 0x12345678, Size: 16 << 20, Start: 516 << 20, Time: date},
	{Type: 32, Label: "ESP", VolumeID: 0x9abcdef0, Size: 512 << 20, Start: 4 << 20, Time: date},
	{Type: 32, Label: "ESP", VolumeID: 1, Size: 64 << 20, Time: date},
	{Type: 16, Label: "EDGEBAKE", VolumeID: 0x12345678, Size: 16 << 20, Start: 516 << 20, Time: date, SectorSize: 4096},
	{Type: 32, Label: "ESP", VolumeID: 0x9abcdef0, Size: 512 << 20, Start: 4 << 20, Time: date, SectorSize: 4096},
	{Type: 12, Label: "EDGEBAKE", VolumeID: 0x12345678, Size: 16 << 20, Start: 516 << 20, Time: date, SectorSize: 4096},
	{Type: 12, Label: "EDGEBAKE", VolumeID: 1, Size: 16 << 20, Time: date},
}

func TestWriteIsCleanAndReadable(t *testing.T) {
	for _, o := range kinds {
		t.Run(fmt.Sprintf("FAT%d %dM %d", o.Type, o.Size>>20, o.SectorSize), func(t *testing.T) {
			nodes, blobs := sample()
			name := build(t, nodes, blobs, o)

			f, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			r, err := Open(f)
			if err != nil {
				t.Fatal(err)
			}
			if r.Type() != o.Type {
				t.Errorf("type is %d", r.Type())
			}
			if l, err := r.Label(); err != nil || l != o.Label {
				t.Errorf("label is %q, %v", l, err)
			}
			want := map[string]tree.Node{}
			for _, n := range nodes {
				want[n.Path] = n
			}
			for _, p := range []string{"loader", "loader/entries", "many"} {
				want[p] = folder(p) // the nodes do not list the directory, but files in it need it
			}
			delete(want, ".")
			err = r.Walk(func(e Entry) error {
				n, ok := want[e.Path]
				if !ok {
					t.Errorf("found %q, which was not written", e.Path)
					return nil
				}
				delete(want, e.Path)
				if e.Dir != n.IsDir() || !e.MTime.Equal(date) {
					t.Errorf("%s: dir %v time %v", e.Path, e.Dir, e.MTime)
				}
				if e.Dir {
					return nil
				}
				got, err := r.ReadFile(e.Path)
				if err != nil || !bytes.Equal(got, content(n, blobs)) {
					t.Errorf("%s: content differs, %v", e.Path, err)
				}
				if x, err := r.Extents(e.Path); err != nil || len(x) > 1 {
					t.Errorf("%s: not contiguous: %v %v", e.Path, x, err)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			for p := range want {
				t.Errorf("%s is missing", p)
			}
			if e, err := r.Stat("efi/boot/bootx64.efi"); err != nil || e.Path != "EFI/BOOT/BOOTX64.EFI" {
				t.Errorf("names are case-sensitive: %v %v", e, err)
			}

			out := disktest.Oracle(t, "fsck.fat", "-n", "-v", name)
			if strings.Contains(out, "differ") || strings.Contains(out, "wrong") {
				t.Errorf("fsck.fat: %s", out)
			}
			// Read the files with mtools too.
			got := t.TempDir()
			disktest.Oracle(t, "mcopy", "-s", "-n", "-i", name, "::/", got)
			for _, n := range nodes {
				if n.IsDir() || strings.ContainsAny(n.Path, "Ü文") { // mtools needs a UTF-8 locale for these
					continue
				}
				b, err := os.ReadFile(filepath.Join(got, n.Path))
				if err != nil || !bytes.Equal(b, content(n, blobs)) {
					t.Errorf("mcopy reads %s differently: %v", n.Path, err)
				}
			}
		})
	}
}

func TestFreeCountMatchesInformationSector(t *testing.T) {
	nodes, blobs := sample()
	name := build(t, nodes, blobs, kinds[2])
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	free, err := r.Free()
	if err != nil {
		t.Fatal(err)
	}
	if got := int64(le.Uint32(b[512+488:])) * r.g.clusterSize(); got != free {
		t.Errorf("information sector says %d bytes are free, the table %d", got, free)
	}
}

func TestSameInputSameBytes(t *testing.T) {
	nodes, blobs := sample()
	a, err := os.ReadFile(build(t, nodes, blobs, kinds[0]))
	if err != nil {
		t.Fatal(err)
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	b, err := os.ReadFile(build(t, nodes, blobs, kinds[0]))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a, b) {
		t.Error("the order of the nodes changes the bytes")
	}
}

// refuser is a writer that fails the test on each write.
type refuser struct{ t *testing.T }

func (r refuser) WriteAt(p []byte, off int64) (int, error) {
	r.t.Errorf("%d bytes written at %d before the input was checked", len(p), off)
	return len(p), nil
}

func TestBadInputIsRefusedBeforeWriting(t *testing.T) {
	link := tree.Node{Path: "link", Inode: &tree.Inode{Mode: tree.ModeSymlink | 0o777, Target: "x"}}
	big := tree.Node{Path: "big", Inode: &tree.Inode{Mode: tree.ModeRegular, Data: tree.Content{Blob: "b", Size: 4 << 30}}}
	full := tree.Node{Path: "full", Inode: &tree.Inode{Mode: tree.ModeRegular, Data: tree.Content{Blob: "b", Size: 17 << 20}}}
	var crowd []tree.Node
	for i := range 520 {
		crowd = append(crowd, regular(fmt.Sprintf("F%d", i), nil))
	}
	for name, tc := range map[string]struct {
		nodes []tree.Node
		o     Options
		want  []string
	}{
		"two at once":        {[]tree.Node{link, regular("a:b", nil)}, kinds[0], []string{"link: is neither", `a:b: has the character ':'`}},
		"case":               {[]tree.Node{regular("Readme", nil), regular("README", nil)}, kinds[0], []string{"same name as"}},
		"file and dir":       {[]tree.Node{regular("a", nil), regular("a/b", nil)}, kinds[0], []string{"file and a directory"}},
		"dot dot":            {[]tree.Node{regular("../a", nil)}, kinds[0], []string{"not a clean relative path"}},
		"absolute":           {[]tree.Node{regular("/a", nil)}, kinds[0], []string{"not a clean relative path"}},
		"a directory's name": {[]tree.Node{regular("x/a:b/c", nil), regular("x/a:b/d", nil)}, kinds[0], []string{`x/a:b: has the character ':'`}},
		"trailing dot":       {[]tree.Node{regular("a.", nil)}, kinds[0], []string{"ends with a dot"}},
		"long name":          {[]tree.Node{regular(strings.Repeat("x", 256), nil)}, kinds[0], []string{"longer than 255"}},
		"too big a file":     {[]tree.Node{big}, kinds[1], []string{"smaller than 4 GiB"}},
		"no room":            {[]tree.Node{full}, kinds[0], []string{"make the partition larger"}},
		"crowded top":        {crowd, kinds[0], []string{"has room for 512 entries"}},
		"label":              {nil, Options{Type: 16, Label: "much too long", Size: 16 << 20}, []string{"label"}},
		"small FAT32":        {nil, Options{Type: 32, Size: 16 << 20}, []string{"too few for FAT32"}},
		"small FAT16":        {nil, Options{Type: 16, Size: 1 << 20}, []string{"too few for FAT16"}},
		"large FAT12":        {nil, Options{Type: 12, Size: 1 << 30}, []string{"too many for FAT12"}},
		"FAT64":              {nil, Options{Type: 64, Size: 1 << 20}, []string{"only FAT12, FAT16 and FAT32"}},
		"odd size":           {nil, Options{Type: 16, Size: 16<<20 + 1}, []string{"size of"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := Write(refuser{t}, tc.nodes, disktest.Blobs{}, tc.o)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q: %v", w, err)
				}
			}
		})
	}
}

// TestShortNamesAreNobodysOwn checks that a generated short name never equals another file's own
// name, in any order of the files.
func TestShortNamesAreNobodysOwn(t *testing.T) {
	names := []string{"Long File Name.txt", "longfi~1.txt", "LONGFI~2.TXT", "Long file names.txt", "longfi~3.txt.bak", "A+B", "a_b~1", "no extension at all", "noexte~1", "ä.txt", "_~1.txt"}
	var nodes []tree.Node
	for _, n := range names {
		nodes = append(nodes, regular("d/"+n, []byte(n)))
	}
	image := build(t, nodes, nil, kinds[0])
	disktest.Oracle(t, "fsck.fat", "-n", image)
	for _, n := range names {
		if strings.Contains(n, "ä") { // mtools needs a UTF-8 locale for such a name
			continue
		}
		for _, asked := range []string{n, strings.ToUpper(n)} {
			if got := disktest.Oracle(t, "mtype", "-i", image, "::d/"+asked); got != n {
				t.Errorf("mtype %s gives %q", asked, got)
			}
		}
	}
	b, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.Stat("d")
	if err != nil {
		t.Fatal(err)
	}
	err = r.scan(d, func(raw []byte, e Entry) bool {
		for _, n := range names {
			if short := decodeShort(raw); n != e.Name() && foldName(short) == foldName(n) {
				t.Errorf("%s is %s by its short name", e.Name(), short)
			}
		}
		return true
	})
	if err != nil {
		t.Error(err)
	}
}

// TestAcceptable checks that names that FAT cannot store are omitted, and that of equal names one
// is kept.
func TestAcceptable(t *testing.T) {
	var nodes []tree.Node
	for _, p := range []string{"README", "a", "a/b", "bad ", "bad /x", "d/ leading", "d/Readme", "d/readme", "q?/r", "readme"} {
		nodes = append(nodes, regular(p, nil))
	}
	var got []string
	for _, n := range Acceptable(nodes) {
		got = append(got, n.Path)
	}
	if want := []string{"README", "a", "d/ leading", "d/Readme"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestContentCutShort(t *testing.T) {
	n := tree.Node{Path: "x", Inode: &tree.Inode{Mode: tree.ModeRegular, Data: tree.Content{Blob: "b", Off: 10, Size: 100}}}
	err := Write(make(memory, 16<<20), []tree.Node{n}, disktest.Blobs{"b": make([]byte, 50)}, kinds[0])
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
}

type memory []byte

func (m memory) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }

// TestReadsWhatOthersWrite reads FAT12, FAT16 and FAT32 file systems that mkfs.fat and mtools made,
// with short names, lower case, deleted and fragmented files.
func TestReadsWhatOthersWrite(t *testing.T) {
	for kind, size := range map[string]string{"12": "4M", "16": "16M", "32": "64M"} {
		t.Run(kind, func(t *testing.T) {
			d := t.TempDir()
			img := filepath.Join(d, "img")
			disktest.Oracle(t, "truncate", "-s", size, img)
			disktest.Oracle(t, "mkfs.fat", "-F", kind, "-n", "STICK", img)
			put := func(name string, b []byte) {
				t.Helper()
				p := filepath.Join(d, "src")
				if err := os.WriteFile(p, b, 0o644); err != nil {
					t.Fatal(err)
				}
				disktest.Oracle(t, "mcopy", "-o", "-i", img, p, "::"+name)
			}
			put("SITE.YAM", []byte("x"))
			put("site.yaml", []byte("apiVersion: v1\n"))
			disktest.Oracle(t, "mmd", "-i", img, "::files")
			// Gaps between small files fragment the large one.
			for i := range 40 {
				put(fmt.Sprintf("gap%d", i), make([]byte, 5000))
			}
			for i := range 20 {
				disktest.Oracle(t, "mdel", "-i", img, fmt.Sprintf("::gap%d", 2*i))
			}
			big := make([]byte, 400_000)
			rand.NewChaCha8([32]byte{2}).Read(big)
			put("files/A rather long name.bin", big)

			b, err := os.ReadFile(img)
			if err != nil {
				t.Fatal(err)
			}
			r, err := Open(bytes.NewReader(b))
			if err != nil {
				t.Fatal(err)
			}
			if l, err := r.Label(); l != "STICK" {
				t.Errorf("label %q, %v", l, err)
			}
			if got, err := r.ReadFile("Site.YAML"); string(got) != "apiVersion: v1\n" {
				t.Errorf("site.yaml: %q, %v", got, err)
			}
			if got, err := r.ReadFile("files/a rather long name.bin"); !bytes.Equal(got, big) {
				t.Errorf("the large file differs: %v", err)
			}
			// On FAT32 the file is not fragmented, because mtools allocates after the last
			// allocated cluster.
			if x, _ := r.Extents("files/a rather long name.bin"); kind != "32" && len(x) < 2 {
				t.Errorf("the test's file is not fragmented")
			}
			if _, err := r.Stat("gap0"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a deleted file is there: %v", err)
			}
			if e, err := r.Stat("gap1"); err != nil || e.Size != 5000 {
				t.Errorf("gap1: %v %v", e, err)
			}
		})
	}
}

func TestOtherFileSystemsAreNamed(t *testing.T) {
	b := make([]byte, 4096)
	if _, err := Open(bytes.NewReader(b)); !errors.Is(err, ErrNotFAT) {
		t.Errorf("zeros: %v", err)
	}
	copy(b[3:], "EXFAT   ")
	if _, err := Open(bytes.NewReader(b)); !errors.Is(err, ErrNotFAT) || !strings.Contains(err.Error(), "exFAT") {
		t.Errorf("exFAT: %v", err)
	}
	if _, err := Open(bytes.NewReader(nil)); err == nil {
		t.Error("an empty file is accepted as FAT")
	}
}

func TestLoopsEnd(t *testing.T) {
	m := make(memory, 16<<20)
	if err := Write(m, []tree.Node{regular("a/b", make([]byte, 5000))}, disktest.Blobs{}, kinds[0]); err != nil {
		t.Fatal(err)
	}
	r, err := Open(bytes.NewReader(m))
	if err != nil {
		t.Fatal(err)
	}
	a, err := r.Stat("a")
	if err != nil {
		t.Fatal(err)
	}
	// entry comes after ".", ".." and the long name.
	entry := m[r.g.clusterOff(a.first)+3*entrySize:]
	// Link the file's only cluster to itself, and set a size larger than the disk.
	b := le.Uint16(entry[26:])
	le.PutUint16(m[r.g.fatOff(0)+int64(b)*2:], b)
	le.PutUint32(entry[28:], 1<<30)
	r.page = nil
	if _, err := r.ReadFile("a/b"); err == nil || !strings.Contains(err.Error(), "more than the 536870912 that are read at once") {
		t.Errorf("size: %v", err)
	}
	le.PutUint32(entry[28:], MaxRead)
	if _, err := r.ReadFile("a/b"); err == nil || !strings.Contains(err.Error(), "loop") {
		t.Errorf("file: %v", err)
	}
	// Now the entry is a directory that contains itself.
	entry[11] = attrDirectory
	le.PutUint16(entry[26:], uint16(a.first))
	if err := r.Walk(func(Entry) error { return nil }); err == nil || !strings.Contains(err.Error(), "contains itself") {
		t.Errorf("directory: %v", err)
	}
}

func FuzzReader(f *testing.F) {
	for _, o := range []Options{kinds[0], {Type: 32, Label: "X", Size: 34 << 20, Time: date}} {
		m := make(memory, o.Size)
		nodes := []tree.Node{regular("site.yaml", []byte("a: b\n")), regular("files/a rather long name", make([]byte, 9000))}
		if err := Write(m, nodes, disktest.Blobs{}, o); err != nil {
			f.Fatal(err)
		}
		f.Add([]byte(m[:256<<10]))
		f.Add([]byte(m[:4096]))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Open(bytes.NewReader(b))
		if err != nil {
			return
		}
		n := 0
		stop := errors.New("enough")
		r.Walk(func(e Entry) error {
			if n++; n > 1000 {
				return stop
			}
			if path.Clean(e.Path) != e.Path || strings.HasPrefix(e.Path, "..") || strings.HasPrefix(e.Path, "/") {
				t.Fatalf("path %q leaves the file system", e.Path)
			}
			if !e.Dir && e.Size < 1<<20 {
				r.ReadFile(e.Path)
			}
			return nil
		})
		r.Label()
	})
}
