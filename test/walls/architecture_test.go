package walls

import (
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// reveals lists the files that read the value of a Secret, with the reason. A secret can leak at
// each of these places, so be careful with additions.
var reveals = map[string]string{
	"configs/strict/encode.go":        "the slot, where all secrets of a Site are",
	"configs/parse_inventory.go":      "an Inventory's token, into each machine's Site",
	"configs/kubeadm/controlplane.go": "the token that kubeadm init makes, for kubeadm",
	"configs/manifest/packed.go":      "manifests, unpacked",
	"configs/controlplane.go":         "checks the cluster's keys",
	"configs/parse.go":                "checks a token's form",
	"configs/strict/tags.go":          "checks the forms of secrets",
	"configs/validate_network.go":     "checks a Wi-Fi key's form",
	"configs/validate_site.go":        "checks the forms of token, password hash and Ignition config",
	"configs/warnings.go":             "looks for modes in decimal in an Ignition config",
	"builder/media/check.go":          "looks for the token in other files of the slot",
	"configs/ignition/ignition.go":    "looks for the token in an Ignition config",
	"overlays/siteconf/render.go":     "the Ignition config and password hashes, for the applier",
	"overlays/siteconf/check.go":      "the Ignition config, held against the image",
	"overlays/siteconf/network.go":    "Wi-Fi keys, for wpa_supplicant",
	"overlays/siteconf/join.go":       "the token, for kubeadm join",
	"firstboot/join/discovery.go":     "the token, for the discovery and kubeadm's discovery file",
	"firstboot/hub/pod.go":            "the token, for yurthub as a static pod",
	"firstboot/member/ca.go":          "whether the discovery file has this token",
	"firstboot/controlplane/keys.go":  "the cluster's keys and manifests, for kubeadm and the API server",
	"firstboot/site/secrets.go":       "what logs and reports must not contain",
	"firstboot/site/site.go":          "the Ignition config without the token, to name the Site",
	"firstboot/site/apply.go":         "the Ignition config without the token, to keep it",
	"firstboot/site/forget.go":        "the Ignition config without the token, for the slot",
	"cluster/token.go":                "a token's Secret in the cluster, and the token in a Site",
	"cluster/preflight.go":            "the token, to ask the cluster with it",
	"cluster/reports/serve.go":        "the receiver's key, for the Cluster",
	"cluster/reports/identity.go":     "how long the receiver's key is",
	"configs/clusterdoc/report.go":    "the receiver's key, of which a machine's URL is made",
	"cmd/edgebake/init.go":            "a new token, into the Site to start from",
	"cluster/mint/write.go":           "how large the manifests are",
}

// TestReveals checks that reveals is complete, as ARCHITECTURE.md claims.
func TestReveals(t *testing.T) {
	found := map[string]string{}
	eachGoFile(t, func(rel string, at func(ast.Node) token.Position, f *ast.File) {
		if strings.HasSuffix(rel, "_test.go") || strings.HasPrefix(rel, "test/") {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "Reveal" && found[rel] == "" {
				found[rel] = fmt.Sprintf("%s:%d", rel, at(s).Line)
			}
			return true
		})
	})
	for rel, where := range found {
		if reveals[rel] == "" {
			t.Errorf("%s reveals a secret: if it must, add it with a reason to the list in this test", where)
		}
	}
	for rel := range reveals {
		if found[rel] == "" {
			t.Errorf("%s does not reveal a secret: remove it from the list", rel)
		}
	}
}

// section returns the text of ARCHITECTURE.md from words to the next blank line.
func section(t *testing.T, words string) string {
	t.Helper()
	text, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), words)
	if !ok {
		t.Fatalf("ARCHITECTURE.md lacks %q", words)
	}
	after, _, _ = strings.Cut(after, "\n\n")
	return after
}

// TestSharedPackages checks ARCHITECTURE.md's list of packages that builder shares with a node's
// programs.
func TestSharedPackages(t *testing.T) {
	carried := func(prefix string) map[string]bool {
		all := map[string]bool{}
		for _, p := range list(t) {
			name := strings.TrimPrefix(p.ImportPath, self+"/")
			if !matches([]string{prefix}, name) {
				continue
			}
			for _, dep := range append(p.Deps, p.ImportPath) {
				if ours, ok := strings.CutPrefix(dep, self+"/"); ok {
					all[ours] = true
				}
			}
		}
		return all
	}
	built, node := carried("builder/..."), carried("cmd/firstboot")
	maps.Copy(node, carried("cmd/ipvscare"))
	var shared, told []string
	for name := range built {
		if node[name] {
			shared = append(shared, name)
		}
	}
	slices.Sort(shared)
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(section(t, "`builder` and the programs on a node share these packages:"), -1) {
		told = append(told, m[1])
	}
	if !slices.Equal(shared, told) {
		t.Errorf("builder and the programs on a node share\n%s\nARCHITECTURE.md says\n%s", strings.Join(shared, " "), strings.Join(told, " "))
	}
}

// TestKernelInterfaces checks that in ipvs/kernel only one file uses netlink, and only one the
// paths of /proc/net.
func TestKernelInterfaces(t *testing.T) {
	users := map[string][]string{}
	eachGoFile(t, func(rel string, _ func(ast.Node) token.Position, f *ast.File) {
		if path.Dir(rel) != "ipvs/kernel" || strings.HasSuffix(rel, "_test.go") {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Fatal(err)
			}
			api := ""
			switch {
			case strings.HasPrefix(text, "github.com/moby/ipvs"), strings.HasPrefix(text, "github.com/vishvananda/netlink"):
				api = "netlink"
			case strings.HasPrefix(text, "/proc/net"):
				api = "/proc/net"
			}
			if api != "" && !slices.Contains(users[api], rel) {
				users[api] = append(users[api], rel)
			}
			return true
		})
	})
	if got := fmt.Sprint(users); got != "map[/proc/net:[ipvs/kernel/proc.go] netlink:[ipvs/kernel/kernel_linux.go]]" {
		t.Errorf("%s: ARCHITECTURE.md differs", got)
	}
}

// trees lists the files that decode YAML documents or single values. Documents are decoded as
// trees, which yamltree checks first.
var trees = map[string]string{
	"configs/yamltree/foreign.go": "checks each tree first",
	"configs/yamltree/objects.go": "single values",
	"configs/strict/document.go":  "trees",
	"configs/strict/decode.go":    "single values",
	"configs/strict/syntax.go":    "trees, to find a line",
	"configs/manifest/check.go":   "trees, decoded after yamltree.Check",
	"configs/kubeadm/kubeadm.go":  "trees",
	"builder/images/podimages.go": "trees",
	"firstboot/kubeapi/apply.go":  "trees",
	"cluster/mint/mint.go":        "JSON",
}

// TestYAMLIsChecked checks that documents are decoded through yamltree, which limits mappings:
// package yaml compares each key with all others and adds an error for every equal pair.
func TestYAMLIsChecked(t *testing.T) {
	used := map[string]bool{}
	eachGoFile(t, func(rel string, at func(ast.Node) token.Position, f *ast.File) {
		if strings.HasSuffix(rel, "_test.go") || strings.HasPrefix(rel, "test/") || strings.HasPrefix(rel, "firstboot/worldtest/") {
			return
		}
		if !slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"go.yaml.in/yaml/v3"` }) {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			s, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			pkg, _ := s.X.(*ast.Ident)
			switch {
			case pkg != nil && slices.Contains([]string{"yamltree", "pem", "utf16"}, pkg.Name):
			case s.Sel.Name == "Unmarshal" && pkg != nil && pkg.Name == "yaml":
				t.Errorf("%s:%d: yaml.Unmarshal: use yamltree.Unmarshal or yamltree.Parse", rel, at(n).Line)
			case s.Sel.Name == "Decode":
				if used[rel] = true; trees[rel] == "" {
					t.Errorf("%s:%d: Decode of package yaml: use yamltree.Decode", rel, at(n).Line)
				}
			}
			return true
		})
	})
	for rel := range trees {
		if !used[rel] {
			t.Errorf("%s does not decode YAML: remove it from the list", rel)
		}
	}
}

// TestStreamsArePrintable checks that the programs print through printable.To, because terminals
// interpret control characters, which certificates, sticks, disks and servers may contain.
func TestStreamsArePrintable(t *testing.T) {
	wrapped := map[string]bool{"cmd/internal/console/streams.go": false, "cmd/firstboot/cli.go": false, "cmd/ipvscare/run.go": false}
	eachGoFile(t, func(rel string, at func(ast.Node) token.Position, f *ast.File) {
		if !strings.HasPrefix(rel, "cmd/") || strings.HasSuffix(rel, "_test.go") {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			pkg, _ := s.X.(*ast.Ident)
			switch {
			case pkg == nil:
			case pkg.Name == "os" && (s.Sel.Name == "Stdout" || s.Sel.Name == "Stderr") && path.Base(rel) != "main.go":
				t.Errorf("%s:%d: os.%s: use the streams of the command", rel, at(n).Line, s.Sel.Name)
			case pkg.Name == "printable" && s.Sel.Name == "To":
				if _, ok := wrapped[rel]; ok {
					wrapped[rel] = true
				}
			}
			return true
		})
	})
	for rel, ok := range wrapped {
		if !ok {
			t.Errorf("%s does not wrap the program's streams with printable.To", rel)
		}
	}
}
