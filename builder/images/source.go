package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// source provides the blobs of images: from a registry, or from the files of an OCI layout or
// archive. The caller must verify them.
type source interface {
	// root returns the index or manifest to which the reference points.
	root(ctx context.Context, ref imageref.Ref) (Descriptor, error)
	// fetch calls take with the content of a blob or manifest. If the transfer fails or returns
	// wrong bytes, fetch may call take again with the content from the beginning.
	fetch(ctx context.Context, ref imageref.Ref, d Descriptor, take func(io.Reader) error) error
	// name returns the name of the source for messages, or "".
	name() string
	io.Closer
}

// openSource opens the source of an image.
func openSource(ctx context.Context, c *fetch.Cache, img configs.ContainerImage, o *Options) (source, error) {
	at := func(p string) string {
		if filepath.IsAbs(p) {
			return p
		}
		return filepath.Join(o.Dir, p)
	}
	switch {
	case img.Layout != "" && img.Archive != "":
		return nil, fmt.Errorf("image %s has both a layout (%s) and an archive (%s); keep one", img.Ref, img.Layout, img.Archive)
	case img.Layout != "":
		return openLayout(at(img.Layout))
	case img.Archive != "":
		return openArchive(ctx, c, at(img.Archive), o)
	}
	return newRegistry(o, at), nil
}

// maxDoc is the largest accepted size of a manifest or config, in bytes. Registries limit manifests
// to 4 MiB.
const maxDoc = 8 << 20

// readDoc reads a manifest, index or config through the cache.
func readDoc(ctx context.Context, c *fetch.Cache, src source, ref imageref.Ref, what string, d Descriptor) ([]byte, error) {
	fail := func(err error) ([]byte, error) { return nil, blobError(what, d, ref, src, err) }
	sha := d.Digest.Hex()
	if d.Size < 0 {
		return fail(fmt.Errorf("the manifest gives its size as %d; have the image pushed again", d.Size))
	}
	if d.Size > maxDoc {
		return fail(fmt.Errorf("the descriptor lists a size of %d bytes; at most %d are accepted", d.Size, maxDoc))
	}
	if !c.Has(sha) {
		err := src.fetch(ctx, ref, d, func(r io.Reader) error {
			_, _, err := c.Put(ctx, sha, io.LimitReader(r, maxDoc+1))
			return err
		})
		if err != nil {
			return fail(err)
		}
	}
	f, err := c.OpenBlob(sha)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxDoc+1))
	if err != nil {
		return fail(err)
	}
	if err := checkSize(d, int64(len(b))); err != nil {
		return fail(err)
	}
	return b, nil
}

// checkSize compares the size of a blob with its descriptor: readers of a store or an archive rely
// on the descriptor.
func checkSize(d Descriptor, size int64) error {
	if size != d.Size {
		return fmt.Errorf("the blob has %d bytes, but its descriptor lists %d: have the image pushed again", size, d.Size)
	}
	return nil
}

// checkCached compares the size of a blob in the cache with its descriptor.
func checkCached(c *fetch.Cache, d Descriptor) error {
	fi, err := os.Stat(c.BlobPath(d.Digest.Hex()))
	if err != nil {
		return err
	}
	return checkSize(d, fi.Size())
}

// blobError returns the error for a blob that could not be fetched, with the source.
func blobError(what string, d Descriptor, ref imageref.Ref, src source, err error) error {
	return &BlobError{What: what, Digest: string(d.Digest), MediaType: d.MediaType, Ref: ref.String(), Source: src.name(), Err: err}
}

// badBlob returns the error for a blob that was fetched but is invalid.
func badBlob(what string, d Descriptor, ref imageref.Ref, src source, err error) error {
	return &BlobError{Read: true, What: what, Digest: string(d.Digest), MediaType: d.MediaType, Ref: ref.String(), Source: src.name(), Err: err}
}

// listed converts a descriptor as describe does. Its error is a BlobError.
func listed(what string, l ocispec.Descriptor, ref imageref.Ref, src source) (Descriptor, error) {
	d, err := describe(l)
	if err != nil {
		return d, &BlobError{What: what, Digest: string(l.Digest), MediaType: l.MediaType, Ref: ref.String(), Source: src.name(), Err: err}
	}
	return d, nil
}

// BlobError is the failure to fetch or to decode a blob of an image.
type BlobError struct {
	Read      bool   // the blob was fetched, but is invalid
	What      string // such as "layer 3", "config" or "manifest"
	Digest    string
	MediaType string
	Ref       string
	Source    string
	Err       error
}

func (e *BlobError) Error() string {
	s := label(e.Ref) + from(e.Source) + ": "
	if !e.Read {
		s += "fetching "
	}
	s += e.What
	if e.Digest != "" {
		s += " " + e.Digest
	}
	s += ": " + e.Err.Error()
	var several endpointErrors // errors of a registry and its mirrors contain their own fixes
	if c := fixOf(e.Err); c != "" && !errors.As(e.Err, &several) {
		s += "; " + c
	}
	return s
}

// label returns the name of an image for messages.
func label(ref string) string {
	if strings.HasPrefix(ref, Sole) {
		return "the image"
	}
	return "image " + ref
}

func from(source string) string {
	if source == "" {
		return ""
	}
	return " from " + source
}

func (e *BlobError) Unwrap() error { return e.Err }

// manifestDoc is an index or a manifest. The media type determines which.
type manifestDoc struct {
	Config    ocispec.Descriptor   `json:"config"`
	Layers    []ocispec.Descriptor `json:"layers"`
	Manifests []ocispec.Descriptor `json:"manifests"`
}

func parseDoc[T any](b []byte) (T, error) {
	var doc T
	err := json.Unmarshal(b, &doc)
	return doc, err
}
