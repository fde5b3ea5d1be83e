// Package cluster tests edgebake's work on clusters. The real kubeadm, etcd and API server run as
// processes of this host.
package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

// programs returns the control plane's programs, which are compiled once and cached.
var programs = sync.OnceValues(func() (*lab.Programs, error) {
	return lab.CachedPrograms(context.Background(), lab.KubernetesVersion, os.Stdout)
})

// etcdProgram returns etcd, which is compiled once and cached.
var etcdProgram = sync.OnceValues(func() (string, error) {
	return lab.CachedEtcd(context.Background(), os.Stdout)
})

func needEtcd(t *testing.T) string {
	t.Helper()
	p, err := etcdProgram()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// needEtcdutl returns the path of etcdutl, etcd's snapshot tool.
func needEtcdutl(t *testing.T) string {
	t.Helper()
	cache, err := lab.OpenCache()
	if err != nil {
		t.Fatal(err)
	}
	recipe := lab.EtcdutlRecipe(lab.EtcdVersion, runtime.GOARCH)
	blobs, err := fetch.GoBuild(t.Context(), cache, recipe, os.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	program, err := cache.Program(blobs[recipe.Module], "etcdutl")
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// paced contains the names of the tests that have already called pace.Takes.
var paced sync.Map

func needPrograms(t *testing.T) *lab.Programs {
	t.Helper()
	if _, asked := paced.LoadOrStore(t.Name(), true); !asked {
		pace.Takes(t, 20*time.Second)
	}
	p, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

const document = `apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: shops
kubernetesVersion: ` + lab.KubernetesVersion + `
masters: [{name: m1, address: 192.0.2.11}, {name: m2, address: 192.0.2.12}, {name: m3, address: 192.0.2.13}]
nodes: [{name: a}]
`

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// TestKubeadmTakesMintedKeys checks that the real kubeadm uses the minted keys: its phase creates
// the missing certificates, which openssl verifies, and changes no minted file.
func TestKubeadmTakesMintedKeys(t *testing.T) {
	p := needPrograms(t)
	openssl := desk.NeedProgram(t, "openssl", "openssl")
	dir := filepath.Join(t.TempDir(), "shops")
	parsed, err := clusterdoc.Parse("cluster.yaml", []byte(document))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mint.New(dir, parsed, mint.Options{Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	pki := filepath.Join(dir, "pki")
	minted := map[string][]byte{}
	for _, name := range []string{"ca.crt", "ca.key", "etcd/ca.crt", "etcd/ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "sa.pub"} {
		b, err := os.ReadFile(filepath.Join(pki, name))
		if err != nil {
			t.Fatal(err)
		}
		minted[name] = b
	}
	config := filepath.Join(t.TempDir(), "kubeadm.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {advertiseAddress: 192.0.2.11}
nodeRegistration: {name: m1, criSocket: unix:///run/containerd/containerd.sock}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %s
controlPlaneEndpoint: apiserver.cluster.local:6443
certificatesDir: %s
encryptionAlgorithm: ECDSA-P256
apiServer: {certSANs: [apiserver.cluster.local, 10.103.97.2, 192.0.2.11, 192.0.2.12, 192.0.2.13]}
`, p.Version, pki), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // twice, as after a power cut
		out := run(t, p.Kubeadm, "init", "phase", "certs", "all", "--config", config)
		for _, ca := range []string{`Using existing ca certificate authority`, `Using existing front-proxy-ca certificate authority`, `Using existing etcd/ca certificate authority`, `Using the existing "sa" key`} {
			if !strings.Contains(out, ca) {
				t.Errorf("kubeadm's output lacks %q:\n%s", ca, out)
			}
		}
	}
	kubeconfigs := t.TempDir()
	run(t, p.Kubeadm, "init", "phase", "kubeconfig", "all", "--config", config, "--kubeconfig-dir", kubeconfigs)
	for name, was := range minted {
		if is, err := os.ReadFile(filepath.Join(pki, name)); err != nil || !bytes.Equal(is, was) {
			t.Errorf("kubeadm changed %s: %v", name, err)
		}
	}
	out := run(t, p.Kubeadm, "certs", "check-expiration", "--config", config, "--cert-dir", pki)
	for _, name := range []string{"apiserver ", "etcd-ca", "front-proxy-ca", "etcd-server"} {
		if !strings.Contains(out, name) {
			t.Errorf("the output of check-expiration lacks %s:\n%s", name, out)
		}
	}
	for leaf, ca := range map[string]string{"apiserver.crt": "ca.crt", "apiserver-kubelet-client.crt": "ca.crt", "front-proxy-client.crt": "front-proxy-ca.crt", "etcd/server.crt": "etcd/ca.crt", "etcd/peer.crt": "etcd/ca.crt"} {
		run(t, openssl, "verify", "-x509_strict", "-CAfile", filepath.Join(pki, ca), filepath.Join(pki, leaf))
	}
	if out := run(t, openssl, "x509", "-in", filepath.Join(pki, "apiserver.crt"), "-noout", "-text"); !strings.Contains(out, "10.103.97.2") || !strings.Contains(out, "apiserver.cluster.local") {
		t.Errorf("the API server's certificate lacks the VIP or the endpoint:\n%s", out)
	}
	run(t, openssl, "ec", "-in", filepath.Join(pki, "sa.key"), "-check", "-noout")
}
