package firstboot

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/ondisk"
)

// wakeUp is what a board without a battery takes for the time.
var wakeUp = time.Date(1970, 1, 1, 0, 0, 30, 0, time.UTC)

// TestClockBehind: a board without a battery and a time server joins a cluster that was
// born months after its Site was stamped, and comes up again without an API server.
func TestClockBehind(t *testing.T) {
	t.Parallel()
	for name, newWorld := range map[string]func(*testing.T, ...string) *world{"native": nativeWorld, "edge": edgeWorld} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.clockSays(wakeUp)
			w.mustBoot()
			if born := w.cluster.ca.NotBefore; w.now.Before(born) || w.now.After(w.truth()) {
				t.Errorf("the clock says %s, the cluster was born on %s", w.now, born)
			}
			if !strings.Contains(w.log.String(), "no time server answers") {
				t.Error("a time server was not even tried")
			}
			w.powerOn()
			w.clockSays(wakeUp)
			w.offline = true
			if err := w.boot(); err == nil || member.Enrolled(w.env()) != nil || w.joins != 1 {
				t.Errorf("%v; the clock says %s, enrolled: %v, joins: %d\n%s", err, w.now, member.Enrolled(w.env()), w.joins, strings.Join(w.console, "\n"))
			}
			// The API servers' certificates were renewed while it was off.
			w.offline = false
			w.now = w.now.AddDate(0, 7, 0)
			w.powerOn()
			w.clockSays(wakeUp)
			w.mustBoot()
			if renewed := worldStart.AddDate(0, 7, -1); w.now.Before(renewed) {
				t.Errorf("the clock says %s, the API servers' certificates begin after %s", w.now, renewed)
			}
		})
	}
}

// TestOwnCertificateShowsTheTime: what was kept of the time is lost, and no API server
// is in reach.
func TestOwnCertificateShowsTheTime(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.powerOn()
	w.clockSays(wakeUp)
	w.offline = true
	if err := w.boot(); err == nil || member.Enrolled(w.env()) != nil {
		t.Errorf("%v; the clock says %s\n%s", err, w.now, strings.Join(w.console, "\n"))
	}
}

// TestStrangersMoveNoClock: without a pin anybody may answer, and a time server knows
// better than any certificate.
func TestStrangersMoveNoClock(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(w *world){
		"no pin":      func(w *world) { w.stamp(ownDev, unpin(w.site(withToken))) },
		"another CA":  func(w *world) { w.rebuild() },
		"time server": func(w *world) { w.synced = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			change(w)
			w.clockSays(wakeUp)
			err := w.boot()
			if last := time.Unix(1767225600, 0).Add(2 * time.Hour); err == nil || w.now.After(last) {
				t.Errorf("%v: the clock says %s", err, w.now)
			}
			if name == "no pin" && !w.said("correct the clock that is wrong") {
				t.Errorf("nobody was told\n%s", strings.Join(w.console, "\n"))
			}
		})
	}
}

// TestClockCorrectedByHand: the clock of an API server was ahead when its certificate was
// made, and took the machine with it. A person corrects both, in a network without a time
// server, and the clock stays as it was set.
func TestClockCorrectedByHand(t *testing.T) {
	t.Parallel()
	for name, restarts := range map[string]bool{"restarted": true, "without a restart": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			right := w.cluster.now
			w.cluster.now = func() time.Time { return right().AddDate(0, 6, 0) }
			w.joinError = func(int) error { return errors.New("kubelet is not well") }
			if err := w.boot(); err == nil || w.wrong < 5*30*24*time.Hour {
				t.Fatalf("%v; the clock is wrong by %s", err, w.wrong)
			}
			w.cluster.now, w.joinError = right, nil
			w.cluster.serve(t)
			w.clockSays(w.truth())
			if restarts {
				w.powerOn()
			}
			w.mustBoot()
			if w.wrong != 0 {
				t.Errorf("the clock is wrong by %s\n%s", w.wrong, strings.Join(w.console, "\n"))
			}
		})
	}
}

// TestKubeletsCertificateOfTheFuture: the controller manager's clock was ahead when it
// signed. The node waits or, with a token, joins again.
func TestKubeletsCertificateOfTheFuture(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.synced = true
	w.mustBoot()
	early := w.now.Add(8 * time.Hour)
	own, err := os.Readlink(filepath.Join(w.root, member.ClientCert))
	if err != nil {
		t.Fatal(err)
	}
	w.put(own, w.cluster.clientFrom("system:node:edge-sn0042", early, early.AddDate(1, 0, 0)))
	w.powerOn()
	if err := w.boot(); err == nil || !w.said("not valid yet: it begins on 2026-11-20T18:") || !w.said("a clock of the control plane was ahead") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	w.stamp(ownDev, w.site(withToken))
	w.powerOn()
	w.units[ondisk.UnitKubelet] = "activating" // nobody accepts it
	w.cluster.nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.cluster.revive = true
	w.mustBoot()
	if w.joins != 2 || member.Enrolled(w.env()) != nil {
		t.Errorf("%d joins, %v", w.joins, member.Enrolled(w.env()))
	}
}

// TestClockSynced: a clock that follows a time server is not set, whatever the
// slot says.
func TestClockSynced(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.stampAt(ownDev, w.now.AddDate(1, 0, 0).Unix(), map[string]string{ondisk.SlotSite: w.site(withToken)})
	w.synced = true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if slices.Contains(w.names, "clock") || w.now.Year() != 2026 {
		t.Errorf("the clock was set to %s", w.now)
	}
}

// TestStampedByAWrongClock: what a computer of 2031 stamped does not take the
// node there.
func TestStampedByAWrongClock(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.stampAt(ownDev, time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), map[string]string{ondisk.SlotSite: w.site(withToken)})
	w.clockSays(wakeUp)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if w.now.Year() != 2026 {
		t.Errorf("the clock says %s, it is %s", w.now, w.truth())
	}
}

// TestClockInTheFuture: the certificate only looks expired. A time server is
// asked before anything is made of it; while none answers, the clock is named
// beside the token, and once one does the node goes on with what it has.
func TestClockInTheFuture(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		lines []string
		after int // seconds until a time server answers; 0: none does
	}{
		{"a time server answers", nil, 20},
		{"with a new token in the slot", []string{withToken}, 20},
		{"late", nil, 15 * 60},
		{"none answers", nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := nativeWorld(t)
			w.patience = 30 * time.Minute
			if err := w.boot(); err != nil {
				t.Fatal(err)
			}
			truth := w.now
			w.patience = 30 * time.Minute
			cert := w.get(member.ClientCert)
			w.stamp(ownDev, w.site(c.lines...))
			w.powerOn()
			w.clockSays(truth.AddDate(5, 0, 0))
			e := w.env()
			set, end := false, w.now.Add(time.Duration(c.after)*time.Second)
			e.ClockSynced = func(context.Context) (bool, error) {
				if c.after > 0 && !set && w.now.After(end) {
					set = true
					w.clockSays(w.truth())
					w.started[ondisk.UnitKubelet] = w.now
				}
				return set, nil
			}
			err := w.run(New(e))
			said := strings.Join(w.console, "\n")
			if w.joins != 1 || w.get(member.ClientCert) != cert {
				t.Errorf("it joined anew\n%s", said)
			}
			if c.after == 0 {
				if err == nil || w.state().Result != ondisk.ResultWaiting || !w.said("follows no time server") || !w.said("network.ntp") {
					t.Errorf("%v, %s\n%s", err, w.state().Result, said)
				}
				return
			}
			if err != nil {
				t.Errorf("%v\n%s", err, said)
			}
			if w.said("FAILED") {
				t.Errorf("it gave up\n%s", said)
			}
		})
	}
}

func TestCertificateExpiredOffline(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	w.now = w.now.AddDate(2, 0, 0)
	if err := w.boot(); err == nil {
		t.Fatal("it went on with an expired certificate")
	}
	if !w.said("this node's certificate has expired") || !w.said("put a new token into site.yaml") {
		t.Fatalf("console:\n%s", strings.Join(w.console, "\n"))
	}
	w.cluster.nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.plug(w.site(withToken))
	w.powerOn()
	w.cluster.revive = true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if w.joins != 2 {
		t.Errorf("%d joins", w.joins)
	}
}

// TestClockSetAfterKubeletsReport: a board without a battery begins with the time at
// which it was switched off. Kubelet has reported by that clock when a time server sets
// it, and repeats an unchanged status only an hour later with profile metered.
func TestClockSetAfterKubeletsReport(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]time.Duration{"forward": 10 * time.Hour, "back": -10 * time.Hour, "not at all": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t, "ipvs: {profile: metered}")
			w.mustBoot()
			w.powerOn()
			w.cluster.nodes["edge-sn0042"].Status.NodeInfo.BootID = strings.TrimSpace(w.get("/proc/sys/kernel/random/boot_id"))
			w.clockSays(w.now.Add(-by)) // until a time server sets it
			w.started[ondisk.UnitKubelet] = w.now
			reported := w.now.Add(2 * time.Second)
			w.cluster.renewed = func() time.Time { return reported }
			w.setClock(by + 3*time.Second)
			start := w.now
			w.mustBoot()
			if took := w.now.Sub(start); took > 10*time.Second || !w.has(ondisk.HealthyFile) {
				t.Errorf("it took %s; the boot is marked as healthy: %v", took, w.has(ondisk.HealthyFile))
			}
		})
	}
}

// TestReportOfAnEarlierBoot: a clock that is behind dates kubelet's start before the last
// report of the boot before, which says nothing of this one.
func TestReportOfAnEarlierBoot(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.cluster.nodes["edge-sn0042"].Status.NodeInfo.BootID = strings.TrimSpace(w.get("/proc/sys/kernel/random/boot_id"))
	w.now = w.now.AddDate(0, 0, 1)
	last := w.now
	w.clockSays(last.Add(-20 * time.Minute)) // saved last
	w.powerOn()
	w.setClock(20*time.Minute + 30*time.Second)
	reports := w.now.Add(15 * time.Second)
	w.cluster.renewed = func() time.Time {
		if w.now.Before(reports) {
			return last
		}
		return w.now
	}
	w.mustBoot()
	if w.now.Before(reports) {
		t.Error("the report of the boot before counts for this one")
	}
}

// TestConvertAfterTheClockWasSet: first boot is done and sends its last report; the
// state has the time of then.
func TestConvertAfterTheClockWasSet(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	w.units[ondisk.UnitFirstboot] = "active"
	w.started[ondisk.UnitFirstboot] = w.state().Updated.Add(-time.Minute)
	w.setClock(10 * time.Hour)
	if _, err := w.convert(pool); err != nil {
		t.Error(err)
	}
}

// TestTimeServersAreAskedAgain: systemd-timesyncd tries again after minutes by itself, so
// whoever waits for it has it try sooner.
func TestTimeServersAreAskedAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.env()
	asked, unit := 0, e.Unit
	e.Unit = func(ctx context.Context, verb, name string) error {
		if verb == "try-restart" && name == network.Timesyncd {
			asked++
		}
		return unit(ctx, verb, name)
	}
	if network.WaitForNTP(t.Context(), e, network.NTPPatience) {
		t.Fatal("there is no time server")
	}
	if asked < 2 || asked > 3 {
		t.Errorf("they were asked again %d times in %s", asked, network.NTPPatience)
	}
}
