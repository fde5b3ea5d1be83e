package images

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// snapshot is the directory that containerd would write for one layer on top of others
// (pkg/archive.Apply onto overlayfs; test/oracle compares the two). Where containerd fails or loses
// files, snapshot follows the image specification: a whiteout hides entries of lower layers, never
// entries of its own layer.
type snapshot struct {
	chainID, diffID string
	id              uint64
	parent          *snapshot
	root            *entry
	blob            string // digest of the uncompressed layer
	size            int64  // bytes on disk, as counted by containerd
	inodes          int64
	label           string // for messages
	whiteouts       []whiteout
	budget          *budget
}

// entry is a name in a snapshot. Hard links are entries with the same inode.
type entry struct {
	*tree.Inode
	children map[string]*entry // names in a directory
}

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	paxXattr       = "SCHILY.xattr."
	xattrOpaque    = "trusted.overlay.opaque"
	xattrCaps      = "security.capability"
	xattrACL       = "system.posix_acl_access"
	xattrDefault   = "system.posix_acl_default"

	maxName     = 255  // bytes of a path element, in ext4 and other Linux file systems
	maxPath     = 4096 // PATH_MAX
	maxSymlinks = 255
	maxXattr    = 64 << 10
)

func newDir(mtime time.Time) *entry {
	return &entry{
		Inode:    &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: mtime},
		children: map[string]*entry{},
	}
}

// applyLayer unpacks the uncompressed layer r on top of parent, which is nil for the first layer.
// Entries refer to ranges of the blob instead of copying file contents. date is the time of
// directories that the layer does not contain.
func applyLayer(ctx context.Context, c *fetch.Cache, r *io.SectionReader, blob string, parent *snapshot, date time.Time, limit *budget) (*snapshot, error) {
	s := &snapshot{parent: parent, blob: blob, root: newDir(date), budget: limit}
	// tar.Reader reads single blocks and skips contents by seeking. Therefore, after Next, r is at
	// the beginning of the entry's contents.
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading the tar after byte %d: %w", position(r), err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if err := s.add(ctx, c, tr, h, position(r), date); err != nil {
			return nil, fmt.Errorf("entry %q: %w", shorten(h.Name), err)
		}
	}
	if err := s.applyWhiteouts(date); err != nil {
		return nil, err
	}
	return s, s.account()
}

// shorten limits the length of a name in messages.
func shorten(name string) string {
	const most = 200
	if len(name) > most {
		return name[:most] + "…"
	}
	return name
}

func position(r io.Seeker) int64 {
	pos, _ := r.Seek(0, io.SeekCurrent) // this Seek of a SectionReader cannot fail
	return pos
}

// add applies one tar entry. off is the offset of its contents.
func (s *snapshot) add(ctx context.Context, c *fetch.Cache, tr *tar.Reader, h *tar.Header, off int64, date time.Time) error {
	if err := checkName(h.Name); err != nil {
		return err
	}
	dir, base := path.Split(path.Clean("/" + h.Name))
	if base == "" {
		return nil // the snapshotter sets the metadata of the root
	}
	if err := checkHeader(h); err != nil {
		return err
	}
	if name, ok := strings.CutPrefix(base, whiteoutPrefix); ok {
		if name == "" || name == "." || name == ".." {
			return errors.New("whiteout without a name")
		}
		s.whiteouts = append(s.whiteouts, whiteout{dir: dir, name: name, opaque: base == whiteoutOpaque, uid: uint32(h.Uid), gid: uint32(h.Gid)})
		return s.budget.name(len(dir) + len(name))
	}
	at, err := s.resolve(dir)
	if err != nil {
		return err
	}
	parent, err := s.makeParents(at, date)
	if err != nil {
		return err
	}
	old := parent.children[base]
	e, err := s.newEntry(ctx, c, tr, h, off, old, date)
	if err != nil {
		return err
	}
	if err := e.setMetadata(h); err != nil {
		return err
	}
	if err := ext4.Check(tree.Node{Path: base, Inode: e.Inode}); err != nil {
		return err
	}
	if old == nil {
		if err := s.budget.name(at.length() + len(base)); err != nil {
			return err
		}
	}
	parent.children[base] = e
	return nil
}

// newEntry returns the entry for a header, which takes the place of the entry old. old may be nil.
func (s *snapshot) newEntry(ctx context.Context, c *fetch.Cache, tr *tar.Reader, h *tar.Header, off int64, old *entry, date time.Time) (*entry, error) {
	special := func(mode uint32) *entry {
		return &entry{Inode: &tree.Inode{Mode: mode, Major: uint32(h.Devmajor), Minor: uint32(h.Devminor)}}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if old != nil && old.IsDir() {
			return old, nil
		}
		return newDir(date), nil
	case tar.TypeReg, tar.TypeGNUSparse:
		data, err := s.contentOf(ctx, c, tr, h, off)
		return &entry{Inode: &tree.Inode{Mode: tree.ModeRegular, Data: data}}, err
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) >= maxPath {
			return nil, fmt.Errorf("symbolic link with a target of %d bytes", len(h.Linkname))
		}
		return &entry{Inode: &tree.Inode{Mode: tree.ModeSymlink, Target: h.Linkname}}, nil
	case tar.TypeChar:
		return special(tree.ModeChar), nil
	case tar.TypeBlock:
		return special(tree.ModeBlock), nil
	case tar.TypeFifo:
		return &entry{Inode: &tree.Inode{Mode: tree.ModeFIFO}}, nil
	case tar.TypeLink:
		e, err := s.linkTarget(h.Linkname)
		if err != nil {
			return nil, err
		}
		// containerd sets the owner of every entry, after which the kernel drops file capabilities.
		delete(e.Xattrs, xattrCaps)
		return e, nil
	}
	return nil, fmt.Errorf("tar entry of unknown type %q", h.Typeflag)
}

// noOwner is (uid_t)-1. To the kernel, it means that an owner stays unchanged.
const noOwner = 1<<32 - 1

// checkHeader rejects values that the kernel cannot store or would interpret in another way.
func checkHeader(h *tar.Header) error {
	for what, id := range map[string]int{"owner": h.Uid, "group": h.Gid} {
		if id < 0 || id >= noOwner {
			return fmt.Errorf("%s %d is out of range: want 0 to %d", what, id, noOwner-1)
		}
	}
	if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
		if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
			return fmt.Errorf("device %d:%d is beyond 4095:1048575", h.Devmajor, h.Devminor)
		}
	}
	return nil
}

var errHostile = errors.New("path leads out of the image")

// checkName rejects names that leave the image's root, and names that no file system can store.
func checkName(name string) error {
	if len(name) >= maxPath {
		return fmt.Errorf("the path has %d bytes; at most %d are possible", len(name), maxPath-1)
	}
	if strings.ContainsRune(name, 0) {
		return errors.New("path with a zero byte")
	}
	depth := 0
	for element := range strings.SplitSeq(name, "/") {
		switch {
		case element == "" || element == ".":
		case element == "..":
			if depth--; depth < 0 {
				return errHostile
			}
		case len(element) > maxName && !(strings.HasPrefix(element, whiteoutPrefix) && len(element) <= maxName+len(whiteoutPrefix)):
			return fmt.Errorf("the name has %d bytes; at most %d are possible", len(element), maxName)
		default:
			depth++
		}
	}
	return nil
}

func (e *entry) setXattr(name, value string) {
	if e.Xattrs == nil {
		e.Xattrs = map[string]string{}
	}
	e.Xattrs[name] = value
}

// setMetadata copies metadata from a tar header to the entry.
func (e *entry) setMetadata(h *tar.Header) error {
	e.UID, e.GID = uint32(h.Uid), uint32(h.Gid)
	perm := uint32(h.Mode) & 0o7777
	if e.IsSymlink() {
		perm = 0o777
	}
	e.Mode = e.Mode&tree.ModeType | perm
	e.MTime = h.ModTime.UTC()
	// As in containerd, a time before 1970, or too late for a count of nanoseconds, becomes 1970.
	if e.MTime.Before(time.Unix(0, 0)) || e.MTime.After(time.Unix(0, 1<<63-1)) {
		e.MTime = time.Unix(0, 0).UTC()
	}
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		keep, err := e.checkXattr(name, value)
		if err != nil {
			return fmt.Errorf("extended attribute %q: %w", shorten(name), err)
		}
		if keep {
			e.setXattr(name, value)
		}
	}
	if acl, ok := e.Xattrs[xattrACL]; ok {
		e.setXattr(xattrACL, aclWithMode(acl, perm))
	}
	return nil
}

// whiteout hides a name in the lower layers. If opaque is set, it hides all entries of dir there.
type whiteout struct {
	dir, name string
	opaque    bool
	uid, gid  uint32
}

// applyWhiteouts applies the layer's whiteouts: the opaque ones first, and parents before children.
// It runs after all entries were added, so that their order does not matter.
func (s *snapshot) applyWhiteouts(date time.Time) error {
	slices.SortFunc(s.whiteouts, func(a, b whiteout) int {
		if a.opaque != b.opaque {
			return cmp.Compare(boolInt(b.opaque), boolInt(a.opaque))
		}
		return cmp.Or(cmp.Compare(a.dir, b.dir), cmp.Compare(a.name, b.name), cmp.Compare(a.uid, b.uid), cmp.Compare(a.gid, b.gid))
	})
	for _, w := range s.whiteouts {
		if err := s.hide(w, date); err != nil {
			return fmt.Errorf("whiteout in %q: %w", shorten(w.dir), err)
		}
	}
	s.whiteouts = nil
	return nil
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// hide applies one whiteout. For overlayfs, it is a character device 0:0, or an attribute of a
// directory in this layer.
func (s *snapshot) hide(w whiteout, date time.Time) error {
	at, err := s.resolve(w.dir)
	if err != nil {
		return err
	}
	if at.blocked() {
		return nil // a file of this layer in place of a directory already hides everything below
	}
	parent, err := s.makeParents(at, date)
	if err != nil || s.parent == nil { // nothing to hide
		return err
	}
	own := parent.children[w.name]
	switch {
	case w.opaque:
		parent.setXattr(xattrOpaque, "y")
	case own == nil:
		parent.children[w.name] = &entry{Inode: &tree.Inode{Mode: tree.ModeChar, UID: w.uid, GID: w.gid, MTime: date}}
	case own.IsDir():
		own.setXattr(xattrOpaque, "y")
	}
	// Any other entry of this layer already hides the lower entry.
	return nil
}

// linkTarget returns the entry to which a hard link points. It must be in the same layer.
func (s *snapshot) linkTarget(name string) (*entry, error) {
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("hard link to %q: %w", name, err)
	}
	dir, base := path.Split(path.Clean("/" + name))
	at, err := s.resolve(dir)
	if err != nil {
		return nil, fmt.Errorf("hard link to %q: %w", shorten(name), err)
	}
	var e *entry
	if d := at.last(); d != nil {
		e = d.children[base]
	}
	switch {
	case e == nil:
		return nil, fmt.Errorf("hard link to %q, which this layer does not have", shorten(name))
	case e.IsDir():
		return nil, fmt.Errorf("hard link to the directory %q", shorten(name))
	}
	return e, nil
}

// place is a path in a snapshot, with its symbolic links resolved.
type place struct {
	root    *entry
	names   []string
	entries []*entry // the entry for each name; nil if the snapshot has no such entry
}

// last returns the entry at the place, or nil if there is none.
func (p *place) last() *entry {
	if len(p.entries) == 0 {
		return p.root
	}
	return p.entries[len(p.entries)-1]
}

// blocked reports whether an element of the path exists but is not a directory.
func (p *place) blocked() bool {
	return slices.ContainsFunc(p.entries, func(e *entry) bool { return e != nil && !e.IsDir() })
}

// length returns the length of the path in bytes.
func (p *place) length() int {
	n := len(p.names)
	for _, name := range p.names {
		n += len(name)
	}
	return n
}

// resolve follows the symbolic links of this layer in p. As in a chroot, links cannot leave the
// root.
func (s *snapshot) resolve(p string) (*place, error) {
	at := &place{root: s.root}
	return at, s.walk(at, p)
}

// walk resolves p, relative to at. todo is a stack, since the target of a link must be resolved
// before the rest of the path.
func (s *snapshot) walk(at *place, p string) error {
	todo := []string{p}
	for links := 0; len(todo) > 0; {
		name, rest, more := strings.Cut(todo[len(todo)-1], "/")
		todo[len(todo)-1] = rest
		if !more {
			todo = todo[:len(todo)-1]
		}
		if err := s.budget.step(); err != nil {
			return err
		}
		switch name {
		case "", ".":
			continue
		case "..":
			if n := len(at.names); n > 0 {
				at.names, at.entries = at.names[:n-1], at.entries[:n-1]
			}
			continue
		}
		var e *entry
		if d := at.last(); d != nil {
			e = d.children[name] // nil if d is not a directory
		}
		if e == nil || !e.IsSymlink() {
			at.names, at.entries = append(at.names, name), append(at.entries, e)
			continue
		}
		if links++; links > maxSymlinks {
			return fmt.Errorf("the path leads through more than %d symbolic links", maxSymlinks)
		}
		if strings.HasPrefix(e.Target, "/") {
			at.names, at.entries = at.names[:0], at.entries[:0]
		}
		todo = append(todo, e.Target)
	}
	return nil
}

// makeParents returns the directory at a place, and makes missing directories. overlayfs shows the
// metadata of the topmost directory, so a made directory copies the metadata of the nearest lower
// layer that has it.
func (s *snapshot) makeParents(at *place, date time.Time) (*entry, error) {
	e := s.root
	var below []*lowerPlace
	for i, name := range at.names {
		child := e.children[name]
		if child == nil {
			if below == nil {
				var err error
				if below, err = s.allBelow(at.names[:i]); err != nil {
					return nil, err
				}
			}
			if err := s.budget.name(at.length()); err != nil {
				return nil, err
			}
			child = newDir(date)
			var err error
			if below, err = inherit(child, below, name); err != nil {
				return nil, err
			}
			e.children[name] = child
		}
		if !child.IsDir() {
			return nil, fmt.Errorf("%s is not a directory in this layer", shorten(strings.Join(at.names[:i+1], "/")))
		}
		e = child
	}
	return e, nil
}

// lowerPlace is a place in a lower layer.
type lowerPlace struct {
	*snapshot
	at *place
}

// allBelow resolves a path in each lower layer. It returns the places that exist, the nearest layer
// first.
func (s *snapshot) allBelow(names []string) ([]*lowerPlace, error) {
	list := []*lowerPlace{}
	for l := s.parent; l != nil; l = l.parent {
		at, err := l.resolve(strings.Join(names, "/"))
		if err != nil {
			return nil, err
		}
		if at.last() != nil {
			list = append(list, &lowerPlace{l, at})
		}
	}
	return list, nil
}

// inherit copies the metadata of the directory name in the nearest lower layer to child. It returns
// the places of that directory in all lower layers.
func inherit(child *entry, list []*lowerPlace, name string) ([]*lowerPlace, error) {
	deeper, found := list[:0], false
	for _, l := range list {
		if err := l.walk(l.at, name); err != nil {
			return nil, err
		}
		old := l.at.last()
		if old == nil {
			continue
		}
		if !found && old.IsDir() {
			child.copyUp(old)
		}
		found = true
		deeper = append(deeper, l)
	}
	return deeper, nil
}

func (e *entry) copyUp(old *entry) {
	e.Mode, e.UID, e.GID, e.MTime = old.Mode, old.UID, old.GID, old.MTime
	for name, value := range old.Xattrs {
		if !strings.HasPrefix(name, "trusted.") {
			e.setXattr(name, value)
		}
	}
}

// contentOf returns the content of a regular file: a range of the layer's blob or, if the tar
// stores the file sparsely, a new blob.
func (s *snapshot) contentOf(ctx context.Context, c *fetch.Cache, tr *tar.Reader, h *tar.Header, off int64) (tree.Content, error) {
	if !isSparse(h) {
		return tree.Content{Blob: s.blob, Off: off, Size: h.Size}, nil
	}
	// A few bytes can claim a sparse file of any size, and containerd writes its holes as zeros.
	if err := s.budget.hole(h.Size); err != nil {
		return tree.Content{}, err
	}
	sha, n, err := c.Put(ctx, "", tr)
	if err != nil {
		return tree.Content{}, err
	}
	return tree.Content{Blob: sha, Size: n}, nil
}

func isSparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// account computes the disk usage that containerd would record for the snapshot, as du would report
// it on a file system with 4 KiB blocks.
func (s *snapshot) account() error {
	const block = 4096
	links := map[*tree.Inode]int{}
	var walk func(name string, e *entry) error
	walk = func(name string, e *entry) error {
		if links[e.Inode]++; links[e.Inode] > 1 {
			if links[e.Inode] > ext4.MaxLinks {
				return fmt.Errorf("entry %q: its file has more than %d hard links, which ext4 cannot hold", shorten(name), ext4.MaxLinks)
			}
			return nil
		}
		s.inodes++
		if e.IsDir() {
			s.size += block
		}
		s.size += (e.Data.Size + block - 1) / block * block
		for _, name := range slices.Sorted(maps.Keys(e.children)) {
			if err := walk(name, e.children[name]); err != nil {
				return err
			}
		}
		return nil
	}
	return walk("", s.root)
}

// nodes appends the snapshot's files to out with paths below dir, sorted, parents first.
func (s *snapshot) nodes(dir, layer string, out []tree.Node) []tree.Node {
	var walk func(p string, e *entry)
	walk = func(p string, e *entry) {
		out = append(out, tree.Node{Path: p, Layer: layer, Inode: e.Inode})
		for _, name := range slices.Sorted(maps.Keys(e.children)) {
			walk(p+"/"+name, e.children[name])
		}
	}
	walk(dir, s.root)
	return out
}
