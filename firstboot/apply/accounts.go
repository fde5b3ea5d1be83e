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
	"github.com/edgebake/edgebake/overlays/node"
)

const (
	fileGroup   = "/etc/group"
	fileGshadow = "/etc/gshadow"
	fileShadow  = "/etc/shadow"
	filePasswd  = "/etc/passwd"
)

// The account files, in the order they are written: a group before the user
// that is in it, the shadow before the login it guards.
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

// accounts are the account files with the config's users and groups in them.
// They are edited as text, since useradd and its kin do not survive a power
// cut between two files, and know no second run. What they do is done alike.
type accounts struct {
	db    map[string]*table
	defs  defaults
	users []types.PasswdUser
	// made are the users that were not there before us, removed the homes
	// that went with their users.
	made    map[string]bool
	removed []home
	// again: configs were applied to this system before.
	again bool
}

// home is where a removed user lived; what is somebody else's stays.
type home struct {
	dir string
	uid int
}

// account is a user we added, or one we changed or removed, as it was.
type account struct {
	Added bool `json:"added,omitempty"`
	// UID is the number that we gave it; a second try gives no other.
	UID    int    `json:"uid,omitempty"`
	Passwd string `json:"passwd,omitempty"`
	Shadow string `json:"shadow,omitempty"`
	// Group and Gshadow are those of the group that went with the user.
	Group   string `json:"group,omitempty"`
	Gshadow string `json:"gshadow,omitempty"`
	// Groups that we put a user into who was there before, and those we took
	// it out of.
	Groups []string `json:"groups,omitempty"`
	Left   []string `json:"left,omitempty"`
}

// groupRows are a group that we removed or changed, as it was.
type groupRows struct {
	Group   string `json:"group"`
	Gshadow string `json:"gshadow,omitempty"`
}

// accounts reads the account files and carries out what the config, and what
// was done for the config before, ask of them. Nothing is written yet.
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

// now are the users and groups as they are so far.
func (a *accounts) now() node.Accounts {
	return node.Accounts{Users: a.db[filePasswd].rows, Groups: a.db[fileGroup].rows}
}

func each(probs node.AccountProblems) []error {
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
		tab.rows = node.ParseLines(b)
	}
	var err error
	a.defs, err = t.readDefaults()
	return a, err
}

// takeBack undoes what was done for the config before: a user that is no
// longer named, or that is named differently now, starts from what was there
// before us.
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
		return nil, fmt.Errorf("there is no %s %s: add it to passwd, or to the image", what, name)
	}
	id, err := strconv.Atoi(row[2])
	if err != nil {
		return nil, fmt.Errorf("%s %s has the id %q", what, name, row[2])
	}
	return &id, nil
}

// write puts the account files where they belong, each at once.
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
