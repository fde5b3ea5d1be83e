package oracle

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	baker "github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// pinImages resolves test images, which it writes to a new layout.
func pinImages(t *testing.T, c *fetch.Cache, o baker.Options, imgs ...imagetest.Image) []baker.Pinned {
	t.Helper()
	layout := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(layout, imgs...); err != nil {
		t.Fatal(err)
	}
	var list []configs.ContainerImage
	for _, i := range imgs {
		list = append(list, configs.ContainerImage{Ref: i.Ref, Layout: layout})
	}
	pinned, err := baker.Resolve(t.Context(), c, list, o)
	if err != nil {
		t.Fatal(err)
	}
	o.KeepLayers = true
	if err := baker.Fetch(t.Context(), c, pinned, o); err != nil {
		t.Fatal(err)
	}
	return pinned
}

func openCache(t *testing.T) *fetch.Cache {
	t.Helper()
	c, err := fetch.Open(filepath.Join(t.TempDir(), "cache"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestContainerdRunsFromWrittenDisk starts containerd, as a machine does, on a baked store in a
// file system written by package ext4.
func TestContainerdRunsFromWrittenDisk(t *testing.T) {
	needRoot(t)
	desk.NeedProgram(t, "losetup", "mount")
	c, o := openCache(t), options()
	r, err := baker.Bake(t.Context(), c, pinImages(t, c, o, testImages(hello(t))...), o)
	if err != nil {
		t.Fatal(err)
	}
	d := &disk{t: t, image: filepath.Join(t.TempDir(), "data.img"), mnt: t.TempDir()}
	root := tree.Node{Path: ".", Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: sourceDate}}
	nodes := append([]tree.Node{root}, r.Nodes...)
	eo := ext4.Options{Label: "DATA", UUID: [16]byte{1}, HashSeed: [16]byte{2}, Time: sourceDate, FreeBytes: 256 << 20, FreeInodes: 10000}
	if eo.Size, err = ext4.Size(nodes, eo); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(d.image)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(eo.Size); err != nil {
		t.Fatal(err)
	}
	if _, err := ext4.Write(f, nodes, c, eo); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	d.mount()
	t.Cleanup(d.unmount)
	node := start(t, programs(t, configs.ExampleContainerd), d.mnt)
	node.runsHello("edgebake.test/hello:1")
	if got := node.run("edgebake.test/nasty:1", "list", "/opt"); !strings.Contains(got, "/opt/opq/newer") || strings.Contains(got, "/opt/opq/old1") {
		t.Errorf("the nasty image looks like this:\n%s", got)
	}
	node.stop()
}

// TestImportContract imports the archives of mode import as firstboot does.
func TestImportContract(t *testing.T) {
	needRoot(t)
	c, o := openCache(t), options()
	imgs := testImages(hello(t))[:6]
	r, err := baker.Archives(t.Context(), c, pinImages(t, c, o, imgs...), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range versions() {
		t.Run(version, func(t *testing.T) {
			dir := t.TempDir()
			if err := imagetest.Materialize(dir, r.Nodes, c); err != nil {
				t.Fatal(err)
			}
			raw, err := os.ReadFile(filepath.Join(dir, ondisk.ImportImageDir, ondisk.ImportIndexFile))
			if err != nil {
				t.Fatal(err)
			}
			var index ondisk.ImportIndex
			if err := json.Unmarshal(raw, &index); err != nil {
				t.Fatal(err)
			}
			d := start(t, programs(t, version), dir)
			for _, a := range index.Archives {
				d.ctr("images", "import", "--platform", a.Platform, filepath.Join(dir, ondisk.ImportImageDir, a.File))
				for _, name := range a.Names {
					d.ctr("images", "tag", "--force", a.Ref, name)
				}
				for _, name := range append(a.Names, a.Ref) {
					labels := []string{"images", "label", name}
					for k, v := range a.Labels {
						labels = append(labels, k+"="+v)
					}
					d.ctr(labels...)
				}
				d.waitImage(a.Ref)
			}
			for _, i := range imgs {
				eventually(t, i.Ref+" is pinned and has a digest", func() bool {
					r, err := d.img.ImageStatus(d.call(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: i.Ref}})
					return err == nil && r.Image != nil && r.Image.Pinned && len(r.Image.RepoDigests) == 1
				})
			}
			d.runsHello("edgebake.test/hello:1")
			d.runsHello("edgebake.test/docker:1")
			d.stop()
		})
	}
}
