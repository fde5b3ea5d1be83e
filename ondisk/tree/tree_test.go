package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

var day = time.Unix(1767225600, 0).UTC()

func dir(p string) Node { return Node{Path: p, Inode: &Inode{Mode: ModeDir | 0o755, MTime: day}} }

func file(p, s string) Node {
	return Node{Path: p, Inode: &Inode{Mode: ModeRegular | 0o644, MTime: day, Data: Bytes([]byte(s))}}
}

func link(p, to string) Node {
	return Node{Path: p, Inode: &Inode{Mode: ModeSymlink | 0o777, MTime: day, Target: to}}
}

// show prints a tree, one node per line.
func show(nodes []Node) string {
	var b strings.Builder
	for _, n := range nodes {
		fmt.Fprintf(&b, "%s %o %s", n.Path, n.Mode, n.Layer)
		switch {
		case n.IsSymlink():
			fmt.Fprintf(&b, " -> %s", n.Target)
		case n.IsRegular():
			fmt.Fprintf(&b, " %q", n.Data.Inline)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func TestMerge(t *testing.T) {
	base := Layer{Name: "base", Nodes: []Node{
		dir("usr"), dir("usr/lib"), link("lib", "usr/lib"), link("abs", "/usr/lib"),
		file("usr/lib/old", "old"), dir("tmp"), dir("etc"), file("etc/motd", "base"),
		dir("etc/gone"), file("etc/gone/x", "x"), file("etc/gone.not", ""),
		link("a", "b"), link("b", "a"), link("up", "../../usr"), link("chain", "lib/../lib"),
	}}
	base.Nodes[5].Inode.Mode = ModeDir | ModeSticky | 0o777
	tests := []struct {
		name  string
		layer Layer
		want  []string // lines that must be in the result
		gone  []string // paths that must not be in the result
		err   []string // parts of the error, each from one line
	}{
		{name: "through a linked directory",
			layer: Layer{Name: "o", Nodes: []Node{dir("lib"), file("lib/x", "1"), file("abs/y", "2"), file("up/z", "3"), file("chain/w", "4")}},
			want:  []string{`usr/lib/x 100644 o "1"`, `usr/lib/y 100644 o "2"`, `usr/z 100644 o "3"`, `usr/lib/w 100644 o "4"`, "lib 120777 base -> usr/lib"}},
		{name: "missing parents",
			layer: Layer{Name: "o", Nodes: []Node{file("x/y/z", "")}},
			want:  []string{"x 40755 o", "x/y 40755 o"}},
		{name: "directories keep the first layer's attributes",
			layer: Layer{Name: "o", Replace: true, Nodes: []Node{dir("tmp"), file("tmp/x", "")}},
			want:  []string{"tmp 41777 base"}},
		{name: "replace",
			layer: Layer{Name: "o", Replace: true, Nodes: []Node{file("etc/motd", "new")}},
			want:  []string{`etc/motd 100644 o "new"`}},
		{name: "remove",
			layer: Layer{Name: "o", Remove: []string{"etc/gone", "lib/old"}},
			want:  []string{`etc/gone.not 100644 base ""`}, gone: []string{"etc/gone", "etc/gone/x", "usr/lib/old"}},
		{name: "all conflicts at once",
			layer: Layer{Name: "o", Nodes: []Node{
				file("etc/motd", "new"), file("tmp", ""), dir("etc/gone.not"), file("etc/motd2/x", ""), link("etc/motd2", "/"),
				file("usr/lib/old", ""), file("a/x", ""), file("etc/motd/x", ""), file("../x", ""), file("/x", ""), file("x//y", ""), file("", ""),
				file("dup", ""), file("dup", ""), file("lib/two", ""), file("usr/lib/two", ""), file("x/"+strings.Repeat("n", 256), ""),
			}},
			err: []string{
				"layer o: etc/motd: layer base already has it", "layer o: tmp: is a directory in layer base and a file here",
				"layer o: etc/gone.not: is a directory here and a file in layer base", "etc/motd2/x: is below etc/motd2, a symbolic link of the same layer",
				"usr/lib/old: layer base already has it", "a/x: symbolic links loop at", "etc/motd/x: is below etc/motd, which is a file (of layer base)",
				`"../x": path leads out of the tree`, `"/x": absolute path`, `"x//y": not a clean path`, "an entry without a name",
				"dup: occurs twice in this layer", "usr/lib/two: is the same file as lib/two of this layer", "name longer than 255 bytes",
			}},
		{name: "root is no directory", layer: Layer{Name: "o", Nodes: []Node{file(".", "")}}, err: []string{"the root must be a directory"}},
		{name: "bad remove", layer: Layer{Name: "o", Remove: []string{"../x", "."}}, err: []string{`removing "../x"`, `removing "."`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			nodes, err := Merge([]Layer{base, tt.layer}, day)
			if len(tt.err) > 0 {
				if err == nil {
					t.Fatalf("no error; got\n%s", show(nodes))
				}
				for _, want := range tt.err {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error lacks %q:\n%v", want, err)
					}
				}
				if n := strings.Count(err.Error(), "\n") + 1; n != len(tt.err) {
					t.Errorf("%d problems reported, want %d:\n%v", n, len(tt.err), err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if nodes[0].Path != "." {
				t.Errorf("first node is %s", nodes[0].Path)
			}
			known := map[string]bool{}
			for _, n := range nodes {
				if p := filepath.Dir(n.Path); n.Path != "." && !known[p] {
					t.Errorf("%s comes before its parent", n.Path)
				}
				known[n.Path] = true
			}
			got := show(nodes)
			for _, want := range tt.want {
				if !strings.Contains("\n"+got, "\n"+want+"\n") && !strings.Contains("\n"+got, "\n"+want+" ") {
					t.Errorf("lacks %q:\n%s", want, got)
				}
			}
			for _, p := range tt.gone {
				if known[p] {
					t.Errorf("%s is still there", p)
				}
			}
		})
	}
}

func TestMergeKeepsHardLinks(t *testing.T) {
	a := file("a", "x")
	nodes, err := Merge([]Layer{{Name: "l", Nodes: []Node{a, {Path: "b", Inode: a.Inode}}}}, day)
	if err != nil {
		t.Fatal(err)
	}
	if nodes[1].Inode != nodes[2].Inode {
		t.Error("a and b no longer share an inode")
	}
}

func TestFlatten(t *testing.T) {
	nodes, err := Flatten([]Layer{
		{Name: "1", Nodes: []Node{dir("d"), file("d/a", "1"), file("d/b", "1"), dir("o"), file("o/x", "1"), dir("was"), file("was/y", "1"), link("l", "d"), file("f", "1")}},
		{Name: "2", Nodes: []Node{file("d/.wh.a", ""), dir("o"), file("o/.wh..wh..opq", ""), file("o/z", "2"), file("was", "2"), file("l/c", "2"), dir("f")}},
	}, day)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nodes {
		got = append(got, n.Path)
	}
	if want := ". d d/b d/c f l o o/z was"; strings.Join(got, " ") != want {
		t.Errorf("got %s, want %s", strings.Join(got, " "), want)
	}
}

// TestXattrsOfEveryTar checks that an extended attribute has the same value in the format of each
// tar program.
func TestXattrsOfEveryTar(t *testing.T) {
	caps := "\x01\x00\x00\x02\x00\x04" + strings.Repeat("\x00", 14)
	coded := base64.StdEncoding.EncodeToString([]byte(caps))
	for name, test := range map[string]struct {
		records map[string]string
		want    map[string]string
		err     string
	}{
		"GNU tar --selinux":     {map[string]string{"RHT.security.selinux": "system_u:object_r:bin_t:s0"}, map[string]string{"security.selinux": "system_u:object_r:bin_t:s0\x00"}, ""},
		"libarchive":            {map[string]string{"LIBARCHIVE.xattr.security.capability": coded}, map[string]string{"security.capability": caps}, ""},
		"without padding":       {map[string]string{"LIBARCHIVE.xattr.security.capability": strings.TrimRight(coded, "=")}, map[string]string{"security.capability": caps}, ""},
		"a name that is coded":  {map[string]string{"LIBARCHIVE.xattr.user.a%3Db%25": "YQ"}, map[string]string{"user.a=b%": "a"}, ""},
		"in both forms":         {map[string]string{"LIBARCHIVE.xattr.user.a": "Yg", "SCHILY.xattr.user.a": "a"}, map[string]string{"user.a": "a"}, ""},
		"SELinux in both forms": {map[string]string{"RHT.security.selinux": "b", "SCHILY.xattr.security.selinux": "a\x00"}, map[string]string{"security.selinux": "a\x00"}, ""},
		"not Base64":            {map[string]string{"LIBARCHIVE.xattr.user.a": "!"}, nil, `"user.a" is not Base64`},
		"a name not coded":      {map[string]string{"LIBARCHIVE.xattr.user.a%": "YQ"}, nil, "extended attribute"},
		"bad capabilities":      {map[string]string{"LIBARCHIVE.xattr.security.capability": "YQ"}, nil, "setcap"},
		"a text ACL":            {map[string]string{"SCHILY.acl.access": "user::rwx"}, nil, "access control list"},
		"no attribute":          {map[string]string{"LIBARCHIVE.creationtime": "1"}, nil, ""},
	} {
		nodes, err := index(makeTar(t, entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "f", Mode: 0o644, Format: tar.FormatPAX, PAXRecords: test.records}}))
		if test.err != "" {
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil || !maps.Equal(nodes[0].Xattrs, test.want) {
			t.Errorf("%s: %v, %v", name, nodes, err)
		}
	}
}

// TestFlattenDirectoryOverALink checks that a directory in a layer replaces a link, and that its
// whiteouts do not remove files from the link's target. builder/images compares further cases with
// overlayfs.
func TestFlattenDirectoryOverALink(t *testing.T) {
	merged := []Node{dir("usr"), dir("usr/lib"), file("usr/lib/libc", ""), link("lib", "usr/lib")}
	for name, test := range map[string]struct {
		below, above []Node
		want         string
	}{
		"a link to a directory": {merged, []Node{dir("lib"), file("lib/new", "")}, ". lib lib/new usr usr/lib usr/lib/libc"},
		"an opaque one":         {merged, []Node{dir("lib"), file("lib/.wh..wh..opq", ""), file("lib/new", "")}, ". lib lib/new usr usr/lib usr/lib/libc"},
		"a whiteout in it":      {merged, []Node{file("lib/.wh.libc", ""), dir("lib")}, ". lib usr usr/lib usr/lib/libc"},
		"no directory listed":   {merged, []Node{file("lib/.wh.libc", ""), file("lib/new", "")}, ". lib usr usr/lib usr/lib/new"},
		"a link to a file":      {[]Node{file("f", ""), link("a", "f")}, []Node{dir("a"), file("a/b", "")}, ". a a/b f"},
		"a link to nothing":     {[]Node{link("a", "/run/b")}, []Node{dir("a"), file("a/b", "")}, ". a a/b"},
		"a file":                {[]Node{file("a", "")}, []Node{dir("a"), file("a/.wh.x", ""), file("a/.wh..wh..opq", ""), file("a/b", "")}, ". a a/b"},
		"a file, none listed":   {[]Node{file("a", "")}, []Node{file("a/b/c", "")}, ". a a/b a/b/c"},
		"whiteouts of a file":   {[]Node{file("a", "")}, []Node{file("a/.wh.x", "")}, ". a"},
	} {
		nodes, err := Flatten([]Layer{{Name: "1", Nodes: test.below}, {Name: "2", Nodes: test.above}}, day)
		var got []string
		for _, n := range nodes {
			got = append(got, n.Path)
		}
		if s := strings.Join(got, " "); err != nil || s != test.want {
			t.Errorf("%s: got %s, %v, want %s", name, s, err, test.want)
		}
	}
	// A directory does not replace a file of the same layer.
	_, err := Flatten([]Layer{{Name: "1", Nodes: []Node{file("a", "")}}, {Name: "2", Nodes: []Node{file("a", ""), file("a/b", "")}}}, day)
	if err == nil || !strings.Contains(err.Error(), "is below a, which is a file") {
		t.Errorf("a file below a file of the same layer: %v", err)
	}
	// It does not replace a link of the same layer either, whatever the link points to.
	for what, below := range map[string][]Node{
		"nothing":      {dir("x")},
		"another link": {dir("x"), dir("y"), link("a", "y")},
		"a directory":  {dir("x"), dir("a")},
	} {
		for _, above := range [][]Node{
			{link("a", "x"), dir("a/b"), file("a/b/c", "")},
			{link("a", "x"), file("a/b/c", ""), file("a/.wh..wh.plnk", "")},
		} {
			nodes, err := Flatten([]Layer{{Name: "1", Nodes: below}, {Name: "2", Nodes: above}}, day)
			if err == nil || !strings.Contains(err.Error(), "a/b/c: is below a, a symbolic link of the same layer") {
				t.Errorf("a link over %s, files below it: %v, %v", what, nodes, err)
			}
		}
	}
}

// entry is a tar header and its content.
type entry struct {
	tar.Header
	data string
}

func makeTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.data))
		if h.ModTime.IsZero() {
			h.ModTime = day
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("%s: %v", h.Name, err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func index(b []byte) ([]Node, error) {
	return FromTar(bytes.NewReader(b), int64(len(b)), "blob", "base")
}

func TestFromTar(t *testing.T) {
	long := strings.Repeat("long/", 60) + "name"
	caps := string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	b := makeTar(t,
		entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755}},
		entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "./bin/", Mode: 0o755}},
		entry{tar.Header{Typeflag: tar.TypeReg, Name: "./bin/su", Mode: 0o4755, Uid: 0, Gid: 2000000, ModTime: time.Unix(5, 7), Format: tar.FormatPAX,
			PAXRecords: map[string]string{"SCHILY.xattr.security.capability": caps}}, "elf"},
		entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: "./bin/su2", Linkname: "./bin/su"}},
		entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "sbin", Linkname: "bin", Mode: 0o777}},
		entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3, Mode: 0o666}},
		entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe", Mode: 0o600}},
		entry{tar.Header{Typeflag: tar.TypeReg, Name: long, Mode: 0o600, Format: tar.FormatGNU}, "deep"},
	)
	nodes, err := index(b)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]Node{}
	for _, n := range nodes {
		by[n.Path] = n
	}
	su := by["bin/su"]
	if su.Mode != ModeRegular|0o4755 || su.GID != 2000000 || !su.MTime.Equal(time.Unix(5, 7)) || su.Xattrs["security.capability"] != caps {
		t.Errorf("bin/su: %+v", su.Inode)
	}
	if got := string(b[su.Data.Off:][:su.Data.Size]); got != "elf" || su.Data.Blob != "blob" {
		t.Errorf("bin/su holds %q of %q", got, su.Data.Blob)
	}
	if by["bin/su2"].Inode != su.Inode {
		t.Error("the hard link does not share the inode")
	}
	if n := by["null"]; n.Mode != ModeChar|0o666 || n.Major != 1 || n.Minor != 3 {
		t.Errorf("null: %+v", n.Inode)
	}
	if n := by[long]; string(b[n.Data.Off:][:n.Data.Size]) != "deep" {
		t.Errorf("%s: %+v", long, n.Inode)
	}
	if by["pipe"].Mode != ModeFIFO|0o600 || by["sbin"].Target != "bin" || !by["."].IsDir() {
		t.Error("pipe, sbin or the root is wrong")
	}
}

func TestFromTarRefuses(t *testing.T) {
	reg := func(name string) entry {
		return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, "data"}
	}
	b := makeTar(t, reg("../up"), reg("/abs"), reg("a/../../b"), reg("ok"), reg("ok"),
		entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: "hl", Linkname: "nowhere"}},
		entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: "hl2", Linkname: "../ok"}},
		entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "ok"}},
		entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "acl", Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.acl.access": "user::rw-"}}},
	)
	_, err := index(b)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		`../up: "../up": path leads out of the tree`, `/abs: "/abs": absolute path`, `a/../../b: `, "ok: path occurs twice",
		"hl: hard link to nowhere, which must come earlier", `hl2: hard link to "../ok": path leads out`, "acl: access control list",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
}

func TestFromTarCutShort(t *testing.T) {
	b := makeTar(t, entry{tar.Header{Typeflag: tar.TypeReg, Name: "one", Mode: 0o644}, strings.Repeat("x", 2000)},
		entry{tar.Header{Typeflag: tar.TypeReg, Name: "two", Mode: 0o644}, strings.Repeat("y", 700)})
	whole := len(b) - 1024 // the size without the end mark
	for n := range len(b) - 512 {
		_, err := index(b[:n])
		if err == nil {
			t.Fatalf("a tar cut to %d of %d bytes is accepted", n, len(b))
		}
		if n > 600 && n < whole && !strings.Contains(err.Error(), "truncated after one") && !strings.Contains(err.Error(), "truncated after two") {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
}

func TestFromTarSparse(t *testing.T) {
	d := t.TempDir()
	f := filepath.Join(d, "holes")
	if err := os.WriteFile(f, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(f, 10<<20); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"gnu", "pax"} {
		out, err := exec.Command("tar", "-C", d, "--sparse", "--format="+format, "-c", "holes").Output()
		if err != nil {
			needOracle(t, "tar", err)
		}
		if _, err := index(out); err == nil || !strings.Contains(err.Error(), "holes: sparse entry") {
			t.Errorf("%s: %v", format, err)
		}
	}
}

// needOracle skips the test on a developer's computer and fails it in CI.
func needOracle(t *testing.T, name string, err error) {
	t.Helper()
	desk.Lacks(t, "%s is missing: %v", name, err)
}

func TestPackDir(t *testing.T) {
	d := t.TempDir()
	for name, mode := range map[string]os.FileMode{"a/run.sh": 0o755, "a/conf": 0o600} {
		p := filepath.Join(d, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(p, []byte(name), mode), os.Chmod(p, mode), os.Chmod(filepath.Dir(p), 0o755)); err != nil { // independent of the umask
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(d, "ln")); err != nil {
		t.Fatal(err)
	}
	var b, again bytes.Buffer
	if err := PackDir(t.Context(), &b, d, day); err != nil {
		t.Fatal(err)
	}
	if err := PackDir(t.Context(), &again, d, day); err != nil || !bytes.Equal(b.Bytes(), again.Bytes()) {
		t.Errorf("packed twice, the bytes differ (%v)", err)
	}
	if bytes.Contains(b.Bytes(), []byte(d)) {
		t.Error("the host's path is in the archive")
	}
	nodes, err := index(b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nodes {
		if n.UID != 0 || n.GID != 0 || !n.MTime.Equal(day) {
			t.Errorf("%s: owner %d:%d, dated %s", n.Path, n.UID, n.GID, n.MTime)
		}
		got = append(got, fmt.Sprintf("%s %o %s", n.Path, n.Mode, n.Target))
	}
	if want := "a 40755 ,a/conf 100600 ,a/run.sh 100755 ,ln 120777 /etc/passwd"; strings.Join(got, ",") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, ","), want)
	}
	if err := PackDir(t.Context(), io.Discard, filepath.Join(d, "none"), day); err == nil {
		t.Error("a missing directory was packed")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := PackDir(ctx, io.Discard, d, day); !errors.Is(err, context.Canceled) {
		t.Errorf("packed after the interrupt: %v", err)
	}
}

type memBlobs map[string][]byte

type memFile struct{ *bytes.Reader }

func (memFile) Close() error { return nil }

func (m memBlobs) OpenBlob(sha string) (BlobFile, error) {
	b, ok := m[sha]
	if !ok {
		return nil, fmt.Errorf("no blob %s", sha)
	}
	return memFile{bytes.NewReader(b)}, nil
}

func TestWriteTarRoundTrip(t *testing.T) {
	a := file("d/a", "hello")
	a.Xattrs = map[string]string{"user.x": "\x00y"}
	in := []Node{dir("."), dir("d"), a, {Path: "d/z", Inode: a.Inode}, link("l", "d"),
		{Path: "dev", Inode: &Inode{Mode: ModeBlock | 0o600, Major: 8, Minor: 1, MTime: day}}}
	var b bytes.Buffer
	if err := WriteTar(&b, in, memBlobs{}); err != nil {
		t.Fatal(err)
	}
	out, err := index(b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	var again bytes.Buffer
	if err := WriteTar(&again, out, memBlobs{"blob": b.Bytes()}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), again.Bytes()) {
		t.Errorf("tar -> nodes -> tar is not the same:\n%s", show(out))
	}
	got, err := ReadContent(out[2].Data, memBlobs{"blob": b.Bytes()}, 100)
	if err != nil || string(got) != "hello" {
		t.Errorf("%q %v", got, err)
	}
	short := memBlobs{"blob": b.Bytes()[:out[2].Data.Off+2]}
	if err := WriteTar(io.Discard, out, short); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a truncated blob: %v", err)
	}
}

// TestFromTarLimits checks the limits of the memory for one archive.
func TestFromTarLimits(t *testing.T) {
	var few, many []entry
	for i := range 5 {
		few = append(few, entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("d%d/", i), Mode: 0o755}})
	}
	many = append(few, entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "d5/", Mode: 0o755}})
	long := append(few[:4:4], entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "x/", Mode: 0o755,
		PAXRecords: map[string]string{xattrPrefix + "user.a": strings.Repeat("a", 5*entryBytes)}}})
	for _, tt := range []struct {
		name    string
		entries []entry
		want    string
	}{
		{"few", few, ""},
		{"many", many, "more than 5 entries"},
		{"long", long, "extended attributes in the tar have more than"},
	} {
		b := makeTar(t, tt.entries...)
		_, err := fromTar(bytes.NewReader(b), int64(len(b)), "blob", "base", 5)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestPackDirBehindALink packs an overlay whose directory is given as a symbolic link.
func TestPackDirBehindALink(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "v2/etc"), 0o755), os.WriteFile(filepath.Join(dir, "v2/etc/motd"), []byte("hello"), 0o644),
		os.Symlink("v2", filepath.Join(dir, "current"))); err != nil {
		t.Fatal(err)
	}
	var direct, linked bytes.Buffer
	if err := errors.Join(PackDir(t.Context(), &direct, filepath.Join(dir, "v2"), day), PackDir(t.Context(), &linked, filepath.Join(dir, "current"), day)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(direct.Bytes(), linked.Bytes()) {
		t.Errorf("%d bytes by way of the link, %d directly", linked.Len(), direct.Len())
	}
}

func FuzzFromTar(f *testing.F) {
	f.Add(makeTar(f, entry{tar.Header{Typeflag: tar.TypeReg, Name: "x", Mode: 0o644}, "data"},
		entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: "y", Linkname: "x"}}))
	f.Add(makeTar(f, entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "a/b", Linkname: "../c"}}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		nodes, err := index(b)
		if err != nil {
			return
		}
		for _, n := range nodes {
			if err := checkPath(n.Path); err != nil {
				t.Errorf("accepted %v", err)
			}
			if n.Data.Off < 0 || n.Data.Size < 0 || n.Data.Off+n.Data.Size > int64(len(b)) {
				t.Errorf("%s lies outside of the archive: %+v", n.Path, n.Data)
			}
		}
		// Merge must accept or reject the tree without a panic.
		if merged, err := Merge([]Layer{{Name: "fuzz", Nodes: nodes}}, day); err == nil && merged[0].Path != "." {
			t.Error("the root is not first")
		}
	})
}

// TestPackDirKeepsLinksAndCapabilities checks that a packed overlay keeps hard links and file
// capabilities.
func TestPackDirKeepsLinksAndCapabilities(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) string {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(name), 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	first := write("usr/bin/a")
	for _, name := range []string{"usr/bin/b", "opt"} {
		if err := os.Link(first, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	outside := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.Link(write("alone"), outside); err != nil {
		desk.Lacks(t, "hard links between two temporary directories: %v", err)
	}
	want := map[string]string{}
	if os.Geteuid() == 0 {
		want[capability] = string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
		setCapability(t, write("ping"), want[capability])
	} else if os.Getenv("CI") != "" {
		t.Fatal("this test must run as root in CI")
	}
	var buf bytes.Buffer
	if err := PackDir(t.Context(), &buf, dir, time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	nodes, err := FromTar(bytes.NewReader(buf.Bytes()), int64(buf.Len()), "blob", "overlay")
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]Node{}
	for _, n := range nodes {
		by[n.Path] = n
	}
	if by["opt"].Inode != by["usr/bin/a"].Inode || by["usr/bin/a"].Inode != by["usr/bin/b"].Inode || !by["alone"].IsRegular() {
		t.Errorf("hard links: %+v", by)
	}
	if n, ok := by["ping"]; ok && n.Xattrs[capability] != want[capability] {
		t.Errorf("capabilities: %v", n.Xattrs)
	}
}

func TestFromTarRefusesWhatLinuxCannotHold(t *testing.T) {
	for want, h := range map[string]tar.Header{
		"owner 4294967295:0 out of range": {Uid: 1<<32 - 1},
		"file capabilities of 3 bytes":    {PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "abc"}},
	} {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		h.Name, h.Format = "f", tar.FormatPAX
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		tw.Close()
		_, err := FromTar(bytes.NewReader(buf.Bytes()), int64(buf.Len()), "blob", "x")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, expected %q", err, want)
		}
	}
}

// TestFlattenManyWhiteouts checks that the cost of many whiteouts over many files is not quadratic.
func TestFlattenManyWhiteouts(t *testing.T) {
	in := &Inode{Mode: ModeRegular | 0o644}
	low, high := Layer{Name: "low"}, Layer{Name: "high"}
	for n := range 30000 {
		low.Nodes = append(low.Nodes, Node{Path: fmt.Sprintf("d/%d", n), Inode: in})
		high.Nodes = append(high.Nodes, Node{Path: fmt.Sprintf("d/.wh.%d", n), Inode: in})
	}
	high.Nodes = append(high.Nodes, Node{Path: "d/.wh..wh.plnk", Inode: in})
	if d := desk.Processor(t, func() {
		flat, err := Flatten([]Layer{low, high}, time.Unix(0, 0))
		if err != nil || len(flat) != 2 {
			t.Errorf("%d nodes, %v", len(flat), err)
		}
	}); d > 10*time.Second {
		t.Errorf("%v", d)
	}
}
