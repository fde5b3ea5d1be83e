// Package yamltree reads and edits YAML documents in place: comments, order and
// positions stay as a person wrote them.
package yamltree

import (
	"slices"

	"go.yaml.in/yaml/v3"
)

// Deref is what a node stands for: itself, or what its alias names.
func Deref(n *yaml.Node) *yaml.Node {
	for n != nil && n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// Index is where a mapping has a key among its Content, whose value follows;
// -1 if it has not, or m is not a mapping.
func Index(m *yaml.Node, key string) int {
	if m == nil || m.Kind != yaml.MappingNode {
		return -1
	}
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			return i
		}
	}
	return -1
}

// Value is a mapping's value as it stands there, perhaps an alias; nil if
// the key is missing.
func Value(m *yaml.Node, key string) *yaml.Node {
	if i := Index(m, key); i >= 0 {
		return m.Content[i+1]
	}
	return nil
}

// Get is a mapping's value, through aliases; nil if the key is missing.
func Get(m *yaml.Node, key string) *yaml.Node { return Deref(Value(Deref(m), key)) }

// Text is a scalar's text, empty for anything else.
func Text(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode {
		return ""
	}
	return n.Value
}

// Set gives a mapping's key a value, at the end where it is new.
func Set(m *yaml.Node, key string, value *yaml.Node) {
	if i := Index(m, key); i >= 0 {
		m.Content[i+1] = value
		return
	}
	m.Content = append(m.Content, String(key), value)
}

// Child is a mapping's value of that kind. Where the key is missing, or has a
// value of another kind, as null, it is made.
func Child(m *yaml.Node, key string, kind yaml.Kind) *yaml.Node {
	n := Value(m, key)
	if n == nil {
		n = &yaml.Node{Kind: kind}
		Set(m, key, n)
	} else if n.Kind != kind {
		*n = yaml.Node{Kind: kind}
	}
	return n
}

// Remove takes a key and its value out of a mapping.
func Remove(m *yaml.Node, key string) {
	if i := Index(m, key); i >= 0 {
		m.Content = append(m.Content[:i:i], m.Content[i+2:]...)
	}
}

// String is a text, quoted where it would be read as something else.
func String(s string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
}

// Clone returns a copy of a tree; an alias in it stands for the copy of its anchor.
func Clone(n *yaml.Node) *yaml.Node {
	copies := map[*yaml.Node]*yaml.Node{}
	var clone func(n *yaml.Node) *yaml.Node
	clone = func(n *yaml.Node) *yaml.Node {
		if n == nil || copies[n] != nil {
			return copies[n]
		}
		c := *n
		copies[n] = &c
		c.Alias, c.Content = clone(n.Alias), make([]*yaml.Node, len(n.Content))
		for i := range n.Content {
			c.Content[i] = clone(n.Content[i])
		}
		return &c
	}
	return clone(n)
}

// Resolve returns a copy of a tree in which aliases and merge keys (<<) stand for their
// values, with the lines of the original. As for kubectl, what stands later in a
// mapping counts, also a merge behind a key. The tree must have passed Check.
func Resolve(n *yaml.Node) *yaml.Node {
	done := map[*yaml.Node]*yaml.Node{}
	var resolve func(n *yaml.Node) *yaml.Node
	resolve = func(n *yaml.Node) *yaml.Node {
		n = Deref(n)
		if done[n] != nil {
			return done[n]
		}
		c := *n
		done[n] = &c
		c.Content = nil
		for i, v := range n.Content {
			switch {
			case n.Kind != yaml.MappingNode:
				c.Content = append(c.Content, resolve(v))
			case i%2 == 0:
			case n.Content[i-1].ShortTag() != "!!merge":
				put(&c, n.Content[i-1], resolve(v))
			default:
				merged := []*yaml.Node{resolve(v)}
				if merged[0].Kind == yaml.SequenceNode {
					merged = merged[0].Content
				}
				for _, m := range slices.Backward(merged) { // the first one counts
					for k := 0; m.Kind == yaml.MappingNode && k+1 < len(m.Content); k += 2 {
						put(&c, m.Content[k], m.Content[k+1])
					}
				}
			}
		}
		return &c
	}
	return resolve(n)
}

// put is Set with a key that keeps its position.
func put(m, key, value *yaml.Node) {
	if i := Index(m, key.Value); i >= 0 {
		m.Content[i+1] = value
		return
	}
	m.Content = append(m.Content, key, value)
}
