package oracle

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/store/merge"
	"github.com/edgebake/edgebake/test/imagetest"
)

// TestContainerdAfterMerge brings a new system's images to a node whose
// containerd has worked for a while: it has containers, and an image that it
// imported itself.
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
			before := readState(t, filepath.Join(node, store.Root))
			gone := snapshotsOf(t, before, "edgebake.test/gone:1")[0]

			report, err := merge.Merge(t.Context(), merge.Options{
				From: filepath.Join(update, store.Root), Into: filepath.Join(node, store.Root), Keep: []string{"edgebake.test/app:1"}})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%+v", *report)
			verifyDir(t, node)

			d.start()
			have := d.images()
			for ref, want := range map[string]bool{"edgebake.test/pause:1": true, "edgebake.test/app:1": true, "edgebake.test/app:2": true,
				"edgebake.test/nasty:1": true, "edgebake.test/pulled:1": true, "edgebake.test/gone:1": false} {
				if _, ok := have[ref]; ok != want {
					t.Errorf("%s there: %v", ref, ok)
				}
			}
			for _, ref := range []string{"edgebake.test/app:1", "edgebake.test/app:2", "edgebake.test/nasty:1", "edgebake.test/pulled:1"} {
				d.runsHello(ref)
			}
			eventually(t, "containerd frees what was released", func() bool { return !slices.Contains(d.snapshotDirs(), fmt.Sprint(gone)) })
			d.stop()
			d.start()
			d.runsHello("edgebake.test/app:2")
			d.stop()
			verifyDir(t, node)
		})
	}
}
