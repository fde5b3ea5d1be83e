package configs

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// tagValues returns the values of key in f's jsonschema tag.
func tagValues(f reflect.StructField, key string) []string {
	var vals []string
	for part := range strings.SplitSeq(f.Tag.Get("jsonschema"), ",") {
		if v, ok := strings.CutPrefix(part, key+"="); ok {
			vals = append(vals, v)
		}
	}
	return vals
}

// required reports whether the field may not be left out.
func required(f reflect.StructField) bool {
	return !strings.Contains(f.Tag.Get("yaml"), "omitempty")
}

// applyDefaults sets every empty field that has a default in its tag.
func applyDefaults(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			applyDefaults(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			applyDefaults(v.Index(i))
		}
	case reflect.Struct:
		if v.Type() == secretType {
			return
		}
		for i := range v.NumField() {
			f := v.Field(i)
			for _, def := range tagValues(v.Type().Field(i), "default") {
				setDefault(f, def)
			}
			applyDefaults(f)
		}
	}
}

func setDefault(f reflect.Value, def string) {
	if !f.IsZero() {
		return
	}
	switch f.Kind() {
	case reflect.String:
		f.SetString(def)
	case reflect.Int:
		n, err := strconv.Atoi(def)
		if err != nil {
			panic(fmt.Sprintf("BUG: default %q of an int field: %v", def, err))
		}
		f.SetInt(int64(n))
	default:
		panic(fmt.Sprintf("BUG: default %q on a field of kind %s", def, f.Kind()))
	}
}

// checkTags reports required fields that are empty and values that are not
// among the allowed ones.
func checkTags(v reflect.Value, path string, probs *Problems) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			checkTags(v.Elem(), path, probs)
		}
	case reflect.Slice:
		for i := range v.Len() {
			checkTags(v.Index(i), fmt.Sprintf("%s[%d]", path, i), probs)
		}
	case reflect.Struct:
		if v.Type() == secretType {
			return
		}
		for i := range v.NumField() {
			tf, f := v.Type().Field(i), v.Field(i)
			sub := join(path, fieldName(tf))
			if required(tf) && f.Kind() != reflect.Struct && f.IsZero() {
				probs.missing(sub, "is required")
			} else if f.Kind() == reflect.Slice && required(tf) && f.Len() == 0 {
				probs.add(sub, "needs at least one item")
			}
			if low, high, ok := bounds(tf); ok && !f.IsZero() && !within(f, low, high) {
				probs.add(sub, "must be from %d to %d, not %v", low, high, f)
			}
			if allowed := tagValues(tf, "enum"); allowed != nil {
				checkEnum(f, sub, allowed, probs)
			}
			checkTags(f, sub, probs)
		}
	}
}

// bounds are the least and the greatest value of a number's field, if its tag
// has them.
func bounds(f reflect.StructField) (low, high int64, ok bool) {
	least, most := tagValues(f, "minimum"), tagValues(f, "maximum")
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

func within(v reflect.Value, low, high int64) bool {
	if v.CanUint() {
		return v.Uint() <= uint64(high) && v.Uint() >= uint64(low)
	}
	return v.Int() >= low && v.Int() <= high
}

// repeats are the texts that a list had so far.
type repeats map[string]bool

// again reports whether a text was there before.
func (r repeats) again(text string) bool {
	was := r[text]
	r[text] = true
	return was
}

// checkText reports control characters in every string that has nothing
// worse. Each ends in a file of a form that lines or blanks divide. The tag
// text:"lines" exempts texts of several lines, text:"tabs" allows tabs; of
// text:"any" only tables hear (notValue).
func checkText(v reflect.Value, path string, probs *Problems) {
	known := map[string]bool{}
	for _, p := range *probs {
		known[p.Path] = true
	}
	checkTextIn(v, path, "", known, probs)
}

// checkTextIn does so below path; of known paths there is a problem already.
func checkTextIn(v reflect.Value, path, kind string, known map[string]bool, probs *Problems) {
	check := func(path, s string) {
		if kind == "tabs" {
			s = strings.ReplaceAll(s, "\t", "")
		}
		if kind == "lines" || badText(s) == "" || known[path] {
			return
		}
		known[path] = true
		probs.add(path, "%s", badText(s))
	}
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			checkTextIn(v.Elem(), path, kind, known, probs)
		}
	case reflect.Slice:
		for i := range v.Len() {
			checkTextIn(v.Index(i), fmt.Sprintf("%s[%d]", path, i), kind, known, probs)
		}
	case reflect.Map:
		m := v.Interface().(map[string]string)
		for _, k := range slices.Sorted(maps.Keys(m)) {
			check(keyPath(path, k), k+m[k])
		}
	case reflect.Struct:
		if v.Type() == secretType {
			return // each kind has a form of its own
		}
		for i := range v.NumField() {
			f := v.Type().Field(i)
			checkTextIn(v.Field(i), join(path, fieldName(f)), f.Tag.Get("text"), known, probs)
		}
	case reflect.String:
		check(path, v.String())
	}
}

func checkEnum(f reflect.Value, path string, allowed []string, probs *Problems) {
	if f.Kind() == reflect.Slice {
		for i := range f.Len() {
			checkEnum(f.Index(i), fmt.Sprintf("%s[%d]", path, i), allowed, probs)
		}
		return
	}
	if f.CanInt() {
		if !f.IsZero() && !slices.Contains(allowed, strconv.FormatInt(f.Int(), 10)) {
			probs.add(path, "%d is not one of %s", f.Int(), strings.Join(allowed, ", "))
		}
		return
	}
	// Emptiness is the business of required.
	if s := f.String(); s != "" && !slices.Contains(allowed, s) {
		probs.add(path, "%q is not one of %s%s", shorten(s), strings.Join(allowed, ", "), cmp.Or(whyNot(path, s), DidYouMean(s, allowed)))
	}
}

// whyNot explains values that people may expect to be allowed.
func whyNot(path, value string) string {
	switch {
	case path == "nodeType" && value == "local":
		return "; yurtadm's local type (no yurthub cache, iptables rules to the API servers of a tenant cluster) is not built: a native node with masters and ipvs keeps the same way open"
	}
	return ""
}
