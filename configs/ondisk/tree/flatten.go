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
// (.wh.NAME, .wh..wh..opq) take away and are not kept themselves. Now dates
// directories that no layer has.
func Flatten(layers []Layer, now time.Time) ([]Node, error) {
	m := newMerger(now)
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
