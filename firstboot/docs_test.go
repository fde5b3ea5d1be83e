package firstboot

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// verbs are the places of a message that differ from machine to machine.
var verbs = regexp.MustCompile(`%[+#]?[-0-9.]*[a-z]`)

// literals collects every string literal of the packages whose words a person
// may see, and those that Permanent, Advise or an exported error begin with.
func literals(t *testing.T) (all, must []string) {
	t.Helper()
	for _, dir := range []string{".", "apply", "seat", "../cluster/api", "../configs/ondisk/slot", "../openyurt", "../overlays/node"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.BasicLit:
					if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING {
						all = append(all, s)
					}
				case *ast.CallExpr:
					name, ok := n.Fun.(*ast.Ident)
					if !ok || name.Name != "Permanent" && name.Name != "Advise" || len(n.Args) != 2 {
						break
					}
					if call, ok := n.Args[0].(*ast.CallExpr); ok && len(call.Args) > 0 {
						if lit, ok := call.Args[0].(*ast.BasicLit); ok {
							if s, err := strconv.Unquote(lit.Value); err == nil {
								must = append(must, s)
							}
						}
					}
				}
				return true
			})
		}
	}
	return all, must
}

// TestTroubleshootingSpeaksAsFirstBootDoes: what the page quotes is what the
// code says, and what the code asks a person to heal is on the page.
func TestTroubleshootingSpeaksAsFirstBootDoes(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	all, must := literals(t)
	if len(must) < 10 {
		t.Fatalf("only %d messages with a fix were found", len(must))
	}
	quoted := 0
	for line := range strings.Lines(page) {
		msg, ok := strings.CutPrefix(strings.TrimSpace(line), "### ")
		if !ok {
			continue
		}
		quoted++
		for part := range strings.SplitSeq(msg, "…") {
			part = strings.TrimSpace(part)
			if part == "" {
				continue
			}
			found := false
			for _, l := range all {
				found = found || strings.Contains(l, part)
			}
			if !found {
				t.Errorf("the page quotes %q; the code says nothing of the kind", part)
			}
		}
	}
	if quoted < 15 {
		t.Errorf("the page quotes only %d messages", quoted)
	}
	for _, m := range must {
		long := ""
		for _, part := range verbs.Split(m, -1) {
			if part = strings.Trim(part, " :,()"); len(part) > len(long) {
				long = part
			}
		}
		if len(long) > 10 && !strings.Contains(page, long) {
			t.Errorf("the page does not know %q", m)
		}
	}
}

// TestArchitectureNamesThePhases holds the lists of ARCHITECTURE.md against the
// phases.
func TestArchitectureNamesThePhases(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, page, _ := strings.Cut(string(b), "The phases:\n")
	worker, page, _ := strings.Cut(page, "→ done")
	_, page, _ = strings.Cut(page, "after clock:\n")
	master, _, _ := strings.Cut(page, "→ done")
	names := func(list string) string {
		return strings.Join(strings.FieldsFunc(list, func(r rune) bool { return strings.ContainsRune("→ \n()", r) }), " ")
	}
	first, _, _ := strings.Cut(worker, "→ cluster")
	native := regexp.MustCompile(`\(.*?\)`).ReplaceAllString(worker, "")
	site := func(nodeType string) *Active {
		s := &configs.Site{NodeType: nodeType, Masters: []string{"192.0.2.1:6443"}}
		if nodeType == configs.NodeControlPlane {
			s.ControlPlane = &configs.SiteControlPlane{Members: []configs.ControlPlaneMember{{Name: "m1", Address: "192.0.2.1"}}}
			s.NodeName = "m1"
		}
		return &Active{Site: s, Image: ondisk.ImageInfo{Yurthub: &ondisk.YurthubInfo{Form: openyurt.FormUnit}}}
	}
	for nodeType, want := range map[string]string{configs.NodeNative: names(native), configs.NodeEdge: names(worker), configs.NodeControlPlane: names(first + master)} {
		var got []string
		for _, p := range append(firstPhases(&siteReader{}), Phases(site(nodeType))...) {
			got = append(got, p.Name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: the page has\n%s\nthe code\n%s", nodeType, want, strings.Join(got, " "))
		}
	}
}
