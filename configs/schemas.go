package configs

import (
	"embed"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

//go:embed schema/*.json
var schemas embed.FS

// schemaFiles are the JSON schemas by the kind of document, in lower case as
// commands name it.
func schemaFiles() map[string]string {
	return map[string]string{"image": "schema/image.v1alpha1.json", "site": "schema/site.v1alpha1.json", "inventory": "schema/inventory.v1alpha1.json", "cluster": "schema/cluster.v1alpha1.json"}
}

// SchemaKinds are the kinds of documents that have a schema, as commands name
// them.
func SchemaKinds() []string { return slices.Sorted(maps.Keys(schemaFiles())) }

// Schema is the JSON schema of a kind of document: "image", "site", "inventory"
// or "cluster".
func Schema(kind string) ([]byte, error) {
	name, ok := schemaFiles()[strings.ToLower(kind)] // documents write it large
	if !ok {
		return nil, fmt.Errorf("unknown kind of document %q: want one of %s%s", kind, strings.Join(SchemaKinds(), ", "), DidYouMean(kind, SchemaKinds()))
	}
	return schemas.ReadFile(name)
}

// Field is one field of a document, as its schema has it.
type Field struct {
	// Path as it is written in commands, e.g. "site.network.interfaces".
	Path string
	// Name is its last part.
	Name string
	// Type is string, integer, boolean, object, map, a list of one of them
	// ("[]string"), or either ("string or []string").
	Type string
	// Values are the ones allowed, where they are listed.
	Values []string
	// Default is the value without it, as JSON; empty where there is none.
	Default     string
	Required    bool
	Description string
	// Fields are those of an object, or of a list's items, sorted by name.
	Fields []Field
}

// schemaNode is the part of JSON Schema that our schemas use.
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

// pathIndex is what problems name an item or a key with: users[0], labels["a.b/c"].
var pathIndex = regexp.MustCompile(`\[(?:\d+|"[^"]*")\]`)

// Explain describes a field by its path, e.g. "site" or
// "site.network.interfaces". Indices, which the paths of problems have, mean nothing.
func Explain(path string) (*Field, error) {
	path = pathIndex.ReplaceAllString(path, "")
	kind, rest, _ := strings.Cut(path, ".")
	kind = strings.ToLower(kind)
	raw, err := Schema(kind)
	if err != nil {
		return nil, err
	}
	var root schemaNode
	if err := json.Unmarshal(raw, &root); err != nil {
		return nil, fmt.Errorf("reading the schema of %s: %w", kind, err)
	}
	f := root.field(&root, kind, kind, false)
	at := kind
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, ".")
		i := slices.IndexFunc(f.Fields, func(c Field) bool { return c.Name == name })
		if i < 0 {
			names := make([]string, len(f.Fields))
			for i, c := range f.Fields {
				names[i] = c.Name
			}
			if len(names) == 0 {
				return nil, fmt.Errorf("%s has no fields of its own", at)
			}
			return nil, fmt.Errorf("%s has no field %q: want one of %s%s", at, name, strings.Join(names, ", "), DidYouMean(name, names))
		}
		f, at = f.Fields[i], at+"."+name
	}
	return &f, nil
}

// field describes n, with what is below it.
func (n *schemaNode) field(root *schemaNode, path, name string, required bool) Field {
	f := Field{Path: path, Name: name, Required: required, Description: n.Description}
	list := ""
	if several := n.orList(); several != nil {
		f.Type, n = several.typeName()+" or []"+several.typeName(), &schemaNode{Type: several.Type, Enum: several.Enum, Default: n.Default}
	}
	for n.Ref != "" || n.Items != nil {
		if n.Items != nil {
			n, list = n.Items, list+"[]"
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

// orList is what an item of n is, where n is such an item or a list of them.
func (n *schemaNode) orList() *schemaNode {
	if len(n.AnyOf) == 2 && n.AnyOf[1].Items != nil {
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
