package builder

import (
	"errors"
	"fmt"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/ext4"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// origin is what somebody wrote that an input or a layer comes from. The plan does
// not have it: it decides nothing.
type origin struct {
	kind layerKind
	// One of these, or none: edgebake itself brings it.
	field    string // of the Image
	manifest string // the place in a manifest that imagesFrom names
	flag     string
}

// layerKind says where a layer of the plan goes.
type layerKind int

const (
	kindOther   layerKind = iota
	kindBase              // below all others
	kindOverlay           // over what edgebake renders
)

// blame names the origin of what err is about.
func (o origin) blame(err error) error {
	switch {
	case o.flag != "":
		return fmt.Errorf("%s: %w", o.flag, err)
	case o.manifest != "":
		return fmt.Errorf("%s: %w", o.manifest, err)
	case o.field != "":
		return &configs.FieldError{Path: o.field, Err: err}
	}
	return err
}

// sizeFields are the fields that give partitions their size.
var sizeFields = map[string]string{ondisk.LabelRootA: "disk.root", ondisk.LabelData: "disk.data"}

// place names the origins of what is wrong with layers, their files and container
// images.
func (b *build) place(err error) error {
	var errs []error
	for _, e := range SplitErrors(err) {
		var placed *configs.FieldError
		var layer *tree.LayerError
		var image *images.ImageError
		var size *disk.SizeError
		switch {
		case errors.As(e, &placed):
		case errors.As(e, &size):
			e = &configs.FieldError{Path: sizeFields[size.Label], Err: e}
		case errors.As(e, &layer):
			if o, ok := b.origins[layer.Layer]; ok && o.manifest == "" {
				e = o.blame(withPath(layer))
			} else {
				e = o.blame(e) // one manifest may name several images
			}
		case errors.As(e, &image):
			e = b.origins[imagePrefix+image.Image.Ref].blame(e)
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// withPath is what a layer's error says where something else says which layer it
// is.
func withPath(l *tree.LayerError) error {
	if l.Path == "" {
		return l.Err
	}
	return fmt.Errorf("%s: %w", l.Path, l.Err)
}

// byLayer is what a file system says that it cannot hold, as problems of the
// layers that the files come from.
func byLayer(err error) error {
	var found []error
	var collect func(error)
	collect = func(err error) {
		if n, ok := err.(*ext4.NodeError); ok {
			found = append(found, &tree.LayerError{Layer: n.Node.Layer, Path: n.Node.Path, Err: n.Err})
			return
		}
		switch e := err.(type) {
		case interface{ Unwrap() []error }:
			for _, e := range e.Unwrap() {
				collect(e)
			}
		case interface{ Unwrap() error }:
			collect(e.Unwrap())
		}
	}
	collect(err)
	if len(found) == 0 {
		return err
	}
	return errors.Join(found...)
}

// isOverlay reports whether a node is of a directory that the user lays over.
func (b *build) isOverlay(n tree.Node) bool { return b.origins[n.Layer].kind == kindOverlay }
