package configs

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// SpreadField is the only field of a Site whose default depends on the Inventory.
const SpreadField = "spreadSeconds"

// SiteFields returns the paths of all fields of a Site, such as "network.interfaces.name". Each
// image contains this list, because its first boot supports only these fields.
func SiteFields() []string {
	all := strict.FieldPaths[Site]()
	slices.Sort(all)
	return all
}

// FieldsBeyond returns the paths of the Site's fields that are not in known. It omits fields that
// have their default.
func (s *Site) FieldsBeyond(known []string) (beyond []string) {
	isKnown := map[string]bool{}
	for _, f := range known {
		isKnown[f] = true
	}
	strict.Walk(s, func(f strict.Field) {
		inReported := slices.ContainsFunc(beyond, func(p string) bool { return strict.Covers(p, f.Path) })
		if !isKnown[strict.SchemaPath(f.Path)] && !inReported && !f.Value.IsZero() && !isDefault(f) {
			beyond = append(beyond, f.Path)
		}
	})
	return beyond
}

// isDefault reports whether a field has its default.
func isDefault(f strict.Field) bool {
	if def := strict.TagValues(f.StructField, "default"); def != nil && def[0] == fmt.Sprint(f.Value.Interface()) {
		return true
	}
	d := reflect.New(f.Value.Type())
	if f.Value.Kind() == reflect.Struct {
		strict.ApplyDefaults(d.Interface())
	}
	return reflect.DeepEqual(d.Elem().Interface(), f.Value.Interface())
}

// WritesSpread reports whether the Inventory sets spreadSeconds for its i-th Site, either in the
// site or in defaults.
func (inv *Inventory) WritesSpread(i int) bool {
	return yamltree.Get(inv.merged.defaults, SpreadField) != nil || yamltree.Get(inv.merged.sites[i], SpreadField) != nil
}
