package strict

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

var secretType = reflect.TypeFor[Secret]()

// DecodeInto decodes the document into a struct. It reports all problems, not only the first.
func (d *Document) DecodeInto(into any) {
	v := reflect.ValueOf(into).Elem()
	d.into = v.Type()
	d.decode(d.Root, v, "")
}

// decode decodes n into v. It reports each value that does not fit.
func (d *Document) decode(n *yaml.Node, v reflect.Value, path string) {
	if d.nodes++; d.nodes > d.limits.Nodes {
		if d.nodes == d.limits.Nodes+1 {
			d.Addf(n, path, "the document is too large: with its aliases it has more than %d values", d.limits.Nodes)
		}
		return
	}
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if v.Type() == secretType {
		var s string
		d.scalar(n, reflect.ValueOf(&s).Elem(), path, true)
		v.Set(reflect.ValueOf(NewSecret(s)))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		// An empty "debian:" selects debian with its defaults. But an empty "openyurt:" is neither
		// true nor false.
		if v.Type().Elem().Kind() != reflect.Struct && yamltree.IsNull(n) {
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		d.decode(n, v.Elem(), path)
	case reflect.Struct:
		d.structure(n, v, path)
	case reflect.Slice:
		d.list(n, v, path)
	case reflect.Map:
		d.mapping(n, v, path)
	case reflect.Interface:
		// Accept any value: another package checks it.
	default:
		d.scalar(n, v, path, false)
	}
}

func (d *Document) structure(n *yaml.Node, v reflect.Value, path string) {
	if yamltree.IsNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.Addf(n, path, "must be a mapping (%s), not %s", strings.Join(FieldNames(v.Type()), ", "), Shape(n))
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		name := key.Value
		sub := Join(path, name)
		if key.Kind != yaml.ScalarNode {
			d.Addf(key, path, "a field's name must be a plain word")
			continue
		}
		if name == "<<" {
			d.Addf(key, path, "merge keys (<<) are not read; write the fields out")
			continue
		}
		if line, twice := seen[name]; twice {
			d.Addf(key, sub, "is given twice; first on line %d", line)
			continue
		}
		seen[name] = key.Line
		f, ok := FieldByName(v.Type(), name)
		if !ok && d.Full() {
			d.untold++
			continue
		}
		if !ok {
			d.Addf(key, sub, "unknown field%s", d.hint(name, v.Type()))
			d.Probs[len(d.Probs)-1].meant = d.meant(name, path, v.Type())
			continue
		}
		into := v.FieldByIndex(f.Index)
		d.decode(val, into, sub)
		// After decoding, 0 cannot be distinguished from a missing field.
		if low, high, ok := bounds(f); ok && low > 0 && into.IsZero() && val.ShortTag() == "!!int" {
			d.Addf(val, sub, "must be from %d to %d, not 0", low, high)
		}
	}
}

func (d *Document) list(n *yaml.Node, v reflect.Value, path string) {
	if yamltree.IsNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		what := Shape(n)
		if n.Kind == yaml.ScalarNode && n.Style == 0 && strings.HasPrefix(n.Value, "-") {
			what += `; a space is missing after the "-"`
		}
		d.Addf(n, path, "must be a list (each item on its own line after \"- \"), not %s", what)
		return
	}
	most := d.limits.Items
	if more, ok := d.limits.More[path]; ok {
		most = more
	}
	if len(n.Content) > most {
		d.Addf(n, path, "has %d items: want at most %d", len(n.Content), most)
		return
	}
	s := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		if d.nodes > d.limits.Nodes {
			return
		}
		sub := fmt.Sprintf("%s[%d]", path, i)
		if yamltree.IsNull(item) {
			d.Addf(item, sub, "is empty")
			continue
		}
		d.decode(item, s.Index(i), sub)
	}
	v.Set(s)
}

func (d *Document) mapping(n *yaml.Node, v reflect.Value, path string) {
	if yamltree.IsNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.Addf(n, path, "must be a mapping of names to values, not %s", Shape(n))
		return
	}
	m := reflect.MakeMap(v.Type())
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		sub := KeyPath(path, key.Value)
		if key.Kind == yaml.ScalarNode && key.Value == "<<" {
			d.Addf(key, path, "merge keys (<<) are not read; write the fields out")
			continue
		}
		if key.Kind != yaml.ScalarNode {
			d.Addf(key, path, "a name must be a plain word")
			continue
		}
		k := reflect.ValueOf(key.Value)
		if m.MapIndex(k).IsValid() {
			d.Addf(key, sub, "is given twice")
			continue
		}
		e := reflect.New(v.Type().Elem()).Elem()
		d.decode(val, e, sub)
		m.SetMapIndex(k, e)
	}
	v.Set(m)
}

func (d *Document) scalar(n *yaml.Node, v reflect.Value, path string, secret bool) {
	shown := Shape(n)
	if n.Kind == yaml.ScalarNode && !secret {
		shown = strconv.Quote(Shorten(n.Value))
	}
	if n.Kind != yaml.ScalarNode {
		if n.Kind == yaml.MappingNode && n.Style&yaml.FlowStyle != 0 && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode {
			shown += `; a value that begins with {{ needs quotes`
		}
		d.Addf(n, path, "must be %s, not %s", wanted(v), shown)
		return
	}
	tag := n.ShortTag()
	if tag == "!!null" {
		return // the same as a missing field
	}
	ok := false
	switch v.Kind() {
	case reflect.String:
		// Use the original text, because versions, modes and labels may look like numbers or
		// booleans.
		if ok = slices.Contains([]string{"!!str", "!!int", "!!float", "!!bool", "!!timestamp"}, tag); ok {
			v.SetString(n.Value)
		}
	case reflect.Bool:
		if ok = tag == "!!bool"; ok {
			v.SetBool(strings.EqualFold(n.Value, "true"))
		}
	default:
		ok = tag == "!!int" && n.Decode(v.Addr().Interface()) == nil
	}
	if !ok {
		d.Addf(n, path, "must be %s, not %s", wanted(v), shown)
	}
}

func wanted(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Uint32:
		return "a whole number, 0 or more"
	}
	return "a whole number"
}

// Shape describes the kind of a node. It never quotes the value, which may be a secret in the wrong
// field.
func Shape(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	return "a single value"
}
