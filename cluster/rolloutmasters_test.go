package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/test/fleettest"
)

// masters adds control-plane nodes that run a version of Kubernetes.
func (f *fleet) masters(outcome, kubelet string, names ...string) {
	f.add(outcome, map[string]string{kubeapi.ControlPlaneLabel: "", "site": "all"}, names...)
	for _, name := range names {
		f.Change(name, fleettest.Object{"status": fleettest.Object{"nodeInfo": fleettest.Object{"kubeletVersion": kubelet}}})
	}
}

func selector(t *testing.T, text string) []Ring {
	t.Helper()
	r, err := Selector(text)
	if err != nil {
		t.Fatal(err)
	}
	return []Ring{r}
}

// TestRolloutOfControlPlane checks that control-plane nodes are updated last, one at a time,
// however many nodes may be updated at once.
func TestRolloutOfControlPlane(t *testing.T) {
	t.Parallel()
	f := newStill(t)
	f.masters(fleettest.Works, "v1.37.1", "m1", "m2", "m3")
	f.add(fleettest.Slow, map[string]string{"site": "all"}, names("shop-", 6)...)
	r := rollout(func(r *Rollout) {
		r.Rings, r.Parallel, r.Budget, r.Info.ControlPlaneUpdates = selector(t, "site=all"), share("10"), share("10"), true
	})
	f.Version = "v1.37.2"
	rows, err := f.client.CheckRollout(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	var ring []string
	for _, row := range rows {
		ring = append(ring, row.Node+" "+row.Ring)
	}
	if want := "shop-5 site=all m1 control-plane m2 control-plane m3 control-plane"; !strings.HasSuffix(strings.Join(ring, " "), want) {
		t.Errorf("rings: %s", ring)
	}
	// Each time the rollout acts, count the control-plane nodes that are being updated, and the
	// shops that are not done.
	f.before = func() {
		masters, shops := 0, 0
		for _, name := range f.Nodes() {
			under := f.Annotation(name, order.AnnotationOrder) != "" || f.machines[name].AtRisk
			switch {
			case strings.HasPrefix(name, "m") && under:
				masters++
			case strings.HasPrefix(name, "shop") && (under || f.machines[name].Plan != newPlan):
				shops++
			}
		}
		if masters > 1 || masters > 0 && shops > 0 {
			t.Fatalf("%d control-plane nodes are being updated, together with %d other nodes", masters, shops)
		}
	}
	if err := f.simulate(r, nil); err != nil || len(f.updated()) != 9 {
		t.Errorf("%v; updated %q", err, f.updated())
	}
	f.clean()
	// Without a selector, the rollout includes no control-plane node.
	if n := len(rollout(nil).selectNodes([]*updateNode{{name: "m1", controlPlane: true}})); n != 1 {
		t.Errorf("%d rings", n)
	}
}

// TestRolloutStopsAtAControlPlane checks that no other node is updated after a control-plane node
// has failed, whatever the budget.
func TestRolloutStopsAtAControlPlane(t *testing.T) {
	t.Parallel()
	for _, outcome := range []string{fleettest.Bad, fleettest.Rejects} {
		f := newStill(t)
		f.masters(outcome, "v1.37.1", "m1")
		f.masters(fleettest.Works, "v1.37.1", "m2", "m3")
		r := rollout(func(r *Rollout) {
			r.Rings, r.Parallel, r.Budget, r.Info.ControlPlaneUpdates = selector(t, kubeapi.ControlPlaneLabel), share("3"), share("3"), true
			r.Restart = time.Minute
		})
		if err := f.simulate(r, nil); err == nil || !strings.Contains(err.Error(), "1 failed: m1") || len(f.updated()) != 0 {
			t.Errorf("%s: %v; updated %q", outcome, err, f.updated())
		}
		f.clean()
	}
}

// TestRolloutCheckStartControlPlane checks which images are accepted for control-plane nodes.
func TestRolloutCheckStartControlPlane(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kubelet string
		forThem bool
		want    string
	}{
		{"v1.37.1", true, ""},
		{"v1.36.5", true, "the image has Kubernetes v1.37.2, but these control-plane nodes have another minor version: m1: control-plane nodes accept only patch releases"},
		{"v1.37.1", false, "the image does not support control-plane nodes (nodeTypes), or was made by an older edgebake, but the selectors match control-plane nodes: m1: exclude them"},
	} {
		f := newStill(t)
		f.Version = "v1.37.2"
		f.masters(fleettest.Works, c.kubelet, "m1")
		_, err := f.client.CheckRollout(t.Context(), rollout(func(r *Rollout) {
			r.Rings, r.Info.ControlPlaneUpdates = selector(t, kubeapi.ControlPlaneLabel), c.forThem
		}))
		if (err == nil) != (c.want == "") || !strings.Contains(fmt.Sprint(err), c.want) && c.want != "" {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
