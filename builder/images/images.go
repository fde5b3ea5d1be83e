// Package images puts container images into a disk image, in the form that containerd has after
// pulling and unpacking them. Pods on the node then start without importing anything.
//
// Resolve pins references to digests and selects the platform. Fetch stores each layer once in the
// build's cache, uncompressed. Bake returns files for var/lib/containerd, whose contents are ranges
// of these layers. For runtimes whose store edgebake cannot write, Archives makes archives that the
// node imports at first boot.
//
// Invariants:
//
//   - Every blob is compared with its digest, and every layer with its diffID, before the cache has
//     it under that name.
//   - The result depends only on the pinned digests and the options, not on the order of the images,
//     the time or the cache.
//   - File contents are streamed. Memory grows only with the number of names in an image.
//   - The package writes only to the cache, and needs no privileges.
package images

import (
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Options configures resolving, fetching and baking.
type Options struct {
	// Arch is the GOARCH of the machine that boots the image.
	Arch string
	// KeepLayers also keeps the compressed blobs of layers in the store, so that the node can
	// export its images. Archives need them.
	KeepLayers bool
	// Sandbox is the reference of the pause image. The images must include it.
	Sandbox string
	// ContainerdVersion is the version of containerd on the node, such as "2.2.9".
	ContainerdVersion string
	Registries        []configs.Registry
	// Dir is the directory to which paths in image sources are relative.
	Dir string
	// SourceDate is the time of files and directories for which an image has no time.
	SourceDate time.Time
	// Stall is how long a registry may send nothing; 0 means 30 s.
	Stall time.Duration
	// RetryWait is the pause before the first retry; 0 means 1 s.
	RetryWait time.Duration
	// MaxLayer is the largest uncompressed size of a layer in bytes. MaxFiles is the largest number
	// of files in all images. 0 means DefaultMaxLayer or DefaultMaxFiles.
	MaxLayer, MaxFiles int64
	// Progress, if set, is called after each step. Several goroutines may call it.
	Progress func(Progress)
	// Warn, if set, is called with the cause of a delay, such as a mirror that does not respond.
	// Several goroutines may call it.
	Warn func(text string)
}

// Progress is one step of fetching.
type Progress struct {
	Ref         string
	Blob        imageref.Digest // the fetched layer
	Done, Total int             // number of layers in all images
}

// Descriptor points to a blob, as in the OCI image specification. Plans contain Descriptors. The
// documents of images are decoded with ocispec.Descriptor instead, which accepts digests of any
// form.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      imageref.Digest   `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// describe converts a descriptor from an image's document, and drops the platform and the
// annotations.
func describe(d ocispec.Descriptor) (Descriptor, error) {
	digest, err := imageref.ParseDigest(string(d.Digest))
	return Descriptor{MediaType: d.MediaType, Digest: digest, Size: d.Size}, err
}

// Layer is a layer's blob, with the digest of its uncompressed contents.
type Layer struct {
	Descriptor
	DiffID imageref.Digest `json:"diffID"`
}

// Pinned is a resolved image, as stored in a plan.
type Pinned struct {
	// Ref is the name of the image on the node.
	Ref imageref.Ref `json:"ref"`
	// Source is the source of the blobs.
	Source configs.ContainerImage `json:"source"`
	// Target is the index or manifest to which the reference points.
	Target Descriptor `json:"target"`
	// Manifest is the manifest for the platform. It equals Target unless Target is an index.
	Manifest Descriptor `json:"manifest"`
	// Direct means that the image's name on the node points to Manifest, because containerd would
	// not find Manifest through Target.
	Direct bool       `json:"direct,omitempty"`
	Config Descriptor `json:"config"`
	Layers []Layer    `json:"layers"`
}

// named returns the descriptor to which the image's name on the node points.
func (p *Pinned) named() Descriptor {
	if p.Direct {
		return p.Manifest
	}
	return p.Target
}

// stored yields the blobs of an image in a store or archive, with names for messages. Layers are
// included only if layers is set.
func (p *Pinned) stored(layers bool) iter.Seq2[string, Descriptor] {
	return func(yield func(string, Descriptor) bool) {
		ok := yield("manifest", p.named())
		if p.Manifest.Digest != p.named().Digest {
			ok = ok && yield("manifest", p.Manifest)
		}
		ok = ok && yield("config", p.Config)
		for i, l := range p.Layers {
			ok = ok && layers && yield(fmt.Sprintf("layer %d of %d", i+1, len(p.Layers)), l.Descriptor)
		}
	}
}

// Result is a baked store.
type Result struct {
	// Nodes are the files of the store and their parent directories.
	Nodes  []tree.Node
	Images []ondisk.ImageRef
	Report Report
}

// Report describes the images in a store.
type Report struct {
	Images []ImageReport `json:"images"`
	// Size is the size of all images in bytes: unpacked, or as archives. Layers is the number of
	// distinct layers.
	Size   int64 `json:"size"`
	Layers int   `json:"layers"`
}

// ImageReport describes one image.
type ImageReport struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"`
	// Size is in bytes, as in Report. Shared is the part of Size that other images also use.
	Size   int64 `json:"size"`
	Shared int64 `json:"shared"`
	Layers int   `json:"layers"`
}

// Summary returns a report before any layer is fetched. Its sizes are those of the compressed
// layers.
func Summary(pinned []Pinned) Report {
	users, sizes := map[imageref.Digest]int{}, map[imageref.Digest]int64{}
	own := make([]map[imageref.Digest]bool, len(pinned)) // an image may contain one layer twice
	for n, p := range pinned {
		own[n] = map[imageref.Digest]bool{}
		for _, l := range p.Layers {
			if !own[n][l.Digest] {
				own[n][l.Digest] = true
				users[l.Digest]++
				sizes[l.Digest] = l.Size
			}
		}
	}
	r := Report{Layers: len(sizes)}
	for _, size := range sizes {
		r.Size += size
	}
	for n, p := range pinned {
		ir := ImageReport{Ref: p.Ref.String(), Digest: string(p.Target.Digest), Layers: len(p.Layers)}
		for digest := range own[n] {
			ir.Size += sizes[digest]
			if users[digest] > 1 {
				ir.Shared += sizes[digest]
			}
		}
		r.Images = append(r.Images, ir)
	}
	return r
}

// Text returns the report as a table. what describes the total size, for example "compressed".
func (r Report) Text(what string) string {
	ref, digest := len("IMAGE"), len("DIGEST")
	for _, i := range r.Images {
		ref, digest = max(ref, len(i.Ref)), max(digest, len(i.Digest))
	}
	var b strings.Builder
	if len(r.Images) == 0 {
		return "no container images\n"
	}
	fmt.Fprintf(&b, "%-*s  %-*s  %10s  %10s\n", ref, "IMAGE", digest, "DIGEST", "SIZE", "SHARED")
	for _, i := range r.Images {
		fmt.Fprintf(&b, "%-*s  %-*s  %10s  %10s\n", ref, i.Ref, digest, i.Digest, bytesize.Human(i.Size), bytesize.Human(i.Shared))
	}
	fmt.Fprintf(&b, "%s, %s, %s %s\n", configs.Count(len(r.Images), "image"), configs.Count(r.Layers, "layer"), bytesize.Human(r.Size), what)
	return b.String()
}

// isIndex reports whether a media type is that of an index.
func isIndex(mediaType string) bool {
	return mediaType == ociIndex ||
		mediaType == "application/vnd.docker.distribution.manifest.list.v2+json"
}

const (
	ociIndex       = "application/vnd.oci.image.index.v1+json"
	ociManifest    = "application/vnd.oci.image.manifest.v1+json"
	ociLayer       = "application/vnd.oci.image.layer.v1.tar"
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerConfig   = "application/vnd.docker.container.image.v1+json"
	dockerLayer    = "application/vnd.docker.image.rootfs.diff.tar"
)

func isManifest(mediaType string) bool {
	return mediaType == ociManifest || mediaType == dockerManifest
}

func isConfig(mediaType string) bool {
	return mediaType == "application/vnd.oci.image.config.v1+json" || mediaType == dockerConfig
}

// mayBeCompressed reports whether a layer with this media type may be compressed. containerd
// detects the compression of every layer except OCI's plain tar.
func mayBeCompressed(mediaType string) (bool, error) {
	for _, base := range []string{
		ociLayer,
		"application/vnd.oci.image.layer.nondistributable.v1.tar",
		dockerLayer,
		"application/vnd.docker.image.rootfs.foreign.diff.tar",
	} {
		rest, ok := strings.CutPrefix(mediaType, base)
		if !ok {
			continue
		}
		switch rest {
		case "":
			return strings.HasPrefix(base, "application/vnd.docker."), nil
		case "+gzip", ".gzip", "+zstd", ".zstd":
			return true, nil
		}
	}
	return false, fmt.Errorf("the media type %q is not that of a container image's layer; have the image pushed again with tar, tar+gzip or tar+zstd", mediaType)
}

// KnownContainerd returns the minor versions of containerd with which a baked store was tested (see
// docs/images.md), the oldest first.
func KnownContainerd() []string {
	return []string{"1.7", "2.0", "2.1", "2.2", "2.3", "2.4"}
}

// CheckContainerd rejects a version of containerd whose store format is unknown. version may be
// Debian's ("1.7.24~ds1-6") and may begin with "v".
func CheckContainerd(version string) error {
	v := strings.TrimPrefix(version, "v")
	parts := strings.SplitN(v, ".", 3)
	if len(parts) >= 2 && slices.Contains(KnownContainerd(), parts[0]+"."+leadingDigits(parts[1])) {
		return nil
	}
	return fmt.Errorf("edgebake cannot bake images for containerd %q, only for %s: choose one of these versions, or set imageStore.mode: import",
		version, strings.Join(KnownContainerd(), ", "))
}

func leadingDigits(s string) string {
	return s[:len(s)-len(strings.TrimLeft(s, "0123456789"))]
}
