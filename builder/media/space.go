package media

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/file"
)

// spaceForCopies returns an error if copies of the image at outputs do not fit on the disk.
func (m *Image) spaceForCopies(outputs []string, unpack bool) error {
	each := stored(m.f, m.stored)
	if unpack {
		each = 0
		for i := range m.z.Frames() {
			if e := m.z.Entry(i); !m.z.SeemsZero(e.Start, e.Size) {
				each += e.Size
			}
		}
	}
	err := checkSpace(outputs, each, "image")
	if err != nil && !unpack && !m.device && sharesBlocks(m.f, existing(filepath.Dir(outputs[0]))) {
		return nil // a copy that shares blocks needs little more space than its slot
	}
	return err
}

// checkSpace returns an error if the outputs, all in one directory, do not fit on the disk. each is
// the size of one output in bytes. Existing outputs are replaced, so their space counts as free.
// Outputs that are written at the same time are an exception, because their old files still exist
// meanwhile.
func checkSpace(outputs []string, each int64, what string) error {
	n := each * int64(len(outputs))
	for _, o := range outputs[min(len(outputs), runtime.GOMAXPROCS(0)):] {
		if st, err := os.Lstat(o); err == nil && st.Mode().IsRegular() {
			n -= st.Sys().(*syscall.Stat_t).Blocks * 512
		}
	}
	if len(outputs) > 1 {
		what = configs.Count(len(outputs), what)
	} else {
		what = "the " + what
	}
	return file.CheckSpace(existing(filepath.Dir(outputs[0])), n, what)
}

// existing returns dir or, if it does not exist, its nearest existing parent.
func existing(dir string) string {
	for dir = filepath.Clean(dir); ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return dir
		}
	}
}
