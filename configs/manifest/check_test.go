package manifest

import (
	"strings"
	"testing"
)

// TestCheckManifest checks that a problem of a manifest names the file, the line and the document.
func TestCheckManifest(t *testing.T) {
	const ok = "# a comment\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n"
	for name, tt := range map[string]struct{ text, want string }{
		"good":         {ok, ""},
		"list":         {"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Namespace, metadata: {name: a}}]\n", ""},
		"empty":        {"---\n# nothing\n---\n", "m.yaml:1:1: contains no Kubernetes object"},
		"syntax":       {ok + "---\n---\nkind: [\n", "m.yaml:8: document 3: not YAML: did not find expected node content"},
		"first syntax": {"a: b: c\n", "m.yaml:1: document 1: not YAML: mapping values are not allowed in this context: the indentation is wrong, or a colon is missing in a line before it; a value that contains a colon and a space needs quotes"},
		"no kind":      {ok + "---\napiVersion: v1\nmetadata: {name: a}\n", "m.yaml:7:1: document 2: kind: is missing"},
		"no name":      {ok + "---\napiVersion: v1\nkind: Pod\n", "m.yaml:7:1: document 2: metadata.name: is missing"},
		"twice":        {ok + "---\napiVersion: v1\nkind: Pod\nkind: Pod\nmetadata: {name: a}\n", `m.yaml:9: document 2: mapping key "kind" already defined at line 8`},
		"no object":    {"- a\n", "m.yaml:1:1: document 1: expected a Kubernetes object (a mapping with apiVersion and kind), got a list"},
		"values":       {"replicas: 3\n", "m.yaml:1:1: document 1: apiVersion: is missing\nm.yaml:1:1: document 1: kind: is missing\nm.yaml:1:1: document 1: metadata.name: is missing"},
		"template":     {"apiVersion: v1\nkind: Pod\nmetadata:\n  name: {{ .Values.name }}\n", "m.yaml:4:10: document 1: a key must be a plain word (it looks like a chart's template: render it first, e.g. with helm template)"},
		"generated":    {"apiVersion: v1\nkind: Pod\nmetadata: {generateName: a-}\n", "m.yaml:3:26: document 1: metadata.generateName: would make another object each time it is applied; set metadata.name"},
		"ours":         {"apiVersion: edgebake.io/v1alpha1\nkind: Site\n", "m.yaml:1:13: document 1: apiVersion: an edgebake document is not a Kubernetes object"},
		"in a list":    {"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod}\n", "m.yaml:4:3: document 1: metadata.name: is missing"},
		"number keys":  {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, annotations: {built: 2024-01-02}}\ndata: {3306: \"db/mysql:3306\"}\n", ""},
		"no JSON":      {"apiVersion: v1\nkind: A\nmetadata: {name: a}\nspec: {most: .inf}\n", "m.yaml:4:14: document 1: objects are sent as JSON, which cannot represent .inf here"},
		"windows line": {strings.ReplaceAll(ok, "\n", "\r\n") + "---\r\nkind: [\r\n", "m.yaml:7: document 2: not YAML: did not find expected node content"},
	} {
		if got := Check("m.yaml", []byte(tt.text)).Error(); got != tt.want {
			t.Errorf("%s:\ngot  %s\nwant %s", name, got, tt.want)
		}
	}
}

func FuzzCheckManifest(f *testing.F) {
	f.Add("apiVersion: v1\nkind: List\nitems: [{apiVersion: v1}]\n---\n- &a [*a]\n")
	f.Fuzz(func(t *testing.T, text string) { Check("m.yaml", []byte(text)) })
}
