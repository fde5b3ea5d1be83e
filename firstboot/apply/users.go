package apply

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/firstboot/beneath"
)

// user creates, changes or removes a user like useradd, usermod and userdel.
func (a *accounts) user(u types.PasswdUser, old manifest, next *manifest) error {
	rec, known := old.Users[u.Name]
	row := a.db[filePasswd].find(u.Name)
	if !known {
		rec = account{Added: row == nil, Passwd: line(row), Shadow: line(a.db[fileShadow].find(u.Name))}
	}
	// takeBack has undone earlier changes, so the user is only in groups to which no config added
	// the user.
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
	if err := a.login(u, rec); err != nil {
		return err
	}
	if rec.Added {
		rec.UID, _ = strconv.Atoi(a.db[filePasswd].find(u.Name)[2]) // set above, or by an earlier attempt
	}
	next.Users[u.Name] = rec
	a.users = append(a.users, u)
	a.made[u.Name] = rec.Added
	if err := a.password(u, rec.Added); err != nil {
		return err
	}
	a.supplementary(u, rec)
	return nil
}

// removeUser removes a user and the group of the same name, and adds the home to a.removed.
func (a *accounts) removeUser(name string, row []string, rec *account) error {
	if len(row) != 7 {
		return fmt.Errorf("its line in %s has %d fields, not 7", filePasswd, len(row))
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

// login adds or changes the user's row in passwd.
func (a *accounts) login(u types.PasswdUser, rec account) error {
	row := slices.Clone(a.db[filePasswd].find(u.Name))
	var err error
	if row == nil {
		row, err = a.newLogin(u, rec.UID)
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
			return errors.New("a field contains a colon or a line break")
		}
	}
	a.db[filePasswd].set(row)
	return nil
}

// newLogin returns the row of a new user, and adds a group of the same name. given is the UID from
// an earlier attempt, or 0.
func (a *accounts) newLogin(u types.PasswdUser, given int) ([]string, error) {
	group := a.db[fileGroup]
	own := group.find(u.Name)
	id := a.freeUID(isTrue(u.System))
	if given != 0 && a.db[filePasswd].nameOf(given) == "" {
		id = given
	}
	if u.UID != nil {
		id = *u.UID
	}
	if other := a.db[filePasswd].nameOf(id); other != "" {
		return nil, fmt.Errorf("the UID %d already belongs to the user %s", id, other)
	}
	gid := a.defs.group
	switch primary := str(u.PrimaryGroup); {
	case primary != "":
		gid = a.now().Group(primary)[2] // CheckUser has checked that it exists
	case !isTrue(u.NoUserGroup):
		var want *int
		if own == nil && group.nameOf(id) == "" {
			want = &id
		}
		if err := a.addGroup(u.Name, want, isTrue(u.System), ""); err != nil {
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

// changeLogin changes the row of an existing user.
func (a *accounts) changeLogin(u types.PasswdUser, row []string, added bool) error {
	if len(row) != 7 {
		return fmt.Errorf("its line in %s has %d fields, not 7", filePasswd, len(row))
	}
	if !added {
		return nil // CheckUser allows no other changes
	}
	if p := str(u.PrimaryGroup); p != "" {
		row[3] = a.now().Group(p)[2]
	}
	if dir := str(u.HomeDir); dir != "" && path.Clean(dir) != path.Clean(row[5]) {
		row[5] = dir
	}
	return nil
}

// password adds or changes the user's row in shadow.
func (a *accounts) password(u types.PasswdUser, added bool) error {
	s := slices.Clone(a.db[fileShadow].find(u.Name))
	if s == nil {
		// Leave the date of change empty: a date from a wrong clock could make the password expire.
		s = []string{u.Name, "*", "", a.defs.minDays, a.defs.maxDays, a.defs.warnDays, "", "", ""}
		if isTrue(u.System) {
			s[3], s[4], s[5] = "", "", ""
		}
	}
	if len(s) != 9 {
		return fmt.Errorf("its line in %s has %d fields, not 9", fileShadow, len(s))
	}
	switch {
	case u.PasswordHash != nil && strings.ContainsAny(*u.PasswordHash, ":\n"):
		return errors.New("the password hash contains a colon or a line break")
	case str(u.PasswordHash) != "":
		s[1] = *u.PasswordHash
	case u.PasswordHash != nil || added:
		// "*" matches no password, but SSH keys still work. An empty hash would let anybody log in.
		s[1] = "*"
	}
	a.db[fileShadow].set(s)
	return nil
}

// freeUID returns the UID that useradd would choose. If a config was applied before, it also avoids
// the IDs of groups, so that the user's own group can get the same number.
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

// freeGID returns the GID that groupadd would choose.
func (a *accounts) freeGID(system bool) int {
	if system {
		return a.defs.systemGIDs.free(a.db[fileGroup].ids(), true)
	}
	return a.defs.gids.free(a.db[fileGroup].ids(), false)
}

// homes returns the home directories and SSH keys of the config's users.
func (t Target) homes(a *accounts, old manifest) ([]entry, error) {
	var out []entry
	for _, u := range a.users {
		row := a.db[filePasswd].find(u.Name)
		uid, _ := strconv.Atoi(row[2]) // CheckUser or newLogin has checked that it is a number
		gid, _ := strconv.Atoi(row[3])
		dir := path.Clean(row[5])
		own := func(m fs.FileMode) beneath.Owner { return beneath.Owner{Mode: m, UID: uid, GID: gid} }
		if a.made[u.Name] && !isTrue(u.NoCreateHome) {
			out = append(out, entry{Path: dir, Kind: kindDir, Owner: own(a.defs.homeMode)})
			// Like useradd, copy the skeleton only into a new home, or into one
			// that an interrupted attempt began.
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
			entry{Path: dir, Kind: kindDir, Owner: own(a.defs.homeMode)},
			entry{Path: dir + "/.ssh", Kind: kindDir, Owner: own(0o700), modeSet: true, uidSet: true, gidSet: true},
			entry{Path: dir + "/.ssh/authorized_keys", Kind: kindFile, Data: []byte(keys.String()), Owner: own(0o600), modeSet: true, uidSet: true, gidSet: true, overwrite: true})
	}
	return out, nil
}
