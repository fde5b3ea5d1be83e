package builder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// imageOrigin returns a container image's source as an input for the lock.
func imageOrigin(i configs.ContainerImage) (plan.Input, error) {
	raw, err := canonical(configs.ContainerImage{Ref: i.Ref, Layout: i.Layout, Archive: i.Archive})
	return plan.Input{Make: makeImage, Recipe: raw}, err
}

// isPinned reports whether an image must have the digest in the lock. A local archive or layout may
// change between builds, so its digest is binding only with --locked.
func (b *resolver) isPinned(i configs.ContainerImage) bool {
	return b.Locked || i.Layout == "" && i.Archive == ""
}

// checkStore returns an error if edgebake cannot bake the store of this containerd version.
func checkStore(img *configs.Image) error {
	if img.ImageStore.Mode == "import" || img.Containerd.Debian {
		return nil
	}
	return fieldError("containerd.version", images.CheckContainerd(img.Containerd.Version))
}

// resolveImages pins the container images. A digest in the lock has the same effect as one in the
// Image.
func (b *resolver) resolveImages(ctx context.Context) error {
	listing, listErr := images.List(b.img, b.Dir)
	list := listing.Images
	for _, n := range append(b.img.Warnings(), listing.Notes...) {
		b.event(Event{Step: "images", State: StateWarning, Text: n.Error()})
	}
	if len(list) == 0 {
		return listErr
	}
	wanted := make([]configs.ContainerImage, len(list))
	inputs := map[configs.ContainerImage]plan.Input{}
	names := map[configs.ContainerImage]imageref.Ref{}
	for n, w := range list {
		i := w.ContainerImage
		in, err := imageOrigin(i)
		if err != nil {
			return err
		}
		if sha, ok := b.Lock.Pinned(imagePrefix+i.Ref, in); ok && i.Digest == "" && b.isPinned(i) {
			i.Digest = "sha256:" + sha
		}
		wanted[n] = i
		inputs[i], names[i] = in, w.Name
		b.origins[imagePrefix+i.Ref] = origin{field: w.Field, place: w.Manifest}
	}
	pinned, pinErr := b.pinImages(ctx, wanted)
	// Report errors of the document before anything is compiled.
	if err := errors.Join(checkStore(b.img), b.origins.locate(errors.Join(listErr, pinErr))); err != nil {
		return err
	}
	for n := range pinned {
		p := &pinned[n]
		// On the node, the image has the name from the document.
		p.Ref = names[p.Source]
		in := inputs[p.Source]
		in.SHA256, in.Digest = p.Target.Digest.Hex(), string(p.Manifest.Digest)
		b.add(b.origins[imagePrefix+p.Source.Ref], imagePrefix+p.Source.Ref, in, nil)
	}
	// The disk must not depend on the order of the images in the document.
	slices.SortFunc(pinned, func(a, b images.Pinned) int { return strings.Compare(a.Ref.String(), b.Ref.String()) })
	b.plan.Images = pinned
	return nil
}

// pinImages looks up the images at their sources. If each has a digest, it caches the result, so
// that a locked build with cached inputs needs no network.
func (b *resolver) pinImages(ctx context.Context, wanted []configs.ContainerImage) ([]images.Pinned, error) {
	for _, i := range wanted {
		if i.Digest == "" {
			return images.Resolve(ctx, b.Cache, wanted, imageOptions(b.buildEnv, b.img, b.plan))
		}
	}
	key, err := canonical(wanted)
	if err != nil {
		return nil, err
	}
	recipe := "pinned images 3 " + b.img.Arch + " " + string(key)
	pinned, err := b.pinOnce(ctx, recipe, wanted)
	switch {
	case errors.Is(err, errNotPinned):
	case err != nil || images.DocumentsCached(b.Cache, pinned):
		return pinned, err
	}
	// The cached result is invalid, or manifests that it names are missing: look the images up
	// again.
	if err := b.Cache.Forget(recipe); err != nil {
		return nil, err
	}
	return b.pinOnce(ctx, recipe, wanted)
}

// pinOnce looks up the images, unless the cache already has the result.
func (b *resolver) pinOnce(ctx context.Context, recipe string, wanted []configs.ContainerImage) ([]images.Pinned, error) {
	sha, err := b.Cache.Make(ctx, recipe, func(ctx context.Context, w io.Writer) error {
		pinned, err := images.Resolve(ctx, b.Cache, wanted, imageOptions(b.buildEnv, b.img, b.plan))
		if err != nil {
			return err
		}
		return json.NewEncoder(w).Encode(pinned)
	})
	if err != nil {
		return nil, err
	}
	raw, err := b.Cache.ReadBlob(sha)
	if err != nil {
		return nil, err
	}
	return readPinned(raw, wanted)
}

// errNotPinned means that a cached result is not for the requested images.
var errNotPinned = errors.New("the cached container images are not the requested ones")

// readPinned reads a cached result and checks that it is for the requested images.
func readPinned(raw []byte, wanted []configs.ContainerImage) ([]images.Pinned, error) {
	var pinned []images.Pinned
	if err := json.Unmarshal(raw, &pinned); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotPinned, err)
	}
	missing := map[configs.ContainerImage]bool{}
	for _, i := range wanted {
		missing[i] = true
	}
	for _, p := range pinned {
		if !missing[p.Source] {
			return nil, fmt.Errorf("%w: the cache has %s", errNotPinned, p.Source.Ref)
		}
		delete(missing, p.Source)
	}
	if len(pinned) == 0 {
		return nil, fmt.Errorf("%w: the cache has none", errNotPinned)
	}
	return pinned, nil
}

// resolveOCI pins a container image that is used as the base.
func (b *resolver) resolveOCI(ctx context.Context, src configs.OCISource) error {
	i := configs.ContainerImage(src)
	raw, err := canonical(ociRecipe{src, b.date.Unix()})
	if err != nil {
		return err
	}
	in := plan.Input{Make: makeOCI, Recipe: raw}
	if sha, ok := b.Lock.Pinned(inputBase, in); ok && b.isPinned(i) {
		// The tag may point to another image by now: use the lock's digest.
		in.SHA256, in.Digest = sha, b.Lock.Inputs[inputBase].Digest
		b.add(origin{field: "base.oci"}, inputBase, in, &plan.Layer{})
		return nil
	}
	p, err := pinOCI(ctx, b.buildEnv, i, imageOptions(b.buildEnv, b.img, b.plan))
	if err != nil {
		return err
	}
	in.Digest = string(p.Target.Digest)
	if sha, ok := b.Cache.Lookup(ociKey(p, b.date.Unix())); ok && b.Base == "" {
		in.SHA256 = sha
	}
	b.add(origin{field: "base.oci"}, inputBase, in, &plan.Layer{})
	return nil
}

func pinOCI(ctx context.Context, r *buildEnv, i configs.ContainerImage, o images.Options) (images.Pinned, error) {
	if i.Ref == "" {
		i.Ref = images.Sole
	}
	pinned, err := images.Resolve(ctx, r.Cache, []configs.ContainerImage{i}, o)
	if err != nil {
		return images.Pinned{}, fieldError("base.oci", err)
	}
	return pinned[0], nil
}

// ociRecipe describes a base made from a container image. The digest of the image is in the input.
type ociRecipe struct {
	Source configs.OCISource `json:"source"`
	// Date is the time of directories that no layer contains, in seconds since 1970.
	Date int64 `json:"date"`
}

func ociKey(p images.Pinned, date int64) string {
	return fmt.Sprintf("oci root 3 %d %s", date, p.Manifest.Digest)
}

// makeOCI merges a container image's layers into one tar.
func (b *executor) makeOCI(ctx context.Context, in plan.Input) (string, error) {
	var r ociRecipe
	if err := json.Unmarshal(in.Recipe, &r); err != nil {
		return "", fmt.Errorf("reading the recipe: %w", err)
	}
	i := configs.ContainerImage(r.Source)
	if i.Digest == "" {
		i.Digest = in.Digest
	}
	o := imageOptions(b.buildEnv, b.img, b.plan)
	p, err := pinOCI(ctx, b.buildEnv, i, o)
	if err != nil {
		return "", err
	}
	sha, err := b.flatten(ctx, p, r.Date, o)
	return sha, fieldError("base.oci", err)
}

func (b *executor) flatten(ctx context.Context, p images.Pinned, date int64, o images.Options) (string, error) {
	o.KeepLayers = false
	if err := images.Fetch(ctx, b.Cache, []images.Pinned{p}, o); err != nil {
		return "", err
	}
	var layers []tree.Layer
	for _, l := range p.Layers {
		nodes, err := b.index(l.DiffID.Hex(), string(l.Digest))
		if err != nil {
			return "", err
		}
		layers = append(layers, tree.Layer{Name: string(l.Digest), Nodes: nodes})
	}
	flat, err := tree.Flatten(layers, b.date)
	if err != nil {
		return "", err
	}
	return b.Cache.Make(ctx, ociKey(p, date), func(_ context.Context, w io.Writer) error {
		return tree.WriteTar(w, flat, b.Cache)
	})
}

// Images pins the container images of an Image and nothing else.
func Images(ctx context.Context, img *configs.Image, o Options) ([]images.Pinned, error) {
	b, err := newResolver(ctx, img, o)
	if err != nil {
		return nil, err
	}
	if o.Locked && o.Lock == nil {
		return nil, errNoLock
	}
	if err := b.resolveImages(ctx); err != nil {
		return nil, err
	}
	if o.Locked {
		locked := &plan.Lock{Arch: o.Lock.Arch, Inputs: maps.Clone(o.Lock.Inputs)}
		maps.DeleteFunc(locked.Inputs, func(name string, _ plan.Input) bool { return !strings.HasPrefix(name, imagePrefix) })
		if err := checkLock(locked, b.plan); err != nil {
			return nil, err
		}
	}
	return b.plan.Images, nil
}
