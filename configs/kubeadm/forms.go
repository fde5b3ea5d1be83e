package kubeadm

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Schemas of the documents. Each line describes a field by its path and the type of its value; []
// means an item of a list, and * any key. TestComponentForms in module test/oracle generates the
// schemas of kubelet and kube-proxy from Kubernetes' own types, which would make programs on nodes
// too large.
var (
	//go:embed componentforms.txt
	componentForms string
	//go:embed kubeadmforms.txt
	kubeadmForms string
)

// formsOf is the minor version of Kubernetes that the schemas are from.
const formsOf = 37

// form is the schema of a value: a mapping with fields, or a scalar of the type value.
type form struct {
	value  string
	fields map[string]*form
}

// forms parses the schemas when they are first needed, since most commands do not need them.
var forms = sync.OnceValue(readForms)

func readForms() *form {
	all := &form{fields: map[string]*form{}}
	for line := range strings.Lines(componentForms + kubeadmForms) {
		path, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		at := all
		for part := range strings.SplitSeq(strings.ReplaceAll(path, "[]", ".[]"), ".") {
			if at.fields[part] == nil {
				at.fields[part] = &form{fields: map[string]*form{}}
			}
			at = at.fields[part]
		}
		at.value = value
	}
	return all
}

// checkFields reports fields that kubelet, kube-proxy or kubeadm would reject or ignore.
func checkFields(d *strict.Document) {
	if f := forms().fields[d.Kind]; f != nil {
		f.check(d, d.Root, d.Kind)
	}
}

func (form *form) check(d *strict.Document, n *yaml.Node, path string) {
	n = yamltree.Deref(n)
	item, anyKey := form.fields["[]"], form.fields["*"]
	switch {
	case yamltree.IsNull(n) || form.value == "any":
	case form.value != "":
		if !fits(n, form.value) {
			d.Addf(n, path, "must be %s, not %s", valueWords[form.value], shownValue(n, form.value))
		}
	case item != nil && n.Kind == yaml.SequenceNode:
		for i, v := range n.Content {
			item.check(d, v, fmt.Sprintf("%s[%d]", path, i))
		}
	case item != nil:
		d.Addf(n, path, "must be a list (each item on its own line after \"- \"), not %s", strict.Shape(n))
	case n.Kind != yaml.MappingNode:
		d.Addf(n, path, "must be a mapping, not %s", strict.Shape(n))
	default:
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			switch sub := form.fields[key.Value]; {
			case key.Value == "<<":
				d.Addf(key, path, "merge keys (<<) are not read; write the fields out")
			case anyKey != nil:
				anyKey.check(d, value, strict.KeyPath(path, key.Value))
			case sub != nil:
				sub.check(d, value, strict.Join(path, key.Value))
			default:
				d.Addf(key, strict.Join(path, key.Value), "unknown field in Kubernetes v1.%d%s", formsOf, strict.DidYouMean(key.Value, slices.Sorted(maps.Keys(form.fields))))
			}
		}
	}
}

var valueWords = map[string]string{"string": "a string", "secret": "a string", "boolean": "true or false", "integer": "a whole number", "number": "a number"}

// shownValue describes a value of the wrong type. If quotes are missing or superfluous, it adds the
// fix.
func shownValue(n *yaml.Node, kind string) string {
	switch {
	case n.Kind != yaml.ScalarNode:
		return strict.Shape(n)
	case kind == "secret":
		return "a value without quotes"
	case kind == "string":
		return fmt.Sprintf("%s: put it into quotes", strict.Shorten(n.Value))
	case n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0:
		return fmt.Sprintf("the string %q: leave the quotes out", strict.Shorten(n.Value))
	}
	return strconv.Quote(strict.Shorten(n.Value))
}

// wordsForBooleans lists the unquoted words, besides true and false, that Kubernetes parses as
// booleans, because it uses YAML 1.1.
var wordsForBooleans = []string{"y", "yes", "on", "n", "no", "off"}

// fits reports whether a component accepts a value as this type. Components are strict: they do not
// accept the number 5 as a string.
func fits(n *yaml.Node, kind string) bool {
	if n.Kind != yaml.ScalarNode {
		return false
	}
	switch tag := n.ShortTag(); kind {
	case "string", "secret":
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
