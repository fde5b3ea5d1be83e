package apply

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
)

// The account files, in the order they are written: a group before the user
// that is in it, the shadow before the login it guards.
var accountFiles = []struct {
	path   string
	mode   fs.FileMode
	fields int
}{
	{"/etc/group", 0o644, 4},
	{"/etc/gshadow", 0o640, 4},
	{"/etc/shadow", 0o640, 9},
	{"/etc/passwd", 0o644, 7},
}

// accounts are the account files with the config's users and groups in them.
// They are edited as text, since useradd and its kin are no match for a power
// cut between two files, and know no second run.
type accounts struct {
	db    map[string]*table
	users []types.PasswdUser
}

// table is one account file: its lines split at colons.
type table struct {
	rows  [][]string
	there bool
	meta  Meta
	dirty bool
}

func (t *table) find(name string) []string {
	for _, r := range t.rows {
		if r[0] == name {
			return r
		}
	}
	return nil
}

func (t *table) set(row []string) {
	for i, r := range t.rows {
		if r[0] == row[0] {
			if !slices.Equal(r, row) {
				t.rows[i], t.dirty = row, true
			}
			return
		}
	}
	t.rows, t.dirty = append(t.rows, row), true
}

func (t *table) drop(name string) {
	n := len(t.rows)
	t.rows = slices.DeleteFunc(t.rows, func(r []string) bool { return r[0] == name })
	t.dirty = t.dirty || len(t.rows) != n
}

func (t *table) bytes() []byte {
	var b strings.Builder
	for _, r := range t.rows {
		b.WriteString(strings.Join(r, ":") + "\n")
	}
	return []byte(b.String())
}

// accounts reads the account files and carries out what the config, and what
// was done for the config before, ask of them. Nothing is written yet.
func (t Target) accounts(p types.Passwd, old manifest, next *manifest) (*accounts, error) {
	a := &accounts{db: map[string]*table{}}
	for _, f := range accountFiles {
		tab := &table{meta: Meta{Mode: f.mode}}
		a.db[f.path] = tab
		b, st, err := t.root().ReadFile(f.path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the accounts: %w", err)
		}
		tab.there = true
		tab.meta.Mode = st.Mode() & modeBits
		tab.meta.UID, tab.meta.GID = owner(st)
		for line := range strings.Lines(string(b)) {
			if line = strings.TrimRight(line, "\n"); line != "" {
				tab.rows = append(tab.rows, strings.Split(line, ":"))
			}
		}
	}
	passwd, shadow, group, gshadow := a.db["/etc/passwd"], a.db["/etc/shadow"], a.db["/etc/group"], a.db["/etc/gshadow"]

	// Take back first: a user that is no longer named, or that is named
	// differently now, starts from what was there before us.
	named := map[string]bool{}
	for _, u := range p.Users {
		named[u.Name] = u.ShouldExist == nil || *u.ShouldExist
	}
	for _, name := range slices.Sorted(maps.Keys(old.Users)) {
		was := old.Users[name]
		a.leaveGroups(name, was)
		if was.Added {
			if !named[name] {
				passwd.drop(name)
				shadow.drop(name)
				group.drop(name)
				gshadow.drop(name)
			}
			continue
		}
		if was.Passwd != "" {
			passwd.set(strings.Split(was.Passwd, ":"))
		}
		if was.Shadow != "" {
			shadow.set(strings.Split(was.Shadow, ":"))
		}
	}
	wantGroup := map[string]bool{}
	for _, g := range p.Groups {
		wantGroup[g.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(old.Groups)) {
		if !wantGroup[name] && !named[name] {
			group.drop(name)
			gshadow.drop(name)
		}
	}

	var errs []error
	for _, g := range p.Groups {
		if g.ShouldExist != nil && !*g.ShouldExist {
			group.drop(g.Name)
			gshadow.drop(g.Name)
			continue
		}
		if group.find(g.Name) == nil || old.Groups[g.Name] {
			next.Groups[g.Name] = true
		}
		if err := a.addGroup(g.Name, g.Gid, yes(g.System), str(g.PasswordHash)); err != nil {
			errs = append(errs, err)
		}
	}
	for _, u := range p.Users {
		if !named[u.Name] {
			passwd.drop(u.Name)
			shadow.drop(u.Name)
			a.leaveGroups(u.Name, account{Added: true})
			continue
		}
		rec, known := old.Users[u.Name]
		if !known {
			if row := passwd.find(u.Name); row == nil {
				rec.Added = true
			} else {
				rec.Passwd = strings.Join(row, ":")
				if s := shadow.find(u.Name); s != nil {
					rec.Shadow = strings.Join(s, ":")
				}
			}
		}
		// After what we did before was taken back, what is left is its own.
		rec.Groups = nil
		for _, g := range u.Groups {
			if !rec.Added && !a.member(u.Name, string(g)) {
				rec.Groups = append(rec.Groups, string(g))
			}
		}
		next.Users[u.Name] = rec
		if err := a.addUser(u, rec.Added); err != nil {
			errs = append(errs, err)
		}
		a.users = append(a.users, u)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("reading the config's users: %w", err)
	}
	return a, nil
}

// leaveGroups takes a user out of the groups we put it in. Other groups of a
// user that was there before are its own.
func (a *accounts) leaveGroups(name string, was account) {
	for _, f := range []string{"/etc/group", "/etc/gshadow"} {
		for _, r := range a.db[f].rows {
			if len(r) != 4 || !was.Added && !slices.Contains(was.Groups, r[0]) {
				continue
			}
			members := split(r[3])
			if kept := slices.DeleteFunc(slices.Clone(members), func(m string) bool { return m == name }); len(kept) != len(members) {
				row := slices.Clone(r)
				row[3] = strings.Join(kept, ",")
				a.db[f].set(row)
			}
		}
	}
}

// member reports whether a user is in a group.
func (a *accounts) member(user, group string) bool {
	r := a.db["/etc/group"].find(group)
	return len(r) == 4 && slices.Contains(split(r[3]), user)
}

func split(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func (a *accounts) addGroup(name string, gid *int, system bool, hash string) error {
	group, gshadow := a.db["/etc/group"], a.db["/etc/gshadow"]
	row := group.find(name)
	if row == nil {
		id := a.freeID(system)
		if gid != nil {
			id = *gid
		}
		if other := a.nameOf("/etc/group", id); other != "" {
			return fmt.Errorf("group %s: gid %d is %s's", name, id, other)
		}
		row = []string{name, "x", strconv.Itoa(id), ""}
	} else if gid != nil && row[2] != strconv.Itoa(*gid) {
		return fmt.Errorf("group %s is there already with gid %s, not %d", name, row[2], *gid)
	}
	group.set(row)
	if gshadow.there && (gshadow.find(name) == nil || hash != "") {
		if hash == "" {
			hash = "!"
		}
		gshadow.set([]string{name, hash, "", row[3]})
	}
	return nil
}

func (a *accounts) addUser(u types.PasswdUser, added bool) error {
	passwd, shadow, group := a.db["/etc/passwd"], a.db["/etc/shadow"], a.db["/etc/group"]
	row := slices.Clone(passwd.find(u.Name))
	if row == nil {
		id := a.freeID(yes(u.System))
		own := group.find(u.Name)
		if own != nil && added && u.UID == nil {
			// The group was written before the power went: stay with its id.
			if gid, err := strconv.Atoi(own[2]); err == nil && a.nameOf("/etc/passwd", gid) == "" {
				id = gid
			}
		}
		if u.UID != nil {
			id = *u.UID
		}
		if other := a.nameOf("/etc/passwd", id); other != "" {
			return fmt.Errorf("user %s: uid %d is %s's", u.Name, id, other)
		}
		primary := str(u.PrimaryGroup)
		if primary == "" && !yes(u.NoUserGroup) {
			primary = u.Name
			var gid *int
			if own == nil && a.nameOf("/etc/group", id) == "" {
				gid = &id
			}
			if err := a.addGroup(primary, gid, yes(u.System), ""); err != nil {
				return err
			}
		}
		if primary == "" {
			primary = "users"
		}
		g := group.find(primary)
		if g == nil {
			return fmt.Errorf("user %s: there is no group %s", u.Name, primary)
		}
		row = []string{u.Name, "x", strconv.Itoa(id), g[2], "", "/home/" + u.Name, "/bin/bash"}
	} else {
		if len(row) != 7 {
			return fmt.Errorf("user %s: its line in /etc/passwd has %d fields", u.Name, len(row))
		}
		if u.UID != nil && row[2] != strconv.Itoa(*u.UID) {
			return fmt.Errorf("user %s is there already with uid %s, not %d", u.Name, row[2], *u.UID)
		}
		if p := str(u.PrimaryGroup); p != "" {
			g := group.find(p)
			if g == nil {
				return fmt.Errorf("user %s: there is no group %s", u.Name, p)
			}
			row[3] = g[2]
		}
	}
	if u.Gecos != nil {
		row[4] = *u.Gecos
	}
	if u.HomeDir != nil {
		row[5] = *u.HomeDir
	}
	if u.Shell != nil {
		row[6] = *u.Shell
	} else if added {
		row[6] = "/bin/bash"
	}
	for _, f := range row {
		if strings.ContainsAny(f, ":\n") {
			return fmt.Errorf("user %s: a field holds a colon or a line break", u.Name)
		}
	}
	passwd.set(row)
	s := slices.Clone(shadow.find(u.Name))
	if s == nil {
		// No password, and not locked: keys must work. No date of change: a
		// clock that was wrong when it was written must not expire it.
		s = []string{u.Name, "*", "", "0", "99999", "7", "", "", ""}
	}
	if len(s) != 9 {
		return fmt.Errorf("user %s: its line in /etc/shadow has %d fields", u.Name, len(s))
	}
	switch {
	case u.PasswordHash != nil && strings.ContainsAny(*u.PasswordHash, ":\n"):
		return fmt.Errorf("user %s: the password hash holds a colon or a line break", u.Name)
	case u.PasswordHash != nil:
		s[1] = *u.PasswordHash
	case added:
		s[1] = "*"
	}
	shadow.set(s)
	for _, g := range u.Groups {
		for _, f := range []string{"/etc/group", "/etc/gshadow"} {
			tab := a.db[f]
			r := slices.Clone(tab.find(string(g)))
			if r == nil && f == "/etc/group" {
				return fmt.Errorf("user %s: there is no group %s", u.Name, g)
			}
			if len(r) != 4 {
				continue
			}
			if members := split(r[3]); !slices.Contains(members, u.Name) {
				r[3] = strings.Join(append(members, u.Name), ",")
				tab.set(r)
			}
		}
	}
	return nil
}

// freeID is the lowest id that neither a user nor a group has: a user and its
// group then get the same.
func (a *accounts) freeID(system bool) int {
	used := func(id int) bool { return a.nameOf("/etc/passwd", id) != "" || a.nameOf("/etc/group", id) != "" }
	if system { // as useradd does: from the top of the system's range down
		for id := 999; id > 100; id-- {
			if !used(id) {
				return id
			}
		}
	}
	id := 1000
	for used(id) {
		id++
	}
	return id
}

func (a *accounts) nameOf(file string, id int) string {
	for _, r := range a.db[file].rows {
		if len(r) > 2 && r[2] == strconv.Itoa(id) {
			return r[0]
		}
	}
	return ""
}

func (a *accounts) uid(n types.NodeUser) (int, error) {
	if n.ID != nil {
		return *n.ID, nil
	}
	return a.lookup("/etc/passwd", "user", str(n.Name))
}

func (a *accounts) gid(n types.NodeGroup) (int, error) {
	if n.ID != nil {
		return *n.ID, nil
	}
	return a.lookup("/etc/group", "group", str(n.Name))
}

func (a *accounts) lookup(file, what, name string) (int, error) {
	if name == "" {
		return 0, nil
	}
	r := a.db[file].find(name)
	if len(r) < 3 {
		return 0, fmt.Errorf("there is no %s %s", what, name)
	}
	id, err := strconv.Atoi(r[2])
	if err != nil {
		return 0, fmt.Errorf("%s %s has the id %q", what, name, r[2])
	}
	return id, nil
}

// entries are the users' homes and keys.
func (a *accounts) entries() []entry {
	var out []entry
	for _, u := range a.users {
		row := a.db["/etc/passwd"].find(u.Name)
		uid, _ := strconv.Atoi(row[2]) // made or checked above
		gid, _ := strconv.Atoi(row[3])
		home := path.Clean(row[5])
		own := func(m fs.FileMode) Meta { return Meta{Mode: m, UID: uid, GID: gid} }
		if !yes(u.NoCreateHome) {
			out = append(out, entry{Path: home, Kind: kindDir, Meta: own(0o700)})
		}
		if len(u.SSHAuthorizedKeys) == 0 {
			continue
		}
		var keys strings.Builder
		for _, k := range u.SSHAuthorizedKeys {
			keys.WriteString(strings.TrimSpace(string(k)) + "\n")
		}
		out = append(out,
			entry{Path: home + "/.ssh", Kind: kindDir, Meta: own(0o700), modeSet: true},
			entry{Path: home + "/.ssh/authorized_keys", Kind: kindFile, Data: []byte(keys.String()), Meta: own(0o600), modeSet: true, overwrite: true})
	}
	return out
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
