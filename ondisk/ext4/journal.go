package ext4

import "encoding/binary"

const (
	minJournalBlocks = 1024     // minimum of JBD2
	maxJournalBlocks = 10240000 // maximum of mke2fs

	jbdMagic        = 0xc03b3998
	jbdSuperblockV2 = 4
)

// journalBlocks returns mke2fs's journal size for a file system of n blocks.
func journalBlocks(blocks int64) int64 {
	for _, c := range []struct{ below, journal int64 }{
		{32 << 10, minJournalBlocks},
		{256 << 10, 4 << 10},
		{512 << 10, 8 << 10},
		{4 << 20, 16 << 10},
		{8 << 20, 32 << 10},
		{16 << 20, 64 << 10},
		{32 << 20, 128 << 10},
	} {
		if blocks < c.below {
			return c.journal
		}
	}
	return 256 << 10
}

// putJournal encodes the superblock of an empty journal ("Journal (jbd2)"), which is big-endian.
// The rest of a clean journal is never read, so it stays a hole. The kernel adds the checksum
// features when it mounts the file system.
func putJournal(b []byte, blocks int64, uuid [16]byte) {
	be := binary.BigEndian
	be.PutUint32(b[0x00:], jbdMagic)
	be.PutUint32(b[0x04:], jbdSuperblockV2)
	be.PutUint32(b[0x0c:], blockSize)
	be.PutUint32(b[0x10:], uint32(blocks))
	be.PutUint32(b[0x14:], 1) // first block of the log
	be.PutUint32(b[0x18:], 1) // first sequence number expected
	copy(b[0x30:], uuid[:])
	be.PutUint32(b[0x40:], 1) // number of file systems that use the journal
}
