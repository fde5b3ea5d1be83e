package cluster

import (
	"strings"
	"testing"
)

func TestExcludeVIP(t *testing.T) {
	for name, tt := range map[string]struct{ text, want string }{
		"null":     {"mode: ipvs\nipvs:\n  excludeCIDRs: null\n  scheduler: \"\"\n", "mode: ipvs\nipvs:\n  excludeCIDRs:\n    - 10.103.97.2/32\n  scheduler: \"\"\n"},
		"none":     {"mode: ipvs\n", "mode: ipvs\nipvs:\n  excludeCIDRs:\n    - 10.103.97.2/32\n"},
		"others":   {"mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/24]}\n", "mode: ipvs\nipvs: {excludeCIDRs: [10.0.0.0/24, 10.103.97.2/32]}\n"},
		"covered":  {"mode: ipvs\nipvs: {excludeCIDRs: [10.103.0.0/16]}\n", ""},
		"there":    {"mode: ipvs\nipvs: {excludeCIDRs: [10.103.97.2/32]}\n", ""},
		"iptables": {"mode: iptables\n", ""},
		"default":  {"mode: \"\"\n", ""},
		"empty":    {"", ""},
	} {
		if tt.want == "" {
			tt.want = tt.text
		}
		if got, err := excludeVIP(tt.text, "10.103.97.2"); err != nil || got != tt.want {
			t.Errorf("%s: %v\n%s", name, err, got)
		}
	}
	if got, err := excludeVIP("mode: ipvs\n", "fd00::2"); err != nil || !strings.Contains(got, "fd00::2/128") {
		t.Error(got, err)
	}
	if _, err := excludeVIP("mode: [", "10.103.97.2"); err == nil {
		t.Error("took what is no YAML")
	}
}

// By the rules of Kubernetes' own --controllers.
func TestRuns(t *testing.T) {
	for _, tt := range []struct {
		args string
		want bool
	}{
		{"", true}, {"--controllers=*,bootstrapsigner", true}, {"--controllers=-nodelifecycle,*", false}, {"--controllers *,-nodelifecycle", false},
		{"--controllers=bootstrapsigner", false}, {"--controllers=nodelifecycle", true}, {`--controllers="-nodelifecycle,*"`, false},
	} {
		if got := runs(strings.Fields(tt.args), "nodelifecycle"); got != tt.want {
			t.Errorf("%s: %v", tt.args, got)
		}
	}
}

func TestGrants(t *testing.T) {
	want := map[string]any{"apiGroups": words(""), "resources": words("configmaps"), "verbs": words("get", "list")}
	for name, tt := range map[string]struct {
		rule map[string]any
		want bool
	}{
		"same":      {map[string]any{"apiGroups": words(""), "resources": words("configmaps"), "verbs": words("list", "get")}, true},
		"wider":     {map[string]any{"apiGroups": words("*"), "resources": words("nodes", "configmaps"), "verbs": words("*")}, true},
		"less":      {map[string]any{"apiGroups": words(""), "resources": words("configmaps"), "verbs": words("get")}, false},
		"one alone": {map[string]any{"apiGroups": words(""), "resources": words("configmaps"), "verbs": words("get", "list"), "resourceNames": words("a")}, false},
	} {
		if got := grants([]any{tt.rule}, want); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestDiff(t *testing.T) {
	if got := diff([]string{"a", "b", "c"}, []string{"a", "x", "c", "d"}); got != "  a\n- b\n+ x\n  c\n+ d\n" {
		t.Errorf("%s", got)
	}
	if got := diff(nil, []string{"a"}); got != "+ a\n" {
		t.Errorf("%s", got)
	}
}
