package controlplane_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
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

// appliedPaths are the paths of the objects in testManifests, in the order in which they can be
// created.
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
	*worldtest.World
	site *configs.Site

	others map[string]*fakeMember
	own    *fakeMember // etcd on m1, once kubelet has started it
	// starts lists the starts of etcd with a blank disk, each as etcdState returns it.
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

// fakeMember simulates ports 2379 and 2380 of a control-plane node: its etcd, or its answer without
// data.
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
	w := newWorld(t)
	w.Put("/usr/share/edgebake/image.json", controlPlaneImage)
	m := &controlPlane{World: w, site: sites[0].Site, others: map[string]*fakeMember{}, halves: map[string]bool{}}
	keys := m.site.Credentials.Keys
	ca, key := parsePair(t, keys.CA)
	w.Cluster = worldtest.NewClusterOf(t, ca, key, "192.0.2.11")
	w.Cluster.Attach(w)
	w.Cluster.NoClusterInfo, w.ClockSynced = true, true
	w.NodeAddr = netip.MustParseAddr("192.0.2.11")
	w.KubeadmInit = m.kubeadm
	w.DialOther, w.RefuseDial = m.dial, m.refused
	w.Listen = func(addr string) (net.Listener, error) {
		if addr != "192.0.2.11:2380" {
			return nil, fmt.Errorf("first boot listens on %s", addr)
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

// CloneWith returns a copy of the machine with these files,
// and of the other control-plane nodes.
func (m *controlPlane) CloneWith(t *testing.T, files []worldtest.Entry) *controlPlane {
	t.Helper()
	c := &controlPlane{World: m.World.CloneWith(t, files), site: m.site, starts: slices.Clone(m.starts), started: m.started, learner: m.learner, inits: slices.Clone(m.inits),
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

func (m *controlPlane) Fingerprint(t *testing.T, files []worldtest.Entry) [32]byte {
	w := m.World.Fingerprint(t, files)
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
	if m.started != "" && m.started != string(pod) { // kubelet restarts the pod
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
		m.Units[ondisk.UnitKubelet], m.World.Started[ondisk.UnitKubelet], m.KubeletLastActive, m.Unregistered = "active", m.Now, m.Now, true
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

// etcdState returns etcd's image tag and arguments in kubeadm's configuration.
// initial-cluster-token is returned separately.
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
	if err := m.Boot(); err != nil {
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

// withRequests stamps the Site with requests about lost control-plane nodes.
func (m *controlPlane) withRequests(w mint.Requests) {
	m.T.Helper()
	s := *m.site
	c := *s.ControlPlane
	c.Absent, c.ContinueFrom, c.Restore = w.Absent, w.ContinueFrom, w.Restore
	c.RequestedAt = ""
	if w.ContinueFrom != "" {
		if w.RequestedAt.IsZero() {
			w.RequestedAt = m.Now // requested again
		}
		c.RequestedAt = w.RequestedAt.UTC().Format(time.RFC3339)
	}
	if !w.Bootstrap.IsZero() {
		c.BootstrapUntil = w.Bootstrap.UTC().Format(time.RFC3339)
	}
	s.ControlPlane = &c
	m.stampSite(&s)
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

// aside lists the files that match path in all directories with data that was set aside.
func (m *controlPlane) aside(path string) []string {
	m.T.Helper()
	found, err := filepath.Glob(m.HostPath(controlplane.AsideDir) + "*" + path)
	if err != nil {
		m.T.Fatal(err)
	}
	return found
}

// cutAnywhere cuts the power of copies of this machine before each effect of their first boot, and
// checks the result of the next boot. There must be at least least effects.
func (m *controlPlane) cutAnywhere(t *testing.T, least int, check func(m *controlPlane, when string)) {
	t.Helper()
	files := m.Files()
	whole := m.CloneWith(t, files)
	whole.bootDone()
	if whole.Effects < least {
		t.Fatalf("only %d effects were counted", whole.Effects)
	}
	worldtest.CutBefore(t, m, files, whole.Effects, worldtest.AfterCut[*controlPlane]{
		Next: func(_ *testing.T, cut *controlPlane, _ []worldtest.Entry, goesOn func(string, *controlPlane, []worldtest.Entry)) {
			cut.LoseUnsynced()
			cut.on()
			goesOn("power cut", cut, cut.Files())
		},
		Check: func(_ *testing.T, m *controlPlane, when string) {
			m.keysOnlyInPlace()
			check(m, when)
		},
		Said: func(_ *testing.T, m *controlPlane) { m.keysUnsaid() },
	})
}

// all sets all other control-plane nodes to one state.
func (m *controlPlane) all(s etcdmember.PeerState) {
	for _, f := range m.others {
		f.state, f.quorum = s, false
	}
}
