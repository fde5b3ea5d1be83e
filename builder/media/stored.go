package media

import (
	"os"

	"golang.org/x/sys/unix"
)

// stored returns the number of bytes that a file occupies on its disk, or size if that is unknown.
func stored(f *os.File, size int64) int64 {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Blocks == 0 {
		return size
	}
	return st.Blocks * 512
}
