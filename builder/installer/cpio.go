package installer

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// archive returns a cpio archive in the format newc, which the kernel unpacks over the preceding
// initrd (see Documentation/driver-api/early-userspace/buffer-format.rst of the kernel). The same
// files always give the same bytes.
func archive(files map[string]member) []byte {
	dirs := map[string]bool{}
	var names []string
	for name := range files {
		names = append(names, name)
		for d := path.Dir(name); d != "." && d != "/"; d = path.Dir(d) {
			dirs[d] = true
		}
	}
	for d := range dirs {
		if _, ok := files[d]; !ok {
			names = append(names, d)
		}
	}
	// Sort parents before children: a directory must exist before its files.
	slices.SortFunc(names, func(a, b string) int {
		return slices.Compare(strings.Split(a, "/"), strings.Split(b, "/"))
	})
	var b bytes.Buffer
	for i, name := range names {
		if f, ok := files[name]; ok {
			entry(&b, i+1, name, tree.ModeRegular|f.mode, f.data)
		} else {
			entry(&b, i+1, name, tree.ModeDir|0o755, nil)
		}
	}
	entry(&b, 0, "TRAILER!!!", 0, nil)
	return b.Bytes()
}

// member is a file of an archive.
type member struct {
	mode uint32
	data []byte
}

// entry writes one file: a header of hexadecimal digits, the name and the data. It pads the name
// and the data to a multiple of four bytes.
func entry(b *bytes.Buffer, inode int, name string, mode uint32, data []byte) {
	links := 1
	fmt.Fprintf(b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		inode, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
	pad(b)
	b.Write(data)
	pad(b)
}

func pad(b *bytes.Buffer) {
	for b.Len()%4 != 0 {
		b.WriteByte(0)
	}
}
