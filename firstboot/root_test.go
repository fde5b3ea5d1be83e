package firstboot

import (
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// TestExchangedRoot checks that a new root gets the Site's settings and the machine ID, and the
// node stays the same.
func TestExchangedRoot(t *testing.T) {
	t.Parallel()
	for _, brought := range []struct{ id, how string }{
		{"6f1c8f3e2a0b4d5c9e7f8a1b2c3d4e5f\n", "by the initrd"},
		{"00000000000000000000000000000abc\n", "not by the initrd: systemd made another"},
		{"", "not at all"},
	} {
		t.Run(brought.how, func(t *testing.T) {
			w := nativeWorld(t, "users: [{name: ops, groups: [sudo]}]")
			if err := w.Boot(); err != nil {
				t.Fatal(err)
			}
			id, passwd := w.Get(ondisk.MachineID), w.Get("/etc/passwd")
			w.ExchangeRoot()
			w.Put(machine.EtcMachineID, brought.id)
			w.PowerOn()
			if w.Units[ondisk.UnitKubelet] == "active" {
				t.Fatal("kubelet runs although the Site is not applied to this root")
			}
			if err := w.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if got := w.Get(machine.EtcMachineID); got != id || w.Get(ondisk.MachineID) != id {
				t.Errorf("the machine ID is %q, on DATA %q; it was %q", got, w.Get(ondisk.MachineID), id)
			}
			if got := w.Get("/etc/passwd"); got != passwd {
				t.Errorf("the Site's user is not on this root:\n%s", got)
			}
			if got := strings.TrimSpace(w.Get("/proc/sys/kernel/hostname")); got != "edge-sn0042" {
				t.Errorf("the host name is %s", got)
			}
			started, settled := slices.Index(w.EffectNames, "start "+ondisk.UnitKubelet), slices.Index(w.EffectNames, "write "+site.AppliedFile)
			if started < settled || settled < 0 {
				t.Errorf("kubelet was to start after the Site's settings: %q", w.EffectNames)
			}
			if w.Joins != 1 {
				t.Errorf("kubeadm ran %d times", w.Joins)
			}
			if !w.Has(ondisk.HealthyFile) {
				t.Error("the boot is not marked as healthy")
			}
		})
	}
}

// TestExchangedRootOffline checks a new root that boots offline. kubelet runs, and the boot is
// marked as healthy once the machine has an address.
func TestExchangedRootOffline(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.ExchangeRoot()
	w.PowerOn()
	w.Offline = true
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	if w.Units[ondisk.UnitKubelet] != "active" {
		t.Error("kubelet does not run")
	}
	if w.Has(ondisk.HealthyFile) {
		t.Error("the boot is marked as healthy although the machine has no address")
	}
	w.PowerOn()
	w.HasRoute = true
	w.Units[ondisk.UnitIPVSCare] = "active"
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	if !w.Has(ondisk.HealthyFile) {
		t.Errorf("all offline checks succeed, but the boot is not marked as healthy:\n%s", w.Log.String())
	}
}

// TestExchangedRootOfAnEdgeNode checks an edge node that boots a new root while no API server
// answers. It has its yurthub, without which kubelet would run no pods.
func TestExchangedRootOfAnEdgeNode(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		form, args string
		world      func(*testing.T) *world
	}{
		{"unit", hub.EnvFile, func(t *testing.T) *world { return edgeWorld(t) }},
		{"staticPod", openyurt.Manifest, podWorld},
	} {
		t.Run(c.form, func(t *testing.T) {
			w := c.world(t)
			w.MustBoot()
			was := w.Get(c.args)
			w.ExchangeRoot()
			w.PowerOn()
			w.Offline, w.HasRoute = true, true
			w.Units[ondisk.UnitIPVSCare] = "active"
			if err := w.Boot(); err == nil {
				t.Fatal("first boot succeeded although no API server answers")
			}
			if state := w.State(); state.Phases[len(state.Phases)-2].Status != ondisk.PhaseWaiting {
				t.Errorf("first boot stopped before it looked for the Node:\n%s", strings.Join(w.Console, "\n"))
			}
			if got := w.Get(c.args); got != was {
				t.Errorf("yurthub's arguments are\n%s\nthey were\n%s", got, was)
			}
		})
	}
}

// TestOwnFileSystems checks that DATA and the root in use get their own file system UUIDs. The
// other root is not changed.
func TestOwnFileSystems(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	golden := [16]byte{1}
	w.FSUUIDs = map[string][16]byte{"/dev/vda3": golden, "/dev/vda4": golden, "/dev/vda5": golden}
	w.ExchangeRoot()
	if got := site.OwnFileSystems(w.Env()); len(got) != 2 || got[ondisk.LabelRootB] != "/dev/vda4" || got[ondisk.LabelData] != "/dev/vda5" {
		t.Errorf("file systems in use are %v", got)
	}
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	var tuned []string
	for _, n := range w.EffectNames {
		if strings.Contains(n, "tune2fs") {
			tuned = append(tuned, n[strings.LastIndex(n, " ")+1:])
		}
	}
	slices.Sort(tuned)
	if want := []string{"/dev/vda4", "/dev/vda5"}; !slices.Equal(tuned, want) {
		t.Errorf("tune2fs ran on %q, want %q", tuned, want)
	}
}
