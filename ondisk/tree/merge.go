package tree

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// maxLinks is the maximum number of symbolic links in a path. It equals the kernel's limit.
const maxLinks = 40

// Merge merges layers, in order, into one tree. The result is sorted by path: the root "." comes
// first, and parents come before their children.
//
//   - Directories of the same path are merged. They keep the attributes of the first layer that has
//     them, because an overlay from a working copy must not change the mode of /tmp.
//   - A path that leads through a symbolic link of an earlier layer follows it (lib/modules becomes
//     usr/lib/modules on a usr-merged base).
//   - Missing parents are owned by root, with mode 0755 and the time now.
//   - Any other path that is in two layers is an error, unless the later layer sets Replace. All
//     such errors are reported.
func Merge(layers []Layer, now time.Time) ([]Node, error) {
	m := newMerger(now)
	for _, l := range layers {
		m.add(l)
	}
	if len(m.errs) > 0 {
		return nil, joinErrors(m.errs)
	}
	if _, ok := m.nodes["."]; !ok {
		m.nodes["."] = Node{Path: ".", Inode: m.dir()}
	}
	return m.list(), nil
}

type merger struct {
	nodes map[string]Node
	now   time.Time
	errs  []error
	// flattening is set in Flatten: a directory then replaces anything else.
	flattening bool
	// resolved caches the resolved paths of directories for the current layer.
	resolved map[string]string
	// children has the children of each directory. It is nil until a path is dropped.
	children map[string]map[string]bool
}

func newMerger(now time.Time) *merger {
	return &merger{nodes: map[string]Node{}, now: now, resolved: map[string]string{}}
}

// set stores a node at its path.
func (m *merger) set(n Node) {
	if old, ok := m.nodes[n.Path]; ok && old.IsSymlink() != n.IsSymlink() {
		clear(m.resolved) // cached paths may lead through it
	}
	m.nodes[n.Path] = n
	if m.children != nil {
		m.child(n.Path)
	}
}

func (m *merger) child(p string) {
	dir := path.Dir(p)
	if m.children[dir] == nil {
		m.children[dir] = map[string]bool{}
	}
	m.children[dir][p] = true
}

func (m *merger) list() []Node {
	out := make([]Node, 0, len(m.nodes))
	for _, n := range m.nodes {
		out = append(out, n)
	}
	sortNodes(out)
	return out
}

func (m *merger) dir() *Inode { return &Inode{Mode: ModeDir | 0o755, MTime: m.now} }

// LayerError is a problem with a layer or with one of its paths.
type LayerError struct {
	Layer, Path string // Path may be empty
	Err         error
}

func (e *LayerError) Error() string {
	if e.Path == "" {
		return "layer " + e.Layer + ": " + e.Err.Error()
	}
	return "layer " + e.Layer + ": " + e.Path + ": " + e.Err.Error()
}

func (e *LayerError) Unwrap() error { return e.Err }

func (m *merger) errorf(layer, path, format string, args ...any) {
	m.errs = append(m.errs, &LayerError{layer, path, fmt.Errorf(format, args...)})
}

func (m *merger) add(l Layer) {
	m.remove(l)
	clear(m.resolved)
	nodes := slices.Clone(l.Nodes)
	sortNodes(nodes)
	seen := make(map[string]string, len(nodes)) // maps a final path to the path in the layer
	for _, n := range nodes {
		if n.Layer == "" {
			n.Layer = l.Name
		}
		if err := checkPath(n.Path); err != nil {
			m.errorf(n.Layer, "", "%w", err)
			continue
		}
		where, err := m.place(n, seen)
		if err != nil {
			m.errorf(n.Layer, n.Path, "%w", err)
			continue
		}
		if other, ok := seen[where]; ok {
			if old := m.nodes[where]; !n.IsDir() || !old.IsDir() {
				if other == n.Path {
					m.errorf(n.Layer, n.Path, "occurs twice in this layer")
				} else {
					m.errorf(n.Layer, n.Path, "is the same file as %s of this layer, through a symbolic link; keep one of them", other)
				}
				continue
			}
		}
		seen[where] = n.Path
		n.Path = where
		m.put(n, l.Replace)
	}
}

// put adds n, whose parents must exist.
func (m *merger) put(n Node, replace bool) {
	old, ok := m.nodes[n.Path]
	switch {
	case !ok:
		m.set(n)
	case old.IsDir() && n.IsDir():
	case old.IsDir():
		m.errorf(n.Layer, n.Path, "is a directory in layer %s and %s here; remove one of them", old.layer(), n.kind())
	case n.IsDir():
		m.errorf(n.Layer, n.Path, "is a directory here and %s in layer %s; remove one of them", old.kind(), old.layer())
	case replace:
		m.set(n)
	default:
		m.errorf(n.Layer, n.Path, "layer %s already has it: set `replace: true` on this one to replace it", old.layer())
	}
}

// remove removes the paths listed in the layer's Remove.
func (m *merger) remove(l Layer) {
	for _, p := range l.Remove {
		if err := checkPath(p); err != nil || p == "." {
			m.errorf(l.Name, "", "removing %q: not a clean relative path", p)
			continue
		}
		where, err := m.resolve(path.Dir(p), nil)
		if err != nil {
			m.errorf(l.Name, "", "removing %s: %w", p, err)
			continue
		}
		where = path.Join(where, path.Base(p))
		m.drop(where, true)
	}
}

// place returns the resolved path of a node of a layer. It adds missing parents.
func (m *merger) place(n Node, seen map[string]string) (string, error) {
	if n.Path == "." {
		if !n.IsDir() {
			return "", fmt.Errorf("the root must be a directory, not %s", n.kind())
		}
		return ".", nil
	}
	parent, err := m.resolve(path.Dir(n.Path), seen)
	if err != nil {
		return "", err
	}
	m.mkdirAll(parent, n.Layer)
	where := path.Join(parent, path.Base(n.Path))
	// If an earlier layer's link leads to a directory, the node is that directory.
	if old, ok := m.nodes[where]; ok && n.IsDir() && old.IsSymlink() && !m.flattening {
		if _, mine := seen[where]; !mine {
			where, err = m.resolve(where, seen)
			if err != nil {
				return "", err
			}
			m.mkdirAll(path.Dir(where), n.Layer)
		}
	}
	return where, nil
}

func (m *merger) mkdirAll(dir, layer string) {
	for p := dir; ; p = path.Dir(p) {
		if old, ok := m.nodes[p]; ok && (old.IsDir() || !m.flattening) {
			return
		}
		m.set(Node{Path: p, Layer: layer, Inode: m.dir()})
		if p == "." {
			return
		}
	}
}

// drop removes everything below dir. If itself is set, it also removes dir.
func (m *merger) drop(dir string, itself bool) {
	if m.children == nil {
		m.children = map[string]map[string]bool{}
		for p := range m.nodes {
			if p != "." {
				m.child(p)
			}
		}
	}
	clear(m.resolved)
	todo := slices.Collect(maps.Keys(m.children[dir]))
	delete(m.children, dir)
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = slices.AppendSeq(todo[:len(todo)-1], maps.Keys(m.children[p]))
		delete(m.children, p)
		delete(m.nodes, p)
	}
	if itself && dir != "." {
		delete(m.nodes, dir)
		delete(m.children[path.Dir(dir)], dir)
	}
}

// resolve follows the symbolic links in a directory's path within the tree: an absolute target
// starts at its root, and ".." does not lead above it. A link from the same layer (seen) is an
// error, because only a malicious or broken archive writes through its own link.
func (m *merger) resolve(dir string, seen map[string]string) (string, error) {
	// Find the nearest parent that is already resolved, and the rest of the path.
	known, rest := ".", []string{}
	for p := dir; p != "." && p != "/" && p != ""; p = path.Dir(p) {
		if at, ok := m.resolved[p]; ok {
			known = at
			break
		}
		rest = append(rest, p)
	}
	for _, p := range slices.Backward(rest) {
		at, err := m.step(known, path.Base(p), seen)
		if err != nil {
			return "", err
		}
		m.resolved[p] = at
		known = at
	}
	return known, nil
}

// step resolves a name in the directory at. The name may be a symbolic link.
func (m *merger) step(at, name string, seen map[string]string) (string, error) {
	rest := []string{name} // a stack: the next name is last
	for links := 0; len(rest) > 0; {
		c, after, more := strings.Cut(rest[len(rest)-1], "/")
		rest[len(rest)-1] = after
		if !more {
			rest = rest[:len(rest)-1]
		}
		switch c {
		case "", ".":
			continue
		case "..":
			at = path.Dir(at)
			continue
		}
		next := below(at, c)
		n, ok := m.nodes[next]
		switch {
		case !ok || n.IsDir():
			at = next
		case n.IsSymlink():
			if _, mine := seen[next]; mine {
				return "", fmt.Errorf("is below %s, a symbolic link of the same layer; remove one of them", next)
			}
			if links++; links > maxLinks {
				return "", fmt.Errorf("symbolic links loop at %s (of layer %s); correct where they point", next, n.layer())
			}
			if strings.HasPrefix(n.Target, "/") {
				at = "."
			}
			rest = append(rest, n.Target)
		case m.flattening && seen[next] == "":
			at = next
		default:
			return "", fmt.Errorf("is below %s, which is %s (of layer %s); remove one of them", next, n.kind(), n.layer())
		}
	}
	return at, nil
}

// below returns the path of a name inside a directory.
func below(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// packInside is the fix for paths that lead out of the tree.
const packInside = "pack it again from inside its directory (tar -C DIR -cf FILE .)"

// checkPath returns an error for an invalid path of a node.
func checkPath(p string) error {
	switch {
	case p == "":
		return errors.New("an entry without a name")
	case strings.ContainsRune(p, 0):
		return fmt.Errorf("%q: name contains a zero byte", p)
	case strings.HasPrefix(p, "/"):
		return fmt.Errorf("%q: absolute path; %s", p, packInside)
	}
	for c := range strings.SplitSeq(p, "/") {
		if c == ".." {
			return fmt.Errorf("%q: path leads out of the tree (..); %s", p, packInside)
		}
		if len(c) > 255 {
			return fmt.Errorf("%q: name longer than 255 bytes", p)
		}
	}
	if path.Clean(p) != p {
		return fmt.Errorf("%q: not a clean path", p)
	}
	return nil
}

func (n Node) layer() string {
	if n.Layer == "" {
		return "(none)"
	}
	return n.Layer
}

// kind returns the file type as words.
func (i *Inode) kind() string {
	switch i.Mode & ModeType {
	case ModeDir:
		return "a directory"
	case ModeRegular:
		return "a file"
	case ModeSymlink:
		return "a symbolic link"
	case ModeBlock, ModeChar:
		return "a device"
	case ModeFIFO:
		return "a FIFO"
	case ModeSocket:
		return "a socket"
	}
	return fmt.Sprintf("of unknown type %#o", i.Mode&ModeType)
}

// sortNodes sorts nodes by path, the root first. The order of strings puts directories before their
// contents.
func sortNodes(nodes []Node) {
	slices.SortStableFunc(nodes, func(a, b Node) int {
		if a.Path == "." || b.Path == "." {
			return boolInt(b.Path == ".") - boolInt(a.Path == ".")
		}
		return strings.Compare(a.Path, b.Path)
	})
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// maxErrors limits the number of errors reported for one archive.
const maxErrors = 50

func joinErrors(errs []error) error {
	if len(errs) > maxErrors {
		more := len(errs) - maxErrors
		errs = append(errs[:maxErrors:maxErrors], fmt.Errorf("problems of this kind that are not listed: %d", more))
	}
	return errors.Join(errs...)
}
