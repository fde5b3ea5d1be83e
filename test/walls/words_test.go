package walls

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A word is retired: not is what it looks like, say what takes its place.
type word struct{ not, say string }

// retired lists words that no text of ours has: messages, help, comments and
// docs.
var retired = []word{
	{`\bfor ever\b`, "forever"},
	{`\bgo(es)? by\b`, "uses"},
	{`\bgo(es)? on (there|here|from)\b`, "resumes, continues"},
	{`\bshall\b`, "must, will"},
	{`\b(heal|cure|mend)(s|ed)?\b`, "fix"},
	{`\bis none of\b`, "unknown: want one of"},
	{`\bis too much\b`, "unsupported, rejected"},
	{`\bcannot be told now\b`, "unknown"},
	{`\b(is|are) no [a-zA-Z%]`, "is not a"},
}

// inComments lists what comments say differently, besides.
var inComments = []word{
	{`\b([Aa]|each|every|no|another|this|other|all) masters?\b`, "API server, control-plane node"},
}

// messages lists what messages and help say differently, besides.
var messages = []word{
	{`\bfolders?\b`, "directory"},
	{`\b(is|are) needed\b`, "is required"},
	{`\brefus(e|es|ed|al)\b`, "reject"},
	{`\bis not known to\b`, "is unknown to"},
	{`\bwants\b`, "requires"},
	{`\b(goes on|go on with)\b`, "resumes, continues"},
	{`\b(the|a|an|every|each|all|first|no|healthy|dead|this|other|these) masters?\b`, "API server, control-plane node"},
	{`\bmaster %[a-z]|\b[Mm]asters (that|whose)\b|\bMasters'`, "API server, control-plane node"},
	{`\b([Tt]he|a|each|every|no) sites?\b`, "Site"},
}

// otherWords are literals in the words of others.
var otherWords = []string{
	"connection refused", // the kernel's
	"/run/edgebake-refused-kubelet-args",
	"the site's networks", "network of the site", "the site's cluster", // the place
	"# Made by edgebake from the site", "# Written by firstboot from the site", // on nodes as it is: a change of it would be one of the file
}

// TestWords holds the texts that programs print, the comments and the docs against
// the glossary.
func TestWords(t *testing.T) {
	seen := map[string]int{}
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "test" || d.Name() == "testdata" || d.Name() == "decisions" || strings.HasPrefix(d.Name(), ".") && d.Name() != ".." && d.Name() != "."):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".md"):
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			seen["docs"]++
			for i, line := range strings.Split(string(text), "\n") {
				hold(t, fmt.Sprintf("%s:%d", path, i+1), line, retired)
			}
			return nil
		case strings.HasSuffix(path, ".yaml") && strings.HasSuffix(filepath.Dir(path), "configs/examples"): // `init` writes two of them
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			held := slices.DeleteFunc(slices.Concat(retired, inComments, messages), func(w word) bool { return strings.Contains(w.not, "folder") })
			for i, comment := range comments(string(text)) {
				seen["examples"]++
				hold(t, fmt.Sprintf("%s, comment %d", path, i+1), comment, held)
			}
			return nil
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		for _, c := range f.Comments {
			seen["comments"]++
			// Words may stand on two lines.
			hold(t, files.Position(c.Pos()).String(), strings.Join(strings.Fields(c.Text()), " "), append(slices.Clone(retired), inComments...))
		}
		held := append(slices.Clone(retired), messages...)
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
			seen["messages"]++
			hold(t, files.Position(lit.Pos()).String(), text, held)
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen["messages"] < 2000 || seen["comments"] < 3000 || seen["docs"] < 12 || seen["examples"] < 70 {
		t.Errorf("only %v", seen)
	}
}

// comments are those of a YAML document, each in one line: words may stand on two.
func comments(document string) []string {
	var all []string
	joins := false // the line before is a comment and nothing else
	for line := range strings.Lines(document) {
		before, text, ok := strings.Cut(line, "# ")
		alone := ok && strings.TrimSpace(before) == ""
		switch {
		case !ok:
		case alone && joins:
			all[len(all)-1] += " " + strings.TrimSpace(text)
		default:
			all = append(all, strings.TrimSpace(text))
		}
		joins = alone
	}
	return all
}

// patterns are compiled once.
var patterns = map[string]*regexp.Regexp{}

// others are near a word, and right.
var others = regexp.MustCompile(`\b[Tt]here (is|are) no\b|\b(is|are) no (longer|more)\b|\bsite\.yaml\b`)

// in returns where the word stands in a text, "" if it does not.
func (w word) in(text string) string {
	if patterns[w.not] == nil {
		patterns[w.not] = regexp.MustCompile(w.not)
	}
	return patterns[w.not].FindString(others.ReplaceAllString(text, ""))
}

// hold holds a text against words.
func hold(t *testing.T, where, text string, words []word) {
	t.Helper()
	for _, other := range otherWords {
		if strings.Contains(text, other) {
			return
		}
	}
	for _, w := range words {
		if found := w.in(text); found != "" {
			t.Errorf("%s: say %q, not %q: %q", where, w.say, found, text)
		}
	}
}

// TestWordsAreFound: each pattern finds what it is for, and nothing near it.
func TestWordsAreFound(t *testing.T) {
	for text, want := range map[string]bool{
		"it is no image":                 true,
		"is no file name":                true,
		"they are no slots":              true,
		"there is no image":              false,
		"There are no slots":             false,
		"it is no longer":                false,
		"the masters are down":           true,
		"asks another master":            true,
		"connecting to master %s":        true,
		"spec.masters must be a list":    false,
		"masters: must not be empty":     false,
		"stamp the site again":           true,
		"stamp the Site again":           false,
		"edgebake push wants an image":   true,
		"the same command goes on there": true,
		"time heals it":                  true,
	} {
		found := false
		for _, w := range slices.Concat(retired, messages, inComments) {
			found = found || w.in(text) != ""
		}
		if found != want {
			t.Errorf("%q: found %v, want %v", text, found, want)
		}
	}
}
