package media

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/edgebake/edgebake/test/mediatest"
)

// TestCostOfImages checks that the cost of an update includes the layers of container images that
// the machine lacks, but not the parts of them that are already on its disk.
func TestCostOfImages(t *testing.T) {
	dir := t.TempDir()
	cache, err := fetch.Open(filepath.Join(dir, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	noise := mediatest.Noise(3 << 20)
	base := imagetest.Script(imagetest.File("base", 0o644, 0, 0, string(noise[:1<<20])))
	image := func(ref string, own []byte) imagetest.Image {
		return imagetest.Image{Ref: ref, Layers: []imagetest.Layer{base, imagetest.Script(imagetest.File("own", 0o644, 0, 0, string(own)))}}
	}
	made := func(name, plan string, imgs ...imagetest.Image) string {
		layout := filepath.Join(dir, name)
		if _, err := imagetest.WriteLayout(layout, imgs...); err != nil {
			t.Fatal(err)
		}
		var list []configs.ContainerImage
		for _, i := range imgs {
			list = append(list, configs.ContainerImage{Ref: i.Ref, Layout: layout})
		}
		o := images.Options{Arch: "amd64", ContainerdVersion: "2.2.9", SourceDate: mediatest.Date}
		pinned, err := images.Resolve(t.Context(), cache, list, o)
		if err == nil {
			err = images.Fetch(t.Context(), cache, pinned, o)
		}
		if err != nil {
			t.Fatal(err)
		}
		r, err := images.Bake(t.Context(), cache, pinned, o)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name+".raw.zst")
		mediatest.Make(t, path, mediatest.Image{ID: plan, Seed: "same", Data: 1 << 20, FreeRoot: 1 << 20, FreeData: 1 << 20, Initrd: []byte("initrd"), ESP: 48 << 20,
			Store: r.Nodes, Blobs: cache, Info: func(i *ondisk.ImageInfo) { i.Images = r.Images }})
		return path
	}
	first := made("first", strings.Repeat("1", 32), image("edgebake.test/app:1", noise[1<<20:2<<20]))
	// Half of this layer's data is also in the first image.
	second := made("second", strings.Repeat("2", 32), image("edgebake.test/app:2", slices.Concat(noise[2<<20:5<<19], noise[3<<19:2<<20])))
	for _, c := range []struct {
		from, to string
		min, max int64
		images   []string
	}{
		{first, second, 512 << 10, 900 << 10, []string{"edgebake.test/app:2"}},
		{second, second, 0, 0, nil},
	} {
		cost, err := CostOfUpdate(c.from, ImageSource{Name: c.to})
		if err != nil {
			t.Fatal(err)
		}
		if cost.Data < c.min || cost.Data > c.max || !slices.Equal(cost.Images, c.images) || cost.Bytes != cost.Index+cost.Root+cost.Boot+cost.Data+int64(cost.Requests)*update.RequestBytes {
			t.Errorf("%+v", *cost)
		}
	}
}

// TestCostOfADiskWithTwoSystems checks that, if each root has a system, only the one described by
// image.json counts.
func TestCostOfADiskWithTwoSystems(t *testing.T) {
	dir := t.TempDir()
	made := func(name, plan string) string {
		path := filepath.Join(dir, name)
		mediatest.Make(t, path, mediatest.Image{ID: strings.Repeat(plan, 32), Data: 2 << 20, FreeRoot: 1 << 20, Initrd: []byte("initrd"), ESP: 48 << 20})
		return path
	}
	disk, raw, now := made("disk.raw", "1"), made("new.raw", "2"), made("new.raw.zst", "2")
	cost := func() int64 {
		c, err := CostOfUpdate(disk, ImageSource{Name: now})
		if err != nil {
			t.Fatal(err)
		}
		return c.Root
	}
	before := cost()
	if before < 1<<20 {
		t.Fatalf("%d bytes", before)
	}
	file, err := os.ReadFile(disk)
	if err != nil {
		t.Fatal(err)
	}
	place := func(path, label string) (start, end int64) {
		m, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		p, err := m.partition(label)
		if err != nil {
			t.Fatal(err)
		}
		return p.Start, p.Start + p.Size
	}
	other, err := os.ReadFile(raw)
	if err != nil {
		t.Fatal(err)
	}
	from, to := place(raw, ondisk.LabelRootA)
	at, _ := place(disk, ondisk.LabelRootB)
	copy(file[at:], other[from:to])
	if err := os.WriteFile(disk, file, 0o600); err != nil {
		t.Fatal(err)
	}
	if n := cost(); n != before {
		t.Errorf("%d bytes with the new system on ROOT-B, %d without it", n, before)
	}
	// A long name in FAT: edgebake-a.conf becomes edgebake-b.conf.
	file = bytes.Replace(file, []byte("a\x00k\x00e\x00-\x00a\x00"), []byte("a\x00k\x00e\x00-\x00b\x00"), 1)
	if err := os.WriteFile(disk, file, 0o600); err != nil {
		t.Fatal(err)
	}
	if n := cost(); n > before/10 {
		t.Errorf("%d bytes if the machine runs ROOT-B, which has the new system", n)
	}
}
