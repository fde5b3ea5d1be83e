// Package fat writes and reads FAT file systems: FAT32 for the EFI system partition, and FAT16 or
// FAT12 for the slot, which people can edit on any computer.
//
// Write makes a whole file system from tree nodes. The same nodes and options give the same bytes.
// Every file and directory is contiguous, in the order of the sorted paths. Write leaves unused
// clusters as holes. It checks all input before it writes the first byte.
//
// The reader reads FAT12, FAT16 and FAT32 as other systems write them, with long and short names
// and fragmented files. It checks all values, so a damaged file system cannot make it loop or
// allocate unlimited memory.
//
// The format is described in Microsoft's "FAT: General Overview of On-Disk Format", version 1.03
// (fatgen103). Comments give the names of its sections.
package fat

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"time"
)

// Options of a new file system.
type Options struct {
	// Type is 12, 16 or 32.
	Type int
	// Label is the volume label: up to 11 characters.
	Label    string
	VolumeID uint32
	// Size is the size of the partition in bytes.
	Size int64
	// SectorSize is the sector size of the disk: 512 (or 0) or 4096. Operating systems do not mount
	// a file system with smaller sectors than the disk's.
	SectorSize int64
	// Start is the offset of the partition on the disk in bytes. It is stored in the boot sector
	// (BPB_HiddSec).
	Start int64
	// Time is used for nodes without a modification time.
	Time time.Time
}

var le = binary.LittleEndian

const (
	bootSize  = 512 // bytes used in the boot sector, whatever the sector size
	entrySize = 32  // a directory entry
	rootMax   = 512 // entries of the root directory of FAT12 and FAT16; the usual number
	// dirMax is the largest size of a directory: 65,536 entries.
	dirMax = 65536 * entrySize

	minFAT16 = 4085  // clusters; a file system with fewer is FAT12
	minFAT32 = 65525 // clusters; a file system with fewer is FAT16
	// margin is the distance from these limits that fatgen103 recommends, because some programs use
	// slightly different limits.
	margin = 16

	attrReadOnly  = 0x01
	attrHidden    = 0x02
	attrSystem    = 0x04
	attrVolume    = 0x08
	attrDirectory = 0x10
	attrArchive   = 0x20
	attrLongName  = attrReadOnly | attrHidden | attrSystem | attrVolume
)

// geometry is the layout of a file system. Sizes are in sectors unless stated otherwise.
type geometry struct {
	kind       int // 12, 16 or 32
	sectorSize int64
	sectors    int64
	reserved   int64
	fats       int64
	fatSectors int64
	rootDir    int64 // sectors of the fixed root directory; 0 on FAT32
	perCluster int64
	clusters   int64
	root       uint32 // first cluster of the root directory on FAT32
}

func (g *geometry) clusterSize() int64   { return g.perCluster * g.sectorSize }
func (g *geometry) fatOff(i int64) int64 { return (g.reserved + i*g.fatSectors) * g.sectorSize }
func (g *geometry) rootOff() int64       { return g.fatOff(g.fats) }
func (g *geometry) dataOff() int64       { return g.rootOff() + g.rootDir*g.sectorSize }

// tableSize returns the size in bytes of n entries of the allocation table.
func (g *geometry) tableSize(n int64) int64 { return (n*int64(g.kind) + 7) / 8 }

// clusterOff returns the offset of a cluster in bytes. The first cluster has number 2.
func (g *geometry) clusterOff(c uint32) int64 {
	return g.dataOff() + int64(c-2)*g.clusterSize()
}

// countClusters returns the number of clusters that fit after the allocation
// tables and the root directory.
func (g *geometry) countClusters() int64 {
	return (g.sectors - g.reserved - g.fats*g.fatSectors - g.rootDir) / g.perCluster
}

// layout computes the geometry of a new file system.
func layout(o Options) (*geometry, error) {
	sectorSize := cmp.Or(o.SectorSize, 512)
	if sectorSize != 512 && sectorSize != 4096 {
		return nil, fmt.Errorf("a FAT file system cannot have sectors of %d bytes: want 512 or 4096", sectorSize)
	}
	g := &geometry{kind: o.Type, sectorSize: sectorSize, sectors: o.Size / sectorSize, fats: 2}
	if o.Size <= 0 || o.Size%sectorSize != 0 || g.sectors > 1<<32-1 {
		return nil, fmt.Errorf("a FAT file system cannot have a size of %d bytes", o.Size)
	}
	switch o.Type {
	case 12, 16:
		g.reserved, g.rootDir = 1, rootMax*entrySize/sectorSize
	case 32:
		g.reserved, g.root = 32, 2
	default:
		return nil, fmt.Errorf("FAT%d cannot be written, only FAT12, FAT16 and FAT32", o.Type)
	}
	g.perCluster = perCluster(o.Type, o.Size, sectorSize)
	// Each cluster needs an entry in the allocation tables, so a larger table leaves space for
	// fewer clusters.
	for {
		need := (g.tableSize(g.countClusters()+2) + sectorSize - 1) / sectorSize
		if need <= g.fatSectors {
			break
		}
		g.fatSectors = need
	}
	// Align clusters to 4 KiB boundaries of the partition, for flash storage.
	align := 4096 / sectorSize
	if rem := (g.dataOff() / sectorSize) % align; rem != 0 {
		g.reserved += align - rem
	}
	g.clusters = g.countClusters()
	switch {
	case g.clusters < 1,
		o.Type == 16 && g.clusters < minFAT16,
		o.Type == 32 && g.clusters < minFAT32:
		return nil, fmt.Errorf("%d bytes are too few for FAT%d", o.Size, o.Type)
	case o.Type == 12 && g.clusters >= minFAT16,
		o.Type == 16 && g.clusters >= minFAT32:
		return nil, fmt.Errorf("%d bytes are too many for FAT%d", o.Size, o.Type)
	}
	return g, nil
}

// perCluster returns the number of sectors per cluster of a new file system: for FAT32 the value in
// fatgen103's table, otherwise the smallest value with clusters of at least 2 KiB that keeps their
// number below the type's limit.
func perCluster(kind int, size, sectorSize int64) int64 {
	if kind == 32 {
		cluster := int64(512)
		switch {
		case size <= 260<<20:
		case size <= 8<<30:
			cluster = 4 << 10
		case size <= 16<<30:
			cluster = 8 << 10
		default:
			cluster = 16 << 10
		}
		return max(1, cluster/sectorSize)
	}
	limit := int64(minFAT32 - 1)
	if kind == 12 {
		limit = minFAT16 - margin
	}
	n := max(1, 2048/sectorSize)
	for size/sectorSize/n >= limit && n < 64 {
		n *= 2
	}
	return n
}

// dosTime encodes a time as FAT's date and time of day, in UTC. The time is clamped to the range of
// the format, 1980 to 2107, and has a resolution of two seconds.
func dosTime(t time.Time) (date, clock uint16) {
	t = t.UTC()
	switch {
	case t.Year() < 1980:
		t = time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)
	case t.Year() > 2107:
		t = time.Date(2107, 12, 31, 23, 59, 58, 0, time.UTC)
	}
	date = uint16(t.Year()-1980)<<9 | uint16(t.Month())<<5 | uint16(t.Day())
	clock = uint16(t.Hour())<<11 | uint16(t.Minute())<<5 | uint16(t.Second()/2)
	return date, clock
}

// fromDOSTime is the inverse of dosTime.
func fromDOSTime(date, clock uint16) time.Time {
	return time.Date(1980+int(date>>9), time.Month(date>>5&15), int(date&31),
		int(clock>>11), int(clock>>5&63), int(clock&31)*2, 0, time.UTC)
}
