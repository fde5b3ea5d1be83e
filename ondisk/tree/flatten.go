package tree

import (
	"fmt"
	"path"
	"strings"
	"time"
)

const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// Flatten merges the layers of a container image into its root file system. Later layers take
// precedence, and whiteout entries (.wh.NAME, .wh..wh..opq) remove paths. A directory replaces any
// other file at its path, even a symbolic link to a directory. Symbolic links in the parents of a
// path are followed. now is the modification time of directories that are in no layer.
func Flatten(layers []Layer, now time.Time) ([]Node, error) {
	m := newMerger(now)
	m.flattening = true
	for _, l := range layers {
		m.flatten(l)
	}
	if len(m.errs) > 0 {
		return nil, joinErrors(m.errs)
	}
	return Merge([]Layer{{Name: "image", Nodes: m.list()}}, m.now)
}

func (m *merger) flatten(l Layer) {
	clear(m.resolved)
	var plain []Node
	type mark struct {
		where  string
		itself bool
	}
	m.replaceByDirs(l.Nodes)
	var marks []mark // applied only after all are found, because they may affect each other
	for _, n := range l.Nodes {
		dir, base := path.Split(n.Path)
		name, isWhiteout := strings.CutPrefix(base, whiteout)
		if !isWhiteout {
			plain = append(plain, n)
			continue
		}
		where, err := m.resolve(path.Clean(dir), nil)
		if err != nil {
			m.errorf(l.Name, n.Path, "%w", err)
			continue
		}
		switch {
		case base == opaque:
			marks = append(marks, mark{where, false})
		case strings.HasPrefix(name, whiteout):
			// Ignore aufs's internal files, which old versions of docker put into archives.
		case name == "" || name == "." || name == "..":
			m.errorf(l.Name, n.Path, "unknown whiteout")
		default:
			marks = append(marks, mark{below(where, name), true})
		}
	}
	for _, w := range marks {
		m.drop(w.where, w.itself)
	}
	// m.resolved has only links of lower layers.
	clear(m.resolved)
	sortNodes(plain)
	seen := map[string]string{}
	for _, n := range plain {
		if err := checkPath(n.Path); err != nil {
			m.errorf(l.Name, "", "%w", err)
			continue
		}
		where, err := m.place(n, seen)
		if err != nil {
			m.errorf(l.Name, n.Path, "%w", err)
			continue
		}
		if other, ok := seen[where]; ok && other != n.Path {
			m.errs = append(m.errs, fmt.Errorf("layer %s: %s: is the same file as %s, through a symbolic link", l.Name, n.Path, other))
			continue
		}
		seen[where] = n.Path
		if old, ok := m.nodes[where]; ok && old.IsDir() && !n.IsDir() {
			m.drop(where, true)
		}
		n.Path = where
		m.set(n)
	}
}

// replaceByDirs puts this layer's directories in place of other files of lower layers. It must run
// before the layer's whiteouts are applied, because whiteouts refer to the new directories.
func (m *merger) replaceByDirs(nodes []Node) {
	var dirs []Node
	for _, n := range nodes {
		if n.IsDir() && checkPath(n.Path) == nil {
			dirs = append(dirs, n)
		}
	}
	sortNodes(dirs)
	for _, n := range dirs {
		parent, err := m.resolve(path.Dir(n.Path), nil)
		if err != nil {
			continue // the error is reported when the node is placed
		}
		n.Path = below(parent, path.Base(n.Path))
		if old, ok := m.nodes[n.Path]; ok && !old.IsDir() {
			m.set(n)
		}
	}
}
