// Package plan defines the Plan: all inputs of a build, resolved and pinned. A Plan is plain data
// and does not change after it is resolved. The same Plan gives the same bytes on any computer. Its
// ID identifies the image, and all GUIDs and UUIDs on the disk are derived from it. A Lock stores
// the digests of a Plan next to the Image document, for later builds.
package plan

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
)

// Version is the version of the plan's JSON format and of the disk layout that is written from a
// plan.
const Version = 2

// Plan describes a build completely. `edgebake plan` prints it.
type Plan struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	// Builder is the version of the edgebake that made the plan. It is not part of the ID: the same
	// source has different versions, depending on how it is compiled.
	Builder string `json:"builder"`
	// Rendered is the SHA-256, in hex, of the files that edgebake renders for this Image. A new
	// version of edgebake usually changes it.
	Rendered string `json:"rendered"`
	// Arch is the GOARCH of the machine that boots the image.
	Arch string `json:"arch"`
	// SourceDate is the time of files that have no time of their own, in seconds since 1970.
	SourceDate int64 `json:"sourceDate"`
	// Inputs maps the name of each input to the input.
	Inputs map[string]Input `json:"inputs"`
	// Layers are merged in this order. The files that edgebake renders come after the programs and
	// before the user's overlays.
	Layers []Layer `json:"layers"`
	// Partitions are in the order of the partition table.
	Partitions []Partition `json:"partitions"`
	// Config contains the other fields of the Image document as canonical JSON. Rendering uses
	// them.
	Config json.RawMessage `json:"config"`
	// Images contains the container images of the image, with their layers. They follow from the
	// digests in Inputs, so they are not part of the ID.
	Images []images.Pinned `json:"images,omitempty"`
	// Registries and Keyrings are needed to fetch inputs. Keyrings contains paths, in the order of
	// the digests in the recipe. Neither is part of the ID.
	Registries []configs.Registry `json:"registries,omitempty"`
	Keyrings   []string           `json:"keyrings,omitempty"`
}

// Input is an input of the build: downloaded, a local file, or made on this computer.
type Input struct {
	// Fetch lists URLs of the same file. They are not part of the ID, because a mirror does not
	// change the result.
	Fetch []string `json:"fetch,omitempty"`
	// File is a path. If it is relative, it is relative to the Image document.
	File string `json:"file,omitempty"`
	// Make is the kind of an input that is made on this computer: "mmdebstrap", "go", "oci" (the
	// root file system of a container image), "image" (a container image to include), "folder" (the
	// directory File as a tar), or "agent" (one of edgebake's own programs). Recipe describes how
	// it is made, as canonical JSON.
	Make   string          `json:"make,omitempty"`
	Recipe json.RawMessage `json:"recipe,omitempty"`
	// Digest is the digest ("sha256:…") of the manifest to which the container image's reference in
	// Recipe pointed.
	Digest string `json:"digest,omitempty"`
	// Go is the Go release that compiled a program, if edgebake compiled it and the release is
	// known. Another release compiles to other bytes.
	Go string `json:"go,omitempty"`
	// SHA256 is the digest of the input, in hex. It is empty until the input is made for the first
	// time. From then on, the lock contains it.
	SHA256 string `json:"sha256,omitempty"`
	// Uncompressed is the digest, in hex, of a compressed base after uncompressing, once it is
	// known. An exported base has this digest.
	Uncompressed string `json:"uncompressed,omitempty"`
	// Field and Place are the origin of the input: a field of the Image, or a place in a manifest
	// of imagesFrom. They are only for messages, and are not in the lock.
	Field string `json:"field,omitempty"`
	Place string `json:"place,omitempty"`
}

// From describes the source or the recipe of the input in a few words.
func (in Input) From() string {
	var r struct {
		Module, Version, Suite, Layout, Archive string
		Source                                  struct{ Ref string }
	}
	_ = json.Unmarshal(in.Recipe, &r) // ignore errors: some inputs have no recipe, and old recipes may have other fields
	switch {
	case in.Make == "agent":
		return "edgebake's own"
	case len(in.Fetch) > 0:
		return in.Fetch[0]
	case in.File != "":
		return in.File
	case in.Make == "go":
		return r.Module + " " + r.Version
	case in.Make == "mmdebstrap":
		return "Debian " + r.Suite
	case in.Make == "oci":
		return r.Source.Ref
	case in.Make == "image":
		return cmp.Or(r.Layout, r.Archive, "a registry")
	}
	return in.Make
}

// Layer describes how an input is added to the file tree.
type Layer struct {
	Name    string `json:"name"`
	Input   string `json:"input"`
	Replace bool   `json:"replace,omitempty"`
	// Path, if set, is the path of the file that the input becomes, such as a program.
	Path string `json:"path,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
	// Members, if set, lists the entries of a tar to use, and maps each to its path in the image.
	Members map[string]string `json:"members,omitempty"`
}

// Partition is an entry of the partition table.
type Partition struct {
	Label string `json:"label"`
	// FS is fat32, fat16, fat12, ext4, or empty for an unformatted partition.
	FS string `json:"fs,omitempty"`
	// Size is the size of the file system in bytes. 0 means that it depends on the contents.
	Size int64 `json:"size"`
	// Grow is space for a larger file system of an update.
	Grow *Grow `json:"grow,omitempty"`
	// HashTree adds space for the dm-verity hash tree of that larger file system.
	HashTree bool `json:"hashTree,omitempty"`
	// Gap is unused space before the partition, in bytes.
	Gap int64 `json:"gap,omitempty"`
}

// Grow is the space for growth: a percentage of the contents' size, but at least AtLeast bytes.
type Grow struct {
	Percent int64 `json:"percent"`
	AtLeast int64 `json:"atLeast"`
}

// Of returns the space for growth for contents of this size, in bytes.
func (g *Grow) Of(content int64) int64 {
	if g == nil {
		return 0
	}
	return max(content*g.Percent/100, g.AtLeast)
}

// ErrUnpinned means that a plan has no ID yet, because some of its inputs have never been made.
var ErrUnpinned = errors.New("the plan has inputs without a digest")

// ID returns the SHA-256, in hex, of the plan's canonical JSON. The ID depends on the digests of
// the inputs, but not on their sources. Another edgebake gives another ID only if it changes
// Version or renders other files (Rendered).
func (p *Plan) ID() (string, error) {
	c := *p
	c.Builder, c.Images, c.Registries, c.Keyrings = "", nil, nil, nil
	c.Inputs = make(map[string]Input, len(p.Inputs))
	var open []string
	for _, name := range slices.Sorted(maps.Keys(p.Inputs)) {
		in := p.Inputs[name]
		if in.SHA256 == "" {
			open = append(open, name)
		}
		pinned := Input{SHA256: in.SHA256}
		if in.Make == "image" {
			// Include the digest of the manifest, because an index does not determine which of its
			// manifests is used.
			pinned.Digest = in.Digest
		}
		c.Inputs[name] = pinned
	}
	if len(open) > 0 {
		return "", fmt.Errorf("%w: %v", ErrUnpinned, open)
	}
	b, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("encoding the plan: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// With returns a copy of the plan with these inputs.
func (p *Plan) With(inputs map[string]Input) *Plan {
	c := *p
	c.Inputs = maps.Clone(inputs)
	return &c
}

// file is the format of a plan file. It contains the ID if every input has a digest.
type file struct {
	ID string `json:"id,omitempty"`
	*Plan
}

// Encode returns the plan as JSON that Decode reads.
func (p *Plan) Encode() ([]byte, error) {
	id, err := p.ID()
	if err != nil && !errors.Is(err, ErrUnpinned) {
		return nil, err
	}
	return encode(file{id, p})
}

// Decode decodes the result of Encode. It rejects a plan that was edited, or whose Version differs.
func Decode(data []byte) (*Plan, error) {
	const again = "make it again with edgebake plan --output json"
	f := file{Plan: &Plan{}}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("reading the plan: %w; %s", err, again)
	}
	p := f.Plan
	if p.Version != Version {
		return nil, fmt.Errorf("reading the plan: its version is %d, but this edgebake supports only version %d: use the edgebake that wrote it (%s), or %s", p.Version, Version, p.Builder, again)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("reading the plan: it has data after its end; %s", again)
	}
	if p.Inputs == nil {
		p.Inputs = map[string]Input{}
	}
	// The file is indented, but the ID is a hash of compact JSON.
	p.Config = json.RawMessage(compact(p.Config))
	for name, in := range p.Inputs {
		if in.Recipe != nil {
			in.Recipe = json.RawMessage(compact(in.Recipe))
			p.Inputs[name] = in
		}
	}
	if err := errors.Join(p.problems()...); err != nil {
		return nil, err
	}
	id, err := p.ID()
	if err != nil && !errors.Is(err, ErrUnpinned) {
		return nil, err
	}
	if id != f.ID {
		return nil, fmt.Errorf("reading the plan: it was edited: its id is %q, but its contents give %q; %s", f.ID, id, again)
	}
	return p, nil
}

// problems returns an error for each invalid value.
func (p *Plan) problems() []error {
	errs := checkInputs(p.Inputs, func(field, value, want string) error {
		return fmt.Errorf("reading the plan: %s: %q is not %s", field, value, want)
	})
	for i, l := range p.Layers {
		if _, ok := p.Inputs[l.Input]; !ok {
			errs = append(errs, fmt.Errorf("reading the plan: layers[%d].input: there is no input %q", i, l.Input))
		}
	}
	images := map[string]bool{}
	for i, img := range p.Images {
		name := "image " + img.Source.Ref
		images[name] = true
		if in := p.Inputs[name]; in.SHA256 != img.Target.Digest.Hex() || in.Digest != string(img.Manifest.Digest) {
			errs = append(errs, fmt.Errorf("reading the plan: images[%d] is not the image of input %q", i, name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.Inputs)) {
		if p.Inputs[name].Make == "image" && !images[name] {
			errs = append(errs, fmt.Errorf("reading the plan: inputs[%q]: images does not list this image", name))
		}
	}
	return errs
}

func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encoding the plan: %w", err)
	}
	return b.Bytes(), nil
}
