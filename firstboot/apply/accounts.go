package apply

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

const (
	fileGroup   = "/etc/group"
	fileGshadow = "/etc/gshadow"
	fileShadow  = "/etc/shadow"
	filePasswd  = "/etc/passwd"
)

// accountFiles lists the account files in writing order: groups before the users that belong to
// them, shadow before passwd.
var accountFiles = []struct {
	path   string
	mode   fs.FileMode
	fields int
}{
	{fileGroup, 0o644, 4},
	{fileGshadow, 0o640, 4},
	{fileShadow, 0o640, 9},
	{filePasswd, 0o644, 7},
}

// accounts contains the account files with the config's users and groups. It edits their text to
// the same result as useradd, but the edit can be repeated after a power cut.
type accounts struct {
	db    map[string]*table
	defs  defaults
	users []types.PasswdUser
	// made lists the users that a config added. removed lists the homes of the users that this
	// config removes.
	made    map[string]bool
	removed []home
	// again is set if a config was applied to this system before.
	again bool
}

// home is the home directory of a removed user. It is deleted only if uid owns it.
type home struct {
	dir string
	uid int
}

// account records a user that a config added, or the former rows of a user that it changed or
// removed.
type account struct {
	Added bool `json:"added,omitempty"`
	// UID is the assigned number. A repeated attempt assigns it again.
	UID    int    `json:"uid,omitempty"`
	Passwd string `json:"passwd,omitempty"`
	Shadow string `json:"shadow,omitempty"`
	// Group and Gshadow are the former rows of the group that was removed together with the user.
	Group   string `json:"group,omitempty"`
	Gshadow string `json:"gshadow,omitempty"`
	// Groups lists the groups that an existing user was added to, and Left those that it was
	// removed from.
	Groups []string `json:"groups,omitempty"`
	Left   []string `json:"left,omitempty"`
}

// groupRows are the former rows of a group that was changed or removed.
type groupRows struct {
	Group   string `json:"group"`
	Gshadow string `json:"gshadow,omitempty"`
}

// accounts reads the account files, undoes the changes of the last config and makes those of this
// one. It writes nothing.
func (t Target) accounts(p types.Passwd, old manifest, next *manifest) (*accounts, error) {
	a, err := t.readAccounts()
	if err != nil {
		return nil, fmt.Errorf("reading the accounts: %w", err)
	}
	a.again = len(old.Users)+len(old.Groups)+len(old.Paths) > 0
	a.takeBack(p, old)
	var errs []error
	for _, g := range p.Groups {
		if probs := a.now().CheckGroup(g); probs != nil {
			errs = append(errs, each(probs)...)
			continue
		}
		if err := a.group(g, old, next); err != nil {
			errs = append(errs, fmt.Errorf("group %s: %w", g.Name, err))
		}
	}
	for _, u := range p.Users {
		was, known := old.Users[u.Name]
		ours := a.made[u.Name] || known && (was.Added || a.db[filePasswd].find(u.Name) == nil)
		if probs := a.now().CheckUser(u, ours); probs != nil {
			errs = append(errs, each(probs)...)
			continue
		}
		if err := a.user(u, old, next); err != nil {
			errs = append(errs, fmt.Errorf("user %s: %w", u.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, refuse(fmt.Errorf("reading the config's users: %w", err))
	}
	return a, nil
}

// now returns the users and groups with the changes made so far.
func (a *accounts) now() siteconf.Accounts {
	return siteconf.Accounts{Users: a.db[filePasswd].rows, Groups: a.db[fileGroup].rows}
}

func each(probs siteconf.AccountProblems) []error {
	var errs []error
	for _, p := range probs {
		errs = append(errs, errors.New(p.Msg))
	}
	return errs
}

func (t Target) readAccounts() (*accounts, error) {
	a := &accounts{db: map[string]*table{}, made: map[string]bool{}}
	for _, f := range accountFiles {
		tab := &table{meta: beneath.Owner{Mode: f.mode}}
		a.db[f.path] = tab
		b, st, err := t.root().ReadFile(f.path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		tab.there = true
		tab.meta.Mode = st.Mode() & modeBits
		tab.meta.UID, tab.meta.GID = owner(st)
		tab.rows = siteconf.ParseLines(b)
	}
	var err error
	a.defs, err = t.readDefaults()
	return a, err
}

// takeBack undoes the account changes of the last config. A user that it added stays if p contains
// the user too.
func (a *accounts) takeBack(p types.Passwd, old manifest) {
	named := map[string]bool{}
	for _, u := range p.Users {
		named[u.Name] = wanted(u.ShouldExist)
	}
	for _, name := range slices.Sorted(maps.Keys(old.Users)) {
		was := old.Users[name]
		a.leaveGroups(name, was)
		switch {
		case !was.Added:
			a.db[filePasswd].restore(was.Passwd)
			a.db[fileShadow].restore(was.Shadow)
			a.db[fileGroup].restore(was.Group)
			a.db[fileGshadow].restore(was.Gshadow)
			a.joinGroups(name, was.Left)
		case !named[name]:
			for _, f := range accountFiles {
				a.db[f.path].drop(name)
			}
		}
	}
	wantGroup := map[string]bool{}
	for _, g := range p.Groups {
		wantGroup[g.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(old.Groups)) {
		if !wantGroup[name] && !named[name] {
			a.dropGroup(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(old.Gone)) {
		a.db[fileGroup].restore(old.Gone[name].Group)
		a.db[fileGshadow].restore(old.Gone[name].Gshadow)
	}
}

func wanted(shouldExist *bool) bool { return shouldExist == nil || *shouldExist }

func (a *accounts) uid(n types.NodeUser) (*int, error) {
	if n.ID != nil || str(n.Name) == "" {
		return n.ID, nil
	}
	return lookup(a.db[filePasswd].find(*n.Name), "user", *n.Name)
}

func (a *accounts) gid(n types.NodeGroup) (*int, error) {
	if n.ID != nil || str(n.Name) == "" {
		return n.ID, nil
	}
	return lookup(a.db[fileGroup].find(*n.Name), "group", *n.Name)
}

func lookup(row []string, what, name string) (*int, error) {
	if len(row) < 3 {
		return nil, fmt.Errorf("there is no %s %s: add it to passwd in the Ignition config, or to the image", what, name)
	}
	id, err := strconv.Atoi(row[2])
	if err != nil {
		return nil, fmt.Errorf("%s %s has the invalid ID %q", what, name, row[2])
	}
	return &id, nil
}

// write writes the changed account files, each atomically.
func (a *accounts) write(t Target, changed map[string]bool) error {
	for _, f := range accountFiles {
		tab := a.db[f.path]
		if have, _, err := t.root().ReadFile(f.path); !tab.dirty || err == nil && bytes.Equal(have, tab.bytes()) {
			continue
		}
		if err := t.WriteFile(f.path, tab.bytes(), tab.meta); err != nil {
			return fmt.Errorf("writing the accounts: %w", err)
		}
		changed[f.path] = true
	}
	return nil
}
