package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/test/lab"
)

// kinds are the collections that Prepare changes, or could change by mistake.
var kinds = []string{
	"/api/v1/configmaps", "/api/v1/services", "/api/v1/secrets", "/api/v1/namespaces", "/api/v1/nodes",
	"/apis/rbac.authorization.k8s.io/v1/roles", "/apis/rbac.authorization.k8s.io/v1/rolebindings",
	"/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"/apis/apps.openyurt.io/v1beta2/nodepools",
}

// objects returns all objects of those kinds as text, without the fields that only the API server
// maintains.
func objects(t *testing.T, c *lab.Cluster) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, path := range kinds {
		var list struct{ Items []map[string]any }
		if err := c.Get(t.Context(), path, &list); err != nil {
			t.Fatal(err)
		}
		for _, o := range list.Items {
			meta := o["metadata"].(map[string]any)
			if meta["name"] == "cluster-info" {
				continue // signed again whenever tokens change
			}
			delete(meta, "managedFields")
			delete(meta, "resourceVersion")
			b, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			out[fmt.Sprint(path, "/", meta["namespace"], "/", meta["name"])] = string(b)
		}
	}
	return out
}

func compare(t *testing.T, was, is map[string]string) {
	t.Helper()
	for _, k := range slices.Sorted(maps.Keys(was)) {
		if is[k] != was[k] {
			t.Errorf("%s\nwas %s\nis  %s", k, was[k], is[k])
		}
	}
	for k := range is {
		if was[k] == "" {
			t.Errorf("%s should not exist", k)
		}
	}
}

const proxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ipvs   # as somebody wrote it
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
`

// TestPrepareVerifyRevert checks that revert restores every object.
func TestPrepareVerifyRevert(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	// Without OpenYurt, a requested node pool is one failed check with a fix.
	found, err := c.Verify(ctx, cluster.PrepareOptions{VIP: "10.103.97.9", Pools: map[string]string{"shops": "Edge"}}, lab.Endpoint)
	if err != nil || len(found) < 5 || !slices.ContainsFunc(found, func(f cluster.Check) bool {
		return f.Name == "node pool shops" && f.State == cluster.CheckFailed && strings.Contains(f.Fix, "yurt-manager")
	}) {
		t.Errorf("without OpenYurt: %+v, %v", found, err)
	}
	if err := lc.AddNodePools(ctx, lab.NodePools, lab.NodePool{Name: "there", Type: "Edge"}); err != nil {
		t.Fatal(err)
	}
	for path, obj := range map[string]map[string]any{
		"/api/v1/namespaces/kube-system/configmaps": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "kube-proxy", "labels": map[string]string{"app": "kube-proxy"}}, "data": map[string]string{"config.conf": proxyConfig, "kubeconfig.conf": "x"}},
		"/api/v1/namespaces/kube-system/services": {"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": "kube-dns", "annotations": map[string]string{"prometheus.io/port": "9153"}},
			"spec": map[string]any{"selector": map[string]string{"k8s-app": "kube-dns"}, "ports": []any{map[string]any{"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53}}}},
		// Only some of the objects that yurthub needs, and an unrelated one.
		"/apis/rbac.authorization.k8s.io/v1/clusterroles": {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": "yurt-hub"},
			"rules": []any{map[string]any{"apiGroups": []string{""}, "resources": []string{"configmaps", "events"}, "verbs": []string{"*"}}}},
	} {
		if err := lc.Create(ctx, path, obj); err != nil {
			t.Fatal(err)
		}
	}
	wanted := cluster.PrepareOptions{VIP: "10.103.97.9", Pools: map[string]string{"shops": "Edge", "there": "Edge"}}
	bad := func() []string {
		t.Helper()
		found, err := c.Verify(ctx, wanted, lab.Endpoint)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, f := range found {
			if f.State == cluster.CheckFailed {
				out = append(out, f.Name)
			}
		}
		return out
	}
	was := objects(t, lc)
	if got := bad(); len(got) != 8 {
		t.Errorf("%d checks fail, want 8: %q", len(got), got)
	}
	plan, err := c.Plan(ctx, wanted)
	if err != nil {
		t.Fatal(err)
	}
	compare(t, was, objects(t, lc)) // Plan changes nothing
	var shown strings.Builder
	for _, p := range plan {
		shown.WriteString(p.String() + "\n" + p.Diff())
	}
	for _, want := range []string{"+         - 10.103.97.9/32", "+     openyurt.io/topologyKeys: openyurt.io/nodepool", "nodepools.apps.openyurt.io shops", "configmaps edgebake-masters in namespace kube-public"} {
		if !strings.Contains(shown.String(), want) {
			t.Errorf("the plan does not show %q:\n%s", want, shown.String())
		}
	}
	if strings.Contains(shown.String(), "nodepools.apps.openyurt.io there") {
		t.Error("the plan creates a node pool that exists")
	}
	if err := c.Prepare(ctx, plan); err != nil {
		t.Fatal(err)
	}
	if got := bad(); len(got) != 0 {
		t.Errorf("after prepare, these checks fail: %q", got)
	}
	if again, err := c.Plan(ctx, wanted); err != nil || len(again) != 0 {
		t.Errorf("a second plan: %v %v", again, err)
	}
	// A second Prepare, for another VIP, keeps the recorded state.
	other := cluster.PrepareOptions{VIP: "10.103.98.9"}
	if plan, err = c.Plan(ctx, other); err != nil || len(plan) != 1 || plan[0].NextStep() == "" {
		t.Fatalf("%+v %v", plan, err)
	}
	if err := c.Prepare(ctx, plan); err != nil {
		t.Fatal(err)
	}
	back, err := c.Revert(ctx)
	if err != nil || len(back) != 8 {
		t.Errorf("%d reverted: %v", len(back), err)
	}
	compare(t, was, objects(t, lc))
	if back, err = c.Revert(ctx); err != nil || len(back) != 0 {
		t.Errorf("a second revert: %v %v", back, err)
	}

	// Revert leaves an object that another client has changed since, and keeps it in the record.
	if plan, err = c.Plan(ctx, wanted); err != nil {
		t.Fatal(err)
	}
	if err := c.Prepare(ctx, plan); err != nil {
		t.Fatal(err)
	}
	const masters = "/api/v1/namespaces/kube-public/configmaps/edgebake-masters"
	if err := lc.Patch(ctx, masters, map[string]any{"data": map[string]string{"masters": "192.0.2.1:6443\n"}}); err != nil {
		t.Fatal(err)
	}
	if back, err = c.Revert(ctx); err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, b := range back {
		if b.Kept != "" {
			kept++
		}
	}
	if kept != 1 {
		t.Errorf("%d kept, want the one that was changed", kept)
	}
	if err := lc.Delete(ctx, masters); err != nil {
		t.Fatal(err)
	}
	if _, err = c.Revert(ctx); err != nil {
		t.Fatal(err)
	}
	compare(t, was, objects(t, lc))
}

// TestPrepareHalfway interrupts Prepare between two changes: both Revert and a second Prepare must
// work.
func TestPrepareHalfway(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	was := objects(t, lc)
	plan, err := c.Plan(ctx, cluster.PrepareOptions{})
	if err != nil || len(plan) < 3 {
		t.Fatal(len(plan), err)
	}
	// Another client creates the second object meanwhile, so the third is not created.
	const path = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/roles"
	if err := lc.Create(ctx, path, map[string]any{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": map[string]any{"name": "edgebake-masters"}}); err != nil {
		t.Fatal(err)
	}
	if err := c.Prepare(ctx, plan); err == nil || !strings.Contains(err.Error(), "somebody else has changed it in the meantime") {
		t.Fatal(err)
	}
	if err := lc.Delete(ctx, path+"/edgebake-masters"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Revert(ctx); err != nil {
		t.Fatal(err)
	}
	compare(t, was, objects(t, lc))
}

// TestPrepareRights checks that the error names all missing rights, and that nothing is written.
func TestPrepareRights(t *testing.T) {
	lc := needCluster(t)
	ctx := t.Context()
	// Use a user who may read everything and change nothing.
	if err := lc.Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": map[string]any{"name": "test-reader"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "test-reader"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "reader"}}}); err != nil {
		t.Fatal(err)
	}
	if err := lc.Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterroles", map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": "test-reader"},
		"rules": []any{map[string]any{"apiGroups": []string{"*"}, "resources": []string{"*"}, "verbs": []string{"get", "list"}}}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, kind := range []string{"clusterrolebindings", "clusterroles"} {
			if err := lc.Delete(t.Context(), "/apis/rbac.authorization.k8s.io/v1/"+kind+"/test-reader"); err != nil && t.Context().Err() == nil {
				t.Error(err)
			}
		}
	})
	c := open(t, lc, "reader")
	was := objects(t, lc)
	var err error
	until(t, "the reader's rights", func() bool {
		_, err = c.Plan(ctx, cluster.PrepareOptions{VIP: "10.103.97.9"})
		return err != nil && strings.Contains(err.Error(), "create configmaps in namespace kube-public")
	})
	for _, want := range []string{"create configmaps in namespace kube-public", "create roles.rbac.authorization.k8s.io in namespace kube-public", "update configmaps kube-proxy in namespace kube-system", "nothing was changed"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nlacks %q", err, want)
		}
	}
	compare(t, was, objects(t, lc))
}

// TestStatusAndRemove checks the status of a machine that waits, joins and is Ready. After its
// removal, another machine can take its name.
func TestStatusAndRemove(t *testing.T) {
	lc := needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	if _, err := c.MintToken(ctx, cluster.MintOptions{Node: "shop-1", TTL: time.Hour, Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	state := func(name string) cluster.Site {
		t.Helper()
		all, err := c.Status(ctx, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if s.Node == name {
				return s
			}
		}
		return cluster.Site{}
	}
	if s := state("shop-1"); s.State != cluster.Waiting {
		t.Errorf("%+v", s)
	}
	if err := lc.Create(ctx, "/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "shop-1"}}); err != nil {
		t.Fatal(err)
	}
	if s := state("shop-1"); s.State != cluster.NotReady {
		t.Errorf("%+v", s)
	}
	ready := map[string]any{"status": map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": "True", "reason": "KubeletReady",
		"lastHeartbeatTime": time.Now().UTC().Format(time.RFC3339), "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)}}}}
	if err := lc.Patch(ctx, "/api/v1/nodes/shop-1/status", ready); err != nil {
		t.Fatal(err)
	}
	if s := state("shop-1"); s.State != cluster.Ready {
		t.Errorf("%+v", s)
	}
	if _, err := c.Remove(ctx, "shop-1", cluster.RemoveOptions{Now: time.Now()}); err == nil || !strings.Contains(err.Error(), "it is Ready") {
		t.Error(err)
	}
	if _, err := open(t, lc, "nobody-special").Remove(ctx, "shop-1", cluster.RemoveOptions{Force: true, Now: time.Now()}); err == nil || !strings.Contains(err.Error(), "delete nodes shop-1") {
		t.Error(err)
	}
	done, err := c.Remove(ctx, "shop-1", cluster.RemoveOptions{Force: true, Now: time.Now()})
	if err != nil || len(done) != 2 || !strings.HasPrefix(done[0], "token ") || done[1] != "Node shop-1" {
		t.Errorf("%q %v", done, err)
	}
	if s := state("shop-1"); s.State != "" {
		t.Errorf("%+v", s)
	}
	if _, err := c.Remove(ctx, "shop-1", cluster.RemoveOptions{Now: time.Now()}); err == nil || !strings.Contains(err.Error(), "no Node, CSR or token") {
		t.Error(err)
	}
	if err := lc.Create(ctx, "/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "m9", "labels": map[string]string{"node-role.kubernetes.io/control-plane": ""}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Remove(ctx, "m9", cluster.RemoveOptions{Force: true, Now: time.Now()}); err == nil || !strings.Contains(err.Error(), "control-plane node") {
		t.Error(err)
	}
	if err := lc.Delete(ctx, "/api/v1/nodes/m9"); err != nil {
		t.Error(err)
	}
}
