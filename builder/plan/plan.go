// Package plan defines the Plan: everything a build needs, resolved and
// pinned, with nothing done yet. A Plan is pure data. The same Plan gives the
// same bytes, whoever builds it, wherever and whenever; its id names the
// result and seeds every GUID and UUID on the disk.
package plan

// Version of the plan's JSON form.
const Version = 1

// Plan is what `edgebake plan` prints and what a build carries out.
type Plan struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	// Arch is the GOARCH of the machine that boots the image.
	Arch string `json:"arch"`
	// SourceDate is the time stamp, in seconds since the epoch, given to all
	// that has none of its own.
	SourceDate int64 `json:"sourceDate"`
	// Inputs are what is fetched or made, by name.
	Inputs map[string]Input `json:"inputs"`
	// Layers are merged in this order.
	Layers []Layer `json:"layers"`
	// Partitions in the order of the table.
	Partitions []Partition `json:"partitions"`
	// Config is the canonical JSON of the Image document's remaining part:
	// what overlays render from.
	Config []byte `json:"config"`
}

// Input is one thing that comes from outside. Exactly one of Fetch, File and
// Make is set.
type Input struct {
	// Fetch lists URLs that serve the same bytes. They are not part of the
	// plan's id: a mirror does not change the result.
	Fetch []string `json:"fetch,omitempty"`
	// File is a path, absolute or relative to the Image document.
	File string `json:"file,omitempty"`
	// Make names the recipe kind ("mmdebstrap", "go", "oci") of an input that
	// is made here; Recipe is its canonical JSON.
	Make   string `json:"make,omitempty"`
	Recipe string `json:"recipe,omitempty"`
	// SHA256 is the digest of the bytes, in hex. A made input has none until
	// it was made once; image.lock keeps it from then on.
	SHA256 string `json:"sha256,omitempty"`
}

// Layer says how an input enters the tree.
type Layer struct {
	Name    string `json:"name"`
	Input   string `json:"input,omitempty"`
	Replace bool   `json:"replace,omitempty"`
	// Path, where set, is the file the input becomes (a binary); otherwise
	// the input is a tar that is unpacked.
	Path string `json:"path,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
}

// Partition is one entry of the GPT.
type Partition struct {
	Label string `json:"label"`
	// FS is fat32, fat16, ext4 or empty (left unformatted).
	FS string `json:"fs,omitempty"`
	// Size in bytes; 0 is computed from the content.
	Size int64 `json:"size"`
}
