package firstboot

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

const trialEntry = "/efi/loader/entries/edgebake-b+2-1.conf"

// onTrial puts the machine on trial with a system that an update has just installed.
func (w *world) onTrial() {
	w.T.Helper()
	w.Put(machine.BootCountFile, utf16(`\loader\entries\edgebake-b+2-1.conf`))
	w.Put(trialEntry, "")
}

// TestOneChangeAtATime checks that only one change runs at a time, and none while the system is on
// trial or an installed update waits for a restart. A rejected change has no effect.
func TestOneChangeAtATime(t *testing.T) {
	t.Parallel()
	machine := readyNode(t)
	for _, c := range []struct {
		want    string
		prepare func(w *world)
	}{
		{"another update, convert, revert or reset is running", func(w *world) {
			if _, err := w.Env().Lock(t.Context(), "/run/edgebake-change.lock"); err != nil {
				t.Fatal(err)
			}
		}},
		{"the running system is still on trial", func(w *world) { w.onTrial() }},
		{"an update is installed, and the next restart boots its system (boot entry edgebake-b+3.conf)", func(w *world) {
			w.Put("/efi/loader/entries/edgebake-b+3.conf", "")
		}},
	} {
		for what, change := range map[string]func(*world) error{
			"convert": func(w *world) error { _, err := w.convert(pool); return err },
			"revert":  func(w *world) error { _, err := w.revert(); return err },
			"reset":   func(w *world) error { _, err := w.reset(); return err },
		} {
			w := machine.Clone(t)
			c.prepare(w)
			before := w.tree()
			if err := change(w); err == nil || !strings.Contains(err.Error(), c.want) || run.Advice(err) == "" {
				t.Errorf("%s: %v (%s)", what, err, run.Advice(err))
			}
			sameTree(t, what, w.tree(), before)
		}
	}
	w := machine.Clone(t)
	w.Put("/efi/loader/entries/edgebake-b+0-3.conf", "")
	if _, err := w.convert(pool); err != nil {
		t.Errorf("after the new system has failed: %v", err)
	}
	w = machine.Clone(t)
	w.onTrial()
	w.Put(strings.Replace(trialEntry, "+2-1", "", 1), "")
	if err := w.Env().Remove(trialEntry); err != nil {
		t.Fatal(err)
	}
	if _, err := w.convert(pool); err != nil {
		t.Errorf("after the system is kept: %v", err)
	}
}

// TestTrialWithoutAPIServer checks that a boot on trial that reaches no API server is neither
// confirmed nor rolled back, provided that everything else works. It is confirmed once first boot
// has seen the Node or, if the machine was offline before the update, at once.
func TestTrialWithoutAPIServer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name                       string
		prepare                    func(w *world)
		held, healthy, healthyNext bool
	}{
		{"the network is there", func(w *world) { w.HasRoute = true }, true, false, true},
		{"no address", func(*world) {}, false, false, true},
		{"kubelet does not run", func(w *world) { w.HasRoute = true; w.Units[ondisk.UnitKubelet] = "failed" }, false, false, true},
		{"kubelet starts again and again", func(w *world) { w.HasRoute, w.CrashLoop = true, true }, false, false, true},
		{"kubelet starts again and again, and it was offline before", func(w *world) {
			w.HasRoute, w.CrashLoop = true, true
			w.Put("/var/lib/edgebake/update/offline", "")
		}, false, false, true},
		{"it was offline before", func(w *world) {
			w.HasRoute = true
			w.Put("/var/lib/edgebake/update/offline", "")
		}, false, true, true},
	} {
		w := nativeWorld(t)
		w.UseSingleMaster()
		w.MustBoot()
		w.PowerOn()
		w.onTrial()
		w.Units[ondisk.UnitIPVSCare] = "active"
		w.Offline = true
		c.prepare(w)
		if err := w.Boot(); err == nil {
			t.Fatalf("%s: first boot succeeded although no API server answers", c.name)
		}
		if held, healthy := w.Has(ondisk.HeldFile), w.Has(ondisk.HealthyFile); held != c.held || healthy != c.healthy {
			t.Errorf("%s: held: %v, marked as healthy: %v\n%s", c.name, held, healthy, w.Log.String())
		}
		w.Offline, w.CrashLoop = false, false
		w.Units[ondisk.UnitKubelet] = "active"
		w.MustBoot()
		if held, healthy := w.Has(ondisk.HeldFile), w.Has(ondisk.HealthyFile); held || healthy != c.healthyNext {
			t.Errorf("%s, then online: held: %v, marked as healthy: %v", c.name, held, healthy)
		}
	}
}

// TestTrialThatFailsIsNotHeld checks that a boot on trial that reaches an API server, but whose
// Node does not become Ready, is not held, even if an earlier run held it.
func TestTrialThatFailsIsNotHeld(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.UseSingleMaster()
	w.MustBoot()
	w.PowerOn()
	w.onTrial()
	w.Put(ondisk.HeldFile, "")
	w.Cluster.NotReady = true
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded although the Node is not Ready")
	}
	if w.Has(ondisk.HeldFile) || w.Has(ondisk.HealthyFile) {
		t.Errorf("held: %v, marked as healthy: %v", w.Has(ondisk.HeldFile), w.Has(ondisk.HealthyFile))
	}
}

// TestResetEndsAnUpdate checks that a reset removes the files of an update.
func TestResetEndsAnUpdate(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.UseSingleMaster()
	w.MustBoot()
	w.Put("/var/lib/edgebake/update/esp", "fetched")
	if _, err := w.reset(); err != nil {
		t.Fatal(err)
	}
	if w.Has("/var/lib/edgebake/update") {
		t.Error("the update's downloads still exist after a reset")
	}
}
