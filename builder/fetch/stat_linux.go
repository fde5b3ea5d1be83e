package fetch

import (
	"fmt"
	"io/fs"
	"syscall"
	"time"
)

// FileState names a file's state: a write to the file changes it, unless another one
// came just before (unsettled). Empty where the system does not tell.
func FileState(fi fs.FileInfo) string {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("file %d %d %d %v %v", st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
}

// changedAt is when a file's content and its inode were changed last, by the clock of
// its file system.
func changedAt(fi fs.FileInfo) []time.Time {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	return []time.Time{time.Unix(st.Mtim.Unix()), time.Unix(st.Ctim.Unix())}
}
