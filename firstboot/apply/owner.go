package apply

import (
	"io/fs"
	"os"
	"syscall"

	"github.com/edgebake/edgebake/firstboot/beneath"
)

func owner(st os.FileInfo) (uid, gid int) {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid), int(s.Gid)
	}
	return 0, 0
}

func sameOwner(st fs.FileInfo, m beneath.Owner) bool {
	uid, gid := owner(st)
	return uid == m.UID && gid == m.GID
}

func sameMeta(st fs.FileInfo, m beneath.Owner) bool {
	return st.Mode()&modeBits == m.Mode&modeBits && sameOwner(st, m)
}
