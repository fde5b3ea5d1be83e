package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

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
	doc := strings.Replace(string(b), "name: quickstart\n", "name: master\nnodeTypes: [native, control-plane]\n", 1)
	for _, ref := range []string{"kube-apiserver:" + lab.KubernetesVersion, "kube-controller-manager:" + lab.KubernetesVersion,
		"kube-scheduler:" + lab.KubernetesVersion, "etcd:" + lab.EtcdImageTag} {
		doc += "  - {ref: \"registry.k8s.io/" + ref + "\", layout: ../../build/control-plane}\n"
	}
	base := filepath.Join(p.root, "build", "e2e", "master")
	if err := os.WriteFile(base+".yaml", []byte(doc), 0o644); err != nil {
		return "", err
	}
	start := time.Now()
	err = p.run(ctx, p.bin, "build", base+".yaml", "--output", base+".raw", "--force", "--lock", base+".lock")
	fmt.Printf("%6.1f s  edgebake build, with a control plane\n", time.Since(start).Seconds())
	return base + ".raw", err
})

// The cluster of this test: etcd, leases and probes wait longer than on real
// machines, since an emulated one may stand still for seconds; the API server
// does without what reads all its own documentation again and again. Nothing balances
// Services: kube-proxy's image needs programs that are not Go's.
const clusterDocument = `apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: shops
kubernetesVersion: %s
openyurt: false
kubeProxy: {mode: none}
masters:
  - {name: m1, address: %s, network: {interfaces: [{name: "en*", addresses: [%s/24], gateway: %s}]}}
nodes:
  - {name: shop1, network: {interfaces: [{name: "en*", addresses: [%s/24], gateway: %s}]}}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
dns: {disabled: true}
apiServer: {extraArgs: [{name: disable-admission-plugins, value: "MutatingAdmissionPolicy,ValidatingAdmissionPolicy"}]}
etcd: {local: {extraArgs: [{name: heartbeat-interval, value: "500"}, {name: election-timeout, value: "5000"}]}}
controllerManager: {extraArgs: [{name: leader-elect-lease-duration, value: 60s}, {name: leader-elect-renew-deadline, value: 40s}, {name: leader-elect-retry-period, value: 10s}]}
scheduler: {extraArgs: [{name: leader-elect-lease-duration, value: 60s}, {name: leader-elect-renew-deadline, value: 40s}, {name: leader-elect-retry-period, value: 10s}]}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
timeouts: {controlPlaneComponentHealthCheck: 30m}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
featureGates: {KubeletCrashLoopBackOffMax: true}
crashLoopBackOff: {maxContainerRestartPeriod: 10s}
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
	m1, shop1 := w.net.GuestAddr(0).String(), w.net.GuestAddr(1).String()
	document := filepath.Join(w.lab.Dir, "cluster.yaml")
	if err := os.WriteFile(document, fmt.Appendf(nil, clusterDocument, lab.KubernetesVersion, m1, m1, lab.Gateway, shop1, lab.Gateway), 0o600); err != nil {
		t.Fatal(err)
	}
	minted := filepath.Join(w.lab.Dir, "shops")
	for _, argv := range [][]string{
		{p.bin, "cluster", "new", document, "--output", minted},
		{p.bin, "cluster", "sites", minted},
		{p.bin, "stamp", golden, filepath.Join(minted, "sites", "m1.yaml"), "--output", filepath.Join(w.lab.Dir, "m1.raw")},
		{p.bin, "stamp", p.golden, filepath.Join(minted, "sites", "shop1.yaml"), "--output", filepath.Join(w.lab.Dir, "shop1.raw")},
	} {
		if err := p.run(t.Context(), argv...); err != nil {
			t.Fatal(err)
		}
	}
	worker := w.start(lab.VMConfig{Name: "shop1", Image: filepath.Join(w.lab.Dir, "shop1.raw"), Guest: 1})
	w.expect(worker, 0, `edgebake: .* waiting for a master to answer`)
	master := w.start(lab.VMConfig{Name: "m1", Image: filepath.Join(w.lab.Dir, "m1.raw"), Guest: 0, CPUs: 2, Memory: 2560})
	w.expect(master, 0, `edgebake: etcd begins with nothing`)
	if w.c, err = w.lab.Attach(p.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), m1+":6443"); err != nil {
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

	w.off(master)
	disk := w.disk(master)
	w.keysInOnePlace(disk, minted)
}

// keysInOnePlace scans a master's raw disk for the cluster's private keys: each
// is there once, as kubeadm's file.
func (w *world) keysInOnePlace(disk, minted string) {
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
		if len(hits) != 1 {
			w.t.Errorf("%s is on the master's disk %d times, at %d", name, len(hits), hits)
		}
	}
}
