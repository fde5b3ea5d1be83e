package slot

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// mem is a device in memory.
type mem []byte

func (m mem) ReadAt(p []byte, off int64) (int, error)  { return bytes.NewReader(m).ReadAt(p, off) }
func (m mem) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }
func (m mem) Sync() error                              { return nil }

// claimable returns a stick whose claims file has this size and comes after another file.
func claimable(t testing.TB, size int) mem {
	t.Helper()
	m := mem(make([]byte, 16<<20))
	file := func(name string, b []byte) tree.Node {
		return tree.Node{Path: name, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes(b)}}
	}
	nodes := []tree.Node{file(ondisk.SlotInventory, bytes.Repeat([]byte("x"), 5000))}
	if size > 0 {
		nodes = append(nodes, file(ondisk.SlotClaims, bytes.Repeat([]byte{0}, size)))
	}
	nodes = append(nodes, file("zz", bytes.Repeat([]byte("z"), 5000)))
	if err := fat.Write(m, nodes, nil, fat.Options{Type: 16, Label: ondisk.LabelSlot, Size: int64(len(m)), SectorSize: 512}); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestClaims checks that claims are written in place, one for each Site, and that nothing else
// changes.
func TestClaims(t *testing.T) {
	m := claimable(t, 3*512+100)
	before := slices.Clone(m)
	a := Claim{Site: "berlin", Serial: "SN1", UUID: "u", MACs: []string{"52:54:00:12:34:56"}, AssetTag: "t"}
	b := Claim{Site: "paris", Serial: "SN2"}
	for _, c := range []Claim{{Site: "berlin", Serial: "old"}, b, a, {Site: "rome"}} {
		if err := WriteClaim(m, c); err != nil {
			t.Fatal(err)
		}
	}
	if err := WriteClaim(m, Claim{Site: "oslo"}); !errors.Is(err, ErrNoClaims) {
		t.Errorf("a fourth in a file of three: %v", err)
	}
	got, err := ReadClaims(m)
	if err != nil || !reflect.DeepEqual(got, []Claim{a, b, {Site: "rome"}}) {
		t.Errorf("%+v %v", got, err)
	}
	changed := 0
	for off := 0; off < len(m); off += 512 {
		if !bytes.Equal(m[off:off+512], before[off:off+512]) {
			changed++
		}
	}
	if changed != 3 {
		t.Errorf("%d sectors changed", changed)
	}
	if err := WriteClaim(claimable(t, 0), a); !errors.Is(err, ErrNoClaims) {
		t.Errorf("without a file: %v", err)
	}
	if got, err := ReadClaims(claimable(t, 0)); err != nil || got != nil {
		t.Errorf("without a file: %v %v", got, err)
	}
	if err := WriteClaim(m, Claim{Site: strings.Repeat("x", 600)}); err == nil {
		t.Error("a record of more than a sector")
	}
	if err := Strays(m); err == nil || strings.Contains(err.Error(), ondisk.SlotClaims) {
		t.Errorf("%v", err) // the file "zz" must be unchanged
	}
}

// TestHostileClaims checks that a damaged or unprintable record is ignored, and that its place
// counts as free.
func TestHostileClaims(t *testing.T) {
	good, err := Claim{Site: "berlin", Serial: "SN1"}.encode()
	if err != nil {
		t.Fatal(err)
	}
	bell, err := Claim{Site: "berlin", Serial: "SN1"}.encode()
	if err != nil {
		t.Fatal(err)
	}
	half := slices.Clone(good)
	clear(half[30:])
	for name, b := range map[string][]byte{
		"half":   half,
		"flip":   bytes.Replace(bell, []byte("SN1"), []byte("SN2"), 1),
		"noise":  bytes.Repeat([]byte{0xa5}, 512),
		"empty":  make([]byte, 512),
		"head":   append([]byte(claimHead), make([]byte, 500)...)[:512],
		"escape": escaped(t, "\x1b[2J"),
		"long":   escaped(t, strings.Repeat("x", 300)),
	} {
		m := claimable(t, 512)
		in, err := open(m)
		if err != nil {
			t.Fatal(err)
		}
		at, err := in.claims()
		if err != nil || len(at) != 1 {
			t.Fatal(at, err)
		}
		copy(m[at[0]:], b)
		if got, err := ReadClaims(m); err != nil || len(got) > 0 {
			t.Errorf("%s: %+v %v", name, got, err)
		}
		if err := WriteClaim(m, Claim{Site: "paris"}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// escaped returns a record with this serial number and a correct digest.
func escaped(t *testing.T, serial string) []byte {
	t.Helper()
	b, err := Claim{Site: "berlin", Serial: serial}.encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// FuzzClaim checks that any sector is decoded or ignored, and that an encoded claim is decoded
// unchanged.
func FuzzClaim(f *testing.F) {
	b, err := Claim{Site: "berlin", Serial: "SN1", MACs: []string{"52:54:00:12:34:56"}}.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(fmt.Sprintf("%s%016x\n{}\n", claimHead, 0)))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, ok := decodeClaim(b)
		if !ok {
			return
		}
		again, err := c.encode()
		if err != nil {
			return // the claim does not fit
		}
		if d, ok := decodeClaim(again); !ok || fmt.Sprint(c) != fmt.Sprint(d) {
			t.Errorf("%+v became %+v", c, d)
		}
	})
}
