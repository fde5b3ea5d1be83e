package apply

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
)

// group creates, changes or removes a group like groupadd, groupmod and groupdel.
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
		a.dropGroup(g.Name)
		return nil
	}
	if row == nil || ours {
		next.Groups[g.Name] = true
	}
	return a.addGroup(g.Name, g.Gid, isTrue(g.System), str(g.PasswordHash))
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

// addGroup creates a group, or sets the password of an existing one.
func (a *accounts) addGroup(name string, gid *int, system bool, hash string) error {
	group, gshadow := a.db[fileGroup], a.db[fileGshadow]
	row := group.find(name)
	if row == nil {
		id := a.freeGID(system)
		if gid != nil {
			id = *gid
		}
		if other := group.nameOf(id); other != "" {
			return fmt.Errorf("the GID %d already belongs to the group %s", id, other)
		}
		row = []string{name, "x", strconv.Itoa(id), ""}
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

// groupChanges lists the groups that an existing user must join and leave, so that the user is only
// in the config's groups.
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

// supplementary puts the user into its supplementary groups.
func (a *accounts) supplementary(u types.PasswdUser, rec account) {
	var names []string
	for _, g := range u.Groups {
		names = append(names, a.now().Group(string(g))[0]) // CheckUser has checked that it exists
	}
	a.leaveGroups(u.Name, account{Groups: rec.Left})
	a.joinGroups(u.Name, names)
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

// leaveGroups removes a user from the groups to which a config added the user. A user whom a config
// created leaves all groups.
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
