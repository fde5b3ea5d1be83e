package configs

import (
	"cmp"
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
)

//go:embed schema/*.json
var schemas embed.FS

// schemaFiles returns the files of the JSON schemas by the kind of document in
// lower case, as in commands.
func schemaFiles() map[string]string {
	return map[string]string{"image": "schema/image.v1alpha1.json", "site": "schema/site.v1alpha1.json", "inventory": "schema/inventory.v1alpha1.json", "cluster": "schema/cluster.v1alpha1.json"}
}

// SchemaKinds returns the kinds of documents that have a schema, as in
// commands.
func SchemaKinds() []string { return slices.Sorted(maps.Keys(schemaFiles())) }

// Schema returns the JSON schema of a kind of document: "image", "site",
// "inventory" or "cluster".
func Schema(kind string) ([]byte, error) {
	name, ok := schemaFiles()[strings.ToLower(kind)] // documents write it with a capital letter
	if !ok {
		return nil, fmt.Errorf("unknown kind of document %q: want one of %s%s", kind, strings.Join(SchemaKinds(), ", "), DidYouMean(kind, SchemaKinds()))
	}
	return schemas.ReadFile(name)
}

// Field is one field of a document, as described in its schema.
type Field = strict.FieldDoc

// Explain describes a field by its path, for example "site" or
// "site.network.interfaces".
func Explain(path string) (*Field, error) {
	kind, _, _ := strings.Cut(path, ".")
	schema, err := Schema(kind)
	if err != nil {
		if places := placesOf(path); len(places) > 0 {
			return nil, fmt.Errorf("a field's path begins with the kind of document; did you mean %s?", strings.Join(places, " or "))
		}
		return nil, err
	}
	return strict.Explain(schema, path)
}

// maxPlaces is the maximum number of fields that are suggested.
const maxPlaces = 8

// placesOf returns the paths of fields that end in a path, the shortest first.
func placesOf(end string) (places []string) {
	end = strings.ToLower(strict.WithoutIndices(end))
	var look func(f *Field)
	look = func(f *Field) {
		if strings.HasSuffix(strings.ToLower(f.Path), "."+end) {
			places = append(places, f.Path)
		}
		for i := range f.Fields {
			look(&f.Fields[i])
		}
	}
	for _, kind := range SchemaKinds() {
		if f, err := Explain(kind); err == nil {
			look(f)
		}
	}
	slices.SortStableFunc(places, func(a, b string) int { return cmp.Compare(strings.Count(a, "."), strings.Count(b, ".")) })
	return places[:min(len(places), maxPlaces)]
}
