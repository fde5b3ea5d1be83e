package configs

import (
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
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
type Field = strict.FieldDoc

// Explain describes a field by its path, e.g. "site" or "site.network.interfaces".
func Explain(path string) (*Field, error) {
	kind, _, _ := strings.Cut(path, ".")
	schema, err := Schema(kind)
	if err != nil {
		return nil, err
	}
	return strict.Explain(schema, path)
}
