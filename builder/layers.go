package builder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/dpkg"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

// nodes returns the files of a layer of the plan.
func (b *executor) nodes(ctx context.Context, l plan.Layer) (tree.Layer, error) {
	sha := b.input(l.Input).SHA256
	if l.Path != "" {
		size, err := b.Cache.Size(sha)
		if err != nil {
			return tree.Layer{}, &tree.LayerError{Layer: l.Name, Err: err}
		}
		n := tree.Node{Path: l.Path, Layer: l.Name, Inode: &tree.Inode{Mode: l.Mode, MTime: b.date,
			Data: tree.Content{Blob: sha, Size: size}}}
		return tree.Layer{Name: l.Name, Nodes: []tree.Node{n}, Replace: true}, nil
	}
	sha, err := b.archive(ctx, l.Input)
	if err != nil {
		return tree.Layer{}, &tree.LayerError{Layer: l.Name, Err: err}
	}
	nodes, err := b.index(sha, l.Name)
	if err != nil {
		return tree.Layer{}, err
	}
	if l.Input == inputBase {
		nodes = cleanBase(nodes)
	}
	if l.Members != nil {
		if nodes, err = b.members(nodes, l); err != nil {
			return tree.Layer{}, err
		}
	}
	return tree.Layer{Name: l.Name, Nodes: nodes, Replace: l.Replace || l.Members != nil}, nil
}

// archive returns the digest of an input's tar in the cache, after uncompressing it if necessary.
func (b *executor) archive(ctx context.Context, input string) (string, error) {
	if input == inputBase && b.given != "" {
		return b.given, nil
	}
	return fetch.Uncompressed(ctx, b.Cache, b.input(input).SHA256, maxArchive)
}

// index returns the files in an uncompressed tar of the cache. It reads the base only once.
func (b *executor) index(sha, layer string) ([]tree.Node, error) {
	if layer == inputBase && sha == b.base.sha {
		return b.base.nodes, nil
	}
	size, err := b.Cache.Size(sha)
	if err != nil {
		return nil, &tree.LayerError{Layer: layer, Err: err}
	}
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return nil, &tree.LayerError{Layer: layer, Err: err}
	}
	defer f.Close()
	return tree.FromTar(f, size, sha, layer)
}

// members returns the files of a release's archive that the layer l selects. It ignores the times,
// owners and modes in the archive.
func (b *executor) members(nodes []tree.Node, l plan.Layer) ([]tree.Node, error) {
	by := make(map[string]tree.Node, len(nodes))
	for _, n := range nodes {
		by[n.Path] = n
	}
	var out []tree.Node
	var errs []error
	for _, from := range slices.Sorted(maps.Keys(l.Members)) {
		n, ok := by[from]
		if !ok || !n.IsRegular() {
			errs = append(errs, &tree.LayerError{Layer: l.Name, Err: fmt.Errorf("the archive has no file %s", from)})
			continue
		}
		out = append(out, tree.Node{Path: l.Members[from], Layer: l.Name, Inode: &tree.Inode{
			Mode: tree.ModeRegular | 0o755, MTime: b.date, Data: n.Data}})
	}
	return out, errors.Join(errs...)
}

// userFiles returns the layers of Image.files.
func userFiles(img *configs.Image, date time.Time, cache *fetch.Cache, inputs map[string]plan.Input) ([]tree.Layer, error) {
	load := func(index int) (tree.Content, error) {
		in, ok := inputs[fileInput(index)]
		if !ok {
			return tree.Content{}, fmt.Errorf("BUG: there is no input %s", fileInput(index))
		}
		sha := in.SHA256
		size, err := cache.Size(sha)
		if err != nil || size == 0 {
			return tree.Content{}, err
		}
		return tree.Content{Blob: sha, Size: size}, nil
	}
	open := func(index int) (io.ReadCloser, error) {
		raw, err := cache.ReadBlob(inputs[fileInput(index)].SHA256)
		return io.NopCloser(bytes.NewReader(raw)), err
	}
	return overlays.Files(img, overlays.Facts{SourceDate: date}, load, open)
}

// packages returns the Debian packages in the base, or nil for another distribution.
func (b *executor) packages(nodes []tree.Node) ([]dpkg.Package, error) {
	for _, n := range nodes {
		if n.Path == dpkgStatusPath && n.IsRegular() {
			data, err := tree.ReadContent(n.Data, b.Cache, maxDpkgStatus)
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", dpkgStatusPath, err)
			}
			return dpkg.ParseStatus(strings.NewReader(string(data)))
		}
	}
	return nil, nil
}
