package builder

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// TestPlace checks that an error about a layer, a file or a container image names the field,
// manifest or flag that it comes from.
func TestPlace(t *testing.T) {
	b := origins{
		inputBase:                   {field: "base.tar", flag: "--base x.tar"},
		"files[2]":                  {field: "files[2].path"},
		"image app:1":               {field: "images[3]"},
		images.LayerName("x/app:1"): {field: "images[3]"},
		images.LayerName("x/web:1"): {place: "web.yaml:7: Deployment web"},
	}
	// Files of container images keep their layer's name through the merge.
	file := func(layer, path string) tree.Node {
		return tree.Node{Layer: layer, Path: path, Inode: &tree.Inode{Mode: tree.ModeRegular}}
	}
	merged, err := tree.Merge([]tree.Layer{{Name: "images", Nodes: []tree.Node{file(images.LayerName("x/app:1"), "a"), file(images.LayerName("x/web:1"), "b"), file("", "c")}}}, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	inFS := errors.New("too long")
	var nodes []error
	for _, n := range merged[1:] {
		nodes = append(nodes, &ext4.NodeError{Node: n, Err: inFS})
	}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{byLayer(fmt.Errorf("DATA: %w", errors.Join(nodes...))), "images[3]: a: too long\nweb.yaml:7: Deployment web: layer image x/web:1: b: too long\nlayer images: c: too long"},
		{byLayer(inFS), "too long"},
		{&tree.LayerError{Layer: inputBase, Err: inFS}, "--base x.tar: too long"},
		{&tree.LayerError{Layer: "files[2]", Path: "etc/x", Err: inFS}, "files[2].path: etc/x: too long"},
		{&tree.LayerError{Layer: "edgebake", Path: "etc/x", Err: inFS}, "layer edgebake: etc/x: too long"},
		{&images.ImageError{Image: configs.ContainerImage{Ref: "app:1"}, Err: inFS}, "images[3]: too long"},
		{&configs.FieldError{Path: "base.oci", Err: &images.ImageError{Image: configs.ContainerImage{Ref: "app:1"}, Err: inFS}}, "base.oci: too long"},
		{nil, ""},
	} {
		got := ""
		if err := b.locate(tt.err); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%v:\n%q, want\n%q", tt.err, got, tt.want)
		}
	}
}
