package media

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/imagetest"
)

// withData builds a golden image whose DATA contains nodes. The paths of nodes are those on the
// node.
func withData(t *testing.T, c *fetch.Cache, refs []ondisk.ImageRef, nodes []tree.Node) string {
	t.Helper()
	data := []tree.Node{dir(".")}
	for _, n := range nodes {
		if p, ok := strings.CutPrefix(n.Path, "var/"); ok {
			n.Path = p
			data = append(data, n)
		}
	}
	info := ondisk.ImageInfo{Version: 1, Name: "test", Plan: "aa11", Arch: "amd64", SourceDate: built.Unix(), SiteVersions: []string{"v1alpha1"}, Images: refs}
	spec := disk.Spec{ID: info.Plan, Arch: info.Arch, SourceDate: built, Partitions: []disk.Partition{
		{Label: ondisk.LabelESP, FS: disk.FAT32, Size: 64 << 20, Nodes: []tree.Node{dir(".")}},
		{Label: ondisk.LabelSlot, FS: disk.FAT16},
		{Label: ondisk.LabelRootA, FS: disk.Ext4, FreeBytes: 8 << 20, Nodes: []tree.Node{dir(".")}},
		{Label: ondisk.LabelRootB},
		{Label: ondisk.LabelData, FS: disk.Ext4, FreeBytes: 8 << 20, Nodes: data},
	}}
	l, err := disk.Compute(spec)
	if err != nil {
		t.Fatal(err)
	}
	info.Partitions = l.Parts
	b, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	spec.Partitions[0].Nodes = append(spec.Partitions[0].Nodes, dir("edgebake"), inline(ondisk.ESPImageInfo, b))
	path := filepath.Join(t.TempDir(), "image.raw")
	_, err = disk.Write(t.Context(), path, spec, l, c, disk.WriteOptions{Slot: func(d disk.Digest) ([]byte, error) {
		return slot.Make(slot.Contents{Info: ondisk.SlotInfo{Plan: info.Plan, Golden: d.Golden, Parts: d.Parts, SiteVersions: info.SiteVersions}, Time: built})
	}})
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestVerifyImages(t *testing.T) {
	c, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	layout := filepath.Join(t.TempDir(), "layout")
	img := imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{imagetest.Script(imagetest.File("a", 0o644, 0, 0, "a"))}}
	if _, err := imagetest.WriteLayout(layout, img); err != nil {
		t.Fatal(err)
	}
	o := images.Options{Arch: "amd64", ContainerdVersion: "2.2.9", SourceDate: built}
	pinned, err := images.Resolve(t.Context(), c, []configs.ContainerImage{{Ref: img.Ref, Layout: layout}}, o)
	if err != nil {
		t.Fatal(err)
	}
	kept := o
	kept.KeepLayers = true
	if err := images.Fetch(t.Context(), c, pinned, kept); err != nil {
		t.Fatal(err)
	}
	baked, err := images.Bake(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	archives, err := images.Archives(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	for what, r := range map[string]*images.Result{"prebaked": baked, "import": archives} {
		s, err := VerifyImages(withData(t, c, r.Images, r.Nodes))
		if err != nil || len(s.Images) != 1 || s.Images[0] != img.Ref {
			t.Errorf("sound image, %s: %+v, %v", what, s, err)
		}
	}
	var holed, gone, spoiled []tree.Node
	for _, n := range archives.Nodes {
		if !strings.HasSuffix(n.Path, ".tar") {
			gone, spoiled = append(gone, n), append(spoiled, n)
			continue
		}
		other := *n.Inode
		other.Data = tree.Bytes([]byte("another archive"))
		n.Inode = &other
		spoiled = append(spoiled, n)
	}
	for _, n := range baked.Nodes {
		if n.Path != store.Root+"/"+store.BlobPath(string(pinned[0].Config.Digest)) {
			holed = append(holed, n)
		}
	}
	for name, tt := range map[string]struct {
		refs  []ondisk.ImageRef
		nodes []tree.Node
		want  string
	}{
		"blob missing":    {baked.Images, holed, string(pinned[0].Config.Digest)},
		"archive missing": {archives.Images, gone, "000-edgebake.test_a_1.tar of image edgebake.test/a:1: "},
		"archive spoiled": {archives.Images, spoiled, "is damaged, build or copy it again: archive 000-edgebake.test_a_1.tar of image edgebake.test/a:1: sha256 is "},
		"archive of more": {append(archives.Images, archives.Images...), archives.Nodes, "lists 2 container images, but the list of archives to import has 1"},
		"another list":    {append(baked.Images, baked.Images...), baked.Nodes, "lists 2 container images, but the store has 1"},
		"no store at all": {baked.Images, nil, store.MetaDB},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := VerifyImages(withData(t, c, tt.refs, tt.nodes))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, expected %q", err, tt.want)
			}
		})
	}
	if s, err := VerifyImages(withData(t, c, nil, nil)); err != nil || len(s.Images) != 0 {
		t.Errorf("an image without container images: %+v, %v", s, err)
	}
}
