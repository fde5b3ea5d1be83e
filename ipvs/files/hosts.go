// Package files writes files that ipvscare shares with other programs: its lines in the hosts
// file, and locks in its run directory.
package files

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
)

// HostsMark is the comment at the end of the lines of /etc/hosts that ipvscare
// writes.
const HostsMark = "# ipvscare"

// HostsLine is the line of a name in the hosts file for one address family; a
// dual-stack name has two lines.
type HostsLine struct {
	name string
	ipv6 bool
	addr netip.Addr // invalid: no line
}

// LineFor returns the line that gives the name an address.
func LineFor(name string, addr netip.Addr) HostsLine {
	return HostsLine{name, addr.Is6(), addr}
}

// NoLineFor returns a HostsLine that removes the name's line for the address family of vip.
func NoLineFor(name string, vip netip.Addr) HostsLine {
	return HostsLine{name: name, ipv6: vip.Is6()}
}

// applyTo returns the hosts file with exactly one marked line for the name, or
// none if addr is invalid. Other lines are kept byte for byte.
func (h HostsLine) applyTo(text []byte) []byte {
	lines, at, satisfied := h.unmarked(text)
	if h.addr.IsValid() && !satisfied {
		if at > 0 && !bytes.HasSuffix(lines[at-1], []byte("\n")) {
			lines[at-1] = append(bytes.Clone(lines[at-1]), '\n')
		}
		lines = slices.Insert(lines, at, []byte(h.addr.String()+" "+h.name+" "+HostsMark+"\n"))
	}
	return bytes.Join(lines, nil)
}

// unmarked returns the lines except the name's marked lines, and the index for the name's new line.
// That is the place of the old line, but before any line that maps the name to another address,
// because the first line wins. satisfied means that another line already maps the name to this
// address.
func (h HostsLine) unmarked(text []byte) (lines [][]byte, at int, satisfied bool) {
	foreign, marked := -1, -1
	for line := range bytes.Lines(text) {
		fields, comment := hostsFields(line)
		named := len(fields) > 1 && slices.ContainsFunc(fields[1:], func(w string) bool { return strings.EqualFold(w, h.name) })
		switch {
		case named && comment == HostsMark && h.sameFamily(fields[0]):
			if marked < 0 {
				marked = len(lines)
			}
			continue
		case named && h.addr.IsValid() && fields[0] == h.addr.String():
			satisfied = satisfied || foreign < 0
		case named && foreign < 0 && h.sameFamily(fields[0]):
			foreign = len(lines)
		}
		lines = append(lines, line)
	}
	at = len(lines)
	if marked >= 0 {
		at = marked
	}
	if foreign >= 0 {
		at = min(at, foreign)
	}
	return lines, at, satisfied
}

// NamesAt returns the names that have a marked line with one of the addresses in the hosts file.
func NamesAt(path string, addrs ...netip.Addr) []string {
	text, err := os.ReadFile(path)
	if path == "" || err != nil {
		return nil
	}
	var names []string
	for line := range bytes.Lines(text) {
		fields, comment := hostsFields(line)
		if len(fields) < 2 || comment != HostsMark {
			continue
		}
		if a, err := netip.ParseAddr(fields[0]); err == nil && slices.Contains(addrs, a) {
			names = append(names, fields[1:]...)
		}
	}
	return names
}

func hostsFields(line []byte) (fields []string, comment string) {
	s := strings.TrimRight(string(line), "\r\n")
	if i := strings.IndexByte(s, '#'); i >= 0 {
		s, comment = s[:i], strings.TrimSpace(s[i:])
	}
	return strings.Fields(s), comment
}

func (h HostsLine) sameFamily(text string) bool {
	a, err := netip.ParseAddr(text)
	return err == nil && a.Unmap().Is6() == h.ipv6
}

// HostsTimeout is the time to wait for the lock on the hosts file. Programs
// hold it only while they read and replace the file.
const HostsTimeout = 10 * time.Second

// KeepHosts adds, changes or removes the line in the file, and reports whether the file changed.
// While it writes, it holds the lock ondisk.HostsLock in runDir, which firstboot also takes to
// replace the file.
func KeepHosts(ctx context.Context, path, runDir string, line HostsLine) (changed bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("writing the line of %s to %s: %w", line.name, path, err)
		}
	}()
	if _, changes, err := line.change(path); err != nil || !changes {
		return false, err
	}
	if runDir != "" {
		if err := UseRunDir(runDir); err != nil {
			return false, err
		}
		unlock, err := Lock(ctx, filepath.Join(runDir, filepath.Base(ondisk.HostsLock)), HostsTimeout)
		if err != nil {
			return false, err
		}
		defer unlock()
	}
	// While we waited for the lock, its holder may have changed the file.
	text, changes, err := line.change(path)
	if err != nil || !changes {
		return false, err
	}
	return true, Replace(path, text, 0o644)
}

// change returns the new content of the file, and whether it differs.
func (h HostsLine) change(path string) (text []byte, changes bool, err error) {
	st, err := os.Stat(path)
	if err == nil && links(st) == 0 {
		return nil, false, errors.New("the file was replaced, and this container still has the old one mounted: mount its directory instead, as `ipvscare static-pod` does")
	}
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, err
	}
	text = h.applyTo(old)
	return text, !bytes.Equal(text, old), nil
}

// Replace replaces a file atomically. A mount point cannot be replaced, so it is written in place.
func Replace(path string, data []byte, mode fs.FileMode) error {
	uid, gid := -1, -1
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
		uid, gid = owner(st)
	}
	// A fixed name, so that a file left by a power cut is overwritten.
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".ipvscare-new")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync())
	if uid >= 0 && (uid != os.Geteuid() || gid != os.Getegid()) {
		err = errors.Join(err, f.Chown(uid, gid))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	err = os.Rename(tmp, path)
	if errors.Is(err, syscall.EBUSY) {
		return os.WriteFile(path, data, mode)
	}
	return errors.Join(err, file.SyncDir(filepath.Dir(path)))
}

func owner(st fs.FileInfo) (uid, gid int) {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid), int(s.Gid)
	}
	return -1, -1
}

// links returns the number of hard links of a file.
func links(st fs.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return uint64(s.Nlink)
	}
	return 1
}
