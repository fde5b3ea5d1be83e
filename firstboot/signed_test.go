package firstboot

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

func newSiteKey(t *testing.T) minisign.PrivateKey {
	t.Helper()
	_, k, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// signed plugs in a signed stick. change, which may be nil, modifies it after signing.
func (w *world) signed(key minisign.PrivateKey, at int64, change func(*slot.Contents), files map[string]string) {
	w.T.Helper()
	w.Plug("")
	c := slot.Contents{Files: map[string][]byte{}}
	for name, data := range files {
		c.Files[name] = []byte(data)
	}
	var err error
	if c.Signature, err = slot.Sign(c.Files, key, time.Unix(at, 0)); err != nil {
		w.T.Fatal(err)
	}
	if change != nil {
		change(&c)
	}
	w.Slots[worldtest.StickDevice] = w.NewSlot(c)
}

const (
	aKey    = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKHEChAsHYmTqiLyuQ3FqLqWUgFYmWlSTsZKEJpSMEiH x"
	rootKey = `users: [{name: root, sshAuthorizedKeys: ["` + aKey + `"]}]`
	anIgn   = `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/etc/motd","contents":{"source":"data:,hello"}}]}}`
)

// TestSignedStickWithoutTheLastDate checks that no signature is accepted while the date of the last
// accepted one cannot be read, since any stick could then be an old one.
func TestSignedStickWithoutTheLastDate(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	w := nativeWorld(t)
	w.MustBoot()
	w.setStickPolicy(ondisk.SitesSigned, key)
	w.signed(key, worldtest.Day(5), nil, map[string]string{"site.yaml": w.Site("network: {dns: [192.0.2.123]}")})
	w.PowerOn()
	w.Put(ondisk.StateDir+"/signed/directory", "")
	w.MustBoot()
	if strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") || !w.ConsoleHas("reading when the last accepted Site was signed: ") {
		t.Errorf("the slot has\n%s\n%s", w.SlotSite(worldtest.SlotDevice), strings.Join(w.Console, "\n"))
	}
}

// TestASignedStick checks that if a Site is signed with a key of the Image, all of it is applied,
// except with the policy never. With an invalid signature, the stick counts as unsigned.
func TestASignedStick(t *testing.T) {
	t.Parallel()
	key, other := newSiteKey(t), newSiteKey(t)
	for _, c := range []struct {
		name   string
		policy string
		signer minisign.PrivateKey
		change func(*slot.Contents)
		all    bool
		some   bool // only a repair
		says   string
	}{
		{"signed", ondisk.SitesSigned, key, nil, true, false, "using the Site of stick"},
		{"repair", ondisk.SitesRepair, key, nil, true, false, "using the Site of stick"},
		{"until enrolled", ondisk.SitesUntilEnrolled, key, nil, true, false, "using the Site of stick"},
		{"never", ondisk.SitesNever, key, nil, false, false, "accepts no Site from a stick (sites.removable: never)"},
		{"unsigned", ondisk.SitesSigned, key, func(c *slot.Contents) { c.Signature = nil }, false, false,
			"stick /dev/sdb1 is ignored: no signature (site.minisig); the Image accepts signed Sites only"},
		{"unsigned repair", ondisk.SitesRepair, key, func(c *slot.Contents) { c.Signature = nil }, false, true, "are ignored, since the Image allows repairs only (sites.removable): users, config.ign"},
		{"unsigned, until enrolled", ondisk.SitesUntilEnrolled, key, func(c *slot.Contents) { c.Signature = nil }, false, false, "unless it is signed by a key that the Image names (edgebake site sign)"},
		{"another key", ondisk.SitesSigned, other, nil, false, false, "signed by key "},
		{"another key's repair", ondisk.SitesRepair, other, nil, false, true, "stick /dev/sdb1 counts as unsigned: signed by key "},
		{"tampered", ondisk.SitesSigned, key, func(c *slot.Contents) { c.Files["site.yaml"] = append(c.Files["site.yaml"], '\n') }, false, false, "a file was changed, added or removed after signing"},
		{"tampered repair", ondisk.SitesRepair, key, func(c *slot.Contents) { c.Files["site.yaml"] = append(c.Files["site.yaml"], '\n') }, false, true, "counts as unsigned: the signature by key"},
		{"an extra file", ondisk.SitesSigned, key, func(c *slot.Contents) { c.Files["files/x"] = nil }, false, false, "does not match"},
		{"a file less", ondisk.SitesSigned, key, func(c *slot.Contents) { delete(c.Files, "config.ign") }, false, false, "does not match"},
		{"swapped", ondisk.SitesSigned, key, func(c *slot.Contents) {
			c.Files["config.ign"], c.Files["files/x"] = c.Files["files/x"], c.Files["config.ign"]
		}, false, false, "does not match"},
		{"not YAML, which nobody parses", ondisk.SitesSigned, key, func(c *slot.Contents) { c.Files["site.yaml"] = []byte("\t: [") }, false, false, "does not match"},
		{"not a signature", ondisk.SitesSigned, key, func(c *slot.Contents) { c.Signature = []byte("hello") }, false, false, "is not a minisign signature"},
		{"of 2090", ondisk.SitesSigned, key, func(c *slot.Contents) {
			c.Signature, _ = slot.Sign(c.Files, key, time.Date(2090, 1, 1, 0, 0, 0, 0, time.UTC))
		}, false, false, "it was signed on 2090-01-01 00:00:00, which is too late for this image"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			w.setStickPolicy(c.policy, key)
			w.signed(c.signer, worldtest.Day(5), c.change, map[string]string{"site.yaml": w.Site("network: {dns: [192.0.2.123]}", rootKey), "config.ign": anIgn})
			w.PowerOn()
			w.MustBoot()
			if got := w.SlotSite(worldtest.SlotDevice); strings.Contains(got, "192.0.2.123") != (c.all || c.some) || strings.Contains(got, "ssh-ed25519") != c.all {
				t.Errorf("the slot has\n%s", got)
			}
			if w.Has("/root/.ssh/authorized_keys") != c.all || (w.Has("/etc/motd") && w.Get("/etc/motd") == "hello") != c.all {
				t.Errorf("root's keys: %v, motd: %q", w.Has("/root/.ssh/authorized_keys"), w.Get("/etc/motd"))
			}
			if !w.ConsoleHas(c.says) {
				t.Errorf("the console does not have %q:\n%s", c.says, strings.Join(w.Console, "\n"))
			}
			own, err := slot.Read(w.Slots[worldtest.SlotDevice])
			if err != nil || own.Signature != nil {
				t.Errorf("%v, a signature in the slot: %q", err, own.Signature)
			}
		})
	}
}

// TestABlankMachineAndSignedSites checks that the first Site of a blank machine must be signed too,
// and that the console reports that its token stays on the stick.
func TestABlankMachineAndSignedSites(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	w := newWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.setStickPolicy(ondisk.SitesSigned, key)
	w.Plug(w.Site(worldtest.WithToken))
	if err := w.Boot(); err == nil || w.Joins > 0 || !w.ConsoleHas("no signature (site.minisig)") {
		t.Fatalf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
	}
	w.signed(key, worldtest.Day(5), nil, map[string]string{"site.yaml": w.Site(worldtest.WithToken)})
	w.PowerOn()
	w.MustBoot()
	if w.Joins != 1 || !w.ConsoleHas("the bootstrap token stays on stick /dev/sdb1, also after the join") {
		t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
}

// TestAStampedSlotNeedsNoSignature checks that the slot on the machine's own disk needs no
// signature.
func TestAStampedSlotNeedsNoSignature(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.setStickPolicy(ondisk.SitesSigned, newSiteKey(t))
	w.MustBoot()
	w.StampAt(worldtest.SlotDevice, worldtest.Day(9), map[string]string{"site.yaml": w.Site(rootKey)})
	w.PowerOn()
	w.MustBoot()
	if !w.Has("/root/.ssh/authorized_keys") {
		t.Error("the stamped Site was not used")
	}
}

// TestAnOldSignedSite checks that an old signed Site is not applied again under any policy, not
// even after a reset.
func TestAnOldSignedSite(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	for _, policy := range []string{ondisk.SitesSigned, ondisk.SitesRepair, ondisk.SitesUntilEnrolled} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			w.setStickPolicy(policy, key)
			bring := func(at int64, host string) {
				w.signed(key, at, nil, map[string]string{"site.yaml": w.reportTo(host)})
				w.PowerOn()
				w.MustBoot()
			}
			bring(worldtest.Day(5), "one")
			bring(worldtest.Day(7), "two")
			if !w.goesBy("two") {
				t.Fatalf("%s", strings.Join(w.Console, "\n"))
			}
			for range 2 {
				bring(worldtest.Day(5), "one")
				if !w.goesBy("two") || !w.ConsoleHas("it was signed on 2026-11-05 00:00:00, and the machine has accepted a Site signed on 2026-11-07 00:00:00: sign it again to use it anyway") {
					t.Fatalf("%s", strings.Join(w.Console, "\n"))
				}
			}
			bring(worldtest.Day(8), "one")
			if !w.goesBy("one") {
				t.Errorf("the Site is not used after it was signed again:\n%s", strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestSignedThroughPowerCuts checks that after a power cut at any point, the signed Site on the
// stick is applied in the end.
func TestSignedThroughPowerCuts(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	w := nativeWorld(t)
	w.MustBoot()
	w.setStickPolicy(ondisk.SitesSigned, key)
	w.signed(key, worldtest.Day(7), nil, map[string]string{"site.yaml": w.reportTo("two")})
	w.PowerOn()
	whole := w.Clone(t)
	whole.MustBoot()
	last := slices.Index(whole.EffectNames[len(w.EffectNames):], "write slot "+worldtest.SlotDevice) + 3
	if last < 6 {
		t.Fatalf("only %d effects before the slot is written: %q", last, whole.EffectNames[len(w.EffectNames):])
	}
	for n := 1; n <= last; n++ {
		cut := w.Clone(t)
		cut.PowerCutAt = cut.Effects + n
		if err := cut.Boot(); err == nil {
			t.Logf("effect %d is not one of the boot's", n)
		}
		cut.PowerCutAt = 0
		cut.PowerOn()
		cut.MustBoot()
		if !cut.goesBy("two") {
			t.Errorf("cut at effect %d: the machine uses\n%s", n, cut.SlotSite(worldtest.SlotDevice))
		}
	}
}

// TestASignatureFromBeforeTheImage checks signatures from before and after the image's date. A
// signed Site does not replace a Site that was stamped later, even after an unsigned stick in
// between.
func TestASignatureFromBeforeTheImage(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	old := time.Date(2025, 6, 1, 0, 0, 0, 0, time.UTC).Unix()
	for _, c := range []struct {
		name     string
		signed   int64
		stranger bool
		stamped  int64
		taken    bool
	}{
		{"before the image", old, false, worldtest.Day(9), false},
		{"after the image", worldtest.Day(5), false, worldtest.Day(9), false},
		{"behind a stranger's stick", worldtest.Day(5), true, worldtest.Day(9), false},
		{"before the image, behind a stranger's stick", old, true, worldtest.Day(9), false},
		{"stamped before the image", old, false, old + 86400, false},
		{"the day after", worldtest.Day(10), true, worldtest.Day(9), true},
		{"onto a slot without a date", old, true, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			w.setStickPolicy(ondisk.SitesRepair, key)
			w.StampAt(worldtest.SlotDevice, c.stamped, map[string]string{"site.yaml": w.reportTo("two")})
			w.PowerOn()
			w.MustBoot()
			if c.stranger {
				w.Plug("")
				w.StampAt(worldtest.StickDevice, worldtest.Day(18), map[string]string{"site.yaml": w.Site("network: {dns: [192.0.2.123]}")})
				w.PowerOn()
				w.MustBoot()
				if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") {
					t.Fatalf("the other machine's stick was not used\n%s", strings.Join(w.Console, "\n"))
				}
			}
			w.signed(key, c.signed, nil, map[string]string{"site.yaml": w.reportTo("one", rootKey)})
			w.PowerOn()
			w.MustBoot()
			if w.goesBy("one") != c.taken || w.Has("/root/.ssh/authorized_keys") != c.taken {
				t.Errorf("taken: %v\n%s\n%s", !c.taken, w.SlotSite(worldtest.SlotDevice), strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestDateOfUnsignedStick checks that the date of an unsigned stick does not make a signed Site
// count as old.
func TestDateOfUnsignedStick(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	for _, blank := range []bool{false, true} {
		w := nativeWorld(t)
		if blank {
			w.Stamp(worldtest.SlotDevice, "")
		}
		w.setStickPolicy(ondisk.SitesRepair, key)
		if !blank {
			w.MustBoot()
		}
		w.Plug("")
		w.StampAt(worldtest.StickDevice, time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), map[string]string{"site.yaml": w.Site(worldtest.WithToken, "network: {dns: [192.0.2.123]}")})
		w.PowerOn()
		w.MustBoot()
		if !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") {
			t.Fatalf("the other machine's stick was not used\n%s", strings.Join(w.Console, "\n"))
		}
		w.signed(key, worldtest.Day(19), nil, map[string]string{"site.yaml": w.reportTo("office")})
		w.PowerOn()
		w.MustBoot()
		if !w.goesBy("office") {
			t.Errorf("blank %v: the signed stick was not used\n%s", blank, strings.Join(w.Console, "\n"))
		}
	}
}

// TestDateOfUnsignedStickThroughPowerCuts checks that the dates of two unsigned sticks make no
// signed Site count as old, but the date of the Site on the disk still does.
func TestDateOfUnsignedStickThroughPowerCuts(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	w := nativeWorld(t)
	w.UseSingleMaster()
	w.StampAt(worldtest.SlotDevice, worldtest.Day(8), map[string]string{"site.yaml": w.Site(worldtest.WithToken)})
	w.MustBoot()
	w.setStickPolicy(ondisk.SitesRepair, key)
	stranger := func(w *world, n int) {
		w.Plug("")
		w.StampAt(worldtest.StickDevice, worldtest.Day(n), map[string]string{"site.yaml": w.Site(fmt.Sprintf("network: {dns: [192.0.2.%d]}", 100+n))})
		w.PowerOn()
	}
	stranger(w, 15)
	w.MustBoot()
	stranger(w, 18)
	whole := w.Clone(t)
	whole.MustBoot()
	last := slices.Index(whole.EffectNames, "write slot "+worldtest.SlotDevice) + 3
	if last < 5 || !slices.Contains(whole.EffectNames, "write "+site.UnsignedFile) {
		t.Fatalf("%q", whole.EffectNames)
	}
	for n := 1; n <= last; n++ {
		cut := w.Clone(t)
		cut.PowerCutAt = cut.Effects + n
		if err := cut.Boot(); err == nil {
			t.Logf("effect %d is not one of the boot's", n)
		}
		for _, c := range []struct {
			signed int64
			taken  bool
		}{{worldtest.Day(7), false}, {worldtest.Day(10), true}} {
			cut := cut.Clone(t)
			cut.PowerCutAt = 0
			cut.signed(key, c.signed, nil, map[string]string{"site.yaml": cut.reportTo("office")})
			cut.PowerOn()
			cut.MustBoot()
			if cut.goesBy("office") != c.taken {
				t.Errorf("cut at %s: signed on %s, taken %v\n%s", whole.EffectNames[n-1], site.Date(c.signed), !c.taken, strings.Join(cut.Console, "\n"))
			}
		}
	}
}

// TestNotBefore checks that an Image rejects Sites that were signed before its date, on members and
// on blank machines.
func TestNotBefore(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	for _, blank := range []bool{false, true} {
		w := nativeWorld(t)
		if blank {
			w.Stamp(worldtest.SlotDevice, "")
		} else {
			w.MustBoot()
		}
		w.setStickPolicy(ondisk.SitesSigned, key)
		w.Put(ondisk.ImageInfoFile, strings.Replace(w.Get(ondisk.ImageInfoFile), "{", fmt.Sprintf(`{"sitesNotBefore":%d,`, worldtest.Day(6)), 1))
		bring := func(at int64) error {
			w.signed(key, at, nil, map[string]string{"site.yaml": w.reportTo("office", worldtest.WithToken)})
			w.PowerOn()
			return w.Boot()
		}
		err := bring(worldtest.Day(6) - 1)
		if (err != nil) != blank || blank && w.Joins > 0 || !blank && w.goesBy("office") || !w.ConsoleHas("it was signed on 2026-11-05 23:59:59, and the Image rejects Sites signed before 2026-11-06 00:00:00 (sites.notBefore)") {
			t.Errorf("blank %v: %v\n%s", blank, err, strings.Join(w.Console, "\n"))
		}
		if err := bring(worldtest.Day(6)); err != nil || !w.goesBy("office") {
			t.Errorf("blank %v: %v\n%s", blank, err, strings.Join(w.Console, "\n"))
		}
	}
}

// TestOldSignedSiteBesideASpoiltSlot checks that if the slot is damaged, or its Site is wrong, the
// copy of the last Site and its stamping date count: an older signed Site is not applied.
func TestOldSignedSiteBesideASpoiltSlot(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	for name, spoil := range map[string]func(*world){
		"whole": func(*world) {},
		"corrected wrongly": func(w *world) {
			w.StampAt(worldtest.SlotDevice, worldtest.Day(12), map[string]string{"site.yaml": "kind: nonsense\n"})
		},
		"spoilt": func(w *world) { w.Slots[worldtest.SlotDevice] = worldtest.NewMemDevice(make([]byte, ondisk.SlotSize)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			w.setStickPolicy(ondisk.SitesSigned, key)
			w.StampAt(worldtest.SlotDevice, worldtest.Day(9), map[string]string{"site.yaml": w.reportTo("two")})
			w.PowerOn()
			w.MustBoot()
			spoil(w)
			w.signed(key, worldtest.Day(5), nil, map[string]string{"site.yaml": w.reportTo("one", rootKey)})
			w.PowerOn()
			err := w.Boot()
			if w.Has("/root/.ssh/authorized_keys") || w.goesBy("one") {
				t.Errorf("the Site signed on day 5 replaced one stamped on day 9: %v\n%s", err, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestSlotMadeAgainHasItsDate checks a slot left blank by a power cut while the token is wiped.
// When the slot is restored, it has the Site's date.
func TestSlotMadeAgainHasItsDate(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	w := nativeWorld(t)
	w.StampAt(worldtest.SlotDevice, worldtest.Day(9), map[string]string{"site.yaml": w.reportTo("two", worldtest.WithToken)})
	w.setStickPolicy(ondisk.SitesSigned, key)
	whole := w.Clone(t)
	whole.MustBoot()
	wiped := slices.Index(whole.EffectNames, "blank "+worldtest.SlotDevice)
	if wiped < 0 {
		t.Fatalf("the token was never wiped: %q", whole.EffectNames)
	}
	for at := wiped + 1; at <= wiped+3; at++ {
		cut := w.Clone(t)
		cut.PowerCutAt = cut.Effects + at
		if err := cut.Boot(); err == nil {
			t.Fatalf("effect %d was not cut", at)
		}
		cut.PowerCutAt = 0
		cut.PowerOn()
		cut.MustBoot()
		c, err := slot.Read(cut.Slots[worldtest.SlotDevice])
		if err != nil || c.Info.Stamped != worldtest.Day(9) {
			t.Errorf("cut at %s: the slot: %+v, %v", whole.EffectNames[at-1], c, err)
		}
		cut.signed(key, worldtest.Day(5), nil, map[string]string{"site.yaml": cut.reportTo("one", rootKey)})
		cut.PowerOn()
		if err := cut.Boot(); cut.Has("/root/.ssh/authorized_keys") {
			t.Errorf("cut at %s: the Site signed on day 5 replaced one stamped on day 9: %v", whole.EffectNames[at-1], err)
		}
	}
}

// TestDateOfTheCopy checks that when the same Site is stamped again, the copy gets the new date. A
// copy from a former release gets its date at the next boot.
func TestDateOfTheCopy(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	text := w.reportTo("two")
	for _, d := range []int{9, 10} {
		w.StampAt(worldtest.SlotDevice, worldtest.Day(d), map[string]string{"site.yaml": text})
		w.PowerOn()
		w.MustBoot()
		if got := strings.TrimSpace(w.Get(site.StampedCopy)); got != fmt.Sprint(worldtest.Day(d)) {
			t.Errorf("stamped on day %d, the copy has %s", d, got)
		}
	}
	if err := os.Remove(w.HostPath(site.StampedCopy)); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	w.MustBoot()
	if got := strings.TrimSpace(w.Get(site.StampedCopy)); got != fmt.Sprint(worldtest.Day(10)) {
		t.Errorf("a copy of an earlier release has %s", got)
	}
}
