package configs

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// SpreadField is the one field of a Site with a default that only an Inventory knows.
const SpreadField = "spreadSeconds"

// SiteFields lists the fields of a Site by their paths, as "network.interfaces.name". An
// image has the list of those that its first boot knows: it rejects all others.
func SiteFields() []string {
	var all []string
	var add func(t reflect.Type, path string)
	add = func(t reflect.Type, path string) {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct || t == reflect.TypeFor[Secret]() {
			return
		}
		for i := range t.NumField() {
			p := strict.Join(path, strict.FieldName(t.Field(i)))
			all = append(all, p)
			add(t.Field(i).Type, p)
		}
	}
	add(reflect.TypeFor[Site](), "")
	slices.Sort(all)
	return all
}

// OnlyFields is a copy of a Site with the fields of that list alone. beyond has the paths
// of those left out, as problems name them, unless their value is the default.
func (s *Site) OnlyFields(known []string) (only *Site, beyond []string) {
	isKnown := map[string]bool{}
	for _, f := range known {
		isKnown[f] = true
	}
	// at is the path with the indices of lists.
	var copied func(v reflect.Value, path, at string) reflect.Value
	copied = func(v reflect.Value, path, at string) reflect.Value {
		out := reflect.New(v.Type()).Elem()
		switch {
		case v.Kind() == reflect.Pointer && !v.IsNil():
			out.Set(reflect.New(v.Type().Elem()))
			out.Elem().Set(copied(v.Elem(), path, at))
		case v.Kind() == reflect.Slice && !v.IsNil():
			out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
			for i := range v.Len() {
				out.Index(i).Set(copied(v.Index(i), path, at+"["+strconv.Itoa(i)+"]"))
			}
		case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[Secret]():
			for i := range v.NumField() {
				f, name := v.Type().Field(i), strict.FieldName(v.Type().Field(i))
				switch p, where := strict.Join(path, name), strict.Join(at, name); {
				case isKnown[p]:
					out.Field(i).Set(copied(v.Field(i), p, where))
				case !v.Field(i).IsZero() && !isDefault(f, v.Field(i)):
					beyond = append(beyond, where)
				}
			}
		default:
			out.Set(v)
		}
		return out
	}
	only = copied(reflect.ValueOf(s), "", "").Interface().(*Site)
	return only, beyond
}

// isDefault reports whether a field has the value that it gets where it is not set.
func isDefault(f reflect.StructField, v reflect.Value) bool {
	if def := strict.TagValues(f, "default"); def != nil && def[0] == fmt.Sprint(v.Interface()) {
		return true
	}
	d := reflect.New(v.Type())
	if v.Kind() == reflect.Struct {
		strict.ApplyDefaults(d.Interface())
	}
	return reflect.DeepEqual(d.Elem().Interface(), v.Interface())
}

// WritesSpread reports whether a person has set spreadSeconds of the Inventory's i-th Site.
func (inv *Inventory) WritesSpread(i int) bool {
	return yamltree.Get(inv.merged.defaults, SpreadField) != nil || yamltree.Get(inv.merged.sites[i], SpreadField) != nil
}
