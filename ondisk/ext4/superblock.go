package ext4

// Features ("Super Block"): the defaults of mke2fs 1.47 except orphan_file. Linux 4.4 and e2fsprogs
// 1.43 and later support all of them.
const (
	compatJournal  = 0x4
	compatXattr    = 0x8
	compatResize   = 0x10
	compatDirIndex = 0x20

	incompatFileType = 0x2
	incompatRecover  = 0x4
	incompatExtents  = 0x40
	incompat64Bit    = 0x80
	incompatFlexBG   = 0x200
	incompatCsumSeed = 0x2000

	roSparseSuper  = 0x1
	roLargeFile    = 0x2
	roHugeFile     = 0x8
	roDirNlink     = 0x20
	roExtraIsize   = 0x40
	roMetadataCsum = 0x400
)

const (
	superMagic  = 0xef53
	superOffset = 1024
	superSize   = 1024

	stateClean     = 1
	errorsContinue = 1
	dynamicRev     = 1
	unsignedHash   = 2 // s_flags: names are hashed as unsigned bytes
	mountXattrACL  = 0x4 | 0x8
	crc32cChecksum = 1
)

// Flags of a group descriptor.
const (
	groupInodeUninit = 1
	groupBlockUninit = 2
	groupInodeZeroed = 4
)

// putSuper encodes the copy of the superblock that belongs to group.
func (v *volume) putSuper(b []byte, group, freeBlocks int64) {
	g := v.geo
	// The superblock's times are unsigned 40-bit values, so unlike inodes' times they cannot be
	// before 1970.
	now := max(0, v.opts.Time.Unix())
	seconds := uint32(now)
	p16 := func(at int, n uint16) { le.PutUint16(b[at:], n) }
	p32 := func(at int, n uint32) { le.PutUint32(b[at:], n) }

	p32(0x00, uint32(g.inodes()))
	p32(0x04, uint32(g.blocks))
	p32(0x0c, uint32(freeBlocks))
	p32(0x10, uint32(g.inodes()-int64(len(v.inodes))))
	p32(0x18, 2) // block size 1024<<2
	p32(0x1c, 2) // the same for the size of clusters
	p32(0x20, blocksPerGroup)
	p32(0x24, blocksPerGroup)
	p32(0x28, uint32(g.inodesPerGroup))
	p32(0x30, seconds) // last written
	p16(0x36, 0xffff)  // no check after a number of mounts
	p16(0x38, superMagic)
	p16(0x3a, stateClean)
	p16(0x3c, errorsContinue)
	p32(0x40, seconds) // last checked
	p32(0x4c, dynamicRev)
	p32(0x54, firstInode)
	p16(0x58, inodeSize)
	p16(0x5a, uint16(group))
	compat := uint32(compatJournal | compatXattr | compatDirIndex)
	if g.reservedGDT > 0 {
		compat |= compatResize
	}
	p32(0x5c, compat)
	p32(0x60, incompatFileType|incompatExtents|incompat64Bit|incompatFlexBG|incompatCsumSeed)
	p32(0x64, roSparseSuper|roLargeFile|roHugeFile|roDirNlink|roExtraIsize|roMetadataCsum)
	copy(b[0x68:], v.opts.UUID[:])
	copy(b[0x78:0x88], v.opts.Label)
	p16(0xce, uint16(g.reservedGDT))
	p32(0xe0, journalInode)
	copy(b[0xec:], v.opts.HashSeed[:])
	b[0xfc] = halfMD4Version
	b[0xfd] = 1 // the backup of the journal's inode (below) is valid
	p16(0xfe, descSize)
	p32(0x100, mountXattrACL)
	p32(0x108, seconds) // created

	// With this backup of the journal's block map and size, e2fsck can repair the journal's inode.
	var p fileBlocks
	in := &v.inodes[journalInode-1]
	v.locate(&p, journalInode, in)
	root, _ := extentTree(inodeSeed(v.seed, journalInode, 0), p.content, p.tree)
	copy(b[0x10c:], root[:])
	p32(0x10c+15*4, uint32(v.jblocks*blockSize>>32))
	p32(0x10c+16*4, uint32(v.jblocks*blockSize))

	p32(0x150, uint32(g.blocks>>32))
	p32(0x158, uint32(freeBlocks>>32))
	p16(0x15c, extraSize)
	p16(0x15e, extraSize)
	p32(0x160, unsignedHash)
	b[0x174] = 4 // flexGroups = 1<<4
	b[0x175] = crc32cChecksum
	p32(0x268, lostInode)
	p32(0x270, v.seed)
	// Upper bits of the seconds: last written, created, last checked.
	for _, at := range []int{0x274, 0x276, 0x277} {
		b[at] = byte(now >> 32)
	}
	p32(0x3fc, checksum(^uint32(0), b[:0x3fc]))
}

// emitGroups writes inode tables, bitmaps, group descriptors and superblocks.
func (v *volume) emitGroups(e *emitter) {
	g := v.geo
	table := make([]byte, g.gdtBlocks*blockSize)
	var p fileBlocks
	for group := range g.groups {
		v.emitInodes(e, group, &p)
	}
	var free []blockRange
	freeBlocks := int64(0)
	for group := range g.groups {
		free = v.data.freeIn(free[:0], group*blocksPerGroup, group*blocksPerGroup+g.groupBlocks(group))
		freeBlocks += v.emitGroup(e, group, free, table[group*descSize:(group+1)*descSize])
	}
	for group := g.groups - 1; group >= 0; group-- {
		if !hasSuper(group) {
			continue
		}
		for i := range g.gdtBlocks {
			copy(e.block(group*blocksPerGroup+1+i), table[i*blockSize:])
		}
		b := e.block(group * blocksPerGroup)
		if group == 0 {
			b = b[superOffset:]
		}
		v.putSuper(b[:superSize], group, freeBlocks)
	}
}

// emitInodes writes the used part of a group's inode table.
func (v *volume) emitInodes(e *emitter, group int64, p *fileBlocks) {
	first := group * v.geo.inodesPerGroup
	end := min(first+v.geo.inodesPerGroup, int64(len(v.inodes)))
	at := v.geo.inodeTable[group]
	for i := first; i < end; i += inodesPerBlock {
		b := e.block(at)
		at++
		for j := i; j < min(i+inodesPerBlock, end); j++ {
			if in := &v.inodes[j]; in.node != nil && (j+1 != resizeInode || v.geo.reservedGDT > 0) {
				v.locate(p, uint32(j+1), in)
				v.putInode(b[(j-i)*inodeSize:][:inodeSize], uint32(j+1), in, p)
			}
		}
	}
}

// emitGroup writes a group's bitmaps and encodes its descriptor d ("Block Group Descriptors"). Of
// an unused group it writes no bitmaps; the kernel creates them when it needs them.
func (v *volume) emitGroup(e *emitter, group int64, free []blockRange, d []byte) (freeBlocks int64) {
	g := v.geo
	firstBlock := group * blocksPerGroup
	for _, r := range free {
		freeBlocks += r.n
	}
	used := min(max(int64(len(v.inodes))-group*g.inodesPerGroup, 0), g.inodesPerGroup)
	var dirs int64
	for _, in := range v.inodes[min(group*g.inodesPerGroup, int64(len(v.inodes))):][:used] {
		if in.dir != nil {
			dirs++
		}
	}
	// The inode tables are holes, which read as zeros, so the kernel need not clear them.
	flags := uint16(groupInodeZeroed)
	var blockSum, inodeSum uint32
	if used == 0 {
		flags |= groupInodeUninit
	}
	if used == 0 && freeBlocks == blocksPerGroup-g.superBlocks(group) && group != g.groups-1 {
		flags |= groupBlockUninit
	} else {
		b := e.blocks(g.blockBitmap[group], 1)
		fill(b)
		for _, r := range free {
			clearBits(b, r.start-firstBlock, r.n)
		}
		blockSum = checksum(v.seed, b)
	}
	if used > 0 {
		b := e.blocks(g.inodeBitmap[group], 1)
		fill(b)
		clearBits(b, used, g.inodesPerGroup-used)
		inodeSum = checksum(v.seed, b[:g.inodesPerGroup/8])
	}

	both := func(lo, hi int, n int64) {
		le.PutUint32(d[lo:], uint32(n))
		le.PutUint32(d[hi:], uint32(n>>32))
	}
	both(0x00, 0x20, g.blockBitmap[group])
	both(0x04, 0x24, g.inodeBitmap[group])
	both(0x08, 0x28, g.inodeTable[group])
	le.PutUint16(d[0x0c:], uint16(freeBlocks))
	le.PutUint16(d[0x0e:], uint16(g.inodesPerGroup-used))
	le.PutUint16(d[0x10:], uint16(dirs))
	le.PutUint16(d[0x12:], flags)
	le.PutUint16(d[0x18:], uint16(blockSum))
	le.PutUint16(d[0x1a:], uint16(inodeSum))
	le.PutUint16(d[0x1c:], uint16(g.inodesPerGroup-used)) // inodes that were never used
	le.PutUint16(d[0x38:], uint16(blockSum>>16))
	le.PutUint16(d[0x3a:], uint16(inodeSum>>16))
	var number [4]byte
	le.PutUint32(number[:], uint32(group))
	le.PutUint16(d[0x1e:], uint16(checksum(checksum(v.seed, number[:]), d)))
	return freeBlocks
}

func fill(b []byte) {
	for i := range b {
		b[i] = 0xff
	}
}

// clearBits clears n bits of a bitmap, starting with bit at.
func clearBits(b []byte, at, n int64) {
	for ; n > 0 && at%8 != 0; n-- {
		b[at/8] &^= 1 << (at % 8)
		at++
	}
	clear(b[at/8 : (at+n)/8])
	for at, n = at+n&^7, n&7; n > 0; n-- {
		b[at/8] &^= 1 << (at % 8)
		at++
	}
}
