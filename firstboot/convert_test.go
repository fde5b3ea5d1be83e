package firstboot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// readyNode returns a native node, joined and Ready, that can be converted.
func readyNode(t *testing.T) *world {
	t.Helper()
	w := nativeWorld(t)
	w.MustBoot()
	return w
}

// soleNode returns a readyNode of a cluster with one API server.
func soleNode(t *testing.T) *world {
	t.Helper()
	w := nativeWorld(t)
	w.UseSingleMaster()
	w.MustBoot()
	return w
}

func (w *world) convert(o hub.ConvertOptions) (steps []run.Step, err error) {
	w.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.Shutdown, w.PoweredOff = cancel, false
	err = hub.Convert(ctx, w.Env(), o, func(s run.Step) { steps = append(steps, s) })
	return steps, err
}

func (w *world) revert() (steps []run.Step, err error) {
	w.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.Shutdown, w.PoweredOff = cancel, false
	err = hub.Revert(ctx, w.Env(), func(s run.Step) { steps = append(steps, s) })
	return steps, err
}

func (w *world) reset() (node string, err error) {
	w.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.Shutdown, w.PoweredOff = cancel, false
	return Reset(ctx, w.Env(), func(run.Step) {})
}

// clean returns the tree without first boot's state and the records of changes.
func (w *world) clean() map[string]string {
	t := w.tree()
	for p := range t {
		if strings.HasPrefix("/"+p, ondisk.LogDir) {
			delete(t, p)
		}
	}
	return t
}

func sameTree(t *testing.T, when string, got, want map[string]string) {
	t.Helper()
	for p := range want {
		if got[p] != want[p] {
			t.Errorf("%s: %s is\n%q\nnot\n%q", when, p, got[p], want[p])
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%s: %s is left over", when, p)
		}
	}
}

var pool = hub.ConvertOptions{NodePool: "shanghai"}

func TestConvertRevertConvert(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	native := w.clean()
	if steps, err := w.convert(pool); err != nil {
		t.Fatalf("%v\n%v", err, steps)
	}
	edge := w.clean()
	if !strings.Contains(w.Get(member.KubeadmFlags), openyurt.ListPlainly+openyurt.RedirectFlags) || w.Get(openyurt.KubeletConf) != openyurt.Kubeconfig {
		t.Error("kubelet was not redirected to yurthub")
	}
	labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels
	if labels[openyurt.LabelEdgeWorker] != "true" || labels[openyurt.LabelNodePool] != "shanghai" {
		t.Errorf("labels: %v", labels)
	}
	if _, err := w.convert(pool); !errors.Is(err, run.ErrAlready) {
		t.Errorf("converted twice: %v", err)
	}
	w.Put("/sys/class/net/hub-dummy0", "") // yurthub was killed
	if steps, err := w.revert(); err != nil {
		t.Fatalf("%v\n%v", err, steps)
	}
	sameTree(t, "after revert", w.clean(), native)
	if len(labels) != 0 || w.Units[openyurt.Unit] == "active" {
		t.Errorf("after revert: labels %v, yurthub %s", labels, w.Units[openyurt.Unit])
	}
	if _, err := w.revert(); !errors.Is(err, run.ErrAlready) {
		t.Errorf("reverted twice: %v", err)
	}
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	sameTree(t, "converted again", w.clean(), edge)
}

// TestNoFirstBootMeanwhile checks that the timer, which runs while an API server is out of reach,
// does not start first boot during a change. After the change, successful or not, the timer runs
// again.
func TestNoFirstBootMeanwhile(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	w.Units[ondisk.UnitAgain] = "active"
	w.BeforeEffect = func(effect string) {
		looks := strings.HasSuffix(effect, "yurthub --version") || strings.HasPrefix(effect, "run nft --check ") // checks whether the change is possible
		if w.Units[ondisk.UnitAgain] == "active" && !looks && effect != "stop "+ondisk.UnitAgain {
			t.Errorf("at %s first boot's timer runs", effect)
		}
	}
	ended := func(what string) {
		t.Helper()
		if state := w.Units[ondisk.UnitAgain]; state != "active" {
			t.Errorf("after %s the timer is %s", what, state)
		}
	}
	w.KubeletFailsBehindHub = true
	if _, err := w.convert(pool); err == nil {
		t.Fatal("convert succeeded although kubelet does not report")
	}
	ended("a convert that failed")
	w.KubeletFailsBehindHub = false
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	ended("convert")
	if _, err := w.revert(); err != nil {
		t.Fatal(err)
	}
	ended("revert")
}

// TestConvertKilled kills convert before each effect. A second run continues it, and a revert
// undoes it.
func TestConvertKilled(t *testing.T) {
	t.Parallel()
	whole := soleNode(t)
	native := whole.clean()
	whole.Effects, whole.EffectNames = 0, nil
	if _, err := whole.convert(pool); err != nil {
		t.Fatal(err)
	}
	killEach(t, whole, killed{
		prepare: func(*world) {}, run: func(w *world) error { _, err := w.convert(pool); return err },
		again: func(w *world) error { _, err := w.convert(pool); return err }, want: whole.clean(),
		back: func(w *world) error { _, err := w.revert(); return err }, before: native,
	})
}

// TestConvertGoesOnWithoutAReport runs convert again after it was killed right after the restart of
// kubelet. It must not reject the node as not Ready.
func TestConvertGoesOnWithoutAReport(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	for _, l := range []string{openyurt.LabelEdgeWorker, openyurt.LabelNodePool} {
		delete(w.Cluster.Nodes["edge-sn0042"].Metadata.Labels, l)
	}
	w.KubeletFailsBehindHub = true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w.Shutdown = cancel
	e := w.Env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		w.Cluster.Mu.Lock()
		w.KubeletFailsBehindHub = false
		w.Cluster.Mu.Unlock()
		return sleep(ctx, d)
	}
	if err := hub.Convert(ctx, e, pool, func(run.Step) {}); err != nil {
		t.Error(err)
	}
}

// TestRevertKilled is like TestConvertKilled, for revert.
func TestRevertKilled(t *testing.T) {
	t.Parallel()
	whole := soleNode(t)
	whole.Put(hub.BakedUnit, openyurt.UnitFile) // it stays, so it does not count as left over
	if _, err := whole.convert(pool); err != nil {
		t.Fatal(err)
	}
	edge := whole.clean()
	whole.Effects, whole.EffectNames = 0, nil
	if _, err := whole.revert(); err != nil {
		t.Fatal(err)
	}
	killEach(t, whole, killed{
		prepare: func(w *world) {
			w.Put(hub.BakedUnit, openyurt.UnitFile)
			if _, err := w.convert(pool); err != nil {
				t.Fatal(err)
			}
		},
		run:   func(w *world) error { _, err := w.revert(); return err },
		again: func(w *world) error { _, err := w.revert(); return err }, want: whole.clean(),
		back: func(w *world) error { _, err := w.convert(pool); return err }, before: edge,
	})
}

// killed describes a change that is killed, and the two ways to go on: the same change again, or
// the change back.
type killed struct {
	prepare          func(*world)
	run, again, back func(*world) error
	want, before     map[string]string // the trees after again and after back
}

// killEach kills the change before each effect that whole has counted.
func killEach(t *testing.T, whole *world, k killed) {
	t.Helper()
	if whole.Effects < 15 {
		t.Fatalf("only %d effects were counted", whole.Effects)
	}
	ready := soleNode(t)
	k.prepare(ready)
	ready.Effects, ready.EffectNames = 0, nil
	files := ready.Files()
	for n := 1; n <= whole.Effects; n += worldtest.EveryCut() {
		t.Run(fmt.Sprintf("at %d", n), func(t *testing.T) {
			t.Parallel()
			cut := ready.CloneWith(t, files)
			cut.PowerCutAt = n
			err := k.run(cut)
			at := cut.EffectNames[len(cut.EffectNames)-1]
			cut.PowerCutAt = 0
			left := cut.Files()
			if err == nil && slices.ContainsFunc(whole.EffectNames[n-1:], func(e string) bool {
				return !strings.HasPrefix(e, "write "+ondisk.LogDir) && !strings.HasPrefix(e, "run journalctl") // errors of the record do not stop a change
			}) {
				t.Fatalf("killed at %d (%s): the command succeeded", n, at)
			}
			for _, way := range []struct {
				name string
				run  func(*world) error
				want map[string]string
			}{{"again", k.again, k.want}, {"back", k.back, k.before}} {
				w := cut.CloneWith(t, left)
				if err := way.run(w); err != nil && !errors.Is(err, run.ErrAlready) {
					t.Errorf("killed at %d (%s), %s: %v", n, at, way.name, err)
				}
				sameTree(t, "killed at "+at+", "+way.name, w.clean(), way.want)
			}
		})
	}
}

// foreignNode returns a node that kubeadm joined without edgebake: no image.json, no
// slot, no Site, no ipvscare, and kubelet connects to one API server.
func foreignNode(t *testing.T) *world {
	w := readyNode(t)
	for _, p := range []string{ondisk.ImageInfoFile, ondisk.StateDir, "/etc/edgebake", "/etc/hosts", "/sys/module/dummy"} {
		if err := os.RemoveAll(filepath.Join(w.Root, p)); err != nil {
			t.Fatal(err)
		}
	}
	w.Slots = nil
	conf, err := kubeapi.SetServer([]byte(w.Get(ondisk.KubeletConf)), "https://192.0.2.11:6443", "")
	if err != nil {
		t.Fatal(err)
	}
	w.Put(ondisk.KubeletConf, string(conf))
	w.Put(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///var/run/containerd/containerd.sock --pod-infra-container-image=registry.example/pause:3.9\"\n")
	return w
}

func TestConvertForeignNode(t *testing.T) {
	t.Parallel()
	w := foreignNode(t)
	native := w.clean()
	if steps, err := w.convert(pool); err != nil {
		t.Fatalf("%v\n%v", err, steps)
	}
	for _, want := range []string{"--server-addr=https://192.0.2.11:6443 ", "--node-ip=192.0.2.50 ", "--nodepool-name=shanghai "} {
		if !strings.Contains(w.Get(hub.EnvFile), want) {
			t.Errorf("yurthub's arguments lack %s: %s", want, w.Get(hub.EnvFile))
		}
	}
	if w.Get(hub.UnitFile) != openyurt.UnitFile || !slices.Contains(w.EffectNames, "enable "+openyurt.Unit) || !slices.Contains(w.EffectNames, "run modprobe dummy") {
		t.Errorf("the unit was not enabled: %v", w.EffectNames)
	}
	if _, err := w.convert(pool); !errors.Is(err, run.ErrAlready) {
		t.Errorf("converted twice: %v", err)
	}
	if steps, err := w.revert(); err != nil {
		t.Fatalf("%v\n%v", err, steps)
	}
	sameTree(t, "after revert", w.clean(), native)
}

// TestConvertAfterYurtadm checks that convert and revert remove the files that yurtadm left next to
// its unit, because these would override edgebake's arguments.
func TestConvertAfterYurtadm(t *testing.T) {
	t.Parallel()
	w := foreignNode(t)
	w.Put(hub.UnitFile, "[Service]\nExecStart=/usr/local/bin/yurthub\n")
	w.Put(openyurt.Dropin, "[Service]\nExecStart=\nExecStart=/usr/local/bin/yurthub --working-mode=edge\n")
	if steps, err := w.convert(pool); err != nil {
		t.Fatalf("%v\n%v", err, steps)
	}
	if w.Has(openyurt.Dropin) || w.Get(hub.UnitFile) != openyurt.UnitFile {
		t.Error("yurtadm's drop-in still exists, or its unit was not replaced")
	}
	w.Put(openyurt.Dropin, "[Service]\n")
	if steps, err := w.revert(); err != nil {
		t.Fatalf("%v\n%v", err, steps)
	}
	if w.Has(openyurt.Dropin) || w.Has(hub.UnitFile) {
		t.Error("yurtadm's drop-in or the unit still exists")
	}
}

// TestGateFitsKubelet checks that kubelet gets no feature gate that it does not know: it would not
// start, on a node that worked before.
func TestGateFitsKubelet(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{
		"Kubernetes v1.24.17\n": "", "Kubernetes v1.29.15\n": "", "Kubernetes v1.30.0\n": "", "Kubernetes v1.34.2\n": "",
		"Kubernetes v1.35.0\n": openyurt.ListPlainly, "Kubernetes v1.36.3\n": openyurt.ListPlainly, "Kubernetes v1.36.3-rc.0+abc\n": openyurt.ListPlainly,
	} {
		w := foreignNode(t)
		w.KubeletVersion = version
		if _, err := w.convert(pool); err != nil {
			t.Fatal(err)
		}
		flags := w.Get(member.KubeadmFlags)
		if !strings.Contains(flags, want+openyurt.RedirectFlags) || strings.Contains(flags, "feature-gates") != (want != "") {
			t.Errorf("%q: %s", version, flags)
		}
	}
	w := foreignNode(t)
	native := w.clean()
	w.KubeletVersion = "kubelet: command not understood\n"
	if _, err := w.convert(pool); err == nil || !strings.Contains(err.Error(), "asking kubelet for its version") {
		t.Errorf("no version: %v", err)
	}
	sameTree(t, "undone", w.clean(), native)
}

func TestConvertUndoesWhatFailed(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lack  func(*world)
		words string
	}{
		{"yurthub never ready", func(w *world) { w.Cluster.HubServerCSR = "pending" }, "is not approved yet"},
		{"kubelet does not get through", func(w *world) { w.KubeletFailsBehindHub = true }, "kubelet has not reported"},
		{"kubelet does not heed its flags", func(w *world) { w.KubeletIgnoresFlags = true }, "kubelet runs with --kubeconfig=" + ondisk.KubeletConf},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := readyNode(t)
			native := w.clean()
			tc.lack(w)
			steps, err := w.convert(pool)
			if err == nil || !strings.Contains(err.Error(), tc.words) {
				t.Fatalf("convert: %v", err)
			}
			sameTree(t, "undone", w.clean(), native)
			if steps[len(steps)-1].Status != "undone" {
				t.Errorf("steps: %v", steps)
			}
			dirs, _ := filepath.Glob(filepath.Join(w.Root, ondisk.LogDir, "convert-*", "steps.json"))
			if len(dirs) == 0 {
				t.Error("convert left no record")
			}
		})
	}
}

func TestConvertRefuses(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		prepare func(*world)
		o       hub.ConvertOptions
		words   string
	}{
		{"control plane", func(w *world) { w.Put(ondisk.ManifestsDir+"/kube-apiserver.yaml", "x") }, pool, "control plane"},
		{"no answer", func(w *world) { w.Offline = true }, pool, "convert must reach the cluster, to label the Node and to check the result: reading this machine's Node: "},
		{"not ready", func(w *world) { w.Cluster.NotReady = true }, pool, "is not Ready: KubeletNotReady"},
		{"no pool", func(*world) {}, hub.ConvertOptions{}, "no node pool"},
		{"no program", func(w *world) { os.Remove(filepath.Join(w.Root, openyurt.Program)) }, pool, "there is no " + openyurt.Program},
		{"another processor", func(w *world) { w.Put(openyurt.Program, "for another processor") }, pool, "exec format error\ninstall yurthub's program there, built for this machine's processor"},
		{"older yurthub", func(w *world) { w.Put(openyurt.Program, `yurthub: projectinfo.Info{GitVersion:"v1.6.1"}`) }, pool, "is v1.6: a node that has joined needs v1.7 or later"},
		{"a flag of a later yurthub", func(w *world) { w.Put(openyurt.Program, `yurthub: projectinfo.Info{GitVersion:"v1.7.0"}`) }, hub.ConvertOptions{NodePool: "shanghai", Extra: []string{"--no-such-flag"}}, "--yurthub-arg --no-such-flag is unknown to yurthub"},
		{"first boot at work", func(w *world) {
			w.Put(ondisk.StateFile, strings.Replace(w.Get(ondisk.StateFile), `"result": "done"`, `"result": "waiting"`, 1))
			w.Units[ondisk.UnitFirstboot] = "active"
		}, pool, "first boot has not finished on this machine (waiting)"},
		{"no server answers", func(w *world) { w.Cluster.Down["192.0.2.99:6443"] = true }, hub.ConvertOptions{NodePool: "p", Servers: []string{"https://192.0.2.99:6443"}}, "yurthub can use none of the servers: connecting to the API server 192.0.2.99:6443"},
		{"no such pool", func(w *world) { w.Cluster.NoNodePool = true }, pool, "the cluster has no NodePool shanghai"},
		{"cloud in an edge pool", func(*world) {}, hub.ConvertOptions{NodePool: "shanghai", Cloud: true}, "NodePool shanghai is of type Edge"},
		{"in another pool", func(w *world) {
			w.Cluster.Nodes["edge-sn0042"].Metadata.Labels = map[string]string{openyurt.LabelNodePool: "beijing"}
		}, pool, "the Node edge-sn0042 is already in node pool beijing"},
		{"no certificate that rotates", func(w *world) {
			b := w.Get(member.ClientCert)
			for _, p := range member.KubeletKeys(w.Env()) {
				os.Remove(filepath.Join(w.Root, p))
			}
			w.Put("/etc/kubernetes/own.pem", b)
			w.Put(ondisk.KubeletConf, strings.ReplaceAll(w.Get(ondisk.KubeletConf), member.ClientCert, "/etc/kubernetes/own.pem"))
		}, pool, "there is no " + member.ClientCert},
		{"no nftables", func(w *world) { w.NoNFT = true }, pool, "closing the ports of yurthub, which give this node's rights to any client: exec"},
		{"no node", func(w *world) { os.Remove(filepath.Join(w.Root, ondisk.KubeletConf)) }, pool, "only a node that kubeadm joined can be converted or reverted: this machine is not enrolled: there is no /etc/kubernetes/kubelet.conf"},
		{"http", func(*world) {}, hub.ConvertOptions{NodePool: "p", Servers: []string{"http://192.0.2.11:6443"}}, "not of the form https://host:port"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := readyNode(t)
			tc.prepare(w)
			before := w.clean()
			if _, err := w.convert(tc.o); err == nil || !strings.Contains(err.Error()+"\n"+run.Advice(err), tc.words) {
				t.Errorf("convert: %v\n%s", err, run.Advice(err))
			}
			sameTree(t, "refused", w.clean(), before)
		})
	}
}

func TestConvertLeavesThePortOpen(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	if _, err := w.convert(hub.ConvertOptions{NodePool: "shanghai", OpenPort: true, LocalClients: []int{65534}}); err != nil {
		t.Fatal(err)
	}
	if w.NFTRules != string(hub.PortRules(hub.PortAccess{Open: true, Clients: []int{65534}})) {
		t.Errorf("the rules are:\n%s", w.NFTRules)
	}
}

// TestConvertLeavesOpenYurtNodesAlone checks that a node that uses yurthub already is not changed,
// whatever the options, because only a native node could be restored.
func TestConvertLeavesOpenYurtNodesAlone(t *testing.T) {
	t.Parallel()
	converted := func(t *testing.T) *world {
		w := readyNode(t)
		if _, err := w.convert(pool); err != nil {
			t.Fatal(err)
		}
		return w
	}
	bySite := func(t *testing.T) *world {
		w := edgeWorld(t)
		if err := w.Boot(); err != nil {
			t.Fatal(err)
		}
		return w
	}
	const is = "edge-sn0042 is an OpenYurt node already, of type edge in node pool shanghai"
	for _, tc := range []struct {
		name   string
		node   func(*testing.T) *world
		lack   func(*world)
		o      hub.ConvertOptions
		words  string
		advice string
	}{
		{"another pool", converted, nil, hub.ConvertOptions{NodePool: "beijing"}, is, "`firstboot revert`"},
		{"another type", converted, nil, hub.ConvertOptions{NodePool: "shanghai", Cloud: true}, is, "`firstboot revert`"},
		{"other arguments", converted, nil, hub.ConvertOptions{NodePool: "shanghai", LBMode: "rr"}, is + ", but its yurthub has other arguments than convert would set", "`firstboot revert`"},
		{"yurthub is down", converted, func(w *world) { w.Units[openyurt.Unit] = "inactive" }, pool, is + ", but yurthub is not ready", "journalctl -u yurthub"},
		{"no answer", converted, func(w *world) { w.Offline = true }, pool, "convert must reach the cluster", ""},
		{"by its Site, another pool", bySite, nil, hub.ConvertOptions{NodePool: "beijing"}, "in node pool", "change nodeType, nodePool or yurthub's arguments in its Site"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := tc.node(t)
			if tc.lack != nil {
				tc.lack(w)
			}
			before := w.clean()
			steps, err := w.convert(tc.o)
			if err == nil || errors.Is(err, run.ErrAlready) || !strings.Contains(err.Error(), tc.words) || !strings.Contains(run.Advice(err), tc.advice) {
				t.Errorf("convert: %v\n%s", err, run.Advice(err))
			}
			if len(steps) > 0 {
				t.Errorf("convert began: %v", steps)
			}
			sameTree(t, "refused", w.clean(), before)
		})
	}
	w := bySite(t)
	now := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels
	if _, err := w.convert(hub.ConvertOptions{NodePool: now[openyurt.LabelNodePool]}); !errors.Is(err, run.ErrAlready) {
		t.Errorf("converting a node to what its Site makes it already: %v", err)
	}
}

// TestConvertKilledThenFails checks a convert that was killed after it had redirected kubelet, and
// whose next run cannot make yurthub ready. That run must leave a working native node.
func TestConvertKilledThenFails(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	native := w.clean()
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	for _, l := range []string{openyurt.LabelEdgeWorker, openyurt.LabelNodePool} {
		delete(w.Cluster.Nodes["edge-sn0042"].Metadata.Labels, l)
	}
	w.Cluster.HubServerCSR = "pending"
	w.PowerOn()
	for p := range w.clean() {
		if strings.HasPrefix("/"+p, openyurt.Root) {
			if err := os.Remove(filepath.Join(w.Root, p)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := w.convert(hub.ConvertOptions{NodePool: "beijing"}); err == nil || !strings.Contains(run.Advice(err), "kubectl certificate approve") {
		t.Fatalf("convert: %v", err)
	}
	sameTree(t, "undone", w.clean(), native)
}

// TestRevertGivesLabelsBack checks that a revert that fails leaves the OpenYurt node as it was.
func TestRevertGivesLabelsBack(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	edge := w.clean()
	w.Cluster.NotReady = true
	if _, err := w.revert(); err == nil {
		t.Fatal("a node that does not report counts as Ready")
	}
	sameTree(t, "undone", w.clean(), edge)
	labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels
	if labels[openyurt.LabelEdgeWorker] != "true" || labels[openyurt.LabelNodePool] != "shanghai" {
		t.Errorf("labels: %v", labels)
	}
}

// TestRevertFailsAtItsEnd checks that a node that became Ready as a native node is not redirected
// to the removed yurthub.
func TestRevertFailsAtItsEnd(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	native := w.clean()
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	stuck := "/sys/class/net/hub-dummy0/stuck"
	w.Put(stuck, "")
	steps, err := w.revert()
	if err == nil || !strings.Contains(run.Advice(err), "run the same command again") {
		t.Fatalf("%v\n%v", err, steps)
	}
	if labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels; member.Redirected(w.Env()) || len(labels) != 0 {
		t.Errorf("convert was undone: labels %v, kubelet's flags %s", labels, w.Get(member.KubeadmFlags))
	}
	if err := os.Remove(filepath.Join(w.Root, stuck)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.revert(); err != nil {
		t.Fatal(err)
	}
	sameTree(t, "reverted in two goes", w.clean(), native)
}

// TestRevertLeavesKubeletWhereItIs checks that kubelet is not redirected to a yurthub that does not
// serve.
func TestRevertLeavesKubeletWhereItIs(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	if _, err := w.convert(pool); err != nil {
		t.Fatal(err)
	}
	w.Units[openyurt.Unit] = "failed"
	w.Cluster.NotReady = true
	if _, err := w.revert(); err == nil {
		t.Fatal("a node that is not Ready counts as Ready")
	}
	if labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels; member.Redirected(w.Env()) || len(labels) != 0 {
		t.Errorf("labels %v, kubelet's flags %s", labels, w.Get(member.KubeadmFlags))
	}
}

// TestResetForgetsTheToken checks that the boot after a reset does not continue an unfinished join.
func TestResetForgetsTheToken(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Cluster.HubServerCSR = "pending"
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded although no CSR was approved")
	}
	if _, err := w.reset(); err != nil {
		t.Fatal(err)
	}
	w.NoSecret()
	w.Cluster.HubServerCSR = "Approved"
	joins := w.Joins
	w.PowerOn()
	if err := w.Boot(); err == nil || w.Joins != joins || !w.ConsoleHas("the Site has no bootstrap token") {
		t.Errorf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
	}
}

// TestResetKeepsTheNextSite checks that a reset keeps the token of the next Site, which does not
// belong to the join that is undone.
func TestResetKeepsTheNextSite(t *testing.T) {
	t.Parallel()
	for name, next := range map[string]func(w *world) string{
		"another name": func(w *world) string {
			return strings.Replace(w.Site(worldtest.WithToken), "edge-{{.Serial}}", "other", 1)
		},
		"the same name": func(w *world) string { return w.Site(worldtest.WithToken) },
	} {
		t.Run(name, func(t *testing.T) {
			w := edgeWorld(t)
			if err := w.Boot(); err != nil {
				t.Fatal(err)
			}
			w.Stamp(worldtest.SlotDevice, next(w))
			if _, err := w.reset(); err != nil {
				t.Fatal(err)
			}
			delete(w.Cluster.Nodes, "edge-sn0042") // kubectl delete node
			joins := w.Joins
			w.PowerOn()
			if err := w.Boot(); err != nil || w.Joins != joins+1 {
				t.Errorf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
			}
		})
	}
	// First boot has noticed the next Site, and has advised a reset.
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken), "edge-{{.Serial}}", "other", 1))
	w.PowerOn()
	if err := w.Boot(); err == nil {
		t.Fatal("the node has two names")
	}
	if _, err := w.reset(); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	if err := w.Boot(); err != nil || w.State().Node != "other" {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestResetKilled cuts the power before each effect of a reset in the middle of a join. A
// second reset removes the token and keeps the Site.
func TestResetKilled(t *testing.T) {
	t.Parallel()
	begun := edgeWorld(t)
	begun.Cluster.HubServerCSR = "pending"
	if err := begun.Boot(); err == nil {
		t.Fatal("first boot succeeded although no CSR was approved")
	}
	begun.Effects, begun.EffectNames = 0, nil
	begun.Units[ondisk.UnitAgain] = "active" // an API server was out of reach in an earlier pass
	whole := begun.Clone(t)
	if _, err := whole.reset(); err != nil {
		t.Fatal(err)
	}
	timer, service := slices.Index(whole.EffectNames, "stop "+ondisk.UnitAgain), slices.Index(whole.EffectNames, "stop "+ondisk.UnitFirstboot)
	if timer < 0 || timer > service {
		t.Errorf("first boot's timer can start it again after reset has stopped it: %q", whole.EffectNames)
	}
	for n := 1; n <= whole.Effects; n += worldtest.EveryCut() {
		t.Run(fmt.Sprintf("at %d", n), func(t *testing.T) {
			t.Parallel()
			w := begun.Clone(t)
			w.PowerCutAt = n
			_, err := w.reset()
			at := w.EffectNames[len(w.EffectNames)-1]
			w.PowerCutAt = 0
			if _, again := w.reset(); again != nil {
				t.Fatalf("cut at %s (%v), again: %v", at, err, again)
			}
			w.NoSecret()
			if state := w.Units[ondisk.UnitAgain]; state != "inactive" {
				t.Errorf("cut at %s: %s is %s, which runs first boot again", at, ondisk.UnitAgain, state)
			}
			if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "nodePool") {
				t.Errorf("cut at %s: the Site is lost", at)
			}
		})
	}
}

// TestResetThenJoinUnderAnotherName checks that a new Site makes the machine join again after a
// reset, and that the image's files still exist.
func TestResetThenJoinUnderAnotherName(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Put(ondisk.ManifestsDir+"/baked.yaml", "kind: Pod\n")
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Put(hub.EnvFile, strings.Replace(w.Get(hub.EnvFile), "--v=2", "--v=2 --dummy-if-name=mine", 1))
	w.Put("/sys/class/net/mine", "")
	name, err := w.reset()
	if err != nil || name != "edge-sn0042" {
		t.Fatalf("%s, %v", name, err)
	}
	for _, p := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, ondisk.KubeCA, ondisk.IPVSConfig, hub.EnvFile, openyurt.KubeletConf, member.ReadyMark} {
		if w.Has(p) {
			t.Errorf("%s is still there", p)
		}
	}
	if w.Has("/sys/class/net/mine") {
		t.Error("yurthub's interface is still there")
	}
	if w.Get(ondisk.ManifestsDir+"/baked.yaml") != "kind: Pod\n" {
		t.Error("a file of the image is gone")
	}
	if name, err := w.reset(); err != nil || name != "" {
		t.Errorf("reset again: %q, %v", name, err)
	}
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken), "edge-{{.Serial}}", "other", 1))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if s := w.State(); s.Node != "other" || s.Result != ondisk.ResultDone {
		t.Errorf("state: %s %s", s.Node, s.Result)
	}
}
