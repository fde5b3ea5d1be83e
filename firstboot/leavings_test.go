package firstboot

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// staysAtReset lists the files of ondisk.StateDir that are missing in resetList, and why: a reset
// keeps them, or removes them in another way.
var staysAtReset = map[string]string{
	"/key":            "it is the machine's, not the cluster's",
	"/sticks":         "an old stick must not be accepted again",
	"/signed":         "an old stick must not be accepted again",
	"/unsigned":       "an old stick must not be accepted again",
	"/stick-dates":    "an old stick must not be accepted again",
	"/network":        "the machine stays reachable",
	"/snapshots":      "they are backups",
	"/etcd-set-aside": "a person may need the data",
	"/restore":        "restoring a snapshot removes it",
	"/manifests":      "restoreManifests removes it",
	"/kubelet.json":   "kubeadm.UndoJoin removes it",
	"/yurthub.env":    "hub.Remove removes it",
	"/update":         "resetFiles removes the directory",
}

// TestResetKnowsAllState checks that a reset removes every file that first boot keeps in the state
// directory, except those for which staysAtReset has a reason.
func TestResetKnowsAllState(t *testing.T) {
	removed := resetList(&machine.Env{Root: t.TempDir()})
	found := 0
	err := filepath.WalkDir(".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			sum, ok := n.(*ast.BinaryExpr)
			if !ok {
				return true
			}
			dir, isName := sum.X.(*ast.SelectorExpr)
			text, isText := sum.Y.(*ast.BasicLit)
			if !isName || !isText || dir.Sel.Name != "StateDir" {
				return true
			}
			path, err := strconv.Unquote(text.Value)
			if err != nil {
				t.Fatal(err)
			}
			found++
			if staysAtReset[path] == "" && !slices.Contains(removed, ondisk.StateDir+path) {
				t.Errorf("%s: a reset leaves %s: add it to a list of ResetFiles or ClusterFiles, or to staysAtReset", name, path)
			}
			return true
		})
		return nil
	})
	if err != nil || found < 20 {
		t.Errorf("%d paths found: %v", found, err)
	}
}
