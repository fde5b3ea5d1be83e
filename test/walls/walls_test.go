// Package walls tests which package may import which, as described in ARCHITECTURE.md. The rules
// keep the programs on a node small and the core free of side effects, and confine each foreign
// module to one package.
package walls

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const self = "github.com/edgebake/edgebake"

// mayImport lists the packages of this module that each package may import. A name that ends in
// /... includes all packages below it.
var mayImport = map[string][]string{
	"configs":            {"ondisk", "configs/strict", "configs/yamltree", "configs/forms", "configs/kubeadm", "configs/manifest", "configs/ignition", "openyurt", "configs/imageref", "configs/templates"},
	"configs/clusterdoc": {"configs", "configs/forms", "configs/kubeadm", "configs/strict", "configs/yamltree", "openyurt"},
	"configs/schema":     {"configs/strict"},
	"configs/starter":    {"configs", "configs/examples", "configs/forms", "configs/kubeadm", "configs/schema", "configs/strict", "configs/yamltree", "ondisk/file"},
	"configs/examples":   {},
	"configs/templates":  {"configs/forms", "configs/strict"},
	"configs/imageref":   {},
	"configs/strict":     {"configs/yamltree"},
	"configs/forms":      {"configs/strict"},
	"configs/manifest":   {"configs/bytesize", "configs/strict", "configs/yamltree"},
	"configs/kubeadm":    {"configs/strict", "configs/yamltree", "configs/manifest"},
	"configs/ignition":   {"configs/bytesize", "configs/strict", "configs/forms", "ondisk"},
	"configs/importer":   {"configs", "configs/strict", "configs/yamltree"},
	"openyurt":           {"ondisk"},
	"ondisk":             {},
	"ondisk/file":        {"configs/bytesize"},
	"configs/printable":  {},
	"configs/bytesize":   {},
	"configs/joined":     {},
	// Packages that builder and the node's programs share are outside of builder, from which the
	// node's programs import nothing.
	"ondisk/tree":        {},
	"configs/yamltree":   {},
	"ondisk/seekable":    {},
	"ondisk/chunk":       {},
	"ondisk/artifact":    {"configs/imageref"},
	"ondisk/order":       {"configs/forms", "configs/imageref", "configs/printable"},
	"ondisk/update":      {"ondisk", "ondisk/chunk", "ondisk/ext4", "ondisk/fat", "ondisk/seekable", "ondisk/store", "ondisk/tree"},
	"ondisk/ext4":        {"ondisk/tree"},
	"ondisk/fat":         {"configs/bytesize", "ondisk/tree"},
	"ondisk/slot":        {"configs/bytesize", "ondisk", "ondisk/fat", "ondisk/tree"},
	"ondisk/store":       {"ondisk/tree"},
	"ondisk/store/merge": {"ondisk/store", "ondisk/tree"},
	"builder/plan":       {"builder/images", "configs"},
	"builder/transfer":   {},
	"builder/procgroup":  {},
	"builder/dpkg":       {},
	"builder/fetch":      {"configs/bytesize", "builder/procgroup", "builder/transfer", "ondisk/tree"},
	"builder/registry":   {"builder/transfer", "configs/printable"},
	"builder/images":     {"configs/bytesize", "configs/joined", "configs/manifest", "configs/yamltree", "builder/transfer", "builder/registry", "builder/fetch", "ondisk/ext4", "configs", "ondisk", "ondisk/tree", "ondisk/store", "configs/imageref"},
	"builder/disk/...":   {},
	"builder/disk":       {"configs/bytesize", "builder/disk/...", "ondisk", "ondisk/tree", "ondisk/fat", "ondisk/file", "ondisk/ext4", "ondisk/seekable", "ondisk/chunk", "ondisk/update"},
	"builder/anatomy":    {"configs/bytesize", "configs/joined", "builder", "builder/media", "configs", "ondisk", "ondisk/update"},
	"builder/media":      {"configs/bytesize", "builder/dpkg", "configs/joined", "configs/ignition", "builder/disk/...", "overlays/siteconf", "configs", "ondisk/..."},
	"builder/carry":      {"configs/bytesize", "builder/transfer", "builder/registry", "ondisk/artifact", "builder/media", "builder/disk/...", "ondisk/file", "configs/imageref"},
	"builder/installer":  {"configs/joined", "builder/device", "configs/forms", "builder/procgroup", "builder/media", "builder/disk", "ondisk", "ondisk/fat", "ondisk/file", "ondisk/tree"},
	"builder/qemu":       {"builder/procgroup"},
	"builder/device":     {"builder/procgroup", "ondisk/file", "configs/forms"},
	"builder":            {"builder/...", "overlays/...", "configs/...", "ondisk/...", "openyurt"},
	// Above the build: documents and files that commands read and write.
	"builder/documents": {"configs/bytesize", "configs/joined", "builder", "builder/media", "overlays/siteconf", "configs", "configs/strict", "configs/clusterdoc", "configs/ignition", "configs/manifest", "configs/sealed", "ondisk", "ondisk/slot"},
	"builder/outputs":   {"configs/joined", "builder", "builder/media", "builder/plan", "configs", "ondisk/file"},
	"builder/signing":   {"builder/media", "ondisk", "ondisk/file", "ondisk/slot"},
	"overlays":          {"openyurt", "configs", "ondisk", "ondisk/tree"},
	"overlays/siteconf": {"configs/ignition", "configs/forms", "openyurt", "configs", "ondisk", "configs/kubeadm", "configs/templates"},
	// First boot: kubeapi is above servercert, machine above kubeapi, run above machine, member
	// above run, then network, site and kubeadm in this order. join, hub and controlplane are above
	// those, and not above each other; update is above controlplane. The lists of phases are above
	// all.
	"firstboot":              {"openyurt", "configs", "ondisk", "ondisk/slot", "overlays/siteconf", "firstboot/kubeapi", "firstboot/controlplane", "firstboot/hub", "firstboot/join", "firstboot/kubeadm", "firstboot/machine", "firstboot/member", "firstboot/network", "firstboot/run", "firstboot/site", "firstboot/update"},
	"firstboot/controlplane": {"configs/bytesize", "configs", "configs/manifest", "configs/yamltree", "ondisk", "ondisk/file", "overlays/siteconf", "firstboot/kubeapi", "firstboot/etcdmember", "firstboot/kubeadm", "firstboot/machine", "firstboot/member", "firstboot/network", "firstboot/run", "firstboot/site"},
	"firstboot/hub":          {"openyurt", "configs", "ondisk", "firstboot/kubeapi", "firstboot/kubeadm", "firstboot/machine", "firstboot/member", "firstboot/network", "firstboot/run", "firstboot/site"},
	"firstboot/join":         {"configs/joined", "openyurt", "configs", "configs/printable", "configs/yamltree", "ondisk", "ondisk/file", "overlays/siteconf", "firstboot/kubeapi", "firstboot/kubeadm", "firstboot/machine", "firstboot/member", "firstboot/network", "firstboot/run", "firstboot/site"},
	"firstboot/kubeadm":      {"configs", "ondisk", "overlays/siteconf", "firstboot/kubeapi", "firstboot/machine", "firstboot/member", "firstboot/run", "firstboot/site", "configs/kubeadm"},
	"firstboot/site":         {"configs/bytesize", "configs", "configs/ignition", "ondisk", "ondisk/slot", "overlays/siteconf", "firstboot/kubeapi", "firstboot/apply", "firstboot/machine", "firstboot/member", "firstboot/network", "firstboot/run", "configs/forms", "configs/templates"},
	"firstboot/update":       {"configs/bytesize", "firstboot/controlplane", "configs/joined", "configs/forms", "configs/imageref", "configs/kubeadm", "configs/printable", "firstboot/kubeapi", "ondisk", "ondisk/chunk", "ondisk/fat", "ondisk/seekable", "ondisk/slot", "ondisk/store", "ondisk/tree", "ondisk/artifact", "ondisk/order", "ondisk/update", "overlays/siteconf", "firstboot/machine", "firstboot/member", "firstboot/network", "firstboot/run", "firstboot/site"},
	"firstboot/network":      {"configs", "ondisk", "overlays/siteconf", "firstboot/kubeapi", "firstboot/beneath", "firstboot/machine", "firstboot/member", "firstboot/run"},
	"firstboot/member":       {"firstboot/servercert", "configs/joined", "openyurt", "configs", "configs/yamltree", "ondisk", "overlays/siteconf", "firstboot/kubeapi", "firstboot/machine", "firstboot/run"},
	"firstboot/host":         {"firstboot/efivar", "firstboot/kubeapi", "ondisk", "ondisk/slot", "ondisk/tree", "firstboot/beneath", "firstboot/console", "firstboot/machine"},
	"firstboot/worldtest":    {"openyurt", "configs/kubeadm", "ondisk", "ondisk/slot", "firstboot/kubeapi", "firstboot/machine", "firstboot/member", "firstboot/run", "test/disktest"},
	"firstboot/kubeapi":      {"configs/yamltree", "configs/printable", "firstboot/servercert"},
	"firstboot/servercert":   {"configs/printable"},
	"firstboot/beneath":      {},
	"firstboot/efivar":       {},
	"firstboot/facts":        {"overlays/siteconf", "configs/forms"},
	"firstboot/machine":      {"ondisk", "ondisk/slot", "ondisk/tree", "overlays/siteconf", "firstboot/kubeapi", "firstboot/beneath", "firstboot/facts"},
	"firstboot/run":          {"configs", "configs/printable", "ondisk", "firstboot/machine"},
	"firstboot/...":          {"configs/bytesize", "configs/ignition", "configs/printable", "overlays/siteconf", "firstboot/beneath"},
	// The installer runs on a machine that is not a node yet. It flashes as edgebake does, and
	// reads the machine's facts as first boot does.
	"installer":       {"configs/bytesize", "firstboot/efivar", "builder/procgroup", "builder/transfer", "builder/media", "builder/device", "firstboot/facts", "firstboot/console", "overlays/siteconf", "configs", "ondisk"},
	"ipvs":            {"ipvs/files", "ipvs/kernel", "ipvs/probe", "ondisk", "configs/joined", "configs/printable"},
	"ipvs/files":      {"ondisk", "ondisk/file"},
	"ipvs/kernel":     {},
	"ipvs/probe":      {"configs/printable", "firstboot/servercert"},
	"cluster":         {"configs/bytesize", "firstboot/servercert", "configs/forms", "configs/joined", "configs/printable", "openyurt", "configs", "ondisk", "configs/yamltree", "firstboot/kubeapi", "cluster/reports", "configs/clusterdoc", "ondisk/order"},
	"cluster/reports": {"configs/bytesize", "configs/forms", "configs", "ondisk", "configs/printable", "ondisk/file", "configs/clusterdoc"},
	"cluster/mint":    {"configs/manifest", "configs", "configs/yamltree", "configs/sealed", "firstboot/kubeapi", "ondisk", "ondisk/file", "ondisk/slot", "configs/clusterdoc"},
	"configs/sealed":  {},
	"cmd/...":         {"builder/...", "configs/...", "ondisk/...", "openyurt", "firstboot/...", "ipvs/...", "installer", "cluster/...", "cmd/..."},
	"test/...":        {"..."},
	"packaging":       {"builder", "builder/procgroup"},
}

// onlyImporters lists foreign modules and the only packages that may import them.
var onlyImporters = map[string][]string{
	"github.com/spf13/cobra":                {"cmd/..."},
	"github.com/diskfs/go-diskfs":           {"builder/disk/gpt"},
	"go.etcd.io/bbolt":                      {"ondisk/store"},
	"github.com/coreos/go-systemd/v22/dbus": {"firstboot/host", "cmd/ipvscare"},
	"github.com/moby/ipvs":                  {"ipvs/kernel"},
	"github.com/vishvananda/netlink":        {"ipvs/kernel"},
	"k8s.io/client-go":                      {"cluster"},
	"k8s.io/apimachinery":                   {"cluster"},
	"github.com/distribution/reference":     {"configs/imageref"},
	"aead.dev/minisign":                     {"configs", "ondisk/slot", "builder/signing"},
	"filippo.io/age":                        {"configs/sealed"},
	"testing":                               {"test/...", "firstboot/worldtest"},
}

// forbiddenDeps lists the packages on which a program must not depend, even indirectly. A name
// includes all packages that begin with it.
var forbiddenDeps = map[string][]string{
	"cmd/firstboot": {self + "/builder", self + "/firstboot/worldtest", "k8s.io/client-go", "filippo.io/age", "github.com/diskfs/go-diskfs", "github.com/google/go-containerregistry"},
	"cmd/installer": {self + "/builder/fetch", self + "/builder/images", "k8s.io/client-go", "filippo.io/age", "github.com/spf13/cobra", "github.com/google/go-containerregistry"},
	"cmd/ipvscare":  {self + "/builder", "net/http", "k8s.io/", "github.com/diskfs/go-diskfs", "github.com/coreos/ignition", "go.yaml.in/"},
}

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
	Standard   bool
}

// list runs go list once for all packages of this module.
func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,Deps,Standard", self+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p pkg
		if err := d.Decode(&p); err != nil {
			t.Fatalf("reading go list: %v", err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) == 0 {
		t.Fatal("go list knows no package; is this test run inside the module?")
	}
	return pkgs
}

// matches reports whether a name matches one of the patterns.
func matches(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		root, tree := strings.CutSuffix(p, "...")
		return p == name || tree && (strings.HasPrefix(name, root) || name == strings.TrimSuffix(root, "/"))
	})
}

// entryOf returns the key in mayImport for a package: its own name, or else the longest matching
// pattern, or "".
func entryOf(name string) string {
	if _, ok := mayImport[name]; ok {
		return name
	}
	best := ""
	for p := range mayImport {
		if matches([]string{p}, name) && len(p) > len(best) {
			best = p
		}
	}
	return best
}

// importsOf returns the entry of mayImport for a package.
func importsOf(name string) ([]string, bool) {
	may, ok := mayImport[entryOf(name)]
	return may, ok
}

// table returns the packages in ARCHITECTURE.md's table as patterns.
func table(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Packages\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var names []string
	for line := range strings.Lines(section) {
		cell, ok := strings.CutPrefix(line, "| `")
		if !ok {
			continue
		}
		cell, _, _ = strings.Cut(cell, "` |")
		for _, name := range strings.Split(cell, "`, `") {
			if dir, all := strings.CutSuffix(name, "/*"); all {
				name = dir + "/..."
			}
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		t.Fatal("ARCHITECTURE.md has no table of packages")
	}
	return names
}

func TestMayImport(t *testing.T) {
	described := table(t)
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, self+"/")
		if !matches(described, name) {
			t.Errorf("%s is not in ARCHITECTURE.md's table of packages: add it there, with its purpose", name)
		}
		may, ok := importsOf(name)
		if !ok {
			t.Errorf("%s is not in mayImport: add it there and to ARCHITECTURE.md", name)
			continue
		}
		for _, imp := range p.Imports {
			imp, ours := strings.CutPrefix(imp, self+"/")
			if ours && !matches(may, imp) {
				t.Errorf("%s imports %s; it may import %v", name, imp, may)
			}
		}
	}
}

// TestMayImportIsExact checks that non-test files use each permission of mayImport.
func TestMayImportIsExact(t *testing.T) {
	pkgs := list(t)
	for name, may := range mayImport {
		for _, permitted := range may {
			if !slices.ContainsFunc(pkgs, func(p pkg) bool {
				importer := strings.TrimPrefix(p.ImportPath, self+"/")
				return entryOf(importer) == name && slices.ContainsFunc(p.Imports, func(imp string) bool {
					imp, ours := strings.CutPrefix(imp, self+"/")
					return ours && matches([]string{permitted}, imp)
				})
			}) {
				t.Errorf("mayImport[%q]: nothing there imports %s: remove it", name, permitted)
			}
		}
	}
}

func TestOnlyImporters(t *testing.T) {
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, self+"/")
		for _, imp := range p.Imports {
			for lib, may := range onlyImporters {
				if (imp == lib || strings.HasPrefix(imp, lib+"/")) && !matches(may, name) {
					t.Errorf("%s imports %s; only %v may", name, imp, may)
				}
			}
		}
	}
}

func TestForbiddenDeps(t *testing.T) {
	pkgs := list(t)
	for binary, banned := range forbiddenDeps {
		i := slices.IndexFunc(pkgs, func(p pkg) bool { return p.ImportPath == self+"/"+binary })
		if i < 0 {
			t.Errorf("there is no %s", binary)
			continue
		}
		for _, dep := range pkgs[i].Deps {
			for _, lib := range banned {
				if strings.HasPrefix(dep, lib) {
					t.Errorf("%s depends on %s", binary, dep)
				}
			}
		}
	}
	for _, p := range pkgs {
		if strings.HasPrefix(p.ImportPath, self+"/builder") && slices.Contains(p.Deps, self+"/firstboot") {
			t.Errorf("%s embeds firstboot, which must be an input: otherwise arm64 images could not be built on amd64", p.ImportPath)
		}
	}
}

// TestEntriesExist finds entries whose package or module no longer exists.
func TestEntriesExist(t *testing.T) {
	pkgs := list(t)
	ours := func(pattern string) bool {
		return slices.ContainsFunc(pkgs, func(p pkg) bool {
			name, of := strings.CutPrefix(p.ImportPath, self+"/")
			return of && matches([]string{pattern}, name)
		})
	}
	for name, may := range mayImport {
		for _, pattern := range append([]string{name}, may...) {
			if !ours(pattern) {
				t.Errorf("mayImport[%q]: there is no package %s", name, pattern)
			}
		}
	}
	for _, pattern := range table(t) {
		if !ours(pattern) {
			t.Errorf("ARCHITECTURE.md describes %s, and there is no such package", pattern)
		}
	}
	for lib, may := range onlyImporters {
		for _, pattern := range may {
			if !ours(pattern) {
				t.Errorf("onlyImporters[%q]: there is no package %s", lib, pattern)
			}
		}
		if !slices.ContainsFunc(pkgs, func(p pkg) bool {
			return slices.ContainsFunc(p.Imports, func(imp string) bool { return imp == lib || strings.HasPrefix(imp, lib+"/") })
		}) {
			t.Errorf("onlyImporters[%q]: no package imports it", lib)
		}
	}
	for binary, banned := range forbiddenDeps {
		for _, lib := range banned {
			if !slices.ContainsFunc(pkgs, func(p pkg) bool {
				return slices.ContainsFunc(append(p.Deps, p.ImportPath), func(dep string) bool { return strings.HasPrefix(dep, lib) })
			}) {
				t.Errorf("forbiddenDeps[%q]: no package depends on %s", binary, lib)
			}
		}
	}
}

// TestMatching checks the patterns that the tests above use.
func TestMatching(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"builder/...", "builder/disk/gpt", true}, {"builder/...", "builder", true},
		{"builder/...", "builderx", false}, {"builder/disk", "builder/disk/gpt", false}, {"...", "anything", true},
	} {
		if got := matches([]string{c.pattern}, c.name); got != c.want {
			t.Errorf("matches(%s, %s) = %v", c.pattern, c.name, got)
		}
	}
	if may, _ := importsOf("builder/disk/gpt"); slices.Contains(may, "builder/plan") {
		t.Error("the entry of builder/disk is used for builder/disk/gpt")
	}
}
