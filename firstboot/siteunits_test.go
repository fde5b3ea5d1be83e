package firstboot

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/apply"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// slowUnits makes the jobs of these units never end. As with D-Bus,
// no job is queued if ctx has ended.
func (w *world) slowUnits(e *machine.Env, slow ...string) {
	unit := e.Unit
	e.Unit = func(ctx context.Context, verb, name string) error {
		if err := e.Sleep(ctx, 0); err != nil {
			return err
		}
		if err := unit(ctx, verb, name); err != nil || verb == "enable" || !slices.Contains(slow, name) {
			return err
		}
		w.Units[name] = "activating"
		for {
			if err := e.Sleep(ctx, time.Second); err != nil {
				return err
			}
		}
	}
}

func enabledUnits(names ...string) string {
	var units []string
	for _, n := range names {
		units = append(units, `{"name":"`+n+`","enabled":true,"contents":"[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"}`)
	}
	return `ignition: '{"ignition":{"version":"3.4.0"},"systemd":{"units":[` + strings.Join(units, ",") + `]}}'`
}

// TestSlowUnitOfTheSite checks that units that wait for something delay neither later units nor the
// join.
func TestSlowUnitOfTheSite(t *testing.T) {
	t.Parallel()
	slow := []string{"a.service", "b.service", "c.service", "d.service", "e.service", "f.service", "g.service", "h.service", "i.service", "j.service", "k.service", "l.service"}
	w := nativeWorld(t, enabledUnits(append(slow, "vpn.service")...))
	e := w.Env()
	w.slowUnits(e, slow...)
	start := w.Now
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if w.Units["vpn.service"] != "active" {
		t.Errorf("vpn.service is %q", w.Units["vpn.service"])
	}
	if took := w.Now.Sub(start); took > 4*time.Minute {
		t.Errorf("first boot took too long: %s", took)
	}
	if !slices.ContainsFunc(w.State().Notes, func(n string) bool {
		return strings.Contains(n, "(a.service): start has not finished after 15s") || strings.Contains(n, "(a.service): restart has not finished after 15s")
	}) {
		t.Errorf("notes: %q", w.State().Notes)
	}
	// The report mentions a failed unit as long as it is failed.
	w.Units["vpn.service"] = "failed"
	for _, state := range []string{"failed", "active"} {
		w.Units["vpn.service"] = state
		w.MustBoot()
		if noted := strings.Contains(strings.Join(w.State().Notes, "\n"), "a unit of the Site has failed (vpn.service)"); noted != (state == "failed") {
			t.Errorf("vpn.service is %s, notes: %q", state, w.State().Notes)
		}
	}
}

// TestApplyingIsCutOff ends an attempt while the Site's settings are put into effect. The next
// attempt puts the rest into effect.
func TestApplyingIsCutOff(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, enabledUnits("a.service", "vpn.service"))
	e := w.Env()
	unit := e.Unit
	e.Unit = func(ctx context.Context, verb, name string) error {
		if name == "a.service" && verb != "enable" {
			w.Shutdown()
			return ctx.Err()
		}
		return unit(ctx, verb, name)
	}
	if err := w.Run(New(e)); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if w.Units["vpn.service"] == "active" || w.Has(site.AppliedFile) {
		t.Fatalf("vpn.service is %q, the Site counts as applied: %v", w.Units["vpn.service"], w.Has(site.AppliedFile))
	}
	e.Unit = func(ctx context.Context, verb, name string) error {
		if name == "a.service" && verb != "enable" {
			return errors.New("its job ended with \"failed\"")
		}
		return unit(ctx, verb, name)
	}
	w.EffectNames = nil
	if err := w.Run(New(e)); err != nil {
		t.Fatal(err)
	}
	if w.Units["vpn.service"] != "active" || w.EffectCount("start vpn.service") != 1 { // no second attempt after a failure
		t.Errorf("vpn.service is %q: %q", w.Units["vpn.service"], w.EffectNames)
	}
	if !w.ConsoleHas("a unit of the Site is not in the state that the Site sets (a.service): its job ended with") {
		t.Errorf("console: %q", w.Console)
	}
}

// TestSlowDaemons checks that daemons that do not start with the Site's settings use up neither the
// time of the attempt nor that of the rollback.
func TestSlowDaemons(t *testing.T) {
	t.Parallel()
	w := wirelessWorld(t)
	e := w.Env()
	w.slowUnits(e, worldtest.ResolvedUnit, "systemd-timesyncd.service", "containerd.service", worldtest.WpaUnit("wlan0"), "dbus.service")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	paths := []string{"/etc/systemd/resolved.conf.d/1.conf", "/etc/systemd/timesyncd.conf", "/etc/containerd/config.toml", "/etc/wpa_supplicant/wpa_supplicant-wlan0.conf", "/etc/systemd/network/1.network"}
	if err := site.ActivateChanges(ctx, e, apply.Changes{Paths: paths, Units: []apply.UnitChange{{Name: "vpn.service", Enabled: true}}}); err != nil || w.Units["vpn.service"] != "active" {
		t.Errorf("vpn.service is %q; %v", w.Units["vpn.service"], err)
	}
	start := w.Now
	if err := network.Load(t.Context(), e, paths); err == nil {
		t.Error("resolved did not start, but no note says so")
	}
	if took := w.Now.Sub(start); took > 2*time.Minute {
		t.Errorf("loading the network settings took %s", took)
	}
}

// networkd simulates networkd. networkctl makes it load settings over D-Bus, which starts after
// the delay dbus.
func (w *world) networkd(e *machine.Env, dbus time.Duration) (loaded func() string) {
	const settings = "/etc/systemd/network/20-edgebake-00.network"
	read := func() string {
		if w.Has(settings) {
			return w.Get(settings)
		}
		return ""
	}
	has, up := read(), w.Now.Add(dbus)
	unit, run := e.Unit, e.Run
	e.Unit = func(ctx context.Context, verb, name string) error {
		for name == "dbus.service" && w.Now.Before(up) {
			if err := e.Sleep(ctx, time.Second); err != nil {
				return err
			}
		}
		return unit(ctx, verb, name)
	}
	e.Run = func(ctx context.Context, c machine.Cmd) error {
		err := run(ctx, c)
		if err == nil && strings.Join(c.Args, " ") == "networkctl reload" {
			has = read()
		}
		return err
	}
	return func() string { return has }
}

// TestDBusComesUpLate checks that the Site's network settings are in effect as soon as D-Bus runs,
// not only after the next boot.
func TestDBusComesUpLate(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, address("192.0.2.50"))
	e := w.Env()
	loaded := w.networkd(e, 40*time.Second)
	w.NetworkWorks = func() bool { return strings.Contains(loaded(), "192.0.2.50/24") }
	w.Patience = 15 * time.Minute
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestDBusComesUpLateOnANode checks that an API server's answer does not prove the Site's settings
// while networkd still uses the former ones.
func TestDBusComesUpLateOnANode(t *testing.T) {
	t.Parallel()
	for _, dbus := range []time.Duration{40 * time.Second, 1000 * time.Hour} {
		w := nativeWorld(t, address("192.0.2.50"))
		w.MustBoot()
		w.PowerOn()
		e := w.Env()
		loaded := w.networkd(e, dbus)
		w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.3.50"))) // a typing error
		w.NetworkWorks = func() bool { return strings.Contains(loaded(), "192.0.2.50/24") }
		w.Patience = time.Hour
		if err := w.Run(New(e)); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		// At the next boot, networkd loads the files that are in place.
		w.PowerOn()
		e = w.Env()
		loaded = w.networkd(e, 0)
		if err := w.Run(New(e)); err != nil || !w.networkHas("192.0.2.50/24") {
			t.Errorf("dbus after %s: %v; the previous settings were not restored\n%s", dbus, err, strings.Join(w.Console, "\n"))
		}
	}
}
