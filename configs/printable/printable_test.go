package printable

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode"
)

func TestPrintable(t *testing.T) {
	for in, want := range map[string]struct{ line, text string }{
		"Größe 3":        {"Größe 3", "Größe 3"},
		"a\x1b[2Jb":      {"a [2Jb", "a?[2Jb"},
		"a\r\n\tb\x00":   {"a   b ", "a\n\tb?"},
		"\u009b31m":      {" 31m", "?31m"},    // the control sequence introducer (CSI) as one character
		"a\u202eb":       {"a b", "a\u202eb"}, // makes the text after it run from right to left
		"bad \xff UTF-8": {"bad \ufffd UTF-8", "bad \ufffd UTF-8"},
	} {
		if got := Line(in); got != want.line {
			t.Errorf("Line(%q) = %q, want %q", in, got, want.line)
		}
		if got := Text(in); got != want.text {
			t.Errorf("Text(%q) = %q, want %q", in, got, want.text)
		}
	}
}

func TestNames(t *testing.T) {
	many := slices.Repeat([]string{strings.Repeat("é", 300)}, 900)
	if got := Names(many); len([]rune(got)) > 5*66+12 || !strings.HasSuffix(got, "é…, and 895 more") {
		t.Errorf("%d characters: %q", len([]rune(got)), got)
	}
	if got := Names([]string{"a", "\x1b]0;owned\x07"}); got != "a,  ]0;owned " {
		t.Errorf("%q", got)
	}
	if got := Short("\xffabc", 3); got != "\ufffda…" {
		t.Errorf("%q", got)
	}
}

func TestWithoutLocalAddr(t *testing.T) {
	for text, want := range map[string]string{
		"read udp 192.0.2.50:40001->192.0.2.1:53: i/o timeout":                            "read udp 192.0.2.1:53: i/o timeout",
		"read tcp [2001:db8::5%eth0]:40001->[2001:db8::1]:6443: connection reset by peer": "read tcp [2001:db8::1]:6443: connection reset by peer",
		"a: read udp 127.0.0.1:1->127.0.0.1:2: x\nb (read udp 127.0.0.1:3->127.0.0.1:4)":  "a: read udp 127.0.0.1:2: x\nb (read udp 127.0.0.1:4)",
		"sever 10.103.97.2:6443 -> 192.0.2.11:6443 weight 0 masq: no":                     "sever 10.103.97.2:6443 -> 192.0.2.11:6443 weight 0 masq: no",
		"a->b": "a->b",
		"->":   "->",
		"":     "",
	} {
		if got := WithoutLocalAddr(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// TestJSON checks that control characters are escaped in JSON, and that its value stays the same.
func TestJSON(t *testing.T) {
	want := map[string]string{"a\u009b2J": "b\x7f\x1b[2J\u0085 Größe\u202e\n\t"}
	var b strings.Builder
	e := json.NewEncoder(JSON(To(&b)))
	e.SetIndent("", "\t")
	if err := e.Encode(want); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsFunc(b.String(), func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) || !strings.Contains(b.String(), `"a\u009b2J": "b\u007f\u001b[2J\u0085 Größe`) {
		t.Errorf("%q", b.String())
	}
	var got map[string]string
	if err := json.Unmarshal([]byte(b.String()), &got); err != nil || !maps.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
}

// TestWriter checks that control characters are replaced and nothing else is lost, wherever the
// text is divided into writes.
func TestWriter(t *testing.T) {
	const text, want = "a\x1b]0;x\a\u009b2J\r\nGrö\xffße\t€\n", "a?]0;x??2J\nGrö\ufffdße\t€\n"
	for n := 1; n <= len(text); n++ {
		var b strings.Builder
		w := To(&b)
		for rest := text; rest != ""; {
			k := min(n, len(rest))
			if got, err := w.Write([]byte(rest[:k])); got != k || err != nil {
				t.Fatal(got, err)
			}
			rest = rest[k:]
		}
		if b.String() != want {
			t.Errorf("by %d bytes: %q, want %q", n, b.String(), want)
		}
		if Raw(w) != &b {
			t.Error("Raw is another stream")
		}
	}
}
