// Package schema contains the JSON schemas of the documents, for editors and for edgebake explain.
// `go test ./configs -update` generates them from the types in package configs.
package schema

import (
	"cmp"
	"embed"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
)

//go:embed *.json
var files embed.FS

// Kinds returns the kinds of documents that have a schema, sorted and in lower case, as commands
// write them.
func Kinds() []string { return []string{"cluster", "image", "inventory", "site"} }

// Read returns the JSON schema of a kind of document. The case of kind does not matter.
func Read(kind string) ([]byte, error) {
	lower := strings.ToLower(kind)
	if !slices.Contains(Kinds(), lower) {
		return nil, fmt.Errorf("unknown kind of document %q: want one of %s%s", kind, strings.Join(Kinds(), ", "), strict.DidYouMean(kind, Kinds()))
	}
	return files.ReadFile(lower + ".v1alpha1.json")
}

// Field is a field of a document, as described by its schema.
type Field = strict.FieldDoc

// Explain describes the field at a path, such as "site" or "site.network.interfaces".
func Explain(path string) (*Field, error) {
	kind, _, _ := strings.Cut(path, ".")
	text, err := Read(kind)
	if err != nil {
		if places := placesOf(path); len(places) > 0 {
			return nil, fmt.Errorf("a field's path begins with the kind of document; did you mean %s?", strings.Join(places, " or "))
		}
		return nil, err
	}
	return strict.Explain(text, path)
}

// maxPlaces is the largest number of fields that a message suggests.
const maxPlaces = 8

// placesOf returns the paths of all fields whose path ends in end. The shortest path comes first.
func placesOf(end string) (places []string) {
	end = strings.ToLower(strict.SchemaPath(end))
	var look func(f *Field)
	look = func(f *Field) {
		if strings.HasSuffix(strings.ToLower(f.Path), "."+end) {
			places = append(places, f.Path)
		}
		for i := range f.Fields {
			look(&f.Fields[i])
		}
	}
	for _, kind := range Kinds() {
		if f, err := Explain(kind); err == nil {
			look(f)
		}
	}
	slices.SortStableFunc(places, func(a, b string) int { return cmp.Compare(strings.Count(a, "."), strings.Count(b, ".")) })
	return places[:min(len(places), maxPlaces)]
}
