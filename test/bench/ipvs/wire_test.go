package ipvs_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/lab"
)

var (
	wireSeconds = flag.Int("wire.seconds", 1200, "seconds for which the idle wire is counted")
	wireOut     = flag.String("wire.o", "../results/wire.md", "file to write")
)

// meteredNodes are counted together. A single one sends so few requests that the moment at which
// the measurement ends would matter.
const meteredNodes = 6

// Numbers per day of the actions of an idle kubelet with its defaults.
const (
	leasesDay   = 86400 / 10      // nodeLeaseDurationSeconds 40: renewed every quarter
	statusesDay = 86400 / 300     // nodeStatusReportFrequency 5m
	meteredDay  = 86400 / 3600    // as firstboot configures it for a metered link
	watchesDay  = 5 * 86400 / 450 // nodes, pods, services, runtimeclasses, csidrivers: repeated after 5 to 10 minutes
)

// wireNode is a network namespace whose only cable leads to the API server.
type wireNode struct {
	b    *testing.B
	name string
	ns   *lab.Namespace
}

func ip(b *testing.B, args ...string) {
	b.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		b.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

func newWireNode(b *testing.B, to *lab.Namespace, i int) *wireNode {
	b.Helper()
	n := &wireNode{b: b, name: fmt.Sprintf("edgebake-wire-%d-%d", os.Getpid(), i)}
	n.ns = &lab.Namespace{Name: n.name}
	ip(b, "netns", "add", n.name)
	b.Cleanup(func() { ip(b, "netns", "del", n.name) })
	port := "wire" + strconv.Itoa(i)
	ip(b, "-n", to.Name, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", n.name)
	ip(b, "-n", to.Name, "link", "set", port, "master", "br0", "up")
	ip(b, "-n", n.name, "link", "set", "lo", "up")
	ip(b, "-n", n.name, "addr", "add", fmt.Sprintf("10.103.0.%d/24", 201+i), "dev", "eth0")
	// Exclude IPv6's own packets (router solicitations).
	ip(b, "netns", "exec", n.name, "sysctl", "-q", "-w", "net.ipv6.conf.eth0.disable_ipv6=1")
	ip(b, "-n", n.name, "link", "set", "eth0", "up")
	// Both ends know each other's hardware address, because ARP requests would not occur on a
	// metered link.
	ip(b, "-n", n.name, "neigh", "replace", "10.103.0.11", "lladdr", hardware(b, to.Name, "br0"), "dev", "eth0", "nud", "permanent")
	ip(b, "-n", to.Name, "neigh", "replace", fmt.Sprintf("10.103.0.%d", 201+i), "lladdr", hardware(b, n.name, "eth0"), "dev", "br0", "nud", "permanent")
	return n
}

// hardware returns the address of an interface.
func hardware(b *testing.B, ns, link string) string {
	b.Helper()
	out, err := exec.Command("ip", "-n", ns, "-j", "link", "show", link).Output()
	if err != nil {
		b.Fatal(err)
	}
	var links []struct{ Address string }
	if err := json.Unmarshal(out, &links); err != nil || len(links) != 1 {
		b.Fatalf("%v: %s", err, out)
	}
	return links[0].Address
}

// wireCount is the traffic on the cable in both directions: whole Ethernet frames.
type wireCount struct{ bytes, packets int64 }

func (n *wireNode) count() (c wireCount) {
	n.b.Helper()
	out, err := exec.Command("ip", "-n", n.name, "-j", "-s", "link", "show", "eth0").Output()
	if err != nil {
		n.b.Fatal(err)
	}
	var links []struct {
		Stats struct {
			RX, TX struct{ Bytes, Packets int64 }
		} `json:"stats64"`
	}
	if err := json.Unmarshal(out, &links); err != nil || len(links) != 1 {
		n.b.Fatalf("%v: %s", err, out)
	}
	s := links[0].Stats
	return wireCount{s.RX.Bytes + s.TX.Bytes, s.RX.Packets + s.TX.Packets}
}

// ethernetHeader is the size of a frame's header before its IP packet.
const ethernetHeader = 14

// ip returns the bytes without the Ethernet headers.
func (c wireCount) ip() int64 { return c.bytes - ethernetHeader*c.packets }

// volume is a number of bytes per day.
type volume struct{ ip, ethernet float64 }

func (c wireCount) perDay(scale float64) volume {
	return volume{float64(c.ip()) * scale, float64(c.bytes) * scale}
}

func (c wireCount) sub(o wireCount) wireCount {
	return wireCount{c.bytes - o.bytes, c.packets - o.packets}
}

// pair returns the client certificate of a kubeconfig as one PEM file.
func pair(b *testing.B, kubeconfig string) []byte {
	b.Helper()
	text, err := os.ReadFile(kubeconfig)
	if err != nil {
		b.Fatal(err)
	}
	var all []byte
	for _, key := range []string{"client-certificate-data", "client-key-data"} {
		m := regexp.MustCompile(key + `: (\S+)`).FindSubmatch(text)
		if m == nil {
			b.Fatalf("%s has no %s", kubeconfig, key)
		}
		p, err := base64.StdEncoding.DecodeString(string(m[1]))
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, p...)
	}
	return all
}

// care runs ipvscare on the node. On a machine without IP_VS, the lan profile sends PINGs as if the
// API server were in use.
func (n *wireNode) care(program, ca, client, profile string) *exec.Cmd {
	n.b.Helper()
	dir := n.b.TempDir()
	doc, err := json.Marshal(ondisk.IPVS{Version: ondisk.IPVSVersion, Servers: []ondisk.IPVSVirtual{{
		VIP: "10.103.97.2:6443", Masters: []string{"10.103.0.11:6443"}, Host: "apiserver.cluster.local", CAFile: ca, Profile: profile}}})
	if err != nil {
		n.b.Fatal(err)
	}
	config := filepath.Join(dir, "ipvs.json")
	if err := os.WriteFile(config, doc, 0o600); err != nil {
		n.b.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		n.b.Fatal(err)
	}
	n.b.Cleanup(func() {
		text, _ := os.ReadFile(log.Name())
		n.b.Logf("ipvscare, %s:\n%s", profile, text)
		log.Close()
	})
	cmd := exec.Command("ip", "netns", "exec", n.name, program, "run", "--config", config, "--hosts", filepath.Join(dir, "hosts"),
		"--state", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"), "--client-cert", client, "--metrics", "")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		n.b.Fatal(err)
	}
	n.b.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd
}

// kubelet sends requests to the API server as kubelet does: over HTTP/2, in protobuf.
type kubelet struct {
	b      *testing.B
	client *http.Client
}

func (n *wireNode) kubelet(ca string, client []byte) *kubelet {
	n.b.Helper()
	roots := x509.NewCertPool()
	text, err := os.ReadFile(ca)
	if err != nil {
		n.b.Fatal(err)
	}
	roots.AppendCertsFromPEM(text)
	cert, err := tls.X509KeyPair(client, client)
	if err != nil {
		n.b.Fatal(err)
	}
	return &kubelet{n.b, &http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, DialContext: n.ns.Dial,
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}}}}}
}

const protobuf = "application/vnd.kubernetes.protobuf"

func (k *kubelet) do(method, path, contentType string, body []byte) []byte {
	k.b.Helper()
	req, err := http.NewRequestWithContext(k.b.Context(), method, "https://10.103.0.11:6443"+path, bytes.NewReader(body))
	if err != nil {
		k.b.Fatal(err)
	}
	req.Header.Set("Accept", protobuf+",application/json")
	req.Header.Set("User-Agent", "kubelet/v1.36.3 (linux/amd64) kubernetes/0123456")
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := k.client.Do(req)
	if err != nil {
		k.b.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode >= 300 {
		k.b.Fatalf("%s %s: %s, %v: %.300s", method, path, resp.Status, err, answer)
	}
	return answer
}

// each returns the traffic of one call of f, as the average of many calls.
func (n *wireNode) each(many int, pause time.Duration, f func()) wireCount {
	f() // opens the connection, and lets both sides cache the headers
	time.Sleep(time.Second)
	before := n.count()
	for range many {
		f()
		time.Sleep(pause) // also wait for the last ACK
	}
	c := n.count().sub(before)
	return wireCount{c.bytes / int64(many), c.packets / int64(many)}
}

// BenchmarkWire counts the bytes that an idle node exchanges with a real kube-apiserver, and writes
// the table of test/bench/results/wire.md.
func BenchmarkWire(b *testing.B) {
	desk.NeedRoot(b, "it makes network namespaces")
	ctx := context.Background()
	dir := b.TempDir()
	progs, err := lab.CachedPrograms(ctx, lab.KubernetesVersion, io.Discard)
	if err != nil {
		b.Fatal(err)
	}
	program := filepath.Join(dir, "ipvscare")
	build := exec.Command("go", "build", "-o", program, "github.com/edgebake/edgebake/cmd/ipvscare")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	l, err := lab.New(filepath.Join(dir, "lab"), io.Discard)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	ns, err := l.NewNamespace(ctx)
	if err != nil {
		b.Fatal(err)
	}
	cluster, err := l.StartCluster(ctx, progs, ns, 1)
	if err != nil {
		b.Fatal(err)
	}
	client := pair(b, cluster.Kubeconfig)
	if block, _ := pem.Decode(client); block == nil {
		b.Fatal("the client's certificate is not PEM")
	}
	clientFile := filepath.Join(dir, "client.pem")
	if err := os.WriteFile(clientFile, client, 0o600); err != nil {
		b.Fatal(err)
	}
	lan, third := newWireNode(b, ns, 0), newWireNode(b, ns, 1)
	lan.care(program, cluster.CAFile, clientFile, "lan")
	var metered []*wireNode
	for i := range meteredNodes {
		n := newWireNode(b, ns, 2+i)
		n.care(program, cluster.CAFile, clientFile, "metered")
		metered = append(metered, n)
	}
	meteredCount := func() (sum wireCount) {
		for _, n := range metered {
			c := n.count()
			sum = wireCount{sum.bytes + c.bytes, sum.packets + c.packets}
		}
		return sum
	}
	time.Sleep(10 * time.Second) // wait until the handshakes are over
	began, m0, l0 := time.Now(), meteredCount(), lan.count()

	// Measure the actions of an idle kubelet one by one.
	k := third.kubelet(cluster.CAFile, client)
	create := func(path string, v any) {
		b.Helper()
		if err := cluster.Create(ctx, path, v); err != nil {
			b.Fatal(err)
		}
	}
	create("/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "edge-0001"}, "status": nodeStatus()})
	// The lease names its Node, because the cluster would remove a lease without one.
	var node struct{ Metadata struct{ UID string } }
	if err := cluster.Get(ctx, "/api/v1/nodes/edge-0001", &node); err != nil {
		b.Fatal(err)
	}
	create("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", map[string]any{
		"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": map[string]any{"name": "edge-0001", "namespace": "kube-system",
			"ownerReferences": []any{map[string]any{"apiVersion": "v1", "kind": "Node", "name": "edge-0001", "uid": node.Metadata.UID}}},
		"spec": map[string]any{"holderIdentity": "edge-0001", "leaseDurationSeconds": 40, "renewTime": "2026-11-22T00:00:00.000000Z"}})
	leasePath := "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/edge-0001"
	held := k.do("GET", leasePath, "", nil)
	lease := third.each(30, 500*time.Millisecond, func() { held = k.do("PUT", leasePath+"?timeout=10s", protobuf, held) })
	beat := 0
	report := third.each(20, 500*time.Millisecond, func() {
		beat++
		patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": conditions(beat)}})
		if err != nil {
			b.Fatal(err)
		}
		k.do("PATCH", "/api/v1/nodes/edge-0001/status?timeout=10s", "application/strategic-merge-patch+json", patch)
	})
	watch := third.each(10, 500*time.Millisecond, func() {
		k.do("GET", "/api/v1/pods?allowWatchBookmarks=true&fieldSelector=spec.nodeName%3Dedge-0001&timeoutSeconds=1&watch=true&resourceVersion=0", "", nil)
	})

	time.Sleep(time.Until(began.Add(time.Duration(*wireSeconds) * time.Second)))
	took := time.Since(began)
	m, n := meteredCount().sub(m0), lan.count().sub(l0)
	scale := float64(24*time.Hour) / float64(took)
	mDay, nDay := m.perDay(scale/meteredNodes), n.perDay(scale)
	b.ReportMetric(mDay.ip*30/1e6, "metered-MB/month")
	b.ReportMetric(nDay.ip*30/1e6, "lan-MB/month")
	for b.Loop() { // the measurements were made above
	}
	var t strings.Builder
	fmt.Fprintf(&t, `# What an idle node sends

Made by `+"`go test -bench Wire ./test/bench/ipvs`"+`: one kube-apiserver %s with its
etcd, and each client in a network namespace of its own with one cable to it.
Bytes are those of the cable in both directions: IP, TCP with its ACKs, and TLS;
Ethernet adds 14 a packet. ARP is left out: both ends know each other.

## ipvscare, for each API server (master)

Counted for %.0f s after the handshake, metered on %d nodes at once. A month has 30
days.

| profile | packets | bytes with Ethernet | IP bytes a day | MB a month | MB a month with Ethernet |
|---|---|---|---|---|---|
| metered | %d | %d | %.0f | %.1f | %.1f |
| lan, without IPVS | %d | %d | %.0f | %.1f | %.1f |

Without IPVS in the kernel of the computer that measures, ipvscare with profile lan sends a
PING each second. With IPVS it does so only while the node uses the API server
([docs/decisions/0043](../../../docs/decisions/0043-pings-follow-use.md)): 7.7 to 8.6 MB of IP a
day in virtual time (TestTrafficWithoutFaults).

`, lab.KubernetesVersion, took.Seconds(), meteredNodes,
		m.packets, m.bytes, mDay.ip, mDay.ip*30/1e6, mDay.ethernet*30/1e6, n.packets, n.bytes, nDay.ip, nDay.ip*30/1e6, nDay.ethernet*30/1e6)
	rows := []struct {
		what string
		each wireCount
		// day is the number of times per day with kubelet's defaults, metered on a metered link.
		day, metered int
	}{
		{"kubelet renews its lease (every 10 s)", lease, leasesDay, leasesDay},
		{"kubelet reports its status (every 5 min; metered: every hour)", report, statusesDay, meteredDay},
		{"kubelet opens a watch anew (5 watches, every 5 to 10 min)", watch, watchesDay, watchesDay},
	}
	t.WriteString(`## The whole idle node

An estimate: no kubelet ran. A stand-in (Go's HTTP/2 client, kubelet's paths,
protobuf leases, a Node of 40 images) sent what kubelet sends, which was counted
one by one; how often kubelet does so is by its settings. Handshakes, yurthub,
pods' own traffic, DNS and time are not in it.

| what | IP bytes each | times a day | bytes a day | metered: times a day | bytes a day |
|---|---|---|---|---|---|
`)
	var byDefault, share int64
	for _, r := range rows {
		byDefault += r.each.ip() * int64(r.day)
		share += r.each.ip() * int64(r.metered)
		fmt.Fprintf(&t, "| %s | %d | %d | %d | %d | %d |\n", r.what, r.each.ip(), r.day, r.each.ip()*int64(r.day), r.metered, r.each.ip()*int64(r.metered))
	}
	fmt.Fprintf(&t, "\nkubelet by its defaults: %.2f MB a day. Metered, with ipvscare:\n", float64(byDefault)/1e6)
	for _, masters := range []int{1, 3} {
		care := mDay.ip * float64(masters)
		fmt.Fprintf(&t, "\n%d API servers: kubelet %.2f MB, ipvscare %.2f MB, together %.2f MB a day.\n",
			masters, float64(share)/1e6, care/1e6, (float64(share)+care)/1e6)
	}
	t.WriteString(`
2.7 MB a day for everything is what KubeEdge shows. `)
	if float64(share)/1e6 > 2.7 {
		t.WriteString("kubelet alone sends more\nhere, whatever ipvscare does. ")
	}
	fmt.Fprintf(&t, `A lease of 400 s in place of 40 s
(nodeLeaseDurationSeconds) would cost %.2f MB a day instead of %.2f MB; then the
cluster's controller manager must wait as long before it calls a node lost
(--node-monitor-grace-period), which is a decision for the whole cluster.
edgebake does not make it.
`, float64(lease.ip())*leasesDay/10/1e6, float64(lease.ip())*leasesDay/1e6)
	if err := os.WriteFile(*wireOut, []byte(t.String()), 0o644); err != nil {
		b.Fatal(err)
	}
}

func conditions(beat int) []any {
	at := time.Date(2026, 11, 22, 0, 0, beat, 0, time.UTC).Format(time.RFC3339)
	var all []any
	for _, c := range [][3]string{{"MemoryPressure", "False", "KubeletHasSufficientMemory"}, {"DiskPressure", "False", "KubeletHasNoDiskPressure"},
		{"PIDPressure", "False", "KubeletHasSufficientPID"}, {"Ready", "True", "KubeletReady"}} {
		all = append(all, map[string]any{"type": c[0], "status": c[1], "reason": c[2], "message": "kubelet says that this is so",
			"lastHeartbeatTime": at, "lastTransitionTime": "2026-11-21T00:00:00Z"})
	}
	return all
}

func nodeStatus() map[string]any {
	var images []any
	for i := range 40 {
		name := fmt.Sprintf("registry.example.org/shop/service-%02d", i)
		images = append(images, map[string]any{"names": []any{name + "@sha256:" + strings.Repeat("0123456789abcdef", 4), name + ":v1.2.3"}, "sizeBytes": 30000000 + i})
	}
	return map[string]any{"images": images, "conditions": conditions(0), "addresses": []any{map[string]any{"type": "InternalIP", "address": "10.103.0.203"}},
		"capacity": map[string]any{"cpu": "4", "memory": "4Gi", "pods": "110"}, "allocatable": map[string]any{"cpu": "4", "memory": "4Gi", "pods": "110"}}
}
