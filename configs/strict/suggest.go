package strict

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Shorten shortens a text to at most 60 characters, for messages.
func Shorten(s string) string {
	if r := []rune(s); len(r) > 60 {
		return string(r[:57]) + "..."
	}
	return s
}

// Join returns the path of the field name inside path.
func Join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// KeyPath returns the path of a key in the map at path.
func KeyPath(path, key string) string { return path + "[" + strconv.Quote(key) + "]" }

// FieldName returns the name of a struct field in the document.
func FieldName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	return name
}

// FieldByName finds a field of a struct by its name in the document.
func FieldByName(t reflect.Type, name string) (reflect.StructField, bool) {
	all := fields(t)
	if i := slices.IndexFunc(all, func(f reflect.StructField) bool { return FieldName(f) == name }); i >= 0 {
		return all[i], true
	}
	return reflect.StructField{}, false
}

// FieldNames returns the names of a struct's fields in the document.
func FieldNames(t reflect.Type) []string {
	var names []string
	for _, f := range fields(t) {
		names = append(names, FieldName(f))
	}
	return names
}

var fieldsOf sync.Map // reflect.Type → fields

// fields returns the exported fields of a struct, except apiVersion and kind. An embedded struct is
// replaced by its fields.
func fields(t reflect.Type) []reflect.StructField {
	if known, ok := fieldsOf.Load(t); ok {
		return known.([]reflect.StructField)
	}
	var out []reflect.StructField
	for i := range t.NumField() {
		f := t.Field(i)
		switch {
		case !f.IsExported():
		case f.Anonymous:
			for _, in := range fields(f.Type) {
				shadow, _ := t.FieldByName(in.Name) // an outer field with the same name hides it
				if n := FieldName(in); n != "apiVersion" && n != "kind" && len(shadow.Index) > 1 {
					in.Index = append([]int{i}, in.Index...)
					out = append(out, in)
				}
			}
		default:
			out = append(out, f)
		}
	}
	fieldsOf.Store(t, out)
	return out
}

// meant returns the path that an unknown field in path was probably meant to be, or "".
func (d *Document) meant(name, path string, t reflect.Type) string {
	if k := closest(name, FieldNames(t)); k != "" {
		return Join(path, k)
	}
	if places := placesOf(name, d.into); len(places) == 1 {
		return places[0]
	}
	return ""
}

// hint returns what may have been meant by an unknown field: a similar name, or the paths of fields
// with a similar name.
func (d *Document) hint(name string, t reflect.Type) string {
	if h := DidYouMean(name, FieldNames(t)); h != "" {
		return h
	}
	if places := placesOf(name, d.into); len(places) > 0 {
		return fmt.Sprintf("; did you mean %s?", strings.Join(places, " or "))
	}
	names := FieldNames(t)
	if len(names) == 0 {
		return "; there are no fields here"
	}
	return "; known here: " + strings.Join(names, ", ")
}

// placesOf returns the paths of up to three fields of t that have this name or a similar one.
func placesOf(name string, t reflect.Type) []string {
	var found []string
	name = strings.ToLower(name)
	walkTypes(t, "", func(path string, f reflect.StructField) {
		if distance(name, strings.ToLower(FieldName(f))) <= len(name)/4 && len(found) < 3 {
			found = append(found, path)
		}
	})
	return found
}

// alias maps names of architectures in other projects to those in edgebake.
var alias = map[string]string{"x86_64": "amd64", "x86-64": "amd64", "x64": "amd64", "aarch64": "arm64", "armv8": "arm64"}

// DidYouMean returns the end of a message that suggests a similar known name, or "".
func DidYouMean(name string, known []string) string {
	if k := closest(name, known); k != "" {
		return fmt.Sprintf("; did you mean %q?", k)
	}
	return ""
}

// closest returns the known name that is most similar to an unknown name, or "".
func closest(name string, known []string) string {
	if k := alias[strings.ToLower(name)]; slices.Contains(known, k) {
		return k
	}
	best, bestDist := "", 1+len(name)/4
	for _, k := range known {
		if dist := distance(strings.ToLower(name), strings.ToLower(k)); dist <= bestDist {
			best, bestDist = k, dist-1
		}
	}
	return best
}

// distance returns the Levenshtein distance between a and b.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diag, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diag+cost)
		}
	}
	return row[len(b)]
}
