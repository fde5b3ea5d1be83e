package fetch

import (
	"fmt"
	"io/fs"
	"syscall"
	"time"
)

// FileState returns a string that identifies the state of a file, or "" if it is unknown. A write
// changes the state, unless it follows another write immediately (see unsettled).
func FileState(fi fs.FileInfo) string {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("file %d %d %d %v %v", st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
}

// changedAt returns the times of the last change of a file's content and of its inode, by the file
// system's clock.
func changedAt(fi fs.FileInfo) []time.Time {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	return []time.Time{time.Unix(st.Mtim.Unix()), time.Unix(st.Ctim.Unix())}
}
