package configs

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// componentForms are the fields of the documents of kubelet and kube-proxy, a line
// each: path, then what its value is; [] is an item of a list, * any key. The
// oracles' module writes it from Kubernetes' own types (TestComponentForms), which
// are too heavy for what runs on a machine.
//
//go:embed componentforms.txt
var componentForms string

// componentsOf is the minor version of Kubernetes that componentForms are of.
const componentsOf = 37

// componentForm is what a value of a component's document must be: a mapping with
// these fields, or one value of a kind.
type componentForm struct {
	value  string
	fields map[string]*componentForm
}

func readComponentForms() *componentForm {
	all := &componentForm{fields: map[string]*componentForm{}}
	for line := range strings.Lines(componentForms) {
		path, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		at := all
		for part := range strings.SplitSeq(strings.ReplaceAll(path, "[]", ".[]"), ".") {
			if at.fields[part] == nil {
				at.fields[part] = &componentForm{fields: map[string]*componentForm{}}
			}
			at = at.fields[part]
		}
		at.value = value
	}
	return all
}

// componentFields reports what kubelet or kube-proxy would reject, or read past
// without a word: a field that it does not know.
func (d *document) componentFields() {
	if form := readComponentForms().fields[d.kind]; form != nil {
		d.component(d.root, form, d.kind)
	}
}

func (d *document) component(n *yaml.Node, form *componentForm, path string) {
	n = yamltree.Deref(n)
	item, anyKey := form.fields["[]"], form.fields["*"]
	switch {
	case isNull(n) || form.value == "any":
	case form.value != "":
		if !fitsComponent(n, form.value) {
			d.problem(n, path, "must be %s, not %s", componentWords[form.value], componentValue(n, form.value))
		}
	case item != nil && n.Kind == yaml.SequenceNode:
		for i, v := range n.Content {
			d.component(v, item, fmt.Sprintf("%s[%d]", path, i))
		}
	case item != nil:
		d.problem(n, path, "must be a list (each item on a line of its own after \"- \"), not %s", shape(n))
	case n.Kind != yaml.MappingNode:
		d.problem(n, path, "must be a mapping, not %s", shape(n))
	default:
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			switch sub := form.fields[key.Value]; {
			case key.Value == "<<":
				d.problem(key, path, "merge keys (<<) are not read; write the fields out")
			case anyKey != nil:
				d.component(value, anyKey, keyPath(path, key.Value))
			case sub != nil:
				d.component(value, sub, join(path, key.Value))
			default:
				d.problem(key, join(path, key.Value), "unknown field in Kubernetes v1.%d%s", componentsOf, DidYouMean(key.Value, slices.Sorted(maps.Keys(form.fields))))
			}
		}
	}
}

var componentWords = map[string]string{"string": "a string", "boolean": "true or false", "integer": "a whole number", "number": "a number"}

// componentValue says what is there instead, and what to do where it is quotes.
func componentValue(n *yaml.Node, kind string) string {
	switch {
	case n.Kind != yaml.ScalarNode:
		return shape(n)
	case kind == "string":
		return fmt.Sprintf("%s: put it into quotes", shorten(n.Value))
	case n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0:
		return fmt.Sprintf("the string %q: leave the quotes out", shorten(n.Value))
	}
	return strconv.Quote(shorten(n.Value))
}

// wordsForBooleans are what Kubernetes, which reads YAML 1.1, takes for true or false
// where no quotes are, beside these two.
var wordsForBooleans = []string{"y", "yes", "on", "n", "no", "off"}

// fitsComponent reports whether a component takes a value as that kind. They read
// strictly: 5 is not a string.
func fitsComponent(n *yaml.Node, kind string) bool {
	if n.Kind != yaml.ScalarNode {
		return false
	}
	switch tag := n.ShortTag(); kind {
	case "string":
		plain := n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle|yaml.TaggedStyle) == 0
		return tag != "!!int" && tag != "!!float" && tag != "!!bool" && !(plain && slices.Contains(wordsForBooleans, strings.ToLower(n.Value)))
	case "boolean":
		return tag == "!!bool"
	case "integer":
		return tag == "!!int"
	case "number":
		return tag == "!!int" || tag == "!!float"
	}
	return true
}
