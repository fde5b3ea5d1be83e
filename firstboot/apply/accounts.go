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
// They are edited as text, since useradd and its kin are no match for a power
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
		if err := a.group(g, old, next); err != nil {
			errs = append(errs, fmt.Errorf("group %s: %w", g.Name, err))
		}
	}
	for _, u := range p.Users {
		if err := a.user(u, old, next); err != nil {
			errs = append(errs, fmt.Errorf("user %s: %w", u.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, refuse(fmt.Errorf("reading the config's users: %w", err))
	}
	return a, nil
}

func (t Target) readAccounts() (*accounts, error) {
	a := &accounts{db: map[string]*table{}, made: map[string]bool{}}
	for _, f := range accountFiles {
		tab := &table{meta: Meta{Mode: f.mode}}
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
		tab.read(b)
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

// group makes, changes or removes a group as groupadd, groupmod and groupdel
// do.
func (a *accounts) group(g types.PasswdGroup, old manifest, next *manifest) error {
	row := a.db[fileGroup].find(g.Name)
	ours := old.Groups[g.Name]
	if row != nil && !ours {
		next.Gone[g.Name] = groupRows{line(row), line(a.db[fileGshadow].find(g.Name))}
	}
	if !wanted(g.ShouldExist) {
		if row == nil {
			return nil
		}
		if user := a.withPrimary(row[2]); user != "" {
			return fmt.Errorf("it cannot be removed: it is the primary group of user %s", user)
		}
		a.dropGroup(g.Name)
		return nil
	}
	if row == nil || ours {
		next.Groups[g.Name] = true
	}
	return a.addGroup(g.Name, g.Gid, yes(g.System), str(g.PasswordHash))
}

func (a *accounts) withPrimary(gid string) string {
	for _, r := range a.db[filePasswd].rows {
		if len(r) > 3 && r[3] == gid {
			return r[0]
		}
	}
	return ""
}

func (a *accounts) dropGroup(name string) {
	a.db[fileGroup].drop(name)
	a.db[fileGshadow].drop(name)
}

// addGroup makes a group, or gives one that is there its password.
func (a *accounts) addGroup(name string, gid *int, system bool, hash string) error {
	group, gshadow := a.db[fileGroup], a.db[fileGshadow]
	row := group.find(name)
	switch {
	case row == nil:
		id := a.freeGID(system)
		if gid != nil {
			id = *gid
		}
		if other := group.nameOf(id); other != "" {
			return fmt.Errorf("gid %d is %s's: choose another", id, other)
		}
		row = []string{name, "x", strconv.Itoa(id), ""}
	case gid != nil && row[2] != strconv.Itoa(*gid):
		return fmt.Errorf("it is there already with gid %s, not %d: take gid out, or name another group", row[2], *gid)
	}
	group.set(row)
	shadow := slices.Clone(gshadow.find(name))
	switch {
	case !gshadow.there:
		return nil
	case shadow == nil:
		shadow = []string{name, "!", "", row[3]}
	}
	if hash != "" {
		shadow[1] = hash
	}
	gshadow.set(shadow)
	return nil
}

// user makes, changes or removes a user as useradd, usermod and userdel do.
func (a *accounts) user(u types.PasswdUser, old manifest, next *manifest) error {
	rec, known := old.Users[u.Name]
	row := a.db[filePasswd].find(u.Name)
	if !known {
		rec = account{Added: row == nil, Passwd: line(row), Shadow: line(a.db[fileShadow].find(u.Name))}
	}
	// After what we did before was taken back, what is left is its own.
	rec.Groups, rec.Left = nil, nil
	if !wanted(u.ShouldExist) {
		if row != nil {
			if err := a.removeUser(u.Name, row, &rec); err != nil {
				return err
			}
			next.Users[u.Name] = rec
		}
		return nil
	}
	if !rec.Added && len(u.Groups) > 0 {
		rec.Groups, rec.Left = a.groupChanges(u)
	}
	if err := a.login(u, known, rec); err != nil {
		return err
	}
	if rec.Added {
		rec.UID, _ = strconv.Atoi(a.db[filePasswd].find(u.Name)[2]) // made just now, or by us before
	}
	next.Users[u.Name] = rec
	a.users = append(a.users, u)
	a.made[u.Name] = rec.Added
	if err := a.password(u, rec.Added); err != nil {
		return err
	}
	return a.supplementary(u, rec)
}

// removeUser takes a user out, with the group of the same name and the home.
func (a *accounts) removeUser(name string, row []string, rec *account) error {
	if len(row) != 7 {
		return fmt.Errorf("its line in %s has %d fields", filePasswd, len(row))
	}
	for _, r := range a.db[fileGroup].rows {
		if len(r) == 4 && slices.Contains(split(r[3]), name) {
			rec.Left = append(rec.Left, r[0])
		}
	}
	a.leaveGroups(name, account{Added: true})
	a.db[filePasswd].drop(name)
	a.db[fileShadow].drop(name)
	own := a.db[fileGroup].find(name)
	if len(own) == 4 && own[2] == row[3] && own[3] == "" && a.withPrimary(own[2]) == "" {
		rec.Group, rec.Gshadow = line(own), line(a.db[fileGshadow].find(name))
		a.dropGroup(name)
	}
	if uid, err := strconv.Atoi(row[2]); err == nil {
		a.removed = append(a.removed, home{path.Clean("/" + row[5]), uid})
	}
	return nil
}

// groupChanges lists which groups a user that was there comes into, and
// leaves, when it is in those of the config alone.
func (a *accounts) groupChanges(u types.PasswdUser) (joined, left []string) {
	for _, g := range u.Groups {
		if !a.member(u.Name, string(g)) {
			joined = append(joined, string(g))
		}
	}
	for _, r := range a.db[fileGroup].rows {
		if len(r) == 4 && slices.Contains(split(r[3]), u.Name) && !slices.Contains(u.Groups, types.Group(r[0])) {
			left = append(left, r[0])
		}
	}
	return joined, left
}

// login makes or changes the user's line in passwd.
func (a *accounts) login(u types.PasswdUser, known bool, rec account) error {
	row := slices.Clone(a.db[filePasswd].find(u.Name))
	var err error
	if row == nil {
		row, err = a.newLogin(u, known, rec.UID)
	} else {
		err = a.changeLogin(u, row, rec.Added)
	}
	if err != nil {
		return err
	}
	if u.Gecos != nil {
		row[4] = *u.Gecos
	}
	switch shell := str(u.Shell); {
	case shell != "":
		row[6] = shell
	case rec.Added:
		row[6] = a.defs.shell
	}
	for _, f := range row {
		if strings.ContainsAny(f, ":\n") {
			return errors.New("a field holds a colon or a line break")
		}
	}
	a.db[filePasswd].set(row)
	return nil
}

// newLogin makes the line of a user, and the group of the same name. known:
// we began with this user before, gave it that id, and its group may be
// written already.
func (a *accounts) newLogin(u types.PasswdUser, known bool, given int) ([]string, error) {
	group := a.db[fileGroup]
	own := group.find(u.Name)
	id := a.freeUID(yes(u.System))
	if given != 0 && a.db[filePasswd].nameOf(given) == "" {
		id = given
	}
	if u.UID != nil {
		id = *u.UID
	}
	if other := a.db[filePasswd].nameOf(id); other != "" {
		return nil, fmt.Errorf("uid %d is %s's: choose another", id, other)
	}
	gid := a.defs.group
	switch primary := str(u.PrimaryGroup); {
	case primary != "":
		g := a.findGroup(primary)
		if g == nil {
			return nil, noGroup(primary)
		}
		gid = g[2]
	case !yes(u.NoUserGroup):
		if own != nil && !known {
			return nil, fmt.Errorf("there is a group %s already: add primaryGroup: %s to put the user into it", u.Name, u.Name)
		}
		var want *int
		if own == nil && group.nameOf(id) == "" {
			want = &id
		}
		if err := a.addGroup(u.Name, want, yes(u.System), ""); err != nil {
			return nil, err
		}
		gid = group.find(u.Name)[2]
	}
	dir := a.defs.home + "/" + u.Name
	if h := str(u.HomeDir); h != "" {
		dir = h
	}
	return []string{u.Name, "x", strconv.Itoa(id), gid, "", dir, a.defs.shell}, nil
}

// changeLogin changes the line of a user that is there.
func (a *accounts) changeLogin(u types.PasswdUser, row []string, added bool) error {
	if len(row) != 7 {
		return fmt.Errorf("its line in %s has %d fields", filePasswd, len(row))
	}
	if u.UID != nil && row[2] != strconv.Itoa(*u.UID) {
		return fmt.Errorf("it is there already with uid %s, not %d: take uid out, or name another user", row[2], *u.UID)
	}
	if p := str(u.PrimaryGroup); p != "" {
		g := a.findGroup(p)
		switch {
		case g == nil:
			return noGroup(p)
		case added:
			row[3] = g[2]
		case row[3] != g[2]:
			return fmt.Errorf("its primary group is %s, and first boot hands over no files: use groups, or name another user", a.db[fileGroup].nameOfText(row[3]))
		}
	}
	switch dir := str(u.HomeDir); {
	case dir == "" || path.Clean(dir) == path.Clean(row[5]):
	case added:
		row[5] = dir
	default:
		return fmt.Errorf("its home is %s, and first boot moves no homes: take homeDir out, or name another user", row[5])
	}
	return nil
}

func noGroup(name string) error {
	return fmt.Errorf("group %s not found: add it to passwd.groups, or to the image", name)
}

// findGroup finds a group by its name or, as useradd does, by its number.
func (a *accounts) findGroup(name string) []string {
	if g := a.db[fileGroup].find(name); g != nil {
		return g
	}
	if id, err := strconv.Atoi(name); err == nil {
		return a.db[fileGroup].find(a.db[fileGroup].nameOf(id))
	}
	return nil
}

// password makes or changes the user's line in shadow.
func (a *accounts) password(u types.PasswdUser, added bool) error {
	s := slices.Clone(a.db[fileShadow].find(u.Name))
	if s == nil {
		// No date of change: a clock that was wrong when it was written must
		// not expire it.
		s = []string{u.Name, "*", "", a.defs.minDays, a.defs.maxDays, a.defs.warnDays, "", "", ""}
		if yes(u.System) {
			s[3], s[4], s[5] = "", "", ""
		}
	}
	if len(s) != 9 {
		return fmt.Errorf("its line in %s has %d fields", fileShadow, len(s))
	}
	switch {
	case u.PasswordHash != nil && strings.ContainsAny(*u.PasswordHash, ":\n"):
		return errors.New("the password hash holds a colon or a line break")
	case str(u.PasswordHash) != "":
		s[1] = *u.PasswordHash
	case u.PasswordHash != nil || added:
		// No password, and not locked: keys must work. An empty hash would
		// let anybody in.
		s[1] = "*"
	}
	a.db[fileShadow].set(s)
	return nil
}

// supplementary puts the user into its groups.
func (a *accounts) supplementary(u types.PasswdUser, rec account) error {
	var missing []error
	var names []string
	for _, g := range u.Groups {
		row := a.findGroup(string(g))
		if row == nil {
			missing = append(missing, noGroup(string(g)))
			continue
		}
		names = append(names, row[0])
	}
	if missing != nil {
		return errors.Join(missing...)
	}
	a.leaveGroups(u.Name, account{Groups: rec.Left})
	a.joinGroups(u.Name, names)
	return nil
}

func (a *accounts) joinGroups(user string, groups []string) {
	for _, g := range groups {
		for _, f := range []string{fileGroup, fileGshadow} {
			r := slices.Clone(a.db[f].find(g))
			if len(r) != 4 {
				continue
			}
			if members := split(r[3]); !slices.Contains(members, user) {
				r[3] = strings.Join(append(members, user), ",")
				a.db[f].set(r)
			}
		}
	}
}

// leaveGroups takes a user out of the groups we put it in. Other groups of a
// user that was there before are its own.
func (a *accounts) leaveGroups(name string, was account) {
	for _, f := range []string{fileGroup, fileGshadow} {
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
	r := a.db[fileGroup].find(group)
	return len(r) == 4 && slices.Contains(split(r[3]), user)
}

func split(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// freeUID is the id that useradd gives. On a system with a history it is also
// no group's, so that the user's own group has the same one.
func (a *accounts) freeUID(system bool) int {
	used := a.db[filePasswd].ids()
	if a.again {
		used = append(used, a.db[fileGroup].ids()...)
	}
	if system {
		return a.defs.systemUIDs.free(used, true)
	}
	return a.defs.uids.free(used, false)
}

// freeGID is the id that groupadd gives.
func (a *accounts) freeGID(system bool) int {
	if system {
		return a.defs.systemGIDs.free(a.db[fileGroup].ids(), true)
	}
	return a.defs.gids.free(a.db[fileGroup].ids(), false)
}

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

// homes are the directories and the keys of the config's users.
func (t Target) homes(a *accounts, old manifest) ([]entry, error) {
	var out []entry
	for _, u := range a.users {
		row := a.db[filePasswd].find(u.Name)
		uid, _ := strconv.Atoi(row[2]) // made or checked above
		gid, _ := strconv.Atoi(row[3])
		dir := path.Clean(row[5])
		own := func(m fs.FileMode) Meta { return Meta{Mode: m, UID: uid, GID: gid} }
		if a.made[u.Name] && !yes(u.NoCreateHome) {
			out = append(out, entry{Path: dir, Kind: kindDir, Meta: own(a.defs.homeMode)})
			// As useradd does, only into a home that it makes. A home that
			// an earlier try began is gone on with.
			_, begun := old.Paths[dir]
			if _, err := t.root().Lstat(dir); errors.Is(err, fs.ErrNotExist) || begun && old.Unfinished {
				skel, err := t.skeleton(a.defs.skel, dir, uid, gid)
				if err != nil {
					return nil, err
				}
				out = append(out, skel...)
			}
		}
		if len(u.SSHAuthorizedKeys) == 0 {
			continue
		}
		var keys strings.Builder
		for _, k := range u.SSHAuthorizedKeys {
			keys.WriteString(strings.TrimRight(string(k), "\n") + "\n")
		}
		out = append(out,
			entry{Path: dir, Kind: kindDir, Meta: own(a.defs.homeMode)},
			entry{Path: dir + "/.ssh", Kind: kindDir, Meta: own(0o700), modeSet: true, uidSet: true, gidSet: true},
			entry{Path: dir + "/.ssh/authorized_keys", Kind: kindFile, Data: []byte(keys.String()), Meta: own(0o600), modeSet: true, uidSet: true, gidSet: true, overwrite: true})
	}
	return out, nil
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
