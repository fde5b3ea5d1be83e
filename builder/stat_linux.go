package builder

import (
	"fmt"
	"io/fs"
	"syscall"
)

// statKey names a file's state: it changes whenever somebody writes to the
// file. Empty where the file system does not tell.
func statKey(fi fs.FileInfo) string {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("file %d %d %d %v %v", st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
}
