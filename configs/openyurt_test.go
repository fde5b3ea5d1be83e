package configs

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/openyurt"
)

// TestEnumsOfYurthub: the schema has the words that OpenYurt has.
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

// TestReferenceOfYurthub: the reference has the releases and the port that
// OpenYurt has.
func TestReferenceOfYurthub(t *testing.T) {
	b, err := os.ReadFile("../docs/reference.md")
	if err != nil {
		t.Fatal(err)
	}
	first := openyurt.Release(openyurt.FirstUnit)
	for row, want := range map[string]string{
		"| `organizations` |":    "OpenYurt before " + first + " (form " + openyurt.FormStaticPod + ")",
		"| `yurthub.openPort` |": "yurthub's port " + openyurt.PoolPort + " reachable from outside the node. There yurthub (OpenYurt " + first + " and later)",
	} {
		_, line, found := strings.Cut(string(b), row)
		if line, _, _ = strings.Cut(line, "\n"); !found || !strings.Contains(line, want) {
			t.Errorf("%s does not say %q:%s", row, want, line)
		}
	}
}
