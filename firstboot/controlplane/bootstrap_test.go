package controlplane_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

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
	worldtest.Golden(t, *rewrite, "controlplane.again.console", strings.Join(m.Console, "\n")+"\n")
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
// Site does not bootstrap again: its permit has expired, or the other nodes have no quorum or are
// silent.
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
			err := m.Boot()
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
			err := m.Boot()
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
			err := m.Boot()
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
			err := m.Boot()
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
	if err := m.Boot(); err == nil || !m.ConsoleHas("was removed from etcd") || len(m.inits) > 2 {
		t.Errorf("%v, kubeadm ran %q\n%s", err, m.inits, strings.Join(m.Console, "\n"))
	}
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
			if err := m.Boot(); (err == nil) != (cut == "") {
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
			if err := again.Boot(); err == nil || len(again.starts) > 0 || again.Has(controlplane.EtcdManifest) || !again.ConsoleHas("has already used this bootstrap permit") {
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
			if err := m.Boot(); err == nil || len(m.starts) > 0 || !m.ConsoleHas("has already used this bootstrap permit") {
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
			if err := m.Boot(); err == nil || len(m.starts) > 0 || !m.ConsoleHas(tt.says) {
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
			if err := m.Run(firstboot.New(e)); err == nil || len(m.starts) > 0 || !m.ConsoleHas("already used this bootstrap permit") {
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

// TestBeginsOverALoglessDatabase checks that a bootstrap and a join set the remains of a rejected
// start or of a damaged disk aside.
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

// TestBootstrapWithoutAnAbsentMaster checks a control-plane node that never worked. The others
// bootstrap without it if their Sites request that.
func TestBootstrapWithoutAnAbsentMaster(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.others["192.0.2.12"].state = etcdmember.Blank
	if err := m.Boot(); err == nil || len(m.starts) > 0 {
		t.Fatalf("%v, etcd was started as %q", err, m.starts)
	}
	m.withRequests(mint.Requests{Absent: []string{"m3"}})
	m.on()
	m.bootDone()
	if want := []string{"3.6.8-0 m1=https://192.0.2.11:2380,m2=https://192.0.2.12:2380 new"}; !slices.Equal(m.starts, want) {
		t.Errorf("etcd was started as %q, want %q", m.starts, want)
	}
}

// TestUnreadableEtcdIsNotBlank checks that an unreadable disk does not count as blank.
func TestUnreadableEtcdIsNotBlank(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Put("/var/lib/etcd/member/wal", "")
	if err := m.Boot(); err == nil || m.Has(controlplane.EtcdManifest) || !m.ConsoleHas("reading etcd's data: ") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
}

// TestUnreadableRecordIsNotMissing checks that etcd does not start while the record of its data,
// which would show that the cluster was created before, cannot be read.
func TestUnreadableRecordIsNotMissing(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Put(controlplane.MembershipFile+"/directory", "")
	if err := m.Boot(); err == nil || m.Has(controlplane.EtcdManifest) || !m.ConsoleHas("reading the record of etcd's data: ") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
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
