package apply

import (
	"bytes"
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

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/firstboot/beneath"
)

// pathsOnlyIn lists the paths that only old has, in the order in which they are undone. A directory
// comes after its contents if the config created them, and before them if the config removed them.
func (t Target) pathsOnlyIn(old, next manifest) []string {
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

// fileMode converts permission bits in the format of st_mode.
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

func isTrue(b *bool) bool { return b != nil && *b }

// root reads the system safely, because users may write to many of the paths that a config names.
func (t Target) root() beneath.Root { return beneath.Root{Dir: t.Root} }

func (t Target) isDir(p string) bool { return t.root().IsDir(p) }

// path returns the full path of p, for listing its contents.
func (t Target) path(p string) string { return filepath.Join(t.Root, p) }

// data returns the contents that the file of w must have.
func (t Target) data(w entry) ([]byte, error) {
	if !w.appendTo && !w.keepData {
		return w.Data, nil
	}
	before, _, err := t.root().ReadFile(t.originalPath(w.Path))
	if errors.Is(err, fs.ErrNotExist) && w.keepData {
		before, _, err = t.root().ReadFile(w.Path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the original of %s: %w", w.Path, err)
	}
	return append(bytes.Clone(before), w.Data...), nil
}

// same reports whether the file at the path already matches w.
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
			(!w.uidSet && !w.gidSet || sameOwner(st, w.Owner))
	case kindLink:
		target, err := t.root().Lstat(w.Target)
		return err == nil && os.SameFile(st.FileInfo, target.FileInfo)
	case kindDir:
		if !st.IsDir() {
			return t.isDir(w.Path) // a link to a directory is sufficient
		}
		return sameMeta(st, w.Owner)
	}
	want, err := t.data(w)
	if err != nil || !st.Mode().IsRegular() || st.Size() != int64(len(want)) {
		return false
	}
	have, opened, err := t.root().ReadFile(w.Path)
	return err == nil && sameMeta(opened, w.Owner) && bytes.Equal(have, want)
}

// isGone reports whether err means that nothing made by a config exists at the path.
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, beneath.ErrLink) || errors.Is(err, syscall.ENOTDIR)
}

const modeBits = fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky

// put makes w, and reports whether it changed anything.
func (t Target) put(w entry) (bool, error) {
	if t.same(w) {
		return false, nil
	}
	st, err := t.root().Lstat(w.Path)
	if err == nil && w.once {
		return false, nil
	}
	if err == nil && st.IsDir() != (w.Kind == kindDir) {
		err = t.Remove(w.Path) // conflicts has permitted the removal
	} else {
		err = nil
	}
	switch {
	case err != nil:
	case w.Kind == kindAbsent:
		err = t.Remove(w.Path)
	case w.Kind == kindDir:
		err = t.Mkdir(w.Path, w.Owner)
	case w.Kind == kindSymlink:
		err = t.symlink(w.Target, w.Path, w.Owner)
	case w.Kind == kindLink:
		err = t.Link(w.Target, w.Path)
	default:
		var data []byte
		if data, err = t.data(w); err == nil {
			err = t.WriteFile(w.Path, data, w.Owner)
		}
	}
	if err != nil {
		return false, fmt.Errorf("making %s %s: %w", w.Kind, w.Path, err)
	}
	return true, nil
}

// symlink makes a link and sets its owner.
func (t Target) symlink(target, p string, m beneath.Owner) error {
	if err := t.Symlink(target, p); err != nil || m.UID == 0 && m.GID == 0 {
		return err
	}
	return t.root().ChownLink(p, m.UID, m.GID)
}
