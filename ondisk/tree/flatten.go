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

// Flatten applies the layers of a container image to each other, as a
// container's root file system has them: later layers win, whiteout entries
// (.wh.NAME, .wh..wh..opq) take away and are not kept themselves. A directory that
// a layer lists takes the place of whatever else was there, a symbolic link to a
// directory too; what lies below a link is where the link points only if the layer
// lists no directory of that name. Now dates directories that no layer has.
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
	var marks []mark // carried out when all are found: none leads another astray
	for _, n := range l.Nodes {
		dir, base := path.Split(n.Path)
		name, gone := strings.CutPrefix(base, whiteout)
		if !gone {
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
			// What aufs kept for itself, as archives of old docker have it.
		case name == "" || name == "." || name == "..":
			m.errorf(l.Name, n.Path, "unknown whiteout")
		default:
			marks = append(marks, mark{below(where, name), true})
		}
	}
	for _, gone := range marks {
		m.drop(gone.where, gone.itself)
	}
	// So far paths led through links of the layers below alone; from here on those of
	// this layer count.
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

// replaceByDirs lays the layer's directories over what is not one in the layers
// below. It comes before the layer's marks, which are about its own directory then,
// and not about what a link that was there points to.
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
			continue // it is reported when the node is placed
		}
		n.Path = below(parent, path.Base(n.Path))
		if old, ok := m.nodes[n.Path]; ok && !old.IsDir() {
			m.set(n)
		}
	}
}
