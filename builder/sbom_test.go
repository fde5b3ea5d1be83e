package builder

import (
	"encoding/json"
	"reflect"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// TestSBOMHasNamesThatDifferInSigns checks that names that differ only in punctuation give separate
// elements, and that a repeated name gives one.
func TestSBOMHasNamesThatDifferInSigns(t *testing.T) {
	valid := regexp.MustCompile(`^[A-Za-z0-9.-]+$`)
	d := &sbom{seen: map[common.ElementID]bool{}, doc: &spdx.Document{}}
	names := []string{
		"oci-edgebake.test/team/app:1", "oci-edgebake.test/team_app:1", "oci-edgebake.test/team-app:1",
		"deb-libc++1:amd64", "deb-libc--1:amd64", "file-usr/bin/a_b", "file-usr/bin/a-b", "file-usr/bin/ä", "file-usr/bin/ö",
		"go-example.org/a@v1-2", "go-example.org/a-v1@2",
	}
	ids := map[common.ElementID]string{}
	for range 2 {
		for _, n := range names {
			id := d.add(n, &spdx.Package{PackageName: n})
			if other, ok := ids[id]; ok && other != n || !valid.MatchString(string(id)) {
				t.Errorf("%s is %s, as is %q", n, id, other)
			}
			ids[id] = n
		}
	}
	if len(d.doc.Packages) != len(names) {
		t.Errorf("%d packages of %d names", len(d.doc.Packages), len(names))
	}
}

// TestSBOMDoesNotTellWhereFrom checks that the plan's ID and the SBOM do not depend on whether a
// program is compiled or comes from a directory.
func TestSBOMDoesNotTellWhereFrom(t *testing.T) {
	c, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const text = "a program"
	sha, _, err := c.Put(t.Context(), "", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	recipe, err := json.Marshal(fetch.GoRecipe{Module: "example.org/agent", Version: "v1.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	merged := []tree.Node{{Path: "usr/bin/agent", Layer: "agent", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o755, Data: tree.Content{Blob: sha, Size: int64(len(text))}}}}
	var ids []string
	var docs []*spdx.Document
	for _, in := range []plan.Input{{SHA256: sha}, {SHA256: sha, Make: "go", Recipe: recipe}} {
		b := &executor{buildEnv: &buildEnv{Options: Options{Cache: c}}, inputs: map[string]plan.Input{"agent": in}}
		b.plan = &plan.Plan{Inputs: b.inputs, Layers: []plan.Layer{{Name: "agent", Input: "agent", Path: "usr/bin/agent"}}}
		id, err := b.plan.ID()
		if err != nil {
			t.Fatal(err)
		}
		d := &sbom{seen: map[common.ElementID]bool{}, doc: &spdx.Document{}}
		if err := b.programsSBOM(d, "Image", merged); err != nil {
			t.Fatal(err)
		}
		ids, docs = append(ids, id), append(docs, d.doc)
	}
	if ids[0] != ids[1] || !reflect.DeepEqual(docs[0], docs[1]) {
		t.Errorf("plans %s, SBOMs %+v and %+v", ids, docs[0].Packages[0], docs[1].Packages[0])
	}
}

// TestProgramVersion checks that a program has the version of the module that contains its main
// package, even if another module was built.
func TestProgramVersion(t *testing.T) {
	dep := func(path, version string) *debug.Module { return &debug.Module{Path: path, Version: version} }
	for name, test := range map[string]struct {
		info debug.BuildInfo
		want string
	}{
		"released":           {debug.BuildInfo{Path: "example.org/a/cmd/a", Main: *dep("example.org/a", "v1")}, "v1"},
		"compiled as a part": {debug.BuildInfo{Path: "example.org/a/cmd/a", Main: *dep("scratch", ""), Deps: []*debug.Module{dep("example.org", "v3"), dep("example.org/a", "v2"), dep("example.org/ab", "v4")}}, "v2"},
		"replaced":           {debug.BuildInfo{Path: "example.org/a", Main: *dep("scratch", ""), Deps: []*debug.Module{{Path: "example.org/a", Version: "v1", Replace: dep("example.org/fork", "v5")}}}, "v5"},
		"of no module":       {debug.BuildInfo{Path: "command-line-arguments", Main: *dep("", "")}, ""},
	} {
		if got := programVersion(&test.info); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}
