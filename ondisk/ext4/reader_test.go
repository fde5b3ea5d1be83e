package ext4_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
)

func TestPaths(t *testing.T) {
	image := write(t, []tree.Node{
		dir("usr"), dir("usr/lib"), dir("etc"),
		file("usr/lib/os-release", "ID=debian\n"),
		link("etc/os-release", "../usr/lib/os-release"), link("lib", "/usr/lib"), link("up", "../../../../etc"),
		link("loop1", "loop2"), link("loop2", "loop1"), link("dead", "nothing"),
	}, nil, options(0))
	r := open(t, image)
	for _, p := range []string{"usr/lib/os-release", "/etc/os-release", "lib/os-release", "up/os-release", "etc/../lib/./os-release", "../../lib//os-release"} {
		if b, err := r.ReadFile(p); err != nil || string(b) != "ID=debian\n" {
			t.Errorf("%s: %q, %v", p, b, err)
		}
	}
	for p, want := range map[string]string{"loop1": "too many", "dead": "not exist", "etc": "not a regular file", "etc/os-release/x": "not a directory", "none": "not exist"} {
		if _, err := r.ReadFile(p); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), p) {
			t.Errorf("%s: error %v, want %q", p, err, want)
		}
	}
	if _, err := r.ReadFile("none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if n, err := r.Stat("lib/os-release"); err != nil || n.Path != "usr/lib/os-release" || !n.IsRegular() {
		t.Errorf("Stat through a link: %+v, %v", n, err)
	}
	if n, err := r.Stat("etc/os-release"); err != nil || n.Path != "etc/os-release" || n.Target != "../usr/lib/os-release" {
		t.Errorf("Stat of a link: %+v, %v", n, err)
	}
	if names, err := r.ReadDir("/"); err != nil || !slices.Equal(names, []string{"dead", "etc", "lib", "loop1", "loop2", "lost+found", "up", "usr"}) {
		t.Errorf("names in the root: %q, %v", names, err)
	}
	stop := errors.New("stop")
	if err := r.Walk(func(n tree.Node) error {
		if n.Path == "etc" {
			return stop
		}
		return nil
	}); err != stop {
		t.Errorf("Walk: %v", err)
	}
}

func TestWalkBelow(t *testing.T) {
	image := write(t, []tree.Node{dir("a"), dir("a/b"), file("a/b/f", "1"), file("a/c", "2"), file("ab", "3"), link("l", "a/b")}, nil, options(0))
	r := open(t, image)
	for from, want := range map[string]string{
		"a":     "a a/b a/b/f a/c",
		"a/b/f": "a/b/f",
		"l":     "l",
		"l/f":   "a/b/f", // links in the path are followed
		".":     ". a a/b a/b/f a/c ab l lost+found",
	} {
		var got []string
		if err := r.WalkBelow(from, func(n tree.Node) error { got = append(got, n.Path); return nil }); err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %q, %v", from, got, err)
		}
	}
	if err := r.WalkBelow("none", func(tree.Node) error { return nil }); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing path: %v", err)
	}
}

// TestRanges checks that the file's ranges on the device have the same bytes as the file.
func TestRanges(t *testing.T) {
	content := noise(3, 9000) + strings.Repeat("\x00", 20000) + noise(4, 5000)
	image := write(t, []tree.Node{file("f", content)}, nil, options(0))
	f, err := open(t, image).OpenFile("f")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	var got []byte
	for _, x := range f.Ranges() {
		got = append(got, raw[x.Off:x.Off+x.Len]...)
	}
	if want := strings.ReplaceAll(content, "\x00", ""); strings.ReplaceAll(string(got), "\x00", "") != want {
		t.Errorf("%d bytes in %v", len(got), f.Ranges())
	}
}

func TestInfo(t *testing.T) {
	o := options(100 << 20)
	i := open(t, write(t, nil, nil, o)).Info()
	if i.Label != o.Label || i.UUID != o.UUID || i.Size != o.Size || i.Created.Unix() != o.Time.Unix() || i.NeedsRecovery || i.Errors {
		t.Errorf("%+v", i)
	}
}

func TestReadAt(t *testing.T) {
	content := noise(3, 9000) + strings.Repeat("\x00", 20000) + noise(4, 5000)
	f, err := open(t, write(t, []tree.Node{file("f", content)}, nil, options(0))).OpenFile("f")
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{0, 1, 4095, 4096, 8999, 20000, 33999, 34000, 40000} {
		for _, n := range []int{0, 1, 4096, 10000, 50000} {
			b := bytes.Repeat([]byte{1}, n)
			got, err := f.ReadAt(b, at)
			want := content[min(int(at), len(content)):min(int(at)+n, len(content))]
			if string(b[:got]) != want || got < n && err != io.EOF || got == n && err != nil && err != io.EOF {
				t.Errorf("%d bytes at %d: %d, %v", n, at, got, err)
			}
		}
	}
	if _, err := f.ReadAt(make([]byte, 1), -1); err == nil {
		t.Error("a negative offset was accepted")
	}
}

func TestNotOurs(t *testing.T) {
	good, err := os.ReadFile(write(t, nil, nil, options(0)))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		image []byte
		want  string
	}{
		"empty":     {nil, "superblock"},
		"zeros":     {make([]byte, 1<<20), "no ext4 superblock"},
		"truncated": {good[:len(good)-1<<20], "truncated"},
		"feature":   {change(good, 1024+0x61, 0x80), "features"},
		"flipped":   {change(good, 1024+0x4, 1), "checksum"},
		"groups":    {change(good, 4096+5, 1), "checksum"},
	} {
		if _, err := ext4.Open(bytes.NewReader(c.image)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
}

// change returns a copy with flipped bits of one byte.
func change(image []byte, at int, bits byte) []byte {
	image = bytes.Clone(image)
	image[at] ^= bits
	return image
}

// TestDamageIsNoticed checks that after any bit flip in the tree's metadata, reading gives an error
// or the original tree.
func TestDamageIsNoticed(t *testing.T) {
	nodes := []tree.Node{file("a", "content"), file("x", "", xattr("user.big", strings.Repeat("v", 2000))), dir("d"), link("l", strings.Repeat("t", 500))}
	for i := range 300 {
		nodes = append(nodes, file("d/"+strings.Repeat("n", i%200+1)+string(rune('a'+i/200)), ""))
	}
	image, err := os.ReadFile(write(t, nodes, nil, options(0)))
	if err != nil {
		t.Fatal(err)
	}
	want := flat(t, nodes, nil)
	noticed := 0
	for block := 0; block < len(image)/4096; block++ {
		if bytes.Count(image[block*4096:][:4096], []byte{0}) == 4096 {
			continue
		}
		for at := block * 4096; at < (block+1)*4096; at += 997 {
			image[at] ^= 0x10
			have, err := readFlat(t, image)
			image[at] ^= 0x10
			if err != nil {
				noticed++
				continue
			}
			for p := range want {
				// ext4 has no checksums for contents and link targets.
				if have[p] != want[p] && p != "a" && p != "l" {
					t.Fatalf("a flipped bit at %d was not detected: %q became %q", at, want[p], have[p])
				}
			}
		}
	}
	if noticed < 50 {
		t.Errorf("only %d flipped bits were detected; does the test still hit used blocks?", noticed)
	}
}

func readFlat(t *testing.T, image []byte) (map[string]string, error) {
	r, err := ext4.Open(bytes.NewReader(image))
	if err != nil {
		return nil, err
	}
	nodes, err := r.Nodes()
	if err != nil {
		return nil, err
	}
	return flat(t, nodes, r), nil
}
