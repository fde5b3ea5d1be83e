package ext4

import (
	"encoding/binary"
	"hash/crc32"
)

var le = binary.LittleEndian

// checksum continues crc32c in ext4's convention ("Checksums"): started from
// ~0 and without the final inversion that Go's package does. MakeTable returns
// one shared table, for which crc32 uses the processor's instructions.
func checksum(c uint32, b []byte) uint32 {
	return ^crc32.Update(^c, crc32.MakeTable(crc32.Castagnoli), b)
}

// fsSeed starts all checksums of a file system. It is stored in the
// superblock (csum_seed), so that the UUID may be changed later.
func fsSeed(uuid [16]byte) uint32 { return checksum(^uint32(0), uuid[:]) }

// inodeSeed starts the checksums of what belongs to one inode: number, then
// generation, which is always 0 here.
func inodeSeed(fs, number, generation uint32) uint32 {
	var b [8]byte
	le.PutUint32(b[:], number)
	le.PutUint32(b[4:], generation)
	return checksum(fs, b[:])
}

// blockSeed starts the checksum of an extended attribute block.
func blockSeed(fs uint32, block int64) uint32 {
	var b [8]byte
	le.PutUint64(b[:], uint64(block))
	return checksum(fs, b[:])
}
