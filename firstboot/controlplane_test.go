package firstboot

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// errHalf is kubeadm's error about a truncated kubeconfig.
var errHalf = errors.New("a kubeconfig file exists already but cannot be read")

// mintedSites returns the Sites of a new cluster with one or three control-plane nodes.
func mintedSites(t *testing.T, masters int) []mint.NodeSite {
	t.Helper()
	doc := "apiVersion: edgebake.io/v1alpha1\nkind: Cluster\nname: shops\nkubernetesVersion: v1.36.3\nkubeProxy: {mode: none}\nnodes: [{name: shop1}]\nmasters:\n"
	for i := range masters {
		doc += fmt.Sprintf("- {name: m%d, address: 192.0.2.1%d}\n", i+1, i+1)
	}
	doc += "---\napiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\ndns: {disabled: true}\n"
	dir, now := filepath.Join(t.TempDir(), "shops"), time.Date(2026, 11, 20, 9, 0, 0, 0, time.UTC)
	parsed, err := clusterdoc.Parse("cluster.yaml", []byte(strings.Replace(doc, "nodes:", "manifests: [cni.yaml, apps/shop.yaml]\nnodes:", 1)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mint.New(dir, parsed, mint.Options{Now: now, Manifests: testManifests}); err != nil {
		t.Fatal(err)
	}
	sites, err := mint.ControlPlaneSites(dir, sealed.Identity{}, now)
	if err != nil {
		t.Fatal(err)
	}
	return sites
}

// testManifests have an object in a namespace that the next file creates, and a list.
var testManifests = []manifest.File{
	{Name: "cni.yaml", Text: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: early, namespace: shop}\n"},
	{Name: "apps/shop.yaml", Text: "# nothing\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Namespace, metadata: {name: shop}}\n- {apiVersion: v1, kind: ConfigMap, metadata: {name: late}}\n"},
}

// appliedPaths are the paths of their objects, in the order in which they can be created.
var appliedPaths = []string{"/api/v1/namespaces/shop", "/api/v1/namespaces/default/configmaps/late", "/api/v1/namespaces/shop/configmaps/early"}

// wantApplied checks that the manifests were applied, and that the
// machine has no copy of them left.
func (m *controlPlane) wantApplied(when string) {
	m.T.Helper()
	if got := slices.Compact(slices.Sorted(slices.Values(m.Cluster.Applied))); !slices.Equal(got, slices.Sorted(slices.Values(appliedPaths))) || !m.Cluster.AllApplied || m.Has(controlplane.ClusterManifests) {
		m.T.Errorf("%s: applied %q, said so %v, kept %v", when, m.Cluster.Applied, m.Cluster.AllApplied, m.Has(controlplane.ClusterManifests))
	}
}

const controlPlaneImage = `{"version":1,"name":"test","plan":"plan","arch":"amd64","sourceDate":1767225600,"nodeTypes":["native","control-plane"],"siteVersions":["v1alpha1"],"kubernetes":"v1.36.3","containerd":"2.2.9","partitions":[],
"images":[{"ref":"registry.k8s.io/kube-apiserver:v1.36.3"},{"ref":"registry.k8s.io/kube-controller-manager:v1.36.3"},{"ref":"registry.k8s.io/kube-scheduler:v1.36.3"},{"ref":"registry.k8s.io/etcd:3.6.8-0"}]}`

// controlPlane is the machine m1 with fakes of kubeadm, kubelet and
// etcd, and the other control-plane nodes.
type controlPlane struct {
	*world
	site *configs.Site

	others map[string]*fakeMember
	own    *fakeMember // etcd on m1, once kubelet has started it
	// starts lists the starts of etcd with a blank disk, by initial-cluster-state.
	starts []string
	// started is the etcd manifest with which etcd was started in this boot.
	started  string
	restarts []string // restarts with other arguments while etcd was running
	learner  bool     // m1's member has no vote yet
	inits    []string
	// clusterToken is etcd's initial-cluster-token in kubeadm's last configuration.
	clusterToken string
	// certTime is the lifetime of kubeadm's certificates; 0 means a year. If
	// certEnd is set, none is valid after it.
	certTime time.Duration
	certEnd  time.Time
	halves   map[string]bool
	// publishToken is the token in the published cluster-info.
	publishToken string
}

// fakeMember is another control-plane node.
type fakeMember struct {
	mu      sync.Mutex
	state   etcdmember.PeerState
	permit  string // the bootstrap permit in its Site
	id      string // the ID of its etcd member
	quorum  bool
	members []map[string]any
	active  string // the ID of the member that it is connected to
	counts  uint64 // the ID of another member that its own data lists
	// snapshot is its snapshot. short means that the snapshot is truncated in transit.
	snapshot string
	short    bool
	alarms   []map[string]string
	status   map[string]string // its report about its database
	asked    []string          // requests that change something
	next     int
	server   worldtest.Listener
}

func newControlPlane(t *testing.T, sites []mint.NodeSite) *controlPlane {
	t.Helper()
	w := newWorld(t, "testdata/machine.txtar")
	w.Put("/usr/share/edgebake/image.json", controlPlaneImage)
	m := &controlPlane{world: w, site: sites[0].Site, others: map[string]*fakeMember{}, halves: map[string]bool{}}
	keys := m.site.Credentials.Keys
	ca, key := parsePair(t, keys.CA)
	w.Cluster = worldtest.NewClusterOf(t, ca, key, "192.0.2.11")
	w.Cluster.Attach(w.World)
	w.Cluster.NoClusterInfo, w.ClockSynced = true, true
	w.NodeAddr = netip.MustParseAddr("192.0.2.11")
	w.KubeadmInit = m.kubeadm
	w.DialOther, w.RefuseDial = m.dial, m.refused
	w.Listen = func(addr string) (net.Listener, error) {
		if addr != "192.0.2.11:2380" {
			return nil, fmt.Errorf("it listens on %s", addr)
		}
		return net.Listen("unix", "@firstboot-test-"+rand.Text())
	}
	for _, s := range sites[1:] {
		f := newFakeMember(t, keys.EtcdCA, w.ClusterTime)
		f.permit = controlplane.PermitID(s.Site)
		m.others[s.Site.Self().Address] = f
	}
	m.own = newFakeMember(t, keys.EtcdCA, w.ClusterTime)
	m.own.state, m.own.quorum = etcdmember.InUse, true
	m.own.members = []map[string]any{{"ID": "1", "name": "m1", "peerURLs": []string{"https://192.0.2.11:2380"}}}
	m.own.snapshot, m.own.id = "all objects", "1"
	m.CtrRun = m.etcdutl
	m.stampSite(m.site)
	return m
}

// cloneWith returns a copy of the machine with these files,
// and of the other control-plane nodes.
func (m *controlPlane) cloneWith(t *testing.T, files []worldtest.Entry) *controlPlane {
	t.Helper()
	c := &controlPlane{world: m.world.cloneWith(t, files), site: m.site, starts: slices.Clone(m.starts), started: m.started, learner: m.learner, inits: slices.Clone(m.inits),
		own: m.own, restarts: slices.Clone(m.restarts)}
	c.KubeadmInit, c.DialOther, c.RefuseDial, c.Listen, c.CtrRun = c.kubeadm, c.dial, c.refused, m.Listen, c.etcdutl
	c.others = map[string]*fakeMember{}
	for address, f := range m.others {
		c.others[address] = f.clone(t, m.site.Credentials.Keys.EtcdCA, c.ClusterTime)
	}
	return c
}

func (f *fakeMember) clone(t *testing.T, etcdCA configs.KeyPair, now func() time.Time) *fakeMember {
	c := newFakeMember(t, etcdCA, now)
	f.mu.Lock()
	defer f.mu.Unlock()
	c.state, c.permit, c.quorum, c.active, c.counts, c.next = f.state, f.permit, f.quorum, f.active, f.counts, f.next
	for _, m := range f.members {
		c.members = append(c.members, maps.Clone(m))
	}
	return c
}

func (m *controlPlane) snapshot(t *testing.T, files []worldtest.Entry) [32]byte {
	w := m.world.Fingerprint(t, files)
	all := fmt.Append(w[:], m.starts, m.started, m.learner)
	for _, address := range slices.Sorted(maps.Keys(m.others)) {
		all = fmt.Append(all, m.others[address].members) // fmt sorts the keys of maps
	}
	return sha256.Sum256(all)
}

func (m *controlPlane) stampSite(s *configs.Site) {
	m.T.Helper()
	text, err := configs.EncodeSlot(s)
	if err != nil {
		m.T.Fatal(err)
	}
	m.Stamp(worldtest.SlotDevice, string(text))
}

func parsePair(t *testing.T, p configs.KeyPair) (*x509.Certificate, crypto.Signer) {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(p.Cert), []byte(p.Key.Reveal()))
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf, pair.PrivateKey.(crypto.Signer)
}

func newFakeMember(t *testing.T, etcdCA configs.KeyPair, now func() time.Time) *fakeMember {
	f := &fakeMember{next: 100}
	ca, key := parsePair(t, etcdCA)
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	conf := &tls.Config{ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}
	worldtest.RenewedCertificate(conf, now, func(from, until time.Time) tls.Certificate {
		return worldtest.IssueFor(t, ca, key, "etcd", []string{"127.0.0.1", "192.0.2.11", "192.0.2.12", "192.0.2.13"}, from, until)
	})
	f.server = worldtest.Serve(t, &http.Server{Handler: f, TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)})
	return f
}

func (f *fakeMember) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	worldtest.BreakKeptAlive(r, func(string) error {
		if f.state == etcdmember.Silent {
			return errors.New("no route to host")
		}
		return nil
	})
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	var asked struct {
		ID       string
		PeerURLs []string `json:"peerURLs"`
		Action   string
		Alarm    string
	}
	_ = json.NewDecoder(r.Body).Decode(&asked)
	find := func() int {
		return slices.IndexFunc(f.members, func(m map[string]any) bool { return m["ID"] == asked.ID })
	}
	switch {
	case f.state == etcdmember.Blank:
		etcdmember.ServeBlank(etcdmember.BlankAnswer(f.permit, false), func() bool { return true }).ServeHTTP(w, r)
	case f.state == etcdmember.Spent:
		etcdmember.ServeBlank(etcdmember.BlankAnswer(f.permit, true), func() bool { return true }).ServeHTTP(w, r)
	case r.URL.Path == "/members" && f.state == etcdmember.Leaderless:
		answer([]any{map[string]any{"name": "m2"}})
	case r.URL.Path == "/members":
		answer([]any{map[string]any{"id": uint64(12345678901234567890), "name": "m2", "clientURLs": []string{"https://192.0.2.12:2379"}}, map[string]any{"id": f.counts}})
	case !f.quorum:
		http.Error(w, `{"message":"etcdserver: request timed out"}`, http.StatusServiceUnavailable)
	case r.URL.Path == "/metrics":
		fmt.Fprintf(w, "etcd_network_active_peers{Local=\"2\",Remote=\"3\"} 1\netcd_network_active_peers{Local=\"2\",Remote=\"%s\"} 1\n", f.active)
	case r.URL.Path == "/v3/maintenance/snapshot":
		sum := sha256.Sum256([]byte(f.snapshot))
		all := append([]byte(f.snapshot), sum[:]...)
		if f.short {
			all = all[:len(all)-9]
		}
		for chunk := range slices.Chunk(all, 5) {
			answer(map[string]any{"result": map[string]any{"blob": chunk}})
		}
	case r.URL.Path == "/v3/maintenance/status":
		all := map[string]any{"header": map[string]any{"member_id": f.id, "revision": "9"}, "leader": "1", "dbSize": "20480", "dbSizeInUse": "16384"}
		for k, v := range f.status {
			all[k] = v
		}
		answer(all)
	case r.URL.Path == "/v3/maintenance/alarm" && asked.Action == "GET":
		answer(map[string]any{"alarms": f.alarms})
	case r.URL.Path == "/v3/maintenance/alarm":
		f.asked = append(f.asked, asked.Action+" "+asked.Alarm)
		f.alarms = nil
		answer(map[string]any{})
	case r.URL.Path == "/v3/kv/compaction", r.URL.Path == "/v3/maintenance/defragment":
		f.asked = append(f.asked, filepath.Base(r.URL.Path))
		if filepath.Base(r.URL.Path) == "defragment" && f.status != nil {
			f.status["dbSize"] = f.status["dbSizeInUse"]
		}
		answer(map[string]any{})
	case r.URL.Path == "/v3/cluster/member/list":
		answer(map[string]any{"header": map[string]any{"cluster_id": "77"}, "members": f.members})
	case r.URL.Path == "/v3/cluster/member/add":
		f.next++
		m := map[string]any{"ID": fmt.Sprint(f.next), "peerURLs": asked.PeerURLs, "isLearner": true}
		f.members = append(f.members, m)
		answer(map[string]any{"member": m})
	case find() < 0:
		http.Error(w, `{"message":"etcdserver: member not found"}`, http.StatusNotFound)
	case r.URL.Path == "/v3/cluster/member/remove":
		f.members = slices.Delete(f.members, find(), find()+1)
		answer(map[string]any{})
	case r.URL.Path == "/v3/cluster/member/promote":
		delete(f.members[find()], "isLearner")
		answer(map[string]any{})
	default:
		http.NotFound(w, r)
	}
}

// dial connects to the other control-plane nodes, and to this machine's own servers.
func (m *controlPlane) dial(ctx context.Context, addr string) (net.Conn, error, bool) {
	host, port, _ := net.SplitHostPort(addr)
	forced := strings.Contains(m.started, controlplane.ForceNewCluster)
	if addr == "127.0.0.1:2379" || addr == "192.0.2.11:2379" {
		if m.started == "" || forced && host != "127.0.0.1" {
			return nil, errors.New("connection refused"), true
		}
		conn, err := m.own.server.Dial(ctx, addr)
		return conn, err, true
	}
	if f := m.others[host]; f != nil && (port == "2379" || port == "2380") {
		f.mu.Lock()
		silent := f.state == etcdmember.Silent
		f.mu.Unlock()
		if silent {
			return nil, errors.New("no route to host"), true
		}
		conn, err := f.server.Dial(ctx, addr)
		return conn, err, true
	}
	if err, ours := m.refused(addr); err != nil {
		return nil, err, true
	} else if ours {
		conn, err := m.Cluster.Dial(ctx, addr)
		return conn, err, true
	}
	return nil, nil, false
}

// refused returns the error of a connection to this machine's own API server.
func (m *controlPlane) refused(addr string) (err error, ours bool) {
	if addr != "192.0.2.11:6443" && !strings.HasPrefix(addr, "apiserver.cluster.local:") {
		return nil, false
	}
	if err := m.kubelet(); err != nil {
		return err, true
	}
	return m.Cluster.DialError(addr), true
}

// kubelet starts the pods in kubelet's directory, as kubelet would have done meanwhile. It
// returns an error unless the API server answers.
func (m *controlPlane) kubelet() error {
	refused := errors.New("connection refused")
	if m.Units[ondisk.UnitKubelet] != "active" {
		return refused
	}
	pod, err := os.ReadFile(m.HostPath(controlplane.EtcdManifest))
	if err != nil || len(pod) == 0 {
		return refused
	}
	if m.started != "" && m.started != string(pod) { // it restarts the pod
		m.restarts = append(m.restarts, strings.TrimSpace(string(pod)))
		m.started = string(pod)
	}
	if m.started == "" {
		m.started = string(pod)
		if !m.Has("/var/lib/etcd/member/wal/0.wal") {
			if m.Has(controlplane.EtcdMember) {
				m.T.Error("etcd was started on the rest of an old database, and would never become ready")
			}
			m.starts = append(m.starts, strings.TrimSpace(string(pod)))
			if note := controlplane.ReadMembership(m.Env()); note.Cluster != m.site.ControlPlane.ID {
				m.T.Errorf("etcd was bootstrapped on a disk that has the record %+v", note)
			}
			m.Put("/var/lib/etcd/member/wal/0.wal", "")
			m.learner = strings.Contains(string(pod), "existing")
		}
	}
	for _, f := range m.others {
		f.mu.Lock()
		for _, o := range f.members {
			if urls, ok := o["peerURLs"].([]string); ok && slices.Contains(urls, "https://192.0.2.11:2380") && o["isLearner"] == nil {
				m.learner = false
			}
		}
		f.mu.Unlock()
	}
	if m.learner {
		return refused
	}
	for _, p := range controlplane.Pods {
		if b, err := os.ReadFile(filepath.Join(m.Root, p)); err != nil || len(b) == 0 {
			return refused
		}
	}
	if cert, err := member.LoadPair(m.Env(), member.PKIDir+"/apiserver.crt", member.PKIDir+"/apiserver.key"); err == nil && m.Now.Before(cert.NotBefore) {
		return errors.New("its certificate is not valid yet")
	}
	conf, err := os.ReadFile(filepath.Join(m.Root, ondisk.KubeletConf))
	if err != nil || len(conf) == 0 {
		return nil
	}
	if !m.Has(member.ClientCert) {
		pem := member.KubeletPKI + "/kubelet-client-2026-11-20-10-00-00.pem"
		m.PutUnsynced(pem, m.Cluster.Client("system:node:m1", m.Now.AddDate(1, 0, 0)))
		if err := os.Symlink(pem, filepath.Join(m.Root, member.ClientCert)); err != nil {
			return err
		}
	}
	return nil
}

func (m *controlPlane) on() {
	m.T.Helper()
	m.started = ""
	m.PowerOn()
	// kubelet starts before first boot has checked anything.
	if err := m.kubelet(); m.started != "" {
		m.T.Errorf("etcd can start at a boot before first boot has decided that it may (%v)", err)
	}
}

// kubeadm changes the disk and the cluster like the phases of kubeadm init.
func (m *controlPlane) kubeadm(c machine.Cmd) error {
	args, confDir := c.Args[3:len(c.Args)-2], ondisk.KubernetesDir
	if i := slices.Index(args, "--kubeconfig-dir"); i > 0 {
		args, confDir = args[:i], args[i+1]
	}
	args, quiet := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return a == "--skip-token-print" }), slices.Contains(args, "--skip-token-print")
	phase := strings.Join(args, " ")
	m.inits = append(m.inits, phase)
	conf := m.Get(c.Args[len(c.Args)-1])
	pki := member.PKIDir
	if _, dir, ok := strings.Cut(conf, "certificatesDir: "); ok {
		dir, _, _ = strings.Cut(dir, "\n")
		pki = strings.Trim(dir, `"`)
	}
	write := func(p, data string) error {
		if err := m.Effect("kubeadm writes " + p); err != nil {
			return err
		}
		m.PutUnsynced(p, data)
		return nil
	}
	need := func(p string) string {
		b, err := os.ReadFile(filepath.Join(m.Root, p))
		if err != nil {
			m.T.Errorf("kubeadm %s ran without %s", phase, p)
		}
		return string(b)
	}
	switch phase {
	case "certs all":
		for _, l := range controlplane.Leaves {
			if err := m.leaf(l, pki, write, need); err != nil {
				return err
			}
		}
	case "kubeconfig all":
		for _, f := range slices.Insert(slices.Clone(controlplane.Confs), 2, ondisk.KubeletConf) {
			to := confDir + "/" + filepath.Base(f)
			if b, err := os.ReadFile(filepath.Join(m.Root, to)); err == nil {
				if _, err := kubeapi.ParseKubeconfig(b); err != nil {
					fmt.Fprintf(c.Output, "error execution phase kubeconfig: %v\n", errHalf)
					return errHalf
				}
				continue
			}
			cn := strings.TrimSuffix(filepath.Base(f), ".conf")
			if f == ondisk.KubeletConf {
				cn = "system:node:m1"
			}
			pair := m.Cluster.ClientFrom(cn, m.Cluster.CA.NotBefore, m.certUntil()) // like kubeadm's, they start when their CA does
			text, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: "https://192.0.2.11:6443", CAData: base64.StdEncoding.EncodeToString([]byte(need(pki + "/ca.crt")))},
				kubeapi.User{CertData: base64.StdEncoding.EncodeToString([]byte(pair)), KeyData: base64.StdEncoding.EncodeToString([]byte(pair))})
			if err != nil {
				return err
			}
			if err := write(to, string(text)); err != nil {
				return err
			}
		}
	case "etcd local":
		if m.Has("/var/lib/etcd/member/wal/0.wal") {
			if strings.Contains(conf, controlplane.ForceNewCluster) {
				if !strings.Contains(conf, `value: "https://127.0.0.1:2379"`) {
					m.T.Errorf("other nodes can join while etcd still runs with --force-new-cluster, and would drop them at its next start:\n%s", conf)
				}
				return write(controlplane.EtcdManifest, "--"+controlplane.ForceNewCluster+"=true\n")
			}
			return write(controlplane.EtcdManifest, "has data\n")
		}
		var state string
		state, m.clusterToken = etcdState(m.T, conf)
		return write(controlplane.EtcdManifest, state)
	case "control-plane all":
		for _, p := range controlplane.Pods {
			_, version, _ := strings.Cut(conf, "kubernetesVersion: ")
			version, _, _ = strings.Cut(version, "\n")
			pod := "kind: Pod\nmetadata: {name: " + filepath.Base(p) + "}\n# version: " + strings.Trim(version, `"`) + "\n"
			for _, v := range c.Env { // kubeadm copies its own variables into the pods
				if name, _, _ := strings.Cut(v, "="); strings.HasSuffix(name, "_PROXY") {
					pod += "# env: " + v + "\n"
				}
			}
			if err := write(p, pod); err != nil {
				return err
			}
		}
	case "kubelet-start":
		if err := errors.Join(write(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\"--node-ip=192.0.2.11\"\n"), write(ondisk.KubeletConfig, "kind: KubeletConfiguration\n")); err != nil {
			return err
		}
		m.Units[ondisk.UnitKubelet], m.world.Started[ondisk.UnitKubelet], m.KubeletLastActive, m.Unregistered = "active", m.Now, m.Now, true
	case "upload-config all", "addon kube-proxy", "addon coredns":
		if strings.Contains(conf, "initial-cluster") {
			m.T.Errorf("%s uploads arguments of one member of etcd:\n%s", phase, conf)
		}
		uploads := map[string][]string{"upload-config all": {"ClusterConfiguration", "kubelet"}, "addon kube-proxy": {"config.conf"}}
		for _, key := range uploads[phase] { // kubeadm-config is changed, others are replaced
			if err := m.Effect("kubeadm uploads " + key); err != nil {
				return err
			}
			m.Cluster.Mu.Lock()
			if m.Cluster.Annotations == nil {
				m.Cluster.Annotations, m.Cluster.UploadedConfigs = map[string]string{}, map[string]string{}
			}
			m.Cluster.UploadedConfigs[key] = conf
			if _, proxy, ok := strings.Cut(conf, "kind: KubeProxyConfiguration\n"); ok && key == "config.conf" {
				m.Cluster.UploadedConfigs[key], _, _ = strings.Cut(proxy, "\n---")
			}
			m.Cluster.Mu.Unlock()
		}
	case "bootstrap-token":
		if !strings.Contains(conf, "ttl: \"1m0s\"") {
			m.T.Errorf("a bootstrap token without an expiry:\n%s", conf)
		}
		_, token, _ := strings.Cut(conf, "token: ")
		token, _, _ = strings.Cut(token, "\n")
		if m.publishToken = strings.Trim(token, `"`); !quiet {
			fmt.Fprintf(c.Output, "[bootstrap-token] Using token: %s\n", m.publishToken)
		}
		if err := m.Effect("kubeadm publishes cluster-info"); err != nil {
			return err
		}
		m.Cluster.Mu.Lock()
		m.Cluster.NoClusterInfo = false
		readable := len(m.Cluster.CreatedRBAC) == 2
		m.Cluster.Mu.Unlock()
		if !readable {
			m.T.Errorf("cluster-info was created before its RBAC rule: after a power cut now, nodes could not read it")
		}
	case "mark-control-plane":
		m.Cluster.Mu.Lock()
		m.Cluster.Nodes["m1"].Metadata.Labels[controlplane.Label] = ""
		m.Cluster.Mu.Unlock()
	case "kubelet-finalize all":
		text, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: "https://192.0.2.11:6443", CAData: base64.StdEncoding.EncodeToString([]byte(need(ondisk.KubeCA)))},
			kubeapi.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
		if err != nil {
			return err
		}
		return write(ondisk.KubeletConf, string(text))
	default:
		m.T.Errorf("kubeadm %s", phase)
	}
	return nil
}

// etcdState returns initial-cluster-state, derived from the members in
// initial-cluster, and initial-cluster-token.
func etcdState(t *testing.T, conf string) (state, token string) {
	t.Helper()
	dec := yaml.NewDecoder(strings.NewReader(conf))
	for {
		var c struct {
			Kind string
			Etcd struct {
				Local struct {
					ImageTag  string                         `yaml:"imageTag"`
					ExtraArgs []struct{ Name, Value string } `yaml:"extraArgs"`
				}
			}
		}
		if err := dec.Decode(&c); err != nil {
			t.Fatalf("no arguments of etcd in\n%s", conf)
		}
		if c.Kind != "ClusterConfiguration" {
			continue
		}
		out := c.Etcd.Local.ImageTag
		for _, a := range c.Etcd.Local.ExtraArgs {
			if a.Name == "initial-cluster-token" {
				token = a.Value
			} else {
				out += " " + a.Value
			}
		}
		return out + "\n", token
	}
}

// certUntil returns the end of a certificate that kubeadm makes now.
func (m *controlPlane) certUntil() time.Time {
	until := m.Now.AddDate(1, 0, 0)
	if m.certTime != 0 {
		until = m.Now.Add(m.certTime)
	}
	if !m.certEnd.IsZero() && m.certEnd.Before(until) {
		return m.certEnd
	}
	return until
}

// leaf makes a certificate if it is missing. An existing one counts as valid.
func (m *controlPlane) leaf(l controlplane.Leaf, dir string, write func(p, data string) error, need func(string) string) error {
	cert, key := dir+"/"+l.Base+".crt", dir+"/"+l.Base+".key"
	if m.Has(cert) {
		return nil
	}
	pair, err := tls.X509KeyPair([]byte(need(dir+"/"+l.CA+".crt")), []byte(need(dir+"/"+l.CA+".key")))
	if err != nil {
		return err
	}
	// The same request gets the same certificate, as with the cluster's clients.
	until := m.certUntil()
	made, _ := m.Cluster.Issued.LoadOrStore(fmt.Sprint(l.Base, m.Now, until), sync.OnceValue(func() string {
		return worldtest.PairPEM(m.T, worldtest.IssueFor(m.T, pair.Leaf, pair.PrivateKey.(crypto.Signer), l.Base,
			[]string{"apiserver.cluster.local", "192.0.2.11", "192.0.2.12", "192.0.2.13", "10.103.97.2"}, m.Now.Add(-worldtest.Backdate), until))
	}))
	both := made.(func() string)()
	i := strings.Index(both, "-----BEGIN PRIVATE KEY")
	if err := write(key, both[i:]); err != nil {
		return err
	}
	return write(cert, both[:i])
}

// keysOnlyInPlace checks that the cluster's keys are only in their proper files.
func (m *controlPlane) keysOnlyInPlace() {
	m.T.Helper()
	lines := m.keyLines()
	for _, f := range m.Files() {
		for name, line := range lines {
			if own := f.Path == member.PKIDir+"/"+name; f.Mode.IsRegular() && bytes.Contains(f.Data, []byte(line)) != own {
				m.T.Errorf("%s in %s: %v", name, f.Path, !own)
			}
		}
	}
	slot := bytes.Join(m.Slots[worldtest.SlotDevice].Pages, nil)
	for name, line := range lines {
		if bytes.Contains(slot, []byte(line)) {
			m.T.Errorf("the slot still has %s", name)
		}
	}
	m.keysUnsaid()
	for what, packed := range map[string]configs.Secret{"tokens": m.site.Credentials.Keys.Objects, "manifests": m.site.Credentials.Keys.Manifests} {
		text := packed.Reveal()
		if len(text) < 100 {
			m.T.Fatalf("the Site had no %s: %q", what, text)
		}
		if begin := text[40:100]; bytes.Contains(slot, []byte(begin)) {
			m.T.Errorf("the slot still has the %s", what)
		}
	}
}

// keysUnsaid checks that no output so far contains the cluster's keys.
func (m *controlPlane) keysUnsaid() {
	m.T.Helper()
	said := m.Log.String() + strings.Join(m.Console, "\n")
	for name, line := range m.keyLines() {
		if strings.Contains(said, line) {
			m.T.Errorf("%s was printed", name)
		}
	}
}

// keyLines returns one line of each of the cluster's keys, by the name of the key's file.
func (m *controlPlane) keyLines() map[string]string {
	keys, lines := m.site.Credentials.Keys, map[string]string{}
	for name, key := range map[string]configs.Secret{"ca.key": keys.CA.Key, "etcd/ca.key": keys.EtcdCA.Key, "front-proxy-ca.key": keys.FrontProxyCA.Key, "sa.key": keys.ServiceAccount} {
		lines[name] = strings.Split(key.Reveal(), "\n")[1]
	}
	return lines
}

func (m *controlPlane) bootDone() {
	m.T.Helper()
	if err := m.boot(); err != nil {
		m.T.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	if s := m.State(); s.Result != ondisk.ResultDone {
		m.T.Errorf("result %s", s.Result)
	}
	m.ends()
}

// ends simulates the end of first boot: systemd removes its directory in /run, and
// kubelet stops the pods whose manifest is gone.
func (m *controlPlane) ends() {
	m.T.Helper()
	if err := os.RemoveAll(filepath.Join(m.Root, ondisk.RunDir)); err != nil {
		m.T.Fatal(err)
	}
	if err := m.kubelet(); err != nil || !controlplane.Decided(m.Env()) {
		m.T.Errorf("etcd stopped when first boot ended: %v", err)
	}
}

func TestSoleMasterBootstraps(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	if want := []string{"3.6.8-0 m1=https://192.0.2.11:2380 new"}; !slices.Equal(m.starts, want) {
		t.Errorf("etcd was started as %q, want %q", m.starts, want)
	}
	if want := []string{"certs all", "kubeconfig all", "etcd local", "control-plane all", "kubelet-start", "upload-config all", "addon kube-proxy", "addon coredns", "bootstrap-token", "mark-control-plane", "kubelet-finalize all"}; !slices.Equal(m.inits, want) {
		t.Errorf("kubeadm ran %q", m.inits)
	}
	if len(m.Cluster.CreatedSecrets) != 1 || !strings.Contains(m.Cluster.CreatedSecrets[0], "bootstrap-token-") {
		t.Errorf("objects: %q", m.Cluster.CreatedSecrets)
	}
	// etcd's IDs differ from those of another bootstrap with the same keys.
	if want := etcdmember.Token(m.site.ControlPlane.ID, m.site.ControlPlane.BootstrapEnd().UTC().Format(time.RFC3339)); m.clusterToken != want {
		t.Errorf("initial-cluster-token is %q, want %q", m.clusterToken, want)
	}
	if hosts := m.Get("/etc/hosts"); !strings.Contains(hosts, "192.0.2.11\tapiserver.cluster.local") {
		t.Errorf("the endpoint does not lead to this machine:\n%s", hosts)
	}
	m.keysOnlyInPlace()
	if m.publishToken == "" || strings.Contains(m.Log.String()+strings.Join(m.Console, "\n"), m.publishToken) {
		t.Errorf("the token that the cluster was published with, %q, is in the journal", m.publishToken)
	}

	// The next boot starts etcd with the existing data, and publishes nothing.
	m.inits = nil
	m.on()
	m.bootDone()
	if want := []string{"etcd local"}; !slices.Equal(m.inits, want) || len(m.starts) != 1 || len(m.Cluster.CreatedSecrets) != 1 {
		t.Errorf("again: kubeadm ran %q; etcd was started as %q", m.inits, m.starts)
	}
	golden(t, "controlplane.again.console", strings.Join(m.Console, "\n")+"\n")
}

// TestProxyOfTheControlPlane checks that a corrected proxy reaches the control plane's pods,
// through kubeadm, and that requests of the API server within the cluster bypass it.
func TestProxyOfTheControlPlane(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	site := *m.site
	for _, proxy := range []string{"", "http://192.0.2.99:3128", "http://192.0.2.98:3128", ""} {
		site.Network.Proxy.HTTPS = configs.NewSecret(proxy)
		m.stampSite(&site)
		m.on()
		m.bootDone()
		for _, p := range controlplane.Pods {
			pod := m.Get(p)
			if strings.Contains(pod, "_PROXY") != (proxy != "") || !strings.Contains(pod, proxy) {
				t.Errorf("with the proxy %q, %s is\n%s", proxy, p, pod)
			}
			for _, direct := range []string{"10.244.0.0/16", "10.96.0.0/16", "10.0.0.0/8", ".cluster.local", "192.0.2.11"} {
				if proxy != "" && !strings.Contains(pod, ","+direct+",") && !strings.Contains(pod, ","+direct+"\n") {
					t.Errorf("%s is reached through the proxy\n%s", direct, pod)
				}
			}
		}
	}
	m.inits = nil
	m.on()
	m.bootDone()
	if want := []string{"etcd local"}; !slices.Equal(m.inits, want) {
		t.Errorf("with the same proxy kubeadm ran %q", m.inits)
	}
}

// TestReflashedMasterStops checks that a control-plane node that was flashed again with the same
// Site, after the end of its bootstrap permit, does not bootstrap again.
func TestReflashedMasterStops(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		masters int
		others  etcdmember.PeerState
		late    bool
		says    string
	}{
		"sole, late":                 {1, 0, true, "the bootstrap permit has expired (2026-11-27T09:00:00Z; this machine's clock shows 2026-11-28)"},
		"all of them, late":          {3, etcdmember.Blank, true, "the bootstrap permit has expired"},
		"the others without quorum":  {3, etcdmember.InUse, false, "has no quorum"},
		"the others without, late":   {3, etcdmember.InUse, true, "has no quorum"},
		"the others are silent":      {3, etcdmember.Silent, false, ""},
		"the others are silent, too": {3, etcdmember.Silent, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, tt.masters))
			if tt.late {
				m.Now = m.Now.Add(200 * time.Hour)
			}
			for _, f := range m.others {
				f.state = tt.others
			}
			err := m.boot()
			if err == nil || len(m.starts) > 0 || m.Has(controlplane.EtcdManifest) {
				t.Fatalf("%v, etcd was started as %q", err, m.starts)
			}
			if tt.says != "" && (!m.ConsoleHas("FAILED etcd-start") || !m.ConsoleHas(tt.says)) || tt.says == "" && !m.ConsoleHas("no answer yet from") {
				t.Errorf("console:\n%s", strings.Join(m.Console, "\n"))
			}
		})
	}
}

// TestReplacedMasterJoins checks that a control-plane node with a blank disk joins a cluster with a
// quorum. Its former membership is removed, and the new member has no vote until it has caught up.
func TestReplacedMasterJoins(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Now = m.Now.Add(200 * time.Hour)
	m.Cluster.NoClusterInfo = false
	f := m.quorum()
	m.bootDone()
	if want := []string{"3.6.8-0 m1=https://192.0.2.11:2380,m2=https://192.0.2.12:2380,m3=https://192.0.2.13:2380 existing"}; !slices.Equal(m.starts, want) {
		t.Errorf("etcd was started as %q, want %q", m.starts, want)
	}
	if own := f.members[2]; own["ID"] != "101" || own["isLearner"] != nil {
		t.Errorf("members: %v", f.members)
	}
	if slices.Contains(m.inits, "bootstrap-token") || slices.Contains(m.inits, "addon kube-proxy") {
		t.Errorf("a cluster that is in use was published again: %q", m.inits)
	}
	m.keysOnlyInPlace()
}

// lived puts etcd's data of a cluster on the disk.
func (m *controlPlane) lived(cluster string) {
	m.T.Helper()
	m.Put("/var/lib/etcd/member/wal/0.wal", "")
	m.Put(controlplane.MembershipFile, fmt.Sprintf(`{"version":1,"cluster":%q}`, cluster))
}

// rejected creates the files of a start that etcd has rejected: a database without a log.
func (m *controlPlane) rejected() {
	m.T.Helper()
	m.Put("/var/lib/etcd/member/snap/db", "nothing")
}

// quorum makes m2 answer for a cluster of all three.
func (m *controlPlane) quorum() *fakeMember {
	f := m.others["192.0.2.12"]
	f.state, f.quorum, f.id = etcdmember.InUse, true, "2"
	f.members = []map[string]any{
		{"ID": "1", "name": "m1", "peerURLs": []string{"https://192.0.2.11:2380"}},
		{"ID": "2", "name": "m2", "peerURLs": []string{"https://192.0.2.12:2380"}},
		{"ID": "3", "name": "m3", "peerURLs": []string{"https://192.0.2.13:2380"}},
	}
	return f
}

// TestForeignEtcdIsNotServed checks that data of another cluster, and data without a record of its
// cluster, is never served.
func TestForeignEtcdIsNotServed(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ cluster, says string }{
		"another's":  {"another", "belongs to another cluster (ID another) than the Site"},
		"nobody's":   {"", "no record of its cluster"},
		"the Site's": {"own", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 1))
			m.lived(strings.ReplaceAll(tt.cluster, "own", m.site.ControlPlane.ID))
			err := m.boot()
			if served := m.Has(controlplane.EtcdManifest); served != (tt.says == "") || (err == nil) != served || !m.ConsoleHas(tt.says) {
				t.Errorf("%v, served: %v\n%s", err, served, strings.Join(m.Console, "\n"))
			}
		})
	}
}

// TestLivingMemberIsNotReplaced checks two machines with the same Site. The second takes over the
// membership of the first only if the first is not running.
func TestLivingMemberIsNotReplaced(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		node, active, renews bool
		joins                bool
	}{
		"etcd is in touch with it":        {active: true},
		"its kubelet renews the lease":    {node: true, renews: true},
		"both":                            {node: true, active: true, renews: true},
		"its lease stays as it is":        {node: true, joins: true},
		"it never had a Node, and is off": {joins: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Cluster.NoClusterInfo = false
			f := m.quorum()
			if tt.active {
				f.active = "1"
			}
			if tt.node {
				m.Cluster.Register("m1", "", "00000000000000000000000000000001")
			}
			if tt.renews {
				m.Cluster.LeaseRenewTime = func() string { return m.Now.Format(time.RFC3339Nano) }
			}
			err := m.boot()
			own := f.members[0]["ID"] == "1"
			if own == tt.joins || tt.joins == (len(m.starts) == 0) || !tt.joins && (err == nil || !m.ConsoleHas("another machine runs with this machine's Site")) {
				t.Errorf("%v; members %v, etcd was started as %q\n%s", err, f.members, m.starts, strings.Join(m.Console, "\n"))
			}
		})
	}
}

// TestDeadLearner checks that a learner whose machine died before its etcd started does not block
// others forever. A learner that is starting, or has started, blocks them, and the message has a
// fix.
func TestDeadLearner(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		named, active bool
		says          string
	}{
		"it never started":        {},
		"it is at work":           {active: true, says: "another control-plane node (https://192.0.2.13:2380) is joining; to fix: switch it on"},
		"it has started and died": {named: true, says: "etcdctl member remove 63"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Cluster.NoClusterInfo = false
			f := m.quorum()
			f.members = append(f.members[:2], map[string]any{"ID": "99", "peerURLs": []string{"https://192.0.2.13:2380"}, "isLearner": true})
			if tt.named {
				f.members[2]["name"] = "m3"
			}
			if tt.active {
				f.active = "63"
			}
			m.Patience = 45 * time.Minute
			began := m.Now
			err := m.boot()
			left := slices.ContainsFunc(f.members, func(o map[string]any) bool { return o["ID"] == "99" })
			if left != (tt.says != "") || (err == nil) == left || (len(m.starts) == 1) == left || !m.ConsoleHas(tt.says) {
				t.Errorf("%v, etcd was started as %q, members %v\n%s", err, m.starts, f.members, strings.Join(m.Console, "\n"))
			}
			if waited := m.Now.Sub(began); !left && waited < etcdmember.LearnerTimeout {
				t.Errorf("the dead learner was removed after %s", waited)
			}
		})
	}
}

// TestRemovedMasterStops checks a machine whose member was removed while it was off. Its data is
// useless, and a person must decide.
func TestRemovedMasterStops(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.lived(m.site.ControlPlane.ID)
	f := m.others["192.0.2.13"]
	f.state, f.quorum = etcdmember.InUse, true
	f.members = []map[string]any{{"ID": "3", "name": "m3", "peerURLs": []string{"https://192.0.2.13:2380"}}}
	if err := m.boot(); err == nil || !m.ConsoleHas("was removed from etcd") || len(m.inits) > 2 {
		t.Errorf("%v, kubeadm ran %q\n%s", err, m.inits, strings.Join(m.Console, "\n"))
	}
}

// TestMasterRenewsCertificates checks that certificates that are damaged, lack a name or end soon
// are made again; kubelet's is made again after a year without power.
func TestMasterRenewsCertificates(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, spoil := range map[string]func(m *controlPlane) []string{
		"a key is empty": func(m *controlPlane) []string {
			m.Put(member.PKIDir+"/etcd/server.key", "")
			return []string{"certs all", "kubeconfig all", "etcd local"}
		},
		"half a kubeconfig": func(m *controlPlane) []string {
			m.Put(controlplane.SuperAdminConf, "apiVersion: v1\nkind: Conf")
			return []string{"certs all", "kubeconfig all", "etcd local"}
		},
		"eight months later": func(m *controlPlane) []string {
			m.Now = m.Now.AddDate(0, 8, 0)
			return []string{"certs all", "kubeconfig all", "etcd local"}
		},
		"370 days later": func(m *controlPlane) []string {
			m.Now = m.Now.AddDate(0, 0, 370)
			return []string{"certs all", "kubeconfig all", "etcd local", "kubelet-finalize all"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			want := spoil(m)
			m.inits = nil
			m.on()
			m.bootDone()
			if !slices.Equal(m.inits, want) {
				t.Errorf("kubeadm ran %q, want %q", m.inits, want)
			}
			if bad := controlplane.BadCredentials(m.Env(), m.site); len(bad) > 0 || m.Has(controlplane.RenewalDir) {
				t.Errorf("still bad: %d, and %s is there: %v", len(bad), controlplane.RenewalDir, m.Has(controlplane.RenewalDir))
			}
		})
	}
}

// TestMasterRunsForYears checks that no certificate expires on a machine that runs for years, and
// that the control plane uses the renewed certificates.
func TestMasterRunsForYears(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	if m.Units[ondisk.UnitAgain] != "active" {
		t.Fatal("the timer that runs first boot again is not active")
	}
	pods := m.Get(controlplane.Pods[1])
	m.inits = nil
	for range 26 { // the timer runs for 780 days
		m.Now = m.Now.AddDate(0, 0, 30)
		m.KubeletLastActive = m.Now
		if at, err := os.Readlink(filepath.Join(m.Root, member.ClientCert)); err != nil {
			t.Fatal(err)
		} else {
			m.PutUnsynced(at, m.Cluster.Client("system:node:m1", m.Now.AddDate(1, 0, 0))) // kubelet renews its own certificate
		}
		m.bootDone()
		for _, l := range controlplane.Leaves {
			cert, err := member.LoadPair(m.Env(), member.PKIDir+"/"+l.Base+".crt", member.PKIDir+"/"+l.Base+".key")
			if err != nil || m.Now.AddDate(0, 0, 30).After(cert.NotAfter) {
				t.Fatalf("%s on %s: %v", l.Base, m.Now, err)
			}
		}
		if len(m.inits) > 0 {
			if now := m.Get(controlplane.Pods[1]); now == pods || !strings.Contains(now, "name: kube-controller-manager.yaml") {
				t.Fatalf("the controller manager still has its old certificate:\n%s", now)
			} else {
				pods = now
			}
			if !slices.Equal(m.inits, []string{"certs all", "kubeconfig all"}) || len(m.restarts) > 0 {
				t.Fatalf("kubeadm ran %q, etcd was restarted %q", m.inits, m.restarts)
			}
			m.inits = nil
		} else if m.Get(controlplane.Pods[1]) != pods {
			t.Fatal("a pod was restarted without need")
		}
	}
}

// TestRestartOutlastsAKill checks that if first boot is killed right after it renewed certificates,
// the next run restarts the programs that still use the former ones.
func TestRestartOutlastsAKill(t *testing.T) {
	t.Parallel()
	const restart = "restart " + ondisk.UnitKubelet
	sites := mintedSites(t, 1)
	for name, tt := range map[string]struct {
		days int
		at   []string // first boot is killed once at each
	}{
		"pods":                    {240, []string{"write " + controlplane.Pods[1]}},
		"pods, kubelet's expired": {370, []string{"write " + controlplane.Pods[1]}},
		"kubelet":                 {370, []string{restart}},
		"twice":                   {370, []string{"write " + controlplane.Pods[1], restart}},
		"its mark is still there": {370, []string{"remove " + controlplane.PodsRestart}},
		"halfway through them":    {370, []string{"kubeadm writes " + controlplane.Renewed(controlplane.Confs[3]), restart}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			pods := m.Get(controlplane.Pods[1])
			m.Now = m.Now.AddDate(0, 0, tt.days)
			renewed := m.Now
			for _, at := range tt.at {
				m.Effects, m.EffectNames = 0, nil
				m.BeforeEffect = func(effect string) {
					if effect == at {
						m.PowerCutAt = 1
					}
				}
				if err := m.boot(); err == nil || m.EffectNames[len(m.EffectNames)-1] != at {
					t.Fatalf("%v: it was not killed at %s: %q", err, at, m.EffectNames)
				}
				m.BeforeEffect, m.PowerCutAt = nil, 0
			}
			m.bootDone()
			if m.Get(controlplane.Pods[1]) == pods {
				t.Error("the controller manager still has its old certificate")
			}
			if started := m.world.Started[ondisk.UnitKubelet]; started.Before(renewed) != (tt.days < 365) {
				t.Errorf("kubelet was started on %s, its certificate is another since %s", started, renewed)
			}
			if m.Has(controlplane.PodsRestart) {
				t.Error("a pod was restarted once more")
			}
		})
	}
}

// TestSnapshots checks that one snapshot is made a day, and a limited number is kept.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	saved := func() []controlplane.SavedSnapshot {
		all, err := controlplane.Snapshots(m.Env())
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	if all := saved(); len(all) != 1 || !strings.HasPrefix(m.Get(member.SnapshotDir+"/"+all[0].Name), "all objects") {
		t.Fatalf("%v", all)
	}
	m.Put(member.SnapshotDir+"/.20260101-000000.db.edgebake-new", "half")
	for range 10 {
		m.Now = m.Now.Add(25 * time.Hour)
		m.bootDone()
		m.Now = m.Now.Add(time.Hour)
		m.bootDone() // the last snapshot is new enough
	}
	all := saved()
	newest, err := time.Parse("20060102-150405.db", all[0].Name)
	if err != nil || len(all) != controlplane.SnapshotsKept || m.Now.Sub(newest) > 2*time.Hour || m.Has(member.SnapshotDir+"/.20260101-000000.db.edgebake-new") {
		t.Errorf("%v on %s", all, m.Now)
	}
	m.own.short = true
	m.Now = m.Now.Add(25 * time.Hour)
	m.bootDone()
	if !slices.Equal(saved(), all) || !slices.ContainsFunc(m.State().Notes, func(n string) bool { return strings.Contains(n, "the daily snapshot of etcd failed") }) {
		t.Errorf("%v, notes %q", saved(), m.State().Notes)
	}
	path, err := controlplane.Snapshot(t.Context(), m.Env())
	if err == nil || m.Has(path) && path != "" {
		t.Errorf("an incomplete snapshot is at %q", path)
	}
}

// TestSnapshotsLeaveRoom checks that a snapshot never uses the space that etcd and the pods need.
// Old snapshots are removed first. If that is not enough, none is made.
func TestSnapshotsLeaveRoom(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	days := func(n int) []controlplane.SavedSnapshot {
		t.Helper()
		for range n {
			m.Now = m.Now.Add(25 * time.Hour)
			m.bootDone()
		}
		all, err := controlplane.Snapshots(m.Env())
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	if all := days(5); len(all) != 6 {
		t.Fatalf("%v", all)
	}
	const total = 4 << 30
	size := m.DirSize(member.SnapshotDir) / 6
	m.PutUnsynced("/var/lib/etcd/member/snap/db", strings.Repeat("x", int(size)))
	m.VarUsed = total - total/100*controlplane.SnapshotLeaves - 3*size // space for three
	if all := days(1); len(all) != 3 || m.DirSize(member.SnapshotDir) != 3*size {
		t.Errorf("%v", all)
	}
	// An incomplete file that a power cut left is removed first.
	half := member.SnapshotDir + "/.20260101-000000.db.edgebake-new"
	m.PutUnsynced(half, strings.Repeat("x", int(size)))
	if all := days(1); len(all) != 3 || m.Has(half) {
		t.Errorf("%v, an incomplete snapshot exists: %v", all, m.Has(half))
	}
	m.VarUsed += 3 * size // not even one would fit without all others, so none is removed
	before, again := days(1), days(1)
	if len(before) != 3 || !slices.Equal(before, again) || !slices.ContainsFunc(m.State().Notes, func(n string) bool { return strings.Contains(n, "checking the space for a snapshot") }) {
		t.Errorf("%v, notes %q", before, m.State().Notes)
	}
	m.VarUsed -= 2 * size // only one fits in addition to the newest
	if all := days(1); len(all) != 2 || all[1] != before[0] {
		t.Errorf("%v, before %v", all, before)
	}
	// Two snapshots at the same time are made one after the other.
	unlock, err := m.Env().Lock(t.Context(), controlplane.SnapshotLock)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := controlplane.Snapshot(ctx, m.Env()); err == nil || !strings.Contains(err.Error(), "waiting for another snapshot") {
		t.Error(err)
	}
}

// TestSnapshotsOfTheFuture checks that snapshots that were made while the clock was ahead neither
// displace correct ones nor prevent a new one.
func TestSnapshotsOfTheFuture(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for _, name := range []string{"20400101-000000.db", "20400102-000000.db"} {
		m.Put(member.SnapshotDir+"/"+name, "of a clock that was wrong")
	}
	for range 10 {
		m.Now = m.Now.Add(25 * time.Hour)
		m.bootDone()
		for range 3 { // first boot runs every two hours
			m.Now = m.Now.Add(2 * time.Hour)
			m.bootDone()
		}
	}
	all, err := controlplane.Snapshots(m.Env())
	if err != nil || len(all) != controlplane.SnapshotsKept {
		t.Fatalf("%v, %v", all, err)
	}
	oldest, err := time.Parse("20060102-150405.db", all[len(all)-1].Name)
	if err != nil || m.Now.Sub(oldest) < 6*24*time.Hour || oldest.After(m.Now) {
		t.Errorf("on %s: %v", m.Now.Format(time.DateTime), all)
	}
}

// withRequests stamps the Site with requests about lost control-plane nodes.
func (m *controlPlane) withRequests(w mint.Requests) {
	m.T.Helper()
	s := *m.site
	c := *s.ControlPlane
	c.Absent, c.ContinueFrom, c.Restore = w.Absent, w.ContinueFrom, w.Restore
	c.Said = ""
	if w.ContinueFrom != "" {
		if w.RequestedAt.IsZero() {
			w.RequestedAt = m.Now // requested again
		}
		c.Said = w.RequestedAt.UTC().Format(time.RFC3339)
	}
	if !w.Bootstrap.IsZero() {
		c.BootstrapUntil = w.Bootstrap.UTC().Format(time.RFC3339)
	}
	s.ControlPlane = &c
	m.stampSite(&s)
}

// TestContinueFromThisMachine checks a request that names this machine after the loss of the
// quorum. Its etcd drops the others. Each request is carried out once.
func TestContinueFromThisMachine(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	m.withRequests(mint.Requests{ContinueFrom: "m1"})
	forced := "--" + controlplane.ForceNewCluster + "=true"
	for round := range 2 {
		m.starts, m.restarts = nil, nil
		m.bootDone()
		if m.started != "has data\n" || !slices.Equal(m.restarts, []string{"has data"}) || !m.ConsoleHas("etcd continues with this machine's data alone") {
			t.Fatalf("round %d: etcd runs as %q, restarted as %q\n%s", round, m.started, m.restarts, strings.Join(m.Console, "\n"))
		}
		m.on()
		m.restarts = nil
		m.bootDone()
		if len(m.restarts) > 0 || m.ConsoleHas("etcd continues") {
			t.Fatalf("etcd was started with --force-new-cluster twice: %q %q", m.restarts, forced)
		}
		m.withRequests(mint.Requests{}) // the request is removed, and made again after another loss
		m.on()
		m.bootDone()
		m.withRequests(mint.Requests{ContinueFrom: "m1"})
		m.on()
	}
}

// TestContinueWithoutANote checks that data without a record of its cluster is not served on
// request either, and that the fix in the message keeps the data.
func TestContinueWithoutANote(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	if err := os.Remove(m.HostPath(controlplane.MembershipFile)); err != nil {
		t.Fatal(err)
	}
	m.withRequests(mint.Requests{ContinueFrom: "m1"})
	for range 2 {
		if err := m.boot(); err == nil || m.started != "" || m.Has(controlplane.EtcdRun) || !m.Has("/var/lib/etcd/member/wal/0.wal") || !m.ConsoleHas("no record of its cluster") || m.ConsoleHas("write the image") || !m.ConsoleHas("--restore FILE") {
			t.Fatalf("%v, etcd runs as %q\n%s", err, m.started, strings.Join(m.Console, "\n"))
		}
		m.on()
	}
	const text = "all objects of last week"
	digest := sha256.Sum256([]byte(text))
	m.Put(member.SnapshotDir+"/20261111-000000.db", text)
	m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:])})
	m.bootDone()
	if m.Get("/var/lib/etcd/member/snap/db") != text || len(m.aside("/wal/0.wal")) != 1 {
		t.Errorf("etcd runs as %q\n%s", m.started, strings.Join(m.Console, "\n"))
	}
}

// TestContinueWithAnothersCA checks a Site of another cluster that requests to continue from this
// machine. The message must not tell anybody to overwrite the disk.
func TestContinueWithAnothersCA(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.site = mintedSites(t, 1)[0].Site
	m.withRequests(mint.Requests{ContinueFrom: "m1"})
	m.on()
	if err := m.boot(); err == nil || !m.ConsoleHas("the CA of another cluster") || m.ConsoleHas("write the image") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
}

// TestPowerCutOfContinue checks that etcd ends up running without the flag after a power cut before
// any write.
func TestPowerCutOfContinue(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 3)
	for at, times := range map[string]int{"write " + controlplane.EtcdRun: 2, "write " + controlplane.MembershipFile: 1, "symlink " + controlplane.EtcdManifest: 4, "kubeadm writes " + controlplane.EtcdManifest: 2} {
		for nth := 1; nth <= times; nth++ {
			t.Run(fmt.Sprint(at, nth), func(t *testing.T) {
				t.Parallel()
				m := newControlPlane(t, sites)
				m.Cluster.NoClusterInfo = false
				m.lived(m.site.ControlPlane.ID)
				m.withRequests(mint.Requests{ContinueFrom: "m1"})
				seen := 0
				m.BeforeEffect = func(effect string) {
					if effect == at && !m.PoweredOff {
						if seen++; seen == nth {
							m.PowerCutAt = 1
						}
					}
				}
				err := m.boot()
				if seen < nth || err == nil {
					t.Fatalf("the machine continued after the power cut, or the effect occurred only %d times", seen)
				}
				m.BeforeEffect = nil
				m.LoseUnsynced()
				m.on()
				m.bootDone()
				if m.started != "has data\n" || !strings.HasPrefix(controlplane.ReadMembership(m.Env()).Continued, "m1 ") {
					t.Errorf("etcd runs as %q, note %+v", m.started, controlplane.ReadMembership(m.Env()))
				}
			})
		}
	}
}

// TestContinueFromAnother checks a request to continue from another machine. This machine's data is
// set aside, not deleted, and the machine joins.
func TestContinueFromAnother(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	m.withRequests(mint.Requests{ContinueFrom: "m2"})
	if err := m.boot(); err == nil || len(m.starts) > 0 || m.Has(controlplane.EtcdManifest) {
		t.Fatalf("%v, etcd was started as %q before m2 runs", err, m.starts)
	}
	f := m.quorum()
	f.members = f.members[1:2]
	m.on()
	m.bootDone()
	if len(m.aside("/wal/0.wal")) != 1 || len(m.starts) != 1 || !strings.HasSuffix(m.starts[0], "existing") || len(f.members) != 2 {
		t.Errorf("set aside: %q, started as %q, members %v", m.aside(""), m.starts, f.members)
	}
	m.starts = nil
	m.on()
	m.bootDone()
	if len(m.starts) > 0 {
		t.Errorf("the machine joined again: %q", m.starts)
	}
}

// TestPowerCutAfterContinueFromAnother cuts the power of all machines while their Sites have the
// request. This machine starts without a quorum, unless the named one is about to drop it.
func TestPowerCutAfterContinueFromAnother(t *testing.T) {
	t.Parallel()
	for _, counted := range []bool{true, false} {
		t.Run(fmt.Sprint(counted), func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Cluster.NoClusterInfo = false
			m.withRequests(mint.Requests{ContinueFrom: "m2"})
			f := m.quorum()
			f.members = f.members[1:2]
			m.bootDone()
			if note := controlplane.ReadMembership(m.Env()); !strings.HasPrefix(note.Continued, "m2 ") {
				t.Fatalf("the machine joined, but its record is %+v", note)
			}
			const member = 16045690984503098046
			m.Put("/var/lib/etcd/member/wal/0.wal", string(logHead(member, 77)))
			f.quorum = false // it needs this machine for a quorum
			if counted {
				f.counts = member
			}
			m.starts, m.started = nil, ""
			m.on()
			m.Patience = 90 * time.Second
			m.BeforeEffect = func(string) {
				if controlplane.Decided(m.Env()) {
					m.PowerCutAt = 1
				}
			}
			_ = m.boot()
			if controlplane.Decided(m.Env()) != counted {
				t.Errorf("etcd was let start: %v\n%s", !counted, m.Log.String())
			}
		})
	}
}

// logHead returns the head of etcd's log.
func logHead(member, cluster uint64) []byte {
	ids := binary.AppendUvarint([]byte{1 << 3}, member)
	ids = binary.AppendUvarint(append(ids, 2<<3), cluster)
	record := append([]byte{1 << 3, 1, 2 << 3, 0, 3<<3 | 2, byte(len(ids))}, ids...)
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(record))), record...)
}

// TestPermitIsForOneBootstrap checks that a machine that was flashed again does not bootstrap
// again, because its firmware has a record. A new permit is accepted, and an interrupted bootstrap
// continues.
func TestPermitIsForOneBootstrap(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]string{"born": "", "cut off before the note": "firmware", "cut off behind it": "kubeadm writes " + controlplane.EtcdManifest} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sites := mintedSites(t, 1)
			m := newControlPlane(t, sites)
			m.Put(filepath.Dir(controlplane.BootstrappedVar)+"/BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c", "")
			m.BeforeEffect = func(effect string) {
				if effect == cut && !m.PoweredOff {
					m.PowerCutAt = 1
				}
			}
			if err := m.boot(); (err == nil) != (cut == "") {
				t.Fatal(err)
			}
			m.BeforeEffect = nil
			m.LoseUnsynced()
			m.on()
			m.bootDone()
			if len(m.starts) != 1 {
				t.Fatalf("etcd was started as %q", m.starts)
			}
			firmware := m.Get(controlplane.BootstrappedVar)

			again := newControlPlane(t, sites)
			again.Put(controlplane.BootstrappedVar, firmware)
			if err := again.boot(); err == nil || len(again.starts) > 0 || again.Has(controlplane.EtcdManifest) || !again.ConsoleHas("has already used this bootstrap permit") {
				t.Fatalf("%v, etcd was started as %q\n%s", err, again.starts, strings.Join(again.Console, "\n"))
			}
			s := *again.site
			c := *s.ControlPlane
			c.BootstrapUntil = again.Now.Add(48 * time.Hour).UTC().Format(time.RFC3339)
			s.ControlPlane = &c
			again.stampSite(&s)
			again.on()
			again.bootDone()
			if len(again.starts) != 1 || again.Get(controlplane.BootstrappedVar) == firmware {
				t.Errorf("etcd was started as %q", again.starts)
			}
		})
	}
}

// TestLostDataIsNoBootstrap checks that the cluster is not bootstrapped again if a power cut
// destroys etcd's data after the API server has answered.
func TestLostDataIsNoBootstrap(t *testing.T) {
	t.Parallel()
	for name, gone := range map[string]string{"the log": "/wal", "everything": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 1))
			m.bootDone()
			m.Put(controlplane.EtcdMember+"/snap/db", strings.Repeat("x", 1<<16))
			if err := os.RemoveAll(m.HostPath(controlplane.EtcdMember + gone)); err != nil {
				t.Fatal(err)
			}
			m.starts, m.Console = nil, nil
			m.on()
			if err := m.boot(); err == nil || len(m.starts) > 0 || !m.ConsoleHas("has already used this bootstrap permit") {
				t.Fatalf("%v, etcd was started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
			}
			s := *m.site
			c := *s.ControlPlane
			c.BootstrapUntil = m.Now.Add(48 * time.Hour).UTC().Format(time.RFC3339)
			s.ControlPlane = &c
			m.stampSite(&s)
			m.on()
			m.bootDone()
			if len(m.starts) != 1 || !strings.HasSuffix(m.starts[0], " new") {
				t.Errorf("with a new permit, etcd was started as %q", m.starts)
			}
		})
	}
}

// TestOldMembershipIsCompleted checks a former release's record, which does not show that the data
// has served the API server. The next boot with that data completes the record.
func TestOldMembershipIsCompleted(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(controlplane.MembershipFile, fmt.Sprintf(`{"version":1,"cluster":%q,"born":%q}`, m.site.ControlPlane.ID, controlplane.PermitKey(m.site)))
	m.on()
	m.bootDone()
	if note := controlplane.ReadMembership(m.Env()); note.Served != controlplane.PermitKey(m.site) || note.Bootstrapped != note.Served {
		t.Errorf("%+v", note)
	}
}

// TestLostDataIsNotRestoredAgain checks that the same request does not restore the snapshot again
// if the restored data is lost, because newer data may be on another disk.
func TestLostDataIsNotRestoredAgain(t *testing.T) {
	t.Parallel()
	const text = "all objects of last week"
	m := newControlPlane(t, mintedSites(t, 1))
	m.Now = m.Now.Add(200 * time.Hour)
	m.Cluster.NoClusterInfo = false
	m.Put(member.SnapshotDir+"/20261111-000000.db", text)
	digest := sha256.Sum256([]byte(text))
	m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:]), RequestedAt: m.Now})
	m.on()
	m.bootDone()
	if err := os.RemoveAll(m.HostPath(controlplane.EtcdMember)); err != nil {
		t.Fatal(err)
	}
	m.starts, m.Console = nil, nil
	m.on()
	if err := m.boot(); err == nil || len(m.starts) > 0 || !m.ConsoleHas("its data is gone") {
		t.Errorf("%v, etcd was started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
	}
}

// TestPermitsThatDiffer checks that blank machines bootstrap nothing, and report the reason, if
// their Sites have different permits or one of them has used its permit. etcd derives its IDs from
// the permit.
func TestPermitsThatDiffer(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 3)
	for name, tt := range map[string]struct {
		set  func(m *controlPlane)
		says string
	}{
		"another permit": {func(m *controlPlane) { m.others["192.0.2.13"].permit = "2026-12-24T12:00:00Z" },
			"this machine's Site has another bootstrap permit (2026-11-27T09:00:00Z) than the Site of m3 (2026-12-24T12:00:00Z)"},
		"no permit":      {func(m *controlPlane) { m.others["192.0.2.13"].permit = controlplane.NoPermitID }, "than the Site of m3 (none)"},
		"an older image": {func(m *controlPlane) { m.others["192.0.2.13"].permit = "" }, "m3 does not report a bootstrap permit"},
		"it is used":     {func(m *controlPlane) { m.others["192.0.2.13"].state = etcdmember.Spent }, "m3 has already used this bootstrap permit"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.all(etcdmember.Blank)
			tt.set(m)
			if err := m.boot(); err == nil || len(m.starts) > 0 || !m.ConsoleHas(tt.says) {
				t.Fatalf("%v, etcd was started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
			}
			m.all(etcdmember.Blank)
			m.others["192.0.2.13"].permit = controlplane.PermitID(m.site)
			m.on()
			m.bootDone()
			if len(m.starts) != 1 || !strings.HasSuffix(m.starts[0], " new") {
				t.Errorf("etcd was started as %q", m.starts)
			}
		})
	}
}

// TestUsedPermitIsReported checks that a machine that has used its permit reports that to the
// others, even after it has stopped and waits for a person.
func TestUsedPermitIsReported(t *testing.T) {
	t.Parallel()
	for name, others := range map[string]etcdmember.PeerState{"others are off": etcdmember.Silent, "it has stopped": etcdmember.Blank} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Put(controlplane.BootstrappedVar, "\x07\x00\x00\x00"+controlplane.PermitKey(m.site))
			m.all(others)
			m.Patience = 8 * time.Minute
			told := map[bool]etcdmember.Peer{}
			var listening net.Listener
			listens := m.Listen
			m.Listen = func(addr string) (net.Listener, error) {
				l, err := listens(addr)
				listening = l
				return l, err
			}
			e := m.Env()
			sleep := e.Sleep
			e.Sleep = func(ctx context.Context, d time.Duration) error {
				stopped := m.ConsoleHas("FAILED etcd-start")
				if _, ok := told[stopped]; !ok && listening != nil {
					told[stopped], _ = etcdmember.AskPeer(t.Context(), m.peerOf(listening), "https://192.0.2.11:2380")
				}
				return sleep(ctx, d)
			}
			if err := m.Run(New(e)); err == nil || len(m.starts) > 0 || !m.ConsoleHas("already used this bootstrap permit") {
				t.Fatalf("%v, etcd was started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
			}
			if want := (etcdmember.Peer{State: etcdmember.Spent, Permit: controlplane.PermitID(m.site)}); told[others == etcdmember.Blank] != want {
				t.Errorf("the other nodes get the answer %+v, want %+v", told, want)
			}
		})
	}
}

// peerOf returns the HTTP client that another control-plane node would use.
func (m *controlPlane) peerOf(l net.Listener) *http.Client {
	conf, err := controlplane.EtcdTLS(m.Env())
	if err != nil {
		m.T.Fatal(err)
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
	}}}
}

// etcdutl restores a snapshot, as ctr would run it in etcd's image.
func (m *controlPlane) etcdutl(c machine.Cmd) error {
	args := c.Args[slices.Index(c.Args, "etcdutl"):]
	inside := func(p string) string {
		p = strings.Replace(p, "/snapshots/", member.SnapshotDir+"/", 1)
		return strings.Replace(p, "/restore/", controlplane.RestoreDir+"/", 1)
	}
	if !slices.Contains(c.Args, "registry.k8s.io/etcd:3.6.8-0") {
		m.T.Errorf("ctr %q", c.Args)
	}
	data, err := os.ReadFile(filepath.Join(m.Root, inside(args[3])))
	if err != nil {
		return err
	}
	dir := inside(args[slices.Index(args, "--data-dir")+1])
	if m.Has(dir) {
		return errors.New("data-dir not empty")
	}
	m.PutUnsynced(dir+"/member/snap/db", string(data))
	if err := m.Effect("etcdutl writes the log"); err != nil {
		return err
	}
	// The record of a checksum, and the record of the metadata: member 5 of cluster 6.
	m.PutUnsynced(dir+"/member/wal/0.wal", "\x04\x00\x00\x00\x00\x00\x00\x84\x08\x04\x10\x00\x00\x00\x00\x00\x0a\x00\x00\x00\x00\x00\x00\x00\x08\x01\x10\x00\x1a\x04\x08\x05\x10\x06")
	return nil
}

// TestRestoreASnapshot checks a restore after everything except a snapshot was lost. The machine
// named in the request restores it once, from its disk or from a stick, with old data or a blank
// disk.
func TestRestoreASnapshot(t *testing.T) {
	t.Parallel()
	const text = "all objects of last week"
	digest := sha256.Sum256([]byte(text))
	sum := hex.EncodeToString(digest[:])
	for name, tt := range map[string]struct{ stick, old, rejected, wrong bool }{
		"from its own disk":             {},
		"from its own disk, old data":   {old: true},
		"after a start that failed":     {rejected: true},
		"from a stick":                  {stick: true},
		"from a stick, old data":        {stick: true, old: true},
		"there is another on the stick": {stick: true, wrong: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Now = m.Now.Add(200 * time.Hour) // after the end of the permit
			m.Cluster.NoClusterInfo = false
			m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: sum})
			if tt.old {
				m.lived(m.site.ControlPlane.ID)
			}
			if tt.rejected {
				m.rejected()
			}
			if tt.stick {
				m.plug("")
				m.SlotFiles = map[string]string{stickDev + "/" + controlplane.SnapshotOnStick: text}
				if tt.wrong {
					m.SlotFiles[stickDev+"/"+controlplane.SnapshotOnStick] = "another"
				}
			} else {
				m.Put(member.SnapshotDir+"/20261111-000000.db", text)
				m.Put(member.SnapshotDir+"/20261112-000000.db", "a newer one")
			}
			if tt.wrong {
				if err := m.boot(); err == nil || len(m.starts) > 0 || m.Has(controlplane.EtcdManifest) || !m.ConsoleHas("there is no snapshot with the SHA-256 "+sum) {
					t.Errorf("%v, started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
				}
				return
			}
			for range 2 {
				m.bootDone()
				if m.Get("/var/lib/etcd/member/snap/db") != text || m.Has(controlplane.RestoreDir) || tt.old != (len(m.aside("/wal")) == 1) || m.started != "has data\n" {
					t.Fatalf("etcd runs as %q\n%s", m.started, strings.Join(m.Console, "\n"))
				}
				m.on()
			}
		})
	}
}

// TestRestoreIsDoneOnce checks that a request to restore is carried out once, even if the machine
// is flashed again or gets an old stick, so that newer data stays. A new request is carried out.
func TestRestoreIsDoneOnce(t *testing.T) {
	t.Parallel()
	const text, other, db = "all objects of last week", "all objects of yesterday", "/var/lib/etcd/member/snap/db"
	restore := func(text string, said time.Time) mint.Requests {
		digest := sha256.Sum256([]byte(text))
		return mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:]), RequestedAt: said}
	}
	sites := mintedSites(t, 3)
	for name, uefi := range map[string]bool{"UEFI": true, "no UEFI": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			machine := func(firmware string) *controlPlane {
				m := newControlPlane(t, sites)
				m.Now = m.Now.Add(200 * time.Hour)
				m.Cluster.NoClusterInfo = false
				if uefi {
					m.Put(filepath.Dir(controlplane.BootstrappedVar)+"/BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c", "")
				}
				if firmware != "" {
					m.Put(controlplane.RestoredVar, firmware)
				}
				m.Put(member.SnapshotDir+"/20261111-000000.db", text)
				m.Put(member.SnapshotDir+"/20261112-000000.db", other)
				return m
			}
			m := machine("")
			first := restore(text, m.Now)
			// boot boots the machine with these requests, and checks that
			// it then has the data in want.
			boot := func(what string, w mint.Requests, want string, noted bool) {
				t.Helper()
				m.withRequests(w)
				m.on()
				m.bootDone()
				if got := m.Get(db); got != want || m.ConsoleHas("it does not restore the snapshot") != noted {
					t.Fatalf("%s: etcd has %q, want %q\n%s", what, got, want, strings.Join(m.Console, "\n"))
				}
			}
			boot("said", first, text, false)
			firmware := string(m.Env().Contents(controlplane.RestoredVar))
			if (len(firmware) > 4) != uefi {
				t.Fatalf("the firmware has %q", firmware)
			}
			m.Put(db, "with a new object")
			boot("the same again", first, "with a new object", false)
			boot("taken out", mint.Requests{}, "with a new object", false)
			m.Now = m.Now.Add(40 * 24 * time.Hour)
			boot("there again, as on a stick that was left", first, "with a new object", true)
			second := restore(other, m.Now)
			boot("another one", second, other, false)
			boot("the first one, after that", first, other, true)
			m.Now = m.Now.Add(time.Hour)
			boot("the first one, said again", restore(text, m.Now), text, false)

			again := machine(firmware)
			again.withRequests(first)
			if err := again.boot(); uefi && (err == nil || len(again.starts) > 0 || again.Has(controlplane.EtcdManifest) || !again.ConsoleHas("its data is gone")) {
				t.Fatalf("%v, etcd was started as %q\n%s", err, again.starts, strings.Join(again.Console, "\n"))
			}
			again.withRequests(restore(text, again.Now.Add(time.Hour)))
			again.on()
			again.bootDone()
			if again.Get(db) != text || uefi && string(again.Env().Contents(controlplane.RestoredVar)) == firmware {
				t.Errorf("after the same request, etcd has %q", again.Get(db))
			}
		})
	}
}

// TestCarriedOutIsNoBootstrap checks that data made by carrying out a request does not count as
// this disk's bootstrap. If the data is lost, that is no interrupted bootstrap.
func TestCarriedOutIsNoBootstrap(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	before := controlplane.ReadMembership(m.Env())
	if before.Bootstrapped == "" {
		t.Fatalf("%+v", before)
	}
	before.RequestedAt = m.Now
	if after := before.CarriedOut(m.site); after.Bootstrapped != "" || after.Cluster != before.Cluster || !after.RequestedAt.Equal(m.Now) {
		t.Errorf("%+v, before %+v", after, before)
	}
}

// TestRestoreWithoutASnapshot checks that the present data is not set aside if the requested
// snapshot is missing: the machine would have nothing left.
func TestRestoreWithoutASnapshot(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	m.Put(controlplane.AsideDir+"/wal/0.wal", "of a former loss")
	m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: strings.Repeat("ab", 32)})
	if err := m.boot(); err == nil || !m.ConsoleHas("there is no snapshot with the SHA-256 abab") || !m.Has("/var/lib/etcd/member/wal/0.wal") || m.Get(controlplane.AsideDir+"/wal/0.wal") != "of a former loss" {
		t.Errorf("%v, data in place: %v\n%s", err, m.Has("/var/lib/etcd/member/wal/0.wal"), strings.Join(m.Console, "\n"))
	}
}

// aside lists the files that match path in all directories with data that was set aside.
func (m *controlPlane) aside(path string) []string {
	m.T.Helper()
	found, err := filepath.Glob(m.HostPath(controlplane.AsideDir) + "*" + path)
	if err != nil {
		m.T.Fatal(err)
	}
	return found
}

// TestBeginsOverALoglessDatabase checks that a bootstrap, a join and a restore set the remains of a
// rejected start or of a damaged disk aside.
func TestBeginsOverALoglessDatabase(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 3)
	for name, set := range map[string]func(m *controlPlane){
		"bootstrap": func(m *controlPlane) { m.all(etcdmember.Blank) },
		"join":      func(m *controlPlane) { m.quorum(); m.Cluster.NoClusterInfo = false },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			set(m)
			m.rejected()
			m.bootDone()
			if len(m.starts) != 1 || len(m.aside("/snap/db")) != 1 {
				t.Errorf("etcd was started as %q, set aside %q", m.starts, m.aside(""))
			}
		})
	}
}

// TestLoglessDatabasesDoNotPileUp checks the databases left by a start that etcd rejects at each
// boot. The latest is kept, and the largest, which may be the only one with data.
func TestLoglessDatabasesDoNotPileUp(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Put(controlplane.AsideDir+"/wal/0.wal", "of a former word")
	for _, text := range []string{"new", "all the data of a shop", "void", "nothing", "nil"} {
		m.Put("/var/lib/etcd/member/snap/db", text)
		if err := controlplane.SetAsideLogless(m.Env()); err != nil {
			t.Fatal(err)
		}
		m.Now = m.Now.Add(time.Minute)
	}
	var left []string
	for _, f := range m.aside("/snap/db") {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, string(b))
	}
	if want := []string{"all the data of a shop", "nil"}; !slices.Equal(left, want) || len(m.aside("/wal/0.wal")) != 1 {
		t.Errorf("set aside: %q, want %q", left, want)
	}
}

// TestEtcdIsLookedAfter checks that the leader's machine defragments if the disk has space, and
// clears the alarm of a full database. Problems that only a person can fix are reported.
func TestEtcdIsLookedAfter(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	half := func() map[string]string {
		return map[string]string{"dbSize": "419430400", "dbSizeInUse": "104857600"}
	}
	for name, tt := range map[string]struct {
		status map[string]string
		alarm  string
		used   int64
		asked  []string
		note   string
	}{
		"nothing is wrong": {},
		"half is unused":   {status: half(), asked: []string{"defragment"}},
		"no room for it":   {status: half(), used: 7 << 29, note: "was not defragmented: it needs 100"},
		"another leads":    {status: map[string]string{"leader": "2", "dbSize": "419430400", "dbSizeInUse": "1048576"}},
		"it is full": {status: map[string]string{"dbSize": "2147483648", "dbSizeInUse": "104857600"}, alarm: etcdmember.NoSpace,
			asked: []string{"compaction", "defragment", "DEACTIVATE NOSPACE"}},
		"it is full of data": {status: map[string]string{"dbSize": "2147483648", "dbSizeInUse": "2147000000"}, alarm: etcdmember.NoSpace,
			asked: []string{"compaction", "defragment"}, note: "etcd's database on m1 uses 2047.5 MiB of its quota of 2048 MiB"},
		"it is damaged": {alarm: etcdmember.Corrupt, note: "etcd's data on m1 differs from that of the other members (alarm CORRUPT)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.own.status, m.VarUsed = tt.status, tt.used
			if tt.alarm != "" {
				m.own.alarms = []map[string]string{{"memberID": "1", "alarm": tt.alarm}}
			}
			m.bootDone()
			notes := strings.Join(m.State().Notes, "\n")
			if !slices.Equal(m.own.asked, tt.asked) || !strings.Contains(notes, tt.note) || tt.note == "" && strings.Contains(notes, "etcd's") {
				t.Errorf("etcd was asked for %q; notes: %s", m.own.asked, notes)
			}
		})
	}
}

// TestRoomOnOtherMachines checks that another machine's free disk space is read from its kubelet.
func TestRoomOnOtherMachines(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for summary, want := range map[string]string{
		`{"node":{"fs":{"availableBytes":4000000000,"capacityBytes":5000000000}}}`: "",
		`{"node":{"fs":{"availableBytes":500000000,"capacityBytes":5000000000}}}`:  "must stay",
		`{"node":{}}`: "does not report the free space on its disk",
		"":            "for the free space on its disk: ",
	} {
		m.Cluster.KubeletStats = summary
		err := controlplane.SpaceOn(t.Context(), m.Env(), m.site, "m2", 100<<20)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", summary, err, want)
		}
	}
}

// TestSetAsideIsKept checks that data that was set aside stays, also after the next request, until
// etcd has been healthy for a week. The same applies to data that an older program set aside.
func TestSetAsideIsKept(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(controlplane.AsideDir+"/wal/0.wal", "of a former program")
	for i, text := range []string{"first", "second"} {
		digest := sha256.Sum256([]byte(text))
		m.Put(member.SnapshotDir+"/2026111"+fmt.Sprint(i)+"-000000.db", text)
		if i > 0 {
			m.Now = m.Now.Add(time.Hour)
		}
		m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:])})
		m.on()
		m.bootDone()
	}
	if got := m.aside("/wal"); len(got) != 3 {
		t.Fatalf("set aside: %q", got)
	}
	days := func(n int) {
		t.Helper()
		for range n {
			m.Now = m.Now.Add(24 * time.Hour)
			m.bootDone()
			m.Now = m.Now.Add(2 * time.Hour)
			m.bootDone()
		}
	}
	days(4)
	m.own.alarms = []map[string]string{{"memberID": "1", "alarm": etcdmember.Corrupt}}
	days(1)
	m.own.alarms = nil
	days(6)
	if got := m.aside("/wal"); len(got) != 3 {
		t.Fatalf("after six days of health, set aside: %q", got)
	}
	days(3)
	if got := m.aside(""); len(got) != 0 {
		t.Errorf("after a week of health, set aside: %q", got)
	}
}

// TestRestoreKeepsALog checks that data with a log is never removed to free space.
func TestRestoreKeepsALog(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.rejected()
	m.Put("/var/lib/etcd/member/wal/0.wal", "")
	if err := controlplane.SetAsideLogless(m.Env()); err == nil || !m.Has("/var/lib/etcd/member/snap/db") || !m.Has("/var/lib/etcd/member/wal/0.wal") {
		t.Errorf("%v, but the data is gone", err)
	}
}

func TestPowerCutOfRestore(t *testing.T) {
	t.Parallel()
	const text = "all objects of last week"
	digest := sha256.Sum256([]byte(text))
	sites := mintedSites(t, 3)
	for old, tt := range map[string]struct {
		disk  func(*controlPlane)
		first string // of the effects
		kept  bool
	}{
		"old data":         {func(m *controlPlane) { m.lived(m.site.ControlPlane.ID) }, "rename " + configs.EtcdDataDir + "/member", true},
		"a rejected start": {(*controlPlane).rejected, "mkdir " + controlplane.RestoreDir, false},
	} {
		begin := func(t *testing.T) *controlPlane {
			m := newControlPlane(t, sites)
			m.Now = m.Now.Add(200 * time.Hour)
			m.Cluster.NoClusterInfo = false
			m.Put(filepath.Dir(controlplane.BootstrappedVar)+"/BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c", "")
			m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:])})
			tt.disk(m)
			m.plug("")
			m.SlotFiles = map[string]string{stickDev + "/" + controlplane.SnapshotOnStick: text}
			return m
		}
		whole := begin(t)
		whole.bootDone()
		from := slices.Index(whole.EffectNames, tt.first)
		to := slices.Index(whole.EffectNames, "rename "+controlplane.RestoreDir+"/data/member") + 4
		if from < 0 || to-from < 8 {
			t.Fatalf("effects: %q", whole.EffectNames)
		}
		for n := from; n <= to; n += everyCut() {
			t.Run(fmt.Sprint(old, ", at ", whole.EffectNames[n]), func(t *testing.T) {
				t.Parallel()
				m := begin(t)
				m.PowerCutAt = n + 1
				if err := m.boot(); err == nil {
					t.Fatal("the machine continued after the power cut")
				}
				m.LoseUnsynced()
				m.on()
				m.bootDone()
				if m.Get("/var/lib/etcd/member/snap/db") != text || len(m.starts) > 0 || m.started != "has data\n" || (len(m.aside("/wal")) == 1) != tt.kept {
					t.Errorf("etcd runs as %q, started as %q, set aside %q", m.started, m.starts, m.aside(""))
				}
			})
		}
	}
}

// TestBootstrapWithoutAnAbsentMaster checks a control-plane node that never worked. The others
// bootstrap without it if their Sites request that.
func TestBootstrapWithoutAnAbsentMaster(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.others["192.0.2.12"].state = etcdmember.Blank
	if err := m.boot(); err == nil || len(m.starts) > 0 {
		t.Fatalf("%v, etcd was started as %q", err, m.starts)
	}
	m.withRequests(mint.Requests{Absent: []string{"m3"}})
	m.on()
	m.bootDone()
	if want := []string{"3.6.8-0 m1=https://192.0.2.11:2380,m2=https://192.0.2.12:2380 new"}; !slices.Equal(m.starts, want) {
		t.Errorf("etcd was started as %q, want %q", m.starts, want)
	}
}

// TestMasterLosesKeys checks that first boot requests keys again if they are lost after they were
// removed from the slot.
func TestMasterLosesKeys(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(member.PKIDir+"/front-proxy-ca.key", "")
	m.on()
	if err := m.boot(); err == nil || !m.ConsoleHas("FAILED keys") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.stampSite(m.site)
	m.on()
	m.bootDone()
}

// TestMasterLosesItsDirectory checks a machine that has lost the source of the bind mount
// /etc/kubernetes. With keys from a stick, everything is restored, and etcd keeps its data.
func TestMasterLosesItsDirectory(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	if err := errors.Join(os.RemoveAll(m.HostPath(ondisk.KubernetesDir)), os.Mkdir(m.HostPath(ondisk.KubernetesDir), 0o755)); err != nil {
		t.Fatal(err)
	}
	m.on()
	if err := m.boot(); err == nil || !m.ConsoleHas("FAILED keys") {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.stampSite(m.site)
	m.on()
	m.bootDone()
	if len(m.starts) != 1 || m.started != "has data\n" {
		t.Errorf("etcd was started as %q, and is %q", m.starts, m.started)
	}
}

// TestMasterTakesLostKeysFromAStick checks that a control-plane node accepts keys from a stick with
// its own Site of any date, but only its own cluster's, and only if its keys are lost.
func TestMasterTakesLostKeysFromAStick(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, tt := range map[string]struct {
		before bool // the stick set the machine up, and is still plugged in
		own    int64
		policy string
	}{
		"a new stick":                {},
		"the stick it was set up by": {before: true},
		"an older stick":             {own: day(21)},
		"any stick will do":          {policy: ondisk.SitesAlways},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.setStickPolicy(tt.policy)
			text, err := configs.EncodeSlot(m.site)
			if err != nil {
				t.Fatal(err)
			}
			files := map[string]string{ondisk.SlotSite: string(text)}
			m.stampAt(worldtest.SlotDevice, max(tt.own, day(19)), files)
			if tt.before {
				m.plug("")
				m.stampAt(stickDev, day(19), files)
			}
			m.bootDone()
			m.Put(member.PKIDir+"/etcd/ca.key", "")
			m.on()
			if !tt.before {
				if err := m.boot(); err == nil || !m.ConsoleHas("FAILED keys") {
					t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
				}
				m.plug("")
				m.stampAt(stickDev, day(19), files)
			}
			m.bootDone()
			if !m.ConsoleHas("the cluster's keys stay on stick") {
				t.Errorf("the console has no message about it:\n%s", strings.Join(m.Console, "\n"))
			}
			m.keysOnlyInPlace()
			m.on()
			m.bootDone()
			if m.ConsoleHas("using the Site of stick") {
				t.Error("the stick's Site was used again although all keys are in place")
			}
		})
	}
}

// TestWordsFromAStick checks that requests about lost control-plane nodes are accepted from a stick
// only if it also has the cluster's keys: otherwise anybody could have written them.
func TestWordsFromAStick(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for _, keys := range []bool{false, true} {
		s := *m.site
		c := *s.ControlPlane
		c.ContinueFrom, c.Said = "m1", m.Now.UTC().Format(time.RFC3339)
		s.ControlPlane = &c
		if !keys {
			s.Credentials = configs.Credentials{}
		}
		text, err := configs.EncodeSlot(&s)
		if err != nil {
			t.Fatal(err)
		}
		m.plug(string(text))
		m.on()
		m.bootDone()
		if taken := strings.Contains(m.SlotSite(worldtest.SlotDevice), `continueFrom: "m1"`); taken != keys {
			t.Fatalf("with keys: %v, taken: %v\n%s", keys, taken, strings.Join(m.Console, "\n"))
		}
	}
	if !m.ConsoleHas("etcd continues with this machine's data alone") || !strings.HasPrefix(controlplane.ReadMembership(m.Env()).Continued, "m1 ") {
		t.Errorf("note %+v\n%s", controlplane.ReadMembership(m.Env()), strings.Join(m.Console, "\n"))
	}
	m.keysOnlyInPlace()
}

func TestMasterTakesNoOthersKeys(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(member.PKIDir+"/etcd/ca.key", "")
	text, err := configs.EncodeSlot(mintedSites(t, 1)[0].Site)
	if err != nil {
		t.Fatal(err)
	}
	m.plug(string(text))
	m.on()
	if err := m.boot(); err == nil || !m.ConsoleHas("FAILED keys") || m.ConsoleHas("using the Site") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
}

// TestPublishedMeanwhile checks that Run resets nothing that is published if, after the Check,
// another node publishes the cluster, the API server fails, or a person deletes cluster-info.
func TestPublishedMeanwhile(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for name, c := range map[string]struct {
		happens func()
		keys    bool
		fails   bool
	}{
		"published":               {happens: func() {}, keys: true},
		"published, without keys": {happens: func() {}},
		"no answer":               {happens: func() { m.Cluster.AllDown(true) }, keys: true, fails: true},
		"deleted, without keys":   {happens: func() { m.Cluster.NoClusterInfo = true }, fails: true},
	} {
		m.inits = nil
		spec := *m.site
		if !c.keys {
			spec.Credentials = configs.Credentials{}
		}
		c.happens()
		err := controlplane.PublishPhase(&site.Active{Site: &spec, Node: spec.NodeName}).Run(t.Context(), m.Env())
		if (err != nil) != c.fails {
			t.Errorf("%s: %v", name, err)
		}
		if len(m.inits) > 0 {
			t.Errorf("%s: kubeadm ran %q", name, m.inits)
		}
		m.Cluster.AllDown(false)
		m.Cluster.NoClusterInfo = false
	}
}

// TestPublishWithoutKeys checks a running cluster whose cluster-info was deleted. A machine without
// tokens does not publish it again. A machine that has never published it asks for the keys.
func TestPublishWithoutKeys(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	m := newControlPlane(t, sites)
	m.bootDone()
	m.Cluster.NoClusterInfo, m.inits = true, nil
	m.on()
	m.bootDone()
	if want := []string{"etcd local"}; !slices.Equal(m.inits, want) || !m.ConsoleHas("no longer publishes cluster-info") {
		t.Errorf("kubeadm ran %q\n%s", m.inits, strings.Join(m.Console, "\n"))
	}

	m = newControlPlane(t, sites)
	m.BeforeEffect = func(effect string) {
		if effect == "kubeadm publishes cluster-info" && !m.PoweredOff {
			m.PowerCutAt = 1
		}
	}
	if err := m.boot(); err == nil {
		t.Fatal("the machine continued after the power cut")
	}
	m.BeforeEffect = nil
	bare := *m.site
	bare.Credentials = configs.Credentials{}
	m.stampSite(&bare)
	m.on()
	m.inits = nil
	if err := m.boot(); err == nil || !m.ConsoleHas("cluster-info and the join tokens were never published") || slices.Contains(m.inits, "addon kube-proxy") {
		t.Errorf("%v: kubeadm ran %q\n%s", err, m.inits, strings.Join(m.Console, "\n"))
	}
	m.stampSite(m.site)
	m.on()
	m.bootDone()
}

// TestKeysAreWipedBeforeReady checks that the keys are removed from the slot as soon as they are
// not needed, even before a network add-on makes the Node Ready.
func TestKeysAreWipedBeforeReady(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.NotReady = true
	if err := m.boot(); err == nil || !m.ConsoleHas("not Ready") {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.keysOnlyInPlace()
}

// TestPowerCutOfMaster cuts the power before each effect of a bootstrap. etcd is bootstrapped once,
// and at each boot it starts only after a decision.
func TestPowerCutOfMaster(t *testing.T) {
	t.Parallel()
	newControlPlane(t, mintedSites(t, 1)).cutAnywhere(t, 60, func(m *controlPlane, when string) {
		if len(m.starts) != 1 || len(m.Cluster.CreatedSecrets) != 1 {
			m.T.Errorf("%s: etcd was started as %q, objects %q", when, m.starts, m.Cluster.CreatedSecrets)
		}
		m.wantApplied(when)
	})
}

// TestPowerCutOfReplacement is like TestPowerCutOfMaster, for a replaced machine. In the end the
// machine has one membership, with a vote.
func TestPowerCutOfReplacement(t *testing.T) {
	t.Parallel()
	machine := newControlPlane(t, mintedSites(t, 3))
	machine.Now = machine.Now.Add(200 * time.Hour)
	machine.Cluster.NoClusterInfo = false
	machine.quorum()
	machine.cutAnywhere(t, 40, func(m *controlPlane, when string) {
		members := m.others["192.0.2.12"].members
		own := slices.DeleteFunc(slices.Clone(members), func(o map[string]any) bool {
			return !slices.Contains(o["peerURLs"].([]string), "https://192.0.2.11:2380")
		})
		if len(members) != 3 || len(own) != 1 || own[0]["isLearner"] != nil {
			m.T.Errorf("%s: members %v", when, members)
		}
		if len(m.starts) != 1 || !strings.HasSuffix(m.starts[0], " existing") {
			m.T.Errorf("%s: etcd was started as %q", when, m.starts)
		}
	})
}

// cutAnywhere cuts the power of copies of this machine before each effect of their first boot, and
// checks the result of the next boot. There must be at least least effects.
func (m *controlPlane) cutAnywhere(t *testing.T, least int, check func(m *controlPlane, when string)) {
	t.Helper()
	files := m.Files()
	whole := m.cloneWith(t, files)
	whole.bootDone()
	if whole.Effects < least {
		t.Fatalf("only %d effects were counted", whole.Effects)
	}
	cutBefore(t, m, files, whole.Effects, afterCut[*controlPlane]{
		next: func(_ *testing.T, cut *controlPlane, _ []worldtest.Entry, goesOn func(string, *controlPlane, []worldtest.Entry)) {
			cut.LoseUnsynced()
			cut.on()
			goesOn("power cut", cut, cut.Files())
		},
		check: func(_ *testing.T, m *controlPlane, when string) {
			m.keysOnlyInPlace()
			check(m, when)
		},
		said: func(_ *testing.T, m *controlPlane) { m.keysUnsaid() },
	})
}

// TestManifests checks that manifests are applied once per cluster, in order, and retried while the
// API server rejects one of the objects.
func TestManifests(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.ApplyFails = true
	m.Patience = 15 * time.Minute // by the machine's clock
	if err := m.boot(); err == nil || !m.ConsoleHas("1 of 3 objects of the Cluster's manifests to be applied: applying apps/shop.yaml, document 1, item 2 (ConfigMap late): ") || !m.ConsoleHas("failed calling webhook") || !m.ConsoleHas("kubectl -n kube-system label configmap edgebake-manifests edgebake.io/applying-") {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.keysOnlyInPlace() // a machine that waits for a worker has no keys in the slot
	if m.Cluster.AllApplied {
		t.Error("the record says that all manifests are applied")
	}
	m.Cluster.ApplyFails = false
	m.on()
	m.bootDone()
	m.wantApplied("once the webhook answers")

	// Somebody has changed one of the objects since.
	m.Cluster.Applied = nil
	again := newControlPlane(t, mintedSites(t, 1))
	m.stampSite(m.site)
	m.on()
	m.bootDone()
	if len(m.Cluster.Applied) > 0 || m.Has(controlplane.ClusterManifests) {
		t.Errorf("applied again: %q", m.Cluster.Applied)
	}

	// Everything succeeds at once.
	again.bootDone()
	again.wantApplied("at once")
	if !slices.Equal(again.Cluster.Applied, appliedPaths) {
		t.Errorf("applied in the order %q", again.Cluster.Applied)
	}
}

// TestManifestsOfAnOlderCluster checks a machine that joins a cluster without a record of applied
// manifests. It creates missing objects, and never changes an existing one.
func TestManifestsOfAnOlderCluster(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.quorum()
	m.Cluster.CreatedPaths = []string{appliedPaths[0], appliedPaths[1]} // a person has changed them since
	m.Cluster.MarkerPatchFails = true                                   // temporarily
	m.Patience = 15 * time.Minute
	if err := m.boot(); err == nil {
		t.Fatal("first boot succeeded without a record of the applied objects")
	}
	m.Cluster.MarkerPatchFails = false
	m.on()
	m.bootDone()
	if want := appliedPaths; len(m.Cluster.Applied) > 0 || !slices.Equal(m.Cluster.CreatedPaths, want) || !m.Cluster.AllApplied || m.Has(controlplane.ClusterManifests) {
		t.Errorf("applied %q, there are %q", m.Cluster.Applied, m.Cluster.CreatedPaths)
	}
}

// TestManifestsAreAppliedOnce checks that other objects are not applied again while one waits for a
// webhook. Changes to them stay, on the machine that waits and on others.
func TestManifestsAreAppliedOnce(t *testing.T) {
	t.Parallel()
	once := map[string]int{appliedPaths[0]: 1, appliedPaths[2]: 1}
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.ApplyFails = true
	m.Patience = 30 * time.Minute // three rounds
	if err := m.boot(); err == nil {
		t.Fatal("first boot succeeded although one object is not applied")
	}
	if got := m.Cluster.ApplyCounts(); !maps.Equal(got, once) {
		t.Errorf("in half an hour, applied %v", got)
	}
	m.on()
	m.Patience = 15 * time.Minute
	if err := m.boot(); err == nil || !maps.Equal(m.Cluster.ApplyCounts(), once) {
		t.Errorf("after a restart, applied %v (%v)", m.Cluster.ApplyCounts(), err)
	}
	// Another control-plane node has all manifests, and has applied none.
	other := newControlPlane(t, mintedSites(t, 1))
	other.Cluster.ApplyFails, other.Cluster.ApplyMarker = true, maps.Clone(m.Cluster.ApplyMarker)
	other.Patience = 15 * time.Minute
	if err := other.boot(); err == nil || len(other.Cluster.Applied) > 0 {
		t.Errorf("another node applied %v (%v)", other.Cluster.Applied, err)
	}
	// A person marks the manifests as applied.
	other.Cluster.AllApplied = true
	other.on()
	other.bootDone()
	if len(other.Cluster.Applied) > 0 || other.Has(controlplane.ClusterManifests) {
		t.Errorf("applied %v although a person had ended the retries", other.Cluster.Applied)
	}

	m.Cluster.ApplyFails = false
	m.on()
	m.bootDone()
	m.wantApplied("once the webhook answers")
	once[appliedPaths[1]] = 1
	if got := m.Cluster.ApplyCounts(); !maps.Equal(got, once) {
		t.Errorf("in the end, applied %v", got)
	}
}

// TestManifestsThatCannotBeNoted checks that an applied object that cannot be recorded is recorded
// later, and is not applied every few seconds.
func TestManifestsThatCannotBeNoted(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.MarkerPatchFails = true
	m.Patience = 5 * time.Minute
	if err := m.boot(); err == nil || !m.ConsoleHas("recording that apps/shop.yaml, document 1, item 1 (Namespace shop) is applied") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	if got := m.Cluster.ApplyCounts(); !maps.Equal(got, map[string]int{appliedPaths[0]: 1, appliedPaths[2]: 1}) {
		t.Errorf("applied %v", got)
	}
	m.Cluster.MarkerPatchFails = false
	m.on()
	m.bootDone()
	m.wantApplied("in the end")
}

// TestPublishedDNS checks that kubeadm does not change a complete CoreDNS, and completes a partial
// one.
func TestPublishedDNS(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		there []string
		want  bool
		gone  []string
	}{
		{nil, true, nil},
		{[]string{controlplane.DNSDeployment}, true, []string{controlplane.DNSDeployment}},
		{[]string{controlplane.DNSDeployment, controlplane.DNSService}, false, nil},
	} {
		m := newControlPlane(t, mintedSites(t, 1))
		m.Cluster.DNSObjects = tt.there
		m.bootDone()
		if slices.Contains(m.inits, "addon coredns") != tt.want || !slices.Equal(m.Cluster.DeletedPaths, tt.gone) {
			t.Errorf("with %q: kubeadm ran %q; deleted %q", tt.there, m.inits, m.Cluster.DeletedPaths)
		}
	}
}

// TestResetForgetsKeys checks that a reset before kubeadm has made anything removes all keys of the
// cluster.
func TestResetForgetsKeys(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.KubeadmInit = func(machine.Cmd) error { return errHalf }
	if err := m.boot(); err == nil || !m.Has(member.PKIDir+"/ca.key") {
		t.Fatalf("%v, but the machine has no key to remove", err)
	}
	if _, err := m.reset(); err != nil {
		t.Fatal(err)
	}
	for _, f := range controlplane.Files() {
		if m.Has(f) {
			t.Errorf("%s still exists", f)
		}
	}
}

// TestUnreadableEtcdIsNotBlank checks that an unreadable disk does not count as blank.
func TestUnreadableEtcdIsNotBlank(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Put("/var/lib/etcd/member/wal", "")
	if err := m.boot(); err == nil || m.Has(controlplane.EtcdManifest) || !m.ConsoleHas("reading etcd's data: ") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
}

// TestSecretsOfAMaster checks that the cluster's secrets in a Site, including the nodes' tokens,
// are never shown.
func TestSecretsOfAMaster(t *testing.T) {
	t.Parallel()
	spec := mintedSites(t, 1)[0].Site
	hidden := strings.Join(site.SecretsOf(spec), "\n")
	for i, secret := range spec.Credentials.Keys.Secrets() {
		for line := range strings.Lines(strings.TrimSpace(secret.Reveal())) {
			if line = strings.TrimSpace(line); len(line) >= 24 && !strings.HasPrefix(line, "-----") && !strings.Contains(hidden, line) {
				t.Errorf("secret %d is printed: %.20s...", i, line)
			}
		}
	}
}

// TestPublishedOnce checks that nothing is published again if cluster-info was deleted on purpose
// and the keys are stamped again.
func TestPublishedOnce(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Cluster.NoClusterInfo, m.inits, m.Cluster.CreatedRBAC = true, nil, nil
	m.stampSite(m.site) // with keys
	m.on()
	m.bootDone()
	if slices.Contains(m.inits, "addon kube-proxy") || slices.Contains(m.inits, "bootstrap-token") || !m.Cluster.NoClusterInfo || len(m.Cluster.CreatedRBAC) > 0 {
		t.Errorf("kubeadm ran %q; published again: %v, rules %d", m.inits, !m.Cluster.NoClusterInfo, len(m.Cluster.CreatedRBAC))
	}
	if !m.ConsoleHas("the cluster no longer publishes cluster-info") {
		t.Errorf("the console has no message about it\n%s", strings.Join(m.Console, "\n"))
	}
}
