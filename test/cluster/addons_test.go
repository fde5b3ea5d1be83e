package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/test/lab"
)

// TestAddons checks kubeadm's add-on phases with the documents of a minted control-plane node.
// kube-proxy must not change ipvscare's virtual server, and CoreDNS must be the image's version,
// even if it is newer than kubeadm's.
func TestAddons(t *testing.T) {
	p, lc := needPrograms(t), needCluster(t)
	ctx := t.Context()
	master := strings.TrimSuffix(lc.Masters[0], ":6443")
	if !strings.HasSuffix(lc.Masters[0], ":6443") {
		master = lc.Masters[0][:strings.LastIndexByte(lc.Masters[0], ':')]
	}
	text := strings.Replace(document, "192.0.2.11", master, 1)
	text = strings.Replace(text, "nodes:", "kubeProxy: {mode: ipvs, bindAddress: 0.0.0.0}\nnodes:", 1)
	dir, now := filepath.Join(t.TempDir(), "shops"), time.Now()
	parsed, err := clusterdoc.Parse("cluster.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mint.New(dir, parsed, mint.Options{Now: now}); err != nil {
		t.Fatal(err)
	}
	sites, err := mint.ControlPlaneSites(dir, sealed.Identity{}, now)
	if err != nil {
		t.Fatal(err)
	}
	docs, err := sites[0].Site.ControlPlane.Documents().EncodeFor(kubeadm.Local{EtcdTag: lab.EtcdImageTag, DNSTag: "v1.99.9"})
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "kubeadm.yaml")
	if err := os.WriteFile(config, docs, 0o600); err != nil {
		t.Fatal(err)
	}
	const (
		system = "/api/v1/namespaces/kube-system"
		apps   = "/apis/apps/v1/namespaces/kube-system"
		rbac   = "/apis/rbac.authorization.k8s.io/v1"
	)
	t.Cleanup(func() {
		for _, path := range []string{apps + "/daemonsets/kube-proxy", apps + "/deployments/coredns", system + "/configmaps/kube-proxy", system + "/configmaps/coredns",
			system + "/services/kube-dns", system + "/serviceaccounts/kube-proxy", system + "/serviceaccounts/coredns",
			rbac + "/clusterrolebindings/kubeadm:node-proxier", rbac + "/clusterroles/system:coredns", rbac + "/clusterrolebindings/system:coredns",
			rbac + "/namespaces/kube-system/roles/kube-proxy", rbac + "/namespaces/kube-system/rolebindings/kube-proxy"} {
			if err := lc.Delete(context.Background(), path); err != nil && !lab.NotFound(err) {
				t.Error(err)
			}
		}
	})
	addon := func(name string) (string, error) {
		out, err := exec.CommandContext(ctx, p.Kubeadm, "init", "phase", "addon", name, "--config", config, "--kubeconfig", lc.Kubeconfig).CombinedOutput()
		return string(out), err
	}
	for _, name := range []string{"kube-proxy", "kube-proxy", "coredns"} { // twice, as after a power cut
		if out, err := addon(name); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	// kubeadm does not replace a CoreDNS that it does not know. So first boot runs this phase once.
	if out, err := addon("coredns"); err == nil || !strings.Contains(out, "not supported") {
		t.Errorf("kubeadm upgrades a CoreDNS that it does not know: %v\n%s", err, out)
	}

	var proxy struct{ Data map[string]string }
	if err := lc.Get(ctx, system+"/configmaps/kube-proxy", &proxy); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mode: ipvs", "- 10.103.97.2/32", "bindAddress: 0.0.0.0", "clusterCIDR: 10.244.0.0/16"} {
		if !strings.Contains(proxy.Data["config.conf"], want) {
			t.Errorf("kube-proxy's configuration lacks %q:\n%s", want, proxy.Data["config.conf"])
		}
	}
	if want := "server: https://" + sites[0].Site.EndpointHostPort(); !strings.Contains(proxy.Data["kubeconfig.conf"], want) {
		t.Errorf("kube-proxy does not use the endpoint (%s):\n%s", want, proxy.Data["kubeconfig.conf"])
	}
	needed := map[string]string{}
	for _, n := range sites[0].Site.ControlPlane.Documents().Images(p.Version) {
		needed[n.Name] = n.Tag
	}
	for path, tag := range map[string]string{apps + "/daemonsets/kube-proxy": p.Version, apps + "/deployments/coredns": "v1.99.9"} {
		var w struct {
			Spec struct {
				Template struct {
					Spec struct{ Containers []struct{ Image string } }
				}
			}
		}
		if err := lc.Get(ctx, path, &w); err != nil {
			t.Fatal(err)
		}
		image := fmt.Sprint(w.Spec.Template.Spec.Containers[0].Image)
		name, got, _ := strings.Cut(image, ":")
		if _, asked := needed[name]; !asked || got != tag {
			t.Errorf("%s runs %s, want tag %s of an image that stamping requires: %v", path, image, tag, needed)
		}
	}
}
