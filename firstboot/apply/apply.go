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
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	ign "github.com/coreos/ignition/v2/config/v3_6"
	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/vincent-petithory/dataurl"

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

// kinds of entries.
const (
	kindFile    = "file"
	kindDir     = "directory"
	kindSymlink = "symlink"
	kindLink    = "link"
)

type entry struct {
	Path, Kind string
	Data       []byte
	Meta       Meta
	// modeSet: the config itself names the permissions.
	modeSet bool
	// keepData: the file's contents are not the config's business.
	keepData bool
	// appendTo: Data follows what was there before us.
	appendTo  bool
	Target    string
	overwrite bool
	unit      string // the unit it belongs to
}

// manifest is what we made.
type manifest struct {
	Version int                `json:"version"`
	Paths   map[string]made    `json:"paths"`
	Units   map[string]string  `json:"units,omitempty"` // enabled | disabled | masked
	Users   map[string]account `json:"users,omitempty"`
	Groups  map[string]bool    `json:"groups,omitempty"` // that we added
}

type made struct {
	Kind string `json:"kind"`
	// Original: something stood there; it is kept in Originals.
	Original bool `json:"original,omitempty"`
}

// account is a user we added, or one we changed, as it was.
type account struct {
	Added  bool   `json:"added,omitempty"`
	Passwd string `json:"passwd,omitempty"`
	Shadow string `json:"shadow,omitempty"`
	// Groups that we put a user into who was there before.
	Groups []string `json:"groups,omitempty"`
}

const manifestVersion = 1

// Parse reads a config and refuses what Apply does not do.
func Parse(config []byte) (*types.Config, error) {
	cfg, rep, err := ign.ParseCompatibleVersion(config)
	if err != nil {
		return nil, fmt.Errorf("parsing the Ignition config: %w: %s", err, strings.TrimSpace(rep.String()))
	}
	if s := unsupported(&cfg); len(s) > 0 {
		return nil, &Unsupported{s}
	}
	return &cfg, nil
}

func unsupported(c *types.Config) []string {
	var out []string
	add := func(name string, there bool) {
		if there {
			out = append(out, name)
		}
	}
	add("storage.disks", len(c.Storage.Disks) > 0)
	add("storage.raid", len(c.Storage.Raid) > 0)
	add("storage.filesystems", len(c.Storage.Filesystems) > 0)
	add("storage.luks", len(c.Storage.Luks) > 0)
	add("kernelArguments", len(c.KernelArguments.ShouldExist)+len(c.KernelArguments.ShouldNotExist) > 0)
	add("ignition.config.merge", len(c.Ignition.Config.Merge) > 0)
	add("ignition.config.replace", c.Ignition.Config.Replace.Source != nil)
	for _, f := range c.Storage.Files {
		for _, r := range append([]types.Resource{f.Contents}, f.Append...) {
			if s := str(r.Source); s != "" && !strings.HasPrefix(s, "data:") {
				add("storage.files "+f.Path+" from "+scheme(s), true)
			}
		}
	}
	return out
}

func scheme(s string) string {
	before, _, _ := strings.Cut(s, ":")
	return before + ":"
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
	next := manifest{Version: manifestVersion, Paths: map[string]made{}, Units: map[string]string{}, Users: map[string]account{}, Groups: map[string]bool{}}
	acc, err := t.accounts(cfg.Passwd, old, &next)
	if err != nil {
		return Changes{}, err
	}
	want, err := desired(cfg, acc)
	if err != nil {
		return Changes{}, err
	}
	for name, state := range unitStates(cfg) {
		next.Units[name] = state
	}
	if err := t.conflicts(want, old); err != nil {
		return Changes{}, err
	}
	// Keep what we are going to write over, then say so, then write.
	for _, w := range want {
		m := made{Kind: w.Kind}
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
	gone := slices.Sorted(maps.Keys(old.Paths))
	slices.Reverse(gone) // what is in a directory goes before it
	for _, p := range gone {
		if _, ok := next.Paths[p]; ok {
			continue
		}
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

// desired lists what the config wants, parents before children.
func desired(c *types.Config, acc *accounts) ([]entry, error) {
	var out []entry
	var errs []error
	meta := func(n types.Node, mode *int, usual fs.FileMode) Meta {
		m := Meta{Mode: usual}
		if mode != nil {
			m.Mode = fileMode(*mode)
		}
		var err error
		if m.UID, err = acc.uid(n.User); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.Path, err))
		}
		if m.GID, err = acc.gid(n.Group); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.Path, err))
		}
		return m
	}
	for _, d := range c.Storage.Directories {
		out = append(out, entry{Path: path.Clean(d.Path), Kind: kindDir, Meta: meta(d.Node, d.Mode, 0o755),
			modeSet: d.Mode != nil, overwrite: yes(d.Overwrite)})
	}
	for _, f := range c.Storage.Files {
		e := entry{Path: path.Clean(f.Path), Kind: kindFile, Meta: meta(f.Node, f.Mode, 0o644),
			modeSet: f.Mode != nil, overwrite: yes(f.Overwrite)}
		e.keepData = f.Contents.Source == nil && len(f.Append) == 0
		e.appendTo = f.Contents.Source == nil && len(f.Append) > 0
		for _, r := range append([]types.Resource{f.Contents}, f.Append...) {
			b, err := resource(r)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", f.Path, err))
			}
			e.Data = append(e.Data, b...)
		}
		out = append(out, e)
	}
	for _, l := range c.Storage.Links {
		e := entry{Path: path.Clean(l.Path), Kind: kindSymlink, Target: str(l.Target), overwrite: yes(l.Overwrite)}
		if yes(l.Hard) {
			e.Kind = kindLink
		}
		out = append(out, e)
	}
	for _, u := range c.Systemd.Units {
		if yes(u.Mask) {
			out = append(out, entry{Path: unitDir + u.Name, Kind: kindSymlink, Target: "/dev/null", overwrite: true, unit: u.Name})
		} else if u.Contents != nil && *u.Contents != "" {
			out = append(out, entry{Path: unitDir + u.Name, Kind: kindFile, Data: []byte(*u.Contents), Meta: Meta{Mode: 0o644}, modeSet: true, overwrite: true, unit: u.Name})
		}
		for _, d := range u.Dropins {
			if d.Contents == nil || *d.Contents == "" {
				continue
			}
			out = append(out, entry{Path: unitDir + u.Name + ".d/" + d.Name, Kind: kindFile, Data: []byte(*d.Contents), Meta: Meta{Mode: 0o644}, modeSet: true, overwrite: true, unit: u.Name})
		}
	}
	out = append(out, acc.entries()...)
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("reading the Ignition config: %w", err)
	}
	// Directories first, parents before children; files; links last, since a
	// hard link's target may be one of the files.
	rank := map[string]int{kindDir: 0, kindFile: 1, kindSymlink: 2, kindLink: 3}
	slices.SortStableFunc(out, func(a, b entry) int {
		if a.Kind != b.Kind {
			return rank[a.Kind] - rank[b.Kind]
		}
		return strings.Compare(a.Path, b.Path)
	})
	return out, nil
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

// maxContents bounds what a compressed resource may become.
const maxContents = 64 << 20

// resource returns the contents that a config carries itself.
func resource(r types.Resource) ([]byte, error) {
	if str(r.Source) == "" {
		return nil, nil
	}
	u, err := dataurl.DecodeString(*r.Source)
	if err != nil {
		return nil, fmt.Errorf("decoding its contents: %w", err)
	}
	data := u.Data
	// As in Ignition, the hash is that of the contents as they are carried.
	if h := str(r.Verification.Hash); h != "" {
		if err := verify(data, h); err != nil {
			return nil, err
		}
	}
	if str(r.Compression) == "gzip" {
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			return nil, fmt.Errorf("uncompressing its contents: %w", err)
		}
		if data, err = io.ReadAll(io.LimitReader(z, maxContents+1)); err != nil {
			return nil, fmt.Errorf("uncompressing its contents: %w", err)
		}
		if len(data) > maxContents {
			return nil, fmt.Errorf("uncompressing its contents: more than %d bytes", maxContents)
		}
	}
	return data, nil
}

func verify(data []byte, want string) error {
	kind, sum, _ := strings.Cut(want, "-")
	var got string
	switch kind {
	case "sha512":
		s := sha512.Sum512(data)
		got = hex.EncodeToString(s[:])
	case "sha256":
		s := sha256.Sum256(data)
		got = hex.EncodeToString(s[:])
	default:
		return fmt.Errorf("verifying its contents: unknown hash %q", kind)
	}
	if got != sum {
		return fmt.Errorf("verifying its contents: they have %s-%s, expected %s", kind, got, want)
	}
	return nil
}

func str(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func yes(b *bool) bool { return b != nil && *b }

// conflicts finds what the config would write over without having said so.
func (t Target) conflicts(want []entry, old manifest) error {
	var errs []error
	seen := map[string]string{}
	for _, w := range want {
		if other, twice := seen[w.Path]; twice && (other != kindDir || w.Kind != kindDir) {
			errs = append(errs, fmt.Errorf("%s is named twice", w.Path))
		}
		seen[w.Path] = w.Kind
		st, err := t.root().Lstat(w.Path)
		if err != nil || st.Theirs {
			continue // what a user put there keeps nobody from his settings
		}
		if (w.Kind == kindDir) != st.IsDir() && !(w.Kind == kindDir && t.isDir(w.Path)) {
			errs = append(errs, fmt.Errorf("%s is there already, and is no %s", w.Path, w.Kind))
			continue
		}
		if _, ours := old.Paths[w.Path]; ours || w.overwrite || w.keepData || w.appendTo || w.Kind == kindDir {
			continue
		}
		if !t.same(w) {
			errs = append(errs, fmt.Errorf("%s is there already with other contents, and the config does not say overwrite", w.Path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("applying the Ignition config: %w", err)
	}
	return nil
}

// root is where Apply looks at the system: users may write to much of what a
// config names.
func (t Target) root() beneath.Root { return beneath.Root{Dir: t.Root} }

func (t Target) isDir(p string) bool { return t.root().IsDir(p) }

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
		return false
	}
	switch w.Kind {
	case kindSymlink:
		return st.Mode()&fs.ModeSymlink != 0 && st.Link == w.Target
	case kindLink:
		target, err := t.root().Lstat(w.Target)
		return err == nil && os.SameFile(st.FileInfo, target.FileInfo)
	case kindDir:
		if !st.IsDir() {
			return t.isDir(w.Path) // a link to a directory serves as one
		}
		return !w.modeSet || sameMeta(st, w.Meta)
	}
	want, err := t.data(w)
	if err != nil || !st.Mode().IsRegular() || st.Size() != int64(len(want)) {
		return false
	}
	have, opened, err := t.root().ReadFile(w.Path)
	return err == nil && sameMeta(opened, w.Meta) && bytes.Equal(have, want)
}

const modeBits = fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky

// put makes w so, and reports whether anything had to be done.
func (t Target) put(w entry) (bool, error) {
	if t.same(w) {
		return false, nil
	}
	var err error
	switch w.Kind {
	case kindDir:
		err = t.Mkdir(w.Path, w.Meta)
	case kindSymlink:
		err = t.Symlink(w.Target, w.Path)
	case kindLink:
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
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, beneath.ErrLink) || errors.Is(err, syscall.ENOTDIR) {
		// Nothing there: an original left from long ago would mislead.
		return false, errors.Join(t.Remove(t.original(w.Path)), t.Remove(t.original(w.Path)+".meta"))
	}
	if err != nil {
		return false, fmt.Errorf("looking at %s: %w", w.Path, err)
	}
	if st.IsDir() || w.Kind == kindDir {
		return true, nil // stays a directory; it is never removed
	}
	k := kept{Path: w.Path, Link: st.Link, Mode: uint32(st.Mode())}
	k.UID, k.GID = owner(st)
	var data []byte
	if st.Link == "" {
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

// giveBack undoes what we made of p.
func (t Target) giveBack(p string, m made) error {
	if m.Kind == kindDir {
		if m.Original {
			return nil
		}
		if err := t.Remove(p); err != nil {
			return fmt.Errorf("removing directory %s: %w", p, err)
		}
		return nil
	}
	if !m.Original {
		if err := t.Remove(p); err != nil {
			return fmt.Errorf("removing %s: %w", p, err)
		}
		return nil
	}
	b, _, err := t.root().ReadFile(t.original(p) + ".meta")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // given back before the power went
	}
	var k kept
	if err == nil {
		err = json.Unmarshal(b, &k)
	}
	if err == nil {
		if k.Link != "" {
			err = t.Symlink(k.Link, p)
		} else {
			var data []byte
			if data, _, err = t.root().ReadFile(t.original(p)); err == nil {
				err = t.WriteFile(p, data, Meta{Mode: fs.FileMode(k.Mode) & modeBits, UID: k.UID, GID: k.GID})
			}
		}
	}
	if err == nil {
		err = errors.Join(t.Remove(t.original(p)+".meta"), t.Remove(t.original(p)))
	}
	if err != nil {
		return fmt.Errorf("giving back the original of %s: %w", p, err)
	}
	return nil
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
	u := manifest{Version: manifestVersion, Paths: maps.Clone(next.Paths), Units: maps.Clone(next.Units), Users: maps.Clone(next.Users), Groups: maps.Clone(next.Groups)}
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
			for _, g := range old.Users[n].Groups {
				if !slices.Contains(a.Groups, g) {
					a.Groups = append(slices.Clone(a.Groups), g)
				}
			}
		}
		u.Users[n] = a
	}
	for n := range old.Groups {
		u.Groups[n] = true
	}
	return u
}
