package strict

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Format describes the documents that Read accepts.
type Format struct {
	APIVersion string
	Kinds      []string
	// Limits returns the limits for a document of this kind.
	Limits func(kind string) Limits
	// Followed is the kind of document that other documents may follow in the same file.
	Followed string
	// EmptyHint and KindHint are added to the messages about an empty document and an unknown kind.
	EmptyHint, KindHint string
}

// Limits limits the size of a document whose aliases are expanded.
type Limits struct {
	Nodes int // number of values
	Items int // number of items in a list
	// More contains lists with their own limit, by path. The limit replaces Items.
	More map[string]int
}

// Position is a position in a file. Line and Col begin at 1; 0 means unknown.
type Position struct{ Line, Col int }

// Document is a parsed YAML document that is being decoded into a Go value.
type Document struct {
	File string
	Kind string
	Root *yaml.Node
	// More contains the documents that follow in the same file.
	More []*yaml.Node
	// Probs contains the problems that were found so far.
	Probs Problems
	// All keeps every problem. Otherwise, MaxProblems are kept and the others only counted, because
	// an untrusted document may have a problem in every value.
	All bool

	format *Format
	limits Limits
	into   reflect.Type // type of the struct into which Root is decoded
	nodes  int
	untold int // number of problems that were only counted
}

// DefaultLimits are the limits for documents from an operator.
var DefaultLimits = Limits{Nodes: 200_000, Items: 200_000}

// New returns a Document for a tree that was parsed elsewhere.
func New(file string, root *yaml.Node, l Limits) *Document {
	return &Document{File: file, Root: root, limits: l}
}

// Read parses data, and checks the version and the kind of the document.
func Read(file string, data []byte, f *Format) (*Document, Problems) {
	docs, probs := parse(file, data)
	if probs != nil {
		return nil, probs
	}
	d := New(file, nil, DefaultLimits)
	d.format = f
	fail := func(n *yaml.Node, path, format string, args ...any) (*Document, Problems) {
		if n == nil {
			n = &yaml.Node{Line: 1, Column: 1}
		}
		d.Addf(n, path, format, args...)
		return nil, d.Probs
	}
	if len(docs) == 0 {
		return fail(nil, "", "the document is empty%s", f.EmptyHint)
	}
	if len(docs[0].Content) != 1 || docs[0].Content[0].Kind != yaml.MappingNode {
		return fail(docs[0], "", "the document must be a mapping that begins with apiVersion: %s", f.APIVersion)
	}
	d.Root = docs[0].Content[0]
	for _, name := range []string{"apiVersion", "kind"} {
		v := yamltree.Value(d.Root, name)
		if v == nil {
			for n := 0; n < len(d.Root.Content); n += 2 {
				if key := d.Root.Content[n]; DidYouMean(key.Value, []string{name}) != "" {
					return fail(key, key.Value, "unknown field%s", DidYouMean(key.Value, []string{name}))
				}
			}
			return fail(d.Root, name, "is missing; an edgebake document begins with apiVersion: %s and kind: %s", f.APIVersion, strings.Join(f.Kinds, ", "))
		}
		if v.Kind != yaml.ScalarNode {
			return fail(v, name, "must be a string")
		}
	}
	version := yamltree.Value(d.Root, "apiVersion")
	d.Kind = yamltree.Text(yamltree.Value(d.Root, "kind"))
	d.limits = f.Limits(d.Kind)
	if version.Value != f.APIVersion {
		return fail(version, "apiVersion", "%q is not supported by this edgebake, which reads %s", version.Value, f.APIVersion)
	}
	for _, n := range docs[1:] {
		if d.Kind != f.Followed {
			return fail(n, "", "a second document begins here; put each into its own file")
		}
		if len(n.Content) == 1 && !yamltree.IsNull(n.Content[0]) { // skip an empty document
			d.More = append(d.More, n.Content[0])
		}
	}
	return d, nil
}

func parse(file string, data []byte) (docs []*yaml.Node, probs Problems) {
	if err := yamltree.DenserThan(data, maxMarks); err != nil {
		return nil, Problems{FaultProblem(file, err)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		n := new(yaml.Node)
		err := dec.Decode(n)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			return nil, Problems{SyntaxProblem(file, data, err)}
		}
		docs = append(docs, n)
	}
}

// maxMarks limits the number of fields and items in a text. It is checked before parsing.
const maxMarks = 2_000_000

// FaultProblem converts an error, such as a yamltree.Fault, to a Problem.
func FaultProblem(file string, err error) Problem {
	var f yamltree.Fault
	if !errors.As(err, &f) {
		f.Msg = err.Error()
	}
	return Problem{File: file, Line: f.Line, Msg: atMost(maxMsg, f.Msg)}
}

// Parse decodes the document into a struct, sets its defaults and validates it.
func (d *Document) Parse(kind string, into any, validate func() Problems) error {
	if d.Kind != kind {
		return d.WrongKind(kind)
	}
	d.DecodeInto(into)
	ApplyDefaults(into)
	if v, ok := into.(interface{ SetDefaults() }); ok {
		v.SetDefaults()
	}
	if d.Overflowed() {
		return d.Err()
	}
	undecoded := d.Probs
	for _, p := range validate() {
		d.AddValidation(undecoded, p)
	}
	return d.Err()
}

// Overflowed reports whether the document has too many values or too many problems.
func (d *Document) Overflowed() bool { return d.untold > 0 || d.nodes > d.limits.Nodes }

// AddValidation adds a problem of validation, with its position. It ignores a problem that is
// caused by an earlier one in undecoded: the field could not be decoded, or its name was misspelt.
func (d *Document) AddValidation(undecoded Problems, p Problem) {
	if slices.ContainsFunc(undecoded, func(u Problem) bool {
		return Covers(u.Path, p.Path) || !d.Has(u.meant) && Covers(u.meant, p.Path)
	}) {
		return
	}
	at := d.Find(p.Path)
	p.File, p.Line, p.Col = d.File, at.Line, at.Col
	d.Probs = append(d.Probs, p)
}

// Err returns the document's problems as an error, or nil.
func (d *Document) Err() error {
	if d.All {
		d.Probs.Sort()
		return d.Probs.Err()
	}
	return d.Probs.First(d.File, d.untold).Err()
}

// Covers reports whether path is outer, or the path of a field inside outer.
func Covers(outer, path string) bool {
	rest, ok := strings.CutPrefix(path, outer)
	return ok && outer != "" && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// Has reports whether the document has a field.
func (d *Document) Has(path string) bool {
	_, whole := d.at(path)
	return whole && path != ""
}

// Find returns the position of a field or, if the field is missing, of the nearest enclosing value.
func (d *Document) Find(path string) Position {
	n, _ := d.at(path)
	if n == nil {
		return Position{}
	}
	return Position{n.Line, n.Column}
}

// at returns the value at a path. If it is missing, at returns the nearest enclosing value, and
// whole is false.
func (d *Document) at(path string) (n *yaml.Node, whole bool) {
	n = yamltree.Deref(d.Root)
	for path != "" && n != nil {
		name, index, rest := firstStep(path)
		next := yamltree.Get(n, name)
		if index >= 0 && index < len(n.Content) && n.Kind == yaml.SequenceNode {
			next = yamltree.Deref(n.Content[index])
		}
		if next == nil {
			return n, false
		}
		n, path = next, rest
	}
	return n, n != nil
}

// firstStep splits the first step off a path such as users[0].name or labels["a.b/c"]. index is -1
// if the step is a name.
func firstStep(path string) (name string, index int, rest string) {
	inside, isIndex := strings.CutPrefix(path, "[")
	quoted, err := strconv.QuotedPrefix(inside)
	switch {
	case !isIndex:
		end := strings.IndexAny(path+".", ".[")
		name, index, rest = path[:end], -1, path[end:]
	case err == nil:
		name, _ = strconv.Unquote(quoted)
		index, rest = -1, inside[len(quoted):]
	default:
		inside, rest, _ = strings.Cut(inside, "]")
		if index, err = strconv.Atoi(inside); err != nil {
			index = -1
		}
	}
	return name, index, strings.TrimPrefix(strings.TrimPrefix(rest, "]"), ".")
}

// Addf adds a problem of the field at path, at the position of n.
func (d *Document) Addf(n *yaml.Node, path, format string, args ...any) {
	if d.Full() {
		d.untold++
		return
	}
	d.Add(Problem{File: d.File, Line: n.Line, Col: n.Column, Path: path, Msg: fmt.Sprintf(format, args...)})
}

// Full reports whether the limit of problems is reached. Further problems are only counted.
func (d *Document) Full() bool { return len(d.Probs) >= MaxProblems && !d.All }

// Add adds a problem. If the limit is reached, it only counts it.
func (d *Document) Add(p Problem) {
	if d.Full() {
		d.untold++
		return
	}
	p.Msg = atMost(maxMsg, p.Msg)
	d.Probs = append(d.Probs, p)
}

// WrongKind returns the error for a document of another kind than want. An empty want means any
// known kind.
func (d *Document) WrongKind(want string) error {
	at := d.Find("kind")
	p := Problem{File: d.File, Line: at.Line, Col: at.Col, Path: "kind"}
	switch {
	case want == "":
		p.Msg = fmt.Sprintf("unknown kind %q%s%s", d.Kind, DidYouMean(d.Kind, d.format.Kinds), d.format.KindHint)
	case slices.Contains(d.format.Kinds, d.Kind):
		p.Msg = fmt.Sprintf("expected a document of kind %s, got one of kind %s", want, d.Kind)
	default:
		p.Msg = fmt.Sprintf("unknown kind %q%s; write %s", d.Kind, DidYouMean(d.Kind, []string{want}), want)
	}
	return Problems{p}
}
