package cluster

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/cluster"
)

// TestPrintedStep runs the commands that verify prints for a control-plane node not built by
// edgebake. They must work with only a shell and kubeadm, and keep the existing settings.
func TestPrintedStep(t *testing.T) {
	p, lc := needPrograms(t), needCluster(t)
	c, ctx := open(t, lc, ""), t.Context()
	const endpoint, vip = "other.example.com", "10.103.97.9"
	found, err := c.Verify(ctx, cluster.PrepareOptions{VIP: vip}, endpoint)
	if err != nil {
		t.Fatal(err)
	}
	step := ""
	for _, f := range found {
		if strings.HasPrefix(f.Name, "the API server's certificate") {
			step = f.Fix
		}
	}
	edit, rest, ok := strings.Cut(step, ". Then, on each control-plane node, one after the other: ")
	if want := "kubectl -n kube-system edit configmap kubeadm-config: add " + endpoint + " and " + vip + " to the list apiServer.certSANs"; !ok || edit != want {
		t.Fatalf("got %q, want %q", edit, want)
	}
	commands, _, ok := strings.Cut(rest, ". To undo it")
	if !ok {
		t.Fatalf("the step has another form: %s", rest)
	}

	// The files of a simulated control-plane node, which the commands change.
	kubernetes, home := filepath.Join(t.TempDir(), "kubernetes"), t.TempDir()
	for name, text := range map[string]string{"pki/": "", "manifests/kube-apiserver.yaml": "spec:\n  containers:\n  - command:\n    - kube-apiserver\n    - --advertise-address=192.0.2.11\n"} {
		if err := os.MkdirAll(filepath.Join(kubernetes, filepath.Dir(name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if text != "" {
			if err := os.WriteFile(filepath.Join(kubernetes, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	config := func(sans string) string {
		return "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: " + p.Version + "\ncertificatesDir: " + kubernetes + "/pki\napiServer: {certSANs: [" + sans + "]}\n"
	}
	file := filepath.Join(t.TempDir(), "before.yaml")
	// With an address, kubeadm does not look for a default route, which this machine lacks.
	own := "---\napiVersion: kubeadm.k8s.io/v1beta4\nkind: InitConfiguration\nlocalAPIEndpoint: {advertiseAddress: 192.0.2.11}\n"
	if err := os.WriteFile(file, []byte(config("")+own), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, phase := range []string{"ca", "apiserver"} {
		run(t, p.Kubeadm, "init", "phase", "certs", phase, "--config", file)
	}
	const path = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	var was struct{ Data map[string]string }
	if err := lc.Get(ctx, path, &was); err != nil {
		t.Fatal(err)
	}
	set := func(ctx context.Context, text string) {
		t.Helper()
		if err := lc.Patch(ctx, path, map[string]any{"data": map[string]string{"ClusterConfiguration": text}}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { set(context.Background(), was.Data["ClusterConfiguration"]) })
	set(ctx, config(endpoint+", "+vip))

	before, err := os.ReadFile(kubernetes + "/pki/apiserver.crt")
	if err != nil {
		t.Fatal(err)
	}
	script := strings.NewReplacer("/etc/kubernetes/admin.conf", lc.Kubeconfig, "/etc/kubernetes", kubernetes, "/root", home,
		"kubectl --", p.Kubectl+" --", "kubeadm init", p.Kubeadm+" init").Replace(commands)
	if out, err := exec.CommandContext(ctx, "sh", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("%s\n%v\n%s", script, err, out)
	}
	kept, err := os.ReadFile(home + "/before-edgebake/apiserver.crt")
	if err != nil || string(kept) != string(before) {
		t.Errorf("the old files were not kept: %v", err)
	}
	now, err := os.ReadFile(kubernetes + "/pki/apiserver.crt")
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(now)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{endpoint, vip, "192.0.2.11", "kubernetes"} {
		if err := cert.VerifyHostname(name); err != nil {
			t.Error(err)
		}
	}
}
