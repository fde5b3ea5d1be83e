package yamltree

import (
	"encoding/json"
	"testing"

	"go.yaml.in/yaml/v3"
	kubectl "sigs.k8s.io/yaml"
)

// TestAsKubectl compares AsKubectl with the library that kubectl uses to read manifests.
func TestAsKubectl(t *testing.T) {
	for _, text := range []string{
		"3306: db/mysql:3306\n0x10: hex\n1.50: float\n9007199254740993: big\nTrue: t\nno: o\n\"1\": text\n2024-01-02: date\n",
		"when: 2024-01-02\nat: 2024-01-02T03:04:05Z\nquoted: \"2024-01-02\"\nlist: [2001-12-14t21:59:43.10-05:00]\n",
		"a: yes\nb: 'yes'\nc: [no, Off, \"on\", n, Y]\nd: |\n  yes\ne: True\nf: !!str yes\n",
		"base: &b {x: 2024-01-02, 7: on}\nmerged: {<<: *b, y: 1}\nalias: *b\n",
		"mode: 0644\nbig: 12345678901234567890\nexp: 1e3\nneg: -0\nnone: ~\nnothing:\nempty: \"\"\nbin: !!binary aGk=\nunder: 1_000\ncolon: 1:30\n",
	} {
		var doc yaml.Node
		if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
			t.Fatal(err)
		}
		if bad := AsKubectl(&doc); bad != nil {
			t.Errorf("%q: line %d is rejected", text, bad.Line)
		}
		var v map[string]any
		if err := doc.Decode(&v); err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		got, err := json.Marshal(v)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		want, err := kubectl.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("%q is\n%s, to kubectl\n%s", text, got, want)
		}
	}
	for _, text := range []string{"a: [1, -.inf]\n", "a: {b: .NaN}\n", "a: {b: 1, ~: 2}\n"} {
		var doc yaml.Node
		if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
			t.Fatal(err)
		}
		if bad := AsKubectl(&doc); bad == nil || bad.Line != 1 || bad.Column < 6 {
			t.Errorf("%q: %+v", text, bad)
		}
	}
}

// TestResolve compares merge keys and aliases with the library that kubectl uses to read manifests.
func TestResolve(t *testing.T) {
	for _, text := range []string{
		"a: &a {x: 1, w: {z: 2}}\nb: {<<: *a, x: 3}\nc: {x: 4, <<: *a}\nd: *a\n",
		"a: &a {x: 1}\nb: &b {x: 2, w: 2}\nc: {<<: [*a, *b], z: 3}\nd: {<<: [*b, *a]}\n",
		"a: &a {x: 1}\nb: &b {<<: *a, w: 2}\nlist: [{<<: *b, x: 0}, *a]\n",
		"a: {<<: {x: 1}, w: 2}\n\"<<\": text\n",
	} {
		var doc yaml.Node
		if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
			t.Fatal(err)
		}
		var v any
		if err := Resolve(doc.Content[0]).Decode(&v); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		got, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		want, err := kubectl.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("%q is\n%s, to kubectl\n%s", text, got, want)
		}
	}
}
