package apply

import (
	"errors"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// table contains one account file: its lines, split at colons.
type table struct {
	rows  siteconf.Lines
	there bool
	meta  beneath.Owner
	dirty bool
}

func (t *table) find(name string) []string { return t.rows.Find(name) }

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

// restore sets the row that line returned; "" does nothing.
func (t *table) restore(line string) {
	if line != "" {
		t.set(strings.Split(line, ":"))
	}
}

func (t *table) drop(name string) {
	n := len(t.rows)
	t.rows = slices.DeleteFunc(t.rows, func(r []string) bool { return r[0] == name })
	t.dirty = t.dirty || len(t.rows) != n
}

func (t *table) bytes() []byte {
	var b strings.Builder
	for _, r := range t.rows {
		b.WriteString(line(r) + "\n")
	}
	return []byte(b.String())
}

func line(row []string) string { return strings.Join(row, ":") }

// nameOf returns the name with this ID in passwd or group, or "" if there is none.
func (t *table) nameOf(id int) string { return t.rows.NameOf(strconv.Itoa(id)) }

func (t *table) ids() []int {
	var out []int
	for _, r := range t.rows {
		if len(r) < 3 {
			continue
		}
		if id, err := strconv.Atoi(r[2]); err == nil {
			out = append(out, id)
		}
	}
	return out
}

// idRange is the range for new IDs.
type idRange struct{ low, high int }

// free returns the ID that shadow-utils would choose: the greatest used ID plus 1 or, with down,
// the least used ID minus 1. If that is out of range, free returns an unused ID in the range, or
// high+1 if there is none.
func (r idRange) free(used []int, down bool) int {
	used = slices.DeleteFunc(used, func(id int) bool { return id < r.low || id > r.high })
	next, step, end := r.low, 1, r.high
	if len(used) > 0 {
		next = slices.Max(used) + 1
	}
	if down {
		next, step, end = r.high, -1, r.low
		if len(used) > 0 {
			next = slices.Min(used) - 1
		}
	}
	if next >= r.low && next <= r.high {
		return next
	}
	for id := r.low + r.high - end; id != end+step; id += step {
		if !slices.Contains(used, id) {
			return id
		}
	}
	return r.high + 1
}

// defaults are the system's settings for new accounts, as in shadow-utils.
type defaults struct {
	uids, gids, systemUIDs, systemGIDs idRange
	minDays, maxDays, warnDays         string
	homeMode                           fs.FileMode
	home, shell, group, skel           string
}

// readDefaults reads /etc/login.defs and /etc/default/useradd. Missing settings get Debian's
// defaults, except that homes are readable only by their owners.
func (t Target) readDefaults() (defaults, error) {
	login, err := t.settings("/etc/login.defs", " \t")
	if err != nil {
		return defaults{}, err
	}
	useradd, err := t.settings("/etc/default/useradd", "=")
	if err != nil {
		return defaults{}, err
	}
	number := func(key string, usual int) int {
		if n, err := strconv.ParseInt(login[key], 0, 32); err == nil {
			return int(n)
		}
		return usual
	}
	word := func(from map[string]string, key, usual string) string {
		if from[key] != "" {
			return from[key]
		}
		return usual
	}
	uid, gid := number("UID_MIN", 1000), number("GID_MIN", 1000)
	d := defaults{
		uids:       idRange{uid, number("UID_MAX", 60000)},
		gids:       idRange{gid, number("GID_MAX", 60000)},
		systemUIDs: idRange{number("SYS_UID_MIN", 101), number("SYS_UID_MAX", uid-1)},
		systemGIDs: idRange{number("SYS_GID_MIN", 101), number("SYS_GID_MAX", gid-1)},
		minDays:    word(login, "PASS_MIN_DAYS", "0"),
		maxDays:    word(login, "PASS_MAX_DAYS", "99999"),
		warnDays:   word(login, "PASS_WARN_AGE", "7"),
		homeMode:   0o700,
		home:       word(useradd, "HOME", "/home"),
		shell:      word(useradd, "SHELL", "/bin/bash"),
		group:      word(useradd, "GROUP", "100"),
		skel:       word(useradd, "SKEL", "/etc/skel"),
	}
	// Debian's useradd defaults to /bin/sh, but Debian's installer gives users bash.
	if _, err := t.root().Lstat("/bin/bash"); err == nil && d.shell == "/bin/sh" {
		d.shell = "/bin/bash"
	}
	if mode := number("HOME_MODE", -1); mode >= 0 {
		d.homeMode = fs.FileMode(mode) & fs.ModePerm
	} else if mask := number("UMASK", -1); mask >= 0 {
		d.homeMode = fs.ModePerm &^ fs.FileMode(mask)
	}
	return d, nil
}

// settings reads a file that has one setting per line.
func (t Target) settings(p, separators string) (map[string]string, error) {
	b, _, err := t.root().ReadFile(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if i := strings.IndexAny(line, separators); i > 0 && line[0] != '#' {
			out[line[:i]] = strings.Trim(strings.TrimSpace(line[i+1:]), `"`)
		}
	}
	return out, err
}
