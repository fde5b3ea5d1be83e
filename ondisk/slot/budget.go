package slot

import (
	"errors"
	"io"
	"path"
	"strings"

	"github.com/edgebake/edgebake/ondisk"
)

// What a slot may hold, for whoever writes one and for whoever reads one. A USB
// stick has room for more; nobody has a use for it.
const (
	// maxFiles is what the Site's files may have together, in bytes.
	maxFiles = ondisk.SlotRoom
	// maxSite, maxInventory and maxInfo bound the documents that are parsed.
	maxSite      = 256 << 10
	maxInventory = 4 << 20
	maxInfo      = 64 << 10
	maxSignature = 4 << 10
	// maxEntries is how many files and directories a Site may have, maxDepth how
	// deep directories may be nested; files/ is the first.
	maxEntries = 4096
	maxDepth   = 8
)

// What edgebake's own files add to that: edgebake.json, the signature and the two
// reports.
const (
	ownEntries = 4
	maxOwn     = maxInfo + maxSignature + ReportTextSize + ReportJSONSize
)

// tooDeep reports whether a file is nested deeper than maxDepth.
func tooDeep(name string) bool { return strings.Count(name, "/") > maxDepth }

// SizeLimit is how large a file of the slot may be.
func SizeLimit(name string) int64 {
	switch name {
	case ondisk.SlotSite:
		return maxSite
	case ondisk.SlotInventory:
		return maxInventory
	}
	return maxFiles
}

// countEntries counts the files and the directories that they are in.
func countEntries(files map[string][]byte) int {
	all := map[string]bool{}
	for name := range files {
		for ; name != "."; name = path.Dir(name) {
			all[name] = true
		}
	}
	return len(all)
}

// What reading may cost beside the files themselves: boot sector, directories
// and allocation table. A stick of a hundred thousand files, in order, stays
// below it; one made to be slow does not.
const (
	maxMeta  = 4 << 20
	maxReads = 8192
)

// errCost says that a file system is not what a person's computer leaves.
var errCost = errors.New("the file system is damaged or badly fragmented: format the stick again (FAT32) and copy the files to it again")

// budget bounds what is read, whatever the file system makes its reader do:
// chains that jump from one end to the other, thousands of directories that
// are one and the same.
type budget struct {
	r            io.ReaderAt
	reads, bytes int64
}

// allow adds what a file of n bytes costs in any case.
func (b *budget) allow(n int64) {
	b.reads += 1 + n>>20
	b.bytes += n
}

func (b *budget) ReadAt(p []byte, off int64) (int, error) {
	if b.reads--; b.reads < 0 {
		return 0, errCost
	}
	if b.bytes -= int64(len(p)); b.bytes < 0 {
		return 0, errCost
	}
	return b.r.ReadAt(p, off)
}
