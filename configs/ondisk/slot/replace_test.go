package slot

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// cutOff is a device that loses its power once so many sectors are written.
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

// TestReplaceIsOldOrNew cuts the power after any of many sectors, finishes, and
// cuts that too.
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
			t.Fatalf("%s: it holds %v", when, c.Files)
		case c.Unfinished:
			return "unfinished"
		}
		return "new"
	}
	step := 1511
	for n := 1; n < total; n += step {
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
				t.Fatalf("%s: it went back", when)
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

// TestReplaceLargeOnes: what has no room for both is written whole.
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

// TestInventoryTooLarge is refused by whoever makes the slot.
func TestInventoryTooLarge(t *testing.T) {
	for name, files := range map[string]map[string][]byte{
		"inventory.yaml has":  {ondisk.SlotInventory: make([]byte, 5<<20)},
		"split the inventory": {ondisk.SlotInventory: bytes.Repeat([]byte("x"), 3<<20), "files/big": bytes.Repeat([]byte("x"), 6<<20)},
	} {
		if _, err := Make(Contents{Files: files}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
