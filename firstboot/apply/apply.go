// Package apply makes a running system what an Ignition config says: files,
// directories, links, users, groups, SSH keys and systemd units.
//
// The real Ignition runs once, before the first boot, on a disk of its own,
// and either succeeds or leaves no machine. Ours runs on a machine that is up
// and may lose its power anywhere, and again when its Site was corrected. So:
//
//   - every path is replaced at once, and every step may be carried out again;
//   - a manifest lists what we made, and what stood there before is kept, so
//     that a config which no longer names a path gives the original back;
//   - the manifest names a path before the path is touched: a cut leaves it
//     naming too much, never too little;
//   - what it does not apply, it refuses by name, before anything is written.
//
// docs/decisions/0006 has the comparison, and the tests hold the result
// against that of the real program.
package apply

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	ign "github.com/coreos/ignition/v2/config/v3_6"
	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/beneath"
)

// Meta is whose a path is, and with which permissions.
type Meta struct {
	Mode     fs.FileMode
	UID, GID int
}

// Target is the system to change: reading is below Root, changing goes
// through the funcs, whose paths begin at Root too.
type Target struct {
	Root string
	// Manifest is the file that lists what was made, Originals the folder
	// that keeps what stood there before.
	Manifest, Originals string

	// WriteFile replaces a file at once and makes missing parents.
	WriteFile func(path string, data []byte, m Meta) error
	// Mkdir makes a directory, or gives it owner and permissions.
	Mkdir   func(path string, m Meta) error
	Symlink func(target, path string) error
	Link    func(target, path string) error
	// Remove removes a file, link or empty directory; nothing there is fine.
	Remove func(path string) error
	// Unit enables or disables a unit.
	Unit func(ctx context.Context, verb, unit string) error
}

// Changes are what an Apply did, so that the running system can be told.
type Changes struct {
	// Paths that were written or removed, sorted.
	Paths []string
	Units []UnitChange
}

// UnitChange is a unit of the config, or one it does not name any more.
type UnitChange struct {
	Name                      string
	Enabled, Disabled, Masked bool
	Changed/* its files were */ bool
}

// Unsupported names the sections of a config that are not applied.
type Unsupported struct{ Sections []string }

func (u *Unsupported) Error() string {
	return "the Ignition config has sections that are not applied at first boot: " + strings.Join(u.Sections, ", ")
}

// Refused is an error that only a person can fix: the config asks for what
// cannot be done on this system. Nothing was changed.
type Refused struct{ Err error }

func (r *Refused) Error() string { return r.Err.Error() }
func (r *Refused) Unwrap() error { return r.Err }

func refuse(err error) error { return &Refused{err} }

// kinds of entries.
const (
	kindFile    = "file"
	kindDir     = "directory"
	kindSymlink = "symlink"
	kindLink    = "link"
	kindAbsent  = "nothing" // what went with a directory that was overwritten
)

type entry struct {
	Path, Kind string
	Data       []byte
	Meta       Meta
	// modeSet, uidSet, gidSet: the config itself names them. What it does
	// not name stays as it is where something is there.
	modeSet, uidSet, gidSet bool
	// once: it is made where nothing is, and left alone from then on.
	once bool
	// fromUser: it follows from a user; the config's own entry goes before.
	fromUser bool
	// keepData: the file's contents are not the config's business.
	keepData bool
	// appendTo: Data follows what was there before us.
	appendTo  bool
	Target    string
	overwrite bool
	// empties: a directory stood there, and goes with what is in it.
	empties bool
	// unmask: only a link to /dev/null is meant.
	unmask bool
	unit   string // the unit it belongs to
}

// manifest is what we made.
type manifest struct {
	Version int                `json:"version"`
	Paths   map[string]made    `json:"paths"`
	Units   map[string]string  `json:"units,omitempty"` // enabled | disabled | masked
	Users   map[string]account `json:"users,omitempty"`
	Groups  map[string]bool    `json:"groups,omitempty"` // that we added
	// Gone are the groups that we changed or removed, as they were.
	Gone map[string]groupRows `json:"gone,omitempty"`
	// Unfinished: the config is being applied, or the power went meanwhile.
	Unfinished bool `json:"unfinished,omitempty"`
}

func newManifest() manifest {
	return manifest{Version: manifestVersion, Paths: map[string]made{}, Units: map[string]string{},
		Users: map[string]account{}, Groups: map[string]bool{}, Gone: map[string]groupRows{}}
}

type made struct {
	Kind string `json:"kind"`
	// Original: something stood there; it is kept in Originals.
	Original bool `json:"original,omitempty"`
	// Emptied: what was in the directory that stood there was taken out.
	Emptied bool `json:"emptied,omitempty"`
}

const manifestVersion = 1

// Parse reads a config and refuses what Apply does not do.
func Parse(config []byte) (*types.Config, error) {
	cfg, rep, err := ign.ParseCompatibleVersion(config)
	if err != nil {
		return nil, refuse(fmt.Errorf("parsing the Ignition config: %w: %s", err, strings.TrimSpace(rep.String())))
	}
	var sections []string
	for _, p := range configs.UnsupportedIgnition(&cfg) {
		sections = append(sections, p.Section)
	}
	if sections != nil {
		return nil, refuse(&Unsupported{sections})
	}
	if probs := configs.CheckIgnition(&cfg); probs != nil {
		return nil, refuse(fmt.Errorf("reading the Ignition config: %w", probs))
	}
	return &cfg, nil
}

// Apply makes the system what config says and what it said last, no longer.
// An empty config takes everything back.
func Apply(ctx context.Context, t Target, config []byte) (Changes, error) {
	cfg, err := Parse(config)
	if err != nil {
		return Changes{}, err
	}
	old, err := t.load()
	if err != nil {
		return Changes{}, err
	}
	next := newManifest()
	acc, err := t.accounts(cfg.Passwd, old, &next)
	if err != nil {
		return Changes{}, err
	}
	want, err := t.desired(cfg, acc, old)
	if err != nil {
		return Changes{}, err
	}
	for name, state := range unitStates(cfg) {
		next.Units[name] = state
	}
	// Keep what we are going to write over, then say so, then write.
	for _, w := range want {
		if w.once {
			continue // it becomes the user's own
		}
		m := made{Kind: w.Kind, Emptied: w.empties}
		if o, ok := old.Paths[w.Path]; ok {
			m.Original = o.Original
		} else if m.Original, err = t.keep(w); err != nil {
			return Changes{}, err
		}
		next.Paths[w.Path] = m
	}
	if err := t.save(union(old, next)); err != nil {
		return Changes{}, err
	}

	changed := map[string]bool{}
	if err := acc.write(t, changed); err != nil {
		return Changes{}, err
	}
	touched := map[string]bool{} // units
	for _, w := range want {
		did, err := t.put(w)
		if err != nil {
			return Changes{}, err
		}
		if did {
			changed[w.Path] = true
			if w.unit != "" {
				touched[w.unit] = true
			}
		}
	}
	for name, state := range old.Units {
		if state == "enabled" && next.Units[name] != "enabled" {
			// Before its file goes: what enables it is written there.
			if err := t.Unit(ctx, "disable", name); err != nil {
				return Changes{}, fmt.Errorf("disabling unit %s: %w", name, err)
			}
		}
	}
	for _, p := range t.gone(old, next) {
		if err := t.giveBack(p, old.Paths[p]); err != nil {
			return Changes{}, err
		}
		changed[p] = true
		if u := unitOf(p); u != "" {
			touched[u] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(next.Units)) {
		verb := map[string]string{"enabled": "enable", "disabled": "disable"}[next.Units[name]]
		if verb == "" {
			continue
		}
		if err := t.Unit(ctx, verb, name); err != nil {
			return Changes{}, fmt.Errorf("%s unit %s: %w", strings.TrimSuffix(verb, "e")+"ing", name, err)
		}
	}
	if err := t.save(next); err != nil {
		return Changes{}, err
	}
	return Changes{Paths: slices.Sorted(maps.Keys(changed)), Units: unitChanges(old, next, touched)}, nil
}

// gone lists what the config names no more, in the order in which it is given
// back: what is in a directory goes before it, and comes back after it.
func (t Target) gone(old, next manifest) []string {
	var made, absent []string
	for _, p := range slices.Sorted(maps.Keys(old.Paths)) {
		switch _, ok := next.Paths[p]; {
		case ok:
		case old.Paths[p].Kind == kindAbsent:
			absent = append(absent, p)
		default:
			made = append(made, p)
		}
	}
	slices.Reverse(made)
	return append(made, absent...)
}

func unitChanges(old, next manifest, touched map[string]bool) []UnitChange {
	names := map[string]bool{}
	for n := range touched {
		names[n] = true
	}
	for n := range next.Units {
		names[n] = true
	}
	for n, s := range old.Units {
		if next.Units[n] != s {
			names[n] = true
		}
	}
	var out []UnitChange
	for _, n := range slices.Sorted(maps.Keys(names)) {
		was, is := old.Units[n], next.Units[n]
		out = append(out, UnitChange{
			Name: n, Changed: touched[n],
			Enabled:  is == "enabled",
			Disabled: is == "disabled" || was == "enabled" && is == "",
			Masked:   is == "masked",
		})
	}
	return out
}

func unitStates(c *types.Config) map[string]string {
	out := map[string]string{}
	for _, u := range c.Systemd.Units {
		switch {
		case u.Mask != nil && *u.Mask:
			out[u.Name] = "masked"
		case u.Enabled != nil && *u.Enabled:
			out[u.Name] = "enabled"
		case u.Enabled != nil:
			out[u.Name] = "disabled"
		}
	}
	return out
}

const unitDir = "/etc/systemd/system/"

func unitOf(p string) string {
	rest, ok := strings.CutPrefix(p, unitDir)
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return strings.TrimSuffix(name, ".d")
}

// fileMode takes a st_mode's permission bits apart.
func fileMode(m int) fs.FileMode {
	out := fs.FileMode(m & 0o777)
	for _, b := range []struct {
		bit int
		is  fs.FileMode
	}{{0o4000, fs.ModeSetuid}, {0o2000, fs.ModeSetgid}, {0o1000, fs.ModeSticky}} {
		if m&b.bit != 0 {
			out |= b.is
		}
	}
	return out
}

func str(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func yes(b *bool) bool { return b != nil && *b }

// root is where Apply looks at the system: users may write to much of what a
// config names.
func (t Target) root() beneath.Root { return beneath.Root{Dir: t.Root} }

func (t Target) isDir(p string) bool { return t.root().IsDir(p) }

// path is where p is on this machine: to list what is below it.
func (t Target) path(p string) string { return filepath.Join(t.Root, p) }

// data is what the file of w is to hold.
func (t Target) data(w entry) ([]byte, error) {
	if !w.appendTo && !w.keepData {
		return w.Data, nil
	}
	before, _, err := t.root().ReadFile(t.original(w.Path))
	if errors.Is(err, fs.ErrNotExist) && w.keepData {
		before, _, err = t.root().ReadFile(w.Path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading what %s held before: %w", w.Path, err)
	}
	return append(bytes.Clone(before), w.Data...), nil
}

// same reports whether the path holds what w wants.
func (t Target) same(w entry) bool {
	st, err := t.root().Lstat(w.Path)
	if err != nil {
		return w.Kind == kindAbsent && isGone(err)
	}
	switch w.Kind {
	case kindAbsent:
		return false
	case kindSymlink:
		return st.Mode()&fs.ModeSymlink != 0 && path.Clean(st.Link) == path.Clean(w.Target) &&
			(!w.uidSet && !w.gidSet || sameOwner(st, w.Meta))
	case kindLink:
		target, err := t.root().Lstat(w.Target)
		return err == nil && os.SameFile(st.FileInfo, target.FileInfo)
	case kindDir:
		if !st.IsDir() {
			return t.isDir(w.Path) // a link to a directory serves as one
		}
		return sameMeta(st, w.Meta)
	}
	want, err := t.data(w)
	if err != nil || !st.Mode().IsRegular() || st.Size() != int64(len(want)) {
		return false
	}
	have, opened, err := t.root().ReadFile(w.Path)
	return err == nil && sameMeta(opened, w.Meta) && bytes.Equal(have, want)
}

// isGone reports whether nothing can stand at a path.
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, beneath.ErrLink) || errors.Is(err, syscall.ENOTDIR)
}

const modeBits = fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky

// put makes w so, and reports whether anything had to be done.
func (t Target) put(w entry) (bool, error) {
	if t.same(w) {
		return false, nil
	}
	st, err := t.root().Lstat(w.Path)
	if err == nil && w.once {
		return false, nil
	}
	if err == nil && st.IsDir() != (w.Kind == kindDir) {
		err = t.Remove(w.Path) // the conflict was seen, and is wanted
	} else {
		err = nil
	}
	switch {
	case err != nil:
	case w.Kind == kindAbsent:
		err = t.Remove(w.Path)
	case w.Kind == kindDir:
		err = t.Mkdir(w.Path, w.Meta)
	case w.Kind == kindSymlink:
		err = t.symlink(w.Target, w.Path, w.Meta)
	case w.Kind == kindLink:
		err = t.Link(w.Target, w.Path)
	default:
		var data []byte
		if data, err = t.data(w); err == nil {
			err = t.WriteFile(w.Path, data, w.Meta)
		}
	}
	if err != nil {
		return false, fmt.Errorf("making %s %s: %w", w.Kind, w.Path, err)
	}
	return true, nil
}

// symlink makes a link with its owner.
func (t Target) symlink(target, p string, m Meta) error {
	if err := t.Symlink(target, p); err != nil || m.UID == 0 && m.GID == 0 {
		return err
	}
	return chownLink(t.path(p), m)
}

// original is where the former contents of p are kept.
func (t Target) original(p string) string {
	sum := sha256.Sum256([]byte(p))
	return t.Originals + "/" + hex.EncodeToString(sum[:16])
}

// kept is a former file or link.
type kept struct {
	Path string `json:"path"`
	Link string `json:"link,omitempty"`
	Mode uint32 `json:"mode"`
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

// keep saves what stands at the path of w, which is not ours yet.
func (t Target) keep(w entry) (bool, error) {
	st, err := t.root().Lstat(w.Path)
	if isGone(err) {
		// Nothing there: an original left from long ago would mislead.
		return false, errors.Join(t.Remove(t.original(w.Path)), t.Remove(t.original(w.Path)+".meta"))
	}
	if err != nil {
		return false, fmt.Errorf("looking at %s: %w", w.Path, err)
	}
	k := kept{Path: w.Path, Link: st.Link, Mode: uint32(st.Mode())}
	k.UID, k.GID = owner(st)
	var data []byte
	switch {
	case st.IsDir() || w.Kind == kindDir && t.isDir(w.Path):
		k.Mode |= uint32(fs.ModeDir)
	case st.Link == "":
		// Contents and owner of one and the same file: a user may exchange
		// his for another's meanwhile.
		var opened fs.FileInfo
		if data, opened, err = t.root().ReadFile(w.Path); err == nil {
			k.Mode = uint32(opened.Mode())
			k.UID, k.GID = owner(opened)
		} else if st.Theirs {
			return false, nil // nothing that could be given back
		}
	}
	if err != nil {
		return false, fmt.Errorf("keeping the original of %s: %w", w.Path, err)
	}
	meta, err := json.Marshal(k)
	if err == nil {
		err = errors.Join(
			t.WriteFile(t.original(w.Path), data, Meta{Mode: 0o600}),
			t.WriteFile(t.original(w.Path)+".meta", meta, Meta{Mode: 0o600}))
	}
	if err != nil {
		return false, fmt.Errorf("keeping the original of %s: %w", w.Path, err)
	}
	return true, nil
}

// original of p, as keep noted it; ok is false where nothing is noted.
func (t Target) keptMeta(p string) (k kept, ok bool, err error) {
	b, _, err := t.root().ReadFile(t.original(p) + ".meta")
	if errors.Is(err, fs.ErrNotExist) {
		return k, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &k)
	}
	return k, err == nil, err
}

// giveBack undoes what we made of p.
func (t Target) giveBack(p string, m made) error {
	if !m.Original {
		if err := t.Remove(p); err != nil {
			return fmt.Errorf("removing %s: %w", p, err)
		}
		return nil
	}
	k, ok, err := t.keptMeta(p)
	if err == nil && !ok {
		return nil // given back before the power went
	}
	if err == nil {
		err = t.restore(p, k)
	}
	if err == nil {
		err = errors.Join(t.Remove(t.original(p)+".meta"), t.Remove(t.original(p)))
	}
	if err != nil {
		return fmt.Errorf("giving back the original of %s: %w", p, err)
	}
	return nil
}

// restore makes p what was kept of it.
func (t Target) restore(p string, k kept) error {
	mode := fs.FileMode(k.Mode)
	meta := Meta{Mode: mode & modeBits, UID: k.UID, GID: k.GID}
	st, err := t.root().Lstat(p)
	if err == nil && st.IsDir() != mode.IsDir() {
		if err := t.Remove(p); err != nil {
			return err
		}
		if t.isDir(p) {
			return nil // somebody's files are in it now: they stay
		}
	}
	switch {
	case mode.IsDir() && mode&fs.ModeSymlink != 0:
		return nil // a link that serves as a directory was left alone
	case mode.IsDir():
		return t.Mkdir(p, meta)
	case k.Link != "":
		return t.symlink(k.Link, p, meta)
	}
	data, _, err := t.root().ReadFile(t.original(p))
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
		err = fmt.Errorf("it has version %d, this program knows %d", m.Version, manifestVersion)
	}
	if err != nil {
		return manifest{}, fmt.Errorf("reading the list of what was applied, %s: %w", t.Manifest, err)
	}
	return m, nil
}

func (t Target) save(m manifest) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err == nil {
		err = t.WriteFile(t.Manifest, append(b, '\n'), Meta{Mode: 0o600})
	}
	if err != nil {
		return fmt.Errorf("writing the list of what is applied: %w", err)
	}
	return nil
}

// union names all that either names: what may be there while we work.
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
			a.Groups = with(a.Groups, old.Users[n].Groups)
			a.Left = with(a.Left, old.Users[n].Left)
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

// with is a and what b has beside it.
func with(a, b []string) []string {
	out := slices.Clone(a)
	for _, s := range b {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
