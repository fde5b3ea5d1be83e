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
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// wakeUp is the time that a board without a battery shows when it is switched on.
var wakeUp = time.Date(1970, 1, 1, 0, 0, 30, 0, time.UTC)

// TestClockBehind checks a board without a battery or a time server. It joins a cluster that was
// created months after its Site was stamped, and then boots again without an API server.
func TestClockBehind(t *testing.T) {
	t.Parallel()
	for name, newWorld := range map[string]func(*testing.T, ...string) *world{"native": nativeWorld, "edge": edgeWorld} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.SetClock(wakeUp)
			w.MustBoot()
			if born := w.Cluster.CA.NotBefore; w.Now.Before(born) || w.Now.After(w.ClusterTime()) {
				t.Errorf("the clock shows %s, but the cluster was made on %s", w.Now, born)
			}
			if !strings.Contains(w.Log.String(), "no time server answers") {
				t.Error("no time server was asked")
			}
			w.PowerOn()
			w.SetClock(wakeUp)
			w.Offline = true
			if err := w.Boot(); err == nil || member.Enrolled(w.Env()) != nil || w.Joins != 1 {
				t.Errorf("%v; the clock shows %s, enrolled: %v, joins: %d\n%s", err, w.Now, member.Enrolled(w.Env()), w.Joins, strings.Join(w.Console, "\n"))
			}
			// The API servers' certificates were renewed while the machine was off.
			w.Offline = false
			w.Now = w.Now.AddDate(0, 7, 0)
			w.PowerOn()
			w.SetClock(wakeUp)
			w.MustBoot()
			if renewed := worldtest.WorldStart.AddDate(0, 7, -1); w.Now.Before(renewed) {
				t.Errorf("the clock shows %s, but the API servers' certificates are valid from %s", w.Now, renewed)
			}
		})
	}
}

// TestOwnCertificateShowsTheTime checks that the machine's own certificate sets a lower bound for
// the clock if the saved time is lost and no API server answers.
func TestOwnCertificateShowsTheTime(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.PowerOn()
	w.SetClock(wakeUp)
	w.Offline = true
	if err := w.Boot(); err == nil || member.Enrolled(w.Env()) != nil {
		t.Errorf("%v; the clock shows %s\n%s", err, w.Now, strings.Join(w.Console, "\n"))
	}
}

// TestUntrustedServersMoveNoClock checks that certificates of unauthenticated servers do not move
// the clock: without a CA pin, anybody may answer. If a time server has set the clock, no
// certificate moves it.
func TestUntrustedServersMoveNoClock(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(w *world){
		"no pin":      func(w *world) { w.Stamp(worldtest.SlotDevice, unpin(w.Site(worldtest.WithToken))) },
		"another CA":  func(w *world) { w.Rebuild() },
		"time server": func(w *world) { w.ClockSynced = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			change(w)
			w.SetClock(wakeUp)
			err := w.Boot()
			if last := time.Unix(1767225600, 0).Add(2 * time.Hour); err == nil || w.Now.After(last) {
				t.Errorf("%v: the clock shows %s", err, w.Now)
			}
			if name == "no pin" && !w.ConsoleHas("correct the wrong clock") {
				t.Errorf("the console does not advise correcting the clock\n%s", strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestClockCorrectedByHand checks that a person's correction of the clock stays. Before that, a
// certificate had set the clock ahead, from an API server whose clock was ahead and is corrected
// too.
func TestClockCorrectedByHand(t *testing.T) {
	t.Parallel()
	for name, restarts := range map[string]bool{"restarted": true, "without a restart": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			right := w.Cluster.Now
			w.Cluster.Now = func() time.Time { return right().AddDate(0, 6, 0) }
			w.JoinError = func(int) error { return errors.New("kubelet is not well") }
			if err := w.Boot(); err == nil || w.ClockSkew < 5*30*24*time.Hour {
				t.Fatalf("%v; the clock is wrong by %s", err, w.ClockSkew)
			}
			w.Cluster.Now, w.JoinError = right, nil
			w.Cluster.Serve(t)
			w.SetClock(w.ClusterTime())
			if restarts {
				w.PowerOn()
			}
			w.MustBoot()
			if w.ClockSkew != 0 {
				t.Errorf("the clock is wrong by %s\n%s", w.ClockSkew, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestKubeletsCertificateOfTheFuture checks a kubelet certificate that was signed by a clock that
// was ahead. The node waits until the certificate is valid or, with a token, joins again.
func TestKubeletsCertificateOfTheFuture(t *testing.T) {
	t.Parallel()
	for name, token := range map[string]bool{"waits": false, "token": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.ClockSynced = true
			w.MustBoot()
			early := w.Now.Add(8 * time.Hour)
			own, err := os.Readlink(filepath.Join(w.Root, member.ClientCert))
			if err != nil {
				t.Fatal(err)
			}
			w.Put(own, w.Cluster.ClientFrom("system:node:edge-sn0042", early, early.AddDate(1, 0, 0)))
			w.PowerOn()
			if err := w.Boot(); err == nil || !w.ConsoleHas("not valid yet: it is valid from 2026-11-20T18:") || !w.ConsoleHas("a clock of the control plane was ahead") {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			joins := 1
			if token {
				joins = 2
				w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
				w.PowerOn()
				w.Units[ondisk.UnitKubelet] = "activating" // no API server accepts it
				w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
				w.Cluster.NodeRevives = true
			} else {
				w.Now = early.Add(time.Minute)
				w.PowerOn()
			}
			w.MustBoot()
			if w.Joins != joins || member.Enrolled(w.Env()) != nil {
				t.Errorf("kubeadm joined %d times, %v", w.Joins, member.Enrolled(w.Env()))
			}
		})
	}
}

// TestClockSynced checks that a clock that a time server has set is not changed, whatever date the
// slot has.
func TestClockSynced(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.StampAt(worldtest.SlotDevice, w.Now.AddDate(1, 0, 0).Unix(), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken)})
	w.ClockSynced = true
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if slices.Contains(w.EffectNames, "clock") || w.Now.Year() != 2026 {
		t.Errorf("the clock was set to %s", w.Now)
	}
}

// TestStampedByAWrongClock checks that the node's clock is not set to 2031, the date that the
// stamping computer's clock showed.
func TestStampedByAWrongClock(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.StampAt(worldtest.SlotDevice, time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken)})
	w.SetClock(wakeUp)
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if w.Now.Year() != 2026 {
		t.Errorf("the clock shows %s, but the time is %s", w.Now, w.ClusterTime())
	}
}

// TestClockInTheFuture checks a certificate that only looks expired. If no time server answers, the
// message names the clock and a new token; otherwise the certificate is kept.
func TestClockInTheFuture(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		lines []string
		after int // seconds until a time server answers; 0: never
	}{
		{"a time server answers", nil, 20},
		{"with a new token in the slot", []string{worldtest.WithToken}, 20},
		{"late", nil, 15 * 60},
		{"none answers", nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := nativeWorld(t)
			w.Patience = 30 * time.Minute
			if err := w.Boot(); err != nil {
				t.Fatal(err)
			}
			truth := w.Now
			w.Patience = 30 * time.Minute
			cert := w.Get(member.ClientCert)
			w.Stamp(worldtest.SlotDevice, w.Site(c.lines...))
			w.PowerOn()
			w.SetClock(truth.AddDate(5, 0, 0))
			e := w.Env()
			set, end := false, w.Now.Add(time.Duration(c.after)*time.Second)
			e.ClockSynced = func(context.Context) (bool, error) {
				if c.after > 0 && !set && w.Now.After(end) {
					set = true
					w.SetClock(w.ClusterTime())
					w.Started[ondisk.UnitKubelet] = w.Now
				}
				return set, nil
			}
			err := w.Run(New(e))
			said := strings.Join(w.Console, "\n")
			if w.Joins != 1 || w.Get(member.ClientCert) != cert {
				t.Errorf("the machine joined again\n%s", said)
			}
			if c.after == 0 {
				if err == nil || w.State().Result != ondisk.ResultWaiting || !w.ConsoleHas("follows no time server") || !w.ConsoleHas("network.ntp") {
					t.Errorf("%v, %s\n%s", err, w.State().Result, said)
				}
				return
			}
			if err != nil {
				t.Errorf("%v\n%s", err, said)
			}
			if w.ConsoleHas("FAILED") {
				t.Errorf("first boot gave up\n%s", said)
			}
		})
	}
}

func TestCertificateExpiredOffline(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	w.Now = w.Now.AddDate(2, 0, 0)
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded with an expired certificate")
	}
	if !w.ConsoleHas("this node's certificate has expired") || !w.ConsoleHas("put a new token into site.yaml") {
		t.Fatalf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Plug(w.Site(worldtest.WithToken))
	w.PowerOn()
	w.Cluster.NodeRevives = true
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if w.Joins != 2 {
		t.Errorf("kubeadm joined %d times", w.Joins)
	}
}

// TestClockSetAfterKubeletsReport checks a kubelet that reports before a time server sets the
// clock. With profile metered, it repeats an unchanged status only an hour later.
func TestClockSetAfterKubeletsReport(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]time.Duration{"forward": 10 * time.Hour, "back": -10 * time.Hour, "not at all": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t, "ipvs: {profile: metered}")
			w.MustBoot()
			w.PowerOn()
			w.Cluster.Nodes["edge-sn0042"].Status.NodeInfo.BootID = strings.TrimSpace(w.Get("/proc/sys/kernel/random/boot_id"))
			w.SetClock(w.Now.Add(-by)) // kept until a time server sets the clock
			w.Started[ondisk.UnitKubelet] = w.Now
			reported := w.Now.Add(2 * time.Second)
			w.Cluster.KubeletReportTime = func() time.Time { return reported }
			w.StepClock(by + 3*time.Second)
			start := w.Now
			w.MustBoot()
			if took := w.Now.Sub(start); took > 10*time.Second || !w.Has(ondisk.HealthyFile) {
				t.Errorf("first boot took %s; the boot is marked as healthy: %v", took, w.Has(ondisk.HealthyFile))
			}
		})
	}
}

// TestReportOfAnEarlierBoot checks that kubelet's last report of the previous boot does not count
// for this boot. The clock is behind, so kubelet seems to have started before that report. In one
// case, a time server sets the clock later.
func TestReportOfAnEarlierBoot(t *testing.T) {
	t.Parallel()
	for _, set := range []bool{true, false} {
		w := nativeWorld(t)
		w.MustBoot()
		info := &w.Cluster.Nodes["edge-sn0042"].Status.NodeInfo
		info.BootID = strings.TrimSpace(w.Get("/proc/sys/kernel/random/boot_id"))
		w.Now = w.Now.AddDate(0, 0, 1)
		last := w.Now
		w.SetClock(last.Add(-20 * time.Minute)) // the time that was saved last
		w.PowerOn()
		if set {
			w.StepClock(20*time.Minute + 30*time.Second)
		}
		reports := w.Now.Add(15 * time.Second)
		w.Cluster.KubeletReportTime = func() time.Time {
			if w.Now.Before(reports) {
				return last
			}
			info.BootID = "" // the Node shows this boot
			return w.Now
		}
		w.MustBoot()
		if w.Now.Before(reports) {
			t.Errorf("the clock is set: %v: kubelet's report of the previous boot counts for this one", set)
		}
	}
}

// TestConvertAfterTheClockWasSet checks that convert sees that first boot is done, even if the
// clock was set between the last write of state.json and the end of first boot.
func TestConvertAfterTheClockWasSet(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	w.Units[ondisk.UnitFirstboot] = "active"
	w.Started[ondisk.UnitFirstboot] = w.State().Updated.Add(-time.Minute)
	w.StepClock(10 * time.Hour)
	if _, err := w.convert(pool); err != nil {
		t.Error(err)
	}
}

// TestTimeServersAreAskedAgain checks that a wait for the clock makes systemd-timesyncd retry soon.
// By itself, it would wait for minutes.
func TestTimeServersAreAskedAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.Env()
	asked, unit := 0, e.Unit
	e.Unit = func(ctx context.Context, verb, name string) error {
		if verb == "try-restart" && name == network.Timesyncd {
			asked++
		}
		return unit(ctx, verb, name)
	}
	if network.WaitForNTP(t.Context(), e, network.NTPTimeout) {
		t.Fatal("first boot has no time server")
	}
	if asked < 2 || asked > 3 {
		t.Errorf("the time servers were asked %d times in %s", asked, network.NTPTimeout)
	}
}
