// Package plan defines the Plan: everything a build needs, resolved and
// pinned, with nothing done yet. A Plan is pure data, and nothing changes it once
// it is resolved. The same Plan gives the same bytes, whoever builds it, wherever and
// whenever; its ID names the result and seeds every GUID and UUID on the disk. A Lock
// keeps the digests of a Plan beside the Image document, so that a later build uses
// the same.
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

// Version of the plan's JSON form, and of how a disk is written from it: a
// change to either raises it.
const Version = 2

// Plan is what `edgebake plan` prints and what a build executes.
type Plan struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	// Builder is the version of the edgebake that resolved the plan. It is not
	// part of the id: the same source compiled in two ways has two versions.
	Builder string `json:"builder"`
	// Rendered is the SHA-256, in hex, of what edgebake itself renders for this
	// Image, the part of its code that an update of edgebake changes most.
	Rendered string `json:"rendered"`
	// Arch is the GOARCH of the machine that boots the image.
	Arch string `json:"arch"`
	// SourceDate is the time stamp, in seconds since the epoch, given to all
	// that has none of its own.
	SourceDate int64 `json:"sourceDate"`
	// Inputs are what is fetched or made, by name.
	Inputs map[string]Input `json:"inputs"`
	// Layers are merged in this order. What edgebake renders itself lies
	// between the programs and the user's overlays.
	Layers []Layer `json:"layers"`
	// Partitions in the order of the table.
	Partitions []Partition `json:"partitions"`
	// Config is the canonical JSON of the Image document's remaining part:
	// what overlays render from.
	Config json.RawMessage `json:"config"`
	// Images are the container images to take on board, with their layers. They
	// follow from the digests in Inputs, and are not part of the id.
	Images []images.Pinned `json:"images,omitempty"`
	// Registries and Keyrings (paths, in the order of the recipe's digests) serve to get
	// inputs. They are not part of the id.
	Registries []configs.Registry `json:"registries,omitempty"`
	Keyrings   []string           `json:"keyrings,omitempty"`
}

// Input is one thing that comes from outside: fetched, a file, or made here.
type Input struct {
	// Fetch lists URLs that serve the same bytes. They are not part of the
	// plan's id: a mirror does not change the result.
	Fetch []string `json:"fetch,omitempty"`
	// File is a path, absolute or relative to the Image document.
	File string `json:"file,omitempty"`
	// Make names the recipe kind of an input that is made here: "mmdebstrap",
	// "go", "oci" (a container image's root file system), "image" (a
	// container image to take on board), "folder" (File, packed as a tar).
	// Recipe is its canonical JSON.
	Make   string          `json:"make,omitempty"`
	Recipe json.RawMessage `json:"recipe,omitempty"`
	// Digest is what a name in Recipe meant when it was looked up: a container
	// image's manifest, "sha256:…".
	Digest string `json:"digest,omitempty"`
	// Go is the Go release that compiled a program, where edgebake had it compiled
	// and the program says. Another one compiles other bytes.
	Go string `json:"go,omitempty"`
	// SHA256 is the digest of the bytes, in hex. A made input has none until
	// it was made once; the lock keeps it from then on.
	SHA256 string `json:"sha256,omitempty"`
	// Uncompressed is the digest, in hex, of a compressed base uncompressed, once it is
	// known: an exported base has these bytes.
	Uncompressed string `json:"uncompressed,omitempty"`
	// Field of the Image, or Place in a manifest of imagesFrom, asks for the input. They
	// are for messages only, and not in the lock.
	Field string `json:"field,omitempty"`
	Place string `json:"place,omitempty"`
}

// From says in a few words where the input comes from, or what it is made of.
func (in Input) From() string {
	var r struct {
		Module, Version, Suite, Layout, Archive string
		Source                                  struct{ Ref string }
	}
	_ = json.Unmarshal(in.Recipe, &r) // an older one may have other fields; some have none
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

// Layer says how an input enters the tree.
type Layer struct {
	Name    string `json:"name"`
	Input   string `json:"input"`
	Replace bool   `json:"replace,omitempty"`
	// Path, where set, is the file the input becomes (a program).
	Path string `json:"path,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
	// Members, where set, are the only entries of a tar that are taken, and
	// where they go.
	Members map[string]string `json:"members,omitempty"`
}

// Partition is one entry of the GPT.
type Partition struct {
	Label string `json:"label"`
	// FS is fat32, fat16, fat12, ext4 or empty (left unformatted).
	FS string `json:"fs,omitempty"`
	// Size of its file system in bytes; 0 is computed from the content.
	Size int64 `json:"size"`
	// Grow is the room that the partition has for a larger file system.
	Grow *Grow `json:"grow,omitempty"`
	// HashTree adds room for the dm-verity hash tree of that.
	HashTree bool `json:"hashTree,omitempty"`
	// Gap is how many bytes before the partition belong to none.
	Gap int64 `json:"gap,omitempty"`
}

// Grow says by how much a partition's content may grow: by a share of what it
// is, and by no less than AtLeast bytes.
type Grow struct {
	Percent int64 `json:"percent"`
	AtLeast int64 `json:"atLeast"`
}

// Of is the room for content of that size.
func (g *Grow) Of(content int64) int64 {
	if g == nil {
		return 0
	}
	return max(content*g.Percent/100, g.AtLeast)
}

// ErrUnpinned is wrapped by the error of ID for a plan with inputs that were
// never made.
var ErrUnpinned = errors.New("the plan has inputs without digest")

// ID names the plan: the SHA-256, in hex, of its canonical JSON without where
// inputs come from and which build of edgebake resolved it. What an input's
// bytes are decides, not how they got here.
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
			// An index is not all: which of its manifests is on board counts.
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

// With returns the plan with these inputs, whose digests are now known.
func (p *Plan) With(inputs map[string]Input) *Plan {
	c := *p
	c.Inputs = maps.Clone(inputs)
	return &c
}

// file is the form of a plan in a file: with its id where every input has its digest.
type file struct {
	ID string `json:"id,omitempty"`
	*Plan
}

// Encode returns the form that `edgebake plan` prints, which Decode reads.
func (p *Plan) Encode() ([]byte, error) {
	id, err := p.ID()
	if err != nil && !errors.Is(err, ErrUnpinned) {
		return nil, err
	}
	return encode(file{id, p})
}

// Decode reads a plan that Encode wrote. It rejects one that was edited, or that another
// version of edgebake wrote.
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
		return nil, fmt.Errorf("reading the plan: there is something after its end; %s", again)
	}
	if p.Inputs == nil {
		p.Inputs = map[string]Input{}
	}
	// Files are indented; the id is that of the compact form.
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
		return nil, fmt.Errorf("reading the plan: it was edited: its id is %q, its contents have %q; %s", f.ID, id, again)
	}
	return p, nil
}

// problems lists fields whose values have no meaning.
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
			errs = append(errs, fmt.Errorf("reading the plan: images[%d]: it is not the one of input %q", i, name))
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
