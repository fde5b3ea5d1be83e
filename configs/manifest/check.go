// Package manifest reads files of Kubernetes objects. It checks whether the objects can be applied,
// and packs the files for the Site of a control-plane node.
package manifest

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Check returns all problems of a file of Kubernetes objects. Each has its line and the number of
// its YAML document.
func Check(file string, data []byte) strict.Problems {
	var probs strict.Problems
	if err := yamltree.TooDense(data); err != nil {
		return append(probs, strict.FaultProblem(file, err))
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	objects := 0
	for n := 1; len(probs) <= strict.MaxProblems; n++ {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			// The parser cannot continue after a syntax error.
			p := strict.SyntaxProblem(file, data, err)
			if bytes.Contains(data, []byte("{{")) {
				p.Msg += " (" + Unrendered + ")"
			}
			p.Path = "document " + strconv.Itoa(n)
			return append(probs, p)
		}
		if len(doc.Content) != 1 || yamltree.IsNull(doc.Content[0]) {
			continue // an empty document
		}
		objects++
		d := strict.New(file, doc.Content[0], strict.DefaultLimits)
		if d.Root.Kind != yaml.MappingNode || Decodes(d) {
			checkObject(d, d.Root)
		}
		for _, p := range d.Probs {
			p.Path = strings.TrimSuffix("document "+strconv.Itoa(n)+": "+p.Path, ": ")
			probs = append(probs, p)
		}
	}
	if objects == 0 && len(probs) == 0 {
		probs = append(probs, strict.Problem{File: file, Line: 1, Col: 1, Msg: "contains no Kubernetes object"})
	}
	return probs.First(file, 0)
}

// checkObject reports why an object can never be applied.
func checkObject(d *strict.Document, root *yaml.Node) {
	if root.Kind != yaml.MappingNode {
		d.Addf(root, "", "expected a Kubernetes object (a mapping with apiVersion and kind), got %s", strict.Shape(root))
		return
	}
	for _, key := range []string{"apiVersion", "kind"} {
		switch n := yamltree.Value(root, key); {
		case n == nil || yamltree.IsNull(n):
			d.Addf(root, key, "is missing")
		case n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str":
			d.Addf(n, key, "must be a string")
		}
	}
	if strings.HasPrefix(yamltree.Text(yamltree.Value(root, "apiVersion")), "edgebake.io/") {
		d.Addf(yamltree.Value(root, "apiVersion"), "apiVersion", "an edgebake document is not a Kubernetes object")
		return
	}
	if strings.HasSuffix(yamltree.Text(yamltree.Value(root, "kind")), "List") && yamltree.Value(root, "items") != nil {
		items := yamltree.Value(root, "items")
		if items.Kind != yaml.SequenceNode {
			d.Addf(items, "items", "must be a list")
			return
		}
		for _, item := range items.Content {
			checkObject(d, item)
		}
		return
	}
	name := yamltree.At(root, "metadata.name")
	switch {
	case name == nil && yamltree.At(root, "metadata.generateName") != nil:
		d.Addf(yamltree.At(root, "metadata.generateName"), "metadata.generateName", "would make another object each time it is applied; set metadata.name")
	case name == nil || yamltree.IsNull(name):
		d.Addf(root, "metadata.name", "is missing")
	case name.Kind != yaml.ScalarNode || name.ShortTag() != "!!str" || name.Value == "":
		d.Addf(name, "metadata.name", "must be a string that is not empty")
	}
}

// Unrendered is the hint for a manifest that contains {{ }}.
const Unrendered = "it looks like a chart's template: render it first, e.g. with helm template"

// complexKey returns the first key that is not a scalar. A YAML parser reads
// {{ .Values.name }} as such a key.
func complexKey(n *yaml.Node) *yaml.Node {
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && c.Kind != yaml.ScalarNode && c.Kind != yaml.AliasNode {
			return c
		}
		if found := complexKey(c); found != nil {
			return found
		}
	}
	return nil
}

// Decodes reports whether kubectl can decode a document. If not, it adds the problems to d, such as
// a repeated key.
func Decodes(d *strict.Document) bool {
	if faults(d, d.Root) {
		return false
	}
	if key := complexKey(d.Root); key != nil {
		d.Addf(key, "", "a key must be a plain word (%s)", Unrendered)
		return false
	}
	root := yamltree.Clone(d.Root) // a copy, because problems quote the original text
	if bad := yamltree.AsKubectl(root); bad != nil {
		d.Addf(bad, "", "objects are sent as JSON, which cannot represent %s here", bad.Value)
		return false
	}
	if faults(d, root) { // in kubectl's types, more keys may be equal
		return false
	}
	var anything map[string]any
	err := root.Decode(&anything)
	var te *yaml.TypeError
	switch {
	case err == nil:
		return true
	case errors.As(err, &te):
		for _, e := range te.Errors {
			typeError(d, e)
		}
	default:
		d.Add(strict.SyntaxProblem(d.File, nil, err))
	}
	return false
}

// faults adds a problem to d for each part that would make package yaml slow. It reports whether
// there are any.
func faults(d *strict.Document, root *yaml.Node) bool {
	found := yamltree.Check(root)
	for _, f := range found {
		d.Add(strict.FaultProblem(d.File, f))
	}
	return len(found) > 0
}

// typeError adds a problem for one line of a yaml.TypeError, such as "line 3: cannot unmarshal
// ...".
func typeError(d *strict.Document, text string) {
	p := strict.Problem{File: d.File, Msg: text}
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		at, msg, _ := strings.Cut(rest, ": ")
		if n, err := strconv.Atoi(at); err == nil {
			p.Line, p.Msg = n, msg
		}
	}
	d.Add(p)
}
