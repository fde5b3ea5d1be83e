package yamltree

import (
	"encoding/json"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// FuzzDecode reads any text. Decoding must end, a tree that kubectl would accept must have a JSON
// form, and edited values must be read back.
func FuzzDecode(f *testing.F) {
	for _, text := range []string{
		"a: 1\nb: [x, *c, &c {d: e}]\n", "a: &a [*a, *a]\n", "<<: {a: b}\na: c\n", "a: b\na: c\n", "? [a, b]\n: c\n", "{.nan: .inf, 2026-01-01: yes, 0x10: ~}\n",
		"a: &a {b: &b {c: d}}\ne: [*a, *b, *a, *b]\n", "!!binary aGVsbG8=: !foo bar\n", "---\n...\n--- |\n text\n", strings.Repeat("[", 200), "a: &x\n  <<: *x\n", "\xef\xbb\xbfa: b\r\n",
	} {
		f.Add([]byte(text), "a")
	}
	f.Fuzz(func(t *testing.T, text []byte, key string) {
		doc, err := Parse(text)
		if err != nil || doc.IsZero() {
			return
		}
		var v any
		direct := Unmarshal(text, &v)
		copied := Clone(doc)
		if err := Decode(copied, new(any)); (err == nil) != (direct == nil) {
			t.Errorf("the text: %v, a copy of its tree: %v", direct, err)
		}
		if len(Check(doc)) > 0 {
			return // its aliases may form a cycle
		}
		if bad := AsKubectl(copied); bad == nil {
			var o map[string]any
			if Decode(copied, &o) == nil {
				if _, err := json.Marshal(o); err != nil {
					t.Errorf("kubectl could not send it: %v", err)
				}
			}
		}
		m := Deref(doc.Content[0])
		if m.Kind != yaml.MappingNode {
			return
		}
		Set(m, key, String("new"))
		if got := Text(Get(m, key)); got != "new" {
			t.Errorf("%q was set, and is %q", key, got)
		}
		before := len(m.Content)
		Remove(m, key)
		if len(m.Content) != before-2 {
			t.Errorf("removing %q left %d of %d nodes", key, len(m.Content), before)
		}
	})
}
