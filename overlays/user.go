package overlays

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// FileLayer returns the name of the layer for files[index] of the Image.
func FileLayer(index int) string { return fmt.Sprintf("files[%d]", index) }

// Files returns up to two layers for Image.files: files that may only be added, and files that may
// replace others. open opens the source of files[index]; load stores it and returns its content.
func Files(img *configs.Image, f Facts, load func(index int) (tree.Content, error), open func(index int) (io.ReadCloser, error)) ([]tree.Layer, error) {
	add := &layer{now: f.SourceDate}
	replace := &layer{now: f.SourceDate}
	var errs []error
	for i, file := range img.Files {
		inode, err := fileInode(img, i, load, open)
		if err != nil {
			errs = append(errs, &configs.FieldError{Path: fmt.Sprintf("files[%d]", i), Err: err})
			continue
		}
		b := add
		if file.Replace {
			b = replace
		}
		b.add(strings.TrimPrefix(file.Path, "/"), inode)
		b.nodes[len(b.nodes)-1].Layer = FileLayer(i)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	var layers []tree.Layer
	for _, l := range []struct {
		b       *layer
		name    string
		replace bool
	}{{add, "files", false}, {replace, "files (replace)", true}} {
		if len(l.b.nodes) == 0 {
			continue
		}
		layers = append(layers, tree.Layer{Name: l.name, Nodes: l.b.nodes, Replace: l.replace})
	}
	return layers, nil
}

func fileInode(img *configs.Image, index int, load func(int) (tree.Content, error), open func(int) (io.ReadCloser, error)) (tree.Inode, error) {
	file := img.Files[index]
	i := tree.Inode{UID: file.UID, GID: file.GID}
	if file.Link != "" {
		i.Mode, i.Target = tree.ModeSymlink|0o777, file.Link
		return i, nil
	}
	mode := uint64(0o644)
	if file.Mode != "" {
		var err error
		if mode, err = strconv.ParseUint(file.Mode, 8, 12); err != nil {
			return i, fmt.Errorf("mode %q is not octal, like \"0644\"", file.Mode)
		}
	}
	i.Mode = tree.ModeRegular | uint32(mode)
	var text string
	if file.Contents != nil {
		text = *file.Contents
	}
	switch {
	case file.Source != "" && !file.Template:
		c, err := load(index)
		i.Data = c
		return i, err
	case file.Source != "":
		r, err := open(index)
		if err != nil {
			return i, err
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		if err != nil {
			return i, fmt.Errorf("reading template %s: %w", file.Source, err)
		}
		text = string(b)
	}
	if file.Template {
		var err error
		if text, err = img.RenderFile(text); err != nil {
			return i, err
		}
	}
	i.Data = tree.Bytes([]byte(text))
	return i, nil
}
