package ext4

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// Reserved inode numbers ("Special inodes").
const (
	rootInode    = 2
	resizeInode  = 7
	journalInode = 8
	lostInode    = 11 // first one that is not reserved; mke2fs uses it for lost+found
	firstInode   = 11
)

const (
	lostFound = "lost+found"
	// lostBlocks is the size of lost+found. mke2fs also allocates its blocks in advance, so that
	// e2fsck can add names even if the disk is full.
	lostBlocks = 4

	// fastSymlink is the maximum length of a link target that is stored in the inode itself.
	fastSymlink = 59
)

// inode is one file to be written. To save memory, it omits values that can be computed again.
type inode struct {
	node  *tree.Node // nil for unused numbers
	dir   *directory // nil except for directories
	at    int64      // stream number of the first block
	links uint32
	// xattrBlock is set if the extended attributes need a block, which is then the file's first.
	xattrBlock bool
}

// entry is a name in a directory.
type entry struct {
	name   string
	index  int32      // index of the node; -1: not in the tree
	number uint32     // inode number
	dir    *directory // nil except for directories
}

// directory is a directory to be written.
type directory struct {
	path    string
	number  uint32
	parent  uint32
	entries []entry // sorted by name, or by hash if indexed
	blocks  int64
	indexed bool
}

// volume is a file system whose layout is computed in memory.
type volume struct {
	opts  Options
	nodes []tree.Node
	seed  uint32

	inodes []inode      // inodes[i] has number i+1
	dirs   []*directory // in the order of their numbers

	geo     *geometry
	data    *stream
	resize  int64 // stream number of the resize inode's block
	jblocks int64
}

// newVolume checks nodes and assigns an inode number to every file.
func newVolume(nodes []tree.Node, o Options) (*volume, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	v := &volume{opts: o, nodes: nodes, seed: fsSeed(o.UUID)}
	if err := v.build(); err != nil {
		return nil, fmt.Errorf("laying out file system %q: %w", o.Label, err)
	}
	return v, nil
}

func (v *volume) build() error {
	var bad problems
	if int64(len(v.nodes)) > 1<<31-1 {
		return fmt.Errorf("%d entries are more than this writer can number", len(v.nodes))
	}
	dirs := map[string]*directory{}
	var rootNode, lostNode *tree.Node
	for i := range v.nodes {
		n := &v.nodes[i]
		if err := checkNode(n); err != nil {
			bad.at(n, "%w", err)
			continue
		}
		if n.Path == "." {
			if rootNode != nil {
				bad.at(n, "the path exists already (%s): merge the layers first", describe(rootNode))
			}
			rootNode = n
		}
		if n.Path == lostFound {
			lostNode = n
		}
		if n.IsDir() && dirs[n.Path] == nil {
			dirs[n.Path] = &directory{path: n.Path}
		}
	}
	if err := bad.err(); err != nil {
		return err
	}
	if rootNode == nil {
		rootNode = &tree.Node{Path: ".", Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: v.opts.Time}}
		dirs["."] = &directory{path: "."}
	}
	if lostNode == nil {
		lostNode = &tree.Node{Path: lostFound, Inode: &tree.Inode{Mode: tree.ModeDir | 0o700, MTime: v.opts.Time}}
	}

	v.fillDirs(dirs, &bad)
	if err := bad.err(); err != nil {
		return err
	}
	root := dirs["."]
	if dirs[lostFound] == nil {
		e := entry{name: lostFound, index: -1, dir: &directory{path: lostFound}}
		i, _ := slices.BinarySearchFunc(root.entries, e, byName)
		root.entries = slices.Insert(root.entries, i, e)
	}

	v.inodes = make([]inode, firstInode, firstInode+len(v.nodes)+1)
	v.special(journalInode, "journal")
	v.special(resizeInode, "resize")
	v.setInode(rootInode, rootNode, root, rootInode)
	shared := make(map[*tree.Inode]uint32, len(v.nodes))
	v.numberEntries(root, lostNode, shared, &bad)
	for i := range v.inodes {
		in := &v.inodes[i]
		if in.dir == nil && in.links > MaxLinks {
			bad.at(in.node, "%d hard links, ext4 allows %d", in.links, MaxLinks)
		}
	}
	return bad.err()
}

// fillDirs adds every node to its directory.
func (v *volume) fillDirs(dirs map[string]*directory, bad *problems) {
	// Count first, so that all entries can share one allocation.
	counts := make(map[*directory]int, len(dirs))
	total := 0
	v.eachChild(dirs, func(d *directory, name string, i int) {
		if d == nil {
			bad.at(&v.nodes[i], "its directory %q is not in the tree, or not a directory", path.Dir(v.nodes[i].Path))
			return
		}
		counts[d]++
		total++
	})
	if len(bad.errs) > 0 {
		return
	}
	room := make([]entry, total)
	v.eachChild(dirs, func(d *directory, name string, i int) {
		if d.entries == nil {
			n := counts[d]
			d.entries, room = room[:0:n], room[n:]
		}
		e := entry{name: name, index: int32(i)}
		if v.nodes[i].IsDir() {
			e.dir = dirs[v.nodes[i].Path]
		}
		d.entries = append(d.entries, e)
	})
	// Visit the paths in order, so that the order of messages is always the same.
	for _, p := range slices.Sorted(maps.Keys(dirs)) {
		d := dirs[p]
		if !slices.IsSortedFunc(d.entries, byName) {
			slices.SortStableFunc(d.entries, byName)
		}
		for i := 1; i < len(d.entries); i++ {
			a, b := d.entries[i-1], d.entries[i]
			if a.name == b.name {
				bad.at(&v.nodes[b.index], "the path exists already (%s): merge the layers first", describe(&v.nodes[a.index]))
			}
		}
	}
}

// eachChild calls f for every node except the root. d is the node's parent directory, or nil if
// that does not exist.
func (v *volume) eachChild(dirs map[string]*directory, f func(d *directory, name string, index int)) {
	var last *directory // consecutive nodes often have the same directory
	for i := range v.nodes {
		p := v.nodes[i].Path
		if p == "." {
			continue
		}
		parent, name := ".", p
		if slash := strings.LastIndexByte(p, '/'); slash >= 0 {
			parent, name = p[:slash], p[slash+1:]
		}
		if last == nil || last.path != parent {
			last = dirs[parent]
		}
		f(last, name, i)
	}
}

func byName(a, b entry) int { return cmp.Compare(a.name, b.name) }

// setInode initializes the inode with the given number.
func (v *volume) setInode(number uint32, n *tree.Node, d *directory, parent uint32) *inode {
	in := &v.inodes[number-1]
	in.node = n
	_, block, _ := planXattrs(n.Xattrs) // checkNode has handled the error
	in.xattrBlock = len(block) > 0
	if d != nil {
		d.number, d.parent = number, parent
		in.dir = d
		in.links = 2
		v.dirs = append(v.dirs, d)
	}
	return in
}

// special adds one of the file system's own inodes, which have no name.
func (v *volume) special(number uint32, what string) {
	v.setInode(number, &tree.Node{
		Path:  "<" + what + ">",
		Inode: &tree.Inode{Mode: tree.ModeRegular | 0o600, MTime: v.opts.Time},
	}, nil, 0).links = 1
}

// numberEntries assigns inode numbers to the entries of a directory, and then to those of its
// subdirectories. The numbers of a directory's entries are consecutive, because the entries are
// often read together.
func (v *volume) numberEntries(d *directory, lost *tree.Node, shared map[*tree.Inode]uint32, bad *problems) {
	parent := &v.inodes[d.number-1]
	for i := range d.entries {
		e := &d.entries[i]
		if e.dir != nil {
			parent.links++
			n := lost
			if e.index >= 0 {
				n = &v.nodes[e.index]
			}
			if other := shared[n.Inode]; other != 0 {
				bad.at(n, "a directory cannot have a second name (the first is %q)", v.inodes[other-1].node.Path)
				continue
			}
			if n == lost {
				e.number = lostInode
			} else {
				e.number = v.newInode()
			}
			shared[n.Inode] = e.number
			v.setInode(e.number, n, e.dir, d.number)
			continue
		}
		n := &v.nodes[e.index]
		e.number = shared[n.Inode]
		if e.number == 0 {
			e.number = v.newInode()
			shared[n.Inode] = e.number
			v.setInode(e.number, n, nil, 0)
		}
		v.inodes[e.number-1].links++
	}
	if parent.links > MaxLinks {
		parent.links = 1 // dir_nlink: 1 means too many links to count
	}
	for _, e := range d.entries {
		if e.dir != nil && e.dir.number != 0 {
			v.numberEntries(e.dir, lost, shared, bad)
		}
	}
}

func (v *volume) newInode() uint32 {
	v.inodes = append(v.inodes, inode{})
	return uint32(len(v.inodes))
}

// contentBlocks returns the number of blocks of a file's content.
func (v *volume) contentBlocks(number uint32, in *inode) int64 {
	switch {
	case number == journalInode:
		return v.jblocks
	case in.dir != nil:
		return in.dir.blocks
	case in.node == nil || number == resizeInode:
		return 0
	case in.node.IsRegular():
		return ceilDiv(in.node.Data.Size, blockSize)
	case in.node.IsSymlink() && len(in.node.Target) > fastSymlink:
		return 1
	}
	return 0
}

// sizeAtLeast returns a lower bound of the required size, in bytes.
func (v *volume) sizeAtLeast() int64 {
	blocks := int64(0)
	for i := range v.inodes {
		in := &v.inodes[i]
		blocks += v.contentBlocks(uint32(i+1), in)
		if in.xattrBlock {
			blocks++
		}
	}
	blocks += ceilDiv(int64(len(v.inodes))+v.opts.FreeInodes, inodesPerBlock)
	blocks = min(blocks, maxBlocks+1) // more than the maximum is too many; layout reports that
	return roundUp(blocks*blockSize+v.opts.FreeBytes, mebi)
}

// layout assigns a location within v.opts.Size to everything. If there is not enough space, it
// returns the number of missing blocks.
func (v *volume) layout() (missing int64, err error) {
	o := v.opts
	for _, d := range v.dirs {
		if d.blocks == 0 {
			if err := d.measure(o.HashSeed); err != nil {
				return 0, fmt.Errorf("laying out file system %q: %w", o.Label, err)
			}
		}
	}
	v.jblocks = o.JournalSize / blockSize
	if v.jblocks == 0 {
		v.jblocks = journalBlocks(o.Size / blockSize)
	}
	v.geo, missing, err = newGeometry(o.Size, int64(len(v.inodes))+o.FreeInodes)
	if err != nil {
		return 0, fmt.Errorf("laying out file system %q: %w", o.Label, err)
	}
	if missing > 0 {
		return missing, nil
	}
	v.data = newStream(v.geo.free)
	if v.geo.reservedGDT > 0 {
		v.resize = v.data.alloc(1)
	}
	// Directories come first, so that they are near each other. The journal comes last, so that it
	// does not divide the space for files.
	var buf []extent
	place := func(number uint32) {
		in := &v.inodes[number-1]
		n := v.contentBlocks(number, in)
		at := v.data.used
		if in.xattrBlock {
			n++
			at++
		}
		in.at = v.data.alloc(n)
		if n > 1 {
			buf = v.data.extents(buf[:0], at, v.contentBlocks(number, in))
			v.data.alloc(treeBlocks(int64(len(buf))))
		}
	}
	for _, d := range v.dirs {
		place(d.number)
	}
	place(journalInode)
	for i := range v.inodes {
		if in := &v.inodes[i]; in.node != nil && in.dir == nil && i+1 != journalInode {
			place(uint32(i + 1))
		}
	}
	return v.data.used + ceilDiv(o.FreeBytes, blockSize) - v.data.total, nil
}
