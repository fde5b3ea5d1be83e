package walls

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// words lists what messages and help say differently, and how.
var words = []struct{ not, say string }{
	{`\bfolders?\b`, "directory"},
	{`\bfor ever\b`, "forever"},
	{`\bgo(es)? by\b`, "uses"},
	{`\b(is|are) needed\b`, "is required"},
	{`\brefus(e|es|ed|al)\b`, "reject"},
	{`\bshall\b`, "must, will"},
	{`\b(heal|cure|mend)(s|ed)?\b`, "fix"},
	{`\bis not known to\b`, "is unknown to"},
	{`\bis none of\b`, "unknown: want one of"},
}

// otherWords are literals that are no words of ours.
var otherWords = []string{
	"connection refused", // the kernel's
	"/run/edgebake-refused-kubelet-args",
}

// TestWords holds the texts that programs print against the glossary.
func TestWords(t *testing.T) {
	seen := 0
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "test" || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && d.Name() != ".." && d.Name() != "."):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(lit.Value)
			// One word is a name, in a document or a table.
			if err != nil || !strings.Contains(text, " ") {
				return true
			}
			seen++
			for _, other := range otherWords {
				if strings.Contains(text, other) {
					return true
				}
			}
			for _, w := range words {
				if found := regexp.MustCompile(w.not).FindString(text); found != "" {
					t.Errorf("%s: say %q, not %q: %q", files.Position(lit.Pos()), w.say, found, text)
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 2000 {
		t.Errorf("only %d texts", seen)
	}
}
