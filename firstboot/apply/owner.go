package apply

import (
	"io/fs"
	"os"
	"syscall"
)

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
