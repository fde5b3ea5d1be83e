package device

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrUsers means that programs have a disk open for writing. O_EXCL does not detect programs that
// open it without O_EXCL, such as virtual machines.
type ErrUsers struct{ Programs []string }

func (e *ErrUsers) Error() string {
	return fmt.Sprintf("open for writing in %s: stop that program first", strings.Join(e.Programs, ", "))
}

// Users returns an *ErrUsers if other programs have the disk at path, or one of its partitions,
// open for writing. Only root can see the programs of other users. proc is /proc, except in tests.
func Users(proc, path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return nil // the caller has opened the disk, and reports errors
	}
	devs := []uint64{st.Rdev}
	parts, _ := filepath.Glob(fmt.Sprintf("/sys/dev/block/%d:%d/*/dev", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	for _, p := range parts {
		var major, minor uint32
		b, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err == nil {
			devs = append(devs, unix.Mkdev(major, minor))
		}
	}
	e := &ErrUsers{}
	fds, _ := filepath.Glob(filepath.Join(proc, "[0-9]*/fd/*"))
	for _, fd := range fds {
		pid := filepath.Base(filepath.Dir(filepath.Dir(fd)))
		var has unix.Stat_t
		if pid == strconv.Itoa(os.Getpid()) || unix.Stat(fd, &has) != nil || has.Mode&unix.S_IFMT != unix.S_IFBLK || !slices.Contains(devs, has.Rdev) || !writes(fd) {
			continue
		}
		comm, _ := os.ReadFile(filepath.Join(proc, pid, "comm"))
		if who := fmt.Sprintf("%s (process %s)", clean(string(comm)), pid); !slices.Contains(e.Programs, who) {
			e.Programs = append(e.Programs, who)
		}
	}
	if len(e.Programs) == 0 {
		return nil
	}
	return e
}

// writes reports whether a file descriptor is open for writing. fd is a path /proc/PID/fd/FD;
// /proc/PID/fdinfo/FD contains its flags in octal.
func writes(fd string) bool {
	b, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(fd)), "fdinfo", filepath.Base(fd)))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "flags:"); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(v), 8, 64)
			return err == nil && n&unix.O_ACCMODE != unix.O_RDONLY
		}
	}
	return false
}
