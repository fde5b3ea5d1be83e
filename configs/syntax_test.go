package configs

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

// TestWhereYAMLIsWrong: the line that is named is the one to edit. In the documents
// it is the one with ¶ at its end, or § where the column is named as well.
func TestWhereYAMLIsWrong(t *testing.T) {
	const head = "apiVersion: edgebake.io/v1alpha1\nkind: Site\n"
	kinds := func(kind, rest string) string {
		return "apiVersion: edgebake.io/v1alpha1\nkind: " + kind + "\n" + rest
	}
	for _, tt := range []struct{ name, text, says string }{
		{"tab", head + "network:\n§\tdns: []\n", "a tab where the line is indented; use spaces"},
		{"tab behind spaces", head + "network:\n  dns:\n  §\t- 1.1.1.1\n", "a tab"},
		{"tab behind the dash", head + "masters:\n-§\ta\n- b\nnetwork:\n\tdns: []\n", "a tab"},
		{"tab far below", head + "nodeName: x\nnetwork:\n  interfaces:\n  - name: en*\n    addresses: [a]\n\n\n§\tgateway: 1.2.3.4\n", "a tab"},
		{"tab at the start of a text", "files:\n  - contents: |\n      §\ta\n", "a tab"},
		{"tab in a text is none", "files:\n  - contents: |\n      a\n      \tb\n §mode: x\n", "column 2 belongs to nothing"},
		{"key right, behind a value", head + "credentials:\n  token: x\n   §username: y\n", "indented as a part of the value before it"},
		{"key right, at the top", head + "masters: [a]\n §nodeName: x\n", "column 2 belongs to nothing above it"},
		{"key right, behind a block", head + "credentials:\n  token: x\n\n\n §nodeName: x\nmasters: [a]\n", "column 2"},
		{"key right, behind comments", head + "masters: [a]\n §nodeName: x\n# one\n\n# two\n# three\ncredentials: {}\n", "column 2"},
		{"second line right", "apiVersion: edgebake.io/v1alpha1\n §kind: Site\nmasters: [a]\n", "part of the value"},
		{"first line right", "# a comment\n\n§ apiVersion: edgebake.io/v1alpha1\nkind: Site\n", "a later one is not"},
		{"key left", head + "network:\n  interfaces: []\n §dns: []\n", "column 2"},
		{"key left, in an item", head + "network:\n  interfaces:\n    - name: en*\n      gateway: 1.2.3.4\n     §mtu: 9000\n    - name: b\n", "column 6"},
		{"key right, in an item", head + "network:\n  interfaces:\n    - name: en*\n      addresses: [1.2.3.4]\n       §mtu: 9000\n    - name: b\n", "column 8"},
		{"key in a list", head + "masters:\n  - a\n  §nodeName: x\n", "column 3"},
		{"key below an item", head + "masters:\n- a\n  §b: c\n", "part of the value"},
		{"key below a value", head + "credentials: x\n  §token: y\nnodeName: x\n", "remove that value"},
		{"item left", head + "masters:\n  - a\n §- b\nnodeName: x\n", "column 2"},
		{"item right", head + "masters:\n  - a\n  - b\n   §- c\nnodeName: x\n", "part of the value in line 5"},
		{"item below a value", head + "nodeName: x\n\n  §- b\n", "part of the value in line 3"},
		{"item below a value, at the top", head + "nodeName: x\n§- b\nmasters: [a]\n", "column 1"},
		{"item below a list in brackets", head + "masters: [a]\n  §- b\nnodeName: x\n", "column 3"},
		{"no space behind the dash", head + "masters:\n  §-a\n  - b\n", `a space is missing after the "-"`},
		{"quote open", head + "nodeName: \"x¶\nmasters: [a]\n", "a quote that begins in this line is not closed"},
		{"quote open before another document", head + "nodeName: \"x¶\nmasters: [a]\n---\nkind: A\n", "a quote that begins in this line is not closed"},
		{"quote closed by the next", head + "nodeName: \"x¶\nmasters: [\"a\"]\n", "closed in line 4 only"},
		{"quote closed far below", head + "nodeName: 'x¶\nmasters: [a]\n\ncredentials:\n  token: 'y'\n", "closed in line 7 only"},
		{"quote open in a list", head + "masters: [\"a, b]¶\nnodeName: x\n", "is not closed"},
		{"text behind a quote", head + "nodeName: \"x\" y¶\nmasters: [a]\n", "behind a value in quotes"},
		{"one bracket more", head + "masters: [a, b]]¶\nnodeName: x\n", "brackets"},
		{"no colon", head + "nodeName: x\n§masters [a]\ncredentials:\n", "a colon and a space behind it"},
		{"no colon, in the first line", "§apiVersion edgebake.io/v1alpha1\nkind: Site\n", "a colon and a space behind it"},
		{"no colon, before a block", head + "§credentials\n  token: y\nmasters: [a]\n", "a colon"},
		{"no colon, before a list", head + "§masters\n- a\nnodeName: x\n", "a colon"},
		{"no colon, first in a block", head + "network:\n  §ntp []\n\n  dns: []\n", "a colon"},
		{"no colon, last", head + "masters: [a]\n§nodeName x\n", "a colon"},
		{"no space behind the colon", head + "network:\n  dns: []\n  §mtu:5\n  ntp: []\n", "a space"},
		{"two colons", head + "nodeName: a: b¶\nmasters: [a]\n", "needs quotes"},
		{"bracket open", head + "nodeName: x\nmasters: [a, b¶\ncredentials:\n  token: y\n", "is not closed"},
		{"bracket open at the end", head + "masters: [a, b¶", "is not closed"},
		{"brace open", head + "credentials: {token: y¶\nnodeName: x\n", "is not closed"},
		{"comma missing", head + "credentials: {token: y username: z}¶\nnodeName: x\n", "a comma is missing"},
		{"text with too little", "files:\n  - contents: |\n      a\n     §b\n    path: x\n", "column 6"},
		{"text at the margin", "files:\n  - contents: |\n      a\n§b\n    path: x\n", "a line of a text"},
		{"reserved", head + "nodeName: §@x\nmasters: [a]\n", "begins with @ needs quotes"},
		{"template", head + "masters: [a]\nnodeName: §{{.MAC}}\n", "begins with {{ needs quotes"},
		{"windows", strings.ReplaceAll(head+"network:\n  interfaces: []\n §dns: []\n", "\n", "\r\n"), "column 2"},
		{"image", kinds("Image", "name: x\nkubernetes:\n  version: v1.36.3\n  source:\n    goModule: {}\n   §kubectl: true\n"), "column 4"},
		{"image, item", kinds("Image", "images:\n  - ref: a\n    layout: b\n   §- ref: c\n"), "column 4"},
		{"inventory", kinds("Inventory", "sites:\n  - name: a\n    match: {serial: b}\n  - name: b\n    match:\n      serial: c\n     §macs: [d]\n"), "column 6"},
		{"inventory, defaults", kinds("Inventory", "defaults:\n  §masters\n    - a\nsites: []\n"), "a colon"},
		{"cluster", kinds("Cluster", "name: a\nmasters:\n  - name: m1\n    network:\n      dns: []\n   §joins: x\n"), "column 4"},
		{"cluster, second document", kinds("Cluster", "name: a\n---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nevictionHard: {}\n §maxPods: 60\n"), "column 2"},
	} {
		want := "f:"
		for i, line := range strings.Split(tt.text, "\n") {
			if col := strings.Index(line, "§"); col >= 0 {
				want += fmt.Sprintf("%d:%d: ", i+1, col+1)
			} else if strings.Contains(line, "¶") {
				want += fmt.Sprintf("%d: ", i+1)
			}
		}
		doc, err := Read("f", []byte(strings.NewReplacer("§", "", "¶", "").Replace(tt.text)))
		if err == nil {
			_, err = doc.Any()
		}
		found := false
		for line := range strings.Lines(fmt.Sprint(err)) {
			found = found || strings.HasPrefix(line, want) && strings.Contains(line, tt.says)
		}
		if !found {
			t.Errorf("%s: want %s... %q\ngot %v", tt.name, want, tt.says, err)
		}
	}
	// What looks like it and is not.
	for _, value := range []string{"x - b", "x - b # - c", "|\n      x\n      - b\n", "\"x\n      - b\""} {
		text := kinds("Image", "files:\n  - path: /a\n    contents: "+value+"\n  - path: /b\n    contents: b\n")
		if _, err := ParseImage("f", []byte(text)); err == nil || strings.Contains(err.Error(), "not YAML") || strings.Contains(err.Error(), "part of the value") {
			t.Errorf("%s: %v", value, err)
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
		lines := 1 // YAML knows more ends of lines than editors
		for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} {
			lines += strings.Count(text, end)
		}
		if p[0].Line > lines || p[0].Line < 0 || p[0].Col < 0 {
			t.Errorf("line %d of %d, column %d", p[0].Line, lines, p[0].Col)
		}
	})
}

// TestManyItemsInALine: a file on a stick that is one long line does not keep a
// machine busy: the time grows with the file, not with its square.
func TestManyItemsInALine(t *testing.T) {
	parse := func(item string) time.Duration {
		doc := "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [" + strings.Repeat(item+",", 40_000) + "z]\n"
		return desk.Processor(t, func() {
			if _, err := ParsePublicSite("site.yaml", []byte(doc)); err == nil {
				t.Error("taken")
			}
		})
	}
	plain, items := parse("x-ay"), parse("x- y")
	if items > 10*plain+5*time.Second {
		t.Errorf("%v with what looks like items, %v without", items, plain)
	}
}

// TestPlainMaster: one API server is one, however it is written.
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
	site := *mustSite(t, exampleSite)
	site.Masters = []string{"[2001:db8::1]:6443", "[2001:DB8:0::1]:6443"}
	if !strings.Contains(site.Validate().Error(), "is masters[0] again") {
		t.Errorf("they are two: %v", site.Validate())
	}
}
