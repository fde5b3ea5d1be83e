package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/ondisk"
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
		t.Error("text that is not YAML was accepted")
	}
}

// TestBadArguments checks that the error for a file that is not a kubeconfig names the file, and
// that a text that is neither a token nor an ID is rejected without a request.
func TestBadArguments(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"cluster.yaml": "apiVersion: edgebake.io/v1alpha1\nkind: Cluster\n", "notes.txt": "garbage\n"} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("reading the kubeconfig: %s is not a kubeconfig; name another file with --kubeconfig", file)
		if _, err := Open(file, ""); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	damaged := filepath.Join(dir, "damaged")
	if err := os.WriteFile(damaged, []byte("apiVersion: v1\nkind: Config\n\tclusters: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(damaged, ""); err == nil || !strings.Contains(err.Error(), "line 3") || !strings.Contains(err.Error(), damaged) {
		t.Errorf("a damaged kubeconfig: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "none"), ""); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Error(err)
	}
	c, err := newClient(&rest.Config{Host: "http://127.0.0.1:1"}) // no request is made
	if err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]string{
		"ABC": `"ABC" is neither a token nor a token's ID`, "a/b/cd": `"a/b/cd" is neither`, "": `"" is neither`,
		"0123456789abcdef": `"012345..." is neither`, "abcdef.123": "not of the form abcdef.0123456789abcdef",
	} {
		if _, err := c.CheckToken(t.Context(), token, time.Now()); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "checking a token: ") {
			t.Errorf("%q: %v", token, err)
		}
		if err := c.RevokeToken(t.Context(), token); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "revoking a token: ") {
			t.Errorf("%q: %v", token, err)
		}
	}
}

// TestRuns checks Kubernetes' rules for the argument --controllers.
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
	want := map[string]any{"apiGroups": anyList(""), "resources": anyList("configmaps"), "verbs": anyList("get", "list")}
	for name, tt := range map[string]struct {
		rule map[string]any
		want bool
	}{
		"same":      {map[string]any{"apiGroups": anyList(""), "resources": anyList("configmaps"), "verbs": anyList("list", "get")}, true},
		"wider":     {map[string]any{"apiGroups": anyList("*"), "resources": anyList("nodes", "configmaps"), "verbs": anyList("*")}, true},
		"less":      {map[string]any{"apiGroups": anyList(""), "resources": anyList("configmaps"), "verbs": anyList("get")}, false},
		"one alone": {map[string]any{"apiGroups": anyList(""), "resources": anyList("configmaps"), "verbs": anyList("get", "list"), "resourceNames": anyList("a")}, false},
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

// TestReport checks that machines' reports add states that the cluster does not know, and do not
// replace newer states of the cluster.
func TestReport(t *testing.T) {
	early, late := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC), time.Date(2026, 1, 2, 13, 0, 0, 0, time.UTC)
	all := []Site{
		{Node: "ready", State: Ready, Since: early}, {Node: "token", State: Waiting, Detail: "token abcdef is valid"},
		{Node: "old", State: NotReady, Since: late, Detail: "kubelet stopped"}, {Node: "csr", State: Joining, Since: early, Fix: "approve"},
	}
	fails := reports.Summary{Result: ondisk.ResultFailed, Phase: "join", Step: 10, Steps: 14, Reason: "the token has expired", Fix: "stamp it", Received: late}
	told := func(node, result string, at time.Time) reports.Summary {
		x := fails
		x.Node, x.Result, x.Received = node, result, at
		return x
	}
	got := Report(all, []reports.Summary{
		told("ready", ondisk.ResultFailed, late), told("token", ondisk.ResultFailed, late), told("old", ondisk.ResultRunning, early),
		told("csr", ondisk.ResultWaiting, late), told("new", ondisk.ResultRunning, late), told("gone", ondisk.ResultDone, late),
	})
	const says = "first boot, 10/14 join: the token has expired"
	want := []Site{
		{Node: "csr", State: Joining, Since: late, Detail: says, Fix: "stamp it"}, {Node: "new", State: Booting, Since: late, Detail: says, Fix: "stamp it"},
		{Node: "old", State: NotReady, Since: late, Detail: "kubelet stopped"}, {Node: "ready", State: Ready, Since: early},
		{Node: "token", State: Failed, Since: late, Detail: says, Fix: "stamp it"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
}
