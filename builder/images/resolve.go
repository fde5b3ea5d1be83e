package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
)

// Resolve pins images: what each reference means now, and which manifest is
// for our platform. Manifests and configs are in the cache afterwards, layers
// are not. Problems of all images are reported at once. The result is sorted
// by reference and has each image once.
func Resolve(ctx context.Context, c *fetch.Cache, imgs []configs.ContainerImage, o Options) ([]Pinned, error) {
	if o.Arch == "" {
		return nil, errors.New("resolving images: no architecture given")
	}
	pinned := make([]*Pinned, len(imgs))
	errs := make([]error, len(imgs))
	sources := newSources(c, &o)
	defer sources.close()
	parallel(len(imgs), func(i int) {
		var err error
		if pinned[i], err = resolveOne(ctx, c, imgs[i], &o, sources); err != nil {
			errs[i] = wrapEach(imgs[i], err)
		}
	})
	if i := slices.IndexFunc(errs, fetch.NoRoom); i >= 0 {
		return nil, errs[i] // the others could only say so again
	}
	pinned = slices.DeleteFunc(pinned, func(p *Pinned) bool { return p == nil })
	slices.SortFunc(pinned, func(a, b *Pinned) int { return cmp.Compare(a.Ref, b.Ref) })
	var out []Pinned
	byTag := map[string]*Pinned{}
	for _, p := range pinned {
		ref, err := ParseRef(p.Ref)
		if err != nil {
			return nil, err
		}
		key := p.Ref
		if ref.Tag != "" {
			key = ref.Repo() + ":" + ref.Tag
		}
		if other := byTag[key]; other != nil {
			if other.Target.Digest != p.Target.Digest {
				errs = append(errs, &ImageError{p.Source, fmt.Errorf("image %s is listed twice and means two different images: %s (%s) and %s (%s); keep one, or give one another tag",
					key, other.Target.Digest, sourceOf(other.Source), p.Target.Digest, sourceOf(p.Source))})
			}
			continue
		}
		byTag[key] = p
		out = append(out, *p)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return out, nil
}

// ImageError is what is wrong with one image of those that were asked for, so
// that whoever has the list can tell its line.
type ImageError struct {
	Image configs.ContainerImage
	Err   error
}

func (e *ImageError) Error() string { return e.Err.Error() }
func (e *ImageError) Unwrap() error { return e.Err }

// wrapEach ties all that is wrong with an image to it.
func wrapEach(img configs.ContainerImage, err error) error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return &ImageError{img, err}
	}
	var errs []error
	for _, e := range joined.Unwrap() {
		errs = append(errs, wrapEach(img, e))
	}
	return errors.Join(errs...)
}

func sourceOf(img configs.ContainerImage) string {
	switch {
	case img.Layout != "":
		return "layout " + img.Layout
	case img.Archive != "":
		return "archive " + img.Archive
	}
	return "from its registry"
}

// parallel calls f for 0 to n-1, several at a time. What it is used for waits
// for the network, the disk and the processor in turn.
func parallel(n int, f func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(n, max(4, runtime.GOMAXPROCS(0))) {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

func resolveOne(ctx context.Context, c *fetch.Cache, img configs.ContainerImage, o *Options, sources *sources) (*Pinned, error) {
	ref, err := ParseRef(img.Ref)
	if err != nil {
		return nil, err
	}
	// The name on the node is the document's, whoever pinned its digest.
	named := ref.String()
	if img.Digest != "" {
		if _, err := shaOf(img.Digest); err != nil {
			return nil, fmt.Errorf("%s: %w", label(named), err)
		}
		if ref.Digest != "" && ref.Digest != img.Digest {
			return nil, fmt.Errorf("%s: its reference and its digest: %s disagree; keep one", label(named), img.Digest)
		}
		ref.Digest = img.Digest
	}
	src, err := sources.get(ctx, img)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", label(named), err)
	}
	p := &Pinned{Ref: named, Source: img}
	root, known, err := cachedRoot(c, img, ref)
	if !known && err == nil {
		root, err = src.root(ctx, ref)
	}
	if _, remote := src.(*registry); err != nil && remote {
		return nil, blobError("manifest", Descriptor{}, ref, src, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", label(named), src.name(), err)
	}
	p.Target = root
	raw, err := readDoc(ctx, c, src, ref, "manifest", root)
	if err != nil {
		return nil, err
	}
	p.Target.Size = int64(len(raw))
	doc, err := p.parse(raw, &p.Target)
	if err != nil {
		return nil, badBlob("manifest", p.Target, ref, src, err)
	}
	// The digest may pin the index, or the manifest in it.
	pinsTarget := ref.Digest == "" || ref.Digest == p.Target.Digest
	p.Manifest = p.Target
	if isIndex(p.Target.MediaType) {
		if p.Manifest, err = p.choose(ctx, c, src, ref, doc, o.Arch); err != nil {
			return nil, err
		}
		if !pinsTarget && p.Manifest.Digest == ref.Digest {
			pinsTarget = true
			p.Target = p.Manifest
		}
		if raw, err = readDoc(ctx, c, src, ref, "manifest", p.Manifest); err != nil {
			return nil, err
		}
		if doc, err = p.parse(raw, &p.Manifest); err != nil {
			return nil, badBlob("manifest", p.Manifest, ref, src, err)
		}
		if !isManifest(p.Manifest.MediaType) {
			return nil, badBlob("manifest", p.Manifest, ref, src, fmt.Errorf("it is an index inside an index, which containerd does not run either"))
		}
	}
	if !pinsTarget {
		return nil, fmt.Errorf("%s%s: the name now means %s, pinned is %s; if the change is meant, pin the new digest", label(named), from(src.name()), p.Target.Digest, ref.Digest)
	}
	if err := p.readConfig(ctx, c, src, ref, doc, o.Arch); err != nil {
		return nil, err
	}
	return p, nil
}

// cachedRoot is what a registry would answer for a digest, when the cache has
// that already: a build whose lock pins everything needs no network then.
func cachedRoot(c *fetch.Cache, img configs.ContainerImage, ref Ref) (d Descriptor, known bool, err error) {
	if ref.Digest == "" || img.Layout != "" || img.Archive != "" {
		return d, false, nil
	}
	sha, err := shaOf(ref.Digest)
	if err != nil || !c.Has(sha) {
		return d, false, err
	}
	raw, err := os.ReadFile(c.BlobPath(sha))
	if err != nil {
		return d, false, err
	}
	doc, err := parseManifest(raw)
	if err != nil {
		return d, false, err
	}
	d = Descriptor{MediaType: doc.MediaType, Digest: ref.Digest, Size: int64(len(raw))}
	if d.MediaType == "" { // which OCI allows
		d.MediaType = ociManifest
		if len(doc.Manifests) > 0 {
			d.MediaType = ociIndex
		}
	}
	return d, true, nil
}

func parseManifest(raw []byte) (manifestDoc, error) {
	doc, err := parseDoc[manifestDoc](raw)
	if err != nil {
		return doc, fmt.Errorf("it is not JSON of a manifest: %w; the source is damaged, or does not hold images: use another", err)
	}
	return doc, nil
}

// parse reads an index or manifest and settles its media type: what the
// descriptor says and what the document says must agree.
func (p *Pinned) parse(raw []byte, d *Descriptor) (manifestDoc, error) {
	doc, err := parseManifest(raw)
	if err != nil {
		return doc, err
	}
	if doc.MediaType != "" && d.MediaType != "" && doc.MediaType != d.MediaType {
		return doc, fmt.Errorf("it calls itself %s, its descriptor calls it %s; have the image pushed again", doc.MediaType, d.MediaType)
	}
	d.MediaType = cmp.Or(d.MediaType, doc.MediaType)
	switch {
	case isIndex(d.MediaType):
		if len(doc.Layers) > 0 {
			return doc, errors.New("it is an index and has layers; have the image pushed again")
		}
	case isManifest(d.MediaType):
		if len(doc.Manifests) > 0 {
			return doc, errors.New("it is a manifest and lists manifests; have the image pushed again")
		}
	case strings.HasPrefix(d.MediaType, "application/vnd.docker.distribution.manifest.v1"):
		return doc, errors.New("it is a docker schema 1 manifest, which containerd no longer runs; push the image again with a current tool")
	default:
		return doc, fmt.Errorf("its media type %q is neither a manifest nor an index of a container image; name an image", d.MediaType)
	}
	return doc, nil
}

// choose picks the manifest for linux on arch out of an index.
func (p *Pinned) choose(ctx context.Context, c *fetch.Cache, src source, ref Ref, index manifestDoc, arch string) (Descriptor, error) {
	var best *Descriptor
	bestRank := 0
	var have []string
	for i := range index.Manifests {
		d := &index.Manifests[i]
		if d.Platform == nil {
			// Only its config knows what it is for.
			platform, err := p.platformOf(ctx, c, src, ref, *d)
			if err != nil {
				return Descriptor{}, err
			}
			d.Platform = platform
		}
		if d.Platform.OS != "unknown" { // attestations
			have = append(have, d.Platform.String())
		}
		if rank := platformRank(*d.Platform, arch); rank > bestRank {
			best, bestRank = d, rank
		}
	}
	if best == nil {
		return Descriptor{}, badBlob("manifest", p.Target, ref, src,
			fmt.Errorf("it has nothing for linux/%s, but %s; choose an image for this architecture, or build the disk image for another arch", arch, strings.Join(have, ", ")))
	}
	d := *best
	d.Platform, d.Annotations = nil, nil
	return d, nil
}

// platformRank is 0 where the platform does not run on every machine of that
// arch, and higher the better it fits.
func platformRank(p Platform, arch string) int {
	if p.OS != "linux" || p.Architecture != arch {
		return 0
	}
	switch {
	case p.Variant == "":
		return 2
	case arch == "arm64" && p.Variant == "v8", arch == "amd64" && p.Variant == "v1":
		return 1
	}
	return 0
}

func (p *Pinned) platformOf(ctx context.Context, c *fetch.Cache, src source, ref Ref, d Descriptor) (*Platform, error) {
	raw, err := readDoc(ctx, c, src, ref, "manifest", d)
	if err != nil {
		return nil, err
	}
	doc, err := p.parse(raw, &d)
	if err != nil {
		return nil, badBlob("manifest", d, ref, src, err)
	}
	if !isManifest(d.MediaType) || !isConfig(doc.Config.MediaType) {
		return &Platform{OS: "unknown", Architecture: "unknown"}, nil
	}
	raw, err = readDoc(ctx, c, src, ref, "config", doc.Config)
	if err != nil {
		return nil, err
	}
	config, err := parseDoc[configDoc](raw)
	if err != nil {
		return nil, badBlob("config", doc.Config, ref, src, err)
	}
	return &Platform{OS: config.OS, Architecture: config.Architecture, Variant: config.Variant}, nil
}

// readConfig reads the image's config and pairs its diffIDs with the layers.
func (p *Pinned) readConfig(ctx context.Context, c *fetch.Cache, src source, ref Ref, doc manifestDoc, arch string) error {
	p.Config = doc.Config
	p.Config.Annotations, p.Config.Platform = nil, nil
	if !isConfig(p.Config.MediaType) {
		return badBlob("config", p.Config, ref, src, fmt.Errorf("its media type %q is not a container image's config; this is another kind of artifact and cannot be run; name an image", p.Config.MediaType))
	}
	raw, err := readDoc(ctx, c, src, ref, "config", p.Config)
	if err != nil {
		return err
	}
	config, err := parseDoc[configDoc](raw)
	if err != nil {
		return badBlob("config", p.Config, ref, src, fmt.Errorf("it is not JSON of an image config: %w; have the image pushed again", err))
	}
	fail := func(format string, args ...any) error {
		return badBlob("config", p.Config, ref, src, fmt.Errorf(format, args...))
	}
	platform := Platform{Architecture: config.Architecture, OS: config.OS, Variant: config.Variant}
	if platformRank(platform, arch) == 0 {
		return fail("the image is for %s, not for linux/%s; choose an image for this architecture, or build the disk image for another arch", platform, arch)
	}
	if len(config.RootFS.DiffIDs) != len(doc.Layers) {
		return fail("it lists %d layers, the manifest %d; have the image pushed again", len(config.RootFS.DiffIDs), len(doc.Layers))
	}
	if len(doc.Layers) > maxLayers {
		return badBlob("manifest", p.Manifest, ref, src, fmt.Errorf("it has %d layers, the kernel's overlayfs stacks at most %d: have the image built with fewer", len(doc.Layers), maxLayers))
	}
	var errs []error
	for i, l := range doc.Layers {
		l.Annotations, l.Platform = nil, nil
		what := fmt.Sprintf("layer %d of %d", i+1, len(doc.Layers))
		if _, err := mayBeCompressed(l.MediaType); err != nil {
			errs = append(errs, badBlob(what, l, ref, src, err))
		}
		_, err1 := shaOf(l.Digest)
		_, err2 := shaOf(config.RootFS.DiffIDs[i])
		if err := errors.Join(err1, err2); err != nil {
			errs = append(errs, badBlob(what, l, ref, src, err))
		}
		p.Layers = append(p.Layers, Layer{l, config.RootFS.DiffIDs[i]})
	}
	return errors.Join(errs...)
}
