package walls

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// skips lists the files with tests that are skipped even in CI, and the reason. All others use
// test/desk, which fails them in CI.
var skips = map[string]string{
	"ondisk/ext4/ext4_test.go":          "two long parts, with -short, which CI does not use",
	"builder/memory_test.go":            "with -short",
	"firstboot/apply/ignition_test.go":  "with -short",
	"firstboot/hub/ports_test.go":       "a helper process of another test",
	"packaging/packaging_test.go":       "all architectures and go install, which run nightly",
	"test/bench/scale/machines_test.go": "a part of a benchmark, which calls it",
	"test/desk/desk.go":                 "on a developer's computer only",
	"test/e2e/e2e_test.go":              "with -short; long runs run nightly",
	"test/ipvs/ipvs_test.go":            "the measurements that the guest leaves out",
	"test/ipvs/guest/bench_test.go":     "measurements, which `make bench` runs",
	"test/pace/pace.go":                 "with -short, and tests that would not end in time, which .ci/run lists",
	"test/oracle/bench_test.go":         "measurements, which `make bench` runs",
}

// TestNothingIsSkippedSilently finds each call of Skip in the repository's tests.
func TestNothingIsSkippedSilently(t *testing.T) {
	seen := map[string]bool{}
	eachGoFile(t, func(rel string, at func(ast.Node) token.Position, f *ast.File) {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			s, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, s.Sel.Name) {
				return true
			}
			if seen[rel] = true; skips[rel] == "" {
				t.Errorf("%s calls t.Skip: call package test/desk instead, which fails in CI", at(call))
			}
			return true
		})
	})
	for file := range skips {
		if !seen[file] {
			t.Errorf("%s does not skip tests: remove it from the list", file)
		}
	}
}

// eachGoFile parses each Go file of the repository, including tests. rel is its path, and at
// returns the position of a node.
func eachGoFile(t *testing.T, f func(rel string, at func(ast.Node) token.Position, file *ast.File)) {
	t.Helper()
	const root = "../.."
	files := token.NewFileSet()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		if d.IsDir() && (rel == "build" || rel == "bin" || rel == ".git") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, ".go") {
			return nil
		}
		parsed, err := parser.ParseFile(files, p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		f(rel, func(n ast.Node) token.Position { return files.Position(n.Pos()) }, parsed)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
