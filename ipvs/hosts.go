package ipvs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// hostsMark ends the lines of /etc/hosts that are ours.
const hostsMark = "# ipvscare"

// hostsWith returns the file with exactly one line of ours for the name, and
// no line at all if addr is not valid. Other lines stay as they are, byte for
// byte. A line of somebody else that already says the same is enough; before
// one that says otherwise ours is put, because the first one wins.
func hostsWith(text []byte, name string, addr netip.Addr) []byte {
	var lines [][]byte
	satisfied := false
	before := -1 // where a foreign line names the host with another address
	ours := -1
	for line := range bytes.Lines(text) {
		words, comment := hostsFields(line)
		named := len(words) > 1 && contains(words[1:], name)
		switch {
		case named && comment == hostsMark:
			if ours < 0 {
				ours = len(lines)
			}
			continue
		case named && addr.IsValid() && words[0] == addr.String():
			satisfied = satisfied || before < 0
		case named && before < 0 && sameFamily(words[0], addr):
			before = len(lines)
		}
		lines = append(lines, line)
	}
	if addr.IsValid() && !satisfied {
		at := len(lines)
		if ours >= 0 {
			at = ours
		}
		if before >= 0 && before < at {
			at = before
		}
		if at > 0 && !bytes.HasSuffix(lines[at-1], []byte("\n")) {
			lines[at-1] = append(bytes.Clone(lines[at-1]), '\n')
		}
		line := []byte(addr.String() + " " + name + " " + hostsMark + "\n")
		lines = append(lines[:at], append([][]byte{line}, lines[at:]...)...)
	}
	return bytes.Join(lines, nil)
}

func hostsFields(line []byte) (words []string, comment string) {
	s := strings.TrimRight(string(line), "\r\n")
	if i := strings.IndexByte(s, '#'); i >= 0 {
		s, comment = s[:i], strings.TrimSpace(s[i:])
	}
	return strings.Fields(s), comment
}

func contains(words []string, name string) bool {
	for _, w := range words {
		if strings.EqualFold(w, name) {
			return true
		}
	}
	return false
}

func sameFamily(text string, addr netip.Addr) bool {
	a, err := netip.ParseAddr(text)
	return err == nil && addr.IsValid() && a.Unmap().Is4() == addr.Is4()
}

// keepHosts puts the line into the file and reports whether it had to.
func keepHosts(path, name string, addr netip.Addr) (bool, error) {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("reading %s: %w", path, err)
	}
	text := hostsWith(old, name, addr)
	if bytes.Equal(text, old) {
		return false, nil
	}
	if err := replaceFile(path, text, 0o644); err != nil {
		return false, fmt.Errorf("keeping %s in %s: %w", name, path, err)
	}
	return true, nil
}

// replaceFile writes a file so that nobody ever sees half of it. A file that
// is a mount point cannot be replaced; it is written in place.
func replaceFile(path string, data []byte, mode fs.FileMode) error {
	uid, gid := -1, -1
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
		uid, gid = owner(st)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync())
	if uid >= 0 && (uid != os.Geteuid() || gid != os.Getegid()) {
		err = errors.Join(err, f.Chown(uid, gid))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	err = os.Rename(f.Name(), path)
	if errors.Is(err, syscall.EBUSY) {
		return os.WriteFile(path, data, mode)
	}
	return err
}

func owner(st fs.FileInfo) (uid, gid int) {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid), int(s.Gid)
	}
	return -1, -1
}
