package slot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

// cutOff is a device that loses power after a number of written sectors.
type cutOff struct {
	b    []byte
	left int
}

var errCutOff = errors.New("the power is gone")

func (d *cutOff) ReadAt(p []byte, off int64) (int, error) { return copy(p, d.b[off:]), nil }
func (d *cutOff) Sync() error {
	if d.left <= 0 {
		return errCutOff
	}
	return nil
}

func (d *cutOff) WriteAt(p []byte, off int64) (int, error) {
	n := min(len(p), d.left*512)
	copy(d.b[off:], p[:n])
	if d.left -= (len(p) + 511) / 512; d.left < 0 {
		return n, errCutOff
	}
	return n, nil
}

func slotOf(t *testing.T, name, text string) []byte {
	t.Helper()
	img, err := Make(Contents{Info: ondisk.SlotInfo{Plan: "p"}, Files: map[string][]byte{name: []byte(text)}})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// TestReplaceIsOldOrNew cuts the power after many different sectors. Then it repeats the write, and
// also cuts the power while the write is repeated.
func TestReplaceIsOldOrNew(t *testing.T) {
	secret := strings.Repeat("other machine's token\n", 40_000)
	old, next := slotOf(t, ondisk.SlotInventory, secret), slotOf(t, ondisk.SlotSite, "mine")
	total := len(trimmed(next))/512 + 2*ondisk.SlotSize/512
	seen := map[string]int{}
	state := func(d *cutOff, when string) string {
		c, err := Read(bytes.NewReader(d.b))
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		switch {
		case string(c.Files[ondisk.SlotInventory]) == secret:
			return "old"
		case string(c.Files[ondisk.SlotSite]) != "mine":
			t.Fatalf("%s: the slot holds %v", when, c.Files)
		case c.Unfinished:
			return "unfinished"
		case !bytes.Equal(d.b, next):
			t.Fatalf("%s: the slot seems finished, but the second half is not zero", when)
		}
		return "new"
	}
	var cuts []int
	for n := 1; n < total; n += 1511 {
		cuts = append(cuts, n)
	}
	// Also cut the power while Replace zeroes the second half, of which little is in use.
	zeroed := len(trimmed(next))/512 + 1 + half/512
	cuts = append(cuts, zeroed+1, zeroed+2, zeroed+100)
	slices.Sort(cuts)
	for _, n := range cuts {
		d := &cutOff{slices.Clone(old), n}
		when := fmt.Sprintf("cut after %d sectors", n)
		if err := Replace(d, next); err == nil {
			break
		}
		first := state(d, when)
		seen[first]++
		if first == "new" {
			continue
		}
		for again := 1; again < total; again += 14_983 {
			e := &cutOff{slices.Clone(d.b), again}
			Replace(e, next)
			if second := state(e, when+" and again"); first == "unfinished" && second == "old" {
				t.Fatalf("%s: the old contents are back", when)
			}
		}
		d.left = 1 << 30
		if err := Replace(d, next); err != nil || state(d, when) != "new" || !bytes.Equal(d.b, next) {
			t.Fatalf("%s: %v", when, err)
		}
	}
	if seen["old"] == 0 || seen["unfinished"] == 0 {
		t.Errorf("states seen: %v", seen)
	}
}

// TestRecordInAnyOrder checks that the old slot is kept if the record's header, or a part of the
// record, did not reach the disk.
func TestRecordInAnyOrder(t *testing.T) {
	old, next := slotOf(t, ondisk.SlotInventory, "old"), slotOf(t, ondisk.SlotSite, "mine")
	d := &cutOff{slices.Clone(old), len(trimmed(next))/512 + 1}
	if err := Replace(d, next); !errors.Is(err, errCutOff) || readRecord(d) == nil {
		t.Fatalf("%v, a record: %t", err, readRecord(d) != nil)
	}
	for name, lost := range map[string][2]int{
		"the header": {half, half + sectorSize}, "the contents": {half + sectorSize, ondisk.SlotSize}, "a part of them": {half + 3*sectorSize, half + 4*sectorSize},
	} {
		b := slices.Clone(d.b)
		copy(b[lost[0]:lost[1]], old[lost[0]:])
		if c, err := Read(bytes.NewReader(b)); !errors.Is(err, ErrNoSite) && err != nil || string(c.Files[ondisk.SlotInventory]) != "old" {
			t.Errorf("%s is lost: %v", name, err)
		}
		e := &cutOff{b, 1 << 30}
		if err := Replace(e, next); err != nil || !bytes.Equal(e.b, next) {
			t.Errorf("%s is lost, although it is written again: %v", name, err)
		}
	}
}

// imageFile is a device whose reads return the stored data. It counts the bytes written to it.
type imageFile struct {
	cutOff
	written int
}

func (d *imageFile) Coherent() bool { return true }

func (d *imageFile) WriteAt(p []byte, off int64) (int, error) {
	d.written += len(p)
	return d.cutOff.WriteAt(p, off)
}

// TestZerosAreNotWrittenAgain checks that blocks of a file that are already zero are skipped, and
// that others are overwritten.
func TestZerosAreNotWrittenAgain(t *testing.T) {
	next := slotOf(t, ondisk.SlotSite, "mine")
	for name, before := range map[string][]byte{
		"a slot": slotOf(t, ondisk.SlotSite, "old"), "nothing": make([]byte, ondisk.SlotSize), "rubbish": bytes.Repeat([]byte{0xff}, ondisk.SlotSize),
	} {
		for way, write := range map[string]func(Device, []byte) error{"Replace": Replace, "WriteWhole": func(d Device, b []byte) error { return WriteWhole(d, b) }} {
			d := &imageFile{cutOff: cutOff{slices.Clone(before), 1 << 30}}
			if err := write(d, next); err != nil || !bytes.Equal(d.b, next) {
				t.Errorf("%s, %s: %v", way, name, err)
			}
			if all := name == "rubbish"; all != (d.written >= ondisk.SlotSize) || !all && d.written > 2<<20 {
				t.Errorf("%s, %s: %d bytes are written", way, name, d.written)
			}
		}
	}
}

// TestReplaceLargeOnes checks that contents larger than half a slot are written with WriteWhole.
func TestReplaceLargeOnes(t *testing.T) {
	big := slotOf(t, "files/big", strings.Repeat("x", 12<<20))
	small := slotOf(t, ondisk.SlotSite, "mine")
	for _, pair := range [][2][]byte{{big, small}, {small, big}, {make([]byte, ondisk.SlotSize), small}} {
		d := &cutOff{slices.Clone(pair[0]), 1 << 30}
		if err := Replace(d, pair[1]); err != nil || !bytes.Equal(d.b, pair[1]) {
			t.Error(err)
		}
	}
}

// TestRewrite checks that Rewrite gives the same slot as Make, whatever the slot contained.
func TestRewrite(t *testing.T) {
	big := slotOf(t, "files/big", strings.Repeat("x", 12<<20))
	small := slotOf(t, ondisk.SlotSite, "mine")
	for _, before := range [][]byte{big, small, make([]byte, ondisk.SlotSize), bytes.Repeat([]byte{0xff}, ondisk.SlotSize)} {
		for _, text := range []string{"mine", "another"} {
			c := Contents{Info: ondisk.SlotInfo{Plan: "p"}, Files: map[string][]byte{ondisk.SlotSite: []byte(text)}}
			d := &cutOff{slices.Clone(before), 1 << 30}
			if err := Rewrite(d, c); err != nil || !bytes.Equal(d.b, slotOf(t, ondisk.SlotSite, text)) {
				t.Errorf("%v", err)
			}
		}
	}
	c := Contents{Files: map[string][]byte{"elsewhere": nil}}
	d := &cutOff{slices.Clone(small), 1 << 30}
	if err := Rewrite(d, c); err == nil || !bytes.Equal(d.b, small) {
		t.Errorf("contents that have no place: %v", err)
	}
}

// TestDirectoriesAreNotWrittenOver checks that the second half counts as in use if it has a
// directory, even without files.
func TestDirectoriesAreNotWrittenOver(t *testing.T) {
	img := slotOf(t, "files/etc/empty", "")
	if !secondHalfIsFree(&cutOff{img, 1 << 30}) {
		t.Error("secondHalfIsFree is false, but nothing is there")
	}
	moveDirectory(t, img, "ETC        ", half+1<<20)
	if c, err := Read(bytes.NewReader(img)); !errors.Is(err, ErrNoSite) || len(c.Files) != 1 {
		t.Fatalf("%v, %v", c, err)
	}
	if secondHalfIsFree(&cutOff{img, 1 << 30}) {
		t.Error("secondHalfIsFree is true, but the directory etc is there")
	}
}

// moveDirectory moves a directory of one cluster to about this offset.
func moveDirectory(t *testing.T, img []byte, short string, off int) {
	t.Helper()
	le := binary.LittleEndian
	sector, cluster := int(le.Uint16(img[11:])), int(le.Uint16(img[11:]))*int(img[13])
	table, tableSize := int(le.Uint16(img[14:]))*sector, int(le.Uint16(img[22:]))*sector
	data := table + int(img[16])*tableSize + int(le.Uint16(img[17:]))*32
	entry := bytes.Index(img, []byte(short))
	if entry < 0 {
		t.Fatalf("there is no %s", short)
	}
	from, to := int(le.Uint16(img[entry+26:])), 2+(off-data)/cluster
	copy(img[data+(to-2)*cluster:], img[data+(from-2)*cluster:data+(from-1)*cluster])
	le.PutUint16(img[entry+26:], uint16(to))
	for n := range int(img[16]) {
		fat := img[table+n*tableSize:]
		le.PutUint16(fat[from*2:], 0)
		le.PutUint16(fat[to*2:], 0xffff)
	}
}

// TestInventoryTooLarge checks that Make rejects an Inventory of more than half a slot.
func TestInventoryTooLarge(t *testing.T) {
	for name, files := range map[string]map[string][]byte{
		"inventory.yaml has":  {ondisk.SlotInventory: make([]byte, 5<<20)},
		"split the inventory": {ondisk.SlotInventory: bytes.Repeat([]byte("x"), 3<<20), "files/big": bytes.Repeat([]byte("x"), 6<<20)},
	} {
		if _, err := Make(Contents{Files: files}); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "split the inventory") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
