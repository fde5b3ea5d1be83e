package controlplane_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// trio returns m1 of three healthy control-plane nodes.
func trio(t *testing.T) *controlPlane {
	t.Helper()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.Now = m.Now.Add(200 * 60 * 60 * 1e9)
	m.quorum()
	m.bootDone()
	members := []map[string]any{}
	for i := range 3 {
		members = append(members, map[string]any{"ID": fmt.Sprint(i + 1), "name": fmt.Sprintf("m%d", i+1), "peerURLs": []string{fmt.Sprintf("https://192.0.2.1%d:2380", i+1)}})
	}
	m.own.members = members
	for i, address := range []string{"192.0.2.12", "192.0.2.13"} {
		f := m.others[address]
		f.mu.Lock()
		f.state, f.quorum, f.id, f.members = etcdmember.InUse, true, fmt.Sprint(i+2), members
		f.mu.Unlock()
	}
	return m
}

// TestUpdateLeaseIsFree checks when a control-plane node may be updated.
func TestUpdateLeaseIsFree(t *testing.T) {
	t.Parallel()
	base := trio(t)
	files := base.Files()
	for _, c := range []struct {
		name, want string
		prepare    func(m *controlPlane)
	}{
		{"all is well", "", func(*controlPlane) {}},
		{"the Lease is free", "", func(m *controlPlane) { m.Cluster.UpdateLease = &worldtest.UpdateLease{} }},
		{"it is this machine's", "", func(m *controlPlane) { m.Cluster.UpdateLease = &worldtest.UpdateLease{Holder: "m1"} }},
		{"another is updated", "the control-plane node m2 has been updating since 2026-11-20T09:00:00.000000Z", func(m *controlPlane) {
			m.Cluster.UpdateLease = &worldtest.UpdateLease{Holder: "m2"}
		}},
		{"the one that was updated is gone for ever", "", func(m *controlPlane) { m.Cluster.UpdateLease = &worldtest.UpdateLease{Holder: "m4"} }},
		{"a member is off", "the member of etcd on m3 does not answer", func(m *controlPlane) { m.others["192.0.2.13"].state = etcdmember.Silent }},
		{"the holder is off", "the member of etcd on m3 does not answer", func(m *controlPlane) {
			m.others["192.0.2.13"].state = etcdmember.Silent
			m.Cluster.UpdateLease = &worldtest.UpdateLease{Holder: "m3"}
		}},
		{"a member has no vote", "the member of etcd on m3 is not a voting member yet", func(m *controlPlane) {
			own := m.own.members[2]
			m.own.members = append(m.own.members[:2:2], map[string]any{"ID": "3", "name": "m3", "peerURLs": own["peerURLs"], "isLearner": true})
		}},
		{"one is missing", "m3 is not a member of etcd", func(m *controlPlane) { m.own.members = m.own.members[:2] }},
		{"an alarm", "etcd has the alarm NOSPACE on m2", func(m *controlPlane) {
			m.own.alarms = []map[string]string{{"memberID": "2", "alarm": "NOSPACE"}}
		}},
		{"a member that is cut off", "the member of etcd on m2 does not follow the leader", func(m *controlPlane) {
			m.others["192.0.2.12"].status = map[string]string{"leader": "0"}
		}},
		{"no quorum", "request timed out", func(m *controlPlane) { m.own.quorum = false }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := base.CloneWith(t, files)
			m.own = base.own.clone(t, m.site.Credentials.Keys.EtcdCA, m.ClusterTime)
			m.own.id = "1"
			c.prepare(m)
			lease := controlplane.NewUpdateLease(m.Env(), m.site)
			err := lease.CheckFree(t.Context())
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v; want %q", err, c.want)
			}
			if c.want != "" && c.name != "no quorum" && run.Advice(err) == "" {
				t.Errorf("no advice: %v", err)
			}
		})
	}
}

// TestTakeUpdateLease checks that the machine acquires and releases the Lease, also twice, and
// neither acquires nor releases it while another machine holds it.
func TestTakeUpdateLease(t *testing.T) {
	t.Parallel()
	m := trio(t)
	lease := controlplane.NewUpdateLease(m.Env(), m.site)
	holder := func() string {
		m.Cluster.Mu.Lock()
		defer m.Cluster.Mu.Unlock()
		return m.Cluster.UpdateLease.Holder
	}
	if err := lease.Release(t.Context()); err != nil || m.Cluster.UpdateLease != nil {
		t.Errorf("without the Lease: %v, %v", err, m.Cluster.UpdateLease)
	}
	for range 2 { // an update that is run again
		if err := lease.Acquire(t.Context()); err != nil || holder() != "m1" || !m.Has(controlplane.UpdateLeaseFile) {
			t.Fatalf("%v, held by %q", err, holder())
		}
	}
	m.bootDone()
	if holder() != "m1" {
		t.Errorf("first boot ended the update")
	}
	for range 2 {
		if err := lease.Release(t.Context()); err != nil || holder() != "" || m.Has(controlplane.UpdateLeaseFile) {
			t.Fatalf("%v, held by %q", err, holder())
		}
	}
	// Another machine acquires the Lease first.
	m.Cluster.LeaseRace = func(l *worldtest.UpdateLease) { l.Holder = "m2" }
	if err := lease.Acquire(t.Context()); err == nil || !strings.Contains(err.Error(), "m2 has been updating since") || holder() != "m2" {
		t.Errorf("%v, held by %q", err, holder())
	}
	if err := lease.Release(t.Context()); err != nil || holder() != "m2" || m.Has(controlplane.UpdateLeaseFile) {
		t.Errorf("%v, held by %q", err, holder())
	}
	// Another field of the Lease is changed meanwhile.
	m.Cluster.UpdateLease.Holder = ""
	m.Cluster.LeaseRace = func(*worldtest.UpdateLease) {}
	if err := lease.Acquire(t.Context()); err != nil || holder() != "m1" {
		t.Errorf("%v, held by %q", err, holder())
	}
	m.Cluster.LeaseRace = func(*worldtest.UpdateLease) {}
	if err := lease.Release(t.Context()); err != nil || holder() != "" {
		t.Errorf("%v, held by %q", err, holder())
	}
	// A person deletes the Lease.
	if err := lease.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.Cluster.UpdateLease = nil
	if err := lease.Release(t.Context()); err != nil || m.Cluster.UpdateLease != nil || m.Has(controlplane.UpdateLeaseFile) {
		t.Errorf("without the Lease: %v", err)
	}
	// The API server does not answer, but UpdateLeaseFile shows that this machine may hold the
	// Lease.
	m.Cluster.AllDown(true)
	if err := lease.Acquire(t.Context()); err == nil || !m.Has(controlplane.UpdateLeaseFile) {
		t.Errorf("%v", err)
	}
	if err := lease.Release(t.Context()); err == nil || !m.Has(controlplane.UpdateLeaseFile) {
		t.Errorf("%v", err)
	}
}

// TestUpdateLeaseOfAWrittenDisk checks a machine whose disk was rewritten during its update. It
// must not prevent the updates of the others.
func TestUpdateLeaseOfAWrittenDisk(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.Now = m.Now.Add(200 * 60 * 60 * 1e9)
	m.quorum()
	m.Cluster.UpdateLease = &worldtest.UpdateLease{Holder: "m1"}
	m.bootDone()
	if h := m.Cluster.UpdateLease.Holder; h != "" {
		t.Errorf("held by %q", h)
	}
	m.Cluster.UpdateLease.Holder = "m2"
	m.on()
	m.bootDone()
	if h := m.Cluster.UpdateLease.Holder; h != "m2" {
		t.Errorf("held by %q", h)
	}
}

// otherImage boots the machine with the system of another image.
func (m *controlPlane) otherImage(kubernetes, etcd, plan string) {
	m.T.Helper()
	m.Put(ondisk.ImageInfoFile, strings.NewReplacer("v1.36.3", kubernetes, "3.6.8-0", etcd, `"plan":"plan"`, `"plan":"`+plan+`"`).Replace(controlPlaneImage))
	m.on()
}

// podVersions returns the versions of the control plane's pods on the disk.
func (m *controlPlane) podVersions() string {
	var all []string
	for _, p := range controlplane.Pods {
		_, version, _ := strings.Cut(m.Get(p), "# version: ")
		version, _, _ = strings.Cut(version, "\n")
		all = append(all, version)
	}
	return strings.Join(all, " ")
}

const (
	formerPods = "v1.36.3 v1.36.3 v1.36.3"
	laterPods  = "v1.36.5 v1.36.5 v1.36.5"
)

// TestPatchOfTheControlPlane checks that each root of a machine runs the control plane of its own
// image, with the same Site.
func TestPatchOfTheControlPlane(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	if got := m.podVersions(); got != formerPods {
		t.Fatalf("pods: %s", got)
	}
	m.otherImage("v1.36.5", "3.6.9-0", "later")
	m.bootDone()
	if got := m.podVersions(); got != laterPods {
		t.Errorf("on the new system: %s", got)
	}
	m.otherImage("v1.36.3", "3.6.8-0", "plan")
	m.bootDone()
	if got := m.podVersions(); got != formerPods {
		t.Errorf("back: %s", got)
	}
}

// TestPowerCutOfAPatch cuts the power before each effect of a new system's first boot. The next
// boot, of either system, runs that system's control plane.
func TestPowerCutOfAPatch(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.otherImage("v1.36.5", "3.6.9-0", "later")
	m.Effects, m.EffectNames = 0, nil
	files := m.Files()
	whole := m.CloneWith(t, files)
	whole.bootDone()
	if whole.Effects < 8 {
		t.Fatalf("only %d effects: %q", whole.Effects, whole.EffectNames)
	}
	for n := 1; n <= whole.Effects; n += worldtest.EveryCut() {
		for _, back := range []bool{false, true} {
			cut := m.CloneWith(t, files)
			cut.PowerCutAt = n
			_ = cut.Boot() // the power is cut
			at := cut.EffectNames[len(cut.EffectNames)-1]
			cut.LoseUnsynced()
			want := laterPods
			if back {
				cut.otherImage("v1.36.3", "3.6.8-0", "plan")
				want = formerPods
			} else {
				cut.on()
			}
			cut.bootDone()
			if got := cut.podVersions(); got != want {
				t.Errorf("cut at %d (%s), back: %v: %s", n, at, back, got)
			}
			if !cut.Has(member.ControlPlaneMark) {
				t.Errorf("cut at %d (%s): no mark", n, at)
			}
		}
	}
}
