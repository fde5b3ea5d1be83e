package ext4

import (
	"bytes"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

// TestNameHashAgainstDebugfs compares the hashes of names of all lengths with debugfs.
func TestNameHashAgainstDebugfs(t *testing.T) {
	path, err := exec.LookPath("debugfs")
	if err != nil {
		if path, err = exec.LookPath("/usr/sbin/debugfs"); err != nil {
			desk.Lacks(t, "there is no debugfs (package e2fsprogs)")
		}
	}
	seed := [16]byte{1, 2, 3, 4, 5, 6, 0x47, 8, 0x89, 10, 11, 12, 13, 14, 15, 16}
	var names []string
	for n := 1; n <= 255; n += 7 {
		names = append(names, strings.Repeat("aBc9-._~", 32)[:n])
	}
	names = append(names, "über", "日本語日本語日本語日本語")
	var script bytes.Buffer
	for _, n := range names {
		// 4 is half MD4 of unsigned bytes, which debugfs cannot select by name.
		fmt.Fprintf(&script, "dx_hash -h 4 -s 01020304-0506-4708-890a-0b0c0d0e0f10 %s\n", n)
	}
	cmd := exec.Command(path, "-f", "-")
	cmd.Stdin = &script
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, n := range names {
		if want := fmt.Sprintf("Hash of %s is %#x ", n, nameHash(seed, n)); !strings.Contains(string(out), want) {
			t.Errorf("debugfs does not print %q", want)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}

// memory is a block device in memory.
type memory map[int64][]byte

func (m memory) ReadAt(b []byte, off int64) (int, error) {
	return copy(b, m[off/blockSize][off%blockSize:]), nil
}

// TestExtentTreeDepths checks that trees of every depth are read as written.
func TestExtentTreeDepths(t *testing.T) {
	for _, n := range []int{0, 1, 4, 5, 340, 341, 1360, 1361, 5000, 4*nodeExtents*nodeExtents + 1} {
		var extents []extent
		for i := range n {
			extents = append(extents, extent{int64(3 * i), int64(10 + 5*i), 2})
		}
		var at []int64
		for i := range treeBlocks(int64(n)) {
			at = append(at, 1<<33+i)
		}
		in := &rawInode{number: 12, seed: 42}
		root, nodes := extentTree(in.seed, extents, at)
		if len(nodes) != len(at) {
			t.Errorf("%d extents: %d tree blocks, want %d", n, len(nodes), len(at))
			continue
		}
		m := memory{}
		for i, b := range nodes {
			m[at[i]] = b
		}
		copy(in.b[0x28:], root[:])
		le.PutUint32(in.b[0x20:], flagExtents)
		r := &Reader{r: m, blocks: 1 << 34}
		got, err := r.extents(in)
		if err != nil || !slices.Equal(got, extents) {
			t.Errorf("%d extents: read %d, %v", n, len(got), err)
		}
	}
}

func TestStreamExtents(t *testing.T) {
	s := newStream([]blockRange{{10, 5}, {100, 40000}, {90000, 7}})
	for _, c := range []struct {
		at, n int64
		want  []extent
	}{
		{0, 0, nil},
		{0, 5, []extent{{0, 10, 5}}},
		{4, 3, []extent{{0, 14, 1}, {1, 100, 2}}},
		{5, 40000, []extent{{0, 100, 32768}, {32768, 32868, 7232}}},
		{40004, 3, []extent{{0, 40099, 1}, {1, 90000, 2}}},
	} {
		if got := s.extents(nil, c.at, c.n); !slices.Equal(got, c.want) {
			t.Errorf("%d blocks from %d: %v, want %v", c.n, c.at, got, c.want)
		}
	}
	s.used = 6
	if got, want := s.freeIn(nil, 0, 95000), []blockRange{{101, 39999}, {90000, 7}}; !slices.Equal(got, want) {
		t.Errorf("free: %v, want %v", got, want)
	}
}

func TestTake(t *testing.T) {
	g := &geometry{free: []blockRange{{10, 5}, {20, 30}}}
	for _, c := range []struct{ n, from, want int64 }{{5, 0, 10}, {3, 30, 30}, {11, 0, 33}, {10, 0, 20}} {
		if at, ok := g.allocate(c.n, c.from); !ok || at != c.want {
			t.Errorf("%d blocks from %d: at %d, %v; want %d", c.n, c.from, at, ok, c.want)
		}
	}
	if _, ok := g.allocate(7, 0); ok {
		t.Errorf("7 blocks were found in %v", g.free)
	}
	if want := []blockRange{{44, 6}}; !slices.Equal(g.free, want) {
		t.Errorf("free: %v, want %v", g.free, want)
	}
}

func TestClearBits(t *testing.T) {
	for at := range int64(20) {
		for n := range int64(40) {
			b := bytes.Repeat([]byte{0xff}, 8)
			clearBits(b, at, n)
			for i := range int64(64) {
				if set := b[i/8]>>(i%8)&1 == 1; set != (i < at || i >= at+n) {
					t.Fatalf("clearing %d from %d: bit %d is %v", n, at, i, set)
				}
			}
		}
	}
}

func TestTimestampRange(t *testing.T) {
	for _, s := range []int64{-1 << 31, 1<<34 - 1<<31 - 1} {
		if _, _, err := timestamp(time.Unix(s, 0)); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []int64{-1<<31 - 1, 1<<34 - 1<<31} {
		if _, _, err := timestamp(time.Unix(s, 0)); err == nil {
			t.Errorf("%d was accepted", s)
		}
	}
}

func TestCollision(t *testing.T) {
	seed := [16]byte{27, 1, 1, 1, 1, 1, 65, 1, 129, 1, 1, 1, 1, 1, 1, 1}
	d := &directory{}
	for i := range 100000 {
		d.entries = append(d.entries, entry{name: fmt.Sprintf("%05d", i)})
	}
	if err := d.measure(seed); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(d.leaves(seed), func(l leafBlock) bool { return l.hash&1 == 1 }) {
		t.Error("no hash goes on in a second block; find another seed")
	}
}
