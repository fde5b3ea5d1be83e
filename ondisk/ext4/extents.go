package ext4

const (
	extentMagic = 0xf30a
	// maxExtent is the maximum length of an extent of written blocks. Longer lengths mark unwritten
	// extents.
	maxExtent = 32768

	extentHeader = 12 // also the size of every entry
	// rootExtents is the number of entries for which the inode has space. A block has space for
	// nodeExtents entries and a checksum.
	rootExtents = 4
	nodeExtents = (blockSize - extentHeader - 4) / extentHeader
)

// extent maps n blocks of a file, beginning with block logical of the file, to the device.
type extent struct{ logical, start, n int64 }

// treeBlocks returns the number of blocks, in addition to the inode, of an extent tree with this
// many extents.
func treeBlocks(extents int64) (n int64) {
	for extents > rootExtents {
		extents = ceilDiv(extents, nodeExtents)
		n += extents
	}
	return n
}

// extentTree encodes extents ("Extent Tree"). root is stored in the inode, and nodes[i] in block
// at[i].
func extentTree(seed uint32, extents []extent, at []int64) (root [60]byte, nodes [][]byte) {
	// The leaves come first, then each level above them, until one level fits in the inode.
	depth := 0
	for len(extents) > rootExtents {
		var above []extent
		for len(extents) > 0 {
			k := min(len(extents), nodeExtents)
			b := make([]byte, blockSize)
			putExtents(b, extents[:k], nodeExtents, depth)
			end := extentHeader * (1 + nodeExtents)
			le.PutUint32(b[end:], checksum(seed, b[:end]))
			above = append(above, extent{logical: extents[0].logical, start: at[len(nodes)]})
			nodes = append(nodes, b)
			extents = extents[k:]
		}
		extents = above
		depth++
	}
	putExtents(root[:], extents, rootExtents, depth)
	return root, nodes
}

// putExtents encodes one node of the extent tree: leaf entries if depth is 0, otherwise index
// entries.
func putExtents(b []byte, extents []extent, room, depth int) {
	le.PutUint16(b, extentMagic)
	le.PutUint16(b[2:], uint16(len(extents)))
	le.PutUint16(b[4:], uint16(room))
	le.PutUint16(b[6:], uint16(depth))
	for i, e := range extents {
		p := b[extentHeader*(i+1):]
		le.PutUint32(p, uint32(e.logical))
		if depth == 0 {
			le.PutUint16(p[4:], uint16(e.n))
			le.PutUint16(p[6:], uint16(e.start>>32))
			le.PutUint32(p[8:], uint32(e.start))
		} else {
			le.PutUint32(p[4:], uint32(e.start))
			le.PutUint16(p[8:], uint16(e.start>>32))
		}
	}
}
