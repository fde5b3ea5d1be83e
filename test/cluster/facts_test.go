package cluster

import (
	"context"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/lab"
)

// TestFacts checks that Facts derives an Image's requirements from the DaemonSets and Nodes of a
// real API server.
func TestFacts(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	const agent, pod = "/apis/apps/v1/namespaces/kube-system/daemonsets/facts", "registry.example.com/agent:1"
	labels := map[string]any{"app": "facts"}
	for path, body := range map[string]any{
		strings.TrimSuffix(agent, "/facts"): map[string]any{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": map[string]any{"name": "facts"},
			"spec": map[string]any{"selector": map[string]any{"matchLabels": labels}, "template": map[string]any{
				"metadata": map[string]any{"labels": labels},
				"spec": map[string]any{"containers": []any{map[string]any{"name": "agent", "image": pod,
					"env": []any{map[string]any{"name": "PASSWORD", "value": "hunter2"}}}}}}}},
		"/api/v1/nodes": map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "facts"}},
	} {
		if err := lc.Create(ctx, path, body); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, path := range []string{agent, "/api/v1/nodes/facts"} {
			if err := lc.Delete(context.Background(), path); err != nil {
				t.Error(err)
			}
		}
	})
	pause := map[string]any{"status": map[string]any{"images": []any{map[string]any{"names": []any{"registry.k8s.io/pause:3.10"}}}}}
	if err := lc.Patch(ctx, "/api/v1/nodes/facts/status", pause); err != nil {
		t.Fatal(err)
	}
	f, err := c.Facts(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if f.Version != lab.KubernetesVersion || f.Pause != "registry.k8s.io/pause:3.10" || !strings.Contains(string(f.DaemonSets), "image: "+pod) || strings.Contains(string(f.DaemonSets), "hunter2") {
		t.Errorf("%+v\n%s", f, f.DaemonSets)
	}
	if _, err := open(t, lc, "nobody").Facts(ctx); err == nil || !strings.Contains(err.Error(), "list daemonsets.apps") || !strings.Contains(err.Error(), "create secrets") {
		t.Errorf("without rights: %v", err)
	}
}
