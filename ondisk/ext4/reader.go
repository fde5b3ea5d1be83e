package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// Reader reads a file system that Write made, even after a kernel has changed it. It checks
// checksums, ranges and loops. Damage and features that Write does not use cause errors, never a
// panic.
//
// A Reader is safe for concurrent use if its io.ReaderAt is. It implements tree.Blobs for the nodes
// that it returns. It ignores the journal, so it may return old contents if the file system was not
// unmounted cleanly; see Info.NeedsRecovery.
type Reader struct {
	r    io.ReaderAt
	info Info
	seed uint32

	blocks         int64
	inodes         int64
	inodesPerGroup int64
	tables         []int64 // first block of each group's inode table
}

// Info describes a file system, as recorded in its superblock.
type Info struct {
	Label string
	UUID  [16]byte
	Size  int64
	// FreeBytes, Inodes and FreeInodes are the numbers that df shows.
	FreeBytes, Inodes, FreeInodes int64
	Created                       time.Time
	// NeedsRecovery is set if the journal has changes that were not applied yet.
	NeedsRecovery bool
	// Errors is set if the kernel found damage that e2fsck has not repaired.
	Errors bool
}

const (
	stateErrors = 2

	// maxReadFile is the size limit of ReadFile in bytes.
	maxReadFile = 64 << 20
	// maxFollow is the maximum number of symbolic links in a path. It equals the kernel's limit.
	maxFollow = 40

	readIncompat = incompatFileType | incompatRecover | incompatExtents | incompat64Bit | incompatFlexBG | incompatCsumSeed
)

var errChecksum = errors.New("checksum does not match")

// Open reads the superblock and the group descriptors.
func Open(r io.ReaderAt) (*Reader, error) {
	rd := &Reader{r: r}
	if err := rd.open(); err != nil {
		return nil, fmt.Errorf("opening ext4 file system: %w", err)
	}
	return rd, nil
}

func (r *Reader) open() error {
	b := make([]byte, superSize)
	if err := r.readAt(b, superOffset); err != nil {
		return fmt.Errorf("reading the superblock: %w", err)
	}
	s := superblock(b)
	if s.u16(0x38) != superMagic {
		return errors.New("there is no ext4 superblock")
	}
	if err := s.supported(); err != nil {
		return err
	}
	if checksum(^uint32(0), b[:0x3fc]) != uint32(s.u32(0x3fc)) {
		return fmt.Errorf("superblock: %w", errChecksum)
	}
	r.seed = uint32(s.u32(0x270))
	r.blocks = s.u32(0x04) | s.u32(0x150)<<32
	r.inodes = s.u32(0x00)
	r.inodesPerGroup = s.u32(0x28)
	groups := ceilDiv(r.blocks, blocksPerGroup)
	if r.blocks < 1 || r.blocks > maxBlocks || r.inodesPerGroup < inodesPerBlock || r.inodesPerGroup > blocksPerGroup ||
		r.inodesPerGroup%inodesPerBlock != 0 || r.inodes != groups*r.inodesPerGroup || r.inodes < firstInode {
		return errors.New("superblock: the sizes contradict each other")
	}
	if err := r.readAt(make([]byte, 1), r.blocks*blockSize-1); err != nil {
		return fmt.Errorf("truncated, the file system has %d bytes: %w", r.blocks*blockSize, err)
	}
	r.info = s.info()
	return r.readGroups(groups)
}

// superblock is an encoded superblock.
type superblock []byte

func (s superblock) u16(at int) int64 { return int64(le.Uint16(s[at:])) }
func (s superblock) u32(at int) int64 { return int64(le.Uint32(s[at:])) }

// supported returns an error if the file system has features or sizes that Write does not use.
func (s superblock) supported() error {
	compat, incompat, ro := s.u32(0x5c), s.u32(0x60), s.u32(0x64)
	if extra := incompat &^ readIncompat; extra != 0 {
		return fmt.Errorf("the file system has features that this program does not support (%#x)", extra)
	}
	const need = incompatExtents | incompat64Bit | incompatFileType | incompatCsumSeed
	if compat&compatJournal == 0 || incompat&need != need || ro&roMetadataCsum == 0 {
		return errors.New("features of edgebake's file systems are missing: another program made this one")
	}
	if s.u32(0x18) != 2 || s.u16(0x58) != inodeSize || s.u16(0xfe) != descSize || s.u32(0x20) != blocksPerGroup || s[0x175] != crc32cChecksum {
		return errors.New("the sizes of blocks, groups or inodes differ from edgebake's: another program made this file system")
	}
	return nil
}

func (s superblock) info() Info {
	label, _, _ := bytes.Cut(s[0x78:0x88], []byte{0})
	return Info{
		Label:         string(label),
		UUID:          [16]byte(s[0x68:]),
		Size:          (s.u32(0x04) | s.u32(0x150)<<32) * blockSize,
		FreeBytes:     (s.u32(0x0c) | s.u32(0x158)<<32) * blockSize,
		Inodes:        s.u32(0x00),
		FreeInodes:    s.u32(0x10),
		Created:       time.Unix(s.u32(0x108)|int64(s[0x276])<<32, 0),
		NeedsRecovery: s.u32(0x60)&incompatRecover != 0,
		Errors:        s.u16(0x3a)&stateErrors != 0,
	}
}

// readGroups reads the location of each inode table from the group descriptors.
func (r *Reader) readGroups(groups int64) error {
	b := make([]byte, blockSize)
	for group := range groups {
		at := group % descsPerBlock * descSize
		if at == 0 {
			if err := r.readBlock(b, 1+group/descsPerBlock); err != nil {
				return fmt.Errorf("reading the descriptor of group %d: %w", group, err)
			}
		}
		d := b[at:][:descSize]
		sum := le.Uint16(d[0x1e:])
		le.PutUint16(d[0x1e:], 0)
		if uint16(checksum(checksum(r.seed, le.AppendUint32(nil, uint32(group))), d)) != sum {
			return fmt.Errorf("descriptor of group %d: %w", group, errChecksum)
		}
		table := int64(le.Uint32(d[0x08:])) | int64(le.Uint32(d[0x28:]))<<32
		if table < 1 || table+r.inodesPerGroup/inodesPerBlock > r.blocks {
			return fmt.Errorf("descriptor of group %d: its inode table is outside the file system", group)
		}
		r.tables = append(r.tables, table)
	}
	return nil
}

// Info returns the data of the superblock.
func (r *Reader) Info() Info { return r.info }

func (r *Reader) readAt(b []byte, off int64) error {
	n, err := r.r.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (r *Reader) readBlock(b []byte, block int64) error {
	if block < 0 || block >= r.blocks {
		return fmt.Errorf("block %d is outside the file system", block)
	}
	return r.readAt(b[:blockSize], block*blockSize)
}

// rawInode is an encoded inode.
type rawInode struct {
	number uint32
	seed   uint32
	b      [inodeSize]byte
}

func (in *rawInode) mode() uint32  { return uint32(le.Uint16(in.b[0x00:])) }
func (in *rawInode) links() uint16 { return le.Uint16(in.b[0x1a:]) }
func (in *rawInode) size() int64 {
	return int64(le.Uint32(in.b[0x04:])) | int64(le.Uint32(in.b[0x6c:]))<<32
}
func (in *rawInode) xattrBlock() int64 {
	return int64(le.Uint32(in.b[0x68:])) | int64(le.Uint16(in.b[0x76:]))<<32
}

func (r *Reader) inode(number uint32) (*rawInode, error) {
	if number < 1 || int64(number) > r.inodes {
		return nil, fmt.Errorf("inode %d does not exist", number)
	}
	i := int64(number - 1)
	in := &rawInode{number: number}
	if err := r.readAt(in.b[:], r.tables[i/r.inodesPerGroup]*blockSize+i%r.inodesPerGroup*inodeSize); err != nil {
		return nil, fmt.Errorf("inode %d: %w", number, err)
	}
	in.seed = inodeSeed(r.seed, number, le.Uint32(in.b[0x64:]))
	sum := uint32(le.Uint16(in.b[0x7c:])) | uint32(le.Uint16(in.b[0x82:]))<<16
	plain := in.b
	le.PutUint16(plain[0x7c:], 0)
	le.PutUint16(plain[0x82:], 0)
	if checksum(in.seed, plain[:]) != sum {
		return nil, fmt.Errorf("inode %d: %w", number, errChecksum)
	}
	if in.size() < 0 || in.size() > maxBlocks*blockSize {
		return nil, fmt.Errorf("inode %d: its size is impossible", number)
	}
	if in.links() == 0 {
		return nil, fmt.Errorf("inode %d: it has a name, but is not in use", number)
	}
	return in, nil
}

// treeInode converts in to a tree.Inode.
func (r *Reader) treeInode(in *rawInode) (*tree.Inode, error) {
	b := in.b[:]
	out := &tree.Inode{
		Mode: in.mode(),
		UID:  uint32(le.Uint16(b[0x02:])) | uint32(le.Uint16(b[0x78:]))<<16,
		GID:  uint32(le.Uint16(b[0x18:])) | uint32(le.Uint16(b[0x7a:]))<<16,
	}
	extra := le.Uint32(b[0x88:])
	out.MTime = time.Unix(int64(int32(le.Uint32(b[0x10:])))+int64(extra&3)<<32, int64(extra>>2))
	var err error
	if out.Xattrs, err = r.xattrs(in); err != nil {
		return nil, err
	}
	switch out.Mode & tree.ModeType {
	case tree.ModeRegular:
		out.Data = tree.Content{Blob: blobName(in.number), Size: in.size()}
		if in.size() == 0 {
			out.Data.Blob = ""
		}
	case tree.ModeSymlink:
		if out.Target, err = r.target(in); err != nil {
			return nil, err
		}
	case tree.ModeChar, tree.ModeBlock:
		out.Major, out.Minor = device(b[0x28:])
	case tree.ModeDir, tree.ModeFIFO, tree.ModeSocket:
	default:
		return nil, fmt.Errorf("inode %d: unknown file type %#o", in.number, out.Mode)
	}
	return out, nil
}

// target returns the target of a symbolic link.
func (r *Reader) target(in *rawInode) (string, error) {
	n := in.size()
	if n > maxSymlink {
		return "", fmt.Errorf("inode %d: a symbolic link of %d bytes", in.number, n)
	}
	if n <= fastSymlink && le.Uint32(in.b[0x20:])&flagExtents == 0 {
		return string(in.b[0x28:][:n]), nil
	}
	f, err := r.file(in)
	if err != nil {
		return "", err
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, 0); err != nil {
		return "", fmt.Errorf("inode %d: %w", in.number, err)
	}
	return string(b), nil
}

// xattrs reads the extended attributes, in the inode and in its attribute block.
func (r *Reader) xattrs(in *rawInode) (map[string]string, error) {
	var out map[string]string
	add := func(list, values []byte) error {
		for len(list) >= xattrEnd && le.Uint32(list) != 0 {
			if len(list) < xattrEntry {
				return errors.New("the list of extended attributes is truncated")
			}
			end := xattrEntry + int(list[0])
			offset, size := int64(le.Uint16(list[2:])), int64(le.Uint32(list[8:]))
			if len(list) < pad4(end) || le.Uint32(list[4:]) != 0 || offset+size > int64(len(values)) {
				return errors.New("an extended attribute is outside its block")
			}
			name, value, err := rawXattr(xattr{list[1], string(list[xattrEntry:end]), string(values[offset : offset+size])})
			if err != nil {
				return err
			}
			if out == nil {
				out = map[string]string{}
			}
			out[name] = value
			list = list[pad4(end):]
		}
		return nil
	}
	if at := 128 + int(le.Uint16(in.b[0x80:])); at+4 <= inodeSize && at%4 == 0 && le.Uint32(in.b[at:]) == xattrMagic {
		if err := add(in.b[at+4:], in.b[at+4:]); err != nil {
			return nil, fmt.Errorf("inode %d: %w", in.number, err)
		}
	}
	if at := in.xattrBlock(); at != 0 {
		b := make([]byte, blockSize)
		if err := r.readBlock(b, at); err != nil {
			return nil, fmt.Errorf("inode %d: reading its extended attributes: %w", in.number, err)
		}
		sum := le.Uint32(b[16:])
		le.PutUint32(b[16:], 0)
		if le.Uint32(b) != xattrMagic || checksum(blockSeed(r.seed, at), b) != sum {
			return nil, fmt.Errorf("inode %d: its block of extended attributes: %w", in.number, errChecksum)
		}
		if err := add(b[xattrHeader:], b); err != nil {
			return nil, fmt.Errorf("inode %d: %w", in.number, err)
		}
	}
	return out, nil
}

// extents reads the extent tree of a file. It omits unwritten extents, which read as zeros like
// holes.
func (r *Reader) extents(in *rawInode) ([]extent, error) {
	if le.Uint32(in.b[0x20:])&flagExtents == 0 {
		return nil, fmt.Errorf("inode %d: it is mapped without extents", in.number)
	}
	w := extentWalk{r: r, seed: in.seed}
	root := in.b[0x28:0x64]
	depth := int(le.Uint16(root[6:]))
	err := errExtentTree
	if depth <= 5 {
		err = w.node(root, rootExtents, depth)
	}
	if err != nil {
		return nil, fmt.Errorf("inode %d: %w", in.number, err)
	}
	return w.out, nil
}

var errExtentTree = errors.New("the extent tree is damaged")

// extentWalk collects the written extents of one inode.
type extentWalk struct {
	r    *Reader
	seed uint32
	next int64 // smallest logical block that may follow
	out  []extent
}

// node reads a node of the tree and everything below it. The node has space for room entries.
func (w *extentWalk) node(b []byte, room, depth int) error {
	n := int(le.Uint16(b[2:]))
	below := room == nodeExtents // only the root may be empty
	if le.Uint16(b) != extentMagic || n > room || int(le.Uint16(b[6:])) != depth || below && n == 0 {
		return errExtentTree
	}
	for i := range n {
		p := b[extentHeader*(i+1):]
		// Require ascending blocks, so that the walk ends even if the blocks are damaged.
		if int64(le.Uint32(p)) < w.next {
			return errors.New("extents overlap")
		}
		var err error
		if depth > 0 {
			err = w.child(p, depth-1)
		} else {
			err = w.leaf(p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// child reads the node to which an index entry points.
func (w *extentWalk) child(p []byte, depth int) error {
	at := int64(le.Uint32(p[4:])) | int64(le.Uint16(p[8:]))<<32
	node := make([]byte, blockSize)
	if err := w.r.readBlock(node, at); err != nil {
		return err
	}
	end := extentHeader * (1 + nodeExtents)
	if checksum(w.seed, node[:end]) != le.Uint32(node[end:]) {
		return fmt.Errorf("block %d of its extent tree: %w", at, errChecksum)
	}
	return w.node(node, nodeExtents, depth)
}

// leaf adds one extent.
func (w *extentWalk) leaf(p []byte) error {
	e := extent{int64(le.Uint32(p)), int64(le.Uint32(p[8:])) | int64(le.Uint16(p[6:]))<<32, int64(le.Uint16(p[4:]))}
	written := e.n <= maxExtent
	if !written {
		e.n -= maxExtent
	}
	if e.n == 0 || e.start < 1 || e.start+e.n > w.r.blocks || e.logical+e.n > maxBlocks+1 {
		return errors.New("an extent is outside the file system")
	}
	w.next = e.logical + e.n
	if written {
		w.out = append(w.out, e)
	}
	return nil
}

// File is the content of an open file.
type File struct {
	r       *Reader
	extents []extent
	size    int64
}

func (r *Reader) file(in *rawInode) (*File, error) {
	e, err := r.extents(in)
	if err != nil {
		return nil, err
	}
	return &File{r, e, in.size()}, nil
}

// Size is the file's length in bytes.
func (f *File) Size() int64 { return f.size }

// Close does nothing: a File holds no resources.
func (f *File) Close() error { return nil }

// ReadAt reads content; holes read as zeros.
func (f *File) ReadAt(b []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, errors.New("reading at a negative offset")
	}
	if off >= f.size {
		return 0, io.EOF
	}
	if left := f.size - off; int64(len(b)) > left {
		b = b[:left]
		err = io.EOF
	}
	clear(b)
	i, _ := slices.BinarySearchFunc(f.extents, off/blockSize, func(e extent, block int64) int {
		if e.logical+e.n <= block {
			return -1
		}
		return 1
	})
	for _, e := range f.extents[i:] {
		// Compute the part of the extent that is within the requested range.
		from := max(e.logical*blockSize, off)
		to := min((e.logical+e.n)*blockSize, off+int64(len(b)))
		if from >= to {
			break
		}
		if err := f.r.readAt(b[from-off:to-off], (e.start-e.logical)*blockSize+from); err != nil {
			return 0, err
		}
	}
	return len(b), err
}

// Range is a part of the device, in bytes.
type Range struct{ Off, Len int64 }

// Ranges returns the locations of the file's content on the device, in whole blocks, without holes.
func (f *File) Ranges() []Range {
	out := make([]Range, len(f.extents))
	for i, e := range f.extents {
		out[i] = Range{e.start * blockSize, e.n * blockSize}
	}
	return out
}

// readDir returns the entries of a directory, sorted by name.
func (r *Reader) readDir(in *rawInode) ([]entry, error) {
	if in.mode()&tree.ModeType != tree.ModeDir {
		return nil, errors.New("not a directory")
	}
	extents, err := r.extents(in)
	if err != nil {
		return nil, err
	}
	var out []entry
	var total int64
	indexed := le.Uint32(in.b[0x20:])&flagIndex != 0
	b := make([]byte, blockSize)
	for _, e := range extents {
		if total += e.n; total > r.blocks {
			return nil, fmt.Errorf("inode %d: the directory is larger than the file system", in.number)
		}
		for i := range e.n {
			if err := r.readBlock(b, e.start+i); err != nil {
				return nil, fmt.Errorf("inode %d: %w", in.number, err)
			}
			if out, err = parseDirents(out, b, in, e.logical+i, indexed); err != nil {
				return nil, fmt.Errorf("inode %d: block %d of the directory: %w", in.number, e.logical+i, err)
			}
		}
	}
	slices.SortStableFunc(out, byName)
	for i := 1; i < len(out); i++ {
		if out[i].name == out[i-1].name {
			return nil, fmt.Errorf("inode %d: the directory has the name %q twice", in.number, out[i].name)
		}
	}
	return out, nil
}

// parseDirents appends the entries of a block, except the dot entries. An index block has no other
// entries, and its checksum has another position.
func parseDirents(out []entry, b []byte, in *rawInode, logical int64, indexed bool) ([]entry, error) {
	index := indexed && (logical == 0 || le.Uint32(b) == 0 && le.Uint16(b[4:]) == blockSize)
	tail := b[leafRoom:]
	switch {
	case index:
		if !indexChecksumOK(b, in.seed, logical) {
			return nil, errChecksum
		}
		return out, nil
	case le.Uint32(tail) != 0 || le.Uint16(tail[4:]) != direntTail || tail[7] != 0xde || checksum(in.seed, b[:leafRoom]) != le.Uint32(tail[8:]):
		return nil, errChecksum
	}
	for rest := b[:leafRoom]; len(rest) > 0; {
		e, size, err := parseDirent(rest)
		if err != nil {
			return nil, err
		}
		rest = rest[size:]
		if e.number == 0 || e.name == "." || e.name == ".." {
			continue
		}
		if e.name == "" || strings.ContainsAny(e.name, "/\x00") {
			return nil, fmt.Errorf("the name %q is invalid", e.name)
		}
		out = append(out, e)
	}
	return out, nil
}

// parseDirent returns the first directory entry in b and its size in bytes.
func parseDirent(b []byte) (e entry, size int, err error) {
	if len(b) < direntHeader {
		return e, 0, errors.New("an entry is truncated")
	}
	size, length := int(le.Uint16(b[4:])), int(b[6])
	if size < direntHeader || size%4 != 0 || size > len(b) || direntHeader+length > size {
		return e, 0, errors.New("an entry is longer than its block")
	}
	return entry{name: string(b[direntHeader : direntHeader+length]), number: le.Uint32(b)}, size, nil
}

// indexChecksumOK reports whether the checksum of an index block is correct.
func indexChecksumOK(b []byte, seed uint32, logical int64) bool {
	at, room := indexNodeAt, indexNodeRoom
	if logical == 0 {
		at, room = indexRootAt, indexRootRoom
	}
	count := int(le.Uint16(b[at+2:]))
	if int(le.Uint16(b[at:])) != room || count > room {
		return false
	}
	c := checksum(seed, b[:at+count*indexEntry])
	tail := at + room*indexEntry
	c = checksum(checksum(c, b[tail:tail+4]), make([]byte, 4))
	return c == le.Uint32(b[tail+4:])
}

// Walk calls f for every path, parents before children, sorted by name. If f returns an error, Walk
// stops and returns it. Contents refer to blobs of the Reader itself. Hard links share their Inode.
func (r *Reader) Walk(f func(tree.Node) error) error { return r.WalkBelow(".", f) }

// WalkBelow is like Walk, but visits only one path and everything below it.
func (r *Reader) WalkBelow(name string, f func(tree.Node) error) error {
	in, p, err := r.lookup(name, false)
	if err != nil {
		return fmt.Errorf("reading %q: %w", name, err)
	}
	node, err := r.treeInode(in)
	if err != nil {
		return fmt.Errorf("reading %q: %w", p, err)
	}
	if err := f(tree.Node{Path: p, Inode: node}); err != nil || !node.IsDir() {
		return err
	}
	w := &walker{r: r, f: f, dirs: map[uint32]bool{in.number: true}, shared: map[uint32]*tree.Inode{}}
	prefix := p + "/"
	if p == "." {
		prefix = ""
	}
	return w.walkDir(in, prefix)
}

type walker struct {
	r      *Reader
	f      func(tree.Node) error
	dirs   map[uint32]bool // directories already seen: a damaged tree may have loops
	shared map[uint32]*tree.Inode
}

func (w *walker) walkDir(in *rawInode, prefix string) error {
	entries, err := w.r.readDir(in)
	if err != nil {
		return fmt.Errorf("reading %q: %w", path.Clean(prefix), err)
	}
	for _, e := range entries {
		p := prefix + e.name
		if len(p) > maxPath {
			return fmt.Errorf("reading %q…: the directories are nested too deeply", p[:60])
		}
		child, err := w.r.inode(e.number)
		if err != nil {
			return fmt.Errorf("reading %q: %w", p, err)
		}
		node := w.shared[e.number]
		if node == nil {
			if node, err = w.r.treeInode(child); err != nil {
				return fmt.Errorf("reading %q: %w", p, err)
			}
			if !node.IsDir() && child.links() > 1 {
				w.shared[e.number] = node
			}
		}
		if err := w.f(tree.Node{Path: p, Inode: node}); err != nil {
			return err
		}
		if !node.IsDir() {
			continue
		}
		if w.dirs[e.number] {
			return fmt.Errorf("reading %q: the directory has two names", p)
		}
		w.dirs[e.number] = true
		if err := w.walkDir(child, p+"/"); err != nil {
			return err
		}
	}
	return nil
}

// Nodes returns all nodes that Walk visits.
func (r *Reader) Nodes() ([]tree.Node, error) {
	var nodes []tree.Node
	err := r.Walk(func(n tree.Node) error {
		nodes = append(nodes, n)
		return nil
	})
	return nodes, err
}

const blobPrefix = "ext4 inode "

func blobName(number uint32) string { return fmt.Sprintf("%s%d", blobPrefix, number) }

// OpenBlob opens the content of a node from Walk, Nodes or Stat.
func (r *Reader) OpenBlob(name string) (tree.BlobFile, error) {
	digits, ok := strings.CutPrefix(name, blobPrefix)
	number, err := strconv.ParseUint(digits, 10, 32)
	if !ok || err != nil {
		return nil, fmt.Errorf("opening blob %q: it does not belong to this file system", name)
	}
	in, err := r.inode(uint32(number))
	if err != nil {
		return nil, fmt.Errorf("opening blob %q: %w", name, err)
	}
	f, err := r.file(in)
	if err != nil {
		return nil, fmt.Errorf("opening blob %q: %w", name, err)
	}
	return f, nil
}
