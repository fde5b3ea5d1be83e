package fetch

import (
	"fmt"
	"io/fs"
	"syscall"
)

// FileState names a file's state: it changes whenever somebody writes to the
// file. Empty where the system does not tell.
func FileState(fi fs.FileInfo) string {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("file %d %d %d %v %v", st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
}
