package media

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

// medium is a disk in a file. A test can make it lose writes.
type medium struct {
	f    *os.File
	size int64
	// junk is the byte with which Discard fills blocks.
	junk byte
	// ops, if set, is called for each write with its number, and may skip or fail it.
	ops func(n int, do func(*os.File) error) error
	n   int
	// sync, if set, is called by each Sync.
	sync func() error
	// flip is the offset of a byte that never reads as it was written.
	flip int64
}

// blank makes a disk of the given size that is full of old data.
func blank(t testing.TB, size int64) *medium {
	t.Helper()
	f, err := os.Create(filepath.Join(disktest.Scratch(t), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	old := bytes.Repeat([]byte("old data"), 1<<17)
	for off := int64(0); off < size; off += 16 << 20 {
		if _, err := f.WriteAt(old[:min(int64(len(old)), size-off)], off); err != nil {
			t.Fatal(err)
		}
	}
	return &medium{f: f, size: size, junk: 0xa5, flip: -1}
}

// copy returns another disk with the same content.
func (m *medium) copy(t testing.TB) *medium {
	t.Helper()
	to := filepath.Join(disktest.Scratch(t), "disk")
	disktest.Copy(t, m.path(), to)
	f, err := os.OpenFile(to, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &medium{f: f, size: m.size, junk: m.junk, flip: -1}
}

func (m *medium) path() string { return m.f.Name() }

func (m *medium) do(op func(*os.File) error) error {
	m.n++
	if m.ops != nil {
		return m.ops(m.n, op)
	}
	return op(m.f)
}

func (m *medium) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > m.size {
		return 0, syscall.ENOSPC
	}
	own := bytes.Clone(p)
	return len(p), m.do(func(f *os.File) error {
		_, err := f.WriteAt(own, off)
		return err
	})
}

// Zero makes a hole, so that copying the disk for each power cut is fast.
func (m *medium) Zero(off, n int64) error {
	return m.do(func(f *os.File) error {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if errors.Is(err, unix.EOPNOTSUPP) {
			_, err = f.WriteAt(make([]byte, n), off)
		}
		return err
	})
}

func (m *medium) Discard(off, n int64) {
	_ = m.do(func(f *os.File) error {
		_, err := f.WriteAt(bytes.Repeat([]byte{m.junk}, int(min(n, 1<<20))), off)
		return err
	})
}

func (m *medium) Sync() error {
	if m.sync != nil {
		return m.sync()
	}
	return nil
}

func (m *medium) ReadAt(p []byte, off int64) (int, error) {
	n, err := m.f.ReadAt(p, off)
	if m.flip >= off && m.flip < off+int64(n) {
		p[m.flip-off] ^= 1
	}
	return n, err
}

var random = [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}

// flashTo flashes an image with a Site to d. change edits the options.
func flashTo(t testing.TB, image string, d *medium, change func(*FlashOptions)) (*Flash, *Flashed, error) {
	t.Helper()
	s := site()
	o := FlashOptions{Site: &s, Stamp: StampOptions{Now: now}, Size: d.size, Random: random}
	if change != nil {
		change(&o)
	}
	f, err := PrepareFlash(image, o)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	r, err := f.Write(t.Context(), d)
	return f, r, err
}

// TestFlash checks that the disk has the image's content, the Site, a partition table for its size,
// and its own GUIDs. This must not depend on the disk's old content or on discarded blocks.
func TestFlash(t *testing.T) {
	d := disktest.Scratch(t)
	raw, packed := filepath.Join(d, "g.raw"), filepath.Join(d, "g.raw.zst")
	want := golden(t, raw, 8<<20, false)
	golden(t, packed, 8<<20, true)
	full := filepath.Join(d, "full.raw") // a copy without holes
	b, err := os.ReadFile(raw)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, b, 0o600); err != nil {
		t.Fatal(err)
	}
	size := int64(len(b))
	var first string
	for _, tc := range []struct {
		image string
		size  int64
	}{{raw, size + 64<<20}, {packed, size + 64<<20}, {full, size}, {raw, size + 512}, {raw, size + 3<<20}} {
		m := blank(t, tc.size)
		f, r, err := flashTo(t, tc.image, m, nil)
		if err != nil {
			t.Fatal(err)
		}
		if r.Golden != want.Golden || !r.Verified || f.Shared || f.State != SlotSite || r.DiskGUID != "01020304-0506-4708-890a-0b0c0d0e0f10" {
			t.Errorf("%s onto %d: %+v %+v", tc.image, tc.size, f, r)
		}
		if err := Verify(t.Context(), m.path(), nil); err != nil {
			t.Errorf("%s onto %d: %v", tc.image, tc.size, err)
		}
		i, err := Inspect(m.path())
		if err != nil {
			t.Fatal(err)
		}
		if i.Slot.State != SlotSite || i.DiskGUID != r.DiskGUID || i.Slot.Golden != want.Golden || i.Slot.Stamped != now {
			t.Errorf("slot of the disk: %+v", i.Slot)
		}
		for _, p := range i.Partitions {
			if p.GUID == disk.PartitionGUID("aa11", p.Label) || p.GUID != disk.PartitionGUID(r.DiskGUID, p.Label) {
				t.Errorf("%s has GUID %s", p.Label, p.GUID)
			}
		}
		if out := disktest.Oracle(t, "sgdisk", "-v", m.path()); !strings.Contains(out, "No problems found") {
			t.Errorf("sgdisk: %s", out)
		}
		if r.Written > 64<<20 {
			t.Errorf("%d bytes were written for a few MiB of data", r.Written)
		}
		if tc.size == size+64<<20 {
			if sum := disktest.Sum(t, m.path()); first == "" {
				first = sum
			} else if sum != first {
				t.Error("raw and compressed give different disks")
			}
		}
		os.Remove(m.path())
	}
}

// TestFlashNamesItsOwnPartitions checks that the boot entry names the disk's own partitions. The
// disk can be stamped again, and can itself be flashed to another disk.
func TestFlashNamesItsOwnPartitions(t *testing.T) {
	image := filepath.Join(t.TempDir(), "g.raw")
	want := golden(t, image, 4<<20, false)
	fi, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	m := blank(t, fi.Size()+32<<20)
	if _, _, err := flashTo(t, image, m, nil); err != nil {
		t.Fatal(err)
	}
	again := blank(t, fi.Size()+64<<20)
	f, r, err := flashTo(t, m.path(), again, func(o *FlashOptions) { o.Random[0]++; o.Site = nil })
	if err != nil {
		t.Fatal(err)
	}
	if r.Golden != want.Golden || f.State != SlotSite {
		t.Errorf("a copy of a flashed disk: %+v %+v", f, r)
	}
	seen := map[string]bool{}
	for _, x := range []*medium{m, again} {
		x.f.Close() // Stamp requires that no other program has the file open
		stamp(t, x.path(), StampOptions{})
		if err := Verify(t.Context(), x.path(), nil); err != nil {
			t.Error(err)
		}
		img, err := Open(x.path())
		if err != nil {
			t.Fatal(err)
		}
		entry, err := img.espFile(ondisk.ESPEntryA)
		if err != nil {
			t.Fatal(err)
		}
		for _, label := range []string{ondisk.LabelRootA, ondisk.LabelData, ondisk.LabelESP} {
			p, err := img.partition(label)
			if err != nil || strings.Count(string(entry), "PARTUUID="+p.GUID) != 1 || seen[p.GUID] {
				t.Errorf("%s has GUID %s, but the boot entry has %s", label, p.GUID, entry)
			}
			seen[p.GUID] = true
		}
		img.Close()
		// A change in a boot entry is still found.
		where := img.table.Partitions[0]
		raw, err := os.ReadFile(x.path())
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(raw, []byte("quiet"))
		if at < int(where.Start) {
			t.Fatal("there is no entry")
		}
		f, err := os.OpenFile(x.path(), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteAt([]byte("Q"), int64(at))
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		if err := Verify(t.Context(), x.path(), nil); err == nil || !strings.Contains(err.Error(), "golden digest") {
			t.Errorf("a changed boot entry: %v", err)
		}
	}
}

// TestFlashOfAnotherBootChain checks that a disk keeps the image's GUIDs if the boot entry does not
// name the root by GUID. An image whose partition table differs from image.json is rejected.
func TestFlashOfAnotherBootChain(t *testing.T) {
	image := filepath.Join(t.TempDir(), "g.raw")
	golden(t, image, 4<<20, false)
	b, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	guid := disk.PartitionGUID("aa11", ondisk.LabelRootA)
	prepare := func(old, new string) (*Flash, error) {
		disktest.Write(t, image, bytes.Replace(b, []byte(old), fmt.Appendf(nil, "%-*s", len(old), new), 1))
		return PrepareFlash(image, FlashOptions{Size: int64(len(b)), Random: random})
	}
	f, err := prepare("root=PARTUUID="+guid, "root=LABEL=ROOT")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !f.Shared || f.edits != nil {
		t.Errorf("flashing would change GUIDs that the boot entry uses: %v", f.edits)
	}
	for _, p := range f.Table.Partitions {
		if p.GUID != disk.PartitionGUID("aa11", p.Name) {
			t.Errorf("%s gets %s", p.Name, p.GUID)
		}
	}
	if _, err := prepare(`"guid":"`+guid, `"guid":"00000000-0000-8000-8000-000000000000`); err == nil || !strings.Contains(err.Error(), "it was built as") {
		t.Errorf("another image.json: %v", err)
	}
}

// TestFlashOfAChangingImage changes the image after PrepareFlash has read it. Write must notice the
// change, because no digest covers the data that PrepareFlash has read. The disk must not boot.
func TestFlashOfAChangingImage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw")
	want := golden(t, path, 4<<20, false)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data := disk.PartitionGUID("aa11", ondisk.LabelData)
	for name, tc := range map[string]struct {
		first, then string
		quick       bool
	}{
		"as it is":           {"quiet", "quiet", false},
		"a GUID left out":    {"PARTUUID=" + data, "PARTUUID=" + strings.ToUpper(data), false},
		"not read back":      {"PARTUUID=" + data, "PARTUUID=" + strings.ToUpper(data), true},
		"another entry name": {"systemd.mount-extra=PARTUUID=" + data, "systemd.mount-extra=partuuid=" + data[:2] + "\n " + data[4:], false},
		"another image.json": {`"kubernetes":"v1.36.3"`, `"kubernetes":"v1.36.1"`, false},
	} {
		shown := bytes.Replace(b, []byte(tc.first), []byte(tc.then), 1)
		if tc.first != tc.then && bytes.Equal(shown, b) {
			t.Fatalf("%s: the image has no %s", name, tc.first)
		}
		disktest.Write(t, path, shown)
		m := blank(t, int64(len(b))+8<<20)
		f, err := PrepareFlash(path, FlashOptions{Size: m.size, Random: random, SkipVerify: tc.quick})
		if err != nil {
			t.Fatal(err)
		}
		disktest.Write(t, path, b)
		r, err := f.Write(t.Context(), m)
		f.Close()
		if tc.first == tc.then {
			if err != nil || r.Golden != want.Golden {
				t.Errorf("%s: %v", name, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), "changed while they were read") {
			t.Errorf("%s: %v", name, err)
		} else if _, err := Inspect(m.path()); !errors.Is(err, ErrUnfinished) {
			t.Errorf("%s: the disk can be started: %v", name, err)
		}
	}
}

// TestFlashReadsTheSlotOnce checks that the written slot is the one that was checked, even if the
// image's slot changes meanwhile: no digest covers it.
func TestFlashReadsTheSlotOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "g.raw")
	golden(t, path, 4<<20, false)
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	m := blank(t, fi.Size()+8<<20)
	f, err := PrepareFlash(path, FlashOptions{Size: m.size, Random: random})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	stamped := path + ".stamped"
	stamp(t, path, StampOptions{Output: stamped})
	if said, err := command("cp", stamped, path); err != nil { // cp ignores the lock
		t.Fatalf("%v: %s", err, said)
	}
	if _, err := f.Write(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if i, err := Inspect(m.path()); err != nil || i.Slot.State != f.State || f.State != SlotGolden {
		t.Errorf("the slot is %+v, %v; Flash reported %s", i.Slot, err, f.State)
	}
}

// TestFlashPowerCut cuts the power after each write in turn. The disk must then be the complete old
// disk, the complete new disk, or a disk that does not boot and that Inspect rejects. Of the writes
// since the last Sync, none, all or some are stored.
func TestFlashPowerCut(t *testing.T) {
	d := disktest.Scratch(t)
	image := filepath.Join(d, "new.raw.zst")
	golden(t, image, 2<<20, true)
	size := int64(200 << 20)
	old := blank(t, size)
	if _, _, err := flashTo(t, filepath.Join(d, "new.raw.zst"), old, func(o *FlashOptions) { o.Random[0] = 99; o.Site = nil }); err != nil {
		t.Fatal(err)
	}
	before, err := Inspect(old.path())
	if err != nil {
		t.Fatal(err)
	}
	errCut := errors.New("no power")
	seen := map[string]int{}
	rnd := rand.New(rand.NewPCG(1, 2))
	for at, over := 1, false; !over; at++ {
		for _, kept := range []string{"none", "all", "some"} {
			m := old.copy(t)
			var pending []func(*os.File) error
			settle := func() error {
				for _, op := range pending {
					if err := op(m.f); err != nil {
						return err
					}
				}
				pending = nil
				return nil
			}
			m.sync = settle
			m.ops = func(n int, op func(*os.File) error) error {
				pending = append(pending, op)
				if n == at {
					return errCut
				}
				return nil
			}
			_, _, err := flashTo(t, image, m, nil)
			over = err == nil
			if err != nil && !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			for _, op := range pending {
				if kept == "all" || kept == "some" && rnd.IntN(2) == 0 {
					if err := op(m.f); err != nil {
						t.Fatal(err)
					}
				}
			}
			i, err := Inspect(m.path())
			state := "new"
			switch {
			case err != nil:
				if state = "rejected"; !errors.Is(err, ErrUnfinished) {
					t.Fatalf("after write %d, %s kept: %v", at, kept, err)
				}
			case i.DiskGUID == before.DiskGUID:
				state = "old"
			}
			if err := Verify(t.Context(), m.path(), nil); state != "rejected" && err != nil {
				t.Fatalf("after write %d, %s kept: the %s disk: %v", at, kept, state, err)
			}
			seen[state]++
			os.Remove(m.path())
		}
	}
	if seen["old"] == 0 || seen["rejected"] < 20 || seen["new"] < 3 {
		t.Errorf("seen: %v", seen)
	}
	t.Log(seen)
}

// TestFlashNotices checks that flashing detects a failing disk and a wrong image.
func TestFlashNotices(t *testing.T) {
	d := t.TempDir()
	image := filepath.Join(d, "g.raw")
	golden(t, image, 4<<20, false)
	fi, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	size := fi.Size()
	damaged := filepath.Join(d, "damaged.raw")
	b, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	b[100<<20] ^= 1
	disktest.Write(t, damaged, b)
	ready, err := PrepareFlash(image, FlashOptions{Size: size + 8<<20, Random: random})
	if err != nil {
		t.Fatal(err)
	}
	ready.Close()
	entry := ready.edits[0].off // flashing replaces a GUID at this offset
	at := func(n int, err error) func(*medium) {
		return func(m *medium) {
			m.ops = func(i int, op func(*os.File) error) error {
				if i >= n {
					return err
				}
				return op(m.f)
			}
		}
	}
	for name, tc := range map[string]struct {
		image string
		spoil func(*medium)
		want  []string
	}{
		"a byte of ROOT":      {image, func(m *medium) { m.flip = 90 << 20 }, []string{"other data than was written", "counterfeit"}},
		"a byte of a hole":    {image, func(m *medium) { m.flip = 5<<20 + 3<<19 }, []string{"other data"}},
		"a byte of the slot":  {image, func(m *medium) { m.flip = 68<<20 + 1 }, []string{"other data"}},
		"a byte of an entry":  {image, func(m *medium) { m.flip = entry }, []string{"other data"}},
		"a byte between":      {image, func(m *medium) { m.flip = 1 << 20 }, []string{"other data"}},
		"a byte of the table": {image, func(m *medium) { m.flip = 1100 }, []string{"partition table"}},
		"a byte of its copy":  {image, func(m *medium) { m.flip = m.size - 2000 }, []string{"partition table"}},
		"a byte of sector 0":  {image, func(m *medium) { m.flip = 450 }, []string{"partition table", "other data"}},
		"a damaged image":     {damaged, nil, []string{"is damaged, or has booted", "golden digest"}},
		"unplugged":           {image, at(7, syscall.ENXIO), []string{"the disk is gone"}},
		"failing":             {image, at(7, syscall.EIO), []string{"the disk failed"}},
		"full":                {image, at(3, syscall.ENOSPC), []string{"full"}},
		"read-only":           {image, at(5, syscall.EROFS), []string{"read-only"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := blank(t, size+8<<20)
			if tc.spoil != nil {
				tc.spoil(m)
			}
			_, _, err := flashTo(t, tc.image, m, nil)
			if err == nil {
				t.Fatal("no error for a damaged disk")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v: no %q", err, w)
				}
			}
			if _, err := Inspect(m.path()); !errors.Is(err, ErrUnfinished) {
				t.Errorf("the disk: %v", err)
			}
		})
	}
	t.Run("a disk that ends early", func(t *testing.T) {
		m := blank(t, size+8<<20)
		at(3, syscall.ENOSPC)(m)
		_, _, err := flashTo(t, image, m, func(o *FlashOptions) { o.Sector = 512 })
		if err == nil || !strings.Contains(err.Error(), "smaller than it claims") {
			t.Error(err)
		}
	})
	t.Run("a damaged image, not read back", func(t *testing.T) {
		m := blank(t, size+8<<20)
		_, r, err := flashTo(t, damaged, m, func(o *FlashOptions) { o.SkipVerify = true })
		if err == nil || !strings.Contains(err.Error(), "is damaged, or has booted") || r != nil {
			t.Errorf("got %v, %v", r, err)
		}
		if _, err := Inspect(m.path()); !errors.Is(err, ErrUnfinished) {
			t.Errorf("the disk: %v", err)
		}
	})
	t.Run("boot entries that change under it", func(t *testing.T) {
		changed := filepath.Join(t.TempDir(), "g.raw")
		golden(t, changed, 4<<20, false)
		m := blank(t, size+8<<20)
		f, err := PrepareFlash(changed, FlashOptions{Size: m.size, Random: random})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if len(f.edits) == 0 {
			t.Fatal("the image's boot entries name no partition")
		}
		w, err := os.OpenFile(changed, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if _, err := w.WriteAt([]byte("x"), f.edits[0].off+1); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(t.Context(), m); err == nil || !strings.Contains(err.Error(), "changed while they were read") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("interrupted before", func(t *testing.T) {
		m := blank(t, size+8<<20)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		f, err := PrepareFlash(image, FlashOptions{Size: m.size, Random: random})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(ctx, m); !errors.Is(err, context.Canceled) || !errors.Is(err, ErrUntouched) || m.n != 0 {
			t.Errorf("got %v after %d writes", err, m.n)
		}
	})
	t.Run("interrupted", func(t *testing.T) {
		m := blank(t, size+8<<20)
		ctx, cancel := context.WithCancel(t.Context())
		m.ops = func(n int, op func(*os.File) error) error {
			if n == 5 {
				cancel()
			}
			return op(m.f)
		}
		f, err := PrepareFlash(image, FlashOptions{Size: m.size, Random: random})
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(ctx, m); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if _, err := Inspect(m.path()); !errors.Is(err, ErrUnfinished) {
			t.Errorf("the disk: %v", err)
		}
	})
}

// TestFlashRefuses checks that all problems are reported together, before anything is written.
func TestFlashRefuses(t *testing.T) {
	d := t.TempDir()
	image, packed, wide := filepath.Join(d, "g.raw"), filepath.Join(d, "g.raw.zst"), filepath.Join(d, "4k.raw")
	golden(t, image, 4<<20, false)
	golden(t, packed, 4<<20, true)
	goldenFor(t, wide, 4<<20, false, 4096, nil, nil)
	fi, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	cut := func(from, name string, n int64) string {
		path := filepath.Join(d, name)
		disktest.Copy(t, from, path)
		if err := os.Truncate(path, n); err != nil {
			t.Fatal(err)
		}
		return path
	}
	z, err := os.Stat(packed)
	if err != nil {
		t.Fatal(err)
	}
	noSlot := filepath.Join(d, "noslot.raw")
	noSlotImage(t, noSlot)
	m := blank(t, 3*fi.Size())
	other := site()
	other.Doc.Arch, other.Doc.NodeType, other.Doc.APIVersion = "arm64", "cloud", "edgebake.io/v9"
	for name, tc := range map[string]struct {
		image  string
		change func(*FlashOptions)
		want   []string
	}{
		"too small": {image, func(o *FlashOptions) { o.Size = fi.Size() - 2<<20 }, []string{"use a larger disk"}},
		"sectors and size and site": {image, func(o *FlashOptions) { o.Size, o.Sector, o.Site = 1<<20, 4096, &other },
			[]string{"use a larger disk", "build it with disk.sector: 4096", "arm64", "cloud", "v9"}},
		"4Kn image":      {wide, func(o *FlashOptions) { o.Sector, o.Size = 512, 1<<40 }, []string{"sectors of 4096 bytes, but this disk has sectors of 512", "without disk.sector"}},
		"truncated":      {cut(image, "cut.raw", 50<<20), nil, []string{"truncated"}},
		"truncated .zst": {cut(packed, "cut.raw.zst", z.Size()/2), nil, []string{"truncated"}},
		"no slot":        {noSlot, nil, []string{"no partition EDGEBAKE"}},
		"not there":      {filepath.Join(d, "none.raw"), nil, []string{"no such file"}},
		"no clock":       {image, func(o *FlashOptions) { o.Stamp.Now = built.AddDate(-3, 0, 0) }, []string{"--undated"}},
	} {
		_, _, err := flashTo(t, tc.image, m, tc.change)
		if err == nil {
			t.Errorf("%s: not refused", name)
			continue
		}
		for _, w := range tc.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v: no %q", name, err, w)
			}
		}
		if m.n != 0 {
			t.Errorf("%s: %d writes", name, m.n)
		}
	}
}

// noSlotImage makes an edgebake disk that lacks the partition EDGEBAKE.
func noSlotImage(t *testing.T, path string) {
	t.Helper()
	spec := disk.Spec{ID: "bb22", Arch: "amd64", SourceDate: built, Partitions: []disk.Partition{
		{Label: ondisk.LabelESP, FS: disk.FAT32, Size: 64 << 20, Nodes: []tree.Node{dir(".")}},
	}}
	l, err := disk.Compute(spec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := disk.Write(t.Context(), path, spec, l, disktest.Blobs{}, disk.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
}

func command(name string, args ...string) (string, error) {
	out, err := osexec.Command(name, args...).CombinedOutput()
	return string(out), err
}

// TestTrim checks that trim removes all complete blocks of zeros at both ends, and nothing else.
func TestTrim(t *testing.T) {
	for _, x := range []struct {
		set    []int64 // offsets of non-zero bytes
		at, to int64
	}{
		{[]int64{0, disk.Align - 1}, 0, disk.Align},
		{[]int64{grain}, grain, 2 * grain},
		{[]int64{grain - 1, grain}, 0, 2 * grain},
		{[]int64{disk.Align - 1}, disk.Align - grain, disk.Align},
	} {
		b := make([]byte, disk.Align)
		for _, i := range x.set {
			b[i] = 1
		}
		at, rest := trim(b)
		if at != x.at || at+int64(len(rest)) != x.to || len(rest) > 0 && &rest[0] != &b[at] {
			t.Errorf("%v: %d bytes at %d", x.set, len(rest), at)
		}
	}
	if at, rest := trim(nil); at != 0 || rest != nil {
		t.Errorf("of nothing: %d bytes at %d", len(rest), at)
	}
}

// TestWhoFailed checks that an error in reading the image is reported as an error of the image, and
// an error in writing as an error of the disk.
func TestWhoFailed(t *testing.T) {
	for _, tc := range []struct {
		err       error
		want, not string
	}{
		{&sourceError{"i.raw", syscall.EIO}, "check the stick, the share or the server", "another port"},
		{&sourceError{"i.raw", fmt.Errorf("frame 3: %w", seekable.ErrDamaged)}, "damaged or truncated", "another port"},
		{&sourceError{"i.raw", io.ErrUnexpectedEOF}, "damaged or truncated", "look after"},
		{fmt.Errorf("writing: %w", syscall.EIO), "try another port or disk", "image"},
	} {
		got := explainDevice(tc.err, true).Error()
		if !strings.Contains(got, tc.want) || strings.Contains(got, tc.not) {
			t.Errorf("%v: %s", tc.err, got)
		}
	}
}
