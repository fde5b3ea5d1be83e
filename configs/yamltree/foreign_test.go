package yamltree

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/test/desk"
)

// within fails the test if work needs far more processor time than a linear algorithm.
func within(t *testing.T, what string, work func()) {
	t.Helper()
	if took := desk.Processor(t, work); took > 10*time.Second {
		t.Errorf("%s took %s", what, took)
	}
}

// TestUnmarshalOthers checks that texts are rejected in linear time if package yaml would need
// minutes and gigabytes for them.
func TestUnmarshalOthers(t *testing.T) {
	distinct := func(n int) string {
		var b strings.Builder
		b.WriteString("{")
		for i := range n {
			fmt.Fprintf(&b, "k%d,", i)
		}
		return b.String() + "}"
	}
	aliases := "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
	for i := range 20 {
		aliases += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
	}
	var chain strings.Builder
	chain.WriteString("- &b0 [x]\n")
	for i := range 20_000 {
		fmt.Fprintf(&chain, "- &b%d [*b%d]\n", i+1, i)
	}
	for name, c := range map[string]struct{ text, want string }{
		"equal keys":          {"{" + strings.Repeat("a,", 60_000) + "}", "want at most 10000"},
		"a few equal keys":    {"{" + strings.Repeat("a,", 9_000) + "}", `mapping key "a" already defined at line 1; and 45 more`},
		"equal, in two lines": {"x:\n  b: 1\n  b: 2\n", `line 3: mapping key "b" already defined at line 2`},
		"a long key":          {"{" + strings.Repeat(strings.Repeat("k", 5_000)+",", 9) + "}", "…\" already defined"},
		"distinct keys":       {distinct(30_000), "a mapping with 30000 keys: want at most 10000"},
		"many mappings":       {"[" + strings.Repeat(distinct(8_000)+",", 20) + "]", "its mappings have too many keys"},
		"one mapping, often":  {"a: &a " + distinct(4_000) + "\nb: [" + strings.Repeat("*a,", 20) + "]\n", "its mappings have too many keys"},
		"aliases":             {aliases, "with its aliases it has more than 500000 values"},
		"a chain of aliases":  {chain.String(), "with its aliases it has more than 500000 values"},
		"a part of itself":    {"a: &a [*a]\n", "the alias *a refers to a node that contains it"},
		"dense":               {"[" + strings.Repeat("{},", 300_000) + "]", "the document is too large"},
		"of another type":     {"a: [" + strings.Repeat("x,", 9_000) + "]\n", "cannot unmarshal !!str `x` into int; and 8995 more"},
	} {
		t.Run(name, func(t *testing.T) {
			within(t, name, func() {
				var v struct{ A []int }
				err := Unmarshal([]byte(c.text), &v)
				if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 2000 {
					t.Errorf("%.2000v", err)
				}
			})
		})
	}
}

// TestUnmarshal checks that ordinary texts are decoded as by package yaml.
func TestUnmarshal(t *testing.T) {
	for _, text := range []string{
		"", "# nothing\n", "a: 1\nb: {c: [x, y], d: &d {e: f}}\ng: *d\nh: {<<: *d, i: 1}\n", "--- # first\na: b\n---\na: c\n", "[1, 2]\n", "x: '---'\n",
	} {
		var got, want any
		err, wantErr := Unmarshal([]byte(text), &got), yaml.Unmarshal([]byte(text), &want)
		if err != nil || wantErr != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%q: %v %v, want %v %v", text, got, err, want, wantErr)
		}
	}
	var v any
	if err := Unmarshal([]byte("a: [\n"), &v); err == nil || !strings.Contains(err.Error(), "yaml:") {
		t.Errorf("a syntax error: %v", err)
	}
}

// TestTooDense checks that each document is counted separately, and that dashes inside words are
// not counted.
func TestTooDense(t *testing.T) {
	object := "a: [b, c]\n- d\nwell-known: e-f\n"
	if err := DenserThan([]byte(strings.Repeat("---\n"+object, 1000)), 6); err != nil {
		t.Errorf("many small documents: %v", err)
	}
	err := DenserThan([]byte(object+"x: ---\n"+object), 8)
	var f Fault
	if !errors.As(err, &f) || f.Line != 5 {
		t.Errorf("one large document: %v", err)
	}
}
