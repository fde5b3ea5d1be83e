package cluster

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/openyurt"
)

// TestVerifyKnowsNewerOpenYurt checks a cluster with OpenYurt's main branch (commit fbefb6ba): its
// rights are sufficient and not changed, and edge nodes without a zone are listed.
func TestVerifyKnowsNewerOpenYurt(t *testing.T) {
	rule := func(group, resource string, verbs ...string) any {
		return map[string]any{"apiGroups": anyList(group), "resources": anyList(resource), "verbs": anyList(verbs...)}
	}
	node := func(name string, labels map[string]any) any {
		return map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": name, "labels": labels}}
	}
	s, c := newStore(t)
	s.put("/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "NodeList", "metadata": map[string]any{}, "items": []any{
		node("native1", nil),
		node("half1", map[string]any{openyurt.LabelNodePool: "shops"}),
		node("cloud1", map[string]any{openyurt.LabelNodePool: "core", openyurt.LabelEdgeWorker: "false"}),
		node("edge1", map[string]any{openyurt.LabelNodePool: "shops", openyurt.LabelEdgeWorker: "true"}),
		node("edge2", map[string]any{openyurt.LabelNodePool: "shops", openyurt.LabelEdgeWorker: "true", openyurt.LabelZone: "east"}),
	}})
	s.put("/api/v1/namespaces/kube-system/pods", map[string]any{"apiVersion": "v1", "kind": "PodList", "metadata": map[string]any{}, "items": []any{}})
	s.put("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", map[string]any{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "metadata": map[string]any{}, "items": []any{
		map[string]any{"ports": []any{map[string]any{"port": int64(6443)}}, "endpoints": []any{map[string]any{"addresses": anyList("192.0.2.1")}}}}})
	s.put("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"+openyurt.PoolCRD, map[string]any{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": openyurt.PoolCRD}, "spec": map[string]any{"versions": []any{map[string]any{"name": "v1beta2", "storage": true}}}})
	const newer, zoned = "OpenYurt is newer than v1.7", "edge nodes have their node pool as zone"
	verify := func() map[string]Check {
		t.Helper()
		checks, err := c.Verify(t.Context(), PrepareOptions{}, "")
		if err != nil {
			t.Fatal(err)
		}
		by := map[string]Check{}
		for _, k := range checks {
			by[k.Name] = k
		}
		return by
	}
	by := verify()
	if len(by) < 5 || by[newer].Name != "" || by[zoned].Name != "" {
		t.Errorf("OpenYurt 1.7: %+v", by)
	}

	const roles, bindings = "/apis/rbac.authorization.k8s.io/v1/clusterroles/", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/"
	s.put(hubPath, rbac("ClusterRole", "", hubName, map[string]any{"rules": []any{
		rule("", "events", "get"), rule("apps.openyurt.io", "nodepools", "list", "watch"), rule("", "configmaps", "get", "list", "watch"),
		rule("coordination.k8s.io", "leases", "get", "update"), rule("discovery.k8s.io", "endpointslices", "list", "watch"), rule("", "endpoints", "list", "watch")}}))
	s.put(bindings+hubName, rbac("ClusterRoleBinding", "", hubName, bindNodes("ClusterRole", hubName)))
	s.put(roles+openyurt.BootstrapRole, rbac("ClusterRole", "", openyurt.BootstrapRole, map[string]any{"rules": []any{rule("apps.openyurt.io", "nodepools", "get")}}))
	for _, w := range hubObjects() {
		if change, err := c.dryRun(t.Context(), w); err != nil || change != nil {
			t.Errorf("prepare would change %s: %v", w.name, err)
		}
	}
	by = verify()
	if by[newer].State != CheckOK || by["clusterroles.rbac.authorization.k8s.io "+hubName].State != CheckOK {
		t.Errorf("%+v", by)
	}
	zone := by[zoned]
	if zone.State != CheckUnknown || !strings.HasPrefix(zone.Detail, "edge1 lack") || !strings.Contains(zone.Fix, "kubectl label node edge1 topology.kubernetes.io/zone=shops") {
		t.Errorf("%+v", zone)
	}
	if strings.Contains(zone.Detail, "half1") {
		t.Error("a Node that OpenYurt converts itself is named")
	}
}
