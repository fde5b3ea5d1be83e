package slot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
)

// forged is a FAT32 file system with 512-byte clusters, written entry by entry. Its top directory
// is cluster 2.
type forged struct {
	img []byte
}

const (
	forgedFAT      = 32 * 512
	forgedClusters = 70000
	forgedData     = forgedFAT + 550*512
)

func newForged() *forged {
	b := make([]byte, forgedData+forgedClusters*512)
	le := binary.LittleEndian
	le.PutUint16(b[11:], 512)
	b[13] = 1
	le.PutUint16(b[14:], 32)
	b[16] = 1
	le.PutUint32(b[32:], uint32(len(b)/512))
	le.PutUint32(b[36:], 550)
	le.PutUint32(b[44:], 2)
	b[510], b[511] = 0x55, 0xaa
	f := &forged{b}
	f.chain(2)
	return f
}

// next links cluster c to cluster to; 0x0fffffff ends a chain.
func (f *forged) next(c, to uint32) { binary.LittleEndian.PutUint32(f.img[forgedFAT+4*c:], to) }

// chain links the clusters.
func (f *forged) chain(clusters ...uint32) {
	for i, c := range clusters {
		if i+1 < len(clusters) {
			f.next(c, clusters[i+1])
		} else {
			f.next(c, 0x0fffffff)
		}
	}
}

func (f *forged) cluster(c uint32) []byte { return f.img[forgedData+(int(c)-2)*512:][:512] }

// entry writes the i-th of the 16 entries in a directory's cluster.
func (f *forged) entry(c uint32, i int, name string, attr byte, first, size uint32) {
	e := f.cluster(c)[i*32:][:32]
	copy(e, fmt.Sprintf("%-11s", name))
	e[11] = attr
	binary.LittleEndian.PutUint16(e[20:], uint16(first>>16))
	binary.LittleEndian.PutUint16(e[26:], uint16(first))
	binary.LittleEndian.PutUint32(e[28:], size)
}

// deleted fills a directory's cluster with entries of deleted files.
func (f *forged) deleted(c uint32) {
	for i := range 16 {
		f.entry(c, i, "\xe5ONE", 0x20, 0, 0)
	}
}

// apart returns n cluster numbers, starting at c. Consecutive ones are in different pages of the
// allocation table.
func apart(c uint32, n int) []uint32 {
	const pages, inPage = 32, 1024
	var out []uint32
	for i := range n {
		out = append(out, c+uint32(i%pages*inPage+i/pages))
	}
	return out
}

// hostile lists file systems that are made to be slow, large or endless.
var hostile = []struct {
	name string
	make func(f *forged)
	want string // part of the error
}{
	{"a stick full of photos", func(f *forged) {
		c := uint32(2)
		for i := range 8000 {
			if i > 0 && i%16 == 0 {
				f.chain(c, 1000+uint32(i))
				c = 1000 + uint32(i)
			}
			f.entry(c, i%16, fmt.Sprintf("P%07dJPG", i), 0x20, 10, 100)
		}
	}, "the top directory: there are more than 4096 files"},
	{"a top directory whose clusters are far apart", func(f *forged) {
		all := append([]uint32{2}, apart(100, 4000)...)
		f.chain(all...)
		for _, c := range all {
			f.deleted(c)
		}
	}, "format the stick again"},
	{"a top directory that is a loop", func(f *forged) {
		f.next(2, 2)
		for i := range 16 {
			f.entry(2, i, fmt.Sprintf("SITE%d   YAM", i), 0x20, 3, 1)
		}
	}, "is a loop"},
	{"a loop of two after a long way", func(f *forged) {
		f.chain(2, 3, 4, 5, 6, 7, 8, 9)
		f.next(9, 8)
		for c := uint32(2); c < 10; c++ {
			f.deleted(c)
		}
	}, "is a loop"},
	{"a site whose clusters are far apart", func(f *forged) {
		f.chain(apart(100, 512)...)
		f.entry(2, 0, "SITE    YAM", 0x20, 100, 512*512)
		f.entry(2, 1, "FILES      ", 0x10, 3, 0)
		f.chain(3)
		for i := range 16 {
			f.entry(3, i, fmt.Sprintf("F%d", i), 0x20, 100, 512*512)
		}
	}, "format the stick again"},
	{"a site of 4 GiB", func(f *forged) {
		f.entry(2, 0, "EDGEBAKEJSO", 0x20, 100, 1<<32-1)
		f.entry(2, 1, "CONFIG  IGN", 0x20, 100, 1<<32-1)
	}, "it has 4294967295 bytes"},
	{"thousands of files that share their bytes", func(f *forged) {
		f.next(100, 101)
		for c := uint32(100); c < 100+2048; c++ {
			f.chain(c, c+1)
		}
		dirs := []uint32{}
		for c := uint32(10000); c < 10128; c++ {
			dirs = append(dirs, c)
			for i := range 16 {
				f.entry(c, i, fmt.Sprintf("F%d", int(c)*16+i), 0x20, 100, 1<<20)
			}
		}
		f.chain(dirs...)
		f.entry(2, 0, "FILES      ", 0x10, 10000, 0)
	}, "more than 15 MiB"},
	{"thousands of directories that are one, full of deleted files", func(f *forged) {
		// 2,000 names refer to one directory, which has 60,000 deleted entries.
		dirs, empty := []uint32{}, []uint32{}
		for c := uint32(20000); c < 20000+3750; c++ {
			empty = append(empty, c)
			f.deleted(c)
		}
		f.chain(empty...)
		for c := uint32(10000); c < 10125; c++ {
			dirs = append(dirs, c)
			for i := range 16 {
				f.entry(c, i, fmt.Sprintf("D%d", int(c)*16+i), 0x10, 20000, 0)
			}
		}
		f.chain(dirs...)
		f.entry(2, 0, "FILES      ", 0x10, 10000, 0)
	}, "format the stick again"},
	{"a directory inside itself", func(f *forged) {
		f.entry(2, 0, "FILES      ", 0x10, 3, 0)
		f.chain(3)
		f.entry(3, 0, "D", 0x10, 3, 0)
	}, "too deep"},
	{"the top directory inside itself", func(f *forged) {
		for i := range 16 {
			f.entry(2, i, "FILES      ", 0x10, 2, 0)
		}
	}, "too deep"},
	{"long names without end", func(f *forged) {
		var all []uint32
		for c := uint32(2); c < 2+4000; c++ {
			all = append(all, c)
			for i := range 16 {
				e := f.cluster(c)[i*32:][:32]
				e[0], e[11] = 0x7f, 0x0f
			}
		}
		f.chain(all...)
	}, "no Site"},
	{"a site of its own names", func(f *forged) {
		for i := range 16 {
			f.entry(2, i, fmt.Sprintf("SITE (%d)YML", i), 0x20, 3, 1)
		}
	}, "no Site"},
}

// meter counts the reads of a file system.
type meter struct {
	r            io.ReaderAt
	reads, bytes int64
}

func (m *meter) ReadAt(p []byte, off int64) (int, error) {
	m.reads++
	m.bytes += int64(len(p))
	return m.r.ReadAt(p, off)
}

// within fails the test if reading cost more than these limits.
func (m *meter) within(t *testing.T, bytes, reads int64) {
	t.Helper()
	if m.bytes > bytes || m.reads > reads {
		t.Errorf("reading took %d reads and %d bytes", m.reads, m.bytes)
	}
}

const (
	mostReads = maxReads + 2*maxEntries
	mostBytes = maxMeta + 2*maxFiles
)

func TestHostileFileSystems(t *testing.T) {
	for _, test := range hostile {
		t.Run(test.name, func(t *testing.T) {
			f := newForged()
			test.make(f)
			m := &meter{r: bytes.NewReader(f.img)}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var err error
			took := desk.Processor(t, func() { _, err = Read(m) })
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), test.want) || len(err.Error()) > 500 {
				t.Errorf("got %v", err)
			}
			m.within(t, mostBytes, mostReads)
			if took > 2*time.Second {
				t.Errorf("reading took %v", took)
			}
			if got := after.TotalAlloc - before.TotalAlloc; got > 5*maxFiles {
				t.Errorf("reading took %d bytes of memory", got)
			}
			t.Logf("%v, %d reads, %d bytes, %d bytes allocated: %v", took, m.reads, m.bytes, after.TotalAlloc-before.TotalAlloc, err)

			m = &meter{r: bytes.NewReader(f.img)}
			if label, _ := Label(m); label != "" {
				t.Errorf("the file system has the label %q", label)
			}
			m.within(t, maxMeta, maxReads)
		})
	}
}

// TestALabelComesFirst checks that Label reads nothing but a stick's label.
func TestALabelComesFirst(t *testing.T) {
	f := newForged()
	f.entry(2, 0, "HOLIDAY", 0x08, 0, 0)
	f.chain(append([]uint32{2}, apart(100, 4000)...)...)
	for _, c := range apart(100, 4000) {
		f.deleted(c)
	}
	m := &meter{r: bytes.NewReader(f.img)}
	if label, err := Label(m); label != "HOLIDAY" || err != nil {
		t.Errorf("got %q, %v", label, err)
	}
	m.within(t, 16<<10, 4)
	m = &meter{r: bytes.NewReader(mustMake(t, sample()))}
	if label, err := Label(m); label != ondisk.LabelSlot || err != nil {
		t.Errorf("got %q, %v", label, err)
	}
	m.within(t, 16<<10, 4)
}

// TestWhatIsMadeIsRead checks that Make rejects a slot that could not be read.
func TestWhatIsMadeIsRead(t *testing.T) {
	fits := sample()
	fits.Files["site.yaml"] = make([]byte, maxSite)
	for i := range maxEntries - 20 {
		fits.Files[fmt.Sprintf("files/f%d", i)] = []byte("x")
	}
	if _, err := Read(bytes.NewReader(mustMake(t, fits))); err != nil {
		t.Error(err)
	}
	large := sample()
	large.Files["site.yaml"] = make([]byte, maxSite+1)
	large.Files["files/1/2/3/4/5/6/7/8/9"] = nil
	for i := range maxEntries {
		large.Files[fmt.Sprintf("files/f%d", i)] = []byte("x")
	}
	_, err := Make(large)
	if err == nil {
		t.Fatal("a slot with these files was made")
	}
	for _, want := range []string{"site.yaml has 262145 bytes, the slot has room", "are too many", "nested too deep"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
}

// TestTooLargeIsSaidOnce checks that the error about an Inventory that is too large has only the
// fix for an Inventory.
func TestTooLargeIsSaidOnce(t *testing.T) {
	large := sample()
	delete(large.Files, ondisk.SlotSite)
	large.Files[ondisk.SlotInventory] = make([]byte, ondisk.SlotCapacity+1)
	_, err := Make(large)
	if err == nil || !strings.HasSuffix(err.Error(), smallerInventory) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v", err)
	}
}

// endless is a file system of the size of a forged one. Its table and data repeat, so that chains
// and directories do not end.
type endless struct{ boot, table, data []byte }

func (e endless) ReadAt(p []byte, off int64) (int, error) {
	const size = forgedData + forgedClusters*512
	n := int(max(0, min(int64(len(p)), size-off)))
	for i := 0; i < n; {
		at := int(off) + i
		part, end := e.boot, forgedFAT
		switch {
		case at >= forgedData:
			part, at, end = e.data, at-forgedData, size-forgedData
		case at >= forgedFAT:
			part, at, end = e.table, at-forgedFAT, forgedData-forgedFAT
		}
		i += copy(p[i:n], part[at%len(part):][:min(len(part)-at%len(part), end-at)])
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// FuzzReadCost checks that the cost of reading any file system stays within the limits of a slot.
func FuzzReadCost(f *testing.F) {
	for _, h := range hostile {
		img := newForged()
		h.make(img)
		f.Add(img.img[:512], img.img[forgedFAT:][:4096], img.img[forgedData:][:4096])
	}
	f.Fuzz(func(t *testing.T, boot, table, data []byte) {
		if len(boot) < 512 || len(table) == 0 || len(data) == 0 {
			return
		}
		m := &meter{r: endless{boot, table, data}}
		Read(m)
		m.within(t, mostBytes, mostReads)
		m = &meter{r: endless{boot, table, data}}
		Label(m)
		m.within(t, maxMeta, maxReads)
	})
}

// memory is a device in memory of fixed size.
type memory []byte

func (m memory) ReadAt(p []byte, off int64) (int, error) { return bytes.NewReader(m).ReadAt(p, off) }

func (m memory) WriteAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > int64(len(m)) {
		return 0, io.ErrShortWrite
	}
	return copy(m[off:], p), nil
}

func (m memory) Sync() error { return nil }

// FuzzScrub scrubs a damaged slot. If Scrub succeeds, the secret must be gone.
func FuzzScrub(f *testing.F) {
	img := mustMake(f, sample())
	d := make(memory, len(img)) // one for all inputs, because allocating it takes longest
	reserved := int(img[14]) * 512
	f.Add(uint32(reserved), []byte{0xff, 0xff})
	f.Add(uint32(11), []byte{0, 4})
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		copy(d, img)
		copy(d[int(at)%len(d):], patch)
		const secret = "abcdef.0123456789abcdef"
		err := Scrub(d, ondisk.SlotInfo{Version: 1, Plan: "p"}, []byte("public: true\n"), secret)
		if errors.Is(err, ErrForeign) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(d, []byte(secret)) {
			t.Error("the secret is still there")
		}
		if _, err := Read(d); err != nil {
			t.Errorf("the scrubbed slot cannot be read: %v", err)
		}
	})
}
