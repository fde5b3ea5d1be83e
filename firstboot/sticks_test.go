package firstboot

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// reportTo returns a Site with its own report URL, by which tests recognize it.
func (w *world) reportTo(host string, lines ...string) string {
	return w.Site(append(lines, "report: {url: 'https://"+host+".example/'}")...)
}

func (w *world) goesBy(host string) bool {
	return strings.Contains(w.SlotSite(worldtest.SlotDevice), "https://"+host+".example/")
}

// TestBackToAFormerSite brings a Site on a stick, then another Site, and then the first one again.
// Each is applied.
func TestBackToAFormerSite(t *testing.T) {
	t.Parallel()
	for _, stamped := range []bool{false, true} {
		t.Run(fmt.Sprint("stamped ", stamped), func(t *testing.T) {
			w := nativeWorld(t)
			w.MustBoot()
			w.Plug("")
			for i, host := range []string{"one", "two", "one"} {
				date := int64(0)
				if stamped {
					date = worldtest.Day(i + 1)
				}
				w.StampAt(worldtest.StickDevice, date, map[string]string{ondisk.SlotSite: w.reportTo(host)})
				for range 2 {
					w.PowerOn()
					w.MustBoot()
					if !w.goesBy(host) {
						t.Fatalf("round %d: the machine uses\n%s\n%s", i, w.SlotSite(worldtest.SlotDevice), strings.Join(w.Console, "\n"))
					}
				}
				if w.ConsoleHas("using the Site of stick") {
					t.Error("the stick's Site was used twice")
				}
			}
		})
	}
}

// TestAnotherSticksComeback checks that a stick is applied again if another stick was applied
// since, and the first was unplugged meanwhile.
func TestAnotherSticksComeback(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	for _, host := range []string{"one", "two", "one"} {
		w.Plug("")
		w.Put("/sys/devices/pci0/usb1/1-1/idVendor", "0781\n")
		w.Put("/sys/devices/pci0/usb1/1-1/serial", "stick "+host+"\n")
		w.StampAt(worldtest.StickDevice, 0, map[string]string{ondisk.SlotSite: w.reportTo(host)})
		w.PowerOn()
		w.MustBoot()
		if !w.goesBy(host) {
			t.Fatalf("the machine uses\n%s", w.SlotSite(worldtest.SlotDevice))
		}
		w.Unplug()
	}
}

// TestStickLeftIn checks that a stick that stays plugged in does not override a Site that was
// stamped into the slot later, whether the machine is a node or cannot join.
func TestStickLeftIn(t *testing.T) {
	t.Parallel()
	for _, joined := range []bool{true, false} {
		t.Run(fmt.Sprint("joined ", joined), func(t *testing.T) {
			w := nativeWorld(t)
			w.Stamp(worldtest.SlotDevice, "")
			w.Cluster.TokenRevoked = !joined
			w.Plug(w.reportTo("one", worldtest.WithToken))
			if err := w.Boot(); (err == nil) != joined || !w.ConsoleHas("using the Site of stick") {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			w.Stamp(worldtest.SlotDevice, w.reportTo("two", worldtest.WithToken))
			w.Cluster.TokenRevoked = false
			w.PowerOn()
			w.MustBoot()
			if !w.goesBy("two") || w.ConsoleHas("using the Site of stick") {
				t.Errorf("the correction is gone:\n%s\n%s", w.SlotSite(worldtest.SlotDevice), strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestOlderStick checks that an unknown stick is not applied if it was stamped before the slot's
// Site. Impossible dates are ignored.
func TestOlderStick(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		own, stick int64
		taken      bool
	}{
		"older":                      {worldtest.Day(5), worldtest.Day(1), false},
		"newer":                      {worldtest.Day(5), worldtest.Day(6), true},
		"of the same second":         {worldtest.Day(5), worldtest.Day(5), true},
		"from a laptop":              {worldtest.Day(5), 0, true},
		"the slot's clock was wrong": {time.Date(2090, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), worldtest.Day(1), true},
		"the stick's clock was":      {worldtest.Day(5), 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.StampAt(worldtest.SlotDevice, tc.own, map[string]string{ondisk.SlotSite: w.reportTo("own", worldtest.WithToken)})
			w.Plug("")
			w.StampAt(worldtest.StickDevice, tc.stick, map[string]string{ondisk.SlotSite: w.reportTo("stick", worldtest.WithToken)})
			w.MustBoot()
			if w.goesBy("stick") != tc.taken {
				t.Errorf("the machine uses\n%s", w.SlotSite(worldtest.SlotDevice))
			}
			noted := slices.ContainsFunc(w.State().Notes, func(n string) bool {
				return strings.Contains(n, "the Site of stick /dev/sdb1 is ignored: it was stamped on 2026-11-01 00:00:00")
			})
			if noted == tc.taken {
				t.Errorf("notes: %q", w.State().Notes)
			}
		})
	}
}

// TestStickHelpsALostNode checks that a stick with the machine's own Site repairs a node that no
// longer has the token.
func TestStickHelpsALostNode(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.Plug(w.Site(worldtest.WithToken))
	w.MustBoot()
	w.Now = w.Now.AddDate(2, 0, 0)
	w.Cluster.Nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.Cluster.NodeRevives = true
	w.PowerOn()
	w.MustBoot()
	if w.Joins != 2 {
		t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
}

// TestBadStickBesideAGoodOne checks that a valid stick is applied even if another stick is invalid.
func TestBadStickBesideAGoodOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.Plug("kind: Site\nmasters: nonsense\n")
	disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
	w.Put(disk+"/sdb2/partition", "2\n")
	w.Put(disk+"/sdb2/start", "65536\n")
	w.Put(disk+"/sdb2/size", "32768\n")
	w.Put(disk+"/sdb2/uevent", "PARTNAME=EDGEBAKE\n")
	w.Stamp("/dev/sdb2", w.reportTo("good", worldtest.WithToken))
	w.MustBoot()
	if !w.goesBy("good") || !w.ConsoleHas("stick /dev/sdb1 is ignored: the Site has problems") {
		t.Errorf("%s", strings.Join(w.Console, "\n"))
	}
}

// TestBadSticks checks that each invalid stick is reported separately, whether the machine has a
// Site or waits for one.
func TestBadSticks(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{true, false} {
		w := newWorld(t)
		w.Stamp(worldtest.SlotDevice, "")
		if own {
			w.Stamp(worldtest.SlotDevice, w.reportTo("own", worldtest.WithToken))
			w.MustBoot()
			w.PowerOn()
		}
		w.Plug("kind: Site\nmasters: nonsense\n")
		disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
		w.Put(disk+"/sdb2/partition", "2\n")
		w.Put(disk+"/sdb2/start", "65536\n")
		w.Put(disk+"/sdb2/size", "32768\n")
		w.Put(disk+"/sdb2/uevent", "PARTNAME=EDGEBAKE\n")
		w.Stamp("/dev/sdb2", "kind: Site\nvip: nonsense\n")
		w.Console = nil
		if err := w.Boot(); (err == nil) != own {
			t.Errorf("%t: %v", own, err)
		}
		begin := "waiting for a Site; stick /dev/sdb1 is ignored: the Site has problems"
		if own {
			begin = "stick /dev/sdb1 is ignored: the Site has problems"
		}
		i := slices.IndexFunc(w.Console, func(line string) bool { return strings.Contains(line, begin) })
		if i < 0 || w.ConsoleHas("the Site of stick") || !strings.Contains(w.Console[i], "; stick /dev/sdb2 is ignored: the Site has problems") {
			t.Errorf("%t:\n%s", own, strings.Join(w.Console, "\n"))
		}
	}
}

// TestStickKeepsIgnition checks that a stick with only a Site does not replace config.ign.
func TestStickKeepsIgnition(t *testing.T) {
	t.Parallel()
	const ign = `{"ignition":{"version":"3.5.0"},"passwd":{"users":[{"name":"ops","sshAuthorizedKeys":["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEpMoGNRS+z8FwDHhSd4GgSaiC6dqU4OHCcmMhtCbL43 ops@desk"]}]}}`
	w := nativeWorld(t)
	w.StampAt(worldtest.SlotDevice, worldtest.Day(1), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken), ondisk.SlotIgnition: ign})
	w.MustBoot()
	key := func() bool {
		return w.Has("/home/ops/.ssh/authorized_keys.d/ignition") || w.Has("/home/ops/.ssh/authorized_keys")
	}
	if !key() {
		t.Fatal("the user's key is missing")
	}
	w.Plug("")
	w.StampAt(worldtest.StickDevice, 0, map[string]string{ondisk.SlotSite: w.reportTo("stick")})
	for range 2 {
		w.PowerOn()
		w.MustBoot()
		if !w.goesBy("stick") || !key() {
			t.Fatalf("the key: %v\n%s", key(), strings.Join(w.Console, "\n"))
		}
	}
	w.StampAt(worldtest.StickDevice, 0, map[string]string{ondisk.SlotSite: w.reportTo("stick"), ondisk.SlotIgnition: "\n"})
	w.PowerOn()
	w.MustBoot()
	if key() {
		t.Error("an empty config.ign did not remove the users")
	}
}

// TestPowerCutKeepsIgnition checks that a slot that a power cut has left blank is restored with all
// of its files.
func TestPowerCutKeepsIgnition(t *testing.T) {
	t.Parallel()
	const ign = `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/etc/motd","contents":{"source":"data:,hello"}}]}}`
	w := nativeWorld(t)
	w.StampAt(worldtest.SlotDevice, worldtest.Day(1), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken), ondisk.SlotIgnition: ign})
	cutSinceReady(t, w, func(cut *world, in, at string) {
		if in != ign || cut.Get("/etc/motd") != "hello" {
			t.Errorf("cut at %s: the slot's config.ign is %q", at, in)
		}
	})
}

// cutSinceReady boots clones of w, each with a power cut at another effect after the node was
// Ready. After two more boots it passes each clone, with the slot's config.ign, to look.
func cutSinceReady(t *testing.T, w *world, look func(cut *world, ignition, at string)) {
	t.Helper()
	whole := w.Clone(t)
	whole.MustBoot()
	for n := slices.Index(whole.EffectNames, "write "+member.ReadyMark); n < len(whole.EffectNames); n += worldtest.EveryCut() {
		cut := w.Clone(t)
		cut.PowerCutAt = n + 1
		if err := cut.Boot(); err != nil { // an error of the report does not stop first boot
			t.Logf("cut at %s: %v", cut.EffectNames[len(cut.EffectNames)-1], err)
		}
		for range 2 {
			cut.PowerOn()
			cut.MustBoot()
		}
		c, err := slot.Read(cut.Slots[worldtest.SlotDevice])
		if err != nil {
			t.Fatal(err)
		}
		look(cut, string(c.Files[ondisk.SlotIgnition]), whole.EffectNames[n])
	}
}

// TestTokenInIgnition checks that a node accepts a slot whose config.ign contains the Site's token,
// and wipes the token from config.ign too. (A machine that has not joined rejects such a slot.)
func TestTokenInIgnition(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	w.MustBoot()
	w.StampAt(worldtest.SlotDevice, worldtest.Day(1), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken), ondisk.SlotIgnition: tokenInIgnition("data:,token%3D" + worldtest.TestToken)})
	for range 2 {
		w.PowerOn()
		w.MustBoot()
	}
	c, err := slot.Read(w.Slots[worldtest.SlotDevice])
	if err != nil || !strings.Contains(string(c.Files[ondisk.SlotIgnition]), "/etc/probe") {
		t.Fatalf("%v: config.ign is %s", err, c.Files[ondisk.SlotIgnition])
	}
	if ign := string(c.Files[ondisk.SlotIgnition]) + w.Get(site.IgnitionCopy); strings.Contains(ign, worldtest.TestToken) {
		t.Errorf("the token is still in config.ign: %s", ign)
	}
}

func tokenInIgnition(source string) string {
	return `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/etc/probe","mode":384,"contents":{"source":"` + source + `"}}]}}`
}

// TestResetAndASticksToken checks that after a reset, a stick that was plugged in does not make the
// machine join again.
func TestResetAndASticksToken(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.Plug(w.Site(worldtest.WithToken))
	w.MustBoot()
	var steps []run.Step
	if _, err := Reset(t.Context(), w.Env(), func(s run.Step) { steps = append(steps, s) }); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(steps, func(s run.Step) bool {
		return strings.Contains(s.Detail, "stick /dev/sdb1 has the Site of the cluster that this machine leaves, with its bootstrap token")
	}) {
		t.Errorf("reset did not report the token on the stick: %v", steps)
	}
	delete(w.Cluster.Nodes, "edge-sn0042")
	w.PowerOn()
	if err := w.Boot(); err == nil || w.Joins != 1 || !w.ConsoleHas("the Site of stick /dev/sdb1 is ignored: it was plugged in when the machine was reset") {
		t.Fatalf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
	}
	// A stick that is stamped again is applied, because somebody has requested that.
	w.StampAt(worldtest.StickDevice, worldtest.Day(20), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken)})
	w.PowerOn()
	w.MustBoot()
	if w.Joins != 2 {
		t.Errorf("kubeadm joined %d times", w.Joins)
	}
}

// TestResetBeforeANewStick checks that a stick with a new Site is applied after a reset. The reset
// reports that.
func TestResetBeforeANewStick(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Plug(w.reportTo("next", worldtest.WithToken))
	var steps []run.Step
	if _, err := Reset(t.Context(), w.Env(), func(s run.Step) { steps = append(steps, s) }); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(steps, func(s run.Step) bool { return strings.Contains(s.Detail, "has a new Site") }) {
		t.Errorf("reset did not report the new Site on the stick: %v", steps)
	}
	delete(w.Cluster.Nodes, "edge-sn0042")
	w.PowerOn()
	w.MustBoot()
	if !w.goesBy("next") || w.Joins != 2 {
		t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
}

// TestDateOfUnsignedStickAndAClockAhead checks a stick with a later date than a clock that a fake
// time server has set ahead. Once the clock is right, the date does not change it.
func TestDateOfUnsignedStickAndAClockAhead(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.setStickPolicy(ondisk.SitesRepair)
	ahead := func(w *world, stamped time.Time) {
		w.Plug("")
		w.StampAt(worldtest.StickDevice, stamped.Unix(), map[string]string{"site.yaml": w.Site(fmt.Sprintf("network: {dns: [192.0.2.%d]}", stamped.Second()+1))})
		w.PowerOn()
		w.SetClock(w.ClusterTime().AddDate(2, 6, 0))
		w.ClockSynced = true
	}
	corrected := func(w *world, when string) {
		w.ClockSynced = false
		w.Unplug()
		w.PowerOn()
		w.SetClock(w.ClusterTime())
		err := w.Boot()
		if w.ClockSkew != 0 || !w.ConsoleHas("[8/14] discovery: as it should be") {
			t.Errorf("%s: %v; the clock is wrong by %s\n%s", when, err, w.ClockSkew, strings.Join(w.Console, "\n"))
		}
	}
	first, second := worldtest.WorldStart.AddDate(2, 0, 1), worldtest.WorldStart.AddDate(2, 0, 2)
	second = second.Add(time.Second)
	ahead(w, first)
	before := w.Clone(t)
	if err := w.Boot(); err == nil || !w.ConsoleHas("using the Site of stick") {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	corrected(w, "one stick")
	ahead(w, second)
	if err := w.Boot(); err == nil || !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.2") {
		t.Fatalf("%v\n%s", err, w.SlotSite(worldtest.SlotDevice))
	}
	corrected(w, "another stick")

	for n, written := 1, false; !written; n++ {
		cut := before.Clone(t)
		cut.PowerCutAt = cut.Effects + n
		err := cut.Boot()
		written = slices.Contains(cut.EffectNames, "write slot "+worldtest.SlotDevice)
		corrected(cut, fmt.Sprintf("cut at effect %d (%v)", n, err))
	}
}
