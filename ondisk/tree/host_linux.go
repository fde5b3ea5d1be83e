package tree

import (
	"errors"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// inodeID tells files of the host apart.
type inodeID struct{ dev, ino uint64 }

// linked reports which file that is, where it has several names.
func linked(fi fs.FileInfo) (inodeID, bool) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || st.Nlink < 2 {
		return inodeID{}, false
	}
	return inodeID{st.Dev, st.Ino}, true
}

// readCapability is a file's security.capability, empty where it has none.
func readCapability(name string) (string, error) {
	buf := make([]byte, 64)
	n, err := unix.Lgetxattr(name, capability, buf)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) {
		return "", nil
	}
	return string(buf[:max(n, 0)]), err
}
