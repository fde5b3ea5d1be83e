package configs

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/examples"
)

// TestWhereYAMLIsWrong checks that a syntax error is reported with the line (marked ¶) and the
// usual cause. The mistake is in that line or in the one before it.
func TestWhereYAMLIsWrong(t *testing.T) {
	const head = "apiVersion: edgebake.io/v1alpha1\nkind: Site\n"
	for _, tt := range []struct{ name, text, says string }{
		{"tab", head + "network:\n\tdns: []¶\n", "spaces, not tabs"},
		{"tab at the start of a text", "files:\n  - contents: |¶\n      \ta\n", "spaces, not tabs"},
		{"key right, behind a value", head + "credentials:\n  token: x\n   username: y¶\n", "the indentation is wrong"},
		{"key right, behind comments", head + "masters: [a]\n nodeName: x¶\n# one\n\n# two\n# three\ncredentials: {}\n", "check the indentation"},
		{"first line right", "# a comment\n\n apiVersion: edgebake.io/v1alpha1\nkind: Site¶\n", "check the indentation"},
		{"key left, in an item", head + "network:\n  interfaces:\n    - name: en*\n      gateway: 1.2.3.4\n     mtu: 9000¶\n    - name: b\n", "check the indentation"},
		{"key right, in an item", head + "network:\n  interfaces:\n    - name: en*\n      addresses: [1.2.3.4]\n       mtu: 9000¶\n    - name: b\n", "check the indentation"},
		{"key in a list", head + "masters:\n  - a\n  nodeName: x¶\n", "check the indentation"},
		{"item left", head + "masters:\n  - a\n - b\nnodeName: x¶\n", "check the indentation"},
		{"no space behind the dash", head + "masters:\n  -a¶\n  - b\n", `a space is missing after the "-"`},
		{"quote open", head + "nodeName: \"x¶\nmasters: [a]\n", "a quote that begins in this line is not closed"},
		{"quote closed by the next", head + "nodeName: \"x\nmasters: [\"a\"]¶\n", "that quotes and brackets are closed"},
		{"text behind a quote", head + "nodeName: \"x\" y\nmasters: [a]¶\n", "that quotes and brackets are closed"},
		{"no colon", head + "nodeName: x\nmasters [a]¶\ncredentials:\n", "a colon and a space after it"},
		{"no colon, in the first line", "apiVersion edgebake.io/v1alpha1\nkind: Site¶\n", "a colon is missing in a line before it"},
		{"no space behind the colon", head + "network:\n  dns: []\n  mtu:5¶\n  ntp: []\n", "a space"},
		{"two colons", head + "nodeName: a: b¶\nmasters: [a]\n", "needs quotes"},
		{"bracket open", head + "nodeName: x\nmasters: [a, b¶\ncredentials:\n  token: y\n", "is not closed"},
		{"comma missing", head + "credentials: {token: y username: z}¶\nnodeName: x\n", "a comma is missing"},
		{"text with too little", "files:\n  - contents: |\n      a\n     b\n    path: x¶\n", "check the indentation"},
		{"text at the margin", "files:\n  - contents: |\n      a\nb¶\n    path: x\n", "a line of a text"},
		{"reserved", head + "nodeName: @x¶\nmasters: [a]\n", "begins with @, % or ` needs quotes"},
		{"alias", head + "nodeName: *x\nmasters: [a]¶\n", "begins with *, here or above, needs quotes"},
		{"template", head + "masters: [a]\nnodeName: {{.MAC}}¶\n", "begins with {{ needs quotes"},
		{"windows", strings.ReplaceAll(head+"network:\n  interfaces: []\n dns: []¶\n", "\n", "\r\n"), "check the indentation"},
		{"second document", "apiVersion: edgebake.io/v1alpha1\nkind: Cluster\nname: a\n---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nevictionHard: {}\n maxPods: 60¶\n", "check the indentation"},
	} {
		marked := 1 + strings.Count(tt.text[:strings.Index(tt.text, "¶")], "\n")
		_, err := parseAny("f", []byte(strings.ReplaceAll(tt.text, "¶", "")))
		var probs Problems
		if !errors.As(err, &probs) || !slices.ContainsFunc(probs, func(p Problem) bool {
			return p.Line == marked && strings.Contains(p.Msg, tt.says)
		}) {
			t.Errorf("%s: want line %d: %q\ngot %v", tt.name, marked, tt.says, err)
		}
	}
}

func FuzzWhereYAMLIsWrong(f *testing.F) {
	f.Add("a: b\n c: [\n\"x\n- d: 'e\n\tf")
	f.Fuzz(func(t *testing.T, text string) {
		_, err := Read("f", []byte(text))
		p, ok := err.(Problems)
		if err == nil || !ok {
			return
		}
		lines := 1 // YAML has more kinds of line breaks than editors
		for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} {
			lines += strings.Count(text, end)
		}
		if p[0].Line > lines || p[0].Line < 0 || p[0].Col < 0 {
			t.Errorf("line %d of %d, column %d", p[0].Line, lines, p[0].Col)
		}
	})
}

// TestPlainMaster checks that all spellings of an API server have the same normal form.
func TestPlainMaster(t *testing.T) {
	for spelling, want := range map[string]string{
		"192.0.2.11:6443":           "192.0.2.11:6443",
		"192.0.2.11:06443":          "192.0.2.11:6443",
		"[2001:DB8:0::1]:6443":      "[2001:db8::1]:6443",
		"[2001:db8::1]:6443":        "[2001:db8::1]:6443",
		"[::ffff:192.0.2.11]:6443":  "192.0.2.11:6443",
		"Master-1.Example.com:6443": "master-1.example.com:6443",
		"192.0.2.11":                "192.0.2.11",
		"192.0.2.11:https":          "192.0.2.11:https",
		"":                          "",
	} {
		if got := PlainMaster(spelling); got != want {
			t.Errorf("PlainMaster(%q) = %q, want %q", spelling, got, want)
		}
	}
	site := *mustSite(t, examples.Site)
	site.Masters = []string{"[2001:db8::1]:6443", "[2001:DB8:0::1]:6443"}
	if !strings.Contains(site.Validate().Error(), "is also masters[0]") {
		t.Errorf("two problems: %v", site.Validate())
	}
}
