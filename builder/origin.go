package builder

import (
	"errors"
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

// origin is the place in a document, or the flag, that an input or a layer comes from.
type origin struct {
	// Usually one field is set. All are empty if the input comes with edgebake.
	field string // field of the Image
	place string // place in a manifest of imagesFrom
	flag  string
}

// origins maps the names of inputs and layers to their origins.
type origins map[string]origin

// originsOf returns the origins of a plan's inputs and layers. base is Options.Base.
func originsOf(p *plan.Plan, files int, base string) origins {
	o := origins{}
	for name, in := range p.Inputs {
		o[name] = origin{field: in.Field, place: in.Place}
	}
	if base != "" {
		o[inputBase] = origin{field: o[inputBase].field, flag: "--base " + base}
	}
	for i := range files {
		o[overlays.FileLayer(i)] = origin{field: fmt.Sprintf("files[%d].path", i)}
	}
	for _, img := range p.Images {
		o[images.LayerName(img.Ref.String())] = o[imagePrefix+img.Source.Ref]
	}
	return o
}

// withOrigin adds the origin to err.
func (o origin) withOrigin(err error) error {
	switch {
	case o.flag != "":
		return fmt.Errorf("%s: %w", o.flag, err)
	case o.place != "":
		return fmt.Errorf("%s: %w", o.place, err)
	case o.field != "":
		return &configs.FieldError{Path: o.field, Err: err}
	}
	return err
}

// sizeFields maps partition labels to the Image's fields that set their sizes.
var sizeFields = map[string]string{ondisk.LabelRootA: "disk.root", ondisk.LabelData: "disk.data"}

// locate adds the origin to each error about a layer, a file of a layer, a container image, or the
// size of a partition.
func (all origins) locate(err error) error {
	var errs []error
	for _, e := range joined.Errors(err) {
		var placed *configs.FieldError
		var layer *tree.LayerError
		var image *images.ImageError
		var size *disk.SizeError
		switch {
		case errors.As(e, &placed):
		case errors.As(e, &size):
			e = &configs.FieldError{Path: sizeFields[size.Label], Err: e}
		case errors.As(e, &layer):
			if o, ok := all[layer.Layer]; ok && o.place == "" {
				e = o.withOrigin(withPath(layer))
			} else {
				e = o.withOrigin(e) // several images may come from one manifest: keep the image's name
			}
		case errors.As(e, &image):
			e = all[imagePrefix+image.Image.Ref].withOrigin(e)
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// withPath returns a layer's error with the path of the file but without the name of the layer.
func withPath(l *tree.LayerError) error {
	if l.Path == "" {
		return l.Err
	}
	return fmt.Errorf("%s: %w", l.Path, l.Err)
}

// byLayer converts a file system's errors about nodes to errors about their layers.
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

// isOverlay reports whether a layer is one of the user's overlay directories.
func isOverlay(layer string) bool { return strings.HasPrefix(layer, overlayPrefix) }
