package yamltree

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Limits for untrusted documents. Package yaml has no limits: it compares all keys of a mapping
// with each other, records an error for each equal pair, and may need a hundred times as much
// memory as the text.
const (
	maxKeys   = 10_000     // keys in a mapping
	maxPairs  = 50_000_000 // pairs of keys in a mapping, added up over all mappings
	maxValues = 500_000    // values, including those from aliases
	maxMarks  = 250_000    // marks in the text of a document, as TooDense counts them
	maxFaults = 50         // faults that are reported
	maxShown  = 100        // characters of a key in a message
)

// Fault is a reason why a tree cannot be decoded, with its line.
type Fault struct {
	Line int // 0 if unknown
	Msg  string
}

func (f Fault) Error() string {
	if f.Line == 0 {
		return f.Msg
	}
	return fmt.Sprintf("line %d: %s", f.Line, f.Msg)
}

// Check returns the reasons why an untrusted tree cannot be decoded at a limited cost: repeated
// keys, too many keys or values, or an alias inside the node that it refers to. Check itself needs
// linear time in the size of the tree, even with aliases.
func Check(root *yaml.Node) []Fault {
	c := checker{known: map[*yaml.Node]cost{}, within: map[*yaml.Node]bool{}}
	all := c.visit(root)
	switch {
	case all.values > maxValues:
		c.fault(root.Line, "the document is too large: with its aliases it has more than %d values", maxValues)
	case all.pairs > maxPairs:
		c.fault(root.Line, "the document is too large: its mappings have too many keys")
	}
	return c.faults
}

// cost is the cost of decoding a node.
type cost struct{ values, pairs int }

func (c *cost) add(o cost) {
	c.values = min(c.values+o.values, maxValues+1)
	c.pairs = min(c.pairs+o.pairs, maxPairs+1)
}

type checker struct {
	faults []Fault
	known  map[*yaml.Node]cost // costs of nodes that aliases may refer to
	within map[*yaml.Node]bool // nodes that are being visited
}

func (c *checker) fault(line int, format string, args ...any) {
	if len(c.faults) < maxFaults {
		c.faults = append(c.faults, Fault{line, fmt.Sprintf(format, args...)})
	}
}

func (c *checker) visit(n *yaml.Node) cost {
	if n == nil {
		return cost{}
	}
	if n.Kind == yaml.AliasNode {
		if c.within[n.Alias] {
			c.fault(n.Line, "the alias *%.*s refers to a node that contains it", maxShown, n.Value)
			return cost{values: 1}
		}
		if k, ok := c.known[n.Alias]; ok {
			return k
		}
		return c.visit(n.Alias)
	}
	if n.Anchor != "" {
		c.within[n] = true
		defer delete(c.within, n)
	}
	total := cost{values: 1}
	if n.Kind == yaml.MappingNode {
		total.pairs = c.keys(n)
	}
	for _, child := range n.Content {
		total.add(c.visit(child))
	}
	if n.Anchor != "" {
		c.known[n] = total
	}
	return total
}

// keys reports repeated keys of a mapping. It returns the number of pairs of keys that package yaml
// would compare.
func (c *checker) keys(m *yaml.Node) (pairs int) {
	type key struct {
		kind  yaml.Kind
		value string
	}
	n := len(m.Content) / 2
	if n > maxKeys {
		c.fault(m.Line, "a mapping with %d keys: want at most %d", n, maxKeys)
		return 0
	}
	first := make(map[key]int, n)
	for i := 0; i+1 < len(m.Content); i += 2 {
		k := m.Content[i]
		line, twice := first[key{k.Kind, k.Value}]
		if twice {
			c.fault(k.Line, "mapping key %s already defined at line %d", shown(k.Value), line)
			continue
		}
		first[key{k.Kind, k.Value}] = k.Line
	}
	return n * n / 2
}

func shown(key string) string {
	if r := []rune(key); len(r) > maxShown {
		key = string(r[:maxShown]) + "…"
	}
	return fmt.Sprintf("%q", key)
}

// Decode checks an untrusted tree and decodes it. The error lists the first problems.
func Decode(n *yaml.Node, into any) error {
	if faults := Check(n); len(faults) > 0 {
		errs := make([]string, len(faults))
		for i, f := range faults {
			errs[i] = f.Error()
		}
		return errors.New(few(errs))
	}
	err := n.Decode(into)
	var wrong *yaml.TypeError
	if errors.As(err, &wrong) {
		return errors.New(few(wrong.Errors))
	}
	return err
}

// few joins the first errors on one line, and counts the others.
func few(errs []string) string {
	const most = 5
	if more := len(errs) - most; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(errs[:most], "; "), more)
	}
	return strings.Join(errs, "; ")
}

// Parse parses the first document of an untrusted text. For an empty text, it returns a zero node.
func Parse(text []byte) (*yaml.Node, error) {
	if err := TooDense(text); err != nil {
		return nil, err
	}
	doc := new(yaml.Node)
	if err := yaml.NewDecoder(bytes.NewReader(text)).Decode(doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return doc, nil
}

// Unmarshal decodes the first document of an untrusted text. If the text is empty, into stays
// unchanged.
func Unmarshal(text []byte, into any) error {
	doc, err := Parse(text)
	if err != nil || doc.IsZero() {
		return err
	}
	return Decode(doc, into)
}

// TooDense returns an error if parsing a text would make too many nodes. It counts the characters
// that make nodes: a comma, a colon, a question mark, an opening bracket, and a dash before a
// blank. Each makes at most three nodes.
func TooDense(text []byte) error { return DenserThan(text, maxMarks) }

// DenserThan is like TooDense, with another limit.
func DenserThan(text []byte, limit int) error {
	marks, line, begin := 0, 1, true
	for i, b := range text {
		switch b {
		case ',', ':', '?', '[', '{':
			marks++
		case '-':
			if blank(text, i+1) {
				marks++
			}
			if begin && bytes.HasPrefix(text[i:], []byte("---")) && blank(text, i+3) {
				marks = 0 // each document is counted separately
			}
		case '\n':
			line++
		}
		begin = b == '\n'
		if marks > limit {
			return Fault{line, fmt.Sprintf("the document is too large: it has more than %d fields and items", limit)}
		}
	}
	return nil
}

func blank(text []byte, i int) bool {
	return i >= len(text) || strings.IndexByte(" \t\r\n", text[i]) >= 0
}
