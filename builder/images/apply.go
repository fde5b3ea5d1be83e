package images

import (
	"archive/tar"
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
	"github.com/edgebake/edgebake/builder/tree"
)

// snapshot is one overlayfs snapshot directory in memory: what containerd
// would have on disk after unpacking one layer on top of others.
//
// It follows containerd's unpacking (pkg/archive.Apply onto an overlay mount)
// down to its corners, since a baked image must look exactly like a pulled
// one; the oracle in test/oracle compares the two. In two corners it follows
// the image specification instead, where containerd loses files or gives up:
// a whiteout never touches entries of its own layer.
type snapshot struct {
	chainID, diffID string
	id              uint64
	parent          *snapshot
	root            *entry
	blob            string // the uncompressed layer
	size            int64  // bytes on disk, as containerd accounts for them
	inodes          int64
	label           string // for messages
}

// entry is a name in a snapshot. Hard links are entries that share an inode.
type entry struct {
	*tree.Inode
	children map[string]*entry // of a directory
}

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	paxXattr       = "SCHILY.xattr."
	xattrOpaque    = "trusted.overlay.opaque"
	xattrCaps      = "security.capability"

	maxName     = 255  // of a path element, in ext4 and every other Linux file system
	maxPath     = 4096 // PATH_MAX
	maxSymlinks = 255
)

func newDir(mtime time.Time) *entry {
	return &entry{
		Inode:    &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: mtime},
		children: map[string]*entry{},
	}
}

// applyLayer unpacks the uncompressed layer r on top of parent (nil for a
// first layer). File contents stay where they are: entries refer to ranges of
// the blob. Date stamps what the layer gives no time.
func applyLayer(ctx context.Context, c *fetch.Cache, r *io.SectionReader, blob string, parent *snapshot, date time.Time) (*snapshot, error) {
	s := &snapshot{parent: parent, blob: blob, root: newDir(date)}
	// tar.Reader reads block by block and skips by seeking, so after Next the
	// position of r is where the entry's data begins.
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
			return nil, fmt.Errorf("entry %q: %w", h.Name, err)
		}
	}
	s.account()
	return s, nil
}

func position(r io.Seeker) int64 {
	pos, _ := r.Seek(0, io.SeekCurrent) // a SectionReader's cannot fail
	return pos
}

// add applies one tar entry whose data begins at off.
func (s *snapshot) add(ctx context.Context, c *fetch.Cache, tr *tar.Reader, h *tar.Header, off int64, date time.Time) error {
	if err := checkName(h.Name); err != nil {
		return err
	}
	dir, base := path.Split(path.Clean("/" + h.Name))
	at, err := s.resolve(dir)
	if err != nil {
		return err
	}
	if base == "" {
		return nil // the root itself: its metadata is the snapshotter's
	}
	parent, err := s.makeParents(at, date)
	if err != nil {
		return err
	}
	if base == whiteoutOpaque {
		if s.parent != nil {
			parent.setXattr(xattrOpaque, "y")
		}
		return nil
	}
	if name, ok := strings.CutPrefix(base, whiteoutPrefix); ok {
		return s.whiteout(parent, name, h, date)
	}

	old := parent.children[base]
	e := old
	switch h.Typeflag {
	case tar.TypeDir:
		if old == nil || !old.IsDir() {
			e = newDir(date)
		}
	case tar.TypeReg, tar.TypeGNUSparse:
		e = &entry{Inode: &tree.Inode{Mode: tree.ModeRegular}}
		if e.Data, err = contentOf(ctx, c, tr, h, s.blob, off); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) >= maxPath {
			return fmt.Errorf("symbolic link with a target of %d bytes", len(h.Linkname))
		}
		e = &entry{Inode: &tree.Inode{Mode: tree.ModeSymlink, Target: h.Linkname}}
	case tar.TypeChar:
		e = &entry{Inode: &tree.Inode{Mode: tree.ModeChar, Major: uint32(h.Devmajor), Minor: uint32(h.Devminor)}}
	case tar.TypeBlock:
		e = &entry{Inode: &tree.Inode{Mode: tree.ModeBlock, Major: uint32(h.Devmajor), Minor: uint32(h.Devminor)}}
	case tar.TypeFifo:
		e = &entry{Inode: &tree.Inode{Mode: tree.ModeFIFO}}
	case tar.TypeLink:
		if e, err = s.linkTarget(h.Linkname); err != nil {
			return err
		}
		// The kernel drops file capabilities when a file is given to an
		// owner, and containerd does that for every entry.
		delete(e.Xattrs, xattrCaps)
		if e == old {
			break
		}
	default:
		return fmt.Errorf("tar entry of unknown type %q", h.Typeflag)
	}
	e.setMetadata(h)
	parent.children[base] = e
	return nil
}

var errHostile = errors.New("path leads out of the image")

// checkName refuses names that would leave the image's root, and those no
// file system can hold.
func checkName(name string) error {
	if len(name) >= maxPath {
		return fmt.Errorf("path of %d bytes; at most %d are possible", len(name), maxPath-1)
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
		case len(element) > maxName:
			return fmt.Errorf("name of %d bytes; at most %d are possible", len(element), maxName)
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

// setMetadata gives an entry what its tar header says.
func (e *entry) setMetadata(h *tar.Header) {
	e.UID, e.GID = uint32(h.Uid), uint32(h.Gid)
	perm := uint32(h.Mode) & 0o7777
	if e.IsSymlink() {
		perm = 0o777
	}
	e.Mode = e.Mode&tree.ModeType | perm
	e.MTime = h.ModTime.UTC()
	// As containerd does: times before the epoch, or beyond what fits into
	// nanoseconds, become the epoch.
	if e.MTime.Before(time.Unix(0, 0)) || e.MTime.After(time.Unix(0, 1<<63-1)) {
		e.MTime = time.Unix(0, 0).UTC()
	}
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		// trusted.* would let a layer steer overlayfs; user.* exists on
		// files and directories only.
		if !ok || strings.HasPrefix(name, "trusted.") ||
			strings.HasPrefix(name, "user.") && !e.IsRegular() && !e.IsDir() {
			continue
		}
		e.setXattr(name, value)
	}
}

// whiteout hides name of the layers below. Overlayfs marks that with a
// character device 0:0.
func (s *snapshot) whiteout(parent *entry, name string, h *tar.Header, date time.Time) error {
	if name == "" || name == "." || name == ".." {
		return errors.New("whiteout without a name")
	}
	if s.parent == nil {
		return nil // nothing below to hide
	}
	switch own := parent.children[name]; {
	case own == nil || isWhiteout(own):
		parent.children[name] = &entry{Inode: &tree.Inode{
			Mode: tree.ModeChar, UID: uint32(h.Uid), GID: uint32(h.Gid), MTime: date}}
	case own.IsDir():
		own.setXattr(xattrOpaque, "y")
	}
	// Any other entry of this layer hides what is below by being there.
	return nil
}

func isWhiteout(e *entry) bool {
	return e.Mode&tree.ModeType == tree.ModeChar && e.Major == 0 && e.Minor == 0
}

// linkTarget finds what a hard link points at, which must be in this layer.
func (s *snapshot) linkTarget(name string) (*entry, error) {
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("hard link to %q: %w", name, err)
	}
	dir, base := path.Split(path.Clean("/" + name))
	at, err := s.resolve(dir)
	if err != nil {
		return nil, fmt.Errorf("hard link to %q: %w", name, err)
	}
	e := s.lookup(append(at, base))
	switch {
	case e == nil:
		return nil, fmt.Errorf("hard link to %q, which this layer does not have", name)
	case e.IsDir():
		return nil, fmt.Errorf("hard link to the directory %q", name)
	}
	return e, nil
}

// lookup finds a path in this snapshot alone, following no links.
func (s *snapshot) lookup(elements []string) *entry {
	e := s.root
	for _, name := range elements {
		if !e.IsDir() {
			return nil
		}
		if e = e.children[name]; e == nil {
			return nil
		}
	}
	return e
}

// resolve follows the symbolic links of this layer in p. Links that point out
// of the root end at the root, as in a chroot.
func (s *snapshot) resolve(p string) ([]string, error) {
	todo := strings.Split(p, "/")
	var at []string
	for links := 0; len(todo) > 0; {
		name := todo[0]
		todo = todo[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			if len(at) > 0 {
				at = at[:len(at)-1]
			}
			continue
		}
		at = append(at, name)
		e := s.lookup(at)
		if e == nil || !e.IsSymlink() {
			continue
		}
		if links++; links > maxSymlinks {
			return nil, fmt.Errorf("more than %d symbolic links on the way to it", maxSymlinks)
		}
		at = at[:len(at)-1]
		if strings.HasPrefix(e.Target, "/") {
			at = at[:0]
		}
		todo = append(strings.Split(e.Target, "/"), todo...)
	}
	return at, nil
}

// makeParents returns the directory at that path. Directories the layer does
// not declare take owner, mode and attributes from the nearest layer below
// that has them; overlayfs would show the upper directory's otherwise.
func (s *snapshot) makeParents(elements []string, date time.Time) (*entry, error) {
	e := s.root
	for i, name := range elements {
		child := e.children[name]
		if child == nil {
			child = newDir(date)
			for below := s.parent; below != nil; below = below.parent {
				at, err := below.resolve(strings.Join(elements[:i+1], "/"))
				if err != nil {
					return nil, err
				}
				old := below.lookup(at)
				if old == nil {
					continue
				}
				if old.IsDir() {
					child.copyUp(old)
				}
				break
			}
			e.children[name] = child
		}
		if !child.IsDir() {
			return nil, fmt.Errorf("%s is not a directory in this layer", strings.Join(elements[:i+1], "/"))
		}
		e = child
	}
	return e, nil
}

func (e *entry) copyUp(old *entry) {
	e.Mode, e.UID, e.GID, e.MTime = old.Mode, old.UID, old.GID, old.MTime
	for name, value := range old.Xattrs {
		if !strings.HasPrefix(name, "trusted.") {
			e.setXattr(name, value)
		}
	}
}

// contentOf is the data of a regular file: a range of the layer, unless the
// tar stores it sparsely; then the whole file becomes a blob of its own.
func contentOf(ctx context.Context, c *fetch.Cache, tr *tar.Reader, h *tar.Header, blob string, off int64) (tree.Content, error) {
	if !isSparse(h) {
		return tree.Content{Blob: blob, Off: off, Size: h.Size}, nil
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

// account computes the disk usage that containerd records with a snapshot:
// what du would say on a file system with 4 KiB blocks.
func (s *snapshot) account() {
	const block = 4096
	seen := map[*tree.Inode]bool{}
	var walk func(*entry)
	walk = func(e *entry) {
		if seen[e.Inode] {
			return
		}
		seen[e.Inode] = true
		s.inodes++
		if e.IsDir() {
			s.size += block
		}
		s.size += (e.Data.Size + block - 1) / block * block
		for _, child := range e.children {
			walk(child)
		}
	}
	walk(s.root)
}

// nodes lists the snapshot's files below dir, parents first, in order.
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
