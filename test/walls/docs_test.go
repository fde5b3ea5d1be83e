package walls

import (
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TestDecisionHeadings: decisions are numbered without a gap, and begin with the
// number of their file.
func TestDecisionHeadings(t *testing.T) {
	files, err := filepath.Glob("../../docs/decisions/*.md")
	if err != nil || len(files) < 36 {
		t.Fatalf("%d decisions, %v", len(files), err)
	}
	for i, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		number := fmt.Sprintf("%04d", i+1)
		if !strings.HasPrefix(filepath.Base(f), number+"-") {
			t.Errorf("%s: expected decision %s", f, number)
		}
		heading, _, _ := strings.Cut(string(text), "\n")
		title, ok := strings.CutPrefix(heading, "# "+number+": ")
		if !ok || title == "" {
			t.Errorf("%s: its heading is %q, expected \"# %s: TITLE\"", f, heading, number)
		}
	}
}

// TestTablesOfMessages: what a table of the docs says that edgebake says, edgebake says.
// A test of package firstboot holds troubleshooting.md to the code.
func TestTablesOfMessages(t *testing.T) {
	code := literals(t)
	docs, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, doc := range docs {
		text, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		inside := false
		for i, line := range strings.Split(string(text), "\n") {
			cell, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
			switch {
			case !strings.HasPrefix(line, "|"):
				inside = false
				continue
			case cell == "it says":
				inside = true
				continue
			case !inside || strings.HasPrefix(line, "|---"):
				continue
			}
			for _, said := range quoted(cell) {
				checked++
				if !strings.Contains(code, said) {
					t.Errorf("%s:%d: nothing in the code says %q", doc, i+1, said)
				}
			}
		}
	}
	if checked < 40 {
		t.Errorf("only %d pieces of messages", checked)
	}
}

// quoted are the fixed parts of a cell's messages: semicolons separate messages, colons
// their parts; … and numbers differ, and brackets are the reader's.
func quoted(cell string) []string {
	var parts []string
	for _, part := range regexp.MustCompile(`…|; |: |[0-9]+| \([^)]*\)`).Split(cell, -1) {
		if part = strings.Trim(part, " ,:`"); strings.Contains(part, " ") {
			parts = append(parts, part)
		}
	}
	return parts
}

// literals are all texts of the code, in one.
func literals(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	eachGoFile(t, func(rel string, _ func(ast.Node) token.Position, f *ast.File) {
		if strings.HasPrefix(rel, "test/") || strings.HasSuffix(rel, "_test.go") {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err == nil {
					all.WriteString(text + "\x00")
				}
			}
			return true
		})
	})
	return all.String() + syscall.ENOSPC.Error()
}
