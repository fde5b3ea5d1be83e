package cluster

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	phases "github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/update"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/test/lab"
)

// createNode creates a Node as kubelet does, with kubelet's status.
func createNode(t *testing.T, lc *lab.Cluster, name string, labels map[string]string) {
	t.Helper()
	all := map[string]string{"beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
	for k, v := range labels {
		all[k] = v
	}
	ctx := context.WithoutCancel(t.Context())
	if err := lc.Create(ctx, "/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": name, "labels": all,
		"annotations": map[string]string{"node.alpha.kubernetes.io/ttl": "0", "volumes.kubernetes.io/controller-managed-attach-detach": "true"}}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lc.Delete(ctx, "/api/v1/nodes/"+name); err != nil && !lab.NotFound(err) {
			t.Error(err)
		}
	})
	now := time.Now().UTC().Format(time.RFC3339)
	var conditions []map[string]string
	for _, c := range []string{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		status := "False"
		if c == "Ready" {
			status = "True"
		}
		conditions = append(conditions, map[string]string{"type": c, "status": status, "reason": "KubeletReady", "message": "kubelet is posting ready status", "lastHeartbeatTime": now, "lastTransitionTime": now})
	}
	if err := lc.Patch(ctx, "/api/v1/nodes/"+name+"/status", map[string]any{"status": map[string]any{"conditions": conditions,
		"addresses": []map[string]string{{"type": "InternalIP", "address": "192.0.2.7"}, {"type": "Hostname", "address": name}},
		"capacity":  map[string]string{"cpu": "4", "memory": "8Gi", "pods": "110"}, "allocatable": map[string]string{"cpu": "4", "memory": "7Gi", "pods": "110"}}}); err != nil {
		t.Fatal(err)
	}
}

// meter counts the bytes of connections in both directions, plus 40 bytes for the headers of each
// packet.
type meter struct{ bytes, calls atomic.Int64 }

type metered struct {
	net.Conn
	m *meter
}

func (c metered) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.m.bytes.Add(int64(n))
	c.m.calls.Add(1)
	return n, err
}

func (c metered) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.m.bytes.Add(int64(n))
	c.m.calls.Add(1)
	return n, err
}

// TestOrderOfARealCluster checks that kubelet's credentials suffice to read and answer an order,
// that the Node authorizer rejects answers for other Nodes, and that the request is small.
func TestOrderOfARealCluster(t *testing.T) {
	lc := needCluster(t)
	ctx := t.Context()
	const name = "ordered-1"
	createNode(t, lc, name, nil)
	createNode(t, lc, "ordered-2", nil)
	ca, err := os.ReadFile(lc.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	dir, m := t.TempDir(), &meter{}
	e := &machine.Env{Root: dir, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	files := host.Files{Root: dir}
	e.WriteFile, e.Remove, e.Lock = files.WriteFile, files.Remove, files.Lock
	e.Now, e.Rand, e.Sleep = time.Now, func() float64 { return 0 }, host.Sleep
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return metered{c, m}, err
	}
	put := func(path string, data []byte) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(e.Path(path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(e.Path(path), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const pem = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	conf, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: adminAPI(t, lc.Kubeconfig).Server, CAFile: ondisk.KubeCA}, kubeapi.User{CertFile: pem, KeyFile: pem})
	if err != nil {
		t.Fatal(err)
	}
	put(ondisk.KubeletConf, conf)
	put(ondisk.KubeCA, ca)
	put(pem, nodeCertificate(t, lc, name, time.Now().Add(time.Hour)))
	put(ondisk.KubeletConfig, []byte("kind: KubeletConfiguration\n"))
	put("/var/lib/kubelet/kubeadm-flags.env", []byte("KUBELET_KUBEADM_ARGS=\"--x=y\"\n"))
	put(ondisk.ImageInfoFile, []byte(`{"version":1,"name":"edge","plan":"0123456789abcdef","arch":"amd64"}`))
	put("/run/x", nil)
	annotations := func(name string) map[string]string {
		t.Helper()
		var node struct {
			Metadata struct{ Annotations map[string]string }
		}
		if err := lc.Get(ctx, "/api/v1/nodes/"+name, &node); err != nil {
			t.Fatal(err)
		}
		return node.Metadata.Annotations
	}
	carryOut := func() (bytes int64) {
		t.Helper()
		m.bytes.Store(0)
		m.calls.Store(0)
		if err := update.CarryOutOrder(ctx, e, func(phases.Step) {}); err != nil {
			t.Fatal(err)
		}
		return m.bytes.Load() + 40*2*m.calls.Load()
	}
	carryOut()
	if a := order.ParseAnswer(annotations(name)[order.AnnotationAnswer]); a.Plan != "0123456789abcdef" {
		t.Errorf("answered %+v", a)
	}
	idle := carryOut()
	t.Logf("%d bytes for an idle look: %.2f MB a day at 12.5 minutes, %.2f MB at an hour", idle, float64(idle)*24*60/12.5/1e6, float64(idle)*24/1e6)
	if idle == 0 || idle > 12_000 {
		t.Errorf("%d bytes for a look without an order", idle)
	}
	if err := lc.Patch(ctx, "/api/v1/nodes/"+name, map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		order.AnnotationOrder: "https://192.0.2.1/x.raw.zst@sha256:" + strings.Repeat("ab", 32)}}}); err != nil {
		t.Fatal(err)
	}
	carryOut()
	if a := order.ParseAnswer(annotations(name)[order.AnnotationAnswer]); a.State != order.StateFailed || !strings.Contains(a.Reason, "names no keys") {
		t.Errorf("answered %+v", a)
	}

	// A machine cannot annotate another machine's Node.
	k, err := kubeapi.ParseKubeconfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.ClientOf(k)
	if err != nil {
		t.Fatal(err)
	}
	patch := map[string]any{"metadata": map[string]any{"annotations": map[string]string{order.AnnotationOrder: "x"}}}
	if err := c.MergePatch(ctx, "/api/v1/nodes/ordered-2", patch); kubeapi.Code(err) != 403 {
		b, _ := json.Marshal(annotations("ordered-2"))
		t.Errorf("another machine's Node was patched: %v, %s", err, b)
	}
}
