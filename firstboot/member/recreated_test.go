package member_test

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestNotRecreated checks that the cluster counts as the same after cluster-info was recreated or
// hidden, or the Node deleted. A recreated cluster with a readable cluster-info counts as another
// one.
func TestNotRecreated(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*worldtest.Cluster){
		"cluster-info made anew": func(c *worldtest.Cluster) { c.Recreations++ },
		"Node deleted":           func(c *worldtest.Cluster) { delete(c.Nodes, "edge-sn0042") },
		"cluster-info hidden":    func(c *worldtest.Cluster) { c.NoAnonymous = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			change(w.Cluster)
			site, err := site.Parse([]byte(w.Site()))
			if err != nil {
				t.Fatal(err)
			}
			if member.Recreated(t.Context(), w.Env(), site) {
				t.Error("the same cluster counts as another one")
			}
			w.RecreateCluster()
			if name != "cluster-info hidden" && !member.Recreated(t.Context(), w.Env(), site) {
				t.Error("another cluster counts as the same one")
			}
		})
	}
}

// TestRecreatedBeforeItPublishes checks that the Service's UID identifies a recreated cluster
// without cluster-info, and the same cluster without cluster-info and Node. Without this UID, in
// the record or from the API servers, the result is unclear.
func TestRecreatedBeforeItPublishes(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change    func(w *worldtest.World)
		again     bool
		isUnclear bool
	}{
		"born again, and not published": {func(w *worldtest.World) { w.RecreateCluster(); w.Cluster.NoClusterInfo = true }, true, false},
		"born again a moment ago": {func(w *worldtest.World) {
			w.RecreateCluster()
			w.Cluster.NoClusterInfo, w.Cluster.ServiceReadDenied = true, true
		}, false, true},
		"cluster-info and the Node deleted": {func(w *worldtest.World) {
			w.Cluster.NoClusterInfo = true
			delete(w.Cluster.Nodes, "edge-sn0042")
		}, false, false},
		"not published, by an old note": {func(w *worldtest.World) {
			w.Put(member.JoinedCluster, strings.Replace(w.Get(member.JoinedCluster), `,"serviceUID":"service-0"`, "", 1))
			w.RecreateCluster()
			w.Cluster.NoClusterInfo = true
		}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			tt.change(w)
			site, err := site.Parse([]byte(w.Site()))
			if err != nil {
				t.Fatal(err)
			}
			w.Unregistered = false // ipvscare blocks kubelet's connections
			if again, unclear := member.CheckRecreated(t.Context(), w.Env(), site); again != tt.again || (unclear != nil) != tt.isUnclear {
				t.Errorf("the cluster was recreated: %v, unclear: %v", again, unclear)
			}
		})
	}
}

// TestOldNoteGetsTheService checks that a node from a former release adds the Service's UID to its
// record when it is Ready again. If it may not read the Service, its record keeps two UIDs.
func TestOldNoteGetsTheService(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		w := nativeWorld(t)
		w.Cluster.ServiceReadDenied = true
		w.MustBoot()
		want := ondisk.IPVSJoined{ClusterInfo: "info-0", Node: "edge-sn0042", NodeUID: "node-0"}
		wantNoted(w, want)
		if w.Cluster.ServiceReadDenied = hidden; !hidden {
			want.ServiceUID = "service-0"
		}
		w.PowerOn()
		w.MustBoot()
		wantNoted(w, want)
		w.Cluster.ServiceReadDenied = true // temporarily
		w.PowerOn()
		w.MustBoot()
		wantNoted(w, want)
	}
}

// TestRecreatedFarAway checks a recreated cluster over a satellite link: each connection takes a
// second and a half, and a check needs three connections.
func TestRecreatedFarAway(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.RecreateCluster()
	site, err := site.Parse([]byte(w.Site()))
	if err != nil {
		t.Fatal(err)
	}
	e := w.Env()
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(1500 * time.Millisecond):
			return dial(ctx, network, addr)
		}
	}
	if !member.Recreated(t.Context(), e, site) {
		t.Error("another cluster is not recognized")
	}
}

// TestNodeOfAFormerRelease checks that a node without a record of its cluster makes one when it is
// Ready again. If nodes may not read cluster-info, it works without a record.
func TestNodeOfAFormerRelease(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	if err := os.Remove(w.HostPath(member.JoinedCluster)); err != nil {
		t.Fatal(err)
	}
	hidden := w.Clone(t)
	w.PowerOn()
	w.MustBoot()
	wantNoted(w, ondisk.IPVSJoined{ClusterInfo: "info-0", Node: "edge-sn0042", NodeUID: "node-0", ServiceUID: "service-0"})

	hidden.Cluster.NoAnonymous = true
	hidden.PowerOn()
	hidden.MustBoot()
	if hidden.Has(member.JoinedCluster) || strings.Contains(hidden.Get(ondisk.IPVSConfig), "joined") {
		t.Error("UIDs that could not be read were recorded")
	}
}

// TestNoteOfTheClusterFollowsIt checks the record of a cluster in which cluster-info is recreated
// and, much later, the Node is deleted, as in the documentation. Each of the UIDs identifies the
// cluster for a while.
func TestNoteOfTheClusterFollowsIt(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	site, err := site.Parse([]byte(w.Site()))
	if err != nil {
		t.Fatal(err)
	}
	w.Cluster.Recreations++ // changes cluster-info's UID
	w.PowerOn()
	w.MustBoot()
	wantNoted(w, ondisk.IPVSJoined{ClusterInfo: "info-1", Node: "edge-sn0042", NodeUID: "node-0", ServiceUID: "service-1"})

	own := *w.Cluster.Nodes["edge-sn0042"]
	delete(w.Cluster.Nodes, "edge-sn0042")
	if member.Recreated(t.Context(), w.Env(), site) {
		t.Error("after the Node was deleted, the same cluster counts as another one")
	}
	own.Metadata.UID = "node-anew" // after kubelet has registered again
	w.Cluster.Nodes["edge-sn0042"] = &own
	w.PowerOn()
	w.MustBoot()
	wantNoted(w, ondisk.IPVSJoined{ClusterInfo: "info-1", Node: "edge-sn0042", NodeUID: "node-anew", ServiceUID: "service-1"})
}

// wantNoted checks the records of the cluster that first boot and ipvscare have.
func wantNoted(w *worldtest.World, want ondisk.IPVSJoined) {
	w.T.Helper()
	if got := member.ReadJoinedCluster(w.Env()); got == nil || *got != want {
		w.T.Errorf("the record is %+v, want %+v", got, want)
	}
	var conf ondisk.IPVS
	if err := json.Unmarshal([]byte(w.Get(ondisk.IPVSConfig)), &conf); err != nil {
		w.T.Fatal(err)
	}
	if got := conf.Servers[0].Joined; got == nil || *got != want {
		w.T.Errorf("ipvscare's configuration has %+v, want %+v", got, want)
	}
}

// TestNoteIsNotTakenFromAnotherCluster checks that a cluster that shows none of the recorded UIDs
// is not recorded, although it accepts the node's certificate and its Node is Ready.
func TestNoteIsNotTakenFromAnotherCluster(t *testing.T) {
	t.Parallel()
	for _, disabled := range []bool{false, true} {
		var lines []string
		if disabled {
			lines = append(lines, "ipvs: {disabled: true}")
		}
		w := nativeWorld(t, lines...)
		w.MustBoot()
		before := w.Get(member.JoinedCluster)
		w.Cluster.Recreations++
		w.Cluster.Nodes["edge-sn0042"].Metadata.UID = "node-1"
		w.PowerOn()
		w.Patience = time.Minute
		err := w.Boot()
		if got := w.Get(member.JoinedCluster); got != before {
			t.Errorf("IPVS disabled %v: the record is %s, it was %s", disabled, got, before)
		}
		if said := w.ConsoleHas("the API servers are of another cluster with the same keys"); said == disabled || (err == nil) != disabled {
			t.Errorf("IPVS disabled %v: the boot returned %v, another cluster was reported: %v", disabled, err, said)
		}
	}
}

// TestNoteIsOfOneAPIServer checks that recorded UIDs come from one API server: two requests through
// the endpoint, for cluster-info and for the Node, may be answered by two different ones.
func TestNoteIsOfOneAPIServer(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	reborn := worldtest.NewClusterOf(t, w.Cluster.CA, w.Cluster.Key)
	reborn.Attach(w)
	reborn.Recreations = 7
	e := w.Env()
	_, n, err := member.OwnNode(t.Context(), e, "edge-sn0042")
	if err != nil {
		t.Fatal(err)
	}
	w.Cluster.Mu.Lock()
	w.Cluster.OtherClusters = map[string]*worldtest.Cluster{worldtest.Endpoint: reborn, "192.0.2.13:6443": reborn}
	w.Cluster.Mu.Unlock()
	spec, err := site.Parse([]byte(w.Site()))
	if err != nil {
		t.Fatal(err)
	}
	active := &site.Active{Site: spec, Node: "edge-sn0042"}
	if now, err := member.ClusterNow(t.Context(), e, n); err != nil || now.ClusterInfo != "info-7" {
		t.Fatalf("the endpoint shows %+v, %v", now, err)
	}
	if note, err := member.ClusterToSave(t.Context(), e, active.Site, n); err != nil || note != nil {
		t.Errorf("the new record would be %+v, %v", note, err)
	}
}
