// Package ext4 writes and reads ext4 file systems without a kernel, a loop device or root.
//
// Write turns a tree into a file system in one pass. It first assigns all inodes and blocks in
// memory, so that it rejects a tree that does not fit before it writes the first byte. It copies
// the contents of files directly from their blobs to their final location. It writes the superblock
// last, so that an interrupted write is never mistaken for a file system.
//
// Invariants:
//   - The same nodes and options give the same bytes, whatever the machine, the order of
//     the nodes and the number of processors.
//   - Blocks of zeros are never written, so the image stays sparse.
//   - Memory grows with the number of entries (about 190 bytes each), not with the size
//     of their contents.
//   - The features are those that mke2fs enables: journal, extents, 64bit, flex_bg,
//     metadata_csum with csum_seed, dir_index, resize_inode. So the kernel mounts the result
//     read-write and can grow it while it is mounted.
//
// Field offsets and names follow the kernel's documentation of the on-disk format,
// Documentation/filesystems/ext4 ("Data Structures and Algorithms"). Comments give the title of the
// section in quotes.
package ext4

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ondisk/tree"
)

const (
	blockSize      = 4096
	blocksPerGroup = 8 * blockSize // one bitmap block describes a group
	inodeSize      = 256
	inodesPerBlock = blockSize / inodeSize

	// maxBlocks limits block numbers to the 32 bits of an extent's logical
	// block: 16 TiB.
	maxBlocks = 1<<32 - 1

	mebi = 1 << 20
)

// Options are the properties of a file system that are not in its tree. Size, UUID and HashSeed are
// required. For reproducible builds, the caller derives the UUID and the HashSeed from a hash.
type Options struct {
	// Label is the volume name, at most 16 bytes.
	Label string
	// UUID identifies the file system.
	UUID [16]byte
	// HashSeed is the seed of the hash in directory indexes.
	HashSeed [16]byte
	// Size is the size of the device in bytes.
	Size int64
	// Time is the creation time of the file system, the change time of all inodes, and the
	// modification time of entries that are not in the tree.
	Time time.Time
	// FreeBytes and FreeInodes are the free space that the file system must have. The function
	// Size reserves them; Write fails if they are not available.
	FreeBytes, FreeInodes int64
	// JournalSize is the size of the journal in bytes; 0 means mke2fs's choice for Size. Set it if
	// the file system will be grown later.
	JournalSize int64
}

// Stats describes a file system that Write made.
type Stats struct {
	// Size is the size of the file system in bytes: Options.Size without a rest that is too small
	// for a block group.
	Size int64
	// Inodes, FreeInodes and FreeBytes are the numbers that df shows.
	Inodes, FreeInodes int64
	FreeBytes          int64
	// Written is the number of bytes that were written. The rest of the image consists of holes.
	Written int64
}

// Size returns the smallest size, in bytes and a multiple of 1 MiB, for nodes, FreeBytes and
// FreeInodes. It ignores Options.Size.
func Size(nodes []tree.Node, o Options) (int64, error) {
	v, err := newVolume(nodes, o)
	if err != nil {
		return 0, err
	}
	size := v.sizeAtLeast()
	for range 100 {
		o.Size = size
		v.opts = o
		missing, err := v.layout()
		if err != nil {
			return 0, err
		}
		if missing <= 0 {
			return size, nil
		}
		// n more bytes add at most n bytes of free space, so no smaller size is sufficient.
		size += roundUp(missing*blockSize, mebi)
	}
	return 0, fmt.Errorf("computing the size of file system %q: no size up to %d bytes fits", o.Label, size)
}

// Write writes the file system to w, which must read as zeros. All writes come from one goroutine,
// mostly in ascending order, and none is beyond o.Size.
func Write(w io.WriterAt, nodes []tree.Node, blobs tree.Blobs, o Options) (Stats, error) {
	v, err := newVolume(nodes, o)
	if err != nil {
		return Stats{}, err
	}
	missing, err := v.layout()
	if err != nil {
		return Stats{}, err
	}
	if missing > 0 {
		what := "the tree"
		if o.FreeBytes > 0 || o.FreeInodes > 0 {
			what = fmt.Sprintf("the tree and headroom of %d MiB and %d inodes", o.FreeBytes/mebi, o.FreeInodes)
		}
		return Stats{}, fmt.Errorf("laying out file system %q: %d MiB is too small for %s, at least %d MiB more is required: raise its size",
			o.Label, o.Size/mebi, what, roundUp(missing*blockSize, mebi)/mebi)
	}
	e := newEmitter(w)
	src := &source{blobs: blobs}
	err = v.emit(e, src)
	err = errors.Join(err, e.close(), src.close())
	if err != nil {
		return Stats{}, fmt.Errorf("writing file system %q: %w", o.Label, err)
	}
	return Stats{
		Size:       v.geo.blocks * blockSize,
		Inodes:     v.geo.inodes(),
		FreeInodes: v.geo.inodes() - int64(len(v.inodes)),
		FreeBytes:  (v.data.total - v.data.used) * blockSize,
		Written:    e.written,
	}, nil
}

// check rejects options that ext4 does not support.
func (o Options) check() error {
	var errs []error
	bad := func(f string, a ...any) { errs = append(errs, fmt.Errorf(f, a...)) }
	if len(o.Label) > 16 || strings.ContainsRune(o.Label, 0) {
		bad("label %q: at most 16 bytes, none of them zero", o.Label)
	}
	if o.UUID == [16]byte{} {
		bad("UUID is not set")
	}
	if o.HashSeed == [16]byte{} {
		bad("HashSeed is not set")
	}
	if _, _, err := timestamp(o.Time); err != nil {
		bad("time: %w", err)
	}
	if o.FreeBytes < 0 || o.FreeInodes < 0 || o.JournalSize < 0 || o.Size < 0 {
		bad("sizes must not be negative")
	}
	if o.FreeBytes > maxBlocks*blockSize || o.FreeInodes > maxBlocks {
		bad("headroom of %d bytes and %d inodes is more than an ext4 file system of 16 TiB has", o.FreeBytes, o.FreeInodes)
	}
	if o.JournalSize != 0 && (o.JournalSize < minJournalBlocks*blockSize || o.JournalSize > maxJournalBlocks*blockSize) {
		bad("journal of %d bytes: between %d MiB and %d MiB is possible", o.JournalSize,
			minJournalBlocks*blockSize/mebi, maxJournalBlocks*blockSize/mebi)
	}
	if len(errs) > 0 {
		return fmt.Errorf("checking options of file system %q: %w", o.Label, errors.Join(errs...))
	}
	return nil
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

func ceilDiv(n, by int64) int64 { return (n + by - 1) / by }
