package images_test

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/imagetest"
)

func bake(t *testing.T, c *fetch.Cache, imgs ...imagetest.Image) (*images.Result, images.Options) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(dir, imgs...); err != nil {
		t.Fatal(err)
	}
	o := images.Options{Arch: "amd64", ContainerdVersion: "2.2.9", SourceDate: time.Unix(1767225600, 0).UTC()}
	var list []configs.ContainerImage
	for _, i := range imgs {
		list = append(list, configs.ContainerImage{Ref: i.Ref, Layout: dir})
	}
	pinned, err := images.Resolve(t.Context(), c, list, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := images.Fetch(t.Context(), c, pinned, o); err != nil {
		t.Fatal(err)
	}
	r, err := images.Bake(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	return r, o
}

// TestVerifyOnDisk writes a baked store to a disk and verifies it there, as edgebake inspect does.
func TestVerifyOnDisk(t *testing.T) {
	c, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r, o := bake(t, c, imagetest.Nasty("edgebake.test/nasty:1", "#!"))
	root := tree.Node{Path: ".", Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: o.SourceDate}}
	nodes := append([]tree.Node{root}, r.Nodes...)
	eo := ext4.Options{Label: "DATA", UUID: [16]byte{1}, HashSeed: [16]byte{2}, Time: o.SourceDate, FreeBytes: 8 << 20, FreeInodes: 100}
	if eo.Size, err = ext4.Size(nodes, eo); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "data.img"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(eo.Size); err != nil {
		t.Fatal(err)
	}
	if _, err := ext4.Write(f, nodes, c, eo); err != nil {
		t.Fatal(err)
	}
	fs, err := ext4.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Verify(update.StoreFiles(fs), store.Root)
	if err != nil {
		t.Fatal(err)
	}
	if s.Snapshots != 20 || len(s.Images) != 1 {
		t.Errorf("%+v", s)
	}
}

// zeros is a reader that returns this number of zero bytes.
type zeros int64

func (z *zeros) Read(p []byte) (int, error) {
	if *z <= 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), int64(*z))
	clear(p[:n])
	*z -= zeros(n)
	return int(n), nil
}

// TestMemoryDoesNotGrowWithSize checks that baking allocates the same amount of memory for a larger
// image.
func TestMemoryDoesNotGrowWithSize(t *testing.T) {
	big := func(size int64) imagetest.Image {
		return imagetest.Image{Ref: "edgebake.test/big:1", Layers: []imagetest.Layer{{Tar: func(w *imagetest.Writer) error {
			if err := w.WriteHeader(&tar.Header{Name: "big", Size: size, Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
				return err
			}
			z := zeros(size)
			_, err := io.Copy(w.Writer, &z)
			return err
		}}}}
	}
	used := func(size int64) int64 {
		c, err := fetch.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "layout")
		if _, err := imagetest.WriteLayout(dir, big(size)); err != nil {
			t.Fatal(err)
		}
		o := images.Options{Arch: "amd64", ContainerdVersion: "2.2.9"}
		pinned, err := images.Resolve(t.Context(), c, []configs.ContainerImage{{Ref: "edgebake.test/big:1", Layout: dir}}, o)
		if err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := images.Fetch(t.Context(), c, pinned, o); err != nil {
			t.Fatal(err)
		}
		if _, err := images.Bake(t.Context(), c, pinned, o); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		return int64(after.TotalAlloc - before.TotalAlloc)
	}
	small, large := used(1<<20), used(200<<20)
	t.Logf("1 MiB: %d bytes allocated, 200 MiB: %d", small, large)
	if large > small+8<<20 {
		t.Errorf("an image of 200 MiB allocates %d bytes, one of 1 MiB %d", large, small)
	}
}

// TestVerifyFindsDamage checks that damage to a baked store is found, and that the error locates
// it.
func TestVerifyFindsDamage(t *testing.T) {
	c, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	base := imagetest.Script(imagetest.File("base", 0o644, 0, 0, "base"))
	r, _ := bake(t, c, imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{base, imagetest.Script(imagetest.File("own", 0o644, 0, 0, "own"))}})
	snapshots := store.Root + "/" + store.SnapshotterDir + "/snapshots/"
	blobs := store.Root + "/" + store.ContentDir + "/blobs/sha256/"
	without := func(prefix string) []tree.Node {
		var out []tree.Node
		for _, n := range r.Nodes {
			if !strings.HasPrefix(n.Path, prefix) {
				out = append(out, n)
			}
		}
		if len(out) == len(r.Nodes) {
			t.Fatalf("nothing begins with %s", prefix)
		}
		return out
	}
	var blob tree.Node
	for _, n := range r.Nodes {
		if strings.HasPrefix(n.Path, blobs) {
			blob = n
		}
	}
	wrong := blob
	wrong.Inode = &tree.Inode{Mode: blob.Mode, Data: tree.Bytes([]byte("damaged"))}
	stray := tree.Node{Path: snapshots + "77", Inode: &tree.Inode{Mode: tree.ModeDir | 0o700}}
	for name, tt := range map[string]struct {
		nodes []tree.Node
		want  string
	}{
		"snapshot missing":  {without(snapshots + "2/"), "snapshots/2/fs"},
		"blob missing":      {without(blob.Path), blob.Path[len(blobs):]},
		"blob damaged":      {append(without(blob.Path), wrong), "meta.db says"},
		"stray directory":   {append(r.Nodes[:len(r.Nodes):len(r.Nodes)], stray), "belongs to no snapshot"},
		"database missing":  {without(store.Root + "/" + store.MetaDB), "meta.db"},
		"database replaced": {append(without(store.Root+"/"+store.MetaDB), tree.Node{Path: store.Root + "/" + store.MetaDB, Inode: wrong.Inode}), "meta.db"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := store.Verify(store.NodeFiles(tt.nodes, c), store.Root)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, expected %q", err, tt.want)
			}
		})
	}
}
