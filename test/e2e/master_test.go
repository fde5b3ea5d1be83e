package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

// madeControlPlane makes the quickstart image with the control plane's container images.
var madeControlPlane = sync.OnceValues(func() (string, error) {
	return bakeMaster("master", lab.Releases()[0])
})

// bakeMaster bakes the quickstart image with a release's control plane.
func bakeMaster(name string, r lab.Release) (image string, err error) {
	layout := "control-plane"
	if r != lab.Releases()[0] {
		layout += "-" + r.Kubernetes
	}
	if err := makeLayout(layout, "-control-plane", "-kubernetes", r.Kubernetes); err != nil {
		return "", err
	}
	return bakeFor(name, func(quickstart string) string { return lab.ControlPlaneImage(quickstart, "../../build/"+layout, r) })
}

// madeAddons makes images of control-plane nodes and of workers, with kube-proxy and CoreDNS.
var madeAddons = sync.OnceValues(func() (images struct{ master, worker string }, err error) {
	for _, kind := range []string{"control-plane", "addons"} {
		if err := makeLayout(kind, "-"+kind); err != nil {
			return images, err
		}
	}
	images.master, err = bakeFor("master-addons", func(quickstart string) string {
		return lab.WithAddons(lab.ControlPlaneImage(quickstart, controlPlaneLayout, lab.Releases()[0]), addonsLayout, podCIDR(0))
	})
	if err == nil {
		images.worker, err = bakeFor("worker-addons", func(quickstart string) string {
			return lab.WithAddons(quickstart, addonsLayout, podCIDR(1))
		})
	}
	return images, err
})

// podCIDR returns the CIDR of the pods on the nth machine, if the image assigns pod addresses.
func podCIDR(n int) string { return fmt.Sprintf("10.244.%d.0/24", n) }

// Layouts of container images, relative to the directory of the Images made here.
const (
	controlPlaneLayout = "../../build/control-plane"
	addonsLayout       = "../../build/addons"
)

// makeLayout makes one of these layouts by running test/images with flags.
func makeLayout(name string, flags ...string) error {
	p, err := made()
	if err != nil {
		return err
	}
	return p.run(context.Background(), append([]string{"go", "run", "./test/images", "-o", "build/" + name}, flags...)...)
}

// bakeFor bakes an image. from returns its document, given the quickstart's.
func bakeFor(name string, from func(quickstart string) string) (image string, err error) {
	p, err := made()
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(filepath.Join(p.root, "configs", "examples", "quickstart.yaml"))
	if err != nil {
		return "", err
	}
	base := filepath.Join(p.root, "build", "e2e", name)
	if err := os.WriteFile(base+".yaml", []byte(from(string(b))), 0o644); err != nil {
		return "", err
	}
	start := time.Now()
	err = p.run(context.Background(), p.bin, "build", base+".yaml", "--output", base+".raw", "--force", "--lock", base+".lock")
	fmt.Printf("%6.1f s  edgebake build, %s\n", time.Since(start).Seconds(), name)
	return base + ".raw", err
}

// clusterManifest has an object whose namespace comes after it.
const clusterManifest = `apiVersion: v1
kind: ConfigMap
metadata: {name: prices, namespace: shop}
data: {tea: "2"}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
`

// TestClusterIsBorn makes the smallest cluster from images alone, and switches its worker on first:
// the worker waits, the control-plane node bootstraps, both become Ready and a pod runs.
// TestClusterFromImages tests more.
func TestClusterIsBorn(t *testing.T) {
	pace.Takes(t, 330*time.Second)
	p := need(t)
	golden, err := madeControlPlane()
	if err != nil {
		t.Fatal(err)
	}
	clusterIsBorn(t, p, golden, lab.KubernetesVersion)
}

// clusterIsBorn starts a control-plane node from golden and a worker from the parts' image.
func clusterIsBorn(t *testing.T, p *parts, golden, kubernetes string) *world {
	t.Helper()
	w := newNet(t, p)
	both := w.machines(0, "m1", "shop1")
	minted := w.mint(lab.Minted{Kubernetes: kubernetes, Masters: both[:1], Workers: both[1:]})
	shop1, m1 := w.stamp(p.golden, minted, "shop1"), w.stamp(golden, minted, "m1") // before the clock starts
	clock := w.lab.NewLockstep()
	worker := w.start(lab.VMConfig{Name: "shop1", Image: shop1, Guest: 1, CPUs: 1, Lockstep: clock})
	w.expect(worker, 0, lab.WaitsForAPIServer.String())
	master := w.start(lab.VMConfig{Name: "m1", Image: m1, Guest: 0, CPUs: 1, Memory: 2560, Lockstep: clock})
	w.expect(master, 0, `edgebake: bootstrapping an empty etcd`)
	var err error
	if w.c, err = w.lab.Attach(p.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), w.net.GuestAddr(0).String()+":6443"); err != nil {
		t.Fatal(err)
	}
	w.ready(master, nil)
	w.ready(worker, nil)
	w.makePod(worker, "hello")
	w.off(worker)
	w.off(master)
	w.keysOn(w.disk(master), minted, 1)
	w.keysOn(w.disk(worker), minted, 0)
	return w
}

// TestClusterFromImages makes a cluster from images alone. Its keys are made on a computer, and its
// worker is switched on before its control-plane node. Both must become Ready, a pod must run,
// kube-proxy and CoreDNS must work, and the cluster's keys must be only where kubeadm keeps them.
func TestClusterFromImages(t *testing.T) {
	nightly(t)
	p := need(t)
	images, err := madeAddons()
	if err != nil {
		t.Fatal(err)
	}
	w := newNet(t, p)
	if err := os.WriteFile(filepath.Join(w.lab.Dir, "shop.yaml"), []byte(clusterManifest), 0o600); err != nil {
		t.Fatal(err)
	}
	both := w.machines(0, "m1", "shop1")
	for n, other := range []int{1, 0} { // let pods reach each other, and give CoreDNS a resolver
		both[n].Cards = strings.Replace(both[n].Cards, "}", fmt.Sprintf(", routes: [{to: %s, via: %s}]}", podCIDR(other), both[other].Address), 1)
		both[n].DNS = lab.Gateway
	}
	minted := w.mint(lab.Minted{Masters: both[:1], Workers: both[1:], Manifests: []string{"shop.yaml"}, Addons: true})
	w.stamp(images.master, minted, "m1")
	w.stamp(images.worker, minted, "shop1")
	clock := w.lab.NewLockstep()
	worker := w.start(lab.VMConfig{Name: "shop1", Image: filepath.Join(w.lab.Dir, "shop1.raw"), Guest: 1, CPUs: 1, Lockstep: clock})
	w.expect(worker, 0, lab.WaitsForAPIServer.String())
	master := w.start(lab.VMConfig{Name: "m1", Image: filepath.Join(w.lab.Dir, "m1.raw"), Guest: 0, CPUs: 1, Memory: 2560, Lockstep: clock})
	w.expect(master, 0, `edgebake: bootstrapping an empty etcd`)
	if w.c, err = w.lab.Attach(p.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), w.net.GuestAddr(0).String()+":6443"); err != nil {
		t.Fatal(err)
	}
	w.ready(master, nil)
	node, err := w.c.Node(t.Context(), "m1") // the Node was Ready before it was labeled
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := node.Metadata.Labels["node-role.kubernetes.io/control-plane"]; !ok {
		t.Errorf("the master's Node has labels %v", node.Metadata.Labels)
	}
	for _, path := range []string{"/api/v1/namespaces/shop/configmaps/prices", "/api/v1/namespaces/kube-system/configmaps/edgebake-manifests"} {
		if err := w.c.Get(t.Context(), path, new(lab.Object)); err != nil {
			t.Errorf("the Cluster's manifests were not applied: %v", err)
		}
	}
	w.ready(worker, nil)
	w.makePod(worker, "hello")
	w.addonsWork(master, worker)

	// All machines lose power, and the cluster comes back unchanged.
	before := node
	worker.Cut()
	master.Cut()
	if err := master.On(); err != nil {
		t.Fatal(err)
	}
	if again := w.ready(master, before); again.Metadata.UID != before.Metadata.UID {
		t.Error("after the power cut the cluster has another identity")
	}

	const later = "/api/v1/namespaces/kube-public/configmaps"
	if err := w.c.Create(t.Context(), later, map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "later"}}); err != nil {
		t.Fatal(err)
	}
	w.off(master)
	disk := w.disk(master)
	w.keysOn(disk, minted, 1)
	w.keysOn(w.disk(worker), minted, 0)

	// Replace etcd's data with the snapshot that first boot took.
	snapshot, lost := w.snapshotOn(disk), filepath.Join(w.lab.Dir, "lost")
	w.must(p.bin, "cluster", "sites", minted, "--continue-from", "m1", "--restore", snapshot, "--output", lost)
	w.must(p.bin, "stamp", disk, filepath.Join(lost, "m1.yaml"), "--in-place")
	restored := w.start(lab.VMConfig{Name: "m1", Image: disk, Guest: 0, CPUs: 1, Memory: 2560, Lockstep: clock})
	w.expect(restored, 0, `edgebake: restoring etcd from a snapshot`)
	if again := w.ready(restored, before); again.Metadata.UID != before.Metadata.UID {
		t.Error("the restored cluster has another identity")
	}
	if err := w.c.Get(t.Context(), later+"/later", new(lab.Object)); !lab.NotFound(err) {
		t.Errorf("data written after the snapshot exists: %v", err)
	}
}

// addonsWork waits until kube-proxy runs on each node, and until CoreDNS, which needs the API
// server's Service, is Ready. Then a pod on each node requests the pod hello by its Service's name.
func (w *world) addonsWork(nodes ...*lab.VM) {
	w.t.Helper()
	for path, field := range map[string]string{"daemonsets/kube-proxy": "numberReady", "deployments/coredns": "readyReplicas"} {
		w.until(nodes[0], path+" is Ready", func() error {
			var o struct{ Status map[string]any }
			if err := w.c.Get(w.t.Context(), "/apis/apps/v1/namespaces/kube-system/"+path, &o); err != nil {
				return err
			}
			if n, _ := o.Status[field].(float64); int(n) != len(nodes) {
				return fmt.Errorf("%v of %d are Ready", o.Status[field], len(nodes))
			}
			return nil
		})
	}
	const core = "/api/v1/namespaces/default/"
	labels := map[string]string{"app": "hello"}
	if err := w.c.Patch(w.t.Context(), core+"pods/hello", map[string]any{"metadata": map[string]any{"labels": labels}}); err != nil {
		w.t.Fatal(err)
	}
	if err := w.c.Create(w.t.Context(), core+"services", map[string]any{"apiVersion": "v1", "kind": "Service",
		"metadata": map[string]any{"name": "hello"},
		"spec":     map[string]any{"selector": labels, "ports": []any{map[string]any{"port": 80, "targetPort": 8080}}},
	}); err != nil {
		w.t.Fatal(err)
	}
	for _, vm := range nodes {
		name := "asks-" + vm.Node
		if err := w.c.Create(w.t.Context(), core+"pods", map[string]any{"apiVersion": "v1", "kind": "Pod",
			"metadata": map[string]any{"name": name},
			"spec": map[string]any{
				"nodeName": vm.Node, "restartPolicy": "OnFailure", "tolerations": lab.Stays(),
				"containers": []any{map[string]any{"name": name, "image": helloImage, "imagePullPolicy": "Never", "args": []string{"http://hello.default.svc.cluster.local/"}}},
			},
		}); err != nil {
			w.t.Fatal(err)
		}
		w.until(vm, "the Service answers the pod "+name, func() error {
			var pod lab.Object
			if err := w.c.Get(w.t.Context(), core+"pods/"+name, &pod); err != nil {
				return err
			}
			if pod.Status.Phase != "Succeeded" {
				return fmt.Errorf("the pod is %s: %+v", pod.Status.Phase, pod.Status.ContainerStatuses)
			}
			return nil
		})
		w.t.Logf("%6.1f s from power-on: the Service answers a pod on %s", vm.Serial.Note("").At.Seconds(), vm.Node)
	}
}

// machines returns machines with these names. Their addresses are those of the test network's
// guests, from number first on.
func (w *world) machines(first int, names ...string) []lab.MintedMachine {
	var all []lab.MintedMachine
	for i, name := range names {
		address := w.net.GuestAddr(first + i).String()
		all = append(all, lab.MintedMachine{Name: name, Address: address,
			Cards: fmt.Sprintf(`{name: "en*", addresses: [%s/%d], gateway: %s}`, address, lab.GuestsCIDR, lab.Gateway)})
	}
	return all
}

// mint makes the keys of a cluster and its machines' Sites.
func (w *world) mint(c lab.Minted) (dir string) {
	w.t.Helper()
	c.Kubernetes = cmp.Or(c.Kubernetes, lab.KubernetesVersion)
	text, err := c.YAML()
	if err != nil {
		w.t.Fatal(err)
	}
	document := filepath.Join(w.lab.Dir, "cluster.yaml")
	if err := os.WriteFile(document, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	dir = filepath.Join(w.lab.Dir, "shops")
	w.must(w.bin, "cluster", "new", document, "--output", dir)
	w.must(w.bin, "cluster", "sites", dir)
	return dir
}

// stamp makes the disk of a machine of a minted cluster, in place of an existing one.
func (w *world) stamp(golden, minted, name string) (image string) {
	w.t.Helper()
	image = filepath.Join(w.lab.Dir, name+".raw")
	w.must(w.bin, "stamp", golden, filepath.Join(minted, "sites", name+".yaml"), "--output", image, "--force")
	return image
}

// snapshotOn copies the last snapshot of etcd from a disk.
func (w *world) snapshotOn(disk string) string {
	w.t.Helper()
	const dir = "/lib/edgebake/snapshots"
	fs := fmt.Sprintf("%s?offset=%d", disk, w.partition(disk, ondisk.LabelData))
	var names []string
	for line := range strings.Lines(w.must("debugfs", "-R", "ls -p "+dir, fs)) {
		if f := strings.Split(line, "/"); len(f) > 5 && strings.HasSuffix(f[5], ".db") {
			names = append(names, f[5])
		}
	}
	if len(names) == 0 {
		w.t.Fatal("first boot took no snapshot of etcd")
	}
	file := filepath.Join(w.lab.Dir, "snapshot.db")
	w.must("debugfs", "-R", fmt.Sprintf("dump %s/%s %s", dir, slices.Max(names), file), fs)
	return file
}

// keysOn checks how often each of the cluster's private keys is on a raw disk. times is 1 for a
// master, which has kubeadm's files, and 0 for a worker.
func (w *world) keysOn(disk, minted string, times int) {
	w.t.Helper()
	for _, name := range []string{"ca.key", "etcd/ca.key", "front-proxy-ca.key", "sa.key"} {
		text, err := os.ReadFile(filepath.Join(minted, "pki", filepath.FromSlash(name)))
		if err != nil {
			w.t.Fatal(err)
		}
		line := strings.Split(string(text), "\n")[1]
		hits, err := lab.FindInFile(disk, []byte(line))
		if err != nil {
			w.t.Fatal(err)
		}
		if len(hits) != times {
			w.t.Errorf("%s is on %s %d times, want %d, at %d", name, filepath.Base(disk), len(hits), times, hits)
		}
	}
}
