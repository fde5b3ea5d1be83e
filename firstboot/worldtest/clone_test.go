package worldtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"slices"
	"testing"
)

// notCloned lists the fields of World that CloneWith leaves out: settings that a test makes again
// on a copy that needs them, counters of one run, and locks.
var notCloned = []string{
	"SlotFiles", "SlotReads", "ReadOnly", "clockSteps", "ReportProxies", "clockAsked", "ExtraAddrs", "hubHealthServer",
	"HasRoute", "FSUUIDs", "VarUsed", "RejectedKubeletArg", "HealthRefusals", "CrashLoop", "kubeletHealthServer", "NFTRules",
	"locks", "NetworkWorks", "networkMu", "TimeServerAnswers", "KubeadmInit", "CtrRun", "DialOther", "Listen", "RefuseDial",
	"Mu", "PowerCutAt", "PoweredOff", "Shutdown", "BeforeEffect",
}

// notHashed lists the fields that Fingerprint leaves out in addition to those that are not copied:
// they have the same value in all machines of a test that cuts the power, or are only output.
var notHashed = []string{
	"T", "Root", "singleMaster", "DNSRecords", "DeadDNSServer", "Console", "Log", "Reports", "deadlines", "JoinError", "NodeAddr",
	"Offline", "KubeletVersion", "joinConf", "KubeletFailsBehindHub", "NoNFT", "KubeletIgnoresFlags", "ClockSynced", "boots",
	"Effects", "EffectNames", "Patience",
}

// TestEveryFieldIsCopied checks that each field of World is copied and hashed, or is listed above.
// Otherwise tests would skip power cuts after which a machine differs only in a new field.
func TestEveryFieldIsCopied(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "clone.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	uses := func(name string) (fields []string) {
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Name.Name != name {
				continue
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && x.Name == "w" {
						fields = append(fields, n.Sel.Name)
					}
				case *ast.KeyValueExpr:
					if key, ok := n.Key.(*ast.Ident); ok {
						fields = append(fields, key.Name)
					}
				}
				return true
			})
		}
		return fields
	}
	copied, hashed := uses("CloneWith"), uses("Fingerprint")
	for i := range reflect.TypeFor[World]().NumField() {
		name := reflect.TypeFor[World]().Field(i).Name
		if slices.Contains(copied, name) == slices.Contains(notCloned, name) {
			t.Errorf("%s: copy it in CloneWith, or list it in notCloned, and not both", name)
		}
		if !slices.Contains(notCloned, name) && slices.Contains(hashed, name) == slices.Contains(notHashed, name) {
			t.Errorf("%s: hash it in Fingerprint, or list it in notHashed, and not both", name)
		}
	}
}
