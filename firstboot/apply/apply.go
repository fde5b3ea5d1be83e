// Package apply makes a running system match an Ignition config: files,
// directories, links, users, groups, SSH keys and systemd units.
//
// Ignition runs once, before the first boot, on a disk that nothing else uses. This package runs on
// a live machine that may lose power at any point, and runs again after the Site was corrected.
// Therefore:
//
//   - every path is replaced atomically, and every step can be repeated;
//   - a manifest lists the created paths, and replaced files are kept: if the next
//     config does not name a path, its original is restored;
//   - the manifest names a path before the path is changed: after a power cut it may name
//     too many paths, but never too few;
//   - a config that is impossible on this system is an error (Refused) before anything is
//     written; ignition.Parse has rejected sections that are not applied.
//
// docs/decisions/0006 compares this package with Ignition; the tests compare their results.
package apply

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/edgebake/edgebake/firstboot/beneath"
)

// Target is the system to change. It is read below Root and changed through the funcs, whose paths
// are relative to Root.
type Target struct {
	Root string
	// Manifest is the file that lists the applied entries. Originals is the directory that keeps
	// the replaced files.
	Manifest, Originals string

	// WriteFile replaces a file atomically, and makes missing directories.
	WriteFile func(path string, data []byte, m beneath.Owner) error
	// Mkdir makes a directory, or sets owner and permissions of an existing one.
	Mkdir   func(path string, m beneath.Owner) error
	Symlink func(target, path string) error
	Link    func(target, path string) error
	// Remove removes a file, a link or an empty directory. A missing one is no error.
	Remove func(path string) error
	// Unit enables or disables a unit.
	Unit func(ctx context.Context, verb, unit string) error
	// Activate puts changes into effect on the running system; it may be nil. Until it succeeds,
	// the manifest stays marked as unfinished.
	Activate func(ctx context.Context, c Changes) error
}

// Changes lists the changes of an Apply, including those of earlier ones that were killed before
// Activate succeeded.
type Changes struct {
	// Paths that were written or removed, sorted.
	Paths []string
	Units []UnitChange
}

// UnitChange is a unit that the config names or the last config named differently, or of which a
// file has changed.
type UnitChange struct {
	Name                      string
	Enabled, Disabled, Masked bool
	Changed                   bool // one of its files has changed
}

// Refused is an error that only a person can fix: the config requires something that is impossible
// on this system. Nothing was changed.
type Refused struct{ Err error }

func (r *Refused) Error() string { return r.Err.Error() }

func (r *Refused) Unwrap() error { return r.Err }

func refuse(err error) error { return &Refused{err} }

// Apply makes the system match cfg and undoes the parts of the last config that cfg lacks. cfg must
// be a result of ignition.Parse or siteconf.Config. An empty cfg undoes everything.
func Apply(ctx context.Context, t Target, cfg *types.Config) (Changes, error) {
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
	// Save the originals first, then the manifest that names them, and change the files last. So
	// the next Apply can undo the changes after a power cut at any point.
	if err := t.keepOriginals(want, old, next); err != nil {
		return Changes{}, err
	}
	if err := t.save(union(old, next)); err != nil {
		return Changes{}, err
	}
	a := &application{Target: t, old: old, next: next, paths: map[string]bool{}, units: map[string]bool{}}
	if err := acc.write(t, a.paths); err != nil {
		return Changes{}, err
	}
	for _, step := range []func() error{
		func() error { return a.write(want) },
		func() error { return a.disable(ctx) }, // disable a unit before its file, which has the [Install] section, is removed
		a.takeBack,
		func() error { return a.enable(ctx) },
	} {
		if err := step(); err != nil {
			return Changes{}, err
		}
	}
	if old.Unfinished {
		a.changedBefore(want)
	}
	changes := Changes{Paths: slices.Sorted(maps.Keys(a.paths)), Units: unitChanges(old, next, a.units)}
	if t.Activate != nil {
		if err := t.Activate(ctx, changes); err != nil {
			return Changes{}, err
		}
	}
	return changes, t.save(next)
}

// changedBefore counts everything in both manifests as changed, because the killed Apply may have
// changed any part.
func (a *application) changedBefore(want []entry) {
	for _, w := range want {
		a.changed(w.Path, w.unit)
	}
	for p := range a.old.Paths {
		a.changed(p, unitOf(p))
	}
}

// keepOriginals saves the files that want will replace, and records them in next.
func (t Target) keepOriginals(want []entry, old, next manifest) (err error) {
	for _, w := range want {
		if w.once {
			continue // from now on, the file is the user's
		}
		m := madePath{Kind: w.Kind, Emptied: w.empties}
		if o, ok := old.Paths[w.Path]; ok {
			m.Original = o.Original
		} else if m.Original, err = t.keep(w); err != nil {
			return err
		}
		next.Paths[w.Path] = m
	}
	return nil
}

// application applies the difference between the old and the next manifest.
type application struct {
	Target
	old, next manifest
	// paths are the changed paths; units are the units with changed files.
	paths, units map[string]bool
}

func (a *application) write(want []entry) error {
	for _, w := range want {
		did, err := a.put(w)
		if err != nil {
			return err
		}
		if did {
			a.changed(w.Path, w.unit)
		}
	}
	return nil
}

func (a *application) changed(path, unit string) {
	a.paths[path] = true
	if unit != "" {
		a.units[unit] = true
	}
}

// takeBack undoes the entries of the last config that this one lacks.
func (a *application) takeBack() error {
	for _, p := range a.pathsOnlyIn(a.old, a.next) {
		if err := a.giveBack(p, a.old.Paths[p]); err != nil {
			return err
		}
		a.changed(p, unitOf(p))
	}
	return nil
}

// disable disables units that the last config enabled and this one does not enable.
func (a *application) disable(ctx context.Context) error {
	for name, state := range a.old.Units {
		if state == "enabled" && a.next.Units[name] != "enabled" {
			if err := a.Unit(ctx, "disable", name); err != nil {
				return fmt.Errorf("disabling unit %s: %w", name, err)
			}
		}
	}
	return nil
}

// enable enables or disables the units that the config names.
func (a *application) enable(ctx context.Context) error {
	for _, name := range slices.Sorted(maps.Keys(a.next.Units)) {
		verb := map[string]string{"enabled": "enable", "disabled": "disable"}[a.next.Units[name]]
		if verb == "" {
			continue
		}
		if err := a.Unit(ctx, verb, name); err != nil {
			return fmt.Errorf("%s unit %s: %w", strings.TrimSuffix(verb, "e")+"ing", name, err)
		}
	}
	return nil
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
