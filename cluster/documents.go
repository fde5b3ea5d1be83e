package cluster

import (
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
)

// documentAreas groups the fields of a document into checks. The last group has all fields that no
// other group has.
var documentAreas = []struct {
	name   string
	fields []string
}{
	{"names and matches", []string{"name", "nodeName", "match"}},
	{"networks", []string{"network"}},
	{"VIP", []string{"vip", "endpoint"}},
	{"token form", []string{"credentials"}},
	{"CA", []string{"caCertHashes", "caCert", "caFile", "unsafeSkipCAVerification"}},
	{"document", nil},
}

// NotRead is the Detail of checks of fields that could not be read.
const NotRead = "the document could not be read completely"

// DocumentChecks turns the problems of documents into checks. The Detail has the fix too. Fields
// that could not be read get the state unknown.
func DocumentChecks(probs configs.Problems) []Check {
	var out []Check
	taken := map[int]bool{}
	fine := Check{State: CheckOK}
	if slices.ContainsFunc(probs, func(p configs.Problem) bool { return slices.Contains([]string{"", "apiVersion", "kind"}, p.Path) }) {
		fine = Check{State: CheckUnknown, Detail: NotRead}
	}
	for _, area := range documentAreas {
		failed := false
		for i, p := range probs {
			if taken[i] || area.fields != nil && !slices.Contains(area.fields, topField(p.Path)) {
				continue
			}
			taken[i], failed = true, true
			out = append(out, Check{Name: area.name, State: CheckFailed, Detail: p.Error()})
		}
		if !failed {
			fine.Name = area.name
			out = append(out, fine)
		}
	}
	return out
}

// topField returns the top-level field of a problem's path.
func topField(path string) string {
	if rest, ok := strings.CutPrefix(path, "sites["); ok {
		_, path, _ = strings.Cut(rest, "].")
	}
	path = strings.TrimPrefix(path, "defaults.")
	return path[:min(len(path), strings.IndexAny(path+".", ".["))]
}
