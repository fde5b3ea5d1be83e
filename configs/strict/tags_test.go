package strict

import (
	"strings"
	"testing"
)

// TestTags violates each tag in a test document. Each problem must be reported once.
func TestTags(t *testing.T) {
	type item struct {
		Name string `yaml:"name"`
		Port int    `yaml:"port,omitempty" jsonschema:"minimum=1,maximum=9"`
	}
	type choice struct {
		A *string `yaml:"a,omitempty" oneof:"one"`
		B string  `yaml:"b,omitempty" oneof:"one"`
	}
	type doc struct {
		APIVersion string   `yaml:"apiVersion"`
		Kind       string   `yaml:"kind" jsonschema:"enum=Doc"`
		Mode       string   `yaml:"mode,omitempty" jsonschema:"enum=on,enum=off,default=on"`
		Words      []string `yaml:"words,omitempty" check:"word" unique:"yes"`
		Items      []item   `yaml:"items" unique:"name"`
		Choice     choice   `yaml:"choice"`
		Maybe      choice   `yaml:"maybe,omitempty"`
		Key        Secret   `yaml:"key,omitempty" check:"word"`
		Text       string   `yaml:"text,omitempty" text:"lines"`
		Line       string   `yaml:"line,omitempty"`
	}
	checks := Checks{"word": func(s string) string {
		if strings.Contains(s, " ") {
			return "has a blank"
		}
		return ""
	}}
	form := &Format{APIVersion: "v1", Kinds: []string{"Doc"}, Limits: func(string) Limits { return DefaultLimits }}
	read := func(text string) (*doc, error) {
		d, probs := Read("f", []byte("apiVersion: v1\nkind: Doc\n"+text), form)
		if probs != nil {
			return nil, probs
		}
		into := new(doc)
		err := d.Parse("Doc", into, func() (probs Problems) {
			Check(into, checks, &probs)
			CheckText(into, &probs)
			return probs
		})
		return into, err
	}
	good, err := read("items: [{name: a}, {name: b, port: 9}]\nwords: [x, y]\nchoice: {b: x}\ntext: \"a\\nb\"\n")
	if err != nil || good.Mode != "on" {
		t.Fatal(good, err)
	}
	_, err = read("mode: auto\nwords: [a b, x, x]\nitems: [{name: a, port: 10}, {name: a}, {}]\nchoice: {a: x, b: y}\nmaybe: {}\nkey: s3 cret\nline: \"a\\tb\"\nlin: x\n")
	want := `f:3:7: mode: "auto" is not one of on, off
f:4:9: words[0]: has a blank
f:4:17: words[2]: "x" is listed twice
f:5:25: items[0].port: must be from 1 to 9, not 10
f:5:37: items[1].name: "a" is listed twice
f:5:41: items[2].name: is required
f:6:9: choice: exactly one of a, b is allowed, not a and b
f:8:6: key: has a blank
f:9:7: line: contains a line break or control character
f:10:1: lin: unknown field; did you mean "line"?`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}
