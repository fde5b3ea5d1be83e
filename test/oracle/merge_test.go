package oracle

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/store/merge"
	"github.com/edgebake/edgebake/ondisk/tree"
	imageupdate "github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/imagetest"
)

// TestContainerdAfterMerge merges a new system's images into the store of a node whose containerd
// has containers and an image that it imported itself.
func TestContainerdAfterMerge(t *testing.T) {
	needRoot(t)
	program := hello(t)
	entry := map[string]any{"Entrypoint": []string{"/bin/hello"}}
	base := imagetest.Script(imagetest.File("bin/hello", 0o755, 0, 0, program))
	img := func(ref, own string) imagetest.Image {
		return imagetest.Image{Ref: ref, Config: entry, Layers: []imagetest.Layer{base, imagetest.Script(imagetest.File("own", 0o644, 0, 0, own))}}
	}
	pause := imagetest.Image{Ref: "edgebake.test/pause:1", Config: map[string]any{"Entrypoint": []string{"/bin/hello", "pause"}}, Layers: []imagetest.Layer{base}}
	lay := func(imgs ...imagetest.Image) (string, []string) {
		dir := filepath.Join(t.TempDir(), "layout")
		if _, err := imagetest.WriteLayout(dir, imgs...); err != nil {
			t.Fatal(err)
		}
		var refs []string
		for _, i := range imgs {
			refs = append(refs, i.Ref)
		}
		return dir, refs
	}
	oldLayout, oldRefs := lay(pause, img("edgebake.test/app:1", "v1"), img("edgebake.test/gone:1", "gone"))
	newLayout, newRefs := lay(pause, img("edgebake.test/app:2", "v2"), imagetest.Nasty("edgebake.test/nasty:1", program))
	ownLayout, _ := lay(img("edgebake.test/pulled:1", "pulled"))

	for _, version := range versions() {
		t.Run(version, func(t *testing.T) {
			bin := programs(t, version)
			node, update := t.TempDir(), t.TempDir()
			bake(t, node, oldLayout, options(), oldRefs...)
			bake(t, update, newLayout, options(), newRefs...)
			d := start(t, bin, node)
			d.ctr("images", "import", tarOf(t, ownLayout))
			d.runsHello("edgebake.test/app:1")
			d.runsHello("edgebake.test/pulled:1")
			d.stop()
			report, err := merge.Merge(t.Context(), merge.Options{
				From: filepath.Join(update, store.Root), Into: filepath.Join(node, store.Root)})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%+v", *report)
			verifyDir(t, node)

			d.start()
			have := d.images()
			for ref, want := range map[string]bool{"edgebake.test/pause:1": true, "edgebake.test/app:1": true, "edgebake.test/app:2": true,
				"edgebake.test/nasty:1": true, "edgebake.test/pulled:1": true, "edgebake.test/gone:1": true} {
				if _, ok := have[ref]; ok != want {
					t.Errorf("%s there: %v", ref, ok)
				}
			}
			for _, ref := range []string{"edgebake.test/app:1", "edgebake.test/app:2", "edgebake.test/nasty:1", "edgebake.test/pulled:1"} {
				d.runsHello(ref)
			}
			d.stop()
			d.start()
			d.runsHello("edgebake.test/app:2")
			d.stop()
			verifyDir(t, node)
		})
	}
}

// TestContainerdAfterUpdate stages the images of another system's DATA partition while containerd
// runs, as an update does, and merges them. Afterwards all images are pinned; kubelet may remove
// those that lose their pin.
func TestContainerdAfterUpdate(t *testing.T) {
	needRoot(t)
	program := hello(t)
	entry := map[string]any{"Entrypoint": []string{"/bin/hello"}}
	base := imagetest.Script(imagetest.File("bin/hello", 0o755, 0, 0, program))
	pause := imagetest.Image{Ref: "edgebake.test/pause:1", Config: map[string]any{"Entrypoint": []string{"/bin/hello", "pause"}}, Layers: []imagetest.Layer{base}}
	app := func(ref, own string) imagetest.Image {
		return imagetest.Image{Ref: ref, Config: entry, Layers: []imagetest.Layer{base, imagetest.Script(imagetest.File("own", 0o644, 0, 0, own))}}
	}
	lay := func(imgs ...imagetest.Image) (string, []string) {
		dir := filepath.Join(t.TempDir(), "layout")
		if _, err := imagetest.WriteLayout(dir, imgs...); err != nil {
			t.Fatal(err)
		}
		var refs []string
		for _, i := range imgs {
			refs = append(refs, i.Ref)
		}
		return dir, refs
	}
	oldLayout, oldRefs := lay(pause, app("edgebake.test/app:1", "v1"))
	newLayout, newRefs := lay(pause, app("edgebake.test/app:2", "v2"), imagetest.Nasty("edgebake.test/nasty:1", program))
	images := readData(t, newLayout, newRefs...)

	for _, version := range versions() {
		t.Run(version, func(t *testing.T) {
			node := t.TempDir()
			bake(t, node, oldLayout, options(), oldRefs...)
			d := start(t, programs(t, version), node)
			d.runsHello("edgebake.test/app:1")
			root, staged := filepath.Join(node, store.Root), filepath.Join(node, "staged")
			have, err := store.ReadInUse(filepath.Join(root, store.MetaDB), filepath.Join(root, store.SnapshotterDB))
			if err != nil {
				t.Fatal(err)
			}
			lack := have.Lacks(images.State)
			err = host.Files{Root: node}.WriteTree(t.Context(), "staged", images, func(f func(tree.Node) error) error { return images.Walk(lack, f) })
			if err != nil {
				t.Fatal(err)
			}
			d.stop()
			r, err := merge.Merge(t.Context(), merge.Options{From: staged, Into: root})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(staged); err != nil {
				t.Fatal(err)
			}
			t.Logf("%+v", *r)
			verifyDir(t, node)

			d.start()
			for _, ref := range []string{"edgebake.test/pause:1", "edgebake.test/app:1", "edgebake.test/app:2", "edgebake.test/nasty:1"} {
				if pinned, ok := d.images()[ref]; !ok || !pinned {
					t.Errorf("%s: there %v, pinned %v", ref, ok, pinned)
				}
			}
			d.runsHello("edgebake.test/app:1")
			d.runsHello("edgebake.test/app:2")
			if have := d.run("edgebake.test/nasty:1", "list", "/opt") + "\n"; !strings.Contains(have, "/opt/a/b/deep\n") || strings.Contains(have, "/opt/opq/old1\n") {
				t.Errorf("/opt of the nasty image: %q", have)
			}

			var app1 string
			for _, i := range have.Images {
				if i.Name == "edgebake.test/app:1" {
					app1 = i.Digest
				}
			}
			label := func(value string) {
				for _, i := range have.Images {
					if i.Digest == app1 {
						d.ctr("images", "label", i.Name, store.LabelPinned+"="+value)
					}
				}
			}
			label("")
			eventually(t, "app:1 is not pinned", func() bool { pinned, ok := d.images()["edgebake.test/app:1"]; return ok && !pinned })
			d.runsHello("edgebake.test/app:1")
			label("pinned")
			eventually(t, "app:1 is pinned", func() bool { return d.images()["edgebake.test/app:1"] })
			if !d.images()["edgebake.test/app:2"] {
				t.Error("app:2 has lost its pin too")
			}
			d.stop()
			verifyDir(t, node)
		})
	}
}

// readData writes the images of a layout to a DATA partition, and reads its store.
func readData(t *testing.T, layout string, refs ...string) *imageupdate.Images {
	t.Helper()
	r, c := bakeNodes(t, layout, options(), refs...)
	nodes := []tree.Node{{Path: ".", Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: sourceDate}}}
	for _, n := range r.Nodes {
		if p, ok := strings.CutPrefix(n.Path, "var/"); ok {
			n.Path = p
			nodes = append(nodes, n)
		}
	}
	o := ext4.Options{Label: "DATA", UUID: [16]byte{1}, HashSeed: [16]byte{2}, Time: sourceDate, FreeBytes: 8 << 20, FreeInodes: 100}
	var err error
	if o.Size, err = ext4.Size(nodes, o); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "data.img"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(o.Size); err != nil {
		t.Fatal(err)
	}
	if _, err := ext4.Write(f, nodes, c, o); err != nil {
		t.Fatal(err)
	}
	images, err := imageupdate.ReadImages(f)
	if err != nil {
		t.Fatal(err)
	}
	return images
}
