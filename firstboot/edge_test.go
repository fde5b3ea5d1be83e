package firstboot

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

func TestNodeRenamedByTheSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(), "edge-{{.Serial}}", "other", 1))
	w.PowerOn()
	if err := w.Boot(); err == nil || !w.ConsoleHas("enrolled as edge-sn0042, but the Site names it other") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

func TestStaleNodeKeepsItsLabels(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "labels: {zone: north}")
	w.Cluster.Register("edge-sn0042", "", "another")
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	w.Cluster.LabelChangeDenied = true
	if err := w.Boot(); err == nil {
		t.Fatal("first boot was reported as done without the node's label")
	}
	s := w.State()
	i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Name == "node-ready" })
	if p := s.Phases[i]; !strings.Contains(p.Error, "lacks labels of the Site: zone=north; the node could not change its labels: labelling Node edge-sn0042: ") || !strings.Contains(p.Fix, "kubectl delete node edge-sn0042") {
		t.Errorf("%+v", p)
	}
	if !w.ConsoleHas("the cluster has a stale Node edge-sn0042") {
		t.Error("the console has no message about the stale Node")
	}
	w.Cluster.LabelChangeDenied = false
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if !w.ConsoleHas("set labels of the Site that the Node edge-sn0042 lacked: zone=north") || w.Cluster.Nodes["edge-sn0042"].Metadata.Labels["zone"] != "north" {
		t.Errorf("the machine did not label its Node:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestStaleEdgeNodeGetsItsLabels checks that a stale Node gets its labels with the node's own
// credentials: OpenYurt's webhook would reject an administrator's change.
func TestStaleEdgeNodeGetsItsLabels(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Cluster.Register("edge-sn0042", "", "another")
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels
	if labels[openyurt.LabelEdgeWorker] != "true" || labels[openyurt.LabelNodePool] != "shanghai" {
		t.Errorf("labels: %v", labels)
	}
}

// TestPoolChanged checks that kubelet's flags get the new pool, so deleting the Node, as the
// message advises, fixes its labels.
func TestPoolChanged(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Cluster.LabelChangeDenied = true
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site("nodeType: edge", "nodePool: shanghai"), "nodePool: shanghai", "nodePool: beijing", 1))
	w.PowerOn()
	if err := w.Boot(); err == nil {
		t.Fatal("first boot was reported as done in the old node pool")
	}
	if !w.ConsoleHas("lacks labels of the Site: "+openyurt.LabelNodePool+"=beijing") || !w.ConsoleHas("kubectl delete node edge-sn0042, then restart the machine") {
		t.Errorf("%s", strings.Join(w.Console, "\n"))
	}
	if flags := w.Get(member.KubeadmFlags); !strings.Contains(flags, openyurt.LabelNodePool+"=beijing") || strings.Contains(flags, "shanghai") {
		t.Errorf("kubelet registers with %s", flags)
	}
}

// TestPoolOfTheCluster checks that pools that OpenYurt would reject or change are reported.
func TestPoolOfTheCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "nodeType: cloud", "nodePool: shanghai")
	if err := w.Boot(); err == nil || !w.ConsoleHas("NodePool shanghai is of type Edge, and OpenYurt would turn this cloud node into an edge node") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w = nativeWorld(t, "nodeType: cloud", "nodePool: shanghai")
	w.Cluster.NodePoolType = "Cloud"
	if err := w.Boot(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	// A cloud node that was Ready before keeps working, even if its pool is of type Edge now.
	w.Cluster.NodePoolType = ""
	w.Units[openyurt.Unit] = "failed"
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w = edgeWorld(t)
	w.Cluster.NoNodePool, w.Cluster.NodeCreationDenied = true, true // OpenYurt's webhook rejects a Node whose pool does not exist
	if err := w.Boot(); err == nil || w.State().Result == ondisk.ResultDone || !w.ConsoleHas("node-ready: will be tried again: the cluster has no NodePool shanghai") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w = edgeWorld(t)
	w.Cluster.NoNodePool, w.Cluster.HubServerCSR = true, "Denied" // the missing pool is reported even so
	if err := w.Boot(); err == nil || !w.ConsoleHas("the cluster has no NodePool shanghai, and OpenYurt's webhook rejects a Node whose pool does not exist") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestAnotherYurthub checks that a yurthub of another release, which would reject its flags, is
// reported.
func TestAnotherYurthub(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Put(openyurt.Program, `yurthub: projectinfo.Info{GitVersion:"v1.6.1"}`)
	if err := w.Boot(); err == nil || !w.ConsoleHas("yurthub in this image is v1.6, but the Image names v1.7.0, which has other flags") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestSiteTurnedNative checks that if the Site becomes native, first boot does not revert the node,
// but reports that its yurthub stays.
func TestSiteTurnedNative(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.revert(); err == nil || !strings.Contains(err.Error(), "this machine's Site has nodeType: edge") {
		t.Errorf("revert although the Site has nodeType edge: %v", err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site())
	w.PowerOn()
	if err := w.Boot(); err != nil || !w.ConsoleHas("this node uses yurthub, but its Site has nodeType: native") {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if _, err := w.revert(); err != nil {
		t.Fatal(err)
	}
	if flags := w.Get(member.KubeadmFlags); strings.Contains(flags, "openyurt") {
		t.Errorf("kubelet registers with %s", flags)
	}
	w.PowerOn()
	if err := w.Boot(); err != nil || w.ConsoleHas("this node uses yurthub") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestOfflineHubIsWaitedFor checks that first boot waits until yurthub serves from its cache, which
// takes some time offline. No API server can answer questions about certificates then.
func TestOfflineHubIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	w.Offline = true
	w.Cluster.HubServerCSR = "pending" // it is not ready
	e := w.Env()
	sleep, naps := e.Sleep, 0
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if naps++; naps == 4 {
			w.Cluster.Mu.Lock()
			w.Cluster.HubServerCSR = "Approved"
			w.Cluster.Mu.Unlock()
		}
		return sleep(ctx, d)
	}
	if err := w.Run(New(e)); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	if w.ConsoleHas("will be tried again") || !w.ConsoleHas("yurthub: done in") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	if slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
		t.Error("a yurthub that was starting was restarted")
	}
}

// TestPortOpened checks that the rules for yurthub's ports follow openPort and localClients of a
// changed Site.
func TestPortOpened(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site("nodeType: edge", "nodePool: shanghai", "yurthub: {openPort: true, localClients: [1000, 65534]}"))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if w.NFTRules != string(hub.PortRules(hub.PortAccess{Open: true, Clients: []int{1000, 65534}})) {
		t.Errorf("the rules are:\n%s", w.NFTRules)
	}
}
