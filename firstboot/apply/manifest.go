package apply

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/edgebake/edgebake/firstboot/beneath"
)

// Kinds of entries.
const (
	kindFile    = "file"
	kindDir     = "directory"
	kindSymlink = "symlink"
	kindLink    = "link"
	kindAbsent  = "nothing" // removed: in an overwritten directory, a removed user's home, or a mask
)

type entry struct {
	Path, Kind string
	Data       []byte
	Owner      beneath.Owner
	// modeSet, uidSet and gidSet mean that the config sets the value. Otherwise an existing file
	// keeps its own.
	modeSet, uidSet, gidSet bool
	// once means that the entry is made only if nothing exists there, and is never changed later.
	once bool
	// fromUser means that the entry is derived from a user. Entries that the config names take
	// precedence.
	fromUser bool
	// keepData means that the config does not set the file's contents.
	keepData bool
	// appendTo means that Data is appended to the original contents.
	appendTo  bool
	Target    string
	overwrite bool
	// empties means that an existing directory is removed with its contents.
	empties bool
	// unmask means that only a link to /dev/null is removed.
	unmask bool
	unit   string // the unit it belongs to
}

// manifest records what was applied.
type manifest struct {
	Version int                 `json:"version"`
	Paths   map[string]madePath `json:"paths"`
	Units   map[string]string   `json:"units,omitempty"` // enabled | disabled | masked
	Users   map[string]account  `json:"users,omitempty"`
	Groups  map[string]bool     `json:"groups,omitempty"` // those that a config added
	// Gone contains the former rows of groups that were changed or removed.
	Gone map[string]groupRows `json:"gone,omitempty"`
	// Unfinished means that a config is being applied, or that applying it was interrupted.
	Unfinished bool `json:"unfinished,omitempty"`
}

func newManifest() manifest {
	return manifest{Version: manifestVersion, Paths: map[string]madePath{}, Units: map[string]string{},
		Users: map[string]account{}, Groups: map[string]bool{}, Gone: map[string]groupRows{}}
}

// madePath describes a path that a config made.
type madePath struct {
	Kind string `json:"kind"`
	// Original means that a file existed before. It is kept in Originals.
	Original bool `json:"original,omitempty"`
	// Emptied means that a directory existed before, and its contents were removed.
	Emptied bool `json:"emptied,omitempty"`
}

const manifestVersion = 1

// originalPath returns the path at which the original of p is kept.
func (t Target) originalPath(p string) string {
	sum := sha256.Sum256([]byte(p))
	return t.Originals + "/" + hex.EncodeToString(sum[:16])
}

// original describes an original file, directory or link.
type original struct {
	Path string `json:"path"`
	Link string `json:"link,omitempty"`
	Mode uint32 `json:"mode"`
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

// keep saves the file at the path of w, and reports whether it can be restored.
func (t Target) keep(w entry) (bool, error) {
	st, err := t.root().Lstat(w.Path)
	if isGone(err) {
		// Nothing is there now, so an older original must not be restored later.
		return false, errors.Join(t.Remove(t.originalPath(w.Path)), t.Remove(t.originalPath(w.Path)+".meta"))
	}
	if err != nil {
		return false, fmt.Errorf("checking %s: %w", w.Path, err)
	}
	k := original{Path: w.Path, Link: st.Link, Mode: uint32(st.Mode())}
	k.UID, k.GID = owner(st)
	var data []byte
	switch {
	case st.IsDir() || w.Kind == kindDir && t.isDir(w.Path):
		k.Mode |= uint32(fs.ModeDir)
	case st.Link == "":
		// Read contents and owner from the same open file, because a user may replace the file
		// meanwhile.
		var opened fs.FileInfo
		if data, opened, err = t.root().ReadFile(w.Path); err == nil {
			k.Mode = uint32(opened.Mode())
			k.UID, k.GID = owner(opened)
		} else if st.Theirs {
			return false, nil // nothing that can be restored
		}
	}
	if err != nil {
		return false, fmt.Errorf("saving the original of %s: %w", w.Path, err)
	}
	meta, err := json.Marshal(k)
	if err == nil {
		err = errors.Join(
			t.WriteFile(t.originalPath(w.Path), data, beneath.Owner{Mode: 0o600}),
			t.WriteFile(t.originalPath(w.Path)+".meta", meta, beneath.Owner{Mode: 0o600}))
	}
	if err != nil {
		return false, fmt.Errorf("saving the original of %s: %w", w.Path, err)
	}
	return true, nil
}

// keptMeta returns the description of the original of p; ok is false if there is none.
func (t Target) keptMeta(p string) (k original, ok bool, err error) {
	b, _, err := t.root().ReadFile(t.originalPath(p) + ".meta")
	if errors.Is(err, fs.ErrNotExist) {
		return k, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &k)
	}
	return k, err == nil, err
}

// giveBack undoes the change of a config at p.
func (t Target) giveBack(p string, m madePath) error {
	if !m.Original {
		if err := t.Remove(p); err != nil {
			return fmt.Errorf("removing %s: %w", p, err)
		}
		return nil
	}
	k, ok, err := t.keptMeta(p)
	if err == nil && !ok {
		return nil // it was restored before a power cut
	}
	if err == nil {
		err = t.restore(p, k)
	}
	if err == nil {
		err = errors.Join(t.Remove(t.originalPath(p)+".meta"), t.Remove(t.originalPath(p)))
	}
	if err != nil {
		return fmt.Errorf("restoring the original of %s: %w", p, err)
	}
	return nil
}

// restore puts the original of p back.
func (t Target) restore(p string, k original) error {
	mode := fs.FileMode(k.Mode)
	meta := beneath.Owner{Mode: mode & modeBits, UID: k.UID, GID: k.GID}
	st, err := t.root().Lstat(p)
	if err == nil && st.IsDir() != mode.IsDir() {
		if err := t.Remove(p); err != nil {
			return err
		}
		if t.isDir(p) {
			return nil // other files are in the directory now: it stays
		}
	}
	switch {
	case mode.IsDir() && mode&fs.ModeSymlink != 0:
		return nil // a config uses a link to a directory without changing it
	case mode.IsDir():
		return t.Mkdir(p, meta)
	case k.Link != "":
		return t.symlink(k.Link, p, meta)
	}
	data, _, err := t.root().ReadFile(t.originalPath(p))
	if err != nil {
		return err
	}
	return t.WriteFile(p, data, meta)
}

func (t Target) load() (manifest, error) {
	b, _, err := t.root().ReadFile(t.Manifest)
	if errors.Is(err, fs.ErrNotExist) {
		return manifest{}, nil
	}
	var m manifest
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	if err == nil && m.Version != manifestVersion {
		err = fmt.Errorf("version %d is not supported (this program supports %d)", m.Version, manifestVersion)
	}
	if err != nil {
		return manifest{}, fmt.Errorf("reading the list of applied settings, %s: %w", t.Manifest, err)
	}
	return m, nil
}

// EnabledUnits returns the units that the applied config enables, sorted.
func (t Target) EnabledUnits() ([]string, error) {
	m, err := t.load()
	var out []string
	for name, state := range m.Units {
		if state == "enabled" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, err
}

func (t Target) save(m manifest) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err == nil {
		err = t.WriteFile(t.Manifest, append(b, '\n'), beneath.Owner{Mode: 0o600})
	}
	if err != nil {
		return fmt.Errorf("writing the list of applied settings: %w", err)
	}
	return nil
}

// union returns the entries of both manifests, which may all exist during an Apply.
func union(old, next manifest) manifest {
	u := manifest{Version: manifestVersion, Paths: maps.Clone(next.Paths), Units: maps.Clone(next.Units),
		Users: maps.Clone(next.Users), Groups: maps.Clone(next.Groups), Gone: maps.Clone(next.Gone), Unfinished: true}
	for p, m := range old.Paths {
		if _, ok := u.Paths[p]; !ok {
			u.Paths[p] = m
		}
	}
	for n, s := range old.Units {
		if s == "enabled" || u.Units[n] == "" {
			u.Units[n] = s
		}
	}
	for n, a := range old.Users {
		if now, ok := u.Users[n]; ok {
			a = now
			a.Groups = appendMissing(a.Groups, old.Users[n].Groups)
			a.Left = appendMissing(a.Left, old.Users[n].Left)
		}
		u.Users[n] = a
	}
	for n := range old.Groups {
		u.Groups[n] = true
	}
	for n, g := range old.Gone {
		if _, ok := u.Gone[n]; !ok {
			u.Gone[n] = g
		}
	}
	return u
}

// appendMissing returns a, followed by the elements that only b has.
func appendMissing(a, b []string) []string {
	out := slices.Clone(a)
	for _, s := range b {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
