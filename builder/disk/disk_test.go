package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

var date = time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)

func dir(p string) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: date}}
}

func blobFile(p string, off, size int64) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: date, Data: tree.Content{Blob: "b", Off: off, Size: size}}}
}

func inline(p, s string) tree.Node {
	return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: date, Data: tree.Bytes([]byte(s))}}
}

// sample returns a small image with all five partitions. Its blob is half random and half text, for
// compression of both.
func sample() (Spec, disktest.Blobs) {
	blob := bytes.Repeat([]byte("edgebake "), 3<<20)
	rand.NewChaCha8([32]byte{1}).Read(blob[:12<<20])
	root := []tree.Node{dir("."), dir("usr"), blobFile("usr/big", 100, 20<<20), inline("usr/small", "x")}
	for i := range 500 {
		root = append(root, blobFile(fmt.Sprintf("usr/f%03d", i), int64(i)*5000, 4000+int64(i)))
	}
	return Spec{
		ID: "aa11", Arch: "amd64", SourceDate: date,
		Partitions: []Partition{
			{Label: ondisk.LabelESP, FS: FAT32, Size: 64 << 20, Nodes: []tree.Node{dir("."), blobFile("vmlinuz", 7, 9<<20), inline("edgebake/image.json", "{}")}},
			{Label: ondisk.LabelSlot, FS: FAT16},
			{Label: ondisk.LabelRootA, FS: Ext4, Nodes: root, FreeBytes: 16 << 20, Grow: 30 << 20, HashTree: true},
			{Label: ondisk.LabelRootB},
			{Label: ondisk.LabelData, FS: Ext4, Nodes: []tree.Node{dir("."), dir("lib")}, FreeBytes: 8 << 20, Gap: 32 << 20},
		},
	}, disktest.Blobs{"b": blob}
}

// testSlot returns a slot that contains the digest. It is not a file system: ondisk/slot has its
// own tests.
func testSlot(d Digest) ([]byte, error) {
	b := make([]byte, ondisk.SlotSize)
	copy(b, "slot of "+d.Golden)
	b[len(b)-1] = 1
	return b, nil
}

func build(t testing.TB, path string, s Spec, blobs tree.Blobs, o WriteOptions) (*Layout, *Result) {
	t.Helper()
	l, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	o.Slot = testSlot
	r, err := Write(t.Context(), path, s, l, blobs, o)
	if err != nil {
		t.Fatal(err)
	}
	return l, r
}

func TestCompute(t *testing.T) {
	s, _ := sample()
	l, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Compute(s)
	if err != nil || !reflect.DeepEqual(l, again) {
		t.Errorf("two layouts differ: %v", err)
	}
	end := int64(Align)
	for i, p := range l.Parts {
		end += roundUp(s.Partitions[i].Gap, Align)
		if p.Start != end || p.Start%Align != 0 || p.Size%Align != 0 || p.Size == 0 {
			t.Errorf("%s: %d bytes at %d", p.Label, p.Size, p.Start)
		}
		if p.GUID != PartitionGUID(s.ID, p.Label) {
			t.Errorf("%s: GUID is %s", p.Label, p.GUID)
		}
		end = p.Start + p.Size
	}
	if a, b := l.Find(ondisk.LabelRootA), l.Find(ondisk.LabelRootB); a.Size != b.Size {
		t.Errorf("ROOT-A has %d bytes, ROOT-B %d", a.Size, b.Size)
	}
	if l.Find(ondisk.LabelSlot).Size != ondisk.SlotSize {
		t.Error("the slot partition does not have ondisk.SlotSize")
	}
	// This GUID must not change: machines in the field have GUIDs that are derived in this way.
	if got := PartitionGUID("aa11", "ROOT-A"); got != "48bd4b57-efb1-8fdc-922d-f038450df706" {
		t.Errorf("GUID of ROOT-A: %s", got)
	}
	s.ID = "bb22"
	other, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{l.DiskGUID: true}
	for _, x := range append(append(l.Parts, other.Parts...), ondisk.PartitionInfo{GUID: other.DiskGUID}) {
		if seen[x.GUID] {
			t.Errorf("GUID %s occurs twice", x.GUID)
		}
		seen[x.GUID] = true
	}
}

// TestRoomForLater checks the space that cannot be added to a disk in the field: for a larger file
// system and its hash tree in both root partitions, for a LUKS2 header before DATA, and for the
// table of a disk with sectors of 4 KiB.
func TestRoomForLater(t *testing.T) {
	s, _ := sample()
	l, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	a, b, data := l.Find(ondisk.LabelRootA), l.Find(ondisk.LabelRootB), l.Find(ondisk.LabelData)
	if a.Size != b.Size || a.Room != b.Room || a.Room != a.FSSize+32<<20 {
		t.Errorf("ROOT-A %+v, ROOT-B %+v", a, b)
	}
	if a.Size < a.Room+hashTreeSize(a.Room) {
		t.Errorf("a root of %d bytes and its hash tree of %d do not fit %d", a.Room, hashTreeSize(a.Room), a.Size)
	}
	if gap := data.Start - (b.Start + b.Size); gap != 32<<20 {
		t.Errorf("%d bytes are free before DATA", gap)
	}
	const sector, array = 4096, 128 * 128
	if first := l.Parts[0].Start; first < 2*sector+array {
		t.Errorf("the first partition begins at %d, in a table for large sectors", first)
	}
	if tail := l.Size - (data.Start + data.Size); tail < sector+array {
		t.Errorf("%d bytes after the last partition are too few for a table with large sectors", tail)
	}
	for _, p := range l.Parts {
		if p.Start%sector != 0 || p.Size%sector != 0 {
			t.Errorf("%s: %d bytes at %d", p.Label, p.Size, p.Start)
		}
	}
	if l.Size%sector != 0 {
		t.Errorf("the disk has %d bytes", l.Size)
	}
}

// TestLUKSHeaderFitsTheGap encrypts DATA in place. The gap before DATA must be large enough for a
// LUKS2 header, and DATA's contents must not move.
func TestLUKSHeaderFitsTheGap(t *testing.T) {
	const gap, data = 32 << 20, 8 << 20
	dir := t.TempDir()
	part, header, key := filepath.Join(dir, "part"), filepath.Join(dir, "header"), filepath.Join(dir, "key")
	for f, content := range map[string]string{part: "", key: "secret"} {
		if err := os.WriteFile(f, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Truncate(part, gap+data); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "cryptsetup", "reencrypt", "--encrypt", "--type", "luks2", "--batch-mode", "--key-file", key, "--resilience", "none",
		"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--header", header, "--offset", strconv.Itoa(gap/512), part)
	st, err := os.Stat(header)
	if err != nil || st.Size() > gap {
		t.Fatalf("the header does not fit: %v %v", st, err)
	}
	disktest.Oracle(t, "dd", "if="+header, "of="+part, "conv=notrunc", "status=none")
	if out := disktest.Oracle(t, "cryptsetup", "luksDump", part); !strings.Contains(out, fmt.Sprintf("offset: %d [bytes]", gap)) {
		t.Errorf("the data is not behind the gap:\n%s", out)
	}
}

func TestHashTreeSize(t *testing.T) {
	for _, size := range []int64{4 << 20, 772 << 20, 1<<30 + 4096} {
		dir := t.TempDir()
		data, tree := filepath.Join(dir, "data"), filepath.Join(dir, "tree")
		for _, f := range []string{data, tree} {
			if err := os.WriteFile(f, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Truncate(data, size); err != nil {
			t.Fatal(err)
		}
		disktest.Oracle(t, "veritysetup", "format", data, tree)
		st, err := os.Stat(tree)
		if err != nil {
			t.Fatal(err)
		}
		if got := hashTreeSize(size); got != st.Size() {
			t.Errorf("hashTreeSize(%d) is %d, but veritysetup makes %d bytes", size, got, st.Size())
		}
	}
}

func TestComputeReportsEveryProblem(t *testing.T) {
	_, err := Compute(Spec{Arch: "mips", SourceDate: date, Partitions: []Partition{
		{Label: ondisk.LabelESP, FS: FAT32, Nodes: []tree.Node{{Path: "l", Inode: &tree.Inode{Mode: tree.ModeSymlink, Target: "x"}}}},
		{Label: ondisk.LabelSlot, FS: FAT32},
		{Label: ondisk.LabelRootA, FS: Ext4, Size: 8 << 20, Nodes: []tree.Node{dir("."), blobFile("x", 0, 20<<20)}},
		{Label: "X", FS: "xfs", Size: 1},
		{Label: "Y"},
		{Label: "X", Size: 1},
		{Label: "Z", Size: 1, Nodes: []tree.Node{dir("a")}},
	}})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"no id", `"mips"`, "ESP: ", "neither file nor directory", "empty FAT16", "increase the size", `"xfs"`, "Y: the size must be given", "needs its own label", "files but no file system"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q", want)
		}
	}
	if t.Failed() {
		t.Log(err)
	}
}

func TestRawImagePassesEveryOracle(t *testing.T) {
	s, blobs := sample()
	path := filepath.Join(t.TempDir(), "image.raw")
	var last, total int64
	l, r := build(t, path, s, blobs, WriteOptions{Progress: func(d, n int64) {
		if d < last || d > n {
			t.Errorf("progress goes from %d to %d of %d", last, d, n)
		}
		last, total = d, n
	}})
	if last != total || total == 0 {
		t.Errorf("progress ended at %d of %d", last, total)
	}
	if out := disktest.Oracle(t, "sgdisk", "-v", path); !strings.Contains(out, "No problems found") {
		t.Errorf("sgdisk: %s", out)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tab, err := gpt.Read(f, l.Size)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range tab.Partitions {
		want := l.Parts[i]
		if p.Name != want.Label || p.Start != want.Start || p.Size != want.Size || p.GUID != want.GUID {
			t.Errorf("the table has %+v, the layout %+v", p, want)
		}
		if auto := p.Name == ondisk.LabelESP || p.Name == ondisk.LabelSlot || p.Name == ondisk.LabelRootB; auto == (p.Attributes == gpt.NoAuto) {
			t.Errorf("%s has attributes %x", p.Name, p.Attributes)
		}
		// The other programs need the partition as a separate file.
		part := filepath.Join(t.TempDir(), p.Name)
		disktest.Oracle(t, "dd", "if="+path, "of="+part, "bs=4M", fmt.Sprintf("skip=%d", p.Start/Align), fmt.Sprintf("count=%d", p.Size/Align), "conv=sparse", "status=none")
		switch want.FS {
		case Ext4:
			disktest.Oracle(t, "e2fsck", "-fn", part)
			if out := disktest.Oracle(t, "dumpe2fs", "-h", part); !strings.Contains(out, format(derive("filesystem", s.ID, p.Name))) {
				t.Errorf("%s: dumpe2fs does not see UUID %s", p.Name, format(derive("filesystem", s.ID, p.Name)))
			}
		case FAT32:
			disktest.Oracle(t, "fsck.fat", "-n", part)
		}
	}
	for i, p := range r.Parts {
		free := s.Partitions[i].FreeBytes
		if p.Label != l.Parts[i].Label || p.Free < free {
			t.Errorf("%s has %d bytes free, want %d", p.Label, p.Free, free)
		}
	}
	esp := l.Find(ondisk.LabelESP)
	fsys, err := fat.Open(io.NewSectionReader(f, esp.Start, esp.Size))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := fsys.ReadFile("vmlinuz"); err != nil || !bytes.Equal(b, blobs["b"][7:7+9<<20]) {
		t.Errorf("vmlinuz differs: %v", err)
	}
	slot := make([]byte, 100)
	if _, err := f.ReadAt(slot, l.Find(ondisk.LabelSlot).Start); err != nil || !strings.HasPrefix(string(slot), "slot of "+r.Golden) {
		t.Errorf("the slot is %q, %v", slot, err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil || st.Blocks*512 > st.Size/2 {
		t.Errorf("the file is not sparse: %d of %d bytes (%v)", st.Blocks*512, st.Size, err)
	}
	if m := (os.FileMode(st.Mode) & 0o777); m != 0o644 {
		t.Errorf("mode is %o", m)
	}
}

// TestGoldenDigest computes the golden digest of the finished image as the decision record
// describes it.
func TestGoldenDigest(t *testing.T) {
	s, blobs := sample()
	path := filepath.Join(t.TempDir(), "image.raw")
	l, r := build(t, path, s, blobs, WriteOptions{})
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "edgebake golden v1\n")
	for _, p := range l.Parts {
		if p.Label == "EDGEBAKE" {
			continue
		}
		fmt.Fprintf(h, "%s %d\n", p.Label, p.Size)
		for part := b[p.Start : p.Start+p.Size]; len(part) > 0; {
			n := min(len(part), 4<<20)
			c := sha256.Sum256(part[:n])
			h.Write(c[:])
			part = part[n:]
		}
	}
	if want := hex.EncodeToString(h.Sum(nil)); r.Golden != want {
		t.Errorf("golden digest is %s, want %s", r.Golden, want)
	}
	got, err := Digests(t.Context(), Source{Read: func(_ []byte, off, n int64) ([]byte, bool, error) {
		return b[off : off+n], seekable.IsZero(b[off : off+n]), nil
	}}, l.Parts)
	if err != nil || !reflect.DeepEqual(got, r.Digest) {
		t.Errorf("Digests computes %v, %v, Write %v", got, err, r.Digest)
	}
}

func TestSameBytesEverywhere(t *testing.T) {
	s, blobs := sample()
	want := map[bool]string{}
	golden := ""
	for _, procs := range []int{1, 2, 7} {
		old := runtime.GOMAXPROCS(procs)
		for _, z := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "another name")
			_, r := build(t, path, s, blobs, WriteOptions{Zstd: z})
			if got := disktest.Sum(t, path); want[z] == "" {
				want[z] = got
			} else if got != want[z] {
				t.Errorf("GOMAXPROCS=%d zstd=%v: other bytes", procs, z)
			}
			if golden == "" {
				golden = r.Golden
			} else if golden != r.Golden {
				t.Errorf("GOMAXPROCS=%d zstd=%v: other golden digest", procs, z)
			}
		}
		runtime.GOMAXPROCS(old)
	}
}

func TestCompressedImageIsTheRawOne(t *testing.T) {
	s, blobs := sample()
	d := t.TempDir()
	raw, packed := filepath.Join(d, "i.raw"), filepath.Join(d, "i.raw.zst")
	build(t, raw, s, blobs, WriteOptions{})
	var last, total int64
	build(t, packed, s, blobs, WriteOptions{Zstd: true, Progress: func(d, n int64) { last, total = d, n }})
	if last != total {
		t.Errorf("progress ended at %d of %d", last, total)
	}
	disktest.Oracle(t, "zstd", "-q", "-t", packed)
	disktest.Oracle(t, "zstd", "-q", "-d", packed, "-o", packed+".out")
	if disktest.Sum(t, raw) != disktest.Sum(t, packed+".out") {
		t.Error("zstd -d gives another image")
	}
	// Holes must cost almost nothing. The file contains 12 MiB of random data, parts of it three
	// times, the uncompressed slot, and little else.
	if st, err := os.Stat(packed); err != nil || st.Size() > 60<<20 {
		t.Errorf("%v %v", st.Size(), err)
	}
	if got := files(t, d); len(got) != 3 {
		t.Errorf("left behind: %v", got)
	}
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestFailuresLeaveNothing(t *testing.T) {
	s, blobs := sample()
	l, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("interrupt", func(t *testing.T) {
		for _, z := range []bool{false, true} {
			for _, at := range []float64{0.01, 0.3, 0.9} {
				d := t.TempDir()
				ctx, cancel := context.WithCancel(t.Context())
				_, err := Write(ctx, filepath.Join(d, "i"), s, l, blobs, WriteOptions{Zstd: z, Slot: testSlot, Progress: func(d, n int64) {
					if float64(d) >= at*float64(n) {
						cancel()
					}
				}})
				cancel()
				if !errors.Is(err, context.Canceled) {
					t.Errorf("zstd=%v at %v: %v", z, at, err)
				}
				if got := files(t, d); len(got) > 0 {
					t.Errorf("left behind: %v", got)
				}
			}
		}
	})
	t.Run("missing blob", func(t *testing.T) {
		d := t.TempDir()
		_, err := Write(t.Context(), filepath.Join(d, "i"), s, l, disktest.Blobs{}, WriteOptions{Slot: testSlot})
		if !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), "directory") || len(files(t, d)) > 0 {
			t.Errorf("%v, left behind: %v", err, files(t, d))
		}
	})
	t.Run("slot fails", func(t *testing.T) {
		for _, z := range []bool{false, true} {
			d := t.TempDir()
			boom := errors.New("boom")
			_, err := Write(t.Context(), filepath.Join(d, "i"), s, l, blobs, WriteOptions{Zstd: z, Slot: func(Digest) ([]byte, error) { return nil, boom }})
			if !errors.Is(err, boom) || len(files(t, d)) > 0 {
				t.Errorf("%v, left behind: %v", err, files(t, d))
			}
		}
	})
	t.Run("output exists", func(t *testing.T) {
		d := t.TempDir()
		p := filepath.Join(d, "i")
		if err := os.WriteFile(p, []byte("precious"), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Write(t.Context(), p, s, l, blobs, WriteOptions{Slot: testSlot})
		if !errors.Is(err, fs.ErrExist) {
			t.Errorf("got %v", err)
		}
		if b, _ := os.ReadFile(p); string(b) != "precious" {
			t.Error("the existing output was changed")
		}
		if _, err := Write(t.Context(), p, s, l, blobs, WriteOptions{Slot: testSlot, Force: true}); err != nil {
			t.Error(err)
		}
		if st, err := os.Stat(p); err != nil || st.Size() != l.Size || len(files(t, d)) != 1 {
			t.Errorf("not replaced: %v %v %v", st.Size(), err, files(t, d))
		}
	})
	t.Run("output comes to be meanwhile", func(t *testing.T) {
		d := t.TempDir()
		p := filepath.Join(d, "i")
		_, err := Write(t.Context(), p, s, l, blobs, WriteOptions{Slot: func(d Digest) ([]byte, error) {
			os.WriteFile(p, []byte("precious"), 0o644)
			return testSlot(d)
		}})
		if b, _ := os.ReadFile(p); !errors.Is(err, fs.ErrExist) || string(b) != "precious" || len(files(t, d)) != 1 {
			t.Errorf("%v %q", err, b)
		}
	})
	t.Run("directory", func(t *testing.T) {
		d := t.TempDir()
		if _, err := Write(t.Context(), d, s, l, blobs, WriteOptions{Slot: testSlot, Force: true}); err == nil || !strings.Contains(err.Error(), "is a directory") {
			t.Errorf("got %v", err)
		}
		if _, err := Write(t.Context(), filepath.Join(d, "no/i"), s, l, blobs, WriteOptions{Slot: testSlot}); err == nil || !strings.Contains(err.Error(), "make directory") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no slot maker", func(t *testing.T) {
		if _, err := Write(t.Context(), filepath.Join(t.TempDir(), "i"), s, l, blobs, WriteOptions{}); err == nil || !strings.Contains(err.Error(), "slot") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("another layout", func(t *testing.T) {
		x := *l
		x.Parts = x.Parts[1:]
		if _, err := Write(t.Context(), filepath.Join(t.TempDir(), "i"), s, &x, blobs, WriteOptions{Slot: testSlot}); err == nil {
			t.Error("accepted")
		}
	})
}
