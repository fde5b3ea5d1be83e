package ext4_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

var sourceDate = time.Unix(1767225600, 123456789)

func options(size int64) ext4.Options {
	return ext4.Options{
		Label:    "ROOT-A",
		UUID:     [16]byte{1, 2, 3, 4, 5, 6, 0x47, 8, 0x89, 10, 11, 12, 13, 14, 15, 16},
		HashSeed: [16]byte{9, 8, 7, 6, 5, 4, 0x43, 2, 0x81, 1, 2, 3, 4, 5, 6, 7},
		Size:     size,
		Time:     sourceDate,
	}
}

// tool finds a program that a test uses as an oracle.
func tool(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
		if p, err := exec.LookPath(dir + name); err == nil {
			return p
		}
	}
	desk.Lacks(t, "there is no %s (package e2fsprogs)", name)
	return ""
}

// blobs maps names to contents, in place of a cache.
type blobs map[string]string

type blob struct{ *strings.Reader }

func (blob) Close() error { return nil }

func (b blobs) OpenBlob(name string) (tree.BlobFile, error) {
	s, ok := b[name]
	if !ok {
		return nil, fmt.Errorf("no blob %s", name)
	}
	return blob{strings.NewReader(s)}, nil
}

// write writes an image of nodes and returns its path. It computes the size if none is given.
func write(t *testing.T, nodes []tree.Node, b tree.Blobs, o ext4.Options) string {
	t.Helper()
	if o.Size == 0 {
		var err error
		if o.Size, err = ext4.Size(nodes, o); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(o.Size); err != nil {
		t.Fatal(err)
	}
	if _, err := ext4.Write(f, nodes, b, o); err != nil {
		t.Fatal(err)
	}
	return path
}

// fsck fails the test if e2fsck reports anything.
func fsck(t *testing.T, image string) {
	t.Helper()
	out, err := exec.Command(tool(t, "e2fsck"), "-fn", image).CombinedOutput()
	if err != nil {
		t.Fatalf("e2fsck: %v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, "e2fsck ") && !strings.HasPrefix(line, "Pass ") && !strings.Contains(line, " files (") {
			t.Errorf("e2fsck: %s", line)
		}
	}
}

// open reads an image that write made.
func open(t *testing.T, image string) *ext4.Reader {
	t.Helper()
	f, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	r, err := ext4.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func node(path string, mode uint32, change ...func(*tree.Inode)) tree.Node {
	in := &tree.Inode{Mode: mode, MTime: sourceDate}
	for _, c := range change {
		c(in)
	}
	return tree.Node{Path: path, Layer: "test", Inode: in}
}

func dir(path string, change ...func(*tree.Inode)) tree.Node {
	return node(path, tree.ModeDir|0o755, change...)
}

func file(path, content string, change ...func(*tree.Inode)) tree.Node {
	n := node(path, tree.ModeRegular|0o644, change...)
	n.Data = tree.Bytes([]byte(content))
	return n
}

func link(path, target string) tree.Node {
	return node(path, tree.ModeSymlink|0o777, func(in *tree.Inode) { in.Target = target })
}

func xattr(kv ...string) func(*tree.Inode) {
	return func(in *tree.Inode) {
		in.Xattrs = map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			in.Xattrs[kv[i]] = kv[i+1]
		}
	}
}

// noise returns content without zero blocks. It depends only on seed and n.
func noise(seed uint64, n int) string {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1}).Read(b)
	return string(b)
}

// posixACL is an ACL in the format of getxattr(2): owner rwx, user 1000 r-x, group r-x, mask r-x,
// others r-x.
const posixACL = "\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x05\x00\xe8\x03\x00\x00" +
	"\x04\x00\x05\x00\xff\xff\xff\xff" + "\x10\x00\x05\x00\xff\xff\xff\xff" + "\x20\x00\x05\x00\xff\xff\xff\xff"

// capability is the file capability cap_net_raw=ep, version 2.
const capability = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// nasty returns a tree with the special cases of a file system.
func nasty() ([]tree.Node, blobs) {
	const name = "0000000000000000000000000000000000000000000000000000000000000001"
	b := blobs{name: noise(0, 4<<20)}
	nodes := []tree.Node{dir(".", func(in *tree.Inode) { in.Mode = tree.ModeDir | 0o711; in.UID = 3 }), dir("n")}
	add := func(n ...tree.Node) { nodes = append(nodes, n...) }
	for _, n := range []int{1, 58, 59, 60, 61, 255, 1023, 4094, 4095} {
		add(link(fmt.Sprintf("n/sym%d", n), strings.Repeat("s", n)))
	}
	for i, n := range []int64{0, 1, 59, 60, 61, 4095, 4096, 4097, 131071, 131073, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3<<20 + 17} {
		f := file(fmt.Sprintf("n/size%d", n), "")
		f.Data = tree.Content{Blob: name, Off: int64(i) * 7, Size: n}
		add(f)
	}
	add(file("n/hole", "a"+strings.Repeat("\x00", 300000)+"b"), file("n/zeros", strings.Repeat("\x00", 100000)))
	for _, s := range []string{strings.Repeat("n", 255), strings.Repeat("é", 127), "ünïcödé-日本語-🚀", "with space",
		"back\\slash", "new\nline", ".hidden", "...", "\xff\xfe not utf-8", "-rf"} {
		add(file("n/"+s, s))
	}
	add(node("n/fifo", tree.ModeFIFO|0o600), node("n/socket", tree.ModeSocket|0o755))
	for _, d := range [][2]uint32{{0, 0}, {1, 3}, {255, 255}, {226, 1000}, {259, 70000}, {4095, 1<<20 - 1}} {
		rdev := func(in *tree.Inode) { in.Major, in.Minor = d[0], d[1] }
		add(node(fmt.Sprintf("n/chr%d-%d", d[0], d[1]), tree.ModeChar|0o666, rdev))
		add(node(fmt.Sprintf("n/blk%d-%d", d[0], d[1]), tree.ModeBlock|0o660, rdev))
	}
	for _, m := range []uint32{0o4755, 0o2755, 0o1777, 0o7777, 0, 0o6511} {
		add(node(fmt.Sprintf("n/mode%o", m), tree.ModeRegular|m), node(fmt.Sprintf("n/dmode%o", m), tree.ModeDir|m))
	}
	for _, id := range []uint32{1, 1000, 65534, 65535, 65536, 1<<31 - 1, 1<<32 - 2} {
		add(file(fmt.Sprintf("n/uid%d", id), "x", func(in *tree.Inode) { in.UID, in.GID = id, id-1 }))
	}
	for i, when := range []time.Time{time.Unix(0, 0), time.Unix(1, 999999999), time.Unix(-1, 0), time.Unix(-1<<31, 5),
		time.Unix(1<<31-1, 0), time.Unix(1<<31, 5), time.Unix(1<<32+5, 0), time.Unix(1<<34-1<<31-1, 999999999)} {
		add(file(fmt.Sprintf("n/mtime%d", i), "", func(in *tree.Inode) { in.MTime = when }))
	}
	add(file("n/xcap", "x", xattr("security.capability", capability)),
		file("n/xuser", "x", xattr("user.foo", "bar", "user.empty", "", "user.ünï", "1")),
		file("n/xbig", "x", xattr("user.big", strings.Repeat("v", 3900))),
		file("n/xempty-file", "", xattr("user.big", noise(5, 1001))),
		file("n/xmany", "x", xattr("user.a", strings.Repeat("1", 100), "user.b", strings.Repeat("2", 201), "security.capability", capability,
			"trusted.t", "z", "security.selinux", "system_u:object_r:bin_t:s0\x00")),
		file("n/xacl", "x", xattr("system.posix_acl_access", posixACL)),
		dir("n/xdefault", xattr("system.posix_acl_access", posixACL, "system.posix_acl_default", posixACL, "user.more", strings.Repeat("m", 300))),
		dir("n/xopaque", xattr("trusted.overlay.opaque", "y")))
	hard := file("n/hard1", strings.Repeat("hard", 2000), xattr("user.shared", "yes"))
	add(hard)
	for _, p := range []string{"n/hard2", "n/dmode0/hard3", "hard4"} {
		add(tree.Node{Path: p, Layer: "other", Inode: hard.Inode})
	}
	fifo := node("n/hardfifo1", tree.ModeFIFO|0o640)
	add(fifo, tree.Node{Path: "n/hardfifo2", Inode: fifo.Inode})
	p := "n/deep"
	add(dir(p))
	for i := range 80 {
		p += fmt.Sprintf("/level%d", i)
		add(dir(p))
	}
	add(file(p+"/leaf", "leaf"))
	add(dir("n/empty"), dir("n/20000"))
	for i := range 20000 {
		add(file(fmt.Sprintf("n/20000/file-with-a-name-%06d.yaml", i), fmt.Sprint(i)))
	}
	add(dir("n/dirs"))
	for i := range 300 {
		add(dir(fmt.Sprintf("n/dirs/%0*d", 1+i%200, i)))
	}
	return nodes, b
}

// flat describes each path of a tree for comparison. Contents are digests; a hard link is the first
// of its paths.
func flat(t *testing.T, nodes []tree.Node, b tree.Blobs) map[string]string {
	t.Helper()
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b tree.Node) int { return strings.Compare(a.Path, b.Path) })
	first := map[*tree.Inode]string{}
	out := map[string]string{}
	for _, n := range nodes {
		if n.Path == "lost+found" {
			continue
		}
		if p := first[n.Inode]; p != "" {
			out[n.Path] = "same as " + p
			continue
		}
		first[n.Inode] = n.Path
		var attrs []string
		for _, k := range slices.Sorted(maps.Keys(n.Xattrs)) {
			attrs = append(attrs, fmt.Sprintf("%s=%x", k, n.Xattrs[k]))
		}
		out[n.Path] = fmt.Sprintf("%o %d:%d dev %d:%d %d.%09d %q -> %q %s", n.Mode, n.UID, n.GID, n.Major, n.Minor,
			n.MTime.Unix(), n.MTime.Nanosecond(), attrs, n.Target, contentSum(t, n, b))
	}
	return out
}

func contentSum(t *testing.T, n tree.Node, b tree.Blobs) string {
	t.Helper()
	if !n.IsRegular() {
		return ""
	}
	var r io.ReaderAt = bytes.NewReader(n.Data.Inline)
	if n.Data.Blob != "" {
		f, err := b.OpenBlob(n.Data.Blob)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		r = f
	}
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli)) // fast enough for 5 GiB
	size, err := io.CopyBuffer(h, io.NewSectionReader(r, n.Data.Off, n.Data.Size), make([]byte, min(n.Data.Size, 1<<20)+1))
	if err != nil {
		t.Fatalf("reading %s: %v", n.Path, err)
	}
	return fmt.Sprintf("%d %x", size, h.Sum32())
}

// compare reports the differences of two flat trees.
func compare(t *testing.T, want, got map[string]string) {
	t.Helper()
	shown := 0
	for _, p := range slices.Sorted(maps.Keys(want)) {
		if got[p] != want[p] && shown < 20 {
			shown++
			t.Errorf("%q:\nwant %s\ngot  %s", p, want[p], got[p])
		}
	}
	for p := range got {
		if want[p] == "" {
			t.Errorf("%q was not in the tree", p)
		}
	}
}

func TestTreeInEqualsTreeOut(t *testing.T) {
	nodes, b := nasty()
	image := write(t, nodes, b, options(0))
	r := open(t, image)
	got, err := r.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	compare(t, flat(t, nodes, b), flat(t, got, r))
	fsck(t, image)

	// Write the nodes that were read: the result has the same bytes.
	o := options(r.Info().Size)
	if again := write(t, got, r, o); disktest.Sum(t, again) != disktest.Sum(t, image) {
		t.Error("an image written from what was read of an image differs from it")
	}
}

func TestEmptyTree(t *testing.T) {
	image := write(t, nil, nil, options(0))
	fsck(t, image)
	names, err := open(t, image).ReadDir(".")
	if err != nil || !slices.Equal(names, []string{"lost+found"}) {
		t.Errorf("names in the root: %q, %v", names, err)
	}
}

func TestLostAndFoundOfTheTree(t *testing.T) {
	image := write(t, []tree.Node{dir("lost+found", func(in *tree.Inode) { in.UID = 7 }), file("lost+found/#12", "found")}, nil, options(0))
	fsck(t, image)
	n, err := open(t, image).Stat("lost+found")
	if err != nil || n.UID != 7 {
		t.Errorf("lost+found: %v, %v", n.Inode, err)
	}
}

func TestDirectories(t *testing.T) {
	for _, c := range []struct{ names, length int }{{1, 1}, {149, 19}, {150, 19}, {300, 8}, {9000, 255}} {
		t.Run(fmt.Sprintf("%dx%d", c.names, c.length), func(t *testing.T) {
			nodes := []tree.Node{dir("d")}
			for i := range c.names {
				name := fmt.Sprintf("%0*d", min(5, c.length), i)
				nodes = append(nodes, file("d/"+name+strings.Repeat("\xfc", c.length-len(name)), ""))
			}
			image := write(t, nodes, nil, options(0))
			fsck(t, image)
			r := open(t, image)
			got, err := r.Nodes()
			if err != nil {
				t.Fatal(err)
			}
			got = slices.DeleteFunc(got, func(n tree.Node) bool { return n.Path == "." })
			compare(t, flat(t, nodes, nil), flat(t, got, r))
		})
	}
}

// TestEqualHashesAcrossBlocks uses a directory of 100,000 names with this seed: two names of equal
// hash are on either side of a block boundary, which the index must mark. TestCollision checks that
// they are.
func TestEqualHashesAcrossBlocks(t *testing.T) {
	o := options(0)
	o.HashSeed = [16]byte{27, 1, 1, 1, 1, 1, 65, 1, 129, 1, 1, 1, 1, 1, 1, 1} // found by trying
	one := file("d/00000", "")
	nodes := []tree.Node{dir("d"), one}
	for i := 1; i < 100000; i++ {
		if i%50000 == 0 {
			one = file(fmt.Sprintf("d/%05d", i), "")
			nodes = append(nodes, one)
			continue
		}
		nodes = append(nodes, tree.Node{Path: fmt.Sprintf("d/%05d", i), Inode: one.Inode})
	}
	fsck(t, write(t, nodes, nil, o))
}

// zeros is a blob of any size that has a non-zero byte at the end of each MiB.
type zeros struct{ size int64 }

func (z zeros) OpenBlob(string) (tree.BlobFile, error) { return z, nil }
func (zeros) Close() error                             { return nil }
func (z zeros) ReadAt(b []byte, off int64) (int, error) {
	if off+int64(len(b)) > z.size {
		return 0, io.EOF
	}
	clear(b)
	const mib = 1 << 20
	for at := off/mib*mib + mib - 1; at < off+int64(len(b)); at += mib {
		b[at-off] = byte(at>>20) | 1
	}
	return len(b), nil
}

func TestFileOfMoreThan4GiB(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	const size = 5<<30 + 12345
	big := node("big", tree.ModeRegular|0o644)
	big.Data = tree.Content{Blob: "z", Size: size}
	nodes := []tree.Node{file("a", "before"), big, file("c", "behind")}
	image := write(t, nodes, zeros{size}, options(0))
	fsck(t, image)
	r := open(t, image)
	got, err := r.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	got = slices.DeleteFunc(got, func(n tree.Node) bool { return n.Path == "." })
	compare(t, flat(t, nodes, zeros{size}), flat(t, got, r))
}

func TestReproducible(t *testing.T) {
	nodes, b := nasty()
	want := disktest.Sum(t, write(t, nodes, b, options(0)))
	for i, procs := range []int{1, 2, 8} {
		old := runtime.GOMAXPROCS(procs)
		rand.New(rand.NewPCG(1, uint64(i))).Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		got := disktest.Sum(t, write(t, nodes, b, options(0)))
		runtime.GOMAXPROCS(old)
		if got != want {
			t.Errorf("GOMAXPROCS %d and nodes in another order: other bytes", procs)
		}
	}
}

// TestSizes uses sizes around the limits of groups, of flex groups and of superblock copies.
func TestSizes(t *testing.T) {
	nodes := []tree.Node{file("a", noise(1, 10000)), dir("d"), file("d/b", noise(2, 1<<20))}
	const mib, group = 1 << 20, 128 << 20
	for _, size := range []int64{12 * mib, group - mib, group, group + 4096, group + mib, group + 30*mib, 2*group + mib, 3*group + 2*mib,
		16 * group, 16*group + mib, 16*group + 3*mib, 17*group + 70*mib, 40*group + 5*mib + 4096, 1 << 40} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			if testing.Short() && size > 1<<34 {
				t.Skip("takes some seconds")
			}
			image := write(t, nodes, nil, options(size))
			fsck(t, image)
			info := open(t, image).Info()
			if info.Size > size || info.Size < size-2*mib {
				t.Errorf("the file system covers %d of %d bytes", info.Size, size)
			}
		})
	}
}

func TestSizeIsTheLeast(t *testing.T) {
	nasty, b := nasty()
	var empty []tree.Node
	for i := range 70000 {
		empty = append(empty, file(fmt.Sprint(i), ""))
	}
	for name, nodes := range map[string][]tree.Node{
		"nasty": nasty, "empty": nil, "inodes only": empty,
		"large": {file("x", ""), node("y", tree.ModeRegular, func(in *tree.Inode) { in.Data = tree.Content{Blob: "z", Size: 3 << 30} })},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(0)
			size, err := ext4.Size(nodes, o)
			if err != nil {
				t.Fatal(err)
			}
			o.Size = size - 1<<20
			_, err = ext4.Write(refuse{t}, nodes, b, o)
			if err == nil || !strings.Contains(err.Error(), "too small") {
				t.Errorf("a MiB less than Size was not refused: %v", err)
			}
			o.Size = size
			o.FreeBytes, o.FreeInodes = 100<<20, 5000
			with, err := ext4.Size(nodes, o)
			if err != nil || with > size+130<<20 {
				t.Errorf("with 100 MiB of headroom: %d, without: %d; %v", with, size, err)
			}
		})
	}
}

func TestHeadroom(t *testing.T) {
	nodes := []tree.Node{file("a", noise(1, 10000))}
	o := options(0)
	o.FreeBytes, o.FreeInodes = 50<<20, 10000
	image := write(t, nodes, nil, o)
	fsck(t, image)
	info := open(t, image).Info()
	if info.FreeBytes < o.FreeBytes || info.FreeBytes > o.FreeBytes+1<<20 || info.FreeInodes < o.FreeInodes {
		t.Errorf("free: %d bytes, %d inodes", info.FreeBytes, info.FreeInodes)
	}
}

// refuse is a writer that fails the test on each write.
type refuse struct{ t *testing.T }

func (r refuse) WriteAt(b []byte, off int64) (int, error) {
	r.t.Errorf("%d bytes were written at %d", len(b), off)
	return 0, errors.New("refused")
}

// TestRefused checks that all nodes that cannot be stored are reported at once, with their paths,
// before the first byte is written.
func TestRefused(t *testing.T) {
	shared := &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: sourceDate}
	many := file("link0", "")
	tooMany := []tree.Node{many}
	for i := range 65000 {
		tooMany = append(tooMany, tree.Node{Path: fmt.Sprintf("link%d", i+1), Inode: many.Inode})
	}
	content := func(c tree.Content) []tree.Node {
		f := file("f", "")
		f.Data = c
		return []tree.Node{f}
	}
	for _, c := range []struct {
		name  string
		nodes []tree.Node
		want  []string
	}{
		{"long name", []tree.Node{file(strings.Repeat("x", 256), "")}, []string{"xxxx", "256 bytes", "255"}},
		{"long path", []tree.Node{file(strings.Repeat("x/", 9000)+"x", "")}, []string{"x/x/x", "18001"}},
		{"absolute", []tree.Node{file("/etc", "")}, []string{`"/etc"`, "relative"}},
		{"dotdot", []tree.Node{file("../x", ""), file("a/../../b", ""), file("..", "")}, []string{`"../x"`, `"a/../../b"`, `".."`}},
		{"not clean", []tree.Node{file("a//b", ""), file("", ""), file("./c", ""), file("d/", "")}, []string{`"a//b"`, `""`, `"./c"`, `"d/"`}},
		{"zero in the path", []tree.Node{file("a\x00b", "")}, []string{"zero byte"}},
		{"twice", []tree.Node{file("a", "1"), {Path: "a", Layer: "later", Inode: file("a", "").Inode}}, []string{`"a"`, "from later", "from test"}},
		{"directory twice", []tree.Node{dir("a"), dir("a")}, []string{`"a"`, "already"}},
		{"root twice", []tree.Node{dir("."), dir(".")}, []string{`"."`, "already"}},
		{"directory and file", []tree.Node{dir("a"), file("a", "")}, []string{`"a"`, "already"}},
		{"no parent", []tree.Node{file("a/b", "")}, []string{`"a/b"`, `"a"`}},
		{"parent is a file", []tree.Node{file("a", ""), file("a/b", "")}, []string{`"a/b"`, "not a directory"}},
		{"root is a file", []tree.Node{file(".", "")}, []string{`"."`, "directory"}},
		{"no inode", []tree.Node{{Path: "a"}}, []string{`"a"`, "inode"}},
		{"directory with two names", []tree.Node{{Path: "a", Inode: shared}, {Path: "b", Inode: shared}}, []string{`"b"`, `"a"`, "directory"}},
		{"too many links", tooMany, []string{"link0", "65001", "65000"}},
		{"unknown type", []tree.Node{node("a", 0o644)}, []string{`"a"`, "type"}},
		{"mode", []tree.Node{node("a", 1<<20|tree.ModeRegular)}, []string{`"a"`, "mode"}},
		{"symlink", []tree.Node{link("a", ""), link("b", strings.Repeat("x", 4096)), link("c", "x\x00y")}, []string{`"a"`, `"b"`, `"c"`}},
		{"device", []tree.Node{node("a", tree.ModeChar, func(in *tree.Inode) { in.Major = 4096 }), node("b", tree.ModeBlock, func(in *tree.Inode) { in.Minor = 1 << 20 })},
			[]string{`"a"`, "4096:0", `"b"`, "0:1048576"}},
		{"time", []tree.Node{file("a", "", func(in *tree.Inode) { in.MTime = time.Time{} }), file("b", "", func(in *tree.Inode) { in.MTime = time.Unix(1<<34, 0) })},
			[]string{`"a"`, "0001-", `"b"`, "2514-"}},
		{"negative size", content(tree.Content{Blob: "b", Size: -1}), []string{`"f"`, "-1"}},
		{"negative offset", content(tree.Content{Blob: "b", Off: -5, Size: 1}), []string{`"f"`, "-5"}},
		{"overflow", content(tree.Content{Blob: "b", Off: 1<<63 - 1, Size: 1}), []string{`"f"`}},
		{"huge", content(tree.Content{Blob: "b", Size: 1 << 45}), []string{`"f"`, "16 TiB"}},
		{"no content", content(tree.Content{Size: 10}), []string{`"f"`, "inline content"}},
		{"xattr prefix", []tree.Node{file("a", "", xattr("com.apple.x", "1")), file("b", "", xattr("user.", "1")), file("c", "", xattr("system.data", "1"))},
			[]string{`"a"`, "com.apple.x", `"b"`, `"c"`}},
		{"xattr size", []tree.Node{file("a", "", xattr("user.a", noise(1, 5000)))}, []string{`"a"`, "4096"}},
		{"xattr name", []tree.Node{file("a", "", xattr("user."+strings.Repeat("n", 256), ""))}, []string{`"a"`}},
		{"acl", []tree.Node{file("a", "", xattr("system.posix_acl_access", "\x02\x00\x00\x00abc"))}, []string{`"a"`, "ACL"}},
		{"acl tag", []tree.Node{file("a", "", xattr("system.posix_acl_access", "\x02\x00\x00\x00\x03\x00\x07\x00\xff\xff\xff\xff"))}, []string{`"a"`, "tag 0x3"}},
		{"too small", []tree.Node{file("a", noise(1, 200<<20))}, []string{"ROOT-A", "too small", "MiB more", "raise"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ext4.Write(refuse{t}, c.nodes, blobs{}, options(64<<20))
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("the error lacks %q: %v", w, err)
				}
			}
		})
	}
}

func TestTooLargeForAnySize(t *testing.T) {
	var nodes []tree.Node
	for i := range 20 {
		nodes = append(nodes, node(fmt.Sprint(i), tree.ModeRegular, func(in *tree.Inode) { in.Data = tree.Content{Blob: "b", Size: 1 << 43} }))
	}
	if _, err := ext4.Size(nodes, options(0)); err == nil || !strings.Contains(err.Error(), "16 TiB") {
		t.Errorf("error: %v", err)
	}
}

func TestManyProblemsAreCounted(t *testing.T) {
	var nodes []tree.Node
	for i := range 100 {
		nodes = append(nodes, file(fmt.Sprintf("/%d", i), ""))
	}
	_, err := ext4.Size(nodes, options(0))
	if err == nil || !strings.Contains(err.Error(), `"/19"`) || !strings.Contains(err.Error(), "and 80 more") {
		t.Errorf("error: %v", err)
	}
}

func TestRefusedOptions(t *testing.T) {
	for want, change := range map[string]func(*ext4.Options){
		"UUID":     func(o *ext4.Options) { o.UUID = [16]byte{} },
		"HashSeed": func(o *ext4.Options) { o.HashSeed = [16]byte{} },
		"16 bytes": func(o *ext4.Options) { o.Label = "12345678901234567" },
		"time":     func(o *ext4.Options) { o.Time = time.Time{} },
		"negative": func(o *ext4.Options) { o.FreeBytes = -1 },
		"journal":  func(o *ext4.Options) { o.JournalSize = 4096 },
		"16 TiB":   func(o *ext4.Options) { o.Size = 1 << 44 },
		"headroom": func(o *ext4.Options) { o.FreeBytes = 1 << 62 },
		"small":    func(o *ext4.Options) { o.Size = 0 },
	} {
		o := options(64 << 20)
		change(&o)
		if _, err := ext4.Write(refuse{t}, nil, nil, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v", want, err)
		}
	}
}

// broken is a writer that fails after a number of writes.
type broken struct{ left int }

func (b *broken) WriteAt(p []byte, off int64) (int, error) {
	if b.left--; b.left < 0 {
		return 0, errors.New("disk full")
	}
	return len(p), nil
}

func TestFailingWriterAndBlobs(t *testing.T) {
	nodes, b := nasty()
	size, err := ext4.Size(nodes, options(0))
	if err != nil {
		t.Fatal(err)
	}
	for _, after := range []int{0, 1, 5, 20} {
		if _, err := ext4.Write(&broken{after}, nodes, b, options(size)); err == nil || !strings.Contains(err.Error(), "disk full") {
			t.Errorf("failing after %d writes: error %v", after, err)
		}
	}
	for name := range b {
		cut := blobs{name: b[name][:1000]}
		if _, err := ext4.Write(&broken{1 << 30}, nodes, cut, options(size)); err == nil ||
			!strings.Contains(err.Error(), "n/size") || !strings.Contains(err.Error(), "ends at 1000") {
			t.Errorf("a truncated blob: error %v", err)
		}
	}
	for _, none := range []tree.Blobs{nil, blobs{}} {
		if _, err := ext4.Write(&broken{1 << 30}, nodes, none, options(size)); err == nil || !strings.Contains(err.Error(), "n/size") {
			t.Errorf("a blob missing: error %v", err)
		}
	}
}

// TestInterruptedWriteIsNoFileSystem checks that an incomplete image does not look like a file
// system.
func TestInterruptedWriteIsNoFileSystem(t *testing.T) {
	nodes, b := nasty()
	size, err := ext4.Size(nodes, options(0))
	if err != nil {
		t.Fatal(err)
	}
	count := &counter{}
	if _, err := ext4.Write(count, nodes, b, options(size)); err != nil {
		t.Fatal(err)
	}
	if count.last > 4096 {
		t.Errorf("the last write was at %d, not the superblock's", count.last)
	}
}

type counter struct{ last int64 }

func (c *counter) WriteAt(b []byte, off int64) (int, error) {
	c.last = off
	return len(b), nil
}

// TestSparse checks that an image occupies only the space of its contents: holes and zeros in files
// are not written.
func TestSparse(t *testing.T) {
	nodes := []tree.Node{file("zeros", strings.Repeat("\x00", 50<<20)), file("data", noise(1, 1<<20))}
	o := options(8 << 30)
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	stats, err := ext4.Write(f, nodes, nil, o)
	if err != nil {
		t.Fatal(err)
	}
	if stats.Written > 6<<20 {
		t.Errorf("%d bytes were written for 1 MiB of data", stats.Written)
	}
}

func TestFeatures(t *testing.T) {
	image := write(t, nil, nil, options(1<<30))
	out, err := exec.Command(tool(t, "dumpe2fs"), "-h", image).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Filesystem volume name:   ROOT-A\n", "Filesystem UUID:          01020304-0506-4708-890a-0b0c0d0e0f10\n",
		"has_journal", "ext_attr", "resize_inode", "dir_index", "extent", "64bit", "flex_bg", "metadata_csum_seed", "metadata_csum\n",
		"Filesystem state:         clean\n", "Reserved GDT blocks:      127\n", "Total journal size:       32M\n",
		"Default directory hash:   half_md4\n", "unsigned_directory_hash",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("dumpe2fs does not show %q:\n%s", want, out)
		}
	}
}

// TestSuperblockTimes checks dates of up to 34 bits with the reader, and those of up to 32 bits
// also with dumpe2fs. A date before 1970 is stored as 1970.
func TestSuperblockTimes(t *testing.T) {
	for _, want := range []string{"1970-01-01", "2026-01-02", "2038-01-19", "2040-01-01", "2106-02-07", "2107-01-01", "2400-01-01"} {
		o := options(0)
		var err error
		if o.Time, err = time.Parse(time.DateTime, want+" 12:00:00"); err != nil {
			t.Fatal(err)
		}
		image := write(t, nil, nil, o)
		f, err := os.Open(image)
		if err != nil {
			t.Fatal(err)
		}
		r, err := ext4.Open(f)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Info().Created; !got.Equal(o.Time) {
			t.Errorf("%s is read as %s", want, got.UTC())
		}
		f.Close()
		if o.Time.Unix() >= 1<<32 {
			continue // dumpe2fs 1.47.0 ignores the upper byte
		}
		cmd := exec.Command(tool(t, "dumpe2fs"), "-h", image)
		cmd.Env = append(os.Environ(), "TZ=UTC", "LC_ALL=C")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, field := range []string{"Filesystem created:", "Last write time:", "Last checked:"} {
			if line := field + " *" + o.Time.Format("Mon Jan _2 15:04:05 2006"); !regexp.MustCompile(line).Match(out) {
				t.Errorf("dumpe2fs does not show %q:\n%s", line, out)
			}
		}
	}
	o := options(0)
	o.Time = time.Date(1960, 1, 1, 0, 0, 0, 0, time.UTC)
	f, err := os.Open(write(t, nil, nil, o))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if r, err := ext4.Open(f); err != nil || r.Info().Created.Unix() != 0 {
		t.Errorf("1960: %v", err)
	}
}

// TestGrow grows an unmounted file system, so that e2fsprogs checks the reserved descriptors. A
// test in a VM grows a mounted one.
func TestGrow(t *testing.T) {
	nodes, b := nasty()
	image := write(t, nodes, b, options(0))
	if out, err := exec.Command(tool(t, "resize2fs"), "-f", image, "30G").CombinedOutput(); err != nil {
		t.Fatalf("resize2fs: %v\n%s", err, out)
	}
	fsck(t, image)
	r := open(t, image)
	got, err := r.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	compare(t, flat(t, nodes, b), flat(t, got, r))
}
