package apply

import (
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// chownLink gives a symbolic link its owner, and nothing but a link: whoever
// may write in the directory can put something else there meanwhile.
func chownLink(path string, m Meta) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return &fs.PathError{Op: "chown", Path: path, Err: unix.EINVAL}
	}
	if err := unix.Fchownat(fd, "", m.UID, m.GID, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "chown", Path: path, Err: err}
	}
	return nil
}

func owner(st os.FileInfo) (uid, gid int) {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid), int(s.Gid)
	}
	return 0, 0
}

func sameOwner(st fs.FileInfo, m Meta) bool {
	uid, gid := owner(st)
	return uid == m.UID && gid == m.GID
}

func sameMeta(st fs.FileInfo, m Meta) bool {
	return st.Mode()&modeBits == m.Mode&modeBits && sameOwner(st, m)
}
