package ext4

import "github.com/edgebake/edgebake/ondisk/tree"

// Flags of an inode.
const (
	flagIndex   = 0x1000
	flagExtents = 0x80000
)

// fileBlocks is the location of a file's blocks.
type fileBlocks struct {
	xattr   int64 // 0: none
	content []extent
	tree    []int64 // blocks of the extent tree
}

// blocks returns the number of blocks of the file.
func (p fileBlocks) blocks() int64 {
	n := int64(len(p.tree))
	if p.xattr != 0 {
		n++
	}
	for _, e := range p.content {
		n += e.n
	}
	return n
}

// locate computes the location of a file and stores it in p, whose memory it reuses.
func (v *volume) locate(p *fileBlocks, number uint32, in *inode) {
	p.xattr, p.tree = 0, p.tree[:0]
	at, n := in.at, v.contentBlocks(number, in)
	if in.xattrBlock {
		p.content = v.data.extents(p.content[:0], at, 1)
		p.xattr = p.content[0].start
		at++
	}
	p.content = v.data.extents(p.content[:0], at, n)
	if t := treeBlocks(int64(len(p.content))); t > 0 {
		for _, e := range v.data.extents(nil, at+n, t) {
			for i := range e.n {
				p.tree = append(p.tree, e.start+i)
			}
		}
	}
}

// putInode encodes an inode ("Inode Table").
func (v *volume) putInode(b []byte, number uint32, in *inode, p *fileBlocks) {
	n := in.node
	var size int64
	var flags uint32
	var root [60]byte
	blocks := p.blocks()
	switch {
	case number == resizeInode:
		size, blocks = v.resizeSize(), v.resizeBlocks()
		root = v.resizeRoot()
	case n.Mode&tree.ModeType == tree.ModeChar || n.Mode&tree.ModeType == tree.ModeBlock:
		putDevice(root[:], n.Major, n.Minor)
	case n.IsSymlink() && len(n.Target) <= fastSymlink:
		size = int64(len(n.Target))
		copy(root[:], n.Target)
	case n.IsSymlink() || n.IsRegular() || n.IsDir():
		size = n.Data.Size
		switch {
		case n.IsSymlink():
			size = int64(len(n.Target))
		case in.dir != nil || number == journalInode:
			size = v.contentBlocks(number, in) * blockSize
		}
		flags = flagExtents
		if in.dir != nil && in.dir.indexed {
			flags |= flagIndex
		}
		root, _ = extentTree(inodeSeed(v.seed, number, 0), p.content, p.tree)
	}
	mtime, mextra, _ := timestamp(n.MTime) // checkNode has handled the error
	ctime, cextra, _ := timestamp(v.opts.Time)
	sectors := blocks * (blockSize / 512)

	le.PutUint16(b[0x00:], uint16(n.Mode))
	le.PutUint16(b[0x02:], uint16(n.UID))
	le.PutUint32(b[0x04:], uint32(size))
	le.PutUint32(b[0x08:], mtime) // access time
	le.PutUint32(b[0x0c:], ctime)
	le.PutUint32(b[0x10:], mtime)
	le.PutUint16(b[0x18:], uint16(n.GID))
	le.PutUint16(b[0x1a:], uint16(in.links))
	le.PutUint32(b[0x1c:], uint32(sectors))
	le.PutUint32(b[0x20:], flags)
	copy(b[0x28:], root[:])
	le.PutUint32(b[0x68:], uint32(p.xattr))
	le.PutUint32(b[0x6c:], uint32(size>>32))
	le.PutUint16(b[0x74:], uint16(sectors>>32))
	le.PutUint16(b[0x76:], uint16(p.xattr>>32))
	le.PutUint16(b[0x78:], uint16(n.UID>>16))
	le.PutUint16(b[0x7a:], uint16(n.GID>>16))
	le.PutUint16(b[0x80:], extraSize)
	le.PutUint32(b[0x84:], cextra)
	le.PutUint32(b[0x88:], mextra)
	le.PutUint32(b[0x8c:], mextra) // access time
	le.PutUint32(b[0x90:], ctime)  // creation time
	le.PutUint32(b[0x94:], cextra)
	inInode, _, _ := planXattrs(n.Xattrs) // checkNode has handled the error
	putInodeXattrs(b, inInode)

	sum := checksum(inodeSeed(v.seed, number, 0), b[:inodeSize])
	le.PutUint16(b[0x7c:], uint16(sum))
	le.PutUint16(b[0x82:], uint16(sum>>16))
}

// putDevice encodes a device number: a small one in the old format, otherwise in the new format,
// whose field comes after the old one.
func putDevice(b []byte, major, minor uint32) {
	if major < 256 && minor < 256 {
		le.PutUint32(b, major<<8|minor)
		return
	}
	le.PutUint32(b[4:], minor&0xff|major<<8|minor>>8<<20)
}

// device is the inverse of putDevice.
func device(b []byte) (major, minor uint32) {
	if old := le.Uint32(b); old != 0 {
		return old >> 8 & 0xff, old & 0xff
	}
	dev := le.Uint32(b[4:])
	return dev >> 8 & 0xfff, dev&0xff | dev>>20<<8
}
