package ext4

// The resize inode owns the blocks reserved after the group descriptors and their copies. With
// them, a mounted file system can get more descriptors ("Layout", reserved GDT blocks). The inode's
// double indirect block points to the reserved blocks of group 0, and each of these to the
// corresponding blocks in the groups that have a copy. If nothing is reserved, there is no resize
// inode.

const pointersPerBlock = blockSize / 4

// resizeSize returns the largest size in bytes that a double indirect block can address.
func (v *volume) resizeSize() int64 {
	return (pointersPerBlock*pointersPerBlock + pointersPerBlock + 12) * blockSize
}

func (v *volume) resizeBlocks() int64 {
	return 1 + v.geo.reservedGDT*int64(1+len(v.superCopies()))
}

// resizeRoot returns the block map of the resize inode. Only the double indirect block is set.
func (v *volume) resizeRoot() (root [60]byte) {
	le.PutUint32(root[13*4:], uint32(v.data.extents(nil, v.resize, 1)[0].start))
	return root
}

// superCopies lists the groups that have a copy of the superblock, except group 0.
func (v *volume) superCopies() (groups []int64) {
	for g := int64(1); g < v.geo.groups; g++ {
		if hasSuper(g) {
			groups = append(groups, g)
		}
	}
	return groups
}

// emitResize writes the resize inode's blocks.
func (v *volume) emitResize(e *emitter) {
	g := v.geo
	if g.reservedGDT == 0 {
		return
	}
	double := e.block(v.data.extents(nil, v.resize, 1)[0].start)
	for i := range g.reservedGDT {
		// The kernel expects the pointer to a reserved block at the block's index in the table of
		// descriptors.
		slot := (g.gdtBlocks + i) % pointersPerBlock
		le.PutUint32(double[4*slot:], uint32(1+g.gdtBlocks+i))
	}
	copies := v.superCopies()
	for i := range g.reservedGDT {
		at := 1 + g.gdtBlocks + i
		b := e.block(at)
		for j, group := range copies {
			le.PutUint32(b[4*j:], uint32(at+group*blocksPerGroup))
		}
	}
}
