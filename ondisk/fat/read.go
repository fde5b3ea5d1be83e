package fat

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf16"
)

// ErrNotFAT is returned by Open for bytes that are not a FAT file system.
var ErrNotFAT = errors.New("no FAT file system")

// Reader reads a file system. It is not safe for concurrent use.
type Reader struct {
	r io.ReaderAt
	g geometry
	// page is the part of the allocation table that is cached; it begins at pageOff.
	page    []byte
	pageOff int64
}

// Entry is a file or directory.
type Entry struct {
	Path  string // relative and clean
	Dir   bool
	Size  int64
	MTime time.Time
	first uint32
}

// Name returns the last element of the path.
func (e Entry) Name() string { return path.Base(e.Path) }

// Extent is a contiguous part of a file, in bytes on the partition.
type Extent struct{ Off, Len int64 }

// Open reads and checks the boot sector, and nothing else.
func Open(r io.ReaderAt) (*Reader, error) {
	b := make([]byte, bootSize)
	if _, err := r.ReadAt(b, 0); err != nil {
		return nil, fmt.Errorf("reading the boot sector: %w", err)
	}
	if string(b[3:11]) == "EXFAT   " {
		return nil, fmt.Errorf("%w: it is exFAT; format it as FAT32 (MS-DOS)", ErrNotFAT)
	}
	if string(b[3:7]) == "NTFS" {
		return nil, fmt.Errorf("%w: it is NTFS; format it as FAT32 (MS-DOS)", ErrNotFAT)
	}
	g, err := parseBootSector(b)
	if err != nil {
		return nil, err
	}
	return &Reader{r: r, g: g}, nil
}

// parseBootSector reads the geometry ("BIOS Parameter Block"), and checks that its values are
// consistent.
func parseBootSector(b []byte) (geometry, error) {
	g := geometry{
		sectorSize: int64(le.Uint16(b[11:])),
		perCluster: int64(b[13]),
		reserved:   int64(le.Uint16(b[14:])),
		fats:       int64(b[16]),
		sectors:    int64(le.Uint16(b[19:])),
		fatSectors: int64(le.Uint16(b[22:])),
	}
	if g.sectors == 0 {
		g.sectors = int64(le.Uint32(b[32:]))
	}
	fat32 := g.fatSectors == 0
	if fat32 {
		g.fatSectors = int64(le.Uint32(b[36:]))
		g.root = le.Uint32(b[44:])
	}
	if b[510] != 0x55 || b[511] != 0xaa || !g.plausible() {
		return g, ErrNotFAT
	}
	rootBytes := int64(le.Uint16(b[17:])) * entrySize
	g.rootDir = (rootBytes + g.sectorSize - 1) / g.sectorSize
	g.clusters = g.countClusters()
	// The number of clusters alone distinguishes FAT12 from FAT16 ("FAT Type Determination").
	switch {
	case fat32:
		g.kind = 32
	case g.clusters < minFAT16:
		g.kind = 12
	default:
		g.kind = 16
	}
	if g.clusters < 1 || g.clusters >= 1<<28-16 || g.kind == 16 && g.clusters >= minFAT32 ||
		g.tableSize(g.clusters+2) > g.fatSectors*g.sectorSize || !fat32 && rootBytes == 0 {
		return g, fmt.Errorf("%w: values in the boot sector contradict each other", ErrNotFAT)
	}
	return g, nil
}

// plausible reports whether FAT allows each value in the boot sector.
func (g *geometry) plausible() bool {
	power2 := func(n int64) bool { return n > 0 && n&(n-1) == 0 }
	return power2(g.sectorSize) && g.sectorSize >= 512 && g.sectorSize <= 4096 &&
		power2(g.perCluster) && g.reserved > 0 && g.fats > 0 && g.fats <= 4 && g.fatSectors > 0
}

// Type returns the FAT type: 12, 16 or 32.
func (r *Reader) Type() int { return r.g.kind }

// Size returns the size of the file system in bytes.
func (r *Reader) Size() int64 { return r.g.sectors * r.g.sectorSize }

// Label returns the volume label in the root directory, or "".
func (r *Reader) Label() (string, error) {
	label := ""
	err := r.scan(r.Top(), func(raw []byte, _ Entry) bool {
		if raw[11]&(attrVolume|attrDirectory) == attrVolume {
			label = strings.TrimRight(string(raw[:11]), " ")
			return false
		}
		return true
	})
	return label, err
}

// Free returns the size of all free clusters in bytes.
func (r *Reader) Free() (int64, error) {
	n := int64(0)
	for c := int64(2); c < r.g.clusters+2; c++ {
		v, err := r.next(uint32(c))
		if err != nil {
			return 0, err
		}
		if v == 0 {
			n++
		}
	}
	return n * r.g.clusterSize(), nil
}

// EachFree calls fn with each free cluster.
func (r *Reader) EachFree(fn func(Extent) error) error {
	for c := int64(2); c < r.g.clusters+2; c++ {
		v, err := r.next(uint32(c))
		if err == nil && v == 0 {
			err = fn(Extent{r.g.clusterOff(uint32(c)), r.g.clusterSize()})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// next returns the entry of a cluster in the first allocation table.
func (r *Reader) next(c uint32) (uint32, error) {
	off, n := int64(c)*4, 4
	switch r.g.kind {
	case 12:
		off, n = int64(c)+int64(c)/2, 2
	case 16:
		off, n = int64(c)*2, 2
	}
	if r.page == nil || off < r.pageOff || off+int64(n) > r.pageOff+int64(len(r.page)) {
		size := r.g.fatSectors * r.g.sectorSize
		page := make([]byte, min(4096, size-off))
		if _, err := r.r.ReadAt(page, r.g.fatOff(0)+off); err != nil {
			return 0, fmt.Errorf("reading the allocation table: %w", noEOF(err))
		}
		r.page, r.pageOff = page, off
	}
	b := r.page[off-r.pageOff:]
	switch r.g.kind {
	case 12:
		v := uint32(le.Uint16(b))
		if c&1 == 1 {
			v >>= 4
		}
		return v & 0xfff, nil
	case 16:
		return uint32(le.Uint16(b)), nil
	}
	return le.Uint32(b) & 0x0fffffff, nil
}

// maxRun is the size in bytes at which follow ends an extent, even if the next cluster is adjacent.
const maxRun = 1 << 20

// follow calls fn with the extents of a chain of clusters, up to size bytes, until fn returns
// false. Directories have no size: for them size is -1, which means the whole chain.
func (r *Reader) follow(first uint32, size int64, fn func(Extent) (bool, error)) error {
	left := size
	if size < 0 {
		left = dirMax
	}
	var run Extent
	// Detect loops with Brent's algorithm: the chain must not return to noted, which is the cluster
	// after the last power-of-two number of steps.
	noted, next := uint32(0), int64(1)
	for c, steps := first, int64(0); left > 0; steps++ {
		if c < 2 || int64(c) >= r.g.clusters+2 {
			// Numbers above the last cluster mean "end of chain" or "bad cluster".
			if size < 0 && steps > 0 && int64(c) >= r.g.clusters+2 {
				break
			}
			if size < 0 {
				return fmt.Errorf("the chain of clusters has an invalid cluster number %d", c)
			}
			return fmt.Errorf("the chain of clusters ends %d bytes early", left)
		}
		if c == noted {
			return errors.New("the chain of clusters is a loop")
		}
		if steps == next {
			noted, next = c, next*2
		}
		n := min(r.g.clusterSize(), left)
		if off := r.g.clusterOff(c); run.Len > 0 && run.Len < maxRun && run.Off+run.Len == off {
			run.Len += n
		} else {
			if run.Len > 0 {
				if more, err := fn(run); err != nil || !more {
					return err
				}
			}
			run = Extent{off, n}
		}
		left -= n
		if left == 0 && size >= 0 {
			break
		}
		var err error
		if c, err = r.next(c); err != nil {
			return err
		}
	}
	if run.Len > 0 {
		_, err := fn(run)
		return err
	}
	return nil
}

// scan calls fn for each used entry of a directory, including its decoded long name, until fn
// returns false.
func (r *Reader) scan(dir Entry, fn func(raw []byte, e Entry) bool) error {
	s := &scanner{r: r, dir: dir, fn: fn}
	return r.eachOfDir(dir, s.run)
}

// eachOfDir calls fn with the extents of a directory.
func (r *Reader) eachOfDir(dir Entry, fn func(Extent) (bool, error)) error {
	var err error
	if dir.Path == "." && r.g.kind != 32 {
		_, err = fn(Extent{r.g.rootOff(), r.g.rootDir * r.g.sectorSize})
	} else {
		first := dir.first
		if dir.Path == "." {
			first = r.g.root
		}
		err = r.follow(first, -1, fn)
	}
	switch {
	case err != nil && dir.Path == ".":
		return fmt.Errorf("reading the top directory: %w", err)
	case err != nil:
		return fmt.Errorf("reading directory %s: %w", dir.Path, err)
	}
	return nil
}

// scanner reads the entries of a directory, one extent after the other.
type scanner struct {
	r     *Reader
	dir   Entry
	fn    func(raw []byte, e Entry) bool
	long  longName
	parts int    // long name entries since the last short one
	name  string // name of the current entry, as stored
	// odd, if set, is called for entries that are not passed to fn. If it returns false, the scan
	// ends.
	odd func(name, what string) bool
	buf [4096]byte
}

// passOver reports to odd that an entry is ignored. If passOver returns false, the scan ends.
func (s *scanner) passOver(name, what string) bool { return s.odd == nil || s.odd(name, what) }

// run reads the entries in the extent x. It returns false after the last entry.
func (s *scanner) run(x Extent) (bool, error) {
	for x.Len > 0 {
		b := s.buf[:min(int64(len(s.buf)), x.Len)]
		if _, err := s.r.r.ReadAt(b, x.Off); err != nil {
			return false, noEOF(err)
		}
		x.Off += int64(len(b))
		x.Len -= int64(len(b))
		for ; len(b) >= entrySize; b = b[entrySize:] {
			if !s.entry(b[:entrySize]) {
				return false, nil
			}
		}
	}
	return true, nil
}

// entry handles one entry. It returns false after the last entry.
func (s *scanner) entry(raw []byte) bool {
	switch {
	case raw[0] == 0: // this and all following entries are unused
		if s.parts > 0 {
			s.passOver("", oddPart)
		}
		return false
	case raw[0] == 0xe5: // a deleted entry
		parts := s.parts
		s.long, s.parts = longName{}, 0
		return parts == 0 || s.passOver("", oddPart)
	case raw[11]&0x3f == attrLongName:
		s.long.add(raw)
		s.parts++
		return true
	}
	parts, own := s.parts, len(s.long.chars)/charsPerEntry
	s.parts = 0
	name := s.long.take(shortName(raw[:11]))
	if name == "" {
		name, own = decodeShort(raw), 0
	}
	s.name = name
	if parts != own && !s.passOver(name, oddPart) {
		return false
	}
	e := Entry{
		Path:  path.Join(s.dir.Path, name),
		Dir:   raw[11]&attrDirectory != 0,
		Size:  int64(le.Uint32(raw[28:])),
		MTime: fromDOSTime(le.Uint16(raw[24:]), le.Uint16(raw[22:])),
		first: uint32(le.Uint16(raw[26:])),
	}
	if s.r.g.kind == 32 {
		e.first |= uint32(le.Uint16(raw[20:])) << 16
	}
	if e.Dir {
		e.Size = 0
	}
	// A name with a slash would refer to a file in another directory.
	if raw[11]&attrVolume == 0 && !fs.ValidPath(name) || strings.Contains(name, "/") {
		return s.passOver(name, oddName)
	}
	return s.fn(raw, e)
}

// longName collects the parts of a long name, which are stored in reverse order.
type longName struct {
	chars []uint16
	want  int // number of the next part; 0: the short entry comes next
	sum   byte
	ok    bool
}

func (l *longName) add(raw []byte) {
	part := int(raw[0] & 0x3f)
	if raw[0]&0x40 != 0 {
		*l = longName{}
		if part > 0 && part <= 20 {
			*l = longName{chars: make([]uint16, part*charsPerEntry), want: part, sum: raw[13], ok: true}
		}
	}
	if !l.ok || part != l.want || raw[13] != l.sum {
		*l = longName{}
		return
	}
	for i, at := range longOffsets {
		l.chars[(part-1)*charsPerEntry+i] = le.Uint16(raw[at:])
	}
	l.want--
}

// take returns the collected long name if it belongs to the short name s, and resets l.
func (l *longName) take(s shortName) string {
	defer func() { *l = longName{} }()
	if !l.ok || l.want != 0 || l.sum != s.checksum() {
		return ""
	}
	for i, c := range l.chars {
		if c == 0 || c == 0xffff {
			l.chars = l.chars[:i]
			break
		}
	}
	return string(utf16.Decode(l.chars))
}

// decodeShort returns the name of a short entry. Two bits, introduced by Windows NT, mark the base
// or the extension as lower case.
func decodeShort(raw []byte) string {
	part := func(b []byte, lower bool) string {
		s := make([]rune, 0, 8)
		for _, c := range b {
			if c >= 0x80 {
				s = append(s, '_') // the code page of such characters is unknown
			} else {
				s = append(s, rune(c))
			}
		}
		t := strings.TrimRight(string(s), " ")
		if lower {
			t = strings.ToLower(t)
		}
		return t
	}
	base, ext := part(raw[:8], raw[12]&0x08 != 0), part(raw[8:11], raw[12]&0x10 != 0)
	if ext != "" {
		return base + "." + ext
	}
	return base
}

// ReadDir lists a directory; "." is the root.
func (r *Reader) ReadDir(dir string) ([]Entry, error) {
	d, err := r.Stat(dir)
	if err != nil {
		return nil, err
	}
	return r.readDir(d)
}

// Top returns the root directory.
func (r *Reader) Top() Entry { return Entry{Path: ".", Dir: true} }

// Each calls fn for every file and directory in d, in their order on the
// disk, until fn returns false.
func (r *Reader) Each(d Entry, fn func(Entry) bool) error {
	if !d.Dir {
		return fmt.Errorf("reading directory %s: it is a file", d.Path)
	}
	return r.scan(d, func(raw []byte, e Entry) bool {
		name := e.Name()
		if raw[11]&attrVolume != 0 || raw[0] == '.' || name == "." || name == ".." {
			return true
		}
		return fn(e)
	})
}

func (r *Reader) readDir(d Entry) ([]Entry, error) {
	var out []Entry
	err := r.Each(d, func(e Entry) bool {
		out = append(out, e)
		return true
	})
	return out, err
}

// Stat returns the entry of a file or directory. It ignores case, as FAT does.
func (r *Reader) Stat(name string) (Entry, error) {
	at := r.Top()
	if name == "." {
		return at, nil
	}
	if !fs.ValidPath(name) {
		return Entry{}, fmt.Errorf("finding %s: %w", name, fs.ErrInvalid)
	}
	for part := range strings.SplitSeq(name, "/") {
		part, found := foldName(part), false
		var child Entry
		err := r.Each(at, func(e Entry) bool {
			if found = foldName(e.Name()) == part; found {
				child = e
			}
			return !found
		})
		if err != nil {
			return Entry{}, err
		}
		at = child
		if !found {
			return Entry{}, fmt.Errorf("finding %s: %w", name, fs.ErrNotExist)
		}
	}
	return at, nil
}

// Extents returns the extents of a file or directory, in order.
func (r *Reader) Extents(name string) ([]Extent, error) {
	e, err := r.Stat(name)
	if err != nil {
		return nil, err
	}
	each := r.each
	if e.Dir {
		each = r.eachOfDir
	}
	var out []Extent
	err = each(e, func(x Extent) (bool, error) {
		if n := len(out); n > 0 && out[n-1].Off+out[n-1].Len == x.Off {
			out[n-1].Len += x.Len
		} else {
			out = append(out, x)
		}
		return true, nil
	})
	return out, err
}

// each calls fn with the extents of a file.
func (r *Reader) each(e Entry, fn func(Extent) (bool, error)) error {
	if e.Dir {
		return fmt.Errorf("reading %s: it is a directory", e.Path)
	}
	if err := r.follow(e.first, e.Size, fn); err != nil {
		return fmt.Errorf("reading %s: %w", e.Path, err)
	}
	return nil
}

// Follow checks the chain of clusters of a file without reading the content.
func (r *Reader) Follow(e Entry) error {
	return r.each(e, func(Extent) (bool, error) { return true, nil })
}

// EachExtent calls fn with the extents of a file, in order, until fn returns false. Adjacent
// extents may be passed separately.
func (r *Reader) EachExtent(e Entry, fn func(Extent) (bool, error)) error { return r.each(e, fn) }

// ReadFile reads a whole file. Unlike Read, it takes a path and searches the directories for it.
func (r *Reader) ReadFile(name string) ([]byte, error) {
	e, err := r.Stat(name)
	if err != nil {
		return nil, err
	}
	return r.Read(e)
}

// MaxRead is the maximum size in bytes of a file that Read and ReadFile read. It is enough for
// kernels and initrds.
const MaxRead = 512 << 20

// Read reads a whole file.
func (r *Reader) Read(e Entry) ([]byte, error) {
	if e.Size > MaxRead {
		return nil, fmt.Errorf("%s has %d bytes, more than the %d that are read at once", e.Path, e.Size, MaxRead)
	}
	return r.read(e, maxRun, nil)
}

// ReadWhile reads a file in blocks until more returns false. The result includes the last block.
func (r *Reader) ReadWhile(e Entry, block int64, more func([]byte) bool) ([]byte, error) {
	return r.read(e, block, more)
}

func (r *Reader) read(e Entry, block int64, more func([]byte) bool) ([]byte, error) {
	// Let out grow with what is read, because a damaged entry may claim 4 GiB.
	var out []byte
	err := r.each(e, func(x Extent) (bool, error) {
		for x.Len > 0 {
			n := min(x.Len, block)
			at := len(out)
			out = slices.Grow(out, int(n))[:at+int(n)]
			if _, err := r.r.ReadAt(out[at:], x.Off); err != nil {
				return false, noEOF(err)
			}
			if more != nil && !more(out[at:]) {
				return false, nil
			}
			x.Off += n
			x.Len -= n
		}
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// maxDepth limits the depth of Walk, because in a damaged file system a directory may contain
// itself.
const maxDepth = 64

// Walk calls fn for every file and directory except the root, parents before children.
func (r *Reader) Walk(fn func(Entry) error) error {
	var walk func(d Entry, depth int) error
	seen := map[uint32]bool{}
	walk = func(d Entry, depth int) error {
		list, err := r.readDir(d)
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.Dir && (depth == maxDepth || seen[e.first]) {
				return fmt.Errorf("reading directory %s: it contains itself, or is nested too deep", e.Path)
			}
			if err := fn(e); err != nil {
				return err
			}
			if e.Dir {
				seen[e.first] = true
				if err := walk(e, depth+1); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return walk(r.Top(), 0)
}

// noEOF converts io.EOF to io.ErrUnexpectedEOF.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
