package siteconf

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
)

// Lines contains the lines of an account file, split at colons.
type Lines [][]string

// ParseLines parses an account file.
func ParseLines(b []byte) Lines {
	var out Lines
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimRight(line, "\n"); line != "" {
			out = append(out, strings.Split(line, ":"))
		}
	}
	return out
}

// Find returns the line of a name, or nil.
func (l Lines) Find(name string) []string {
	for _, row := range l {
		if row[0] == name && name != "" {
			return row
		}
	}
	return nil
}

// NameOf returns the name with this ID in passwd or group, or "".
func (l Lines) NameOf(id string) string {
	for _, row := range l {
		if len(row) > 2 && row[2] == id && id != "" {
			return row[0]
		}
	}
	return ""
}

func (l Lines) without(name string) Lines {
	return slices.DeleteFunc(slices.Clone(l), func(row []string) bool { return row[0] == name })
}

// Accounts contains the users and groups of a system, from passwd and group.
type Accounts struct{ Users, Groups Lines }

// Group returns the line of a group, given its name or, as in useradd, its number.
func (a Accounts) Group(name string) []string {
	row := a.Groups.Find(name)
	if _, err := strconv.Atoi(name); row == nil && err == nil {
		row = a.Groups.Find(a.Groups.NameOf(name))
	}
	if len(row) < 3 {
		return nil // the group does not exist, or its line is damaged
	}
	return row
}

// AccountProblem is a problem with a user or group in an Ignition config.
type AccountProblem struct {
	Field string // empty for the user or group as a whole
	Item  int    // index in the list Field
	Msg   string
}

// AccountProblems lists the problems of one user or group.
type AccountProblems []AccountProblem

func (p *AccountProblems) add(field, format string, args ...any) {
	*p = append(*p, AccountProblem{Field: field, Msg: fmt.Sprintf(format, args...)})
}

const noGroup = "the image has no group %s: add it to passwd.groups of the Ignition config, or its package to the Image"

// CheckGroup returns the reasons why a group of an Ignition config cannot be created or changed.
// The build computer calls it when it stamps a disk, and the machine when it applies the config.
func (a Accounts) CheckGroup(g types.PasswdGroup) AccountProblems {
	var probs AccountProblems
	row := a.Groups.Find(g.Name)
	if g.ShouldExist != nil && !*g.ShouldExist {
		for _, u := range a.Users {
			if gid := cell(u, 3); gid != "" && gid == cell(row, 2) {
				probs.add("", "group %s cannot be removed: it is the primary group of user %s", g.Name, u[0])
			}
		}
		return probs
	}
	if g.Gid == nil {
		return nil
	}
	id := strconv.Itoa(*g.Gid)
	switch other := a.Groups.NameOf(id); {
	case row != nil && cell(row, 2) != id:
		probs.add("gid", "group %s already exists in the image with gid %s: remove gid, or name another group", g.Name, cell(row, 2))
	case row == nil && other != "":
		probs.add("gid", "gid %s belongs to %s in the image: choose another", id, other)
	}
	return probs
}

// CheckUser returns the reasons why a user cannot be created or changed. ours means that this
// config, or the previous one of this machine, created the user or its group.
func (a Accounts) CheckUser(u types.PasswdUser, ours bool) AccountProblems {
	var probs AccountProblems
	if u.ShouldExist != nil && !*u.ShouldExist {
		return nil
	}
	row := a.Users.Find(u.Name)
	for i, g := range u.Groups {
		if a.Group(string(g)) == nil {
			probs = append(probs, AccountProblem{"groups", i, fmt.Sprintf(noGroup, g)})
		}
	}
	a.checkPrimaryGroup(u, row, ours, &probs)
	a.checkUID(u, row, ours, &probs)
	if home, dir := value(u.HomeDir), cell(row, 5); home != "" && !ours && dir != "" && path.Clean(home) != path.Clean(dir) {
		probs.add("homeDir", "user %s already exists in the image with the home %s, which first boot does not move: remove homeDir, or name another user", u.Name, dir)
	}
	return probs
}

func (a Accounts) checkPrimaryGroup(u types.PasswdUser, row []string, ours bool, probs *AccountProblems) {
	primary, gid := value(u.PrimaryGroup), cell(row, 3)
	if primary == "" {
		if row == nil && !ours && (u.NoUserGroup == nil || !*u.NoUserGroup) && a.Groups.Find(u.Name) != nil {
			probs.add("", "group %s already exists: add primaryGroup: %s (in an Ignition config) to put the user into it, or choose another name", u.Name, u.Name)
		}
		return
	}
	switch group := a.Group(primary); {
	case group == nil:
		probs.add("primaryGroup", noGroup, primary)
	case !ours && gid != "" && gid != group[2]:
		probs.add("primaryGroup", "user %s already exists in the image with the primary group %s, and first boot does not change the group of its files: use groups, or name another user", u.Name, a.Groups.NameOf(gid))
	}
}

func (a Accounts) checkUID(u types.PasswdUser, row []string, ours bool, probs *AccountProblems) {
	if u.UID == nil {
		return
	}
	id, uid := strconv.Itoa(*u.UID), cell(row, 2)
	switch other := a.Users.NameOf(id); {
	case uid != "" && uid != id && ours:
		probs.add("uid", "user %s was made with uid %s: remove uid, or name another user", u.Name, uid)
	case uid != "" && uid != id:
		probs.add("uid", "user %s already exists in the image with uid %s: remove uid, or name another user", u.Name, uid)
	case row == nil && other != "":
		probs.add("uid", "uid %s belongs to %s in the image: choose another", id, other)
	}
}

// cell returns column n of a line, or "" if the line has fewer columns.
func cell(row []string, n int) string {
	if len(row) > n {
		return row[n]
	}
	return ""
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
