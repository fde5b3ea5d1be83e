package firstboot

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/apply"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

const wrongDNS = "192.0.3.1"

// named returns an enrolled machine that knows its API server by a name.
func named(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, "master.example")
	w.DNSRecords, w.DeadDNSServer = map[string]string{"master.example": "192.0.2.11"}, wrongDNS
	w.Stamp(worldtest.SlotDevice, w.namedSite(worldtest.WithToken))
	w.MustBoot()
	return w
}

func (w *world) namedSite(lines ...string) string {
	return strings.Replace(w.Site(lines...), w.Masters(), "master.example:6443", 1)
}

// asLoaded checks that each daemon has loaded the files in place.
func (w *world) asLoaded(t *testing.T) {
	t.Helper()
	for _, unit := range []string{worldtest.ResolvedUnit, worldtest.WpaUnit("wlan0")} {
		text, err := w.DaemonConfig(unit)
		if err != nil {
			text = ""
		}
		if got := w.LoadedConfig[unit]; got != text {
			t.Errorf("%s has loaded %q, its files say %q", unit, got, text)
		}
	}
}

// TestRollbackOfDNS checks a corrected Site with a DNS server that does not answer. The former
// settings, without a DNS server, are restored.
func TestRollbackOfDNS(t *testing.T) {
	t.Parallel()
	w := named(t)
	w.Stamp(worldtest.SlotDevice, w.namedSite("network: {dns: ["+wrongDNS+"]}"))
	w.PowerOn()
	w.MustBoot()
	if !w.ConsoleHas("the previous settings are back") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	w.asLoaded(t)
}

// TestRollbackThatIsKilled checks that if first boot is killed while it applies or rolls back
// settings, and runs again in the same boot, it ends with the former ones.
func TestRollbackThatIsKilled(t *testing.T) {
	t.Parallel()
	unit := worldtest.WpaUnit("wlan0")
	for _, tt := range []struct {
		name string
		base func(*testing.T) *world
		link func(*world) bool // whether the network works; nil: if DNS does
	}{
		{"DNS", func(t *testing.T) *world {
			base := named(t)
			base.Stamp(worldtest.SlotDevice, base.namedSite("network: {dns: ["+wrongDNS+"]}"))
			return base
		}, nil},
		{"it had Wi-Fi, the corrected Site has not", func(t *testing.T) *world {
			base := wirelessWorld(t, wifi)
			base.MustBoot()
			base.Stamp(worldtest.SlotDevice, base.Site(address("192.0.3.50")))
			return base
		}, func(w *world) bool { return w.Units[unit] == "active" }},
		{"it had none, the corrected Site has", func(t *testing.T) *world {
			base := wirelessWorld(t, address("192.0.2.50"))
			base.MustBoot()
			base.Stamp(worldtest.SlotDevice, base.Site(wifi))
			return base
		}, func(w *world) bool { return w.Units[unit] != "active" && w.networkHas("192.0.2.50/24") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			base := tt.base(t)
			base.PowerOn()
			killAnywhere(t, base, tt.link)
		})
	}
}

func killAnywhere(t *testing.T, base *world, link func(*world) bool) {
	for n := 1; ; n += worldtest.EveryCut() {
		w := base.Clone(t)
		w.PowerCutAt = n
		if link != nil {
			w.NetworkWorks = func() bool { return link(w) }
		}
		if err := w.Boot(); err != nil && !w.PoweredOff {
			t.Fatal(err)
		}
		killed := w.PoweredOff
		w.PowerCutAt, w.Patience = 0, time.Hour // a trial that was killed is repeated after a while
		if err := w.Boot(); err != nil {
			t.Fatalf("killed at %d (%s): %v\n%s", n, w.EffectNames[n-1], err, strings.Join(w.Console, "\n"))
		}
		if w.asLoaded(t); t.Failed() {
			t.Fatalf("killed at %d: %s", n, w.EffectNames[n-1])
		}
		if !killed {
			break
		}
	}
}

// wirelessWorld returns a machine whose image has wpa_supplicant.
func wirelessWorld(t *testing.T, lines ...string) *world {
	w := nativeWorld(t, lines...)
	w.Put("/usr/sbin/wpa_supplicant", "")
	w.Put("/usr/lib/systemd/system/wpa_supplicant@.service", "[Unit]\n")
	return w
}

const wifi = "network: {interfaces: [{name: wlan0, dhcp: true, wifi: {ssid: shop, psk: correct-horse}}]}"

// TestRollbackOfWiFi checks that a rollback restores the Wi-Fi units too: those that are running
// now, and those of the next boot.
func TestRollbackOfWiFi(t *testing.T) {
	t.Parallel()
	unit := worldtest.WpaUnit("wlan0")
	for _, tt := range []struct {
		name, former, corrected string
		link                    func(*world) bool
		wireless                bool // at the end
	}{
		{"it had Wi-Fi, the corrected Site has not", wifi, address("192.0.3.50"), func(w *world) bool { return w.Units[unit] == "active" }, true},
		{"another key", wifi, strings.Replace(wifi, "horse", "mouse", 1), func(w *world) bool { return strings.Contains(w.LoadedConfig[unit], fmt.Sprintf("%x", "correct-horse")) }, true},
		{"it had none, the corrected Site has", address("192.0.2.50"), wifi, func(w *world) bool { return w.Units[unit] != "active" && w.networkHas("192.0.2.50/24") }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := wirelessWorld(t, tt.former)
			w.NetworkWorks = func() bool { return tt.link(w) }
			w.MustBoot()
			w.Stamp(worldtest.SlotDevice, w.Site(tt.corrected))
			w.PowerOn()
			w.MustBoot()
			if !w.ConsoleHas("the previous settings are back") {
				t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
			}
			for _, when := range []string{"now", "after a boot"} {
				if w.asLoaded(t); (w.Units[unit] == "active") != tt.wireless {
					t.Errorf("%s: %s is %q", when, unit, w.Units[unit])
				}
				w.PowerOn()
			}
			// After another correction, nothing of either setting is left.
			w.Stamp(worldtest.SlotDevice, w.Site())
			w.NetworkWorks = nil
			w.MustBoot()
			for _, when := range []string{"now", "after a boot"} {
				if w.asLoaded(t); w.Units[unit] == "active" || w.Has(worldtest.WantsDir+unit) {
					t.Errorf("%s, with a Site without Wi-Fi: %s is %q", when, unit, w.Units[unit])
				}
				w.PowerOn()
			}
		})
	}
}

// TestTrialGivesWiFiBack checks that the Site's Wi-Fi is restored after a trial without an uplink.
// The former settings, without Wi-Fi, do not work either.
func TestTrialGivesWiFiBack(t *testing.T) {
	t.Parallel()
	w := wirelessWorld(t, address("192.0.2.50"))
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.Site(wifi))
	w.PowerOn()
	w.NetworkWorks, w.Patience = func() bool { return false }, 20*time.Minute
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded without an uplink")
	}
	if !w.Has(network.TrialFile) {
		t.Fatal("no other settings were tried")
	}
	for _, when := range []string{"now", "after a boot"} {
		if w.asLoaded(t); w.Units[worldtest.WpaUnit("wlan0")] != "active" {
			t.Errorf("%s: the Site's Wi-Fi is %q", when, w.Units[worldtest.WpaUnit("wlan0")])
		}
		w.PowerOn()
	}
}

// TestRemovedSettings checks that when a setting is removed from a Site, the daemon that has loaded
// it must reload.
func TestRemovedSettings(t *testing.T) {
	t.Parallel()
	w := wirelessWorld(t)
	for _, tt := range []struct{ path, told string }{
		{"/etc/systemd/journald.conf.d/10-site.conf", "restart systemd-journald.service"},
		{"/etc/systemd/resolved.conf.d/10-site.conf", "restart systemd-resolved.service"},
		{"/etc/systemd/timesyncd.conf", "restart systemd-timesyncd.service"},
		{"/etc/sysctl.d/10-site.conf", "restart systemd-sysctl.service"},
		{"/etc/systemd/network/10-site.network", "run networkctl reload"},
		{"/etc/wpa_supplicant/wpa_supplicant-wlan0.conf", "stop wpa_supplicant@wlan0.service"},
		{"/etc/containerd/conf.d/10-site.toml", "try-restart containerd.service"},
	} {
		w.EffectNames = nil
		w.Log.Reset()
		if err := site.ActivateChanges(t.Context(), w.Env(), apply.Changes{Paths: []string{tt.path}}); err != nil {
			t.Errorf("%s: %v", tt.path, err)
		}
		if !slices.Contains(w.EffectNames, tt.told) {
			t.Errorf("%s was removed without the effect %q: %q", tt.path, tt.told, w.EffectNames)
		}
		stays := strings.Contains(w.Log.String(), "stays in effect until the next boot")
		if stays != strings.Contains(tt.path, "sysctl") {
			t.Errorf("%s: %s", tt.path, w.Log.String())
		}
	}
	// A unit file of that name is not wpa_supplicant's settings file: nothing is reloaded.
	w.EffectNames = nil
	if err := site.ActivateChanges(t.Context(), w.Env(), apply.Changes{Paths: []string{"/etc/systemd/system/wpa_supplicant@wlan0.service"}}); err != nil || len(w.EffectNames) > 0 {
		t.Errorf("%v, %q", err, w.EffectNames)
	}
}

// TestRemovedDropins checks that systemd stops using removed drop-ins of the image's yurthub unit.
func TestRemovedDropins(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.MustBoot()
	if !w.Has(hub.DropinFile) {
		t.Fatal("no drop-in")
	}
	w.EffectNames = nil
	if err := hub.Remove(t.Context(), w.Env(), ondisk.ImageInfo{}); err != nil {
		t.Fatal(err)
	}
	if i := slices.Index(w.EffectNames, "remove "+hub.DropinFile); i < 0 || !slices.Contains(w.EffectNames[i:], "daemon-reload") {
		t.Errorf("%q", w.EffectNames)
	}
}
