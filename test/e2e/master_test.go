package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/test/lab"
)

// madeMaster is the quickstart image with the control plane's container images
// on board.
var madeMaster = sync.OnceValues(func() (string, error) {
	p, err := made()
	if err != nil {
		return "", err
	}
	ctx := context.Background()
	if err := p.run(ctx, "go", "run", "./test/images", "-control-plane", "-o", "build/control-plane"); err != nil {
		return "", err
	}
	b, err := os.ReadFile(filepath.Join(p.root, "configs", "examples", "quickstart.yaml"))
	if err != nil {
		return "", err
	}
	doc := lab.MasterImage(string(b), "../../build/control-plane")
	base := filepath.Join(p.root, "build", "e2e", "master")
	if err := os.WriteFile(base+".yaml", []byte(doc), 0o644); err != nil {
		return "", err
	}
	start := time.Now()
	err = p.run(ctx, p.bin, "build", base+".yaml", "--output", base+".raw", "--force", "--lock", base+".lock")
	fmt.Printf("%6.1f s  edgebake build, with a control plane\n", time.Since(start).Seconds())
	return base + ".raw", err
})

// clusterManifest has an object in a namespace that comes behind it.
const clusterManifest = `apiVersion: v1
kind: ConfigMap
metadata: {name: prices, namespace: shop}
data: {tea: "2"}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
`

// A cluster from images alone: minted at a desk, its worker switched on before
// its control-plane node. Both become Ready, a pod runs, and the cluster's
// keys are where kubeadm keeps them and nowhere else.
func TestClusterFromImages(t *testing.T) {
	nightly(t)
	p := need(t)
	golden, err := madeMaster()
	if err != nil {
		t.Fatal(err)
	}
	w := newNet(t, p)
	if err := os.WriteFile(filepath.Join(w.lab.Dir, "shop.yaml"), []byte(clusterManifest), 0o600); err != nil {
		t.Fatal(err)
	}
	minted := w.mint(lab.Minted{Masters: w.machines(0, "m1"), Workers: w.machines(1, "shop1"), Manifests: []string{"shop.yaml"}})
	w.stamp(golden, minted, "m1")
	w.stamp(p.golden, minted, "shop1")
	worker := w.start(lab.VMConfig{Name: "shop1", Image: filepath.Join(w.lab.Dir, "shop1.raw"), Guest: 1})
	w.expect(worker, 0, lab.WaitsForMaster.String())
	master := w.start(lab.VMConfig{Name: "m1", Image: filepath.Join(w.lab.Dir, "m1.raw"), Guest: 0, CPUs: 2, Memory: 2560})
	w.expect(master, 0, `edgebake: etcd begins with nothing`)
	if w.c, err = w.lab.Attach(p.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), w.net.GuestAddr(0).String()+":6443"); err != nil {
		t.Fatal(err)
	}
	w.ready(master, nil)
	node, err := w.c.Node(t.Context(), "m1") // it was Ready before it was marked
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
	if err := w.c.Pod(t.Context(), "hello", helloImage, "shop1"); err != nil {
		t.Fatal(err)
	}
	w.podRuns(worker, "hello")

	// The power goes everywhere; the cluster comes back as it was.
	before := node
	worker.Cut()
	master.Cut()
	if err := master.On(); err != nil {
		t.Fatal(err)
	}
	if again := w.ready(master, before); again.Metadata.UID != before.Metadata.UID {
		t.Error("after the power cut it is another cluster")
	}

	const later = "/api/v1/namespaces/kube-public/configmaps"
	if err := w.c.Create(t.Context(), later, map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "later"}}); err != nil {
		t.Fatal(err)
	}
	w.off(master)
	disk := w.disk(master)
	w.keysOn(disk, minted, 1)
	w.keysOn(w.disk(worker), minted, 0)

	// Its data is given up for the snapshot that first boot took.
	snapshot, lost := w.snapshotOn(disk), filepath.Join(w.lab.Dir, "lost")
	w.must(p.bin, "cluster", "sites", minted, "--continue-from", "m1", "--restore", snapshot, "--output", lost)
	w.must(p.bin, "stamp", disk, filepath.Join(lost, "m1.yaml"))
	restored := w.start(lab.VMConfig{Name: "m1", Image: disk, Guest: 0, CPUs: 2, Memory: 2560})
	w.expect(restored, 0, `edgebake: etcd begins with a snapshot`)
	if again := w.ready(restored, before); again.Metadata.UID != before.Metadata.UID {
		t.Error("what was restored is another cluster")
	}
	if err := w.c.Get(t.Context(), later+"/later", new(lab.Object)); !lab.NotFound(err) {
		t.Errorf("what was written after the snapshot is there: %v", err)
	}
}

// machines are named so, with the guests' addresses in the test's network from the
// one that is number first.
func (w *world) machines(first int, names ...string) []lab.MintedMachine {
	var all []lab.MintedMachine
	for i, name := range names {
		address := w.net.GuestAddr(first + i).String()
		all = append(all, lab.MintedMachine{Name: name, Address: address,
			Cards: fmt.Sprintf(`{name: "en*", addresses: [%s/%d], gateway: %s}`, address, lab.GuestsCIDR, lab.Gateway)})
	}
	return all
}

// mint makes a cluster's keys and its machines' Sites.
func (w *world) mint(c lab.Minted) (dir string) {
	w.t.Helper()
	c.Kubernetes = lab.KubernetesVersion
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

// stamp makes the image of a machine of a minted cluster, anew if it has one.
func (w *world) stamp(golden, minted, name string) (image string) {
	w.t.Helper()
	image = filepath.Join(w.lab.Dir, name+".raw")
	w.must(w.bin, "stamp", golden, filepath.Join(minted, "sites", name+".yaml"), "--output", image, "--force")
	return image
}

// snapshotOn copies the last snapshot of etcd off a disk.
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

// keysOn scans a raw disk for the cluster's private keys: on a master each is there
// once, as kubeadm's file, on a worker not at all.
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
