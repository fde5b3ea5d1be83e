package firstboot

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// TestArchitectureNamesThePhases compares the lists in ARCHITECTURE.md with the phases.
func TestArchitectureNamesThePhases(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, page, _ := strings.Cut(string(b), "The phases:\n\n")
	worker, page, _ := strings.Cut(page, "\n\n")
	_, page, _ = strings.Cut(page, "after clock:\n\n")
	master, _, _ := strings.Cut(page, "\n\n")
	names := func(list string) string {
		return strings.Join(strings.FieldsFunc(list, func(r rune) bool { return strings.ContainsRune("→ \n()", r) }), " ")
	}
	first, _, _ := strings.Cut(worker, "→ cluster")
	native := regexp.MustCompile(`\(.*?\)`).ReplaceAllString(worker, "")
	spec := func(nodeType string) *site.Active {
		s := &configs.Site{NodeType: nodeType, Masters: []string{"192.0.2.1:6443"}}
		if nodeType == configs.NodeControlPlane {
			s.ControlPlane = &configs.SiteControlPlane{Members: []configs.ControlPlaneMember{{Name: "m1", Address: "192.0.2.1"}}}
			s.NodeName = "m1"
		}
		return &site.Active{Site: s, Image: ondisk.ImageInfo{Yurthub: &ondisk.YurthubInfo{Form: openyurt.FormUnit}}}
	}
	for nodeType, want := range map[string]string{configs.NodeNative: names(native), configs.NodeEdge: names(worker), configs.NodeControlPlane: names(first + master)} {
		var got []string
		for _, p := range append(firstPhases(&site.Reader{}), Phases(spec(nodeType))...) {
			got = append(got, p.Name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: the page has\n%s\nthe code\n%s", nodeType, want, strings.Join(got, " "))
		}
	}
}
