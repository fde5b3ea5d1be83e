// Package plan defines the Plan: all inputs of a build, resolved and pinned. A Plan is pure data
// and does not change once it is resolved. The same Plan gives the same bytes anywhere; its ID
// identifies the result and is the seed of every GUID and UUID on the disk. A Lock keeps the
// digests of a Plan next to the Image document for later builds.
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

// Version is the version of the plan's JSON format and of the way in which a disk is written from a
// plan. A change of either increments it.
const Version = 2

// Plan is printed by `edgebake plan` and executed by a build.
type Plan struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	// Builder is the version of the edgebake that resolved the plan. It is not
	// part of the ID: the same source compiled in two ways has two versions.
	Builder string `json:"builder"`
	// Rendered is the SHA-256, in hex, of the files that edgebake renders for this Image. Most
	// updates of edgebake change it.
	Rendered string `json:"rendered"`
	// Arch is the GOARCH of the machine that boots the image.
	Arch string `json:"arch"`
	// SourceDate is the time, in seconds since the epoch, of everything that has no time of its
	// own.
	SourceDate int64 `json:"sourceDate"`
	// Inputs maps names to the inputs to be fetched or made.
	Inputs map[string]Input `json:"inputs"`
	// Layers are merged in this order. The files that edgebake renders come after
	// the programs and before the user's overlays.
	Layers []Layer `json:"layers"`
	// Partitions are in the order of the table.
	Partitions []Partition `json:"partitions"`
	// Config is the canonical JSON of the Image document's other fields, from
	// which overlays are rendered.
	Config json.RawMessage `json:"config"`
	// Images are the container images to be included, with their layers. They
	// follow from the digests in Inputs, and are not part of the ID.
	Images []images.Pinned `json:"images,omitempty"`
	// Registries and Keyrings (paths, in the order of the recipe's digests) are needed to fetch
	// inputs. They are not part of the ID.
	Registries []configs.Registry `json:"registries,omitempty"`
	Keyrings   []string           `json:"keyrings,omitempty"`
}

// Input is one input from outside: fetched, a local file, or made on this computer.
type Input struct {
	// Fetch lists URLs of the same bytes. They are not part of the plan's ID, since a mirror does
	// not change the result.
	Fetch []string `json:"fetch,omitempty"`
	// File is a path, absolute or relative to the Image document.
	File string `json:"file,omitempty"`
	// Make is the kind of recipe of an input that is made on this computer: "mmdebstrap", "go",
	// "oci" (a container image's root file system), "image" (a container image to be included),
	// "folder" (File, packed as a tar), "agent" (one of edgebake's own programs). Recipe is its
	// canonical JSON.
	Make   string          `json:"make,omitempty"`
	Recipe json.RawMessage `json:"recipe,omitempty"`
	// Digest is the digest, "sha256:…", of the manifest that the container image's name in Recipe
	// resolved to.
	Digest string `json:"digest,omitempty"`
	// Go is the Go release that compiled a program, if edgebake compiled it and the program records
	// it. Another release compiles other bytes.
	Go string `json:"go,omitempty"`
	// SHA256 is the digest of the bytes, in hex. It is empty until the input is made for the first
	// time; then the lock keeps it.
	SHA256 string `json:"sha256,omitempty"`
	// Uncompressed is the digest, in hex, of a compressed base's uncompressed bytes, once it is
	// known. An exported base has these bytes.
	Uncompressed string `json:"uncompressed,omitempty"`
	// Field (of the Image) or Place (in a manifest of imagesFrom) names the input's origin. They
	// are only for messages, and not in the lock.
	Field string `json:"field,omitempty"`
	Place string `json:"place,omitempty"`
}

// From briefly describes the source or the recipe of the input.
func (in Input) From() string {
	var r struct {
		Module, Version, Suite, Layout, Archive string
		Source                                  struct{ Ref string }
	}
	_ = json.Unmarshal(in.Recipe, &r) // old recipes may have other fields; some inputs have no recipe
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

// Layer describes how an input is added to the tree.
type Layer struct {
	Name    string `json:"name"`
	Input   string `json:"input"`
	Replace bool   `json:"replace,omitempty"`
	// Path, if set, is the file that the input becomes (a program).
	Path string `json:"path,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
	// Members, if set, maps the entries of a tar that are used to their destinations.
	Members map[string]string `json:"members,omitempty"`
}

// Partition is one entry of the GPT.
type Partition struct {
	Label string `json:"label"`
	// FS is fat32, fat16, fat12, ext4 or empty (left unformatted).
	FS string `json:"fs,omitempty"`
	// Size is the size of the file system in bytes; 0 means computed from the content.
	Size int64 `json:"size"`
	// Grow is the space for a larger file system.
	Grow *Grow `json:"grow,omitempty"`
	// HashTree adds space for the larger file system's dm-verity hash tree.
	HashTree bool `json:"hashTree,omitempty"`
	// Gap is unused space before the partition, in bytes.
	Gap int64 `json:"gap,omitempty"`
}

// Grow is the space for growth of a partition's content: a share of its size, and at least AtLeast
// bytes.
type Grow struct {
	Percent int64 `json:"percent"`
	AtLeast int64 `json:"atLeast"`
}

// Of returns the space for growth, in bytes, of content of that size.
func (g *Grow) Of(content int64) int64 {
	if g == nil {
		return 0
	}
	return max(content*g.Percent/100, g.AtLeast)
}

// ErrUnpinned means that a plan has no ID, since some inputs were never made.
var ErrUnpinned = errors.New("the plan has inputs without digest")

// ID returns the SHA-256, in hex, of the plan's canonical JSON. It leaves out the sources of inputs
// and the edgebake that resolved the plan: only the inputs' bytes matter.
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
			// Include the manifest's digest: an index does not determine which of its manifests is
			// used.
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

// With returns a copy of the plan with these inputs, which have their digests.
func (p *Plan) With(inputs map[string]Input) *Plan {
	c := *p
	c.Inputs = maps.Clone(inputs)
	return &c
}

// file is the format of a plan file. It has an ID if every input has its digest.
type file struct {
	ID string `json:"id,omitempty"`
	*Plan
}

// Encode returns the plan in the format that Decode reads.
func (p *Plan) Encode() ([]byte, error) {
	id, err := p.ID()
	if err != nil && !errors.Is(err, ErrUnpinned) {
		return nil, err
	}
	return encode(file{id, p})
}

// Decode decodes a plan from Encode. It rejects a plan that was edited or written by another
// version of edgebake.
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
		return nil, fmt.Errorf("reading the plan: its version is %d, this edgebake reads %d: use the edgebake that wrote it (%s), or %s", p.Version, Version, p.Builder, again)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("reading the plan: it has data after its end; %s", again)
	}
	if p.Inputs == nil {
		p.Inputs = map[string]Input{}
	}
	// The file is indented, but the ID is the hash of the compact format.
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

// problems reports invalid values.
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
			errs = append(errs, fmt.Errorf("reading the plan: inputs[%q]: images has no such image", name))
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
