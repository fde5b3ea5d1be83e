package walls

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// everywhere are the packages that every Debian machine with Go and this repository has.
var everywhere = []string{"apt", "coreutils", "dpkg", "git", "mount", "util-linux"}

// TestNeededProgramsAreInstalled checks that test/deps/install.sh installs all programs that tests
// request from test/desk, so that no test fails on a new machine.
func TestNeededProgramsAreInstalled(t *testing.T) {
	script, err := os.ReadFile("../deps/install.sh")
	if err != nil {
		t.Fatal(err)
	}
	var installed []string
	for _, m := range regexp.MustCompile(`packages\+?=\(([^)]*)\)`).FindAllSubmatch(script, -1) {
		installed = append(installed, strings.Fields(string(m[1]))...)
	}
	eachGoFile(t, func(_ string, at func(ast.Node) token.Position, f *ast.File) {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 3 {
				return true
			}
			if s, ok := call.Fun.(*ast.SelectorExpr); !ok || s.Sel.Name != "NeedProgram" {
				return true
			}
			lit, ok := call.Args[2].(*ast.BasicLit)
			if !ok { // a loop's variable
				return true
			}
			pkg, err := strconv.Unquote(lit.Value)
			if err != nil || !slices.Contains(installed, pkg) && !slices.Contains(everywhere, pkg) {
				t.Errorf("%s asks for a program of the package %s, which test/deps/install.sh does not install", at(call), lit.Value)
			}
			return true
		})
	})
	scripts, err := filepath.Glob("../../cmd/*/testdata/script/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range scripts {
		script, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^need \S+ (\S+)$`).FindAllSubmatch(script, -1) {
			if pkg := string(m[1]); !slices.Contains(installed, pkg) && !slices.Contains(everywhere, pkg) {
				t.Errorf("%s asks for a program of the package %s, which test/deps/install.sh does not install", name, pkg)
			}
		}
	}
}
