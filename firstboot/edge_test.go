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
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(), "edge-{{.Serial}}", "other", 1))
	w.PowerOn()
	if err := w.boot(); err == nil || !w.ConsoleHas("enrolled as edge-sn0042, the Site calls it other") {
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
	if err := w.boot(); err == nil {
		t.Fatal("it was said to be done without its label")
	}
	s := w.State()
	i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Name == "node-ready" })
	if p := s.Phases[i]; !strings.Contains(p.Error, "lacks labels of the Site: zone=north; the node may not set them: labelling Node edge-sn0042: ") || !strings.Contains(p.Fix, "kubectl delete node edge-sn0042") {
		t.Errorf("%+v", p)
	}
	if !w.ConsoleHas("the cluster has a stale Node edge-sn0042") {
		t.Error("the stale Node was not said")
	}
	w.Cluster.LabelChangeDenied = false
	w.PowerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if !w.ConsoleHas("the Node edge-sn0042 lacked labels of the Site, and has them now: zone=north") || w.Cluster.Nodes["edge-sn0042"].Metadata.Labels["zone"] != "north" {
		t.Errorf("it did not label its Node:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestStaleEdgeNodeGetsItsLabels: as the administrator OpenYurt's webhook would
// reject it.
func TestStaleEdgeNodeGetsItsLabels(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Cluster.Register("edge-sn0042", "", "another")
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels
	if labels[openyurt.LabelEdgeWorker] != "true" || labels[openyurt.LabelNodePool] != "shanghai" {
		t.Errorf("labels: %v", labels)
	}
}

// TestPoolChanged: what kubelet registers with follows the site, so that the
// fix that is said is one.
func TestPoolChanged(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.Cluster.LabelChangeDenied = true
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site("nodeType: edge", "nodePool: shanghai"), "nodePool: shanghai", "nodePool: beijing", 1))
	w.PowerOn()
	if err := w.boot(); err == nil {
		t.Fatal("it was said to be done in its old pool")
	}
	if !w.ConsoleHas("lacks labels of the Site: "+openyurt.LabelNodePool+"=beijing") || !w.ConsoleHas("kubectl delete node edge-sn0042, then restart the machine") {
		t.Errorf("%s", strings.Join(w.Console, "\n"))
	}
	if flags := w.Get(member.KubeadmFlags); !strings.Contains(flags, openyurt.LabelNodePool+"=beijing") || strings.Contains(flags, "shanghai") {
		t.Errorf("kubelet registers with %s", flags)
	}
}

// TestPoolOfTheCluster: what OpenYurt would reject or undo is named.
func TestPoolOfTheCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "nodeType: cloud", "nodePool: shanghai")
	if err := w.boot(); err == nil || !w.ConsoleHas("NodePool shanghai is of type Edge, and OpenYurt would turn this cloud node into an edge node") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w = nativeWorld(t, "nodeType: cloud", "nodePool: shanghai")
	w.Cluster.NodePoolType = "Cloud"
	if err := w.boot(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	// If nothing converts it, a running node continues, also after a change.
	w.Cluster.NodePoolType = ""
	w.Units[openyurt.Unit] = "failed"
	w.PowerOn()
	if err := w.boot(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w = edgeWorld(t)
	w.Cluster.NoNodePool, w.Cluster.NodeCreationDenied = true, true // as the webhook does
	if err := w.boot(); err == nil || w.State().Result == ondisk.ResultDone || !w.ConsoleHas("node-ready: will be tried again: the cluster has no NodePool shanghai") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w = edgeWorld(t)
	w.Cluster.NoNodePool, w.Cluster.HubServerCSR = true, "Denied" // which it also says
	if err := w.boot(); err == nil || !w.ConsoleHas("the cluster has no NodePool shanghai, and OpenYurt's webhook rejects a Node whose pool does not exist") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestAnotherYurthub: a program of another release gets flags that it does not
// know.
func TestAnotherYurthub(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Put(openyurt.Program, `yurthub: projectinfo.Info{GitVersion:"v1.6.1"}`)
	if err := w.boot(); err == nil || !w.ConsoleHas("yurthub in this image is of v1.6, the Image says v1.7.0, which has other flags") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestSiteTurnedNative: first boot does not turn a node back, and says that
// nobody looks after its yurthub.
func TestSiteTurnedNative(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.revert(); err == nil || !strings.Contains(err.Error(), "this machine's Site says nodeType: edge") {
		t.Errorf("revert against the Site: %v", err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site())
	w.PowerOn()
	if err := w.boot(); err != nil || !w.ConsoleHas("this node goes through yurthub, but its Site says nodeType: native") {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if _, err := w.revert(); err != nil {
		t.Fatal(err)
	}
	if flags := w.Get(member.KubeadmFlags); strings.Contains(flags, "openyurt") {
		t.Errorf("kubelet registers with %s", flags)
	}
	w.PowerOn()
	if err := w.boot(); err != nil || w.ConsoleHas("goes through yurthub") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestOfflineHubIsWaitedFor: yurthub takes a while to serve from its cache,
// and no master can be asked about certificates meanwhile.
func TestOfflineHubIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
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
		t.Fatal("offline, and done")
	}
	if w.ConsoleHas("will be tried again") || !w.ConsoleHas("yurthub: done in") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	if slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
		t.Error("a yurthub that was starting was restarted")
	}
}

// TestPortOpened: the port for other nodes of the pool, and no other.
func TestPortOpened(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site("nodeType: edge", "nodePool: shanghai", "yurthub: {openPort: true, localClients: [1000, 65534]}"))
	w.PowerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if w.NFTRules != string(hub.PortRules(hub.Ports{Open: true, Clients: []int{1000, 65534}})) {
		t.Errorf("the rules are:\n%s", w.NFTRules)
	}
}
