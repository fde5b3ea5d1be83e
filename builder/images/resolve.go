package images

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/registry"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Resolve pins images: it finds out to which index or manifest each reference points now, and
// selects the manifest for the platform. It stores manifests and configs in the cache, but no
// layers. The result is sorted by reference, without duplicates. The error contains the problems of
// all images.
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
			errs[i] = joined.Each(err, func(e error) error { return &ImageError{imgs[i], e} })
		}
	})
	if i := slices.IndexFunc(errs, fetch.NoSpace); i >= 0 {
		return nil, errs[i] // the other images failed for the same reason
	}
	pinned = slices.DeleteFunc(pinned, func(p *Pinned) bool { return p == nil })
	slices.SortFunc(pinned, func(a, b *Pinned) int { return strings.Compare(a.Ref.String(), b.Ref.String()) })
	var out []Pinned
	byTag := map[string]*Pinned{}
	for _, p := range pinned {
		key := p.Ref.String()
		if p.Ref.Tag != "" {
			key = p.Ref.Repo() + ":" + p.Ref.Tag
		}
		if other := byTag[key]; other != nil {
			if other.Target.Digest != p.Target.Digest {
				errs = append(errs, &ImageError{p.Source, fmt.Errorf("image %s is listed twice with two different images: %s (%s) and %s (%s); keep one, or give one of them another tag",
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

// ImageError is a problem with one image. The caller adds the field or the manifest that needs the
// image.
type ImageError struct {
	Image configs.ContainerImage
	Err   error
}

func (e *ImageError) Error() string { return e.Err.Error() }
func (e *ImageError) Unwrap() error { return e.Err }

func sourceOf(img configs.ContainerImage) string {
	switch {
	case img.Layout != "":
		return "layout " + img.Layout
	case img.Archive != "":
		return "archive " + img.Archive
	}
	return "from its registry"
}

// parallel calls f with 0 to n-1, several calls at a time, since each waits for the network, the
// disk and the processor in turn.
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
	ref, err := imageref.Parse(img.Ref)
	if err != nil {
		return nil, err
	}
	// A pinned digest is not part of the name on the node.
	p := &Pinned{Ref: ref, Source: img}
	named := ref.String()
	if img.Digest != "" {
		if ref.Digest, err = imageref.ParseDigest(img.Digest); err != nil {
			return nil, fmt.Errorf("%s: %w", label(named), err)
		}
		if p.Ref.Digest != "" && p.Ref.Digest != ref.Digest {
			return nil, fmt.Errorf("%s: ref and the field digest (%s) have different digests: keep one of them", label(named), img.Digest)
		}
	}
	src, err := sources.get(ctx, img)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", label(named), err)
	}
	if p.Target, err = findRoot(ctx, c, src, p, ref); err != nil {
		return nil, err
	}
	raw, err := readDoc(ctx, c, src, ref, "manifest", p.Target)
	if err != nil {
		return nil, err
	}
	p.Target.Size = int64(len(raw))
	doc, err := parseManifest(raw, &p.Target.MediaType)
	if err != nil {
		return nil, badBlob("manifest", p.Target, ref, src, err)
	}
	// The digest may belong to the index, or to a manifest in it.
	pinsTarget := ref.Digest == "" || ref.Digest == p.Target.Digest
	p.Manifest = p.Target
	platformKnown := false
	if isIndex(p.Target.MediaType) {
		r := &indexReader{ctx: ctx, cache: c, src: src, ref: ref, arch: o.Arch}
		found, err := r.choose(doc, 0)
		switch {
		case err != nil:
			return nil, err
		case found == nil:
			return nil, badBlob("manifest", p.Target, ref, src, r.nothing())
		}
		p.Manifest, p.Direct, platformKnown = found.Descriptor, found.direct, found.platformKnown
		doc = found.doc
		if !pinsTarget && p.Manifest.Digest == ref.Digest {
			pinsTarget = true
			p.Target, p.Direct = p.Manifest, false
		}
	}
	if !pinsTarget {
		return nil, fmt.Errorf("%s%s: the name now refers to %s, but %s is pinned; if the change is intended, pin the new digest", label(named), from(src.name()), p.Target.Digest, ref.Digest)
	}
	if err := p.readConfig(ctx, c, src, ref, doc, o.Arch, platformKnown); err != nil {
		return nil, err
	}
	return p, nil
}

// findRoot returns the index or manifest to which a reference points. Its errors name the image.
func findRoot(ctx context.Context, c *fetch.Cache, src source, p *Pinned, ref imageref.Ref) (Descriptor, error) {
	root, known, err := cachedRoot(c, p.Source, ref)
	if !known && err == nil {
		root, err = src.root(ctx, ref)
	}
	_, remote := src.(*registrySource)
	switch {
	case err == nil, errors.As(err, new(*BlobError)) && !remote:
		return root, err
	case remote:
		return root, blobError("manifest", Descriptor{}, ref, src, err)
	}
	return root, fmt.Errorf("%s: %s: %w", label(p.Ref.String()), src.name(), err)
}

// cachedRoot looks up the digest of a registry's image in the cache. With it, a build needs no
// network if the lock pins everything.
func cachedRoot(c *fetch.Cache, img configs.ContainerImage, ref imageref.Ref) (d Descriptor, known bool, err error) {
	if ref.Digest == "" || img.Layout != "" || img.Archive != "" {
		return d, false, nil
	}
	sha := ref.Digest.Hex()
	if !c.Has(sha) {
		return d, false, nil
	}
	raw, err := os.ReadFile(c.BlobPath(sha))
	if err != nil {
		return d, false, err
	}
	d = Descriptor{Digest: ref.Digest, Size: int64(len(raw))}
	_, err = parseManifest(raw, &d.MediaType)
	return d, true, err
}

// parseManifest decodes an index or a manifest as containerd does. It sets the media type to the
// document's own or, if there is none, to OCI's type for the contents. So the type depends on the
// digest alone. It rejects an index whose descriptor says that it is a manifest, and a manifest
// whose descriptor says that it is an index.
func parseManifest(raw []byte, mediaType *string) (manifestDoc, error) {
	var parts struct {
		MediaType string          `json:"mediaType"`
		Config    json.RawMessage `json:"config"`
		Layers    json.RawMessage `json:"layers"`
		Manifests json.RawMessage `json:"manifests"`
		FSLayers  json.RawMessage `json:"fsLayers"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return manifestDoc{}, fmt.Errorf("not a manifest in JSON: %w; the source is damaged, or has no images: use another source", plainJSON(err))
	}
	called := *mediaType
	*mediaType = parts.MediaType
	if *mediaType == "" {
		*mediaType = ociManifest
		if len(parts.Manifests) > 0 {
			*mediaType = ociIndex
		}
	}
	doc := manifestDoc{}
	switch {
	case len(parts.FSLayers) > 0, strings.HasPrefix(*mediaType, "application/vnd.docker.distribution.manifest.v1"):
		return doc, errors.New("this is a docker schema 1 manifest, which containerd no longer supports: push the image again with a current tool")
	case isIndex(called) && isManifest(*mediaType):
		return doc, errIsManifest
	case isManifest(called) && isIndex(*mediaType):
		return doc, errIsIndex
	case isIndex(*mediaType):
		if len(parts.Config) > 0 || len(parts.Layers) > 0 {
			return doc, errIsManifest
		}
		var index ocispec.Index
		err := readStrict(raw, &index)
		return manifestDoc{Manifests: index.Manifests}, err
	case isManifest(*mediaType):
		if len(parts.Manifests) > 0 {
			return doc, errIsIndex
		}
		var m ocispec.Manifest
		err := readStrict(raw, &m)
		return manifestDoc{Config: m.Config, Layers: m.Layers}, err
	}
	return doc, fmt.Errorf("the media type %q is neither a manifest nor an index of a container image; name an image", *mediaType)
}

var (
	errIsManifest = errors.New("the descriptor has the media type of an index, but the blob is a manifest: have the image pushed again")
	errIsIndex    = errors.New("the descriptor has the media type of a manifest, but the blob is an index: have the image pushed again")
)

// readStrict decodes a document into containerd's own type. containerd could not run an image that
// readStrict rejects.
func readStrict(raw []byte, into any) error {
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("containerd cannot read the document: %w; have the image built again", plainJSON(err))
	}
	return nil
}

// checkRun rejects settings with which runc could start no container of the image.
func checkRun(c *ocispec.ImageConfig) error {
	for i, e := range c.Env {
		if !strings.Contains(e, "=") || strings.Contains(e, "\x00") {
			return fmt.Errorf("config.Env[%d] is %q, expected NAME=VALUE: no container of the image would start", i, e)
		}
	}
	if c.WorkingDir != "" && !path.IsAbs(c.WorkingDir) {
		return fmt.Errorf("config.WorkingDir is %q, expected an absolute path: no container of the image would start", c.WorkingDir)
	}
	return nil
}

// plainJSON rewrites the message of a JSON error without Go's types.
func plainJSON(err error) error {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		want := map[reflect.Kind]string{
			reflect.Slice: "a list", reflect.Map: "an object", reflect.Struct: "an object", reflect.String: "a string",
			reflect.Bool: "true or false", reflect.Int: "a number", reflect.Int64: "a number",
		}[wrong.Type.Kind()]
		return fmt.Errorf("%s is a JSON %s, expected %s", cmp.Or(wrong.Field, "the document"), wrong.Value, cmp.Or(want, "another kind of value"))
	}
	return err
}

// indexReader selects the manifest for a platform in an index.
type indexReader struct {
	ctx   context.Context
	cache *fetch.Cache
	src   source
	ref   imageref.Ref
	arch  string

	have []string // platforms in the index, for a message
	errs []error  // entries that cannot be read
	read int      // number of documents read
}

// chosen is the manifest selected in an index.
type chosen struct {
	Descriptor
	doc manifestDoc
	// direct means that containerd would not find the manifest, because it examines only one entry
	// of an index.
	direct bool
	// platformKnown means that the index gives a platform. It takes precedence over the config's.
	platformKnown bool
}

const (
	maxIndexes  = 8   // largest nesting depth of indexes
	maxIndexDoc = 100 // largest number of documents that are read to find platforms
)

// choose searches an index in the same order as containerd: entries for the platform, then entries
// without a platform, whose configs contain it. containerd stops after one entry. choose continues,
// and then the image's name must point to the manifest itself. It returns nil if no entry matches.
func (r *indexReader) choose(index manifestDoc, depth int) (*chosen, error) {
	if depth > maxIndexes {
		r.errs = append(r.errs, fmt.Errorf("more than %d indexes are nested; name the manifest by its digest", maxIndexes))
		return nil, nil
	}
	var fitting, noPlatform []ocispec.Descriptor
	for _, d := range index.Manifests {
		switch {
		case d.Platform == nil:
			noPlatform = append(noPlatform, d)
		case fits(*d.Platform, r.arch):
			fitting = append(fitting, d)
		}
		if d.Platform != nil && d.Platform.OS != "unknown" { // not an attestation
			r.have = append(r.have, platformName(*d.Platform))
		}
	}
	for n, d := range append(fitting, noPlatform...) {
		found, err := r.entry(d, depth)
		if err != nil && !errors.Is(err, context.Canceled) && !unanswered(err) {
			r.errs = append(r.errs, err)
			continue
		}
		if err != nil || found != nil {
			if found != nil {
				found.direct = found.direct || n > 0 || depth > 0
			}
			return found, err
		}
	}
	return nil, nil
}

// unanswered reports whether the registry may have an entry that it failed to return. Then another
// entry must not be selected, since the image would depend on the day of the build.
func unanswered(err error) bool {
	switch e := err.(type) {
	case *registry.Error:
		var te *transport.Error
		return !errors.As(e.Err, &te) || te.StatusCode != http.StatusNotFound
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), unanswered)
	case interface{ Unwrap() error }:
		return unanswered(e.Unwrap())
	}
	return false
}

// entry checks one entry of an index. It returns nil if the entry does not match.
func (r *indexReader) entry(e ocispec.Descriptor, depth int) (*chosen, error) {
	if !isIndex(e.MediaType) && !isManifest(e.MediaType) {
		return nil, nil
	}
	if r.read++; r.read > maxIndexDoc {
		return nil, nil
	}
	d, err := listed("manifest", e, r.ref, r.src)
	if err != nil {
		return nil, err
	}
	raw, err := readDoc(r.ctx, r.cache, r.src, r.ref, "manifest", d)
	if err != nil {
		return nil, err
	}
	d.Size = int64(len(raw))
	doc, err := parseManifest(raw, &d.MediaType)
	if err != nil {
		return nil, badBlob("manifest", d, r.ref, r.src, err)
	}
	if isIndex(d.MediaType) {
		return r.choose(doc, depth+1)
	}
	if e.Platform == nil {
		if !isConfig(doc.Config.MediaType) {
			return nil, nil // an attestation or another artifact
		}
		config, err := listed("config", doc.Config, r.ref, r.src)
		if err != nil {
			return nil, err
		}
		raw, err := readDoc(r.ctx, r.cache, r.src, r.ref, "config", config)
		if err != nil {
			return nil, err
		}
		var of ocispec.Platform
		if err := json.Unmarshal(raw, &of); err != nil {
			return nil, badBlob("config", config, r.ref, r.src, plainJSON(err))
		}
		r.have = append(r.have, platformName(of))
		if !fits(of, r.arch) {
			return nil, nil
		}
	}
	return &chosen{Descriptor: d, doc: doc, platformKnown: e.Platform != nil}, nil
}

// nothing returns the error for an index without a matching manifest. It contains the reason.
func (r *indexReader) nothing() error {
	if len(r.errs) > 0 {
		return errors.Join(r.errs...)
	}
	if r.read > maxIndexDoc {
		return fmt.Errorf("more than %d entries of the index have no platform; name one entry by its digest", maxIndexDoc)
	}
	if len(r.have) == 0 {
		return fmt.Errorf("the image has no manifest for linux/%s: choose an image for this architecture, or build the disk image for another arch", r.arch)
	}
	return fmt.Errorf("the image has no manifest for linux/%s, only for %s: choose an image for this architecture, or build the disk image for another arch", r.arch, strings.Join(r.have, ", "))
}

// platformName returns the name of a platform for messages.
func platformName(p ocispec.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// fits reports whether every machine of the architecture arch can run the platform's programs. It
// normalizes names like containerd (platforms.Normalize).
func fits(p ocispec.Platform, arch string) bool {
	os, of, variant := strings.ToLower(p.OS), strings.ToLower(p.Architecture), strings.ToLower(p.Variant)
	switch of {
	case "x86_64", "x86-64":
		of = "amd64"
	case "aarch64":
		of = "arm64"
	}
	if os != "" && os != "linux" || of != arch {
		return false
	}
	switch arch {
	case "amd64":
		return variant == "" || variant == "v1"
	case "arm64":
		return variant == "" || variant == "8" || variant == "v8" || variant == "v8.0"
	}
	return variant == ""
}

// readConfig reads the image's config and assigns its diffIDs to the layers.
func (p *Pinned) readConfig(ctx context.Context, c *fetch.Cache, src source, ref imageref.Ref, doc manifestDoc, arch string, platformKnown bool) error {
	for _, d := range append([]ocispec.Descriptor{doc.Config}, doc.Layers...) {
		if d.Size < 0 {
			return badBlob("manifest", p.Manifest, ref, src, fmt.Errorf("the manifest lists %s with the size %d; have the image pushed again", d.Digest, d.Size))
		}
	}
	var err error
	p.Config, err = listed("config", doc.Config, ref, src)
	if !isConfig(p.Config.MediaType) {
		return badBlob("config", p.Config, ref, src, fmt.Errorf("the media type %q is not that of a container image's config; this is another kind of artifact and cannot be run; name an image", p.Config.MediaType))
	}
	if err != nil {
		return err
	}
	raw, err := readDoc(ctx, c, src, ref, "config", p.Config)
	if err != nil {
		return err
	}
	var image ocispec.Image
	if err := readStrict(raw, &image); err != nil {
		return badBlob("config", p.Config, ref, src, err)
	}
	fail := func(format string, args ...any) error {
		return badBlob("config", p.Config, ref, src, fmt.Errorf(format, args...))
	}
	if err := checkRun(&image.Config); err != nil {
		return fail("%w; have the image built again", err)
	}
	// As in containerd, the index's platform takes precedence, and a config without a platform fits
	// any. The config's variant is ignored, because without an index the reference names the
	// manifest itself.
	if platform := image.Platform; !platformKnown && platform.Architecture != "" && !fits(ocispec.Platform{OS: platform.OS, Architecture: platform.Architecture}, arch) {
		return fail("the image is for %s, not for linux/%s: choose an image for this architecture, or build the disk image for another arch", platformName(platform), arch)
	}
	diffIDs := image.RootFS.DiffIDs
	if len(diffIDs) != len(doc.Layers) {
		return fail("the config lists %s, but the manifest lists %d; have the image pushed again", configs.Count(len(diffIDs), "layer"), len(doc.Layers))
	}
	if len(doc.Layers) > maxLayers {
		return badBlob("manifest", p.Manifest, ref, src, fmt.Errorf("the image has %d layers, but the kernel's overlayfs stacks at most %d: have the image built with fewer", len(doc.Layers), maxLayers))
	}
	var errs []error
	for i, l := range doc.Layers {
		what := fmt.Sprintf("layer %d of %d", i+1, len(doc.Layers))
		d, err1 := describe(l)
		diff, err2 := imageref.ParseDigest(string(diffIDs[i]))
		if err := errors.Join(err1, err2); err != nil {
			errs = append(errs, badBlob(what, d, ref, src, err))
		}
		if _, err := mayBeCompressed(l.MediaType); err != nil {
			errs = append(errs, badBlob(what, d, ref, src, err))
		}
		p.Layers = append(p.Layers, Layer{d, diff})
	}
	return errors.Join(errs...)
}
