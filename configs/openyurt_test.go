package configs

import (
	"reflect"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/openyurt"
)

// TestEnumsOfYurthub checks that the schema allows the values that package openyurt defines.
func TestEnumsOfYurthub(t *testing.T) {
	for field, want := range map[string][]string{"Form": {openyurt.FormUnit, openyurt.FormStaticPod}, "LBMode": openyurt.LBModes()} {
		f, ok := reflect.TypeFor[Yurthub]().FieldByName(field)
		var got []string
		for part := range strings.SplitSeq(f.Tag.Get("jsonschema"), ",") {
			if word, is := strings.CutPrefix(part, "enum="); is {
				got = append(got, word)
			}
		}
		if !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the schema has %v, OpenYurt %v", field, got, want)
		}
	}
}
