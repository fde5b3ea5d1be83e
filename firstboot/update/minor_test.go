package update

import (
	"context"
	"encoding/base64"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

const (
	memberName = "edge1"
	firstOf    = "192.0.2.11:6443"
	secondOf   = "192.0.2.12:6443"
)

// member makes the box a node of a cluster whose API servers have this version.
func (b *box) member(version string) (*worldtest.Cluster, *machine.Env) {
	b.t.Helper()
	b.now = worldtest.WorldStart
	c := worldtest.NewCluster(b.t.(*testing.T), "apiserver.cluster.local")
	c.Version, c.PodsNode = version, memberName
	c.KubeletReportTime = func() time.Time { return b.now }
	e := b.env()
	b.site(e)
	e.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) { return c.Dial(ctx, addr) }
	kc, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: "https://" + worldtest.Endpoint, CAData: base64.StdEncoding.EncodeToString(c.CAPEM)}, kubeapi.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
	if err != nil {
		b.t.Fatal(err)
	}
	b.put(member.ClientCert, c.Client("system:node:"+memberName, b.now.AddDate(1, 0, 0)))
	b.put(ondisk.KubeletConf, string(kc))
	b.put(ondisk.KubeletConfig, "kind: KubeletConfiguration\n")
	b.put(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\"\"\n")
	b.put(ondisk.KubeCA, string(c.CAPEM))
	c.Register(memberName, "", "")
	return c, e
}

// pod returns a Pod with this name and this kind of controller.
func pod(name, controller string) kubeapi.Pod {
	var p kubeapi.Pod
	p.Metadata.Name, p.Metadata.Namespace, p.Metadata.UID = name, "shop", "uid-of-"+name
	p.Status.Phase = "Running"
	if controller != "" {
		p.Metadata.OwnerReferences = []kubeapi.OwnerReference{{Kind: "Other"}, {Kind: controller, Controller: true}}
	}
	return p
}

func names(pods []kubeapi.Pod) (out []string) {
	for _, p := range pods {
		out = append(out, p.Metadata.Name)
	}
	return out
}

// TestAdmitKubelet checks which minor versions of kubelet the cluster supports.
func TestAdmitKubelet(t *testing.T) {
	for _, c := range []struct {
		name, version, other, want string
		prepare                    func(b *box, c *worldtest.Cluster)
		warns                      bool
	}{
		{name: "as new as the API servers", version: "v1.37.2"},
		{name: "three versions older", version: "v1.40.0+vendor.1"},
		{name: "four versions older", version: "v1.41.0", want: "may be at most 3 minor versions older"},
		{name: "newer", version: "v1.36.9", want: "an API server has v1.36.9: kubelet must not be newer"},
		{name: "newer than one of them", version: "v1.37.2", other: "v1.36.9", want: "an API server has v1.36.9: kubelet must not be newer"},
		{name: "one does not answer", version: "v1.37.2", warns: true, prepare: func(_ *box, c *worldtest.Cluster) { c.Down[secondOf] = true }},
		{name: "none answers", version: "v1.37.2", want: "it is unknown whether the cluster supports that kubelet: no API server reports its version", prepare: func(_ *box, c *worldtest.Cluster) {
			c.Down[firstOf], c.Down[secondOf] = true, true
		}},
		{name: "strange version", version: "seven", want: `reports the version "seven"`},
		{name: "no node", version: "v1.37.2", want: "this machine is not enrolled", prepare: func(b *box, _ *worldtest.Cluster) {
			if err := os.Remove(filepath.Join(b.root, ondisk.KubeletConf)); err != nil {
				b.t.Fatal(err)
			}
		}},
		{name: "earlier", version: "v1.37.2", want: "an earlier minor version of kubelet cannot use the files", prepare: func(b *box, _ *worldtest.Cluster) {
			b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), "v1.36.3", "v1.38.0", 1))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t)
			cluster, e := b.member(c.version)
			if c.other != "" {
				other := worldtest.NewClusterOf(t, cluster.CA, cluster.Key, "apiserver.cluster.local")
				other.Version = c.other
				cluster.OtherClusters = map[string]*worldtest.Cluster{secondOf: other}
			}
			if c.prepare != nil {
				c.prepare(b, cluster)
			}
			sys, err := readSystem(e)
			if err != nil {
				t.Fatal(err)
			}
			err = sys.checkKubelet(t.Context(), e, ondisk.ImageInfo{Kubernetes: "v1.37.2"})
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v; want %q", err, c.want)
			}
			if warned := strings.Contains(b.log.String(), "does not report its version") && strings.Contains(b.log.String(), secondOf); warned != c.warns {
				t.Errorf("warned: %v; %s", warned, &b.log)
			}
			// A patch release needs no answer from the cluster.
			cluster.Down[firstOf], cluster.Down[secondOf] = true, true
			if err := sys.checkKubelet(t.Context(), e, ondisk.ImageInfo{Kubernetes: sys.image.Kubernetes + "1"}); err != nil {
				t.Errorf("a patch release: %v", err)
			}
		})
	}
}

// TestDrain checks that an update to another minor version evicts the pods that a controller would
// recreate, and then restarts. Once the new system is kept, the Node is schedulable again.
func TestDrain(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	ended := pod("ended", "Job")
	ended.Status.Phase = "Succeeded"
	c.Pods = []kubeapi.Pod{pod("web", "ReplicaSet"), pod("proxy", "DaemonSet"), pod("alone", ""), pod("static", "Node"), pod("guarded", "StatefulSet"), ended}
	asked := 0
	c.Disrupt = func(name string) bool {
		asked++
		return name != "guarded" || asked > 3
	}
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	if got := b.done(); got != "cost done, retire done, root done, esp done, drain done, reboot done" || !b.rebooted {
		t.Error(got)
	}
	if !slices.Equal(c.EvictedPods, []string{"web", "guarded"}) || !slices.Equal(names(c.Pods), []string{"proxy", "alone", "static", "ended"}) {
		t.Errorf("evicted: %v, left: %v", c.EvictedPods, names(c.Pods))
	}
	if k := member.ReadKubeletFiles(e); k.Minor != 36 {
		t.Errorf("the record of kubelet's files is %+v", k)
	}
	for _, system := range []string{"edgebake-b+2-1.conf", "edgebake-b.conf"} {
		if !c.Nodes[memberName].Spec.Unschedulable {
			t.Errorf("before %s the Node accepts pods", system)
		}
		if system == "edgebake-b.conf" {
			b.blessed("edgebake-b+2-1.conf")
		} else {
			b.bootsB(system)
			b.put(ondisk.ImageInfoFile, b.infoOf("minor.raw.zst"))
		}
		if err := Finish(t.Context(), e); (err == nil) != (system == "edgebake-b.conf") {
			t.Errorf("%s: %v", system, err)
		}
	}
	if c.Nodes[memberName].Spec.Unschedulable {
		t.Error("the Node is still unschedulable")
	}
}

// TestDrainGoesOn checks that if no API server answers for a while, or an eviction fails, as in a namespace that
// is being deleted, the drain goes on: its time is not over.
func TestDrainGoesOn(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	ending := pod("ending", "ReplicaSet")
	ending.Metadata.Namespace = "terminating"
	c.Pods = []kubeapi.Pod{ending, pod("web", "ReplicaSet")}
	var began time.Time
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if !began.IsZero() {
			c.Down[worldtest.Endpoint] = b.now.Sub(began) < 2*time.Minute
			if b.now.Sub(began) > 4*time.Minute {
				c.Pods = slices.DeleteFunc(c.Pods, func(p kubeapi.Pod) bool { return p.Metadata.Name == "ending" })
			}
		}
		return sleep(ctx, d)
	}
	err := Update(t.Context(), e, Options{Image: b.inside("minor.raw.zst")}, func(s run.Step) {
		if s.Name == "esp" && s.Status == "done" {
			began, c.Down[worldtest.Endpoint] = b.now, true
		}
	})
	if err != nil || !b.rebooted || !slices.Equal(c.EvictedPods, []string{"web"}) || len(c.Pods) > 0 || !c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, restarted: %v, evicted: %v, left: %v", err, b.rebooted, c.EvictedPods, names(c.Pods))
	}
}

// TestUncordonAfterFailure checks that the former system makes its Node schedulable again as soon
// as possible after the new system has failed.
func TestUncordonAfterFailure(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
		t.Fatal(err)
	}
	c.Down[worldtest.Endpoint] = true
	if err := Finish(t.Context(), e); err == nil || !c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("without an API server: %v", err)
	}
	c.Down[worldtest.Endpoint] = false
	if err := Finish(t.Context(), e); err != nil || c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, unschedulable: %v", err, c.Nodes[memberName].Spec.Unschedulable)
	}
}

// TestCordonOfOthers checks that a Node that somebody else has made unschedulable stays so.
func TestCordonOfOthers(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	c.Nodes[memberName].Spec.Unschedulable = true
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	b.runs(ondisk.LabelRootB, "minor.raw.zst")
	if err := Finish(t.Context(), e); err != nil || !c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, unschedulable: %v", err, c.Nodes[memberName].Spec.Unschedulable)
	}
}

// TestPodsThatStay checks that an update does not restart the machine if pods do not leave, and
// that the Node becomes schedulable again. With --no-drain, no pod is evicted.
func TestPodsThatStay(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	c.Pods = []kubeapi.Pod{pod("web", "ReplicaSet"), pod("guarded", "StatefulSet")}
	c.Disrupt = func(name string) bool { return name != "guarded" }
	err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")})
	if err == nil || !strings.Contains(err.Error(), "after 10m0s these pods are still on the Node edge1: shop/guarded (a PodDisruptionBudget prevents its eviction now)") || b.rebooted || c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, restarted: %v, unschedulable: %v", err, b.rebooted, c.Nodes[memberName].Spec.Unschedulable)
	}
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst"), NoDrain: true}); err != nil || !b.rebooted || len(c.Pods) != 1 {
		t.Errorf("%v, restarted: %v, pods: %v", err, b.rebooted, names(c.Pods))
	}
}

// TestUncordonWhilePending checks that if the API server fails while pods leave, the Node becomes
// schedulable once it answers again, even while the new system waits for a restart.
func TestUncordonWhilePending(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	c.Pods = []kubeapi.Pod{pod("guarded", "StatefulSet")}
	c.Disrupt = func(string) bool { c.Down[worldtest.Endpoint] = true; return false }
	var started []string
	b.unit = func(verb, unit string) error {
		if unit == ondisk.UnitUpdateFinish {
			started = append(started, verb)
		}
		return nil
	}
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err == nil || b.rebooted || !c.Nodes[memberName].Spec.Unschedulable {
		t.Fatalf("%v, restarted: %v", err, b.rebooted)
	}
	if !slices.Equal(started, []string{"start"}) {
		t.Errorf("the units that were started: %v", started)
	}
	if err := Finish(t.Context(), e); err == nil {
		t.Error("without an API server: no error, so systemd does not try it again")
	}
	c.Down[worldtest.Endpoint] = false
	if err := Finish(t.Context(), e); err != nil || c.Nodes[memberName].Spec.Unschedulable || b.status() != "pending ROOT-B" {
		t.Errorf("%v, unschedulable: %v, %s", err, c.Nodes[memberName].Spec.Unschedulable, b.status())
	}
	if _, ok := c.Nodes[memberName].Metadata.Annotations["edgebake.io/cordoned"]; ok {
		t.Error("the annotation still exists")
	}
}

// TestUncordonWithoutRestart checks that if the restart fails, the Node becomes schedulable again.
func TestUncordonWithoutRestart(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	e.Run = func(context.Context, machine.Cmd) error { return errors.New("exit status 1") }
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err == nil || c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, unschedulable: %v", err, c.Nodes[memberName].Spec.Unschedulable)
	}
}

// TestUncordonFirst checks that other failures at the end of an update do not keep the Node
// unschedulable.
func TestUncordonFirst(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	b.runs(ondisk.LabelRootB, "minor.raw.zst")
	info := b.get("efi/" + ondisk.ESPImageInfo)
	b.put("efi/"+ondisk.ESPImageInfo, "")
	if err := Finish(t.Context(), e); err != nil || !e.Exists(planFile) || c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, unschedulable: %v", err, c.Nodes[memberName].Spec.Unschedulable)
	}
	b.put("efi/"+ondisk.ESPImageInfo, info)
	if err := Finish(t.Context(), e); err != nil || b.espInfo().Plan != newPlan || e.Exists(Dir) {
		t.Errorf("%v, the ESP describes %s", err, b.espInfo().Plan)
	}
}

// TestLaterCordonOfOthers checks that if the update could not make the Node unschedulable, it does
// not undo somebody else's later change.
func TestLaterCordonOfOthers(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	c.LabelChangeDenied = true
	if err := b.orderWith(e, Options{Image: b.inside("minor.raw.zst")}); err == nil || c.Nodes[memberName].Spec.Unschedulable {
		t.Fatal(err)
	}
	c.LabelChangeDenied, c.Nodes[memberName].Spec.Unschedulable = false, true
	b.runs(ondisk.LabelRootB, "minor.raw.zst")
	if err := Finish(t.Context(), e); err != nil || !c.Nodes[memberName].Spec.Unschedulable {
		t.Errorf("%v, unschedulable: %v", err, c.Nodes[memberName].Spec.Unschedulable)
	}
}

// orderWith runs an update on this machine.
func (b *box) orderWith(e *machine.Env, o Options) error {
	b.steps = nil
	return Update(b.t.Context(), e, o, func(s run.Step) { b.steps = append(b.steps, s.Name+" "+s.Status) })
}
