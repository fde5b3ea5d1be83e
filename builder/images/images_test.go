package images

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/imagetest"
)

func newCache(t *testing.T) *fetch.Cache {
	t.Helper()
	c, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func testOptions() Options {
	return Options{Arch: "amd64", ContainerdVersion: "2.2.9", SourceDate: time.Unix(1767225600, 0).UTC(), RetryWait: time.Millisecond}
}

// writeLayout makes a layout and returns its images as an Image lists them.
func writeLayout(t *testing.T, imgs ...imagetest.Image) (string, []configs.ContainerImage) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(dir, imgs...); err != nil {
		t.Fatal(err)
	}
	var cs []configs.ContainerImage
	for _, i := range imgs {
		cs = append(cs, configs.ContainerImage{Ref: i.Ref, Layout: dir})
	}
	return dir, cs
}

func resolveAndBake(t *testing.T, c *fetch.Cache, o Options, imgs []configs.ContainerImage) (*Result, error) {
	t.Helper()
	pinned, err := Resolve(t.Context(), c, imgs, o)
	if err != nil {
		return nil, err
	}
	return fetchAndBake(t.Context(), c, pinned, o)
}

func mustBake(t *testing.T, c *fetch.Cache, o Options, imgs []configs.ContainerImage) *Result {
	t.Helper()
	r, err := resolveAndBake(t, c, o, imgs)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func small(ref, text string) imagetest.Image {
	return imagetest.Image{Ref: ref, Layers: []imagetest.Layer{
		imagetest.Script(imagetest.Dir("etc", 0o755, 0, 0), imagetest.File("etc/base", 0o644, 0, 0, "base")),
		imagetest.Script(imagetest.File("etc/own", 0o644, 0, 0, text)),
	}}
}

func TestBakedStoreVerifies(t *testing.T) {
	_, imgs := writeLayout(t, imagetest.Nasty("edgebake.test/nasty:1", "#!"), imagetest.Many("edgebake.test/many:1", 30000),
		small("edgebake.test/a:1", "a"), small("edgebake.test/b:1", "b"))
	for _, keep := range []bool{false, true} {
		c := newCache(t)
		o := testOptions()
		o.KeepLayers = keep
		r := mustBake(t, c, o, imgs)
		s, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"edgebake.test/a:1", "edgebake.test/b:1", "edgebake.test/many:1", "edgebake.test/nasty:1"}
		if !slices.Equal(s.Images, want) {
			t.Errorf("images %q", s.Images)
		}
		if s.Snapshots != 20+2+3 || r.Report.Layers != s.Snapshots {
			t.Errorf("%d snapshots, %d in the report; 20 nasty, 2 of many, 1 shared and 2 own expected", s.Snapshots, r.Report.Layers)
		}
		a := r.Report.Images[0]
		if a.Shared == 0 || a.Shared >= a.Size {
			t.Errorf("shared %d of %d", a.Shared, a.Size)
		}
		if len(r.Images) != 4 || r.Images[0] != (ondisk.ImageRef{Ref: a.Ref, Digest: a.Digest, Size: a.Size}) {
			t.Errorf("images for image.json: %+v", r.Images)
		}
	}
}

// TestSummary checks the sizes in the report that is made before any layer is fetched.
func TestSummary(t *testing.T) {
	a, b := small("edgebake.test/a:1", "a"), small("edgebake.test/b:1", "b")
	b.Layers = append(b.Layers, b.Layers[1])
	_, imgs := writeLayout(t, a, b)
	pinned, err := Resolve(t.Context(), newCache(t), imgs, testOptions())
	if err != nil {
		t.Fatal(err)
	}
	base, own := pinned[0].Layers[0].Size, pinned[1].Layers[1].Size
	r := Summary(pinned)
	if r.Layers != 3 || r.Size != base+own+pinned[0].Layers[1].Size {
		t.Errorf("%d layers of %d bytes", r.Layers, r.Size)
	}
	if i := r.Images[1]; i.Size != base+own || i.Shared != base || i.Layers != 3 {
		t.Errorf("%+v; want a base of %d bytes and, twice, a layer of %d", i, base, own)
	}
	text := r.Text("compressed")
	for _, want := range []string{"IMAGE", "SHARED", "edgebake.test/b:1  " + string(pinned[1].Target.Digest), "2 images, 3 layers", "compressed"} {
		if !strings.Contains(text, want) {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
}

// TestNamesOfImages resolves images that have a digest instead of a tag.
func TestNamesOfImages(t *testing.T) {
	dir, imgs := writeLayout(t, small("edgebake.test/a:1", "a"))
	pinned, err := Resolve(t.Context(), newCache(t), imgs, testOptions())
	if err != nil {
		t.Fatal(err)
	}
	digest := string(pinned[0].Target.Digest)
	for name, tt := range map[string]struct {
		refs, names []string
	}{
		"digest":         {[]string{"edgebake.test/a@" + digest}, []string{"edgebake.test/a@" + digest}},
		"tag and digest": {[]string{"edgebake.test/a:1@" + digest}, []string{"edgebake.test/a:1"}},
	} {
		t.Run(name, func(t *testing.T) {
			var list []configs.ContainerImage
			for _, r := range tt.refs {
				list = append(list, configs.ContainerImage{Ref: r, Layout: dir})
			}
			c := newCache(t)
			r := mustBake(t, c, testOptions(), list)
			s, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root)
			if err != nil || !slices.Equal(s.Images, tt.names) || len(s.Images) != len(r.Images) {
				t.Errorf("%+v, %v; report %+v", s, err, r.Images)
			}
		})
	}
}

// TestNodesAreATree checks that parents come before children and that no path occurs twice, as the
// file system writers require.
func TestNodesAreATree(t *testing.T) {
	_, imgs := writeLayout(t, imagetest.Nasty("edgebake.test/nasty:1", "#!"))
	r := mustBake(t, newCache(t), testOptions(), imgs)
	seen := map[string]bool{".": true}
	for _, n := range r.Nodes {
		if seen[n.Path] {
			t.Errorf("%s twice", n.Path)
		}
		seen[n.Path] = true
		if dir := filepath.Dir(n.Path); !seen[dir] {
			t.Errorf("%s before its parent", n.Path)
		}
	}
}

// render returns the parts of a result that are written to the disk, as text.
func render(t *testing.T, r *Result) string {
	t.Helper()
	var b strings.Builder
	first := map[*tree.Inode]string{}
	for _, n := range r.Nodes {
		if p, ok := first[n.Inode]; ok {
			fmt.Fprintf(&b, "%s = %s\n", n.Path, p)
			continue
		}
		first[n.Inode] = n.Path
		x, err := json.Marshal(n.Inode)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s %s\n", n.Path, x)
	}
	return b.String()
}

func TestDoubleBakeIsIdentical(t *testing.T) {
	dir, imgs := writeLayout(t, imagetest.Nasty("edgebake.test/nasty:1", "#!"), small("edgebake.test/a:1", "a"), small("edgebake.test/b:1", "b"))
	one := render(t, mustBake(t, newCache(t), testOptions(), imgs))
	// Change the order of images, the directory, the cache and the process.
	slices.Reverse(imgs)
	moved := filepath.Join(t.TempDir(), "moved")
	if err := os.CopyFS(moved, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for i := range imgs {
		imgs[i].Layout = moved
	}
	for range 3 {
		if two := render(t, mustBake(t, newCache(t), testOptions(), imgs)); two != one {
			t.Fatal("the second bake differs")
		}
	}
	if os.Getenv("EDGEBAKE_BAKE_CHILD") != "" {
		fmt.Println("CHILD", len(one), sum(one))
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "TestDoubleBakeIsIdentical", "-test.v")
	cmd.Env = append(os.Environ(), "EDGEBAKE_BAKE_CHILD=1", "GOMAXPROCS=1", "TZ=Asia/Kathmandu", "HOME=/nonexistent")
	out, err := cmd.CombinedOutput()
	if want := fmt.Sprintln("CHILD", len(one), sum(one)); err != nil || !strings.Contains(string(out), want) {
		t.Errorf("another process baked differently (%v): %s\nwant %s", err, out, want)
	}
}

func sum(s string) string {
	h, _, _ := strings.Cut(fmt.Sprintf("%x", sha(s)), " ")
	return h
}

// apply applies layers on top of each other, and returns a short description of each entry of the
// topmost snapshot.
func apply(t *testing.T, layers ...imagetest.Layer) (map[string]string, error) {
	t.Helper()
	c := newCache(t)
	var top *snapshot
	for n, l := range layers {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		if err := l.Tar(&imagetest.Writer{Writer: tw}); err != nil {
			t.Fatal(err)
		}
		tw.Close()
		s, err := applyLayer(t.Context(), c, sectionOf(buf.Bytes()), fmt.Sprint("blob", n), top, time.Unix(99, 0), newBudget(&Options{}))
		if err != nil {
			return nil, err
		}
		top = s
	}
	out := map[string]string{}
	for _, n := range top.nodes("fs", "", nil) {
		d := fmt.Sprintf("%o %d:%d", n.Mode, n.UID, n.GID)
		if n.Target != "" {
			d += " -> " + n.Target
		}
		for _, k := range slices.Sorted(keysOf(n.Xattrs)) {
			d += " " + k
		}
		out[strings.TrimPrefix(n.Path, "fs/")] = d
	}
	delete(out, "fs")
	return out, nil
}

func TestApply(t *testing.T) {
	dir, file := imagetest.Dir, imagetest.File
	for _, tt := range []struct {
		name   string
		layers []imagetest.Layer
		want   map[string]string
	}{
		{"whiteout is a 0:0 device of the header's owner", []imagetest.Layer{
			imagetest.Script(file("a", 0o644, 0, 0, "a")),
			imagetest.Script(imagetest.Whiteout("a")),
		}, map[string]string{"a": "20000 0:0"}},
		{"opaque directory", []imagetest.Layer{
			imagetest.Script(dir("d", 0o750, 3, 4), file("d/x", 0o644, 0, 0, "x")),
			imagetest.Script(imagetest.Opaque("d"), file("d/y", 0o600, 1, 1, "y")),
		}, map[string]string{"d": "40750 3:4 trusted.overlay.opaque", "d/y": "100600 1:1"}},
		{"whiteouts of a first layer hide nothing", []imagetest.Layer{
			imagetest.Script(file("a", 0o644, 0, 0, "a"), imagetest.Whiteout("a"), imagetest.Whiteout("b"), dir("d", 0o755, 0, 0), file("d/x", 0o644, 0, 0, ""), imagetest.Opaque("d")),
		}, map[string]string{"a": "100644 0:0", "d": "40755 0:0", "d/x": "100644 0:0"}},
		{"a whiteout spares its own layer's file and makes its directory opaque", []imagetest.Layer{
			imagetest.Script(file("f", 0o644, 0, 0, "old"), file("d/old", 0o644, 0, 0, "old")),
			imagetest.Script(file("f", 0o600, 1, 1, "new"), imagetest.Whiteout("f"), file("d/new", 0o600, 1, 1, "new"), imagetest.Whiteout("d")),
		}, map[string]string{"f": "100600 1:1", "d": "40755 0:0 trusted.overlay.opaque", "d/new": "100600 1:1"}},
		{"file becomes directory becomes file", []imagetest.Layer{
			imagetest.Script(file("x", 0o644, 0, 0, "")),
			imagetest.Script(dir("x", 0o711, 2, 2), file("x/y", 0o644, 0, 0, "")),
			imagetest.Script(file("x", 0o4755, 3, 3, "")),
		}, map[string]string{"x": "104755 3:3"}},
		{"implied parents are copied up, through links below too", []imagetest.Layer{
			imagetest.Script(dir("real", 0o700, 5, 6), imagetest.Symlink("link", "real")),
			imagetest.Script(file("link/f", 0o644, 0, 0, "")),
		}, map[string]string{"link": "40700 5:6", "link/f": "100644 0:0"}},
		{"capabilities go when a link changes the owner; ACLs stay", []imagetest.Layer{
			imagetest.Script(
				tar.Header{Name: "f", PAXRecords: map[string]string{"SCHILY.xattr.security.capability": imagetest.Capability, "SCHILY.xattr.system.posix_acl_access": imagetest.ACL, "SCHILY.xattr.trusted.overlay.opaque": "y"}, Mode: 0o755},
				imagetest.Hardlink("g", "f")),
		}, map[string]string{"f": "100755 0:0 system.posix_acl_access", "g": "100755 0:0 system.posix_acl_access"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := apply(t, tt.layers...)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %v\nwant %v", got, tt.want)
			}
		})
	}
}

func TestApplyRefuses(t *testing.T) {
	file := imagetest.File
	loop := []any{imagetest.Symlink("a", "b"), imagetest.Symlink("b", "a"), file("a/x", 0o644, 0, 0, "")}
	for _, tt := range []struct {
		name  string
		steps []any
		want  string
	}{
		{"traversal", []any{file("../../etc/passwd", 0o644, 0, 0, "")}, "leads out of the image"},
		{"traversal in the middle", []any{file("a/../../b", 0o644, 0, 0, "")}, "leads out of the image"},
		{"absolute traversal", []any{file("/../b", 0o644, 0, 0, "")}, "leads out of the image"},
		{"hard link out", []any{imagetest.Hardlink("a", "../../etc/shadow")}, "leads out of the image"},
		{"hard link to nothing", []any{imagetest.Hardlink("a", "b")}, "does not have"},
		{"hard link to a directory", []any{imagetest.Dir("b", 0o755, 0, 0), imagetest.Hardlink("a", "b")}, "directory"},
		{"below a file", []any{file("a", 0o644, 0, 0, ""), file("a/b", 0o644, 0, 0, "")}, "not a directory"},
		{"loop", loop, "symbolic links"},
		{"name of 256 bytes", []any{file(strings.Repeat("n", 256), 0o644, 0, 0, "")}, "256 bytes"},
		{"whiteout of nothing", []any{file(".wh.", 0o644, 0, 0, "")}, "without a name"},
		{"unknown type", []any{tar.Header{Name: "x", Typeflag: '7'}}, "unknown type"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := apply(t, imagetest.Script(file("low", 0o644, 0, 0, "")), imagetest.Script(tt.steps...))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, expected %q", err, tt.want)
			}
		})
	}
}

// TestLinksStayInside checks that a hostile link cannot leave the snapshot.
func TestLinksStayInside(t *testing.T) {
	got, err := apply(t, imagetest.Script(
		imagetest.Symlink("out", "../../../../tmp"),
		imagetest.File("out/evil", 0o644, 0, 0, "evil")))
	if err != nil {
		t.Fatal(err)
	}
	if got["tmp/evil"] != "100644 0:0" {
		t.Errorf("%v", got)
	}
}

func TestSandboxMustBeThere(t *testing.T) {
	_, imgs := writeLayout(t, small("edgebake.test/pause:1", "p"))
	o := testOptions()
	o.Sandbox = "edgebake.test/pause:2"
	if _, err := resolveAndBake(t, newCache(t), o, imgs); err == nil || !strings.Contains(err.Error(), "edgebake.test/pause:2") || !strings.Contains(err.Error(), "list it in images") {
		t.Errorf("error %v", err)
	}
	o.Sandbox = "edgebake.test/pause:1"
	mustBake(t, newCache(t), o, imgs)
}

func TestUnknownContainerdIsRefused(t *testing.T) {
	for _, v := range []string{"1.7.24~ds1-6+deb13u1", "v2.0.0", "2.2.9", "2.4.2", "1.7"} {
		if err := CheckContainerd(v); err != nil {
			t.Error(err)
		}
	}
	for _, v := range []string{"1.6.20", "2.5.0", "3.0", "", "2", "master"} {
		err := CheckContainerd(v)
		if err == nil || !strings.Contains(err.Error(), "1.7, 2.0, 2.1, 2.2, 2.3, 2.4") {
			t.Errorf("%q: %v", v, err)
		}
	}
	o := testOptions()
	o.ContainerdVersion = "2.9.0"
	o.Sandbox = "edgebake.test/pause:1"
	_, err := fetchAndBake(t.Context(), newCache(t), nil, o)
	if err == nil || !strings.Contains(err.Error(), "edgebake.test/pause:1") || !strings.Contains(err.Error(), "2.9.0") {
		t.Errorf("both problems at once: %v", err)
	}
}

func TestParseRef(t *testing.T) {
	for in, want := range map[string]string{
		"pause:3.10":                          "docker.io/library/pause:3.10",
		"a/b:1":                               "docker.io/a/b:1",
		"registry.example.com/pause:3.10":     "registry.example.com/pause:3.10",
		"localhost/x:1":                       "localhost/x:1",
		"host:5000/x/y:v1.2":                  "host:5000/x/y:v1.2",
		"index.docker.io/library/x:1":         "docker.io/library/x:1",
		"docker.io/x:1":                       "docker.io/library/x:1", // the name under which kubelet looks it up
		"x@sha256:" + strings.Repeat("a", 64): "docker.io/library/x@sha256:" + strings.Repeat("a", 64),
	} {
		r, err := imageref.Parse(in)
		if err != nil || r.String() != want {
			t.Errorf("%s: %s, %v; want %s", in, r, err, want)
		}
	}
	for in, want := range map[string]string{
		"nginx":                            "nginx:1.2.3",
		"host:5000/nginx":                  "has no tag",
		"":                                 "repository",
		"a.b_c/x:1":                        "host name",
		"a/B:1":                            "lower case",
		"x:" + strings.Repeat("t", 129):    "tag",
		"x@sha256:12":                      "64 hex digits",
		"x@md5:" + strings.Repeat("a", 64): "sha256",
		"../x:1":                           "host name",
		"a//b:1":                           "repository",
	} {
		if _, err := imageref.Parse(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, expected %q", in, err, want)
		}
	}
}

func FuzzParseRef(f *testing.F) {
	f.Add("registry.example.com/pause:3.10@sha256:" + strings.Repeat("0", 64))
	f.Fuzz(func(t *testing.T, s string) {
		r, err := imageref.Parse(s)
		if err != nil {
			return
		}
		again, err := imageref.Parse(r.String())
		if err != nil || again != r {
			t.Errorf("%q → %q → %v, %v", s, r, again, err)
		}
	})
}

// FuzzApply checks that a damaged layer is rejected or unpacked, but causes no crash.
func FuzzApply(f *testing.F) {
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	if err := imagetest.Nasty("x:1", "").Layers[1].Tar(&imagetest.Writer{Writer: tw}); err != nil {
		f.Fatal(err)
	}
	tw.Close()
	f.Add(buf.Bytes())
	c, err := fetch.Open(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := applyLayer(context.Background(), c, sectionOf(b), "blob", nil, time.Unix(0, 0), newBudget(&Options{}))
		if err != nil {
			return
		}
		for _, n := range s.nodes("fs", "", nil) {
			if !fs.ValidPath(n.Path) {
				t.Errorf("path %q", n.Path)
			}
			if n.IsRegular() && n.Data.Blob == "blob" && n.Data.Off+n.Data.Size > int64(len(b)) {
				t.Errorf("%s: content beyond the layer", n.Path)
			}
		}
	})
}
