package walls

import (
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// children are the packages that run on an operator's computer, whose environment may have
// passwords and tokens. Only procgroup may start programs for them.
var children = []string{"builder/", "cmd/edgebake/", "installer/", "packaging/"}

// TestSecretsStayWithUs checks that the programs that edgebake starts do not get its environment
// variables, because they run other people's scripts.
func TestSecretsStayWithUs(t *testing.T) {
	eachGoFile(t, func(rel string, at func(ast.Node) token.Position, f *ast.File) {
		ours := slices.ContainsFunc(children, func(p string) bool { return strings.HasPrefix(rel, p) })
		if !ours || strings.HasSuffix(rel, "_test.go") || strings.HasPrefix(rel, "builder/procgroup/") {
			return
		}
		names := map[string]string{} // local names of these packages in the file
		for _, i := range f.Imports {
			p := strings.Trim(i.Path.Value, `"`)
			if p != "os" && p != "os/exec" && p != "syscall" {
				continue
			}
			name := p[strings.LastIndex(p, "/")+1:]
			if i.Name != nil {
				name = i.Name.Name
			}
			names[name] = p
		}
		ast.Inspect(f, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := s.X.(*ast.Ident)
			if !ok {
				return true
			}
			switch what := names[x.Name] + "." + s.Sel.Name; what {
			case "os/exec.Command", "os/exec.CommandContext", "os.Environ", "os.StartProcess", "syscall.Exec", "syscall.ForkExec", "syscall.StartProcess", "syscall.Environ":
				t.Errorf("%s uses %s, which passes secrets such as EDGEBAKE_KEY_PASSWORD to the child: use procgroup.Command or procgroup.Environ", at(s), what)
			}
			return true
		})
	})
}
