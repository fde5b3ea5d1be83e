// Package imagetest makes container images, ordinary and difficult ones, for tests, benchmarks and
// oracles. It writes them as OCI layouts, without a registry or a container engine. The same call
// gives the same bytes.
package imagetest

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Date is the time of the entries for which no time is given.
var Date = time.Unix(1700000000, 0).UTC()

// Layer is a layer of an image. Tar writes its entries.
type Layer struct {
	Tar func(w *Writer) error
	// Compression is gzip (the default), zstd or none.
	Compression string
	// MediaType overrides the media type that follows from Compression.
	MediaType string
}

// Image is one image to make.
type Image struct {
	Ref    string
	Layers []Layer
	// Arch is the architecture; "" means amd64.
	Arch string
	// Variant is the variant of the architecture in the image's config.
	Variant string
	// Config is the object "config" in the image's config: Entrypoint, Env and so on.
	Config map[string]any
	// Docker makes a manifest of docker schema 2 instead of an OCI manifest.
	Docker bool
	// Others are images for other architectures. With them, an index lists all of the images.
	Others []Image
	// DropOthers omits the blobs of Others, as a mirror for one platform does.
	DropOthers bool
}

// Descriptor is an OCI descriptor.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    map[string]string `json:"platform,omitempty"`
}

// Writer adds shorthands to a tar.Writer.
type Writer struct{ *tar.Writer }

// Tree writes a file or directory of this computer, without its times and owners. All files become
// executable.
func (w *Writer) Tree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		name := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			return w.Put(tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: 0o755}, "")
		case d.Type().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return w.Put(tar.Header{Name: name, Mode: 0o755}, string(b))
		}
		return nil
	})
}

// Put writes an entry. It is a regular file if h.Typeflag is not set.
func (w *Writer) Put(h tar.Header, body string) error {
	if h.ModTime.IsZero() {
		h.ModTime = Date
	}
	if h.Typeflag == 0 {
		h.Typeflag = tar.TypeReg
	}
	if h.Typeflag == tar.TypeReg {
		h.Size = int64(len(body))
	}
	h.Format = tar.FormatPAX
	if err := w.WriteHeader(&h); err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	_, err := io.WriteString(w.Writer, body)
	return err
}

// Layout is an OCI layout that is being written.
type Layout struct {
	dir   string
	index []Descriptor
}

// NewLayout creates dir and starts a layout in it.
func NewLayout(dir string) (*Layout, error) {
	if err := os.MkdirAll(filepath.Join(dir, "blobs/sha256"), 0o755); err != nil {
		return nil, err
	}
	return &Layout{dir: dir}, os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

// WriteLayout writes a layout of these images.
func WriteLayout(dir string, images ...Image) ([]Descriptor, error) {
	l, err := NewLayout(dir)
	if err != nil {
		return nil, err
	}
	for _, i := range images {
		if _, err := l.Add(i); err != nil {
			return nil, fmt.Errorf("%s: %w", i.Ref, err)
		}
	}
	return l.index, l.Close()
}

// Close writes index.json.
func (l *Layout) Close() error {
	raw, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": l.index})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.dir, "index.json"), raw, 0o644)
}

// Add writes an image's blobs and lists it in the index.
func (l *Layout) Add(i Image) (Descriptor, error) {
	d, err := l.manifest(i)
	if err != nil {
		return d, err
	}
	if len(i.Others) > 0 {
		var ds []Descriptor
		for _, o := range i.Others {
			od, err := l.manifest(o)
			if err != nil {
				return d, err
			}
			od.Platform = map[string]string{"os": "linux", "architecture": o.arch()}
			ds = append(ds, od)
			if i.DropOthers {
				if err := os.Remove(l.path(od.Digest)); err != nil {
					return d, err
				}
			}
		}
		d.Platform = map[string]string{"os": "linux", "architecture": i.arch()}
		mt := "application/vnd.oci.image.index.v1+json"
		if i.Docker {
			mt = "application/vnd.docker.distribution.manifest.list.v2+json"
		}
		if d, err = l.json(mt, map[string]any{"schemaVersion": 2, "mediaType": mt, "manifests": append(ds, d)}); err != nil {
			return d, err
		}
	}
	named := d
	named.Annotations = map[string]string{"org.opencontainers.image.ref.name": i.Ref, "io.containerd.image.name": i.Ref}
	l.index = append(l.index, named)
	return d, nil
}

func (i Image) arch() string {
	if i.Arch == "" {
		return "amd64"
	}
	return i.Arch
}

func (l *Layout) manifest(i Image) (Descriptor, error) {
	manifest, config, layer := "application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar"
	sep := "+"
	if i.Docker {
		manifest, config, layer = "application/vnd.docker.distribution.manifest.v2+json", "application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar"
		sep = "."
	}
	layers, diffs := []Descriptor{}, []string{}
	for _, ly := range i.Layers {
		d, diff, err := l.layer(ly)
		if err != nil {
			return d, err
		}
		d.MediaType = layer
		if ly.Compression != "none" {
			d.MediaType += sep + ly.compression()
		}
		if ly.MediaType != "" {
			d.MediaType = ly.MediaType
		}
		layers, diffs = append(layers, d), append(diffs, diff)
	}
	cfg := i.Config
	if cfg == nil {
		cfg = map[string]any{}
	}
	doc := map[string]any{
		"architecture": i.arch(), "os": "linux", "created": Date.Format(time.RFC3339), "config": cfg,
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	}
	if i.Variant != "" {
		doc["variant"] = i.Variant
	}
	c, err := l.json(config, doc)
	if err != nil {
		return c, err
	}
	return l.json(manifest, map[string]any{"schemaVersion": 2, "mediaType": manifest, "config": c, "layers": layers})
}

func (l *Layout) path(digest string) string {
	return filepath.Join(l.dir, "blobs/sha256", digest[len("sha256:"):])
}

func (l *Layout) json(mediaType string, v any) (Descriptor, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return Descriptor{}, err
	}
	sum := sha256.Sum256(raw)
	d := Descriptor{MediaType: mediaType, Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(raw))}
	return d, os.WriteFile(l.path(d.Digest), raw, 0o644)
}

func (l Layer) compression() string {
	if l.Compression == "" {
		return "gzip"
	}
	return l.Compression
}

// layer writes the blob of a layer as a stream.
func (l *Layout) layer(ly Layer) (Descriptor, string, error) {
	f, err := os.CreateTemp(l.dir, "layer-")
	if err != nil {
		return Descriptor{}, "", err
	}
	defer f.Close()
	defer os.Remove(f.Name())
	raw, plain := sha256.New(), sha256.New()
	var compressed io.WriteCloser
	out := io.MultiWriter(f, raw)
	switch ly.compression() {
	case "gzip":
		compressed, err = gzip.NewWriterLevel(out, 6)
	case "zstd":
		compressed, err = zstd.NewWriter(out)
	default:
		compressed = nopCloser{out}
	}
	if err != nil {
		return Descriptor{}, "", err
	}
	tw := tar.NewWriter(io.MultiWriter(compressed, plain))
	if err := ly.Tar(&Writer{tw}); err != nil {
		return Descriptor{}, "", err
	}
	if err := tw.Close(); err != nil {
		return Descriptor{}, "", err
	}
	if err := compressed.Close(); err != nil {
		return Descriptor{}, "", err
	}
	st, err := f.Stat()
	if err != nil {
		return Descriptor{}, "", err
	}
	d := Descriptor{Digest: "sha256:" + hex.EncodeToString(raw.Sum(nil)), Size: st.Size()}
	return d, "sha256:" + hex.EncodeToString(plain.Sum(nil)), os.Rename(f.Name(), l.path(d.Digest))
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }
