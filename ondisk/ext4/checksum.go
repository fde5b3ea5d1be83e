package ext4

import (
	"encoding/binary"
	"hash/crc32"
)

var le = binary.LittleEndian

// checksum continues a CRC-32C as ext4 does ("Checksums"): it starts from ~0 and omits Go's final
// inversion. crc32 uses the processor's instructions only with the table that MakeTable returns.
func checksum(c uint32, b []byte) uint32 {
	return ^crc32.Update(^c, crc32.MakeTable(crc32.Castagnoli), b)
}

// fsSeed returns the start value of all checksums of a file system. The superblock stores it
// (csum_seed), so that the UUID can be changed later.
func fsSeed(uuid [16]byte) uint32 { return checksum(^uint32(0), uuid[:]) }

// inodeSeed returns the start value of the checksums of an inode's metadata. Write gives every
// inode the generation 0.
func inodeSeed(fs, number, generation uint32) uint32 {
	var b [8]byte
	le.PutUint32(b[:], number)
	le.PutUint32(b[4:], generation)
	return checksum(fs, b[:])
}

// blockSeed returns the start value of the checksum of a block of extended attributes.
func blockSeed(fs uint32, block int64) uint32 {
	var b [8]byte
	le.PutUint64(b[:], uint64(block))
	return checksum(fs, b[:])
}
