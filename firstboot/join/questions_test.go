package join_test

import (
	"context"
	"maps"
	"net"
	"testing"

	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// TestQuestionsOfAJoin limits first boot's requests and connections to one API server during a
// join, because a thousand machines may join at once.
func TestQuestionsOfAJoin(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "apiserver.cluster.local") // as kubeadm makes certificates
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.UseSingleMaster()
	e := w.Env()
	dials, dial := map[string]int{}, e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dials[addr]++
		return dial(ctx, network, addr)
	}
	if err := w.Run(firstboot.New(e)); err != nil {
		t.Fatal(err)
	}
	const node = "/api/v1/nodes/edge-sn0042"
	asked := w.Cluster.RequestCounts()
	// The Node is read for 12 s, to detect another machine that reports as it, and once to check
	// that the name is free.
	if asked[node] > 8 {
		t.Errorf("the Node is asked for %d times", asked[node])
	}
	delete(asked, node)
	want := map[string]int{
		"/api/v1/namespaces/kube-public/configmaps/cluster-info":   2, // to find the cluster, and to record it
		"/api/v1/namespaces/default/services/kubernetes":           1,
		"/apis/networking.k8s.io/v1/servicecidrs":                  1,
		"/api/v1/namespaces/kube-system/configmaps/kubeadm-config": 1,
	}
	if !maps.Equal(asked, want) {
		t.Errorf("asked %v, want %v", asked, want)
	}
	wantDials := map[string]int{
		"192.0.2.11:6443":  4, // a check, discovery, and the name in the certificate, twice
		worldtest.Endpoint: 4, // two checks that ipvscare works, cluster-info, and everything else
	}
	if !maps.Equal(dials, wantDials) {
		t.Errorf("connections %v, want %v", dials, wantDials)
	}
}
