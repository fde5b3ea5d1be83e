package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"testing"

	"github.com/edgebake/edgebake/test/lab"
)

// An OCI layout with a real yurthub before 1.7, if a developer has one, and the name of its image.
const (
	envHubLayout = "EDGEBAKE_YURTHUB_LAYOUT"
	hubImage     = "edgebake.test/yurthub:v1.6.1"
)

// madePod makes the quickstart image with yurthub as a container image, and with the newest
// Kubernetes that this yurthub supports, which is also the cluster's version.
var madePod = sync.OnceValues(func() (*parts, error) {
	first, err := made()
	if err != nil {
		return nil, err
	}
	p := *first
	if p.progs, err = lab.CachedPrograms(context.Background(), lab.KubernetesBeforeHub17, os.Stdout); err != nil {
		return nil, err
	}
	layout := cmp.Or(os.Getenv(envHubLayout), filepath.Join(p.root, "build", "images"))
	p.golden, err = p.bakeHub("pod", lab.KubernetesBeforeHub17, fmt.Sprintf("  version: v1.6.1\n  image: {ref: %q, layout: %q}\n", hubImage, layout), "yurthub's image of "+layout)
	return &p, err
})

// TestStaticPodNode checks a node with yurthub before 1.7 as a static pod. yurthub must get its
// identity with the token, and kubelet must use it from its first start. Without the link, the
// node's pod must run again after a reboot.
func TestStaticPodNode(t *testing.T) {
	nightly(t)
	need(t)
	parts, err := madePod()
	if err != nil {
		t.Fatal(err)
	}
	w := &edgeWorld{world: newWorldOf(t, parts, 3)}
	w.openYurt(lab.Hold, lab.NodePoolsBefore17)
	w.c.APIServers[0].Kill()
	vm := w.bootEdge("edge1")
	if w.approver != nil {
		// There is no Node yet that could report the problem.
		w.expect(vm, 0, `yurthub's request for its client certificate \(CSR \S+, signer kubernetes.io/kube-apiserver-client\) is not approved yet`)
		w.approver.Set(lab.Approve)
	}
	node := w.ready(vm, nil)
	w.firstPost("edge1", "true", pool)
	w.postedAs("edge1", "system:node:edge1")
	if w.approver != nil {
		var signers []string
		for _, j := range w.approver.Judged() {
			signers = append(signers, j.Signer)
		}
		slices.Sort(signers)
		if !slices.Equal(slices.Compact(signers), []string{"kubernetes.io/kube-apiserver-client", "kubernetes.io/kubelet-serving"}) {
			t.Errorf("requests approved: %v", signers)
		}
	}
	out := w.mustOnNode(vm, `
echo "flags: $(cat /var/lib/kubelet/kubeadm-flags.env)"
echo "kubelet.conf: $(grep server: /etc/kubernetes/kubelet.conf)"
echo "yurthub.conf: $(grep server: /var/lib/yurthub/yurthub.conf)"
echo "starts of kubelet: $(journalctl -b -o cat -u kubelet | grep -c '^Started kubelet')"
ss -Htnp state established '( dport = :10261 )' | sed 's/^/to-hub: /'
ss -Htnp state established '( dport = :6443 )' | sed 's/^/to-master: /'
ls /run/edgebake/yurthub /var/lib/kubelet/pki | sed 's/^/left: /'
`)
	t.Logf("on %s:\n%s", vm.Node, out)
	for _, want := range []string{
		`(?m)^flags: .*--bootstrap-kubeconfig= .*--kubeconfig=/var/lib/openyurt/kubelet.conf.* --rotate-certificates=false`,
		`(?m)^kubelet.conf: .*http://127\.0\.0\.1:10261$`,
		`(?m)^yurthub.conf: .*https://`,
		`(?m)^to-hub: .*"kubelet"`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("the node's output lacks %s", want)
		}
	}
	for _, bad := range []string{`(?m)^to-master: .*"kubelet"`, `(?m)^left: .*(bootstrap|kubelet-client)`} {
		if regexp.MustCompile(bad).MatchString(out) {
			t.Errorf("the node's output has %s", bad)
		}
	}
	pod := w.greeter(vm)
	w.offlineReboot(vm, node, pod, 0)
	w.off(vm)
	disk := w.disk(vm)
	w.noSecret(vm, disk)
	w.hubCached(disk)
}

// postedAs checks that this user created the Node.
func (w *edgeWorld) postedAs(name, user string) {
	w.t.Helper()
	posts, err := w.c.NodePosts()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range posts {
		if p.Name == name && p.User != user {
			w.t.Errorf("Node %s was posted by %s, not %s", name, p.User, user)
		}
	}
}
