package firstboot

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// wantRepairOnly plugs in an untrusted stick for the next boot, and checks that the boot applies
// only the repair on it, and not its users.
func wantRepairOnly(t *testing.T, w *world, when string) {
	t.Helper()
	w.Plug(w.Site(untrustedUsers, "network: {dns: [192.0.2.123]}"))
	w.PowerOn()
	patience := w.Patience
	w.Patience = 20 * time.Second // the stick is read at once, and the machine may never join
	if err := w.Boot(); err == nil {
		t.Logf("%s: the node is Ready", when)
	}
	w.Patience = patience
	if w.Has("/root/.ssh/authorized_keys") || strings.Contains(w.SlotSite(worldtest.SlotDevice), "ssh-ed25519") {
		t.Errorf("%s: the keys of the unsigned stick are in place:\n%s", when, w.SlotSite(worldtest.SlotDevice))
	}
	if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") {
		t.Errorf("%s: the stick did not repair the machine\n%s", when, strings.Join(w.Console, "\n"))
	}
}

// expire makes the node's certificate expire, and stamps a token.
func (w *world) expire() {
	w.Now = w.Now.AddDate(2, 0, 0)
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	w.Stamp(worldtest.SlotDevice, w.SlotSite(worldtest.SlotDevice)+worldtest.WithToken+"\n")
}

// TestAMemberThatFailsToJoinAgain checks that a member removes its credentials before it joins
// again. For untrusted sticks it stays a member, even after a power cut or without a membership
// record.
func TestAMemberThatFailsToJoinAgain(t *testing.T) {
	t.Parallel()
	for name, world := range map[string]func(*testing.T) *world{
		"native": func(t *testing.T) *world { return nativeWorld(t) }, "static pod": podWorld,
	} {
		for _, former := range []bool{false, true} {
			w := world(t)
			w.setStickPolicy(ondisk.SitesRepair)
			w.UseSingleMaster()
			w.MustBoot()
			if former {
				if err := os.Remove(w.HostPath(member.RecordFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
			}
			w.expire()
			w.JoinError = func(int) error { return errors.New("kubelet is not well") }
			w.PowerOn()
			whole := w.Clone(t)
			if err := whole.Boot(); err == nil || member.HasCredentials(whole.Env()) {
				t.Fatalf("%s: the machine is still recorded as a member: %v", name, err)
			}
			wantRepairOnly(t, whole.Clone(t), name+": after a failed join")

			first := slices.Index(whole.EffectNames, "write "+member.JoinedFile)
			last := slices.IndexFunc(whole.EffectNames, func(n string) bool { return strings.HasPrefix(n, "kubeadm writes ") })
			if first < 0 || last < first {
				t.Fatalf("%s: %q", name, whole.EffectNames)
			}
			for n := first; n <= last; n += worldtest.EveryCut() {
				cut := w.Clone(t)
				cut.PowerCutAt = n + 1
				if err := cut.Boot(); err == nil {
					t.Fatalf("%s: cut at %d: the machine continued after the power cut", name, n)
				}
				wantRepairOnly(t, cut, name+": cut at "+whole.EffectNames[n])
			}
		}
	}
}

// TestPowerCutAfterTheJoin cuts the power after the membership record is synced, but before
// kubeadm's files are.
func TestPowerCutAfterTheJoin(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.setStickPolicy(ondisk.SitesRepair)
	w.UseSingleMaster()
	whole := w.Clone(t)
	whole.MustBoot()
	w.PowerCutAt = slices.Index(whole.EffectNames, "write "+member.RecordFile) + 2
	if err := w.Boot(); err == nil || w.PowerCutAt == 1 {
		t.Fatal("the power was not cut")
	}
	w.LoseUnsynced()
	wantRepairOnly(t, w, "after the join")
}

// TestOnlyResetMakesABlankMachine checks that a failed move to another cluster does not make the
// machine blank, and that a reset does.
func TestOnlyResetMakesABlankMachine(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.setStickPolicy(ondisk.SitesRepair)
	w.MustBoot()
	want := member.Record{Version: member.RecordVersion, Node: "edge-sn0042", CA: []string{w.Cluster.Pin}}
	if got, ok := member.ReadRecord(w.Env()); !ok || got.Node != want.Node || !slices.Equal(got.CA, want.CA) || got.Version != want.Version {
		t.Errorf("the record is %+v", got)
	}
	w.Rebuild()
	w.JoinError = func(int) error { return errors.New("kubelet is not well") }
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.PowerOn()
	if err := w.Boot(); err == nil || member.HasCredentials(w.Env()) {
		t.Fatalf("the machine has not left its cluster: %v", err)
	}
	if got, ok := member.ReadRecord(w.Env()); !ok || got.Node != "" || got.CA != nil {
		t.Errorf("the record of a machine that has left its cluster is %+v", got)
	}
	wantRepairOnly(t, w, "on the way to another cluster")
	w.JoinError = nil
	w.PowerOn()
	w.MustBoot()
	if got, ok := member.ReadRecord(w.Env()); !ok || got.Node != want.Node || !slices.Equal(got.CA, []string{w.Cluster.Pin}) {
		t.Errorf("the record in the other cluster is %+v", got)
	}
	if _, err := w.reset(); err != nil {
		t.Fatal(err)
	}
	if member.HasJoined(w.Env()) {
		t.Error("after a reset the machine does not count as new")
	}
	delete(w.Cluster.Nodes, "edge-sn0042")
	w.Plug(w.Site(untrustedUsers, worldtest.WithToken))
	w.PowerOn()
	w.MustBoot()
	if !w.Has("/root/.ssh/authorized_keys") {
		t.Error("after a reset the machine does not use the whole Site of a stick")
	}
}

// TestPowerCutWhileLeaving checks that remaining credentials do not make the machine a member of
// the former cluster again.
func TestPowerCutWhileLeaving(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Rebuild()
	w.JoinError = func(int) error { return errors.New("kubelet is not well") }
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.PowerOn()
	whole := w.Clone(t)
	if err := whole.Boot(); err == nil || member.HasCredentials(whole.Env()) {
		t.Fatalf("the machine has not left its cluster: %v", err)
	}
	w.PowerCutAt = slices.Index(whole.EffectNames, "write "+member.LeavingFile) + 2
	if err := w.Boot(); err == nil || w.PowerCutAt == 1 || !member.HasCredentials(w.Env()) {
		t.Fatalf("the power was not cut: %v", err)
	}
	w.PowerOn()
	if err := w.Boot(); err == nil || member.HasCredentials(w.Env()) {
		t.Fatalf("the machine has not left its cluster: %v", err)
	}
	if got, ok := member.ReadRecord(w.Env()); !ok || got.Node != "" || got.CA != nil {
		t.Errorf("the record of a machine that has left its cluster is %+v", got)
	}
}
