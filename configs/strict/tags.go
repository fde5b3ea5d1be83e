package strict

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Field is a field of a document during a Walk.
type Field struct {
	reflect.StructField
	Path  string
	Value reflect.Value
}

// Walk calls visit for each field of the struct that v points to. It visits a field before the
// fields inside it.
func Walk(v any, visit func(Field)) { walk(reflect.ValueOf(v), "", visit) }

func walk(v reflect.Value, path string, visit func(Field)) {
	switch {
	case v.Kind() == reflect.Pointer && !v.IsNil():
		walk(v.Elem(), path, visit)
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		for i := range v.Len() {
			walk(v.Index(i), fmt.Sprintf("%s[%d]", path, i), visit)
		}
	case v.Kind() == reflect.Struct && v.Type() != secretType:
		for _, f := range fields(v.Type()) {
			in := Field{f, Join(path, FieldName(f)), v.FieldByIndex(f.Index)}
			visit(in)
			walk(in.Value, in.Path, visit)
		}
	}
}

// FieldPaths returns the paths of all fields of T, including those of nested structs, such as
// "network.interfaces.name".
func FieldPaths[T any]() []string {
	var paths []string
	walkTypes(reflect.TypeFor[T](), "", func(path string, _ reflect.StructField) {
		paths = append(paths, SchemaPath(path))
	})
	return paths
}

// walkTypes calls visit for each field that Walk can visit in a value of type t. In the paths, "[]"
// is a placeholder for an index.
func walkTypes(t reflect.Type, path string, visit func(path string, f reflect.StructField)) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		if t.Kind() == reflect.Slice {
			path += "[]"
		}
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == secretType {
		return
	}
	for _, f := range fields(t) {
		sub := Join(path, FieldName(f))
		visit(sub, f)
		walkTypes(f.Type, sub, visit)
	}
}

// Texts calls yield for the text of a field or, if the field is a list of texts, for each item.
func (f Field) Texts(yield func(path string, v reflect.Value)) {
	switch v := f.Value; {
	case v.Kind() == reflect.String || v.Type() == secretType:
		yield(f.Path, v)
	case v.Kind() == reflect.Pointer && v.Type().Elem().Kind() == reflect.String && !v.IsNil():
		yield(f.Path, v.Elem())
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.String:
		for i := range v.Len() {
			yield(fmt.Sprintf("%s[%d]", f.Path, i), v.Index(i))
		}
	}
}

func text(v reflect.Value) string {
	if s, ok := v.Interface().(Secret); ok {
		return s.Reveal()
	}
	return v.String()
}

// TagValues returns all values of key in the tag jsonschema of a field.
func TagValues(f reflect.StructField, key string) []string {
	var vals []string
	for part := range strings.SplitSeq(f.Tag.Get("jsonschema"), ",") {
		if v, ok := strings.CutPrefix(part, key+"="); ok {
			vals = append(vals, v)
		}
	}
	return vals
}

// Required reports whether the field is required.
func Required(f reflect.StructField) bool {
	return !strings.Contains(f.Tag.Get("yaml"), "omitempty")
}

// ApplyDefaults sets each empty field that has a default in its tag.
func ApplyDefaults(v any) {
	Walk(v, func(f Field) {
		def := TagValues(f.StructField, "default")
		if def == nil || !f.Value.IsZero() {
			return
		}
		if f.Value.Kind() == reflect.String {
			f.Value.SetString(def[0])
			return
		}
		n, err := strconv.ParseInt(def[0], 10, 64)
		if err != nil {
			panic(fmt.Sprintf("BUG: default %q of a field of kind %s: %v", def[0], f.Value.Kind(), err))
		}
		f.Value.SetInt(n)
	})
}

// Checks maps names in check tags to functions. A function returns a message about an invalid text,
// which follows the name of the field, or "".
type Checks map[string]func(string) string

// Check adds a problem for each field of v that violates its tags: it is required but empty; its
// number is out of bounds; or its value is not allowed (enum), malformed (check), repeated
// (unique), or set together with another field (oneof).
func Check(v any, checks Checks, probs *Problems) {
	checkOneOf(reflect.ValueOf(v).Elem(), "", probs)
	Walk(v, func(f Field) {
		if Required(f.StructField) && f.Value.Kind() != reflect.Struct {
			if f.Value.IsZero() {
				probs.AddMissing(f.Path, "is required")
			} else if f.Value.Kind() == reflect.Slice && f.Value.Len() == 0 {
				probs.Add(f.Path, "needs at least one item")
			}
		}
		if low, high, ok := bounds(f.StructField); ok && !f.Value.IsZero() && !inRange(f.Value, low, high) {
			probs.Add(f.Path, "must be from %d to %d, not %v", low, high, f.Value)
		}
		checkEnum(f, probs)
		checkForm(f, checks, probs)
		if Required(f.StructField) || f.Value.Kind() != reflect.Struct || !f.Value.IsZero() {
			checkOneOf(f.Value, f.Path, probs)
		}
	})
}

// bounds returns the minimum and the maximum of a number, if its tag contains them.
func bounds(f reflect.StructField) (low, high int64, ok bool) {
	least, most := TagValues(f, "minimum"), TagValues(f, "maximum")
	if least == nil || most == nil {
		return 0, 0, false
	}
	low, lowErr := strconv.ParseInt(least[0], 10, 64)
	high, highErr := strconv.ParseInt(most[0], 10, 64)
	if lowErr != nil || highErr != nil {
		panic(fmt.Sprintf("BUG: field %s is from %q to %q", f.Name, least[0], most[0]))
	}
	return low, high, true
}

func inRange(v reflect.Value, low, high int64) bool {
	if v.CanUint() {
		return v.Uint() <= uint64(high) && v.Uint() >= uint64(low)
	}
	return v.Int() >= low && v.Int() <= high
}

func checkEnum(f Field, probs *Problems) {
	allowed := TagValues(f.StructField, "enum")
	if allowed == nil {
		return
	}
	if f.Value.CanInt() && !f.Value.IsZero() && !slices.Contains(allowed, strconv.FormatInt(f.Value.Int(), 10)) {
		probs.Add(f.Path, "%d is not one of %s", f.Value.Int(), strings.Join(allowed, ", "))
	}
	f.Texts(func(path string, v reflect.Value) {
		s := v.String()
		if s == "" || slices.Contains(allowed, s) {
			return // Check reports an empty required field
		}
		probs.Add(path, "%q is not one of %s%s", Shorten(s), strings.Join(allowed, ", "), DidYouMean(s, allowed))
	})
}

// checkForm applies the tags check and unique to a field.
func checkForm(f Field, checks Checks, probs *Problems) {
	name, unique := f.Tag.Get("check"), f.Tag.Get("unique")
	check := checks[name]
	if check == nil && name != "" {
		panic(fmt.Sprintf("BUG: field %s has the unknown check %q", f.Name, name))
	}
	seen := map[string]bool{}
	f.Texts(func(path string, v reflect.Value) {
		s := text(v)
		if s == "" && f.Value.Kind() != reflect.Slice {
			return // Check reports an empty required field
		}
		if check != nil {
			if bad := check(s); bad != "" {
				probs.Add(path, "%s", bad)
				return
			}
		}
		if unique != "" && seen[s] {
			probs.Add(path, "%q is listed twice", Shorten(s))
		}
		seen[s] = true
	})
	if unique == "" || f.Value.Kind() != reflect.Slice || f.Value.Type().Elem().Kind() != reflect.Struct {
		return
	}
	for i := range f.Value.Len() { // unique lists the fields that identify an item
		key, path := "", fmt.Sprintf("%s[%d]", f.Path, i)
		for name := range strings.SplitSeq(unique, ",") {
			in, ok := FieldByName(f.Value.Type().Elem(), name)
			if !ok {
				panic(fmt.Sprintf("BUG: items of %s have no field %s", f.Name, name))
			}
			key += f.Value.Index(i).FieldByIndex(in.Index).String() + "\x00"
		}
		if !strings.Contains(unique, ",") {
			path = Join(path, unique)
		}
		if strings.Trim(key, "\x00") != "" && seen[key] {
			probs.Add(path, "%q is listed twice", Shorten(strings.ReplaceAll(strings.TrimSuffix(key, "\x00"), "\x00", ":")))
		}
		seen[key] = true
	}
}

// checkOneOf reports structs with a wrong number of set fields that have the tag oneof. Exactly one
// must be set or, with oneof:"atmost", at most one.
func checkOneOf(v reflect.Value, path string, probs *Problems) {
	switch {
	case v.Kind() == reflect.Pointer && !v.IsNil():
		checkOneOf(v.Elem(), path, probs)
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		for i := range v.Len() {
			checkOneOf(v.Index(i), fmt.Sprintf("%s[%d]", path, i), probs)
		}
	case v.Kind() == reflect.Struct && v.Type() != secretType:
		var names, set []string
		atMost := false
		for _, f := range fields(v.Type()) {
			if f.Tag.Get("oneof") == "" {
				continue
			}
			atMost = f.Tag.Get("oneof") == "atmost"
			names = append(names, FieldName(f))
			if !v.FieldByIndex(f.Index).IsZero() {
				set = append(set, FieldName(f))
			}
		}
		slices.Sort(names)
		slices.Sort(set)
		switch {
		case len(set) > 1 && atMost:
			probs.Add(path, "only one of %s is allowed", strings.Join(names, ", "))
		case len(set) > 1:
			probs.Add(path, "exactly one of %s is allowed, not %s", strings.Join(names, ", "), strings.Join(set, " and "))
		case len(names) > 0 && len(set) == 0 && !atMost:
			probs.Add(path, "exactly one of %s is required", strings.Join(names, ", "))
		}
	}
}

// CheckText reports control characters in texts that have no other problem, because texts are
// written to files in which line breaks and blanks have a meaning. The tag text:"lines" allows line
// breaks, and text:"tabs" allows tabs.
func CheckText(v any, probs *Problems) {
	known := map[string]bool{}
	for _, p := range *probs {
		known[p.Path] = true
	}
	Walk(v, func(f Field) {
		check := func(path, s string) {
			if f.Tag.Get("text") == "tabs" {
				s = strings.ReplaceAll(s, "\t", "")
			}
			if f.Tag.Get("text") != "lines" && !known[path] && BadText(s) != "" {
				known[path] = true
				probs.Add(path, "%s", BadText(s))
			}
		}
		if m, ok := f.Value.Interface().(map[string]string); ok {
			for _, k := range slices.Sorted(maps.Keys(m)) {
				check(KeyPath(f.Path, k), k+m[k])
			}
		}
		f.Texts(func(path string, v reflect.Value) {
			if v.Type() != secretType { // secrets have their own checks
				check(path, v.String())
			}
		})
	})
}

// BadText returns why s is not a single line of text, or "".
func BadText(s string) string {
	if strings.ContainsFunc(s, unicode.IsControl) {
		return "contains a line break or control character"
	}
	return ""
}
