// Package artifact defines the form of golden images in container registries: an OCI manifest, a
// config blob, and parts. The concatenated parts are the compressed image (.raw.zst), so a machine
// can read ranges of the image as ranges of the parts during an update.
package artifact

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/configs/imageref"
)

// Media types of an artifact.
const (
	ManifestType = "application/vnd.oci.image.manifest.v1+json"
	Type         = "application/vnd.edgebake.image.v1"
	ConfigType   = "application/vnd.edgebake.image.config.v1+json"
	PartType     = "application/vnd.edgebake.image.part.v1+zstd"
)

// Accept is the Accept header of requests for a manifest. It includes the types of container
// images, so that a reference to a container image gives a clear error.
var Accept = strings.Join([]string{ManifestType, "application/vnd.oci.image.index.v1+json",
	"application/vnd.docker.distribution.manifest.v2+json", "application/vnd.docker.distribution.manifest.list.v2+json"}, ", ")

// Limits for data read from a registry.
const (
	MaxManifest = 256 << 10
	MaxConfig   = 8 << 20
	MaxStored   = 1 << 42
)

// Descriptor refers to a blob.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      imageref.Digest   `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Manifest is an artifact's manifest, as in the OCI image specification 1.1.
type Manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	ArtifactType  string            `json:"artifactType"`
	Config        Descriptor        `json:"config"`
	Layers        []Descriptor      `json:"layers"` // the parts
	Annotations   map[string]string `json:"annotations,omitempty"`
}

// ErrOther means that a reference names something other than an edgebake image.
var ErrOther = errors.New("not an image from edgebake push")

// Read decodes a manifest and checks its types, digests and sizes.
func Read(b []byte) (*Manifest, error) {
	var kind struct {
		ArtifactType string
		Manifests    []json.RawMessage
		Config       struct{ MediaType string }
	}
	if err := json.Unmarshal(b, &kind); err != nil {
		return nil, fmt.Errorf("%w: the manifest cannot be read: %w", ErrOther, err)
	}
	switch {
	case kind.ArtifactType == Type || kind.Config.MediaType == ConfigType:
	case len(kind.Manifests) > 0 || strings.HasPrefix(kind.Config.MediaType, "application/vnd.docker.") || kind.Config.MediaType == "application/vnd.oci.image.config.v1+json":
		return nil, fmt.Errorf("%w, but a container image: name the repository of the disk image", ErrOther)
	case strings.HasPrefix(kind.ArtifactType, "application/vnd.edgebake."):
		return nil, fmt.Errorf("%w in a format that this edgebake does not support (%s; it supports %s): use the edgebake that pushed it", ErrOther, quoted(kind.ArtifactType), Type)
	default:
		return nil, fmt.Errorf("%w (its type is %s): check repository and tag", ErrOther, quoted(kind.ArtifactType))
	}
	var m Manifest
	err := json.Unmarshal(b, &m)
	if bad := (*imageref.DigestError)(nil); errors.As(err, &bad) {
		return nil, fmt.Errorf("the manifest names a blob %s: push the image again", quoted(bad.Text))
	} else if err != nil {
		return nil, fmt.Errorf("the manifest is damaged: %w: push the image again", err)
	}
	return &m, m.check()
}

// quoted quotes untrusted text for a message, truncated to 100 bytes.
func quoted(s string) string { return fmt.Sprintf("%q", s[:min(len(s), 100)]) }

func (m *Manifest) check() error {
	const fix = "push the image again"
	all := append([]Descriptor{m.Config}, m.Layers...)
	for _, d := range all {
		if d.Digest == "" || d.Size <= 0 || d.Size > MaxStored {
			return fmt.Errorf("the manifest names a blob %q of %d bytes: %s", d.Digest, d.Size, fix)
		}
	}
	switch {
	case m.Config.Size > MaxConfig:
		return fmt.Errorf("the config has %d bytes, at most %d are allowed: %s", m.Config.Size, MaxConfig, fix)
	case len(m.Layers) == 0:
		return fmt.Errorf("the manifest names no parts: %s", fix)
	}
	for i, l := range m.Layers {
		if l.MediaType != PartType {
			return fmt.Errorf("part %d of %d is of type %s, expected %s: use the edgebake that pushed it", i+1, len(m.Layers), quoted(l.MediaType), PartType)
		}
	}
	return nil
}

// Stored returns the size of the compressed image in bytes.
func (m *Manifest) Stored() (n int64) {
	for _, l := range m.Layers {
		n += l.Size // cannot overflow: each is at most 2^42, and a manifest has at most MaxManifest bytes
	}
	return n
}

// Range is a range of one part of an image.
type Range struct {
	Part    int
	Off, To int64
}

// Ranges returns the ranges of the parts that contain the n bytes of the image at offset off.
func (m *Manifest) Ranges(off, n int64) (out []Range) {
	start := int64(0)
	for i, l := range m.Layers {
		r := Range{i, max(0, off-start), min(l.Size, off+n-start)}
		if r.Off < r.To {
			out = append(out, r)
		}
		start += l.Size
	}
	return out
}
