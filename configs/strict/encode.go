package strict

import (
	"maps"
	"reflect"
	"slices"
	"strconv"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Encode encodes a struct as YAML, including its secrets. Equal values give equal bytes. If keep is
// not nil, it selects the fields to include by their SchemaPath.
func Encode(v any, keep func(path string) bool) ([]byte, error) {
	return yamltree.Encode(Node(v, keep))
}

// Node returns the YAML tree that Encode encodes.
func Node(v any, keep func(path string) bool) *yaml.Node {
	return encodeValue(reflect.ValueOf(v).Elem(), "", keep)
}

// encodeValue returns v as a YAML node, or nil if v is empty. It quotes all strings, so that a
// label "true" is parsed as a string again.
func encodeValue(v reflect.Value, path string, keep func(string) bool) *yaml.Node {
	if v.Type() == secretType {
		s := v.Interface().(Secret)
		if s.IsZero() {
			return nil
		}
		return yamltree.Quoted(s.Reveal())
	}
	if v.IsZero() {
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		return encodeValue(v.Elem(), path, keep)
	case reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		for i := range v.NumField() {
			name := FieldName(v.Type().Field(i))
			sub := Join(path, name)
			if keep != nil && !keep(sub) {
				continue
			}
			if f := encodeValue(v.Field(i), sub, keep); f != nil {
				n.Content = append(n.Content, yamltree.Plain(name, "!!str"), f)
			}
		}
		if len(n.Content) == 0 {
			return nil
		}
		return n
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		for i := range v.Len() {
			f := encodeValue(v.Index(i), path, keep)
			if f == nil { // an empty item keeps the indexes of the other items
				f = yamltree.Plain("{}", "!!map")
				if v.Index(i).Kind() == reflect.String {
					f = yamltree.Quoted("")
				}
			}
			n.Content = append(n.Content, f)
		}
		return n
	case reflect.Map:
		m := v.Interface().(map[string]string)
		n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			n.Content = append(n.Content, yamltree.Quoted(k), yamltree.Quoted(m[k]))
		}
		return n
	case reflect.String:
		return yamltree.Quoted(v.String())
	case reflect.Bool:
		return yamltree.Plain(strconv.FormatBool(v.Bool()), "!!bool")
	case reflect.Int:
		return yamltree.Plain(strconv.FormatInt(v.Int(), 10), "!!int")
	}
	panic("BUG: a document holds a field of kind " + v.Kind().String())
}
