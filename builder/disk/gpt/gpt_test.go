package gpt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/disktest"
)

func sample(size int64) Table {
	return Table{
		GUID: "11111111-2222-4333-8444-555555555555", Size: size, SectorSize: Sector512,
		Partitions: []Partition{
			{Name: "ESP", Type: TypeESP, GUID: "aaaaaaaa-2222-4333-8444-555555555555", Start: 4 << 20, Size: 8 << 20},
			{Name: "DATA", Type: TypeVar, GUID: "bbbbbbbb-2222-4333-8444-555555555555", Start: 12 << 20, Size: size - 13<<20, Attributes: NoAuto},
		},
	}
}

// disk returns an empty disk with a partition table.
func disk(t *testing.T, tab Table) []byte {
	t.Helper()
	head, tail, err := Encode(tab)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, tab.Size)
	copy(b, head)
	copy(b[len(b)-len(tail):], tail)
	return b
}

func TestRoundTripAndOracle(t *testing.T) {
	want := sample(64 << 20)
	b := disk(t, want)
	got, err := Read(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("read %+v, wrote %+v", *got, want)
	}
	if err := Verify(bytes.NewReader(b), int64(len(b))); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(b, disk(t, want)) {
		t.Error("two encodings differ")
	}
	name := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(name, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if out := disktest.Oracle(t, "sgdisk", "-v", name); !strings.Contains(out, "No problems found") {
		t.Errorf("sgdisk: %s", out)
	}
	out := strings.ToLower(disktest.Oracle(t, "sgdisk", "-i", "2", name))
	for _, s := range []string{TypeVar, "bbbbbbbb-2222-4333-8444-555555555555", "8000000000000000", "'data'"} {
		if !strings.Contains(out, s) {
			t.Errorf("sgdisk does not see %s: %s", s, out)
		}
	}
}

// TestSectorsOf4KiB checks that the table of a disk with sectors of 4 KiB is found and checked,
// even if only its backup is left, and is not confused with a table of the usual sectors. sgdisk
// cannot read such a file: test/oracle and the tests of flash run it on real devices.
func TestSectorsOf4KiB(t *testing.T) {
	want := sample(64 << 20)
	want.SectorSize = Sector4096
	b := disk(t, want)
	for _, damaged := range []bool{false, true} {
		if damaged {
			b[Sector4096]++
		}
		got, err := Read(bytes.NewReader(b), int64(len(b)))
		if err != nil || !reflect.DeepEqual(*got, want) {
			t.Fatalf("damaged %v: read %+v, %v", damaged, got, err)
		}
		if err := Verify(bytes.NewReader(b), int64(len(b))); (err != nil) != damaged {
			t.Errorf("damaged %v: Verify: %v", damaged, err)
		}
	}
	b[Sector4096]--
	if _, err := Read(bytes.NewReader(b), int64(len(b))-Sector4096); !errors.Is(err, ErrTruncated) {
		t.Errorf("truncated: %v", err)
	}
	for _, part := range [][]byte{b[:3*Sector4096], b[len(b)-Sector4096:]} {
		for i := 0; i < len(part); i += 7 {
			part[i] ^= 1
			if err := Verify(bytes.NewReader(b), int64(len(b))); err == nil {
				t.Fatalf("no error for a damaged byte %d of %d", i, len(part))
			}
			part[i] ^= 1
		}
	}
	huge := sample(32 << 40)
	huge.SectorSize = Sector4096
	head, _, err := Encode(huge)
	if err != nil {
		t.Fatal(err)
	}
	if n := binary.LittleEndian.Uint32(head[446+12:]); n != 1<<32-1 {
		t.Errorf("the protective MBR of 32 TiB has %d sectors", n)
	}
	want.SectorSize = 520
	if _, _, err := Encode(want); err == nil {
		t.Error("sectors of 520 bytes were accepted")
	}
}

func TestHugeDisk(t *testing.T) {
	tab := sample(4 << 40)
	head, _, err := Encode(tab)
	if err != nil {
		t.Fatal(err)
	}
	if n := binary.LittleEndian.Uint32(head[446+12:]); n != 1<<32-1 {
		t.Errorf("the protective MBR has %d sectors", n)
	}
}

func TestDamage(t *testing.T) {
	b := disk(t, sample(64<<20))
	size := int64(len(b))

	t.Run("copy is used", func(t *testing.T) {
		x := bytes.Clone(b)
		x[Sector512+60]++
		got, err := Read(bytes.NewReader(x), size)
		if err != nil || len(got.Partitions) != 2 {
			t.Errorf("%v %v", got, err)
		}
		if err := Verify(bytes.NewReader(x), size); err == nil || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("Verify: %v", err)
		}
	})
	t.Run("entries", func(t *testing.T) {
		x := bytes.Clone(b)
		x[2*Sector512]++
		if _, err := Read(bytes.NewReader(x), size); err != nil {
			t.Error(err)
		}
	})
	t.Run("damaged copy is noticed", func(t *testing.T) {
		x := bytes.Clone(b)
		x[size-1024]++
		if err := Verify(bytes.NewReader(x), size); err == nil {
			t.Error("no error for a damaged table")
		}
	})
	t.Run("truncated", func(t *testing.T) {
		if _, err := Read(bytes.NewReader(b), size-Sector512); !errors.Is(err, ErrTruncated) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("on a larger device", func(t *testing.T) {
		x := append(bytes.Clone(b), make([]byte, 1<<20)...)
		got, err := Read(bytes.NewReader(x), int64(len(x)))
		if err != nil || got.Size != size {
			t.Errorf("%v %v", got, err)
		}
	})
	t.Run("bytes of the table", func(t *testing.T) {
		x := bytes.Clone(b)
		for _, part := range [][]byte{x[:HeadSize(Sector512)], x[size-TailSize(Sector512):]} {
			for i := 0; i < len(part); i++ {
				if i > 4*Sector512 && i < len(part)-2*Sector512 {
					i += 96 // skip the unused entries
				}
				part[i] ^= 1
				if err := Verify(bytes.NewReader(x), size); err == nil {
					t.Fatalf("no error for a damaged byte %d of %d", i, len(part))
				}
				part[i] ^= 1
			}
		}
	})
	t.Run("moved to the end of a larger device", func(t *testing.T) {
		for _, n := range []int64{100 << 20, 20 << 30} { // with and without valid cylinder numbers
			name := filepath.Join(t.TempDir(), "disk")
			if err := errors.Join(os.WriteFile(name, b, 0o600), os.Truncate(name, n)); err != nil {
				t.Fatal(err)
			}
			disktest.Oracle(t, "sgdisk", "-e", name)
			f, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			got, err := Read(f, n)
			if err != nil || got.Size != n {
				t.Errorf("%d bytes: %v %v", n, got, err)
			}
			if err := Verify(f, n); err != nil {
				t.Errorf("%d bytes: a valid table was rejected: %v", n, err)
			}
		}
	})
	t.Run("nothing", func(t *testing.T) {
		for _, n := range []int64{0, 100, 1 << 20} {
			if _, err := Read(bytes.NewReader(make([]byte, n)), n); !errors.Is(err, ErrNoTable) {
				t.Errorf("%d bytes: %v", n, err)
			}
		}
	})
	t.Run("absurd count", func(t *testing.T) {
		x := bytes.Clone(b)
		h := x[Sector512 : 2*Sector512]
		binary.LittleEndian.PutUint32(h[80:], 1<<31)
		clear(h[16:20])
		binary.LittleEndian.PutUint32(h[16:], crc32.ChecksumIEEE(h[:92]))
		if _, err := Read(bytes.NewReader(x), size); err != nil && !errors.Is(err, ErrNoTable) {
			t.Errorf("got %v", err)
		}
	})
}

func TestBadTables(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Table)
		want   string
	}{
		"overlap":    {func(t *Table) { t.Partitions[1].Start = 8 << 20 }, "overlap"},
		"beyond":     {func(t *Table) { t.Partitions[1].Size = 64 << 20 }, "do not fit"},
		"same GUID":  {func(t *Table) { t.Partitions[1].GUID = t.Partitions[0].GUID }, "has the GUID of"},
		"no GUID":    {func(t *Table) { t.GUID = "" }, "disk GUID"},
		"bad GUID":   {func(t *Table) { t.Partitions[0].GUID = "x" }, "GUID \"x\""},
		"odd size":   {func(t *Table) { t.Size++ }, "no space"},
		"over table": {func(t *Table) { t.Partitions[0].Start = 512 }, "do not fit"},
	} {
		t.Run(name, func(t *testing.T) {
			tab := sample(64 << 20)
			tc.change(&tab)
			if _, _, err := Encode(tab); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func FuzzRead(f *testing.F) {
	head, tail, err := Encode(sample(64 << 20))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(head, tail)
	f.Fuzz(func(t *testing.T, head, tail []byte) {
		b := append(bytes.Clone(head), tail...)
		if len(b) > 1<<20 {
			return
		}
		// Set valid checksums, which a fuzzer does not find.
		if len(b) >= 2*Sector512 {
			h := b[Sector512:]
			clear(h[16:20])
			binary.LittleEndian.PutUint32(h[16:], crc32.ChecksumIEEE(h[:92]))
			if len(b) >= int(HeadSize(Sector512)) {
				binary.LittleEndian.PutUint32(h[88:], crc32.ChecksumIEEE(b[2*Sector512:HeadSize(Sector512)]))
				clear(h[16:20])
				binary.LittleEndian.PutUint32(h[16:], crc32.ChecksumIEEE(h[:92]))
			}
		}
		if tab, err := Read(bytes.NewReader(b), int64(len(b))); err == nil {
			if err := tab.check(); err != nil {
				t.Error(err)
			}
		}
	})
}
