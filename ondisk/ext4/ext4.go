// Package ext4 writes and reads ext4 file systems without a kernel, a loop
// device or root.
//
// Write turns a tree into a file system in one pass. Everything is laid out in
// memory first (which inode, which blocks), so what does not fit is known
// before the first byte is written; then file contents stream from their
// blobs straight to their final place, and the superblock comes last: a write
// that was interrupted never looks like a file system.
//
// Invariants:
//   - The same nodes and options give the same bytes, whatever the machine,
//     the order of the nodes or the number of processors.
//   - Blocks of zeros are never written, so the image stays sparse.
//   - Memory grows with the number of entries (some 190 bytes each), not with
//     their contents.
//   - What is written is what mke2fs would have chosen in its features, so the
//     kernel mounts it read-write and grows it online: journal, extents, 64bit,
//     flex_bg, metadata_csum with csum_seed, dir_index, resize_inode.
//
// Field offsets and names follow the kernel's documentation of the on-disk
// format, Documentation/filesystems/ext4 ("Data Structures and Algorithms");
// the section is named where a structure is encoded.
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

	// maxBlocks keeps block numbers of files within the 32 bits of an
	// extent's logical block: 16 TiB.
	maxBlocks = 1<<32 - 1

	mebi = 1 << 20
)

// Options are what is not in the tree. Size, UUID and HashSeed must be set;
// ids come from the caller, derived by hash, so that a build is reproducible.
type Options struct {
	// Label is the volume name, at most 16 bytes.
	Label string
	// UUID names the file system.
	UUID [16]byte
	// HashSeed seeds the hash of directory indexes.
	HashSeed [16]byte
	// Size is the room on the device, in bytes.
	Size int64
	// Time is the file system's own time: creation, inode change times, and
	// the times of what is not in the tree.
	Time time.Time
	// FreeBytes and FreeInodes are the headroom that Size adds. Write makes
	// sure that it is there.
	FreeBytes, FreeInodes int64
	// JournalSize in bytes; 0 takes what mke2fs would for this Size. Set it
	// for a file system that is written small and grown later.
	JournalSize int64
	// GrowTo is the size up to which room for group descriptors is set aside,
	// so that the file system can be grown while mounted; 0 means 1024 times
	// its size, at most 4 TiB.
	GrowTo int64
}

// Stats says what Write made.
type Stats struct {
	// Size is what the file system covers: Options.Size, less a tail too
	// small to be of use.
	Size int64
	// Inodes and FreeInodes, FreeBytes: as df shows them.
	Inodes, FreeInodes int64
	FreeBytes          int64
	// Written counts the bytes given to the writer; the rest are holes.
	Written int64
}

// Size returns the smallest size, in whole MiB, that holds nodes and the
// options' headroom. Options.Size is not looked at.
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
		// What is added to the size adds at most as much free space, so a
		// size below this one cannot suffice.
		size += roundUp(missing*blockSize, mebi)
	}
	return 0, fmt.Errorf("computing the size of file system %q: no size up to %d bytes fits", o.Label, size)
}

// Write makes the file system on w, which must read as zeros. It writes in
// mostly ascending order from one goroutine, and never beyond o.Size.
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

// check rejects options that no file system can have.
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
	if o.FreeBytes < 0 || o.FreeInodes < 0 || o.JournalSize < 0 || o.GrowTo < 0 || o.Size < 0 {
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
