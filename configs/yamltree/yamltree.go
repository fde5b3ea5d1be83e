// Package yamltree reads YAML documents and edits them in place. It keeps comments, order and
// positions.
package yamltree

import (
	"bytes"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Deref returns the node that an alias refers to. It returns any other node itself.
func Deref(n *yaml.Node) *yaml.Node {
	for n != nil && n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// Index returns the index of a key in the Content of a mapping, or -1. The value has the next
// index.
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

// Value returns the value of a key in a mapping, or nil if the key is missing. The value may be an
// alias.
func Value(m *yaml.Node, key string) *yaml.Node {
	if i := Index(m, key); i >= 0 {
		return m.Content[i+1]
	}
	return nil
}

// Get returns the value of a key in a mapping, or nil if the key is missing. It resolves aliases.
func Get(m *yaml.Node, key string) *yaml.Node { return Deref(Value(Deref(m), key)) }

// Text returns the text of a scalar, or "" for other nodes.
func Text(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode {
		return ""
	}
	return n.Value
}

// Set sets the value of a key in a mapping. It appends a new key.
func Set(m *yaml.Node, key string, value *yaml.Node) {
	if i := Index(m, key); i >= 0 {
		m.Content[i+1] = value
		return
	}
	m.Content = append(m.Content, String(key), value)
}

// Child returns the value of a key in a mapping. If the key is missing, or its value is of another
// kind, such as null, Child makes a value of this kind.
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

// Remove removes a key and its value from a mapping.
func Remove(m *yaml.Node, key string) {
	if i := Index(m, key); i >= 0 {
		m.Content = append(m.Content[:i:i], m.Content[i+2:]...)
	}
}

// String returns a node for a text. The encoder quotes it if it would be parsed as another type.
func String(s string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
}

// Clone returns a copy of a tree. An alias in the copy refers to the copy of its anchor.
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

// Resolve returns a copy of a tree in which aliases and merge keys (<<) are replaced by their
// values. The copy keeps the lines. As in kubectl, a later entry of a mapping replaces an earlier
// one, even if the later one comes from a merge. The tree must have passed Check.
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
				for _, m := range slices.Backward(merged) { // the first one takes precedence
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

// put is like Set, for a key that is a node, whose position is kept.
func put(m, key, value *yaml.Node) {
	if i := Index(m, key.Value); i >= 0 {
		m.Content[i+1] = value
		return
	}
	m.Content = append(m.Content, key, value)
}

// IsNull reports whether a node is null.
func IsNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// Plain returns a scalar with this tag.
func Plain(value, tag string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}
}

// Quoted returns a node for a text that the encoder always quotes.
func Quoted(s string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s, Style: yaml.DoubleQuotedStyle}
}

// Mapping returns a mapping of alternating keys and values.
func Mapping(pairs ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for i := 0; i < len(pairs); i += 2 {
		n.Content = append(n.Content, Plain(pairs[i].(string), "!!str"), pairs[i+1].(*yaml.Node))
	}
	return n
}

// List returns a list.
func List(items ...*yaml.Node) *yaml.Node {
	return &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Content: items}
}

// Encode encodes documents as YAML, indented by two blanks.
func Encode(docs ...*yaml.Node) ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	for _, n := range docs {
		if err := enc.Encode(n); err != nil {
			return nil, err
		}
	}
	err := enc.Close()
	return b.Bytes(), err
}

// Entries yields the keys and values of a mapping in order. It resolves aliases.
func Entries(m *yaml.Node) func(func(string, *yaml.Node) bool) {
	return func(yield func(string, *yaml.Node) bool) {
		for i := 0; i+1 < len(m.Content); i += 2 {
			if k := m.Content[i]; k.Kind == yaml.ScalarNode && !yield(k.Value, Deref(m.Content[i+1])) {
				return
			}
		}
	}
}

// Without returns a copy of a mapping without these keys.
func Without(m *yaml.Node, names ...string) *yaml.Node {
	out := Mapping()
	for k, v := range Entries(m) {
		if !slices.Contains(names, k) {
			out.Content = append(out.Content, Plain(k, "!!str"), v)
		}
	}
	return out
}

// plainKey matches keys that need no quotes.
var plainKey = regexp.MustCompile(`^[A-Za-z]{2,}$`)

// Clean returns a copy of a tree with sorted keys, and without comments, aliases and styles.
func Clean(n *yaml.Node) *yaml.Node {
	n = Deref(n)
	out := &yaml.Node{Kind: n.Kind, Tag: n.ShortTag(), Value: n.Value}
	if n.Kind == yaml.ScalarNode && out.Tag == "!!str" {
		out.Style = yaml.DoubleQuotedStyle
	}
	if n.Kind == yaml.MappingNode {
		sorted := maps.Collect(Entries(n))
		for _, k := range slices.Sorted(maps.Keys(sorted)) {
			key := Quoted(k)
			if plainKey.MatchString(k) {
				key = Plain(k, "!!str")
			}
			out.Content = append(out.Content, key, Clean(sorted[k]))
		}
		return out
	}
	for _, c := range n.Content {
		out.Content = append(out.Content, Clean(c))
	}
	return out
}

// At returns the value at a dotted path, or nil.
func At(n *yaml.Node, path string) *yaml.Node {
	for part := range strings.SplitSeq(path, ".") {
		n = Get(n, part)
	}
	return n
}

// SetAt sets the field at path below m. It makes missing mappings.
func SetAt(m, value *yaml.Node, path ...string) {
	for _, key := range path[:len(path)-1] {
		n := Get(m, key)
		if n == nil {
			n = Mapping()
			Set(m, key, n)
		} else if n.Kind != yaml.MappingNode {
			*n = *Mapping() // the node was null
		}
		m = n
	}
	if n := Get(m, path[len(path)-1]); n != nil {
		*n = *value
		return
	}
	Set(m, path[len(path)-1], value)
}

// ListAt returns the list at path below m. It makes a missing list.
func ListAt(m *yaml.Node, path ...string) *yaml.Node {
	name := strings.Join(path, ".")
	if list := At(m, name); list != nil && list.Kind == yaml.SequenceNode {
		return list
	}
	SetAt(m, List(), path...)
	return At(m, name)
}

// True reports whether a node is the boolean true.
func True(n *yaml.Node) bool {
	yes, err := strconv.ParseBool(Text(n))
	return err == nil && yes
}

// itemsAtOnce is the number of items that EncodeWithList encodes together.
const itemsAtOnce = 100

// EncodeWithList encodes a mapping that is followed by one more field: a list, whose items form
// converts. It encodes the list in parts, because the encoder of package yaml keeps 200 bytes for
// each of its events.
func EncodeWithList(m *yaml.Node, key string, items []*yaml.Node, form func(*yaml.Node) *yaml.Node) ([]byte, error) {
	out, err := Encode(m)
	for i := 0; i < len(items) && err == nil; i += itemsAtOnce {
		part := List()
		for _, item := range items[i:min(i+itemsAtOnce, len(items))] {
			part.Content = append(part.Content, form(item))
		}
		var b []byte
		b, err = Encode(Mapping(key, part))
		if i > 0 {
			b = bytes.TrimPrefix(b, []byte(key+":\n"))
		}
		out = append(out, b...)
	}
	return out, err
}
