package yamltree

import (
	"testing"

	"go.yaml.in/yaml/v3"
)

func TestTree(t *testing.T) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte("a: &x {k: v} # first\nb: *x\nlist: [b, c]\n"), &doc); err != nil {
		t.Fatal(err)
	}
	m := doc.Content[0]
	if Value(m, "b").Kind != yaml.AliasNode || Text(Get(Get(m, "b"), "k")) != "v" || Get(Value(m, "b"), "k") == nil {
		t.Error("an alias is not followed")
	}
	// A list has no fields, and neither has nil.
	if Get(m, "none") != nil || Get(nil, "a") != nil || Get(Get(m, "list"), "b") != nil || Text(m) != "" || Text(nil) != "" {
		t.Error("Get found a missing key")
	}
	Set(m, "list", String("true"))
	Set(m, "new", String("1"))
	Remove(m, "b")
	Remove(m, "none")
	out, err := yaml.Marshal(&doc)
	if want := "a: &x {k: v} # first\nlist: \"true\"\nnew: \"1\"\n"; err != nil || string(out) != want {
		t.Errorf("%s%v, want\n%s", out, err, want)
	}
}

func TestClone(t *testing.T) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte("base: &b {x: 1}\nalias: *b\n"), &doc); err != nil {
		t.Fatal(err)
	}
	c := Clone(&doc)
	Set(Get(c.Content[0], "base"), "x", String("2"))
	for of, want := range map[*yaml.Node]string{&doc: "1", c: "2"} {
		for _, key := range []string{"base", "alias"} {
			if got := Text(Get(Get(of.Content[0], key), "x")); got != want {
				t.Errorf("%s has x %s, want %s", key, got, want)
			}
		}
	}
}
