package configs

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// EncodeSlot is the Site as stamping writes it into the slot, with its secrets, which
// no other encoding of a Site has. The bytes depend on the Site alone.
func EncodeSlot(s *Site) ([]byte, error) {
	b, err := encodeNode(encodeValue(reflect.ValueOf(s).Elem()))
	if err != nil {
		return nil, fmt.Errorf("encoding the Site: %w", err)
	}
	return b, nil
}

// encodeNode is YAML as people write it.
func encodeNode(n *yaml.Node) ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err := cmp.Or(enc.Encode(n), enc.Close())
	return b.Bytes(), err
}

// encodeValue returns v as a YAML node, nil where there is nothing to write.
// Strings are always quoted: a label "true" must come back as a string, and
// nothing has to be guessed.
func encodeValue(v reflect.Value) *yaml.Node {
	if v.Type() == secretType {
		s := v.Interface().(Secret)
		if s.IsZero() {
			return nil
		}
		return encodeString(s.Reveal())
	}
	if v.IsZero() {
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		return encodeValue(v.Elem())
	case reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		for i := range v.NumField() {
			if f := encodeValue(v.Field(i)); f != nil {
				n.Content = append(n.Content, plain(fieldName(v.Type().Field(i)), "!!str"), f)
			}
		}
		if len(n.Content) == 0 {
			return nil
		}
		return n
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		for i := range v.Len() {
			f := encodeValue(v.Index(i))
			if f == nil { // an item keeps its place
				f = plain("{}", "!!map")
				if v.Index(i).Kind() == reflect.String {
					f = encodeString("")
				}
			}
			n.Content = append(n.Content, f)
		}
		return n
	case reflect.Map:
		m := v.Interface().(map[string]string)
		n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			n.Content = append(n.Content, encodeString(k), encodeString(m[k]))
		}
		return n
	case reflect.String:
		return encodeString(v.String())
	case reflect.Bool:
		return plain(strconv.FormatBool(v.Bool()), "!!bool")
	case reflect.Int:
		return plain(strconv.FormatInt(v.Int(), 10), "!!int")
	}
	panic("BUG: a Site holds a field of kind " + v.Kind().String())
}

func plain(value, tag string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}
}

func encodeString(s string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s, Style: yaml.DoubleQuotedStyle}
}
