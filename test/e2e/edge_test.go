package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

// Node pools of these tests: one of edge nodes and one of cloud nodes.
const (
	pool = "hangzhou"
	core = "core"
)

var pools = []lab.NodePool{{Name: pool, Type: "Edge"}, {Name: core, Type: "Cloud"}}

// Environment variables that name OpenYurt's real programs, if a developer has them. CI does not:
// it uses the stand-in in test/yurthub and the lab's own approver.
const (
	envYurthub     = "EDGEBAKE_YURTHUB"
	envYurtManager = "EDGEBAKE_YURT_MANAGER"
)

// madeEdge makes the quickstart image with yurthub.
var madeEdge = sync.OnceValues(func() (string, error) {
	p, err := made()
	if err != nil {
		return "", err
	}
	return p.bakeEdge("edge", lab.KubernetesVersion)
})

// bakeEdge bakes an image with yurthub 1.7, or its stand-in, as a unit.
func (p *parts) bakeEdge(name, kubernetes string) (golden string, err error) {
	hub := os.Getenv(envYurthub)
	if hub == "" {
		hub = filepath.Join(p.root, "build", "e2e", "yurthub")
		if err := p.run(context.Background(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", hub, "./test/yurthub"); err != nil {
			return "", err
		}
	}
	return p.bakeHub(name, kubernetes, fmt.Sprintf("  version: v1.7.0\n  binary: {file: %q}\n", hub), "yurthub "+hub)
}

// bakeHub bakes the quickstart image under another name, with this version of Kubernetes and this
// value of the field yurthub.
func (p *parts) bakeHub(name, kubernetes, yurthub, what string) (golden string, err error) {
	b, err := os.ReadFile(filepath.Join(p.root, "configs", "examples", "quickstart.yaml"))
	if err != nil {
		return "", err
	}
	doc := strings.NewReplacer("name: quickstart\n", "name: "+name+"\n", lab.KubernetesVersion, kubernetes).Replace(string(b)) + "yurthub:\n" + yurthub
	if kubeadm.Before(kubernetes, 31) {
		doc = strings.Replace(doc, "containerd:\n", "containerd:\n  crictl: {version: v1.36.0, source: {goModule: {}}}\n", 1)
	}
	// Write it to a directory as deep as the examples', because it keeps their relative paths.
	base := filepath.Join(p.root, "build", "e2e", name)
	if err := os.WriteFile(base+".yaml", []byte(doc), 0o644); err != nil {
		return "", err
	}
	start := time.Now()
	err = p.run(context.Background(), p.bin, "build", base+".yaml", "--output", base+".raw", "--force", "--lock", base+".lock")
	fmt.Printf("%6.1f s  edgebake build, with %s\n", time.Since(start).Seconds(), what)
	return base + ".raw", err
}

// edgeWorld is a world whose cluster has OpenYurt.
type edgeWorld struct {
	*world
	approver *lab.Approver // nil if a real yurt-manager runs
}

// newBareEdgeWorld returns a world with the edge image and a cluster without OpenYurt.
func newBareEdgeWorld(t *testing.T, masters int) *edgeWorld {
	t.Helper()
	w := &edgeWorld{world: newWorld(t, masters)}
	golden, err := madeEdge()
	if err != nil {
		t.Fatal(err)
	}
	parts := *w.parts
	parts.golden = golden
	w.parts = &parts
	return w
}

func newEdgeWorld(t *testing.T, masters int, v lab.Verdict) *edgeWorld {
	t.Helper()
	w := newBareEdgeWorld(t, masters)
	w.openYurt(v, lab.NodePools)
	return w
}

// openYurt adds the objects that yurthub needs to the cluster. version is the version of NodePools.
func (w *edgeWorld) openYurt(v lab.Verdict, version string) {
	w.t.Helper()
	for _, step := range []func(context.Context) error{
		w.c.GrantHub, w.c.LetLogsBeRead, w.c.GuardNodes,
		func(ctx context.Context) error { return w.c.AddNodePools(ctx, version, pools...) },
	} {
		if err := step(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
	}
	if program := os.Getenv(envYurtManager); program != "" {
		if _, err := w.c.StartYurtManager(w.t.Context(), program); err != nil {
			w.t.Fatal(err)
		}
	} else {
		w.approver = w.c.StartApprover(v)
	}
}

func (w *edgeWorld) bootEdge(name string) *lab.VM {
	w.t.Helper()
	return w.boot(0, lab.Site{NodeName: name, NodeType: "edge", NodePool: pool})
}

// greeter runs a pod that prints greetings on the console.
func (w *edgeWorld) greeter(vm *lab.VM) *lab.Object {
	w.t.Helper()
	if err := w.c.Greeter(w.t.Context(), "greeter", helloImage, vm.Node); err != nil {
		w.t.Fatal(err)
	}
	w.podRuns(vm, "greeter")
	return w.pod("greeter")
}

func (w *edgeWorld) pod(name string) *lab.Object {
	w.t.Helper()
	var pod lab.Object
	if err := w.c.Get(w.t.Context(), "/api/v1/namespaces/default/pods/"+name, &pod); err != nil {
		w.t.Fatal(err)
	}
	if len(pod.Status.ContainerStatuses) != 1 {
		w.t.Fatalf("pod %s has %d containers", name, len(pod.Status.ContainerStatuses))
	}
	return &pod
}

// firstPost checks that a machine's very first request to create its Node had both labels.
// OpenYurt's controllers would act on a Node with only one.
func (w *edgeWorld) firstPost(name, edgeWorker, pool string) {
	w.t.Helper()
	posts, err := w.c.NodePosts()
	if err != nil {
		w.t.Fatal(err)
	}
	i := slices.IndexFunc(posts, func(p lab.NodePost) bool { return p.Name == name && p.User == "system:node:"+name })
	if i < 0 {
		w.t.Fatalf("the node did not create its Node %s at an API server: %+v", name, posts)
	}
	w.t.Logf("first POST of Node %s: at %s, by %s (%s), answered with %d, labels %v",
		name, posts[i].At.Format(time.TimeOnly), posts[i].User, posts[i].Client, posts[i].Code, posts[i].Labels)
	for label, want := range map[string]string{lab.LabelEdgeWorker: edgeWorker, lab.LabelNodePool: pool} {
		if got := posts[i].Labels[label]; got != want {
			w.t.Errorf("the first POST of Node %s has %s=%q, want %q", name, label, got, want)
		}
	}
}

// behindHub prints facts that show whether kubelet uses yurthub. Each line begins with the name of
// the fact.
const behindHub = `
echo "flags: $(cat /var/lib/kubelet/kubeadm-flags.env)"
echo "server: $(grep server: /var/lib/openyurt/kubelet.conf)"
ss -Htnp state established '( dport = :10261 )' | sed 's/^/to-hub: /'
ss -Htnp state established '( dport = :6443 )' | sed 's/^/to-master: /'
exec 3<>/dev/tcp/127.0.0.1/10267
printf 'GET /v1/readyz HTTP/1.0\r\n\r\n' >&3
echo "readyz: $(head -1 <&3)"
exec 4<>/dev/tcp/$NODE/10269 && echo "port: open on the node itself"
echo "boot: $(systemctl is-enabled yurthub.service) $(systemctl is-active yurthub.service)"
`

// throughHub checks on the node that kubelet uses yurthub, and from outside that other hosts cannot
// reach yurthub's port.
func (w *edgeWorld) throughHub(vm *lab.VM) {
	w.t.Helper()
	addr := w.net.GuestAddr(0).String()
	out := w.mustOnNode(vm, "NODE="+addr+"\n"+behindHub)
	w.t.Logf("on %s:\n%s", vm.Node, out)
	for _, want := range []string{
		`(?m)^flags: .*--kubeconfig=/var/lib/openyurt/kubelet.conf`,
		`(?m)^server: .*http://127\.0\.0\.1:10261$`,
		`(?m)^to-hub: .*"kubelet"`,
		`(?m)^readyz: HTTP/1\.\d 200`,
		`(?m)^port: open`,
		`(?m)^boot: enabled active$`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			w.t.Errorf("the node's output lacks %s", want)
		}
	}
	if regexp.MustCompile(`(?m)^to-master: .*"kubelet"`).MatchString(out) {
		w.t.Error("kubelet is connected to a master directly, not through yurthub")
	}
	// Port 10250 proves that the network works. The other ports would give the node's rights to
	// anyone who reaches them.
	dial := func(port string) error {
		ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Second)
		defer cancel()
		conn, err := w.net.Dial(ctx, "tcp", net.JoinHostPort(addr, port))
		if err == nil {
			conn.Close()
		}
		return err
	}
	if err := dial("10250"); err != nil {
		w.t.Errorf("kubelet's port is not reached from outside the node: %v", err)
	}
	for _, port := range []string{"10261", "10267", "10268", "10269"} {
		if err := dial(port); err == nil {
			w.t.Errorf("port %s of yurthub is open to other machines", port)
		}
	}
}

// TestEdgeNodeLivesWithoutTheLink checks an edge node that joins although the first of three
// masters is dead, and becomes Ready through yurthub once its request is approved. Without the
// link, its pod must run again after a power cut. With the link back, the node must be Ready again.
func TestEdgeNodeLivesWithoutTheLink(t *testing.T) {
	pace.Takes(t, 350*time.Second)
	w := newEdgeWorld(t, 3, lab.Hold)
	w.c.APIServers[0].Kill()
	vm := w.bootEdge("edge1")
	w.deniedFirst(vm)
	node := w.ready(vm, nil)
	w.firstPost("edge1", "true", pool)
	if w.approver != nil {
		judged := w.approver.Judged()
		if len(judged) == 0 || slices.ContainsFunc(judged, func(j lab.Judged) bool { return j.CommonName != "system:node:edge1" }) {
			t.Errorf("requests approved: %+v", judged)
		}
	}
	w.throughHub(vm)
	pod := w.greeter(vm)

	w.offlineReboot(vm, node, pod, 0)

	w.off(vm)
	disk := w.disk(vm)
	w.noSecret(vm, disk)
	w.hubCached(disk)
}

// deniedFirst ignores yurthub's request until first boot reports it, denies it until first boot
// reports that, and approves the next one. A real yurt-manager approves at once.
func (w *edgeWorld) deniedFirst(vm *lab.VM) {
	w.t.Helper()
	if w.approver == nil {
		return
	}
	const request = `yurthub's request for its server certificate \(CSR \S+, signer kubernetes.io/kubelet-serving\) `
	w.expect(vm, 0, request+"is not approved yet .*kubectl certificate approve csr-")
	w.approver.Set(lab.Deny)
	w.expect(vm, 0, request+"was denied")
	w.approver.Set(lab.Approve)
}

// offlineReboot unplugs the cable, waits for the duration cut, presses the machine's reset button,
// waits until the pod runs, and plugs the cable in again.
func (w *edgeWorld) offlineReboot(vm *lab.VM, node, pod *lab.Object, cut time.Duration) {
	w.t.Helper()
	link := func(up bool) {
		if err := vm.SetLink(w.t.Context(), up); err != nil {
			w.t.Fatal(err)
		}
		w.t.Logf("%6.1f s from power-on: cable in: %v", vm.Serial.Note("").At.Seconds(), up)
	}
	link(false)
	// Wait until a real yurthub has written its cache to the disk, at most half a minute. The test
	// does not cover the loss of the last seconds.
	mark := w.expect(vm, vm.Serial.Mark(), "hello from "+vm.Node+", up ([4-9][0-9]|[1-9][0-9]{2,}) s")
	if cut > 0 {
		w.waitNotReady(vm)
		for end := time.Now().Add(cut); time.Now().Before(end); {
			_, mark = w.hear(vm, mark, "hello from "+vm.Node)
		}
	}
	mark = vm.Serial.Mark()
	if err := vm.Reset(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	mark = w.expect(vm, mark, "BdsDxe: starting Boot")
	mark = w.expect(vm, mark, "hello from "+vm.Node)
	w.expect(vm, mark, "hello from "+vm.Node)
	link(true)
	after := w.readyAfter(vm, node)
	if after.Metadata.UID != node.Metadata.UID {
		w.t.Error("after the reboot the Node has another UID: the machine joined again")
	}
	w.podRuns(vm, "greeter")
	again := w.pod("greeter")
	if again.Metadata.UID != pod.Metadata.UID {
		w.t.Error("after the reboot the pod has another UID")
	}
	if n := again.Status.ContainerStatuses[0].RestartCount - pod.Status.ContainerStatuses[0].RestartCount; n < 1 {
		w.t.Error("the pod's restart was not reported to the cluster")
	}
}

func (w *edgeWorld) waitNotReady(vm *lab.VM) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), bootLimit)
	defer cancel()
	if _, err := w.c.WaitNode(ctx, vm, vm.Node, func(o *lab.Object) (bool, string) {
		ready, why := lab.Ready(o)
		return !ready, "it is still Ready: " + why
	}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("%6.1f s from power-on: the cluster treats the node as lost", vm.Serial.Note("").At.Seconds())
}

// hubCached checks on the disk of a stopped machine that yurthub has cached kubelet's responses,
// which the node needs without the link.
func (w *edgeWorld) hubCached(disk string) {
	w.t.Helper()
	info, err := media.Inspect(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	i := slices.IndexFunc(info.Partitions, func(p media.Partition) bool { return p.Label == ondisk.LabelData })
	if i < 0 {
		w.t.Fatalf("the disk has no partition %s", ondisk.LabelData)
	}
	f, err := os.Open(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	data, err := ext4.Open(io.NewSectionReader(f, info.Partitions[i].Start, info.Partitions[i].Size))
	if err != nil {
		w.t.Fatal(err)
	}
	const cache = "lib/edgebake/persist/kubernetes/cache/kubelet"
	kept, err := data.ReadDir(cache)
	if err != nil || len(kept) == 0 {
		w.t.Errorf("yurthub cached nothing for kubelet: %v, %v", kept, err)
	}
	w.t.Logf("cached for kubelet: %v", kept)
}

// TestEdgeNodeCutForTenMinutes disconnects the link for ten minutes, then reboots.
func TestEdgeNodeCutForTenMinutes(t *testing.T) {
	nightly(t)
	w := newEdgeWorld(t, 3, lab.Approve)
	vm := w.bootEdge("edge1")
	node := w.ready(vm, nil)
	w.offlineReboot(vm, node, w.greeter(vm), 10*time.Minute)
}

// TestClusterNotPrepared checks that first boot reports the objects that yurthub needs until they
// exist.
func TestClusterNotPrepared(t *testing.T) {
	nightly(t)
	w := newBareEdgeWorld(t, 1)
	w.approver = w.c.StartApprover(lab.Approve)
	vm := w.bootEdge("edge1")
	w.expect(vm, 0, "nodes may not list ConfigMaps in kube-system.*nodes may not list NodePools")
	if err := w.c.GrantHub(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.expect(vm, 0, "the cluster has no NodePool CRD")
	if err := w.c.AddNodePools(t.Context(), lab.NodePools, pools...); err != nil {
		t.Fatal(err)
	}
	w.ready(vm, nil)
}

const (
	convert = "firstboot convert --nodepool-name " + pool
	// killAt runs convert, kills it when it reports the end of a step, and runs it again.
	killAt = `rm -f /run/convert.log
` + convert + ` >/run/convert.log 2>&1 & pid=$!
until grep -q '^%s ' /run/convert.log; do kill -0 $pid 2>/dev/null || { cat /run/convert.log; exit 1; }; done
kill -9 $pid
cat /run/convert.log
echo killed
` + convert + "\n"
	revert = `firstboot revert
echo flags: $(cat /var/lib/kubelet/kubeadm-flags.env)
systemctl is-active yurthub.service || true
ls /etc/kubernetes
`
	// forget makes the node look as if kubeadm had joined it without edgebake: kubelet connects
	// directly to the master.
	forget = `set -e
systemctl stop firstboot.service ipvscare.service
ipvscare clean
mkdir /root/off
for f in /var/lib/edgebake/*; do [ $f = /var/lib/edgebake/persist ] || mv $f /root/off/; done
dd if=/dev/zero of=/dev/disk/by-partlabel/EDGEBAKE bs=512 count=1 conv=fsync status=none
mv /usr/share/edgebake /root/off/share
mv /etc/edgebake /root/off/etc
mv /usr/lib/systemd/system/yurthub.service /root/off/
rm -f /etc/systemd/system/multi-user.target.wants/yurthub.service
sed -i '/^# BEGIN/,/^# END/d' /etc/hosts
sed -i 's|server: .*|server: https://%s|; /tls-server-name/d' /etc/kubernetes/kubelet.conf
rmmod dummy || true
systemctl daemon-reload
systemctl restart kubelet.service
`
)

// TestConvertAndRevert converts a native node to an edge node, back, and again, while its pod keeps
// running. After a kill, the next run of convert must continue. Finally the test converts a node
// that looks as if edgebake had not built it.
func TestConvertAndRevert(t *testing.T) {
	pace.Takes(t, 200*time.Second)
	w := newEdgeWorld(t, 1, lab.Approve)
	vm := w.boot(0, lab.Site{NodeName: "edge1"})
	w.ready(vm, nil)
	pod := w.greeter(vm)

	check := func(edge bool) {
		t.Helper()
		node, err := w.c.Node(t.Context(), "edge1")
		if err != nil {
			t.Fatal(err)
		}
		if got := node.Metadata.Labels[lab.LabelNodePool]; (got == pool) != edge {
			t.Errorf("node pool label is %q, edge node: %v", got, edge)
		}
		if ok, why := lab.Ready(node); !ok {
			t.Errorf("not Ready: %s", why)
		}
		if edge {
			w.throughHub(vm)
		}
		if now := w.pod("greeter"); now.Metadata.UID != pod.Metadata.UID || now.Status.ContainerStatuses[0].RestartCount != pod.Status.ContainerStatuses[0].RestartCount {
			t.Error("the pod did not keep running")
		}
	}
	thereAndBack := func(script string) {
		t.Helper()
		start := time.Now()
		t.Logf("convert:\n%s", w.mustOnNode(vm, script))
		t.Logf("converted in %.1f s", time.Since(start).Seconds())
		check(true)
		start = time.Now()
		out := w.mustOnNode(vm, revert)
		t.Logf("revert:\n%s", out)
		t.Logf("reverted in %.1f s", time.Since(start).Seconds())
		if regexp.MustCompile(`(?m)^flags: .*openyurt|^active$|^cache$`).MatchString(out) {
			t.Error("revert left kubelet's flags, the running unit or the cache of yurthub")
		}
		check(false)
	}
	// Kill convert after it has redirected kubelet to yurthub, because then most must be undone.
	// Nightly runs also kill it after other steps.
	steps := []string{"kubelet-redirect"}
	if os.Getenv("EDGEBAKE_NIGHTLY") != "" {
		thereAndBack(convert)
		steps = append(steps, "yurthub", "unit", "node-ready")
	}
	for _, step := range steps {
		t.Logf("killed after %s", step)
		thereAndBack(fmt.Sprintf(killAt, step))
	}
	if out, err := w.onNode(vm, "firstboot revert"); err != nil || !strings.Contains(out, "already") {
		t.Errorf("reverting a native node: %v\n%s", err, out)
	}
	t.Logf("made to look like a node that edgebake did not build:\n%s", w.mustOnNode(vm, fmt.Sprintf(forget, w.c.Masters[0])))
	thereAndBack(convert)
}

// resetAndRename runs firstboot reset and writes another Site to the slot, as a person would with a
// laptop. The Site is compressed, because the test searches the disk for the token, and the disk
// keeps this script.
const resetAndRename = `cat >/run/again.sh <<'END'
set -e
firstboot reset --yes
mkdir -p /run/slot
mount -t vfat /dev/disk/by-partlabel/EDGEBAKE /run/slot
base64 -d <<'SITE' | gunzip >/run/slot/site.yaml
%s
SITE
umount /run/slot
sync
END
systemd-run --unit again --collect -p StandardOutput=tty -p StandardError=tty -p TTYPath=/dev/ttyS0 /bin/bash -c '/bin/bash /run/again.sh && systemctl reboot'
`

// TestResetAndJoinAgain runs firstboot reset on a node, which then joins again with another Site,
// under another name and type. A Node of that name already exists, so kubelet does not set its
// labels. First boot must report that and set them itself, because only the node may.
func TestResetAndJoinAgain(t *testing.T) {
	pace.Takes(t, 260*time.Second)
	w := newEdgeWorld(t, 3, lab.Approve)
	w.c.APIServers[0].Kill()
	vm := w.bootEdge("edge1")
	w.ready(vm, nil)
	site := lab.Site{Cluster: w.c, NodeName: "cloud1", NodeType: "cloud", NodePool: core,
		Address: fmt.Sprintf("%s/%d", w.net.GuestAddr(0), lab.GuestsCIDR), Gateway: lab.Gateway}
	text, err := site.YAML()
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := io.WriteString(z, text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	// Do not wait, because firstboot reset stops the kubelet that would report the end.
	if err := w.c.SetOff(t.Context(), vm, "reset", helloImage, fmt.Sprintf(resetAndRename, base64.StdEncoding.EncodeToString(packed.Bytes()))); err != nil {
		t.Fatal(err)
	}
	mark := w.expect(vm, 0, "kubectl delete node edge1")
	if err := w.c.Delete(t.Context(), "/api/v1/nodes/edge1"); err != nil {
		t.Fatal(err)
	}
	if err := w.c.Create(t.Context(), "/api/v1/nodes", map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "cloud1"},
	}); err != nil {
		t.Fatal(err)
	}
	w.expect(vm, mark, "kubectl (label|delete) node cloud1")
	if err := w.c.Patch(t.Context(), "/api/v1/nodes/cloud1", map[string]any{"metadata": map[string]any{"labels": map[string]string{lab.LabelEdgeWorker: "false"}}}); err == nil {
		t.Error("an administrator could label the Node, which OpenYurt's webhook would reject")
	}
	w.expect(vm, mark, "set labels of the Site that the Node cloud1 lacked: .*"+regexp.QuoteMeta(lab.LabelNodePool+"="+core))
	w.expect(vm, mark, "edgebake: node cloud1 is Ready")
	vm.Node = "cloud1" // the machine's current Node
	w.ready(vm, nil)
	w.firstPost("cloud1", "false", core)
	w.throughHub(vm)
	if _, err := w.c.Node(t.Context(), "edge1"); !lab.NotFound(err) {
		t.Errorf("the Node edge1 exists again: %v", err)
	}
	w.off(vm)
	w.noSecret(vm, w.disk(vm))
}
