package fat

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// file is a file or directory to be written.
type file struct {
	name    string
	path    string
	inode   *tree.Inode // nil for a directory that has no node of its own
	dir     bool
	parent  *file
	kids    []*file
	byName  map[string]*file // files of a directory by folded name
	short   shortName
	long    bool
	entries int // number of entries in the directory itself
	first   uint32
	n       uint32 // number of clusters
}

// Write writes a file system with the nodes. w is the partition, which must contain only zeros.
// Owners, permissions and extended attributes are ignored, because FAT has none. Nodes other than
// files and directories are errors.
func Write(w io.WriterAt, nodes []tree.Node, blobs tree.Blobs, o Options) error {
	if err := write(w, nodes, blobs, o); err != nil {
		return fmt.Errorf("writing FAT%d file system %q: %w", o.Type, o.Label, err)
	}
	return nil
}

// Fits returns the error that Write would return for these nodes, except I/O errors.
func Fits(nodes []tree.Node, o Options) error {
	if _, _, _, err := prepare(nodes, o); err != nil {
		return fmt.Errorf("laying out FAT%d file system %q: %w", o.Type, o.Label, err)
	}
	return nil
}

// Acceptable returns the nodes whose names and types Write accepts, sorted by path. If FAT
// considers the names of two nodes equal, only the first is returned.
func Acceptable(nodes []tree.Node) []tree.Node {
	_, accepted, _ := gather(nodes)
	return accepted
}

// prepare checks the input and allocates clusters. It returns the files in the order of their
// clusters, and the first cluster that stays free.
func prepare(nodes []tree.Node, o Options) (*geometry, []*file, uint32, error) {
	if len(o.Label) > 11 || strings.ContainsFunc(o.Label, func(c rune) bool {
		return c > 127 || c != ' ' && !strings.ContainsRune(shortChars, c)
	}) {
		return nil, nil, 0, fmt.Errorf("the label may have at most 11 characters: capital letters, digits, spaces and the signs !#$%%&'()-@^_`{}~")
	}
	g, err := layout(o)
	if err != nil {
		return nil, nil, 0, err
	}
	root, _, err := gather(nodes)
	if err != nil {
		return nil, nil, 0, err
	}
	if g.kind != 32 && root.entries > rootMax {
		return nil, nil, 0, fmt.Errorf("the top directory has room for %d entries and needs %d: move files into a directory", rootMax, root.entries)
	}
	order, next, err := allocate(g, root)
	return g, order, next, err
}

// gather builds the tree of files and returns the accepted nodes. The error lists everything that
// FAT cannot store.
func gather(nodes []tree.Node) (root *file, accepted []tree.Node, err error) {
	g := gatherer{root: &file{path: ".", dir: true, byName: map[string]*file{}}, bad: map[string]bool{}}
	sorted := slices.Clone(nodes)
	slices.SortStableFunc(sorted, func(a, b tree.Node) int { return cmp.Compare(a.Path, b.Path) })
	for _, n := range sorted {
		if n.Path == "." {
			g.root.inode = n.Inode
			accepted = append(accepted, n)
			continue
		}
		err := checkNode(n)
		if err == nil {
			up := g.parent(path.Dir(n.Path))
			if up == nil {
				continue // parent has recorded the error
			}
			err = up.enter(n)
		}
		if err != nil {
			g.reject(n.Path, err)
			continue
		}
		accepted = append(accepted, n)
	}
	if err := count(g.root); err != nil {
		g.errs = append(g.errs, err)
	}
	return g.root, accepted, errors.Join(g.errs...)
}

// checkNode returns an error if FAT cannot store a node.
func checkNode(n tree.Node) error {
	switch {
	case !fs.ValidPath(n.Path):
		return errors.New("is not a clean relative path")
	case n.Inode == nil:
		return errors.New("has no inode")
	}
	if err := checkName(path.Base(n.Path)); err != nil {
		return err
	}
	switch {
	case !n.IsDir() && !n.IsRegular():
		return fmt.Errorf("is neither file nor directory (mode %o); FAT has nothing else", n.Mode)
	case n.Data.Size < 0 || n.Data.Size > 1<<32-1:
		return fmt.Errorf("has %d bytes; a file on FAT is smaller than 4 GiB", n.Data.Size)
	}
	return nil
}

// gatherer builds the tree of files.
type gatherer struct {
	root *file
	errs []error
	bad  map[string]bool // paths with an error in errs
}

func (g *gatherer) reject(p string, err error) {
	g.bad[p] = true
	g.errs = append(g.errs, fmt.Errorf("%s: %w", p, err))
}

// parent returns the directory p. If no node lists p, parent adds it. If p is a file or has an
// invalid name, parent records the error once and returns nil.
func (g *gatherer) parent(p string) *file {
	if p == "." {
		return g.root
	}
	if g.bad[p] {
		return nil
	}
	up := g.parent(path.Dir(p))
	if up == nil {
		return nil
	}
	name := path.Base(p)
	d, ok := up.byName[foldName(name)]
	err := checkName(name)
	if ok && !d.dir {
		err = errors.New("is a file and a directory at once")
	}
	switch {
	case err != nil:
		g.reject(p, err)
		return nil
	case ok:
		return d
	}
	return up.add(&file{name: name, path: p, dir: true})
}

// enter adds a node to its directory.
func (d *file) enter(n tree.Node) error {
	name := path.Base(n.Path)
	other, ok := d.byName[foldName(name)]
	switch {
	case !ok:
		d.add(&file{name: name, path: n.Path, inode: n.Inode, dir: n.IsDir()})
	case n.IsDir() && other.dir && other.inode == nil && other.name == name:
		other.inode = n.Inode // parent added the directory before its node came
	default:
		return fmt.Errorf("has the same name as %s on FAT, which ignores case", other.path)
	}
	return nil
}

// add adds a file to a directory.
func (d *file) add(f *file) *file {
	f.parent = d
	if f.dir {
		f.byName = map[string]*file{}
	}
	d.byName[foldName(f.name)] = f
	d.kids = append(d.kids, f)
	return f
}

// count sorts a directory, assigns short names, and counts its entries. It does the same in all
// directories below.
func count(d *file) error {
	slices.SortFunc(d.kids, func(a, b *file) int { return cmp.Compare(a.name, b.name) })
	d.entries = 2 // "." and ".."
	if d.parent == nil {
		d.entries = 1 // the volume label
	}
	names := newShortNames(d.byName)
	var errs []error
	for _, k := range d.kids {
		k.short, k.long = names.take(k.name)
		d.entries++
		if k.long {
			d.entries += longEntries(k.name)
		}
		if k.dir {
			errs = append(errs, count(k))
		}
	}
	if d.entries*entrySize > dirMax {
		errs = append(errs, fmt.Errorf("%s: has too many files for a FAT directory", d.path))
	}
	return errors.Join(errs...)
}

// allocate allocates clusters: for each directory, first for itself, then for its files.
func allocate(g *geometry, root *file) (order []*file, next uint32, err error) {
	used := int64(0)
	take := func(f *file, size int64) {
		n := (size + g.clusterSize() - 1) / g.clusterSize()
		if n > 0 && used+n <= g.clusters {
			f.first, f.n = uint32(used)+2, uint32(n)
		}
		used += n
	}
	var visit func(d *file)
	visit = func(d *file) {
		if d.parent != nil || g.kind == 32 {
			take(d, int64(d.entries)*entrySize)
		}
		order = append(order, d)
		for _, k := range d.kids {
			if k.dir {
				visit(k)
				continue
			}
			take(k, k.inode.Data.Size)
			order = append(order, k)
		}
	}
	visit(root)
	if used > g.clusters {
		return nil, 0, fmt.Errorf("the files need %s, the file system has room for %s: make the partition larger",
			bytesize.MiB(used*g.clusterSize()), bytesize.MiB(g.clusters*g.clusterSize()))
	}
	return order, uint32(used) + 2, nil
}

func write(w io.WriterAt, nodes []tree.Node, blobs tree.Blobs, o Options) error {
	g, order, next, err := prepare(nodes, o)
	if err != nil {
		return err
	}
	c := &copier{blobs: blobs}
	defer c.close()
	for _, f := range order {
		off := g.rootOff()
		if f.parent != nil || g.kind == 32 {
			off = g.clusterOff(f.first)
		}
		if f.dir {
			if _, err := w.WriteAt(directory(f, o), off); err != nil {
				return fmt.Errorf("writing directory %s: %w", f.path, err)
			}
		} else if err := c.write(w, off, f.inode.Data); err != nil {
			return fmt.Errorf("writing %s: %w", f.path, err)
		}
	}
	table := chains(g, order, next)
	for i := range g.fats {
		if _, err := w.WriteAt(table, g.fatOff(i)); err != nil {
			return fmt.Errorf("writing the allocation table: %w", err)
		}
	}
	boot := bootSector(g, o)
	if g.kind == 32 {
		// Repair tools use the copies, which are in sectors 6 and 7.
		info := fsInfo(g, next)
		for _, at := range []int64{0, 6} {
			if _, err := w.WriteAt(info, (at+1)*g.sectorSize); err != nil {
				return fmt.Errorf("writing the information sector: %w", err)
			}
		}
		if _, err := w.WriteAt(boot, 6*g.sectorSize); err != nil {
			return fmt.Errorf("writing the boot sector's copy: %w", err)
		}
	}
	// Write the boot sector last, so that an incomplete write is not a file system.
	if _, err := w.WriteAt(boot, 0); err != nil {
		return fmt.Errorf("writing the boot sector: %w", err)
	}
	return nil
}

// directory encodes the entries of a directory.
func directory(d *file, o Options) []byte {
	b := make([]byte, d.entries*entrySize)
	at := 0
	put := func(name shortName, attr byte, f *file, first uint32) {
		e := b[at:]
		copy(e, name[:])
		e[11] = attr
		t, size := o.Time, int64(0)
		if f != nil && f.inode != nil {
			if !f.inode.MTime.IsZero() {
				t = f.inode.MTime
			}
			if !f.dir {
				size = f.inode.Data.Size
			}
		}
		date, clock := dosTime(t)
		le.PutUint16(e[14:], clock) // created
		le.PutUint16(e[16:], date)
		le.PutUint16(e[18:], date) // last access
		le.PutUint16(e[20:], uint16(first>>16))
		le.PutUint16(e[22:], clock) // modified
		le.PutUint16(e[24:], date)
		le.PutUint16(e[26:], uint16(first))
		le.PutUint32(e[28:], uint32(size))
		at += entrySize
	}
	if d.parent == nil {
		put(labelName(o.Label), attrVolume, d, 0)
	} else {
		put(shortName([]byte(".          ")), attrDirectory, d, d.first)
		// ".." in a directory below the root is 0, even on FAT32.
		up := d.parent.first
		if d.parent.parent == nil {
			up = 0
		}
		put(shortName([]byte("..         ")), attrDirectory, d.parent, up)
	}
	for _, k := range d.kids {
		if k.long {
			at += putLong(b[at:], k.name, k.short.checksum())
		}
		attr := byte(attrArchive)
		if k.dir {
			attr = attrDirectory
		}
		put(k.short, attr, k, k.first)
	}
	return b
}

// chains returns the used part of the allocation table, encoded.
func chains(g *geometry, order []*file, next uint32) []byte {
	b := make([]byte, (g.tableSize(int64(next))+g.sectorSize-1)/g.sectorSize*g.sectorSize)
	set := func(c, v uint32) {
		switch g.kind {
		case 12: // two entries share three bytes
			at, shift := c+c/2, c%2*4
			b[at] |= byte(v << shift)
			b[at+1] |= byte(v & 0xfff << shift >> 8)
		case 16:
			le.PutUint16(b[c*2:], uint16(v))
		default:
			le.PutUint32(b[c*4:], v&0x0fffffff)
		}
	}
	set(0, 0x0ffffff8) // the media byte
	set(1, 0xffffffff) // clean, no disk errors
	for _, f := range order {
		for i := range f.n {
			v := f.first + i + 1
			if i == f.n-1 {
				v = 0xffffffff
			}
			set(f.first+i, v)
		}
	}
	return b
}

func labelName(label string) shortName {
	s := shortName([]byte("           "))
	if label == "" {
		label = "NO NAME"
	}
	copy(s[:], label)
	return s
}

func bootSector(g *geometry, o Options) []byte {
	b := make([]byte, bootSize)
	ext := 36 // offset of the drive number, volume ID and label; FAT32 has other fields before them
	copy(b, []byte{0xeb, 0x3c, 0x90})
	if g.kind == 32 {
		ext, b[1] = 64, 0x58
	}
	copy(b[3:], "EDGEBAKE")
	le.PutUint16(b[11:], uint16(g.sectorSize))
	b[13] = byte(g.perCluster)
	le.PutUint16(b[14:], uint16(g.reserved))
	b[16] = byte(g.fats)
	le.PutUint16(b[17:], uint16(g.rootDir*g.sectorSize/entrySize))
	if g.kind != 32 && g.sectors < 1<<16 {
		le.PutUint16(b[19:], uint16(g.sectors))
	} else {
		le.PutUint32(b[32:], uint32(g.sectors))
	}
	b[21] = 0xf8              // media byte of a fixed disk
	le.PutUint16(b[24:], 63)  // sectors per track
	le.PutUint16(b[26:], 255) // heads
	le.PutUint32(b[28:], uint32(min(o.Start/g.sectorSize, 1<<32-1)))
	if g.kind != 32 {
		le.PutUint16(b[22:], uint16(g.fatSectors))
	} else {
		le.PutUint32(b[36:], uint32(g.fatSectors))
		le.PutUint32(b[44:], g.root)
		le.PutUint16(b[48:], 1) // sector of the FSInfo structure
		le.PutUint16(b[50:], 6) // sector of the copy of the boot sector
	}
	b[ext], b[ext+2] = 0x80, 0x29
	le.PutUint32(b[ext+3:], o.VolumeID)
	label := labelName(o.Label)
	copy(b[ext+7:], label[:])
	copy(b[ext+18:], fmt.Sprintf("FAT%d   ", g.kind))
	// This code halts the machine if firmware runs it.
	copy(b[ext+26:], []byte{0xf4, 0xeb, 0xfd})
	b[510], b[511] = 0x55, 0xaa
	return b
}

func fsInfo(g *geometry, next uint32) []byte {
	b := make([]byte, bootSize)
	copy(b, "RRaA")
	copy(b[484:], "rrAa")
	free := uint32(g.clusters) - (next - 2)
	le.PutUint32(b[488:], free)
	if free == 0 {
		next = 0xffffffff // unknown, because no cluster is free
	}
	le.PutUint32(b[492:], next)
	b[510], b[511] = 0x55, 0xaa
	return b
}

// copier writes contents. It keeps the last blob open, because consecutive files often come from
// the same blob.
type copier struct {
	blobs tree.Blobs
	buf   []byte
	name  string
	blob  tree.BlobFile
}

func (c *copier) close() {
	if c.blob != nil {
		c.blob.Close()
	}
}

func (c *copier) write(w io.WriterAt, off int64, d tree.Content) error {
	if d.Blob == "" {
		if int64(len(d.Inline)) != d.Size {
			return fmt.Errorf("the content has %d bytes, expected %d", len(d.Inline), d.Size)
		}
		if d.Size == 0 {
			return nil
		}
		_, err := w.WriteAt(d.Inline, off)
		return err
	}
	if c.blob == nil || c.name != d.Blob {
		c.close()
		c.blob = nil
		b, err := c.blobs.OpenBlob(d.Blob)
		if err != nil {
			return err
		}
		c.name, c.blob = d.Blob, b
	}
	if c.buf == nil {
		c.buf = make([]byte, 1<<20)
	}
	for done := int64(0); done < d.Size; {
		b := c.buf[:min(int64(len(c.buf)), d.Size-done)]
		if n, err := c.blob.ReadAt(b, d.Off+done); n < len(b) {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("reading blob %s at %d: %w", d.Blob, d.Off+done, err)
		}
		if _, err := w.WriteAt(b, off+done); err != nil {
			return err
		}
		done += int64(len(b))
	}
	return nil
}
