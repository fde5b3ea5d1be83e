package strict

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// FieldDoc describes one field of a document, from its schema.
type FieldDoc struct {
	// Path is the path in commands, such as "site.network.interfaces".
	Path string
	// Name is the last part of Path.
	Name string
	// Type is string, integer, boolean, object or map. A list has a type such as "[]string". A
	// field for one value or a list has a type such as "string or []string".
	Type string
	// Values contains the allowed values, if the schema lists them.
	Values []string
	// Default is the value of a missing field, as JSON. It is "" if there is no default.
	Default     string
	Required    bool
	Description string
	// Fields contains the fields of an object, or of a list's items, sorted by name.
	Fields []FieldDoc
}

// schemaNode is the part of JSON Schema that edgebake's schemas use.
type schemaNode struct {
	Ref                  string                 `json:"$ref"`
	Defs                 map[string]*schemaNode `json:"$defs"`
	Type                 any                    `json:"type"`
	Description          string                 `json:"description"`
	Enum                 []any                  `json:"enum"`
	Default              json.RawMessage        `json:"default"`
	Properties           map[string]*schemaNode `json:"properties"`
	Required             []string               `json:"required"`
	Items                *schemaNode            `json:"items"`
	AnyOf                []*schemaNode          `json:"anyOf"`
	AdditionalProperties any                    `json:"additionalProperties"`
}

// pathIndex matches an index or key in a path, as in users[0] or labels["a.b/c"]. It also matches
// [], which means any index in the reference.
var pathIndex = regexp.MustCompile(`\[(?:\d+|"[^"]*")?\]`)

// SchemaPath returns a path without indexes and keys.
func SchemaPath(path string) string { return pathIndex.ReplaceAllString(path, "") }

// Explain describes the field at a path, such as "site.network.interfaces", from the schema of a
// kind of document. It ignores indexes, so that paths of problems can be used.
func Explain(schema []byte, path string) (*FieldDoc, error) {
	kind, rest, _ := strings.Cut(SchemaPath(path), ".")
	kind = strings.ToLower(kind)
	var root schemaNode
	if err := json.Unmarshal(schema, &root); err != nil {
		return nil, fmt.Errorf("reading the schema of %s: %w", kind, err)
	}
	f := root.field(&root, kind, kind, false)
	at := kind
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, ".")
		i := slices.IndexFunc(f.Fields, func(c FieldDoc) bool { return c.Name == name })
		if i < 0 {
			names := make([]string, len(f.Fields))
			for i, c := range f.Fields {
				names[i] = c.Name
			}
			if len(names) == 0 {
				return nil, fmt.Errorf("%s has no fields", at)
			}
			return nil, fmt.Errorf("%s has no field %q: want one of %s%s", at, name, strings.Join(names, ", "), DidYouMean(name, names))
		}
		f, at = f.Fields[i], at+"."+name
	}
	return &f, nil
}

// field describes n and its fields.
func (n *schemaNode) field(root *schemaNode, path, name string, required bool) FieldDoc {
	f := FieldDoc{Path: path, Name: name, Required: required, Description: n.Description}
	list := ""
	if several := n.orList(); several != nil {
		f.Type, n = several.typeName()+" or []"+several.typeName(), &schemaNode{Type: several.Type, Enum: several.Enum, Default: n.Default}
	}
	for n.Ref != "" || n.Items != nil || n.orNull() != nil {
		if n.Items != nil {
			n, list = n.Items, list+"[]"
			continue
		}
		if object := n.orNull(); object != nil {
			n = object
			continue
		}
		n = root.Defs[strings.TrimPrefix(n.Ref, "#/$defs/")]
		if f.Description == "" {
			f.Description = n.Description
		}
	}
	if len(n.Default) > 0 {
		f.Default = string(n.Default)
	}
	for _, v := range n.Enum {
		f.Values = append(f.Values, fmt.Sprint(v))
	}
	for _, c := range slices.Sorted(maps.Keys(n.Properties)) {
		f.Fields = append(f.Fields, n.Properties[c].field(root, path+"."+c, c, slices.Contains(n.Required, c)))
	}
	if f.Type == "" {
		f.Type = list + n.typeName()
	}
	return f
}

// orList returns the schema of a value if n allows either a value or a list of values.
func (n *schemaNode) orList() *schemaNode {
	if len(n.AnyOf) == 2 && n.AnyOf[1].Items != nil {
		return n.AnyOf[0]
	}
	return nil
}

// orNull returns the schema of an object if n also allows null, because all fields of the object
// have defaults.
func (n *schemaNode) orNull() *schemaNode {
	if len(n.AnyOf) == 2 && n.AnyOf[1].Type == "null" {
		return n.AnyOf[0]
	}
	return nil
}

func (n *schemaNode) typeName() string {
	if values, ok := n.AdditionalProperties.(map[string]any); ok {
		return fmt.Sprintf("map of %v", values["type"])
	}
	if s, ok := n.Type.(string); ok {
		return s
	}
	return "any"
}
