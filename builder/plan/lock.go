package plan

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// LockVersion is the version of the lock's JSON format.
const LockVersion = 1

// Lock is the file next to an Image document that pins every input.
type Lock struct {
	Version int `json:"version"`
	// Arch is the architecture of the image. In old locks, "" means amd64.
	Arch   string           `json:"arch,omitempty"`
	Inputs map[string]Input `json:"inputs"`
	// RootRoom is the size in bytes of the largest root file system that fits on all machines that
	// were flashed with images of this lock. 0 means that it is unknown.
	RootRoom int64 `json:"rootRoom,omitempty"`
}

// NarrowRoom lowers RootRoom to the capacity of a new image's root partitions, in bytes. A capacity
// of 0 means that the image accepts no updates, and changes nothing.
func (l *Lock) NarrowRoom(capacity int64) {
	if capacity > 0 && (l.RootRoom == 0 || capacity < l.RootRoom) {
		l.RootRoom = capacity
	}
}

// Lock returns the lock of a plan. All inputs of the plan must have digests.
func (p *Plan) Lock() *Lock {
	l := &Lock{Version: LockVersion, Arch: p.Arch, Inputs: map[string]Input{}}
	for name, in := range p.Inputs {
		in.Field, in.Place = "", ""
		l.Inputs[name] = in
	}
	return l
}

// For reports whether the lock is for an image of this architecture.
func (l *Lock) For(arch string) bool { return cmp.Or(l.Arch, "amd64") == arch }

// Encode returns the content of the lock file.
func (l *Lock) Encode() ([]byte, error) { return encode(l) }

// DecodeLock decodes a lock file.
func DecodeLock(data []byte) (*Lock, error) {
	var l Lock
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return nil, fmt.Errorf("reading the lock: %w; %s", err, newLock)
	}
	if l.Version != LockVersion {
		return nil, fmt.Errorf("reading the lock: its version is %d, but this edgebake supports only version %d: use the edgebake that wrote it, or %s", l.Version, LockVersion, newLock)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("reading the lock: it has data after its end; %s", newLock)
	}
	if err := l.validate(); err != nil {
		return nil, err
	}
	return &l, nil
}

// newLock is the advice for a lock that cannot be read.
const newLock = "restore the file, or remove it to make a new one"

// validate returns an error for each invalid value.
func (l *Lock) validate() error {
	bad := func(field, value, want string) error {
		return fmt.Errorf("reading the lock: %s: %q is not %s; %s", field, value, want, newLock)
	}
	errs := checkInputs(l.Inputs, bad)
	if l.RootRoom < 0 {
		errs = append(errs, bad("rootRoom", fmt.Sprint(l.RootRoom), "a size"))
	}
	return errors.Join(errs...)
}

// checkInputs returns an error for each invalid digest.
func checkInputs(inputs map[string]Input, bad func(field, value, want string) error) (errs []error) {
	for _, name := range slices.Sorted(maps.Keys(inputs)) {
		in := inputs[name]
		for _, f := range []struct{ name, value string }{{"sha256", in.SHA256}, {"uncompressed", in.Uncompressed}} {
			if f.value != "" && !isHex64(f.value) {
				errs = append(errs, bad(fmt.Sprintf("inputs[%q].%s", name, f.name), f.value, "a SHA-256 of 64 hexadecimal digits"))
			}
		}
		if sha, ok := strings.CutPrefix(in.Digest, "sha256:"); in.Digest != "" && (!ok || !isHex64(sha)) {
			errs = append(errs, bad(fmt.Sprintf("inputs[%q].digest", name), in.Digest, `"sha256:" and 64 hexadecimal digits`))
		}
	}
	return errs
}

func isHex64(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// byOtherGo returns a note if two Go releases may be the reason for different digests, or "".
func byOtherGo(here, locked string) string {
	if here == "" || locked == "" || here == locked {
		return ""
	}
	return fmt.Sprintf(" (compiled by %s, locked by %s)", here, locked)
}

// Go returns the Go release that compiled a locked program, or "" if it is unknown.
func (l *Lock) Go(name string) string {
	if l == nil {
		return ""
	}
	return l.Inputs[name].Go
}

// Uncompressed returns the locked digest of an input's uncompressed bytes. It returns "" if the
// lock has none, or if the lock's input is a different one.
func (l *Lock) Uncompressed(name string, in Input) string {
	if sha, ok := l.Pinned(name, in); !ok || in.SHA256 != "" && in.SHA256 != sha {
		return ""
	}
	return l.Inputs[name].Uncompressed
}

// Pinned returns the locked digest of an input. It returns false unless the lock's input has the
// same source or recipe and, for a container image, the same manifest.
func (l *Lock) Pinned(name string, in Input) (string, bool) {
	if l == nil {
		return "", false
	}
	old, ok := l.Inputs[name]
	if !ok || old.SHA256 == "" || !sameOrigin(old, in) || in.Digest != "" && in.Digest != old.Digest {
		return "", false
	}
	return old.SHA256, true
}

func sameOrigin(a, b Input) bool {
	// edgebake's own programs may come from another file than when the lock was made: their digests
	// pin them.
	sameFile := a.File == b.File || a.Make == "agent"
	return a.Make == b.Make && slices.Equal(a.Fetch, b.Fetch) && sameFile && compact(a.Recipe) == compact(b.Recipe)
}

// compact removes the indentation of a recipe, which the lock file adds.
func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return string(raw)
	}
	return b.String()
}

// Check compares a plan with the lock. It returns an error for each input that is missing,
// different or superfluous in the lock.
func (l *Lock) Check(p *Plan) error {
	var errs []error
	if !l.For(p.Arch) {
		errs = append(errs, fmt.Errorf("the lock is for another architecture than %s", p.Arch))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Inputs)) {
		in := p.Inputs[name]
		old, ok := l.Inputs[name]
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("input %s is not in the lock", name))
		case !sameOrigin(old, in):
			errs = append(errs, fmt.Errorf("input %s differs from the lock", name))
		case old.SHA256 == "":
			errs = append(errs, fmt.Errorf("input %s has no sha256 in the lock, so the lock does not pin it", name))
		case in.SHA256 != "" && in.SHA256 != old.SHA256:
			errs = append(errs, fmt.Errorf("input %s has sha256 %s, but the lock has %s%s", name, in.SHA256, old.SHA256, byOtherGo(in.Go, old.Go)))
		case in.Digest != "" && in.Digest != old.Digest:
			errs = append(errs, fmt.Errorf("input %s is manifest %s, but the lock has %s: restore the locked manifest at the image's source, or build without --locked, which renews the lock", name, in.Digest, cmp.Or(old.Digest, "none")))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.Inputs)) {
		if _, ok := p.Inputs[name]; !ok {
			errs = append(errs, fmt.Errorf("the lock has input %s, which the Image does not have", name))
		}
	}
	if len(errs) > 0 {
		errs = append(errs, errors.New("to fix: build without --locked, which renews the lock, or use the Image, the files and the edgebake that it was made with"))
	}
	return errors.Join(errs...)
}
