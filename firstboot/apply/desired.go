package apply

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/firstboot/beneath"
)

// desired lists the config's entries in the order of their creation. It returns an error if one
// would overwrite a file without overwrite: true.
func (t Target) desired(c *types.Config, acc *accounts, old manifest) ([]entry, error) {
	out, err := t.homes(acc, old)
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i].fromUser = true
	}
	listed, errs := namedEntries(c, acc)
	out, twice := merged(append(out, listed...))
	errs = append(errs, twice...)
	if errs == nil {
		var cleared []entry
		if out, cleared, errs = t.overwritten(out, acc, old); errs == nil {
			out = append(out, cleared...)
		}
	}
	for i := range out {
		if err := t.inherit(&out[i], old); err != nil {
			return nil, err
		}
	}
	if errs == nil {
		errs = t.conflicts(out, old)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, refuse(fmt.Errorf("applying the Ignition config: %w", err))
	}
	sortEntries(out)
	return out, nil
}

// sortEntries sorts removals first (deepest first), then directories (parents first), files, and
// links, because a hard link may point to one of the files.
func sortEntries(out []entry) {
	rank := map[string]int{kindAbsent: 0, kindDir: 1, kindFile: 2, kindSymlink: 3, kindLink: 4}
	slices.SortStableFunc(out, func(a, b entry) int {
		switch {
		case a.Kind != b.Kind:
			return rank[a.Kind] - rank[b.Kind]
		case a.Kind == kindAbsent:
			return strings.Compare(b.Path, a.Path)
		}
		return strings.Compare(a.Path, b.Path)
	})
}

// namedEntries returns the entries that the config itself names, without those derived from users.
func namedEntries(c *types.Config, acc *accounts) (out []entry, errs []error) {
	node := func(n types.Node, kind string, mode *int, usual fs.FileMode) entry {
		e := entry{Path: path.Clean(n.Path), Kind: kind, overwrite: isTrue(n.Overwrite), Owner: beneath.Owner{Mode: usual}}
		if mode != nil {
			e.Owner.Mode, e.modeSet = fileMode(*mode), true
		}
		uid, err := acc.uid(n.User)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.Path, err))
		}
		gid, err := acc.gid(n.Group)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.Path, err))
		}
		if e.uidSet = uid != nil; e.uidSet {
			e.Owner.UID = *uid
		}
		if e.gidSet = gid != nil; e.gidSet {
			e.Owner.GID = *gid
		}
		return e
	}
	for _, d := range c.Storage.Directories {
		out = append(out, node(d.Node, kindDir, d.Mode, 0o755))
	}
	for _, f := range c.Storage.Files {
		e := node(f.Node, kindFile, f.Mode, 0o644)
		e.keepData = f.Contents.Source == nil && len(f.Append) == 0
		e.appendTo = f.Contents.Source == nil && len(f.Append) > 0
		for _, r := range append([]types.Resource{f.Contents}, f.Append...) {
			b, err := ignition.Contents(r)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", f.Path, err))
			}
			e.Data = append(e.Data, b...)
		}
		out = append(out, e)
	}
	for _, l := range c.Storage.Links {
		e := node(l.Node, kindSymlink, nil, 0o777)
		e.Target = str(l.Target)
		if isTrue(l.Hard) {
			e.Kind = kindLink
		}
		out = append(out, e)
	}
	for _, u := range c.Systemd.Units {
		out = append(out, unitEntries(u)...)
	}
	return out, errs
}

func unitEntries(u types.Unit) []entry {
	var out []entry
	file := func(p, data string) {
		out = append(out, entry{Path: p, Kind: kindFile, Data: []byte(data), Owner: beneath.Owner{Mode: 0o644},
			modeSet: true, uidSet: true, gidSet: true, overwrite: true, unit: u.Name})
	}
	switch {
	case isTrue(u.Mask):
		out = append(out, entry{Path: unitDir + u.Name, Kind: kindSymlink, Target: "/dev/null", overwrite: true, unit: u.Name})
	case str(u.Contents) != "":
		file(unitDir+u.Name, *u.Contents)
	case u.Mask != nil:
		out = append(out, entry{Path: unitDir + u.Name, Kind: kindAbsent, unmask: true, unit: u.Name})
	}
	for _, d := range u.Dropins {
		if d.Contents != nil {
			file(unitDir+u.Name+".d/"+d.Name, *d.Contents)
		}
	}
	return out
}

// merged combines the entries derived from users, which come first as in Ignition, with those that
// the config names.
func merged(all []entry) (out []entry, errs []error) {
	at := map[string]int{}
	for _, e := range all {
		i, twice := at[e.Path]
		if !twice {
			at[e.Path] = len(out)
			out = append(out, e)
			continue
		}
		first := out[i]
		switch {
		case first.fromUser && e.Kind == kindDir && first.Kind == kindDir:
			out[i] = withOwnerOf(first, e)
		case first.fromUser && e.Kind == kindFile && first.Kind == kindFile && (e.appendTo || e.keepData):
			e.Data = append(slices.Clone(first.Data), e.Data...)
			e.appendTo, e.keepData = false, false
			out[i] = withOwnerOf(first, e)
			out[i].overwrite = true
		case first.fromUser && e.overwrite && e.Kind != kindDir:
			out[i] = e
		case first.fromUser:
			errs = append(errs, fmt.Errorf("%s is also written by passwd.users: add overwrite: true, or remove it from one of the two sections", e.Path))
		default:
			errs = append(errs, fmt.Errorf("%s is named twice in the Ignition config", e.Path))
		}
	}
	return out, errs
}

// withOwnerOf returns e; owner and permissions that e does not set are those of first.
func withOwnerOf(first, e entry) entry {
	if !e.modeSet {
		e.Owner.Mode, e.modeSet = first.Owner.Mode, first.modeSet
	}
	if !e.uidSet {
		e.Owner.UID, e.uidSet = first.Owner.UID, first.uidSet
	}
	if !e.gidSet {
		e.Owner.GID, e.gidSet = first.Owner.GID, first.gidSet
	}
	return e
}

// inherit sets the owner and permissions of an entry that changes an existing file: those of the
// original, except where the config sets them.
func (t Target) inherit(w *entry, old manifest) error {
	changes := w.Kind == kindDir && !w.empties || w.Kind == kindFile && (w.keepData || w.appendTo)
	if !changes || w.modeSet && w.uidSet && w.gidSet {
		return nil
	}
	before, ok, err := t.originalOwner(w.Path, old)
	if w.fromUser && !ok && !old.Unfinished {
		before, ok = t.currentOwner(w.Path) // a home that a config made: keep the owner and mode that its user may have set
	}
	if err != nil || !ok || before.Mode.IsDir() != (w.Kind == kindDir) {
		return err
	}
	if !w.modeSet {
		w.Owner.Mode = before.Mode & modeBits
	}
	if !w.uidSet {
		w.Owner.UID = before.UID
	}
	if !w.gidSet {
		w.Owner.GID = before.GID
	}
	return nil
}

// originalOwner returns the owner and mode of the original at p.
func (t Target) originalOwner(p string, old manifest) (beneath.Owner, bool, error) {
	m, ours := old.Paths[p]
	if ours && !m.Original {
		return beneath.Owner{}, false, nil
	}
	if ours {
		k, ok, err := t.keptMeta(p)
		if err != nil {
			return beneath.Owner{}, false, fmt.Errorf("reading the record of the original of %s: %w", p, err)
		}
		if ok {
			return beneath.Owner{Mode: fs.FileMode(k.Mode), UID: k.UID, GID: k.GID}, true, nil
		}
	}
	meta, ok := t.currentOwner(p)
	return meta, ok, nil
}

// currentOwner returns the owner and mode that p has now; ok is false for a link.
func (t Target) currentOwner(p string) (beneath.Owner, bool) {
	st, err := t.root().Lstat(p)
	if err != nil || st.Mode()&fs.ModeSymlink != 0 {
		return beneath.Owner{}, false
	}
	uid, gid := owner(st)
	return beneath.Owner{Mode: st.Mode(), UID: uid, GID: gid}, true
}

// conflicts returns an error for each file that the config would overwrite without overwrite: true.
func (t Target) conflicts(want []entry, old manifest) []error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, w := range want {
		st, err := t.root().Lstat(w.Path)
		if err != nil || st.Theirs || w.once || w.Kind == kindAbsent {
			continue // a file that a user put there must not block the Site's settings
		}
		_, ours := old.Paths[w.Path]
		switch {
		case w.Kind == kindDir && (st.IsDir() || t.isDir(w.Path)), w.overwrite:
		case w.Kind == kindDir || st.IsDir():
			bad("%s exists already, but is not a %s: choose another path, or add overwrite: true", w.Path, w.Kind)
		case ours:
		case w.keepData || w.appendTo:
			if !st.Mode().IsRegular() {
				bad("%s exists, but is not a regular file, so nothing can be appended to it: choose another path", w.Path)
			}
		case !t.same(w):
			bad("%s exists already with other contents: add overwrite: true, or choose another path", w.Path)
		}
	}
	return errs
}

// Limits of the contents of an overwritten directory, which are kept as originals.
const (
	maxCleared      = 2000
	maxClearedBytes = 32 << 20
)

// needed lists directories that are never overwritten, and neither are their parents.
var needed = []string{"/etc/systemd/system", "/etc/kubernetes", "/etc/edgebake", "/var/lib/edgebake", "/var/lib/kubelet", "/var/lib/containerd",
	"/usr/bin", "/usr/lib", "/usr/sbin", "/boot", "/dev", "/proc", "/sys", "/run", "/tmp", "/home", "/root", "/var/log"}

// overwritten sets empties on the entries that overwrite an existing directory, and leaves out
// those that have no effect. cleared lists the contents of these directories, which are removed as
// by Ignition, but kept as originals.
func (t Target) overwritten(want []entry, acc *accounts, old manifest) (entries, cleared []entry, errs []error) {
	var dirs []string
	for i := range want {
		w := &want[i]
		if w.Kind == kindAbsent && w.unmask {
			st, err := t.root().Lstat(w.Path)
			_, ours := old.Paths[w.Path]
			if ours || err == nil && st.Link == "/dev/null" {
				entries = append(entries, *w)
			}
			continue
		}
		entries = append(entries, *w)
		st, err := t.root().Lstat(w.Path)
		// A user's own directory is moved aside as a whole when the entry is made.
		there := err == nil && st.IsDir() && !st.Theirs
		if w.overwrite && (there || old.Paths[w.Path].Emptied) {
			entries[len(entries)-1].empties = true
			dirs = append(dirs, w.Path)
		}
	}
	for _, h := range acc.removed {
		st, err := t.root().Lstat(h.dir)
		_, ours := old.Paths[h.dir]
		if err == nil && st.IsDir() {
			uid, _ := owner(st)
			ours = uid == h.uid
		}
		if ours {
			entries = append(entries, entry{Path: h.dir, Kind: kindAbsent, empties: true})
			dirs = append(dirs, h.dir)
		}
	}
	cleared, errs = t.clear(dirs, entries, old)
	return entries, cleared, errs
}

// clear lists the contents of the overwritten directories, except those that entries contains.
func (t Target) clear(dirs []string, entries []entry, old manifest) (cleared []entry, errs []error) {
	named := map[string]int{}
	for i, w := range entries {
		named[w.Path] = i
	}
	for _, dir := range dirs {
		paths, err := t.originalContents(dir, old)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, p := range paths {
			i, wanted := named[p]
			if !wanted {
				named[p] = -1
				cleared = append(cleared, entry{Path: p, Kind: kindAbsent})
			} else if i >= 0 {
				w := &entries[i]
				w.overwrite, w.keepData, w.appendTo = true, false, false
				w.modeSet, w.uidSet, w.gidSet = true, true, true
			}
		}
	}
	return cleared, errs
}

// originalContents lists the original contents of a directory.
func (t Target) originalContents(dir string, old manifest) ([]string, error) {
	var paths []string
	for p, m := range old.Paths {
		if m.Kind == kindAbsent && strings.HasPrefix(p, dir+"/") {
			paths = append(paths, p)
		}
	}
	if old.Paths[dir].Emptied {
		return paths, nil
	}
	if slices.ContainsFunc(needed, func(n string) bool { return n == dir || strings.HasPrefix(n, strings.TrimSuffix(dir, "/")+"/") }) {
		return nil, fmt.Errorf("%s is a directory that the machine needs, and cannot be replaced: choose another path", dir)
	}
	var size int64
	err := filepath.WalkDir(t.path(dir), func(full string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		p := dir + strings.TrimPrefix(full, t.path(dir))
		if p == dir {
			return nil
		}
		if m, ours := old.Paths[p]; ours && m.Kind != kindAbsent {
			return nil // it is undone with the last config, or still configured
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		if !d.IsDir() && !d.Type().IsRegular() && d.Type() != fs.ModeSymlink {
			return fmt.Errorf("%s is a device, socket or pipe", p)
		}
		paths = append(paths, p)
		if d.Type().IsRegular() {
			size += st.Size()
		}
		if len(paths) > maxCleared || size > maxClearedBytes {
			return fmt.Errorf("it contains more than %d files or %s", maxCleared, bytesize.MiB(maxClearedBytes))
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s exists already, and cannot be overwritten: %w: remove it from the image instead", dir, err)
	}
	return paths, nil
}

// skeleton returns the entries that a new home starts with.
func (t Target) skeleton(skel, home string, uid, gid int) ([]entry, error) {
	var out []entry
	err := filepath.WalkDir(t.path(skel), func(full string, d fs.DirEntry, err error) error {
		rel := strings.TrimPrefix(full, t.path(skel))
		if err != nil || rel == "" {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		e := entry{Path: home + rel, Owner: beneath.Owner{Mode: st.Mode() & modeBits, UID: uid, GID: gid},
			modeSet: true, uidSet: true, gidSet: true, once: true}
		switch {
		case d.IsDir():
			e.Kind = kindDir
		case d.Type().IsRegular():
			e.Kind = kindFile
			e.Data, _, err = t.root().ReadFile(skel + rel)
		case d.Type() == fs.ModeSymlink:
			e.Kind = kindSymlink
			e.Target, err = os.Readlink(full)
		default:
			return nil
		}
		out = append(out, e)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", skel, err)
	}
	return out, nil
}
