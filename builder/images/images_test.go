package images

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images/imagetest"
	"github.com/edgebake/edgebake/configs"
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

func bakeLayout(t *testing.T, c *fetch.Cache, o Options, imgs ...imagetest.Image) *Result {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(dir, imgs...); err != nil {
		t.Fatal(err)
	}
	var cs []configs.ContainerImage
	for _, i := range imgs {
		cs = append(cs, configs.ContainerImage{Ref: i.Ref, Layout: dir})
	}
	pinned, err := Resolve(t.Context(), c, cs, o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Bake(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBake(t *testing.T) {
	c := newCache(t)
	r := bakeLayout(t, c, testOptions(), imagetest.Nasty("edgebake.test/nasty:1", "#!"), imagetest.Many("edgebake.test/many:1", 1000))
	if len(r.Images) != 2 {
		t.Fatalf("%d images", len(r.Images))
	}
	t.Log("\n" + r.Report.Text())
	if d := os.Getenv("KEEPDIR"); d != "" {
		if err := imagetest.Materialize(d, r.Nodes, c); err != nil {
			t.Fatal(err)
		}
	}
}
