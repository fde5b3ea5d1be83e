package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/test/lab"
)

// masters simulates three control-plane nodes on this host: members of etcd, each with an API
// server that uses only that member, with the keys of one minting.
type masters struct {
	*etcds
	pki     string
	program string
	port    [3]int
	kill    [3]func() // kills the API server
	admin   *kubeapi.Kubeconfig
	conf    []byte // of admin
}

func newMasters(t *testing.T) *masters {
	t.Helper()
	p := needPrograms(t)
	ports, err := lab.FreePorts(9)
	if err != nil {
		t.Fatal(err)
	}
	m := &masters{etcds: etcdsAt(t, ports[:6]), program: p.APIServer, port: [3]int(ports[6:])}
	dir := filepath.Join(t.TempDir(), "shops")
	parsed, err := clusterdoc.Parse("cluster.yaml", []byte(document))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mint.New(dir, parsed, mint.Options{Now: time.Now()}); err != nil {
		t.Fatal(err)
	}
	m.pki = filepath.Join(dir, "pki")
	config := filepath.Join(t.TempDir(), "kubeadm.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {advertiseAddress: 192.0.2.11}
nodeRegistration: {name: m1, criSocket: unix:///run/containerd/containerd.sock}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %s
certificatesDir: %s
encryptionAlgorithm: ECDSA-P256
`, p.Version, m.pki), 0o600); err != nil {
		t.Fatal(err)
	}
	conf := t.TempDir()
	run(t, p.Kubeadm, "init", "phase", "certs", "all", "--config", config)
	run(t, p.Kubeadm, "init", "phase", "kubeconfig", "super-admin", "--config", config, "--kubeconfig-dir", conf)
	text, err := os.ReadFile(filepath.Join(conf, "super-admin.conf"))
	if err != nil {
		t.Fatal(err)
	}
	m.conf = text
	if m.admin, err = kubeapi.ParseKubeconfig(text); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for i := range 3 {
			m.die(i)
		}
	})
	return m
}

// serve starts the i-th API server, and restarts it whenever it ends, as kubelet does. An API
// server ends if etcd is slow, for example on a busy machine.
func (m *masters) serve(i int) {
	m.t.Helper()
	pki := func(name string) string { return filepath.Join(m.pki, name) }
	log, err := os.OpenFile(m.disk(i)+".api.log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		m.t.Fatal(err)
	}
	args := []string{"--bind-address", "127.0.0.1", "--advertise-address", fmt.Sprintf("192.0.2.1%d", i+1),
		"--secure-port", fmt.Sprint(m.port[i]), "--etcd-servers", m.client[i], "--authorization-mode", "Node,RBAC", "--enable-bootstrap-token-auth",
		"--client-ca-file", pki("ca.crt"), "--tls-cert-file", pki("apiserver.crt"), "--tls-private-key-file", pki("apiserver.key"),
		"--service-account-key-file", pki("sa.pub"), "--service-account-signing-key-file", pki("sa.key"),
		"--service-account-issuer", "https://kubernetes.default.svc.cluster.local", "--service-cluster-ip-range", "10.96.0.0/16", "--profiling=false"}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer log.Close()
		for ctx.Err() == nil {
			cmd := exec.CommandContext(ctx, m.program, args...)
			cmd.Stdout, cmd.Stderr = log, log
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
			fmt.Fprintf(log, "the API server has ended: %v\n", cmd.Run())
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}()
	m.kill[i] = func() {
		cancel()
		<-ended
	}
}

// die cuts the power of the i-th master.
func (m *masters) die(i int) {
	if m.kill[i] != nil {
		m.kill[i]()
		m.kill[i] = nil
	}
	m.stop(i)
}

func (m *masters) api(i int) *kubeapi.Client {
	m.t.Helper()
	c, err := m.admin.Client("/", nil, keyPair)
	if err != nil {
		m.t.Fatal(err)
	}
	c.Server, c.ServerName = fmt.Sprintf("https://127.0.0.1:%d", m.port[i]), "kubernetes"
	return c
}

// note creates a ConfigMap through the i-th API server.
func (m *masters) note(i int, name string) {
	m.t.Helper()
	objects, err := kubeapi.Objects(name, []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: "+name+", namespace: default}\n"))
	if err != nil {
		m.t.Fatal(err)
	}
	m.patiently(i, "to take "+name, func() error {
		_, err := applyAll(m.t.Context(), m.api(i), objects)
		return err
	})
}

// uid returns the UID of the object at path, from the i-th API server.
func (m *masters) uid(i int, path string) (uid string) {
	m.t.Helper()
	m.patiently(i, "to know "+path, func() error {
		var o struct{ Metadata struct{ UID string } }
		err := m.api(i).Get(m.t.Context(), path, &o)
		uid = o.Metadata.UID
		return err
	})
	return uid
}

// patiently retries as long as an API server may need to start.
func (m *masters) patiently(i int, what string, try func() error) {
	m.t.Helper()
	var err error
	for end := time.Now().Add(4 * time.Minute); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	log, _ := os.ReadFile(m.disk(i) + ".api.log")
	m.t.Fatalf("waiting for the API server of %s %s: %v\n%s", name(i), what, err, log[max(0, len(log)-2000):])
}

const defaultConfigMaps = "/api/v1/namespaces/default/configmaps/"

// TestFirstMasterDies destroys the first master with its disk. The others must serve the data and
// accept writes. Once the first master is reflashed and has joined, another one may die. The
// cluster must keep the UID by which workers know it.
func TestFirstMasterDies(t *testing.T) {
	m := newMasters(t)
	for i := range 3 {
		m.start(i, m.etcds.all(), "new")
		m.serve(i)
	}
	m.note(0, "first")
	before := m.uid(0, defaultConfigMaps+"first")
	system := m.uid(0, "/api/v1/namespaces/kube-system")

	m.die(0)
	m.wipe(0)
	m.note(1, "second")
	for _, i := range []int{1, 2} {
		if now := m.uid(i, defaultConfigMaps+"first"); now != before {
			t.Errorf("%s: the ConfigMap written through m1 has UID %s, want %s", name(i), now, before)
		}
	}

	m.replace(0)
	m.serve(0)
	second := m.uid(1, defaultConfigMaps+"second")
	if now := m.uid(0, defaultConfigMaps+"second"); now != second {
		t.Errorf("m1, reflashed, returns UID %s for the ConfigMap written through m2, which returns %s", now, second)
	}
	m.die(1)
	m.note(0, "third")
	if m.uid(2, defaultConfigMaps+"third") != m.uid(0, defaultConfigMaps+"third") {
		t.Error("the two masters belong to different clusters")
	}
	if now := m.uid(0, "/api/v1/namespaces/kube-system"); now != system {
		t.Errorf("the namespace kube-system has UID %s, want %s", now, system)
	}

	// Two of three are lost. The reflashed one stops, and the third's etcd accepts no writes, so
	// that histories cannot diverge.
	m.wipe(1)
	m.die(0)
	m.wipe(0)
	until(t, "m3 to have no quorum", func() bool { return !m.view(0).Quorum })
	if d := m.decide(0, etcdmember.Stop); !strings.Contains(d.Why, "m3") {
		t.Error(d.Why)
	}
}
