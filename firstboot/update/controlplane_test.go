package update

import (
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/test/mediatest"
)

// controlPlaneInfo changes an image's description to one for control-plane nodes.
func controlPlaneInfo(i *ondisk.ImageInfo) {
	i.UpdateSerial, i.UpdateKeys, i.ControlPlaneUpdates = 5, []string{images.public}, true
	i.NodeTypes, i.Kubernetes = []string{configs.NodeControlPlane}, "v1.36.3"
	i.Images = nil
	for _, ref := range []string{"kube-apiserver:v1.36.3", "kube-controller-manager:v1.36.3", "kube-scheduler:v1.36.3", "etcd:3.6.8-0"} {
		i.Images = append(i.Images, ondisk.ImageRef{Ref: "registry.k8s.io/" + ref, Digest: "sha256:aa"})
	}
}

// makeControlPlaneImage makes cp.raw.zst, to which a control-plane node can be updated.
func makeControlPlaneImage(t *testing.T) {
	if _, err := os.Stat(imagePath("cp.raw.zst")); err == nil {
		return
	}
	nano := make([]byte, 1<<20) // as in new.raw
	rand.NewChaCha8([32]byte{4}).Read(nano)
	mediatest.Make(t, imagePath("cp.raw.zst"), mediatest.Image{Files: map[string][]byte{"nano": nano}, ID: newPlan, Seed: "same", Data: 4 << 20, FreeRoot: 6 << 20, FreeData: 1 << 20,
		Initrd: initrd(newPlan), ESP: 40 << 20, SignIndex: images.sign, Info: controlPlaneInfo})
}

// etcdOfThree simulates the etcd of three control-plane nodes, which all give the same answers.
type etcdOfThree struct {
	off  string // the address of a member that does not answer
	then func() // called once a snapshot was taken
}

func (c *etcdOfThree) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	type object = map[string]any
	switch r.URL.Path {
	case "/v3/cluster/member/list":
		var members []object
		for i := range 3 {
			members = append(members, object{"ID": fmt.Sprint(i + 1), "name": fmt.Sprintf("m%d", i+1), "peerURLs": []string{fmt.Sprintf("https://192.0.2.1%d:2380", i+1)}})
		}
		answer(object{"members": members})
	case "/v3/maintenance/alarm":
		answer(object{})
	case "/v3/maintenance/status":
		answer(object{"header": object{"member_id": "1"}, "leader": "1"})
	case "/v3/maintenance/snapshot":
		text := []byte("all objects")
		sum := sha256.Sum256(text)
		answer(object{"result": object{"blob": append(text, sum[:]...)}})
		if c.then != nil {
			c.then()
		}
	default:
		http.NotFound(w, r)
	}
}

// controlPlaneBox is the machine m1 of three control-plane nodes.
type controlPlaneBox struct {
	*box
	cluster *worldtest.Cluster
	etcd    *etcdOfThree
	doc     string // the Site
	etcds   worldtest.Listener
	apiDown bool
}

func newControlPlaneBox(t *testing.T) *controlPlaneBox {
	t.Helper()
	b := newBox(t)
	makeControlPlaneImage(t)
	m := &controlPlaneBox{box: b, etcd: &etcdOfThree{}}
	b.now = worldtest.WorldStart
	site := mintedSite(t, b.now)
	encoded, err := configs.EncodeSlot(site)
	if err != nil {
		t.Fatal(err)
	}
	m.doc = string(encoded)
	m.serve(site)
	var info ondisk.ImageInfo
	if err := json.Unmarshal([]byte(b.get(ondisk.ImageInfoFile)), &info); err != nil {
		t.Fatal(err)
	}
	controlPlaneInfo(&info)
	out, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	b.put(ondisk.ImageInfoFile, string(out))
	b.put(controlplane.Pods[0], "kind: Pod\n")
	return m
}

var minted struct {
	sync.Once
	site *configs.Site
}

// mintedSite returns the Site of m1.
func mintedSite(t *testing.T, now time.Time) *configs.Site {
	t.Helper()
	minted.Do(func() { minted.site = mintSite(t, now) })
	return minted.site
}

func mintSite(t *testing.T, now time.Time) *configs.Site {
	t.Helper()
	text := "apiVersion: edgebake.io/v1alpha1\nkind: Cluster\nname: shops\nkubernetesVersion: v1.36.1\nkubeProxy: {mode: none}\nmasters:\n"
	for i := range 3 {
		text += fmt.Sprintf("- {name: m%d, address: 192.0.2.1%d}\n", i+1, i+1)
	}
	text += "---\napiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\ndns: {disabled: true}\n"
	parsed, err := clusterdoc.Parse("cluster.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "shops")
	if _, err := mint.New(dir, parsed, mint.Options{Now: now}); err != nil {
		t.Fatal(err)
	}
	sites, err := mint.ControlPlaneSites(dir, sealed.Identity{}, now)
	if err != nil {
		t.Fatal(err)
	}
	return sites[0].Site
}

// serve starts the cluster of a Site, and puts the cluster's files on the box.
func (m *controlPlaneBox) serve(site *configs.Site) {
	m.t.Helper()
	t, b := m.t.(*testing.T), m.box
	pair := func(p configs.KeyPair) tls.Certificate {
		c, err := tls.X509KeyPair([]byte(p.Cert), []byte(p.Key.Reveal()))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	keys := site.Credentials.Keys
	ca, etcdCA := pair(keys.CA), pair(keys.EtcdCA)
	m.cluster = worldtest.NewClusterOf(t, ca.Leaf, signer(t, ca), "192.0.2.11")
	m.cluster.Now = func() time.Time { return b.now }
	peer := worldtest.IssueFor(t, etcdCA.Leaf, signer(t, etcdCA), "m1", []string{"127.0.0.1", "192.0.2.11", "192.0.2.12", "192.0.2.13"}, b.now.Add(-time.Hour), b.now.AddDate(1, 0, 0))
	m.etcds = worldtest.Serve(t, &http.Server{Handler: m.etcd, TLSConfig: &tls.Config{Certificates: []tls.Certificate{peer}, Time: func() time.Time { return b.now }}})
	both := worldtest.PairPEM(t, peer)
	at := strings.Index(both, "-----BEGIN PRIVATE KEY")
	b.put(member.PKIDir+"/etcd/ca.crt", keys.EtcdCA.Cert)
	b.put(member.PKIDir+"/etcd/peer.crt", both[:at])
	b.put(member.PKIDir+"/etcd/peer.key", both[at:])
	b.put(ondisk.KubeCA, keys.CA.Cert)
	admin := base64.StdEncoding.EncodeToString([]byte(m.cluster.ClientFrom("super-admin", b.now.Add(-time.Hour), b.now.AddDate(1, 0, 0))))
	kc, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: "https://192.0.2.11:6443", CAData: base64.StdEncoding.EncodeToString([]byte(keys.CA.Cert))}, kubeapi.User{CertData: admin, KeyData: admin})
	if err != nil {
		t.Fatal(err)
	}
	b.put(controlplane.SuperAdminConf, string(kc))
}

func signer(t *testing.T, c tls.Certificate) crypto.Signer {
	t.Helper()
	key, ok := c.PrivateKey.(crypto.Signer)
	if !ok {
		t.Fatalf("a key of type %T", c.PrivateKey)
	}
	return key
}

func (m *controlPlaneBox) env() *machine.Env {
	e := m.box.env()
	e.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		switch {
		case err != nil:
			return nil, err
		case port == "6443" && m.apiDown, port == "2379" && host == m.etcd.off:
			return nil, errors.New("connection refused")
		case port == "2379":
			return m.etcds.Dial(ctx, addr)
		}
		return m.cluster.Dial(ctx, addr)
	}
	read := e.ReadSlot
	e.ReadSlot = func(dev string) (*slot.Contents, error) {
		c, err := read(dev)
		if errors.Is(err, slot.ErrNoSite) && c == nil {
			c = &slot.Contents{Info: ondisk.SlotInfo{Version: ondisk.SlotInfoVersion}}
		}
		if c != nil {
			c.Files, err = map[string][]byte{ondisk.SlotSite: []byte(m.doc)}, nil
		}
		return c, err
	}
	return e
}

// update updates the box to cp.raw.zst.
func (m *controlPlaneBox) update() error {
	return m.orderWith(m.env(), Options{Image: m.inside("cp.raw.zst")})
}

func (m *controlPlaneBox) holder() string {
	m.cluster.Mu.Lock()
	defer m.cluster.Mu.Unlock()
	if m.cluster.UpdateLease == nil {
		return ""
	}
	return m.cluster.UpdateLease.Holder
}

func (m *controlPlaneBox) has(p string) bool {
	_, err := os.Stat(filepath.Join(m.root, p))
	return err == nil
}

func (m *controlPlaneBox) snapshots() int {
	all, err := filepath.Glob(filepath.Join(m.root, member.SnapshotDir, "2*.db"))
	if err != nil {
		m.t.Fatal(err)
	}
	return len(all)
}

// TestUpdateOfAControlPlane checks that a control-plane node holds the Lease from before its boot
// entry is written until the new system is kept.
func TestUpdateOfAControlPlane(t *testing.T) {
	m := newControlPlaneBox(t)
	if err := m.update(); err != nil {
		t.Fatal(err)
	}
	if got := m.done(); got != "cost done, retire done, root done, update-lease done, snapshot done, esp done, reboot done" || !m.rebooted || m.snapshots() != 1 {
		t.Errorf("%s; restarted %v, %d snapshots", got, m.rebooted, m.snapshots())
	}
	finish := func() error { return Finish(t.Context(), m.env()) }
	if err := finish(); err != nil || m.holder() != "m1" {
		t.Errorf("before the restart: %v, held by %q", err, m.holder())
	}
	const entry = "edgebake-b+2-1.conf"
	m.bootsB(entry)
	m.put(ondisk.ImageInfoFile, m.infoOf("cp.raw.zst"))
	if err := finish(); err == nil || m.holder() != "m1" {
		t.Errorf("on trial: %v, held by %q", err, m.holder())
	}
	m.blessed(entry)
	m.apiDown = true
	if err := finish(); err == nil || m.holder() != "m1" || !m.has(Dir) {
		t.Errorf("without its API server: %v, held by %q", err, m.holder())
	}
	m.apiDown = false
	if err := finish(); err != nil || m.holder() != "" || m.has(Dir) {
		t.Errorf("%v, held by %q", err, m.holder())
	}
}

// TestControlPlaneGoesBack checks that the node does not hold the Lease after it has returned to
// the former system.
func TestControlPlaneGoesBack(t *testing.T) {
	m := newControlPlaneBox(t)
	if err := m.update(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(m.root, entryB), filepath.Join(m.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
		t.Fatal(err)
	}
	m.apiDown = true
	if err := Finish(t.Context(), m.env()); err == nil || m.holder() != "m1" {
		t.Errorf("without its API server: %v, held by %q", err, m.holder())
	}
	m.apiDown = false
	if err := Finish(t.Context(), m.env()); err != nil || m.holder() != "" {
		t.Errorf("%v, held by %q", err, m.holder())
	}
}

// TestLeaseWithoutESP checks that the machine keeps the Lease if the EFI system partition cannot be
// read after the boot entry was written: it may restart into the new system at any time.
func TestLeaseWithoutESP(t *testing.T) {
	m := newControlPlaneBox(t)
	esp := filepath.Join(m.root, "efi")
	m.unit = func(_, unit string) error {
		if unit == espUnit && m.has(entryB) {
			return os.Rename(esp, esp+".damaged")
		}
		return nil
	}
	if err := m.update(); err == nil || m.holder() != "m1" {
		t.Errorf("%v; the Lease is held by %q", err, m.holder())
	}
	if err := os.Rename(esp+".damaged", esp); err != nil {
		t.Fatal(err)
	}
	if s := m.status(); s != "pending ROOT-B" {
		t.Error(s)
	}
}

// TestControlPlaneWaits checks that some reasons delay an update before any change, others before
// the boot entry is written. The node then holds no Lease, and the same command continues.
func TestControlPlaneWaits(t *testing.T) {
	for _, c := range []struct {
		name, want    string
		busy, changed bool
		prepare, undo func(m *controlPlaneBox)
	}{
		{"another is updated", "the control-plane node m2 has been updating since", true, false,
			func(m *controlPlaneBox) { m.cluster.UpdateLease = &worldtest.UpdateLease{Holder: "m2"} },
			func(m *controlPlaneBox) { m.cluster.UpdateLease.Holder = "" }},
		{"another is faster", "the control-plane node m2 has been updating since", true, true,
			func(m *controlPlaneBox) {
				m.cluster.UpdateLease = &worldtest.UpdateLease{}
				m.cluster.LeaseRace = func(l *worldtest.UpdateLease) { // after the first check
					m.cluster.LeaseRace = func(l *worldtest.UpdateLease) { l.Holder = "m2" }
				}
			},
			func(m *controlPlaneBox) { m.cluster.UpdateLease.Holder = "" }},
		{"a member is off", "the member of etcd on m3 does not answer", true, false,
			func(m *controlPlaneBox) { m.etcd.off = "192.0.2.13" },
			func(m *controlPlaneBox) { m.etcd.off = "" }},
		{"a member goes off", "the member of etcd on m3 does not answer", true, true,
			func(m *controlPlaneBox) { m.etcd.then = func() { m.etcd.off = "192.0.2.13" } },
			func(m *controlPlaneBox) { m.etcd.then, m.etcd.off = nil, "" }},
		{"no room for a snapshot", "updated only after a snapshot of etcd: checking the space for a snapshot", false, true,
			func(m *controlPlaneBox) { m.free = 5 << 20 },
			func(m *controlPlaneBox) { m.free = 90 << 20 }},
		{"its API server is away", "connection refused", true, false,
			func(m *controlPlaneBox) { m.apiDown = true },
			func(m *controlPlaneBox) { m.apiDown = false }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newControlPlaneBox(t)
			c.prepare(m)
			err := m.update()
			if err == nil || !strings.Contains(err.Error(), c.want) || errors.As(err, new(*busy)) != c.busy || run.Advice(err) == "" {
				t.Errorf("%v (%s)", err, run.Advice(err))
			}
			if m.has(planFile) != c.changed || m.has(entryB) || m.rebooted || m.holder() == "m1" || m.has(controlplane.UpdateLeaseFile) {
				t.Errorf("begun: %v, entry: %v, held by %q", m.has(planFile), m.has(entryB), m.holder())
			}
			m.bootable()
			c.undo(m)
			if err := m.update(); err != nil || !m.has(entryB) || m.holder() != "m1" {
				t.Errorf("then: %v, held by %q", err, m.holder())
			}
		})
	}
}

// TestPowerCutsOfAControlPlane cuts the power at each change after the Lease is acquired. The new
// boot entry never exists without the Lease, and the same command continues.
func TestPowerCutsOfAControlPlane(t *testing.T) {
	whole, first, last := newControlPlaneBox(t), 0, 0
	err := Update(t.Context(), whole.env(), Options{Image: whole.inside("cp.raw.zst")}, func(s run.Step) {
		switch s.Name + " " + s.Status {
		case "root done":
			first = whole.effects
		case "esp done":
			last = whole.effects
		}
	})
	if err != nil || last-first < 8 {
		t.Fatalf("%v; changes %d to %d", err, first, last)
	}
	for cut := first + 1; cut <= last; cut++ {
		for _, arrives := range []float64{0, 1} {
			// The Lease is acquired first, and the boot entry is written last.
			if near := cut <= first+4 || cut > last-6; !near && (2*cut+int(arrives))%5 > 0 || testing.Short() && cut%3 > 0 {
				continue
			}
			m := newControlPlaneBox(t)
			m.cut, m.arrives = cut, arrives
			if err := m.update(); !errors.Is(err, errPower) {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			when := fmt.Sprintf("cut at %d (%v)", cut, arrives)
			m.cut = 0
			entry := m.has(entryB)
			if entry && m.holder() != "m1" {
				t.Errorf("%s: the new system boots next, and %q holds the Lease", when, m.holder())
			}
			if !entry {
				if err := Finish(t.Context(), m.env()); err != nil || m.holder() != "" || m.has(controlplane.UpdateLeaseFile) {
					t.Errorf("%s: %v, held by %q", when, err, m.holder())
				}
			}
			m.bootable()
			if err := m.update(); err != nil || m.holder() != "m1" {
				t.Errorf("%s: then %v, held by %q", when, err, m.holder())
			}
			m.updated()
		}
	}
}

// TestCheckControlPlane checks to which images a control-plane node can be updated.
func TestCheckControlPlane(t *testing.T) {
	m := newControlPlaneBox(t)
	sys, err := readSystem(m.env())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		kubernetes, etcd string
		change           func(*ondisk.ImageInfo)
		want             []string
	}{
		{"v1.36.3", "3.6.8-0", nil, nil},
		{"v1.36.9", "3.6.12-1", nil, nil},
		{"v1.36.1", "v3.6.1", nil, nil},
		{"v1.36.5", "3.7.0-0", nil, []string{"the image has etcd 3.7.0-0 and this control-plane node 3.6.8-0"}},
		{"v1.36.5", "latest", nil, []string{"the image has etcd latest and this control-plane node 3.6.8-0"}},
		{"v1.37.2", "3.7.0-0", nil, []string{"use an image with the same minor version", "the image has etcd 3.7.0-0", "another minor version: build the image"}},
		{"v1.35.9", "3.6.8-0", nil, []string{"use an image with the same minor version"}},
		{"v1.36.5", "3.6.9-0", func(i *ondisk.ImageInfo) { i.ControlPlaneUpdates = false }, []string{"the image was made by an older edgebake"}},
		{"v1.36.5", "3.6.9-0", func(i *ondisk.ImageInfo) { i.NodeTypes = []string{"native"} }, []string{`the image does not support nodes of type "control-plane"`}},
		{"v1.36.5", "3.6.9-0", func(i *ondisk.ImageInfo) { i.Images = i.Images[1:] }, []string{"the image lacks the container image registry.k8s.io/kube-apiserver:v1.36.5"}},
	} {
		next := sys.image
		next.Plan = newPlan
		controlPlaneInfo(&next)
		next.Kubernetes = c.kubernetes
		for i := range next.Images {
			next.Images[i].Ref = strings.NewReplacer("v1.36.3", c.kubernetes, "3.6.8-0", c.etcd).Replace(next.Images[i].Ref)
		}
		if c.change != nil {
			c.change(&next)
		}
		err := sys.checkMachine(next, 1<<20)
		if (err == nil) != (c.want == nil) {
			t.Errorf("%s, etcd %s: %v", c.kubernetes, c.etcd, err)
		}
		for _, want := range c.want {
			if !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%s, etcd %s: %v\nlacks %q", c.kubernetes, c.etcd, err, want)
			}
		}
	}
}
