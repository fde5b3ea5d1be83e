package slot

import (
	"errors"
	"io"
	"path"
	"strings"

	"github.com/edgebake/edgebake/ondisk"
)

// Limits of a slot, for writing and for reading. They also apply to USB sticks.
const (
	// maxFiles limits the total size of the Site's files, in bytes.
	maxFiles = ondisk.SlotCapacity
	// maxSite, maxInventory and maxInfo limit the sizes of documents that are parsed.
	maxSite      = 256 << 10
	maxInventory = 4 << 20
	maxInfo      = 64 << 10
	maxSignature = 4 << 10
	// maxEntries limits the number of files and directories of a Site, and maxDepth the depth of
	// directories; files/ has depth 1.
	maxEntries = 4096
	maxDepth   = 8
)

// Limits of edgebake's own files: edgebake.json, the signature and the two reports.
const (
	ownEntries = 4
	maxOwn     = maxInfo + maxSignature + ReportTextSize + ReportJSONSize
)

// tooDeep reports whether a file is nested deeper than maxDepth.
func tooDeep(name string) bool { return strings.Count(name, "/") > maxDepth }

// SizeLimit returns the maximum size of a file in the slot, in bytes.
func SizeLimit(name string) int64 {
	switch name {
	case ondisk.SlotSite:
		return maxSite
	case ondisk.SlotInventory:
		return maxInventory
	}
	return maxFiles
}

// countEntries returns the number of the files and their parent directories.
func countEntries(files map[string][]byte) int {
	all := map[string]bool{}
	for name := range files {
		for ; name != "."; name = path.Dir(name) {
			all[name] = true
		}
	}
	return len(all)
}

// Limits for reading the boot sector, directories and the allocation table. A stick with 100,000
// files stays below these limits; a stick crafted to be slow exceeds them.
const (
	maxMeta  = 4 << 20
	maxReads = 8192
)

// errCost means that a file system exceeds the budget.
var errCost = errors.New("the file system is damaged or badly fragmented: format the stick again (FAT32) and copy the files to it again")

// budget limits the reads from an untrusted file system. A hostile one may fragment each cluster
// chain, or have thousands of entries that all refer to one directory.
type budget struct {
	r            io.ReaderAt
	reads, bytes int64
}

// allow adds the cost of reading a file of n bytes.
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
