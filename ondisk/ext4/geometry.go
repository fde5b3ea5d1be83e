package ext4

import (
	"fmt"
	"slices"
	"sort"
)

const (
	// flexGroups is the number of groups whose bitmaps and inode tables are stored together, in the
	// first of these groups (flex_bg). mke2fs uses the same number.
	flexGroups = 16
	// descSize is the size of a group descriptor with the 64bit feature.
	descSize      = 64
	descsPerBlock = blockSize / descSize
	// maxReservedGDT is the number of pointers in the double indirect block of the resize inode.
	maxReservedGDT = blockSize / 4
	// bytesPerInode is mke2fs's ratio. It also holds after growing, because groups that are added
	// later have as many inodes as the first ones.
	bytesPerInode = 16384
	// minGroup is the minimum number of blocks of the last group, in addition to its metadata. A
	// smaller rest of the device stays unused, as in mke2fs.
	minGroup = 50

	maxGrowTo = 4 << 40
)

// blockRange is a sequence of adjacent blocks.
type blockRange struct{ start, n int64 }

// geometry has the location of all parts that depend only on the size and the number of inodes
// ("Layout", "Flexible Block Groups").
type geometry struct {
	blocks         int64
	groups         int64
	inodesPerGroup int64
	tableBlocks    int64 // size of one group's inode table
	gdtBlocks      int64
	reservedGDT    int64 // blocks reserved after the descriptors for growing

	// The locations of each group's bitmaps and inode table.
	blockBitmap, inodeBitmap, inodeTable []int64
	// free lists the blocks available for contents, in ascending order.
	free []blockRange
}

// newGeometry divides size bytes into groups with at least the given number of inodes in total. If
// size is too small, it returns a nil geometry and a lower bound of the number of missing blocks.
func newGeometry(size, inodes int64) (g *geometry, missing int64, err error) {
	g = &geometry{blocks: size / blockSize}
	if g.blocks > maxBlocks {
		return nil, 0, fmt.Errorf("%d bytes is more than the 16 TiB this writer can lay out", size)
	}
	for {
		g.groups = ceilDiv(g.blocks, blocksPerGroup)
		if g.groups == 0 {
			return nil, 1, nil
		}
		g.gdtBlocks = ceilDiv(g.groups, descsPerBlock)
		g.reservedGDT = reservedGDT(g)
		last := g.groupBlocks(g.groups - 1)
		if last >= g.superBlocks(g.groups-1)+minGroup {
			break
		}
		if g.groups == 1 {
			return nil, g.superBlocks(0) + minGroup - last, nil
		}
		g.blocks -= last
	}
	want := max(inodes, size/bytesPerInode)
	g.inodesPerGroup = roundUp(ceilDiv(want, g.groups), inodesPerBlock)
	if g.inodesPerGroup > blocksPerGroup {
		// One bitmap block cannot describe more inodes, so another group is needed.
		return nil, g.groups*blocksPerGroup + 2*minGroup - g.blocks, nil
	}
	g.tableBlocks = g.inodesPerGroup / inodesPerBlock
	g.free = g.initialFree()

	g.blockBitmap = make([]int64, g.groups)
	g.inodeBitmap = make([]int64, g.groups)
	g.inodeTable = make([]int64, g.groups)
	for first := int64(0); first < g.groups; first += flexGroups {
		end := min(first+flexGroups, g.groups)
		for _, part := range []struct {
			at     []int64
			blocks int64
		}{{g.blockBitmap, 1}, {g.inodeBitmap, 1}, {g.inodeTable, g.tableBlocks}} {
			for i := first; i < end; i++ {
				at, ok := g.allocate(part.blocks, first*blocksPerGroup)
				if !ok {
					// The last flex group has too little space, so put its metadata anywhere.
					at, ok = g.allocate(part.blocks, 0)
				}
				if !ok {
					return nil, (end-first)*(2+g.tableBlocks) + minGroup, nil
				}
				part.at[i] = at
			}
		}
	}
	return g, 0, nil
}

func (g *geometry) inodes() int64 { return g.groups * g.inodesPerGroup }

// groupBlocks returns the number of blocks in a group; the last may be shorter.
func (g *geometry) groupBlocks(group int64) int64 {
	return min(blocksPerGroup, g.blocks-group*blocksPerGroup)
}

// superBlocks returns the number of blocks at the start of a group that are
// used for the superblock, the group descriptors and their reserve.
func (g *geometry) superBlocks(group int64) int64 {
	if !hasSuper(group) {
		return 0
	}
	return 1 + g.gdtBlocks + g.reservedGDT
}

// hasSuper reports whether a group has a copy of the superblock (sparse_super). The groups with a
// copy are 0, 1 and the powers of 3, 5 and 7.
func hasSuper(group int64) bool {
	if group <= 1 {
		return true
	}
	for _, base := range []int64{3, 5, 7} {
		n := base
		for n < group {
			n *= base
		}
		if n == group {
			return true
		}
	}
	return false
}

// reservedGDT returns the number of blocks reserved for further group descriptors, so that the file
// system can be grown while it is mounted.
func reservedGDT(g *geometry) int64 {
	growTo := min(g.blocks*blockSize*1024, maxGrowTo)
	groups := ceilDiv(ceilDiv(growTo, blockSize), blocksPerGroup)
	return min(max(ceilDiv(groups, descsPerBlock)-g.gdtBlocks, 0), maxReservedGDT)
}

// initialFree returns all blocks except the superblocks, the descriptors and the blocks reserved
// for descriptors.
func (g *geometry) initialFree() []blockRange {
	var free []blockRange
	for group := range g.groups {
		r := blockRange{group*blocksPerGroup + g.superBlocks(group), g.groupBlocks(group) - g.superBlocks(group)}
		if n := len(free); n > 0 && free[n-1].start+free[n-1].n == r.start {
			free[n-1].n += r.n
		} else {
			free = append(free, r)
		}
	}
	return free
}

// allocate removes n adjacent blocks from free and returns the first of them. It takes the first
// sequence of n free blocks that begins at or after block from.
func (g *geometry) allocate(n, from int64) (int64, bool) {
	i := sort.Search(len(g.free), func(i int) bool { return g.free[i].start+g.free[i].n > from })
	for ; i < len(g.free); i++ {
		r := g.free[i]
		at := max(r.start, from)
		end := r.start + r.n
		if at+n > end {
			continue
		}
		var rest []blockRange
		if at > r.start {
			rest = append(rest, blockRange{r.start, at - r.start})
		}
		if at+n < end {
			rest = append(rest, blockRange{at + n, end - at - n})
		}
		g.free = slices.Replace(g.free, i, i+1, rest...)
		return at, true
	}
	return 0, false
}

// stream numbers the free blocks in ascending order, starting from 0. Files get consecutive
// numbers, so a start number and a length locate a file.
type stream struct {
	ranges []blockRange
	first  []int64 // the stream number of the start of each range
	total  int64
	used   int64
}

func newStream(free []blockRange) *stream {
	s := &stream{ranges: free, first: make([]int64, len(free))}
	for i, r := range free {
		s.first[i] = s.total
		s.total += r.n
	}
	return s
}

// alloc reserves the next n blocks and returns the stream number of the first. The number may
// exceed the stream's blocks; layout checks that once at the end.
func (s *stream) alloc(n int64) int64 {
	at := s.used
	s.used += n
	return at
}

// extents appends to buf the extents of n blocks of the stream, starting with number at. Each
// extent has at most maxExtent blocks.
func (s *stream) extents(buf []extent, at, n int64) []extent {
	i := sort.Search(len(s.first), func(i int) bool { return s.first[i] > at }) - 1
	for logical := int64(0); n > 0 && i < len(s.ranges); i++ {
		skip := at - s.first[i]
		phys, left := s.ranges[i].start+skip, min(s.ranges[i].n-skip, n)
		at += left
		n -= left
		for left > 0 {
			k := min(left, maxExtent)
			buf = append(buf, extent{logical, phys, k})
			logical += k
			phys += k
			left -= k
		}
	}
	return buf
}

// freeIn appends the unused ranges among the blocks [from, to).
func (s *stream) freeIn(buf []blockRange, from, to int64) []blockRange {
	i := sort.Search(len(s.ranges), func(i int) bool { return s.ranges[i].start+s.ranges[i].n > from })
	for ; i < len(s.ranges) && s.ranges[i].start < to; i++ {
		r := s.ranges[i]
		start := max(r.start, from, r.start+s.used-s.first[i])
		end := min(r.start+r.n, to)
		if start < end {
			buf = append(buf, blockRange{start, end - start})
		}
	}
	return buf
}
