package tree

import (
	"errors"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// inodeID identifies a file on the host.
type inodeID struct{ dev, ino uint64 }

// linked returns the ID of a file that has more than one name.
func linked(fi fs.FileInfo) (inodeID, bool) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || st.Nlink < 2 {
		return inodeID{}, false
	}
	return inodeID{st.Dev, st.Ino}, true
}

// readCapability returns the value of a file's security.capability, or "".
func readCapability(name string) (string, error) {
	buf := make([]byte, 64)
	n, err := unix.Lgetxattr(name, capability, buf)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) {
		return "", nil
	}
	return string(buf[:max(n, 0)]), err
}
