package configs

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// CheckManifest reads a file of Kubernetes objects and returns every problem
// in it, each with its line and the number of its document.
func CheckManifest(file string, data []byte) Problems {
	var probs Problems
	if err := yamltree.TooDense(data); err != nil {
		return append(probs, faultProblem(file, err))
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	objects := 0
	for n := 1; len(probs) <= maxProblems; n++ {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			// The parser cannot go on behind an error.
			p := syntaxProblem(file, data, err)
			p.Line = max(p.Line, 1) // of the first line the parser says nothing
			if bytes.Contains(data, []byte("{{")) {
				p.Msg += " (" + Unrendered + ")"
			}
			p.Path = "document " + strconv.Itoa(documentAt(data, p.Line))
			return append(probs, p)
		}
		if len(doc.Content) != 1 || isNull(doc.Content[0]) {
			continue // nothing between two ---
		}
		objects++
		d := &document{file: file}
		if root := doc.Content[0]; root.Kind == yaml.MappingNode && d.decodes(root) || root.Kind != yaml.MappingNode {
			d.checkObject(root)
		}
		for _, p := range d.probs {
			p.Path = strings.TrimSuffix("document "+strconv.Itoa(n)+": "+p.Path, ": ")
			probs = append(probs, p)
		}
	}
	if objects == 0 && len(probs) == 0 {
		probs = append(probs, Problem{File: file, Line: 1, Col: 1, Msg: "has no Kubernetes object in it"})
	}
	return probs.first(file, 0)
}

// documentAt is the number of the document that a line is in.
func documentAt(data []byte, line int) int {
	n, i, content := 1, 0, false
	for l := range strings.Lines(string(data)) {
		if i++; i >= line && line > 0 {
			break
		}
		text := strings.TrimRight(l, "\r\n")
		if text == "---" || strings.HasPrefix(text, "--- ") {
			if content {
				n++
			}
			content = true // an empty document counts too
		} else if t := strings.TrimSpace(text); t != "" && t[0] != '#' {
			content = true
		}
	}
	return n
}

// checkObject reports what keeps an object from being applied at all.
func (d *document) checkObject(root *yaml.Node) {
	if root.Kind != yaml.MappingNode {
		d.problem(root, "", "expected a Kubernetes object (a mapping with apiVersion and kind), got %s", shape(root))
		return
	}
	for _, key := range []string{"apiVersion", "kind"} {
		switch n := yamltree.Value(root, key); {
		case n == nil || isNull(n):
			d.problem(root, key, "is missing")
		case n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str":
			d.problem(n, key, "must be a string")
		}
	}
	if strings.HasPrefix(yamltree.Text(yamltree.Value(root, "apiVersion")), "edgebake.io/") {
		d.problem(yamltree.Value(root, "apiVersion"), "apiVersion", "an edgebake document is not a Kubernetes object")
		return
	}
	if strings.HasSuffix(yamltree.Text(yamltree.Value(root, "kind")), "List") && yamltree.Value(root, "items") != nil {
		items := yamltree.Value(root, "items")
		if items.Kind != yaml.SequenceNode {
			d.problem(items, "items", "must be a list")
			return
		}
		for _, item := range items.Content {
			d.checkObject(item)
		}
		return
	}
	name := nodeAt(root, "metadata.name")
	switch {
	case name == nil && nodeAt(root, "metadata.generateName") != nil:
		d.problem(nodeAt(root, "metadata.generateName"), "metadata.generateName", "would make another object each time it is applied; give metadata.name")
	case name == nil || isNull(name):
		d.problem(root, "metadata.name", "is missing")
	case name.Kind != yaml.ScalarNode || name.ShortTag() != "!!str" || name.Value == "":
		d.problem(name, "metadata.name", "must be a string that is not empty")
	}
}

// Unrendered is the hint for a manifest with {{ }} in it.
const Unrendered = "it looks like a chart's template: render it first, e.g. with helm template"

// complexKey is the first key of a mapping that is not a plain word, as
// {{ .Values.name }} is to a parser of YAML.
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

// decodes reports what the form cannot have, e.g. a key given twice.
func (d *document) decodes(root *yaml.Node) bool {
	if d.faults(root) {
		return false
	}
	if key := complexKey(root); key != nil {
		d.problem(key, "", "a key must be a plain word (%s)", Unrendered)
		return false
	}
	root = yamltree.Clone(root) // whoever reports a word names it as it was written
	if bad := yamltree.AsKubectl(root); bad != nil {
		d.problem(bad, "", "an object is sent as JSON, which has no %s here", bad.Value)
		return false
	}
	if d.faults(root) { // of keys that are equal as kubectl reads them
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
			d.typeError(e)
		}
	default:
		d.report(syntaxProblem(d.file, nil, err))
	}
	return false
}

// faults reports what package yaml cannot decode at a bounded cost.
func (d *document) faults(root *yaml.Node) bool {
	found := yamltree.Check(root)
	for _, f := range found {
		d.report(faultProblem(d.file, f))
	}
	return len(found) > 0
}

func faultProblem(file string, err error) Problem {
	var f yamltree.Fault
	if !errors.As(err, &f) {
		f.Msg = err.Error()
	}
	return Problem{File: file, Line: f.Line, Msg: atMost(maxMsg, f.Msg)}
}

// typeError is one line of yaml's: "line 3: mapping key ... already defined".
func (d *document) typeError(text string) {
	p := Problem{File: d.file, Msg: text}
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		at, msg, _ := strings.Cut(rest, ": ")
		if n, err := strconv.Atoi(at); err == nil {
			p.Line, p.Msg = n, msg
		}
	}
	d.report(p)
}
