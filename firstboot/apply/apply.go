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
//   - what it does not apply, it rejects by name, before anything is written.
//
// docs/decisions/0006 has the comparison, and the tests hold the result
// against that of the real program.
package apply

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	ign "github.com/coreos/ignition/v2/config/v3_6"
	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/configs"
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
	// Manifest is the file that lists what was made, Originals the directory
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

// Parse reads a config and rejects what Apply does not do.
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
