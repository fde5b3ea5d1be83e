package firstboot

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
)

func address(addr string) string {
	return "network: {interfaces: [{name: eth0, addresses: [" + addr + "/24]}]}"
}

// networkHas reports whether the network settings in effect contain words.
func (w *world) networkHas(words string) bool {
	files, _ := filepath.Glob(filepath.Join(w.Root, "etc/systemd/network/*"))
	return slices.ContainsFunc(files, func(f string) bool {
		b, err := os.ReadFile(f)
		return err == nil && strings.Contains(string(b), words)
	})
}

// TestPowerCutDuringATrial cuts the power after a Site with new addresses arrives while the uplink
// is dead. Once the uplink works, the new addresses are in effect.
func TestPowerCutDuringATrial(t *testing.T) {
	t.Parallel()
	base := nativeWorld(t, address("192.0.2.50"))
	if err := base.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(base.Console, "\n"))
	}
	base.Stamp(worldtest.SlotDevice, base.Site(address("192.0.3.50")))
	effects := cutOnTheWay(t, base, func(w *world) {
		w.NetworkWorks = func() bool { return false }
		if err := w.Boot(); err == nil {
			t.Fatal("first boot succeeded without an uplink")
		}
		w.NetworkWorks = nil
	}, func(w *world, n int) {
		if !w.networkHas("192.0.3.50/24") || w.networkHas("192.0.2.50/24") {
			t.Fatalf("cut at %d: the Site's addresses are not in place\n%s", n, strings.Join(w.Console, "\n"))
		}
		if w.Has(network.TrialFile) {
			t.Fatalf("cut at %d: the trial is still recorded", n)
		}
	})
	if effects < 10 {
		t.Fatalf("only %d effects", effects)
	}
}

// cutOnTheWay runs boot on clones of base, each with a power cut at another effect, boots them
// again and passes them to look. It returns the number of the first cut after boot's last effect.
func cutOnTheWay(t *testing.T, base *world, boot func(*world), look func(w *world, n int)) int {
	t.Helper()
	followed := map[[32]byte]bool{}
	for n := 1; ; n += worldtest.EveryCut() {
		w := base.Clone(t)
		w.PowerOn()
		w.PowerCutAt = n
		boot(w)
		cut := w.PoweredOff
		w.PowerOn()
		if state := w.Fingerprint(t, w.Files()); cut && followed[state] {
			continue // the same state as after another cut
		} else {
			followed[state] = true
		}
		if err := w.Boot(); err != nil {
			t.Fatalf("cut at %d: %v\n%s", n, err, strings.Join(w.Console, "\n"))
		}
		look(w, n)
		if !cut {
			return n
		}
	}
}

// TestPowerCutDuringARollback cuts the power while wrong new addresses are rolled back. After a cut
// at any point, the former addresses are in effect.
func TestPowerCutDuringARollback(t *testing.T) {
	t.Parallel()
	base := nativeWorld(t, address("192.0.2.50"))
	if err := base.Boot(); err != nil {
		t.Fatal(err)
	}
	base.Stamp(worldtest.SlotDevice, base.Site(address("192.0.3.50")))
	cutOnTheWay(t, base, func(w *world) {
		w.NetworkWorks = func() bool { return w.networkHas("192.0.2.50/24") }
		if err := w.Boot(); err != nil && !w.PoweredOff {
			t.Fatal(err)
		}
	}, func(w *world, n int) {
		if !w.networkHas("192.0.2.50/24") || w.networkHas("192.0.3.50/24") {
			t.Fatalf("cut at %d: the previous addresses are not in place", n)
		}
	})
}

// TestDeadUplink checks that an enrolled node with new addresses and no uplink tries the former
// addresses a few times, then continues with the new ones.
func TestDeadUplink(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, address("192.0.2.50"))
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.3.50")))
	w.PowerOn()
	w.NetworkWorks, w.Patience = func() bool { return false }, 2*time.Hour
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded without an uplink")
	}
	if flips := w.EffectCount("networkctl reload"); flips > 1+2*len(network.TrialPauses) {
		t.Errorf("the addresses were changed %d times in %s", flips, w.Patience)
	}
	if !w.networkHas("192.0.3.50/24") {
		t.Error("the Site's addresses are not in place")
	}
	if s := w.State(); !slices.ContainsFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Name == "ipvs" && p.Status != ondisk.PhasePending }) {
		t.Error("first boot did not continue with the current settings")
	}
	// It tries once more after a reboot, and then not again.
	w.PowerOn()
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded without an uplink")
	}
	if flips := w.EffectCount("networkctl reload"); flips != 2 {
		t.Errorf("after a boot the addresses were changed %d times", flips)
	}
	// The uplink works again.
	w.NetworkWorks = nil
	if err := w.Boot(); err != nil || !w.networkHas("192.0.3.50/24") || w.Has(network.TrialFile) {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestCorrectedAfterARollback checks that a correction removes all of the former settings.
func TestCorrectedAfterARollback(t *testing.T) {
	t.Parallel()
	const withVLAN = "network: {interfaces: [{name: eth0, addresses: [192.0.2.50/24], vlans: [{id: 7, addresses: [198.51.100.5/24]}]}]}"
	w := nativeWorld(t, withVLAN)
	w.NetworkWorks = func() bool { return !w.networkHas("192.0.3.50/24") }
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.3.50")))
	w.PowerOn()
	if err := w.Boot(); err != nil || !w.networkHas("Id=7") {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.2.51")))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.networkHas("192.0.2.51/24") || w.networkHas("Id=7") || w.networkHas("192.0.2.50/24") || w.Has(network.TrialFile) {
		t.Error("a file of the previous settings is left")
	}
}

// TestTrialOfAnotherRoot checks that a failed trial on one root file system does not affect the
// other.
func TestTrialOfAnotherRoot(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, address("192.0.2.50"))
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.3.50")))
	w.PowerOn()
	w.NetworkWorks = func() bool { return w.networkHas("192.0.2.50/24") }
	w.MustBoot()
	if !w.Has(network.TrialFile) {
		t.Fatal("no other settings were tried")
	}
	w.ExchangeRoot()
	w.Stamp(worldtest.SlotDevice, w.Site(address("192.0.2.51")))
	w.NetworkWorks = nil
	w.PowerOn()
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.Site())
	w.PowerOn()
	w.MustBoot()
	if w.networkHas("192.0.3.50") || w.networkHas("192.0.2.51") {
		t.Error("settings of a replaced Site stay in place")
	}
}

// TestNetworkRollsBack checks corrected settings that reach no API server, while the former ones
// do. The former ones are restored.
func TestNetworkRollsBack(t *testing.T) {
	t.Parallel()
	settings := func(addr string) string {
		return "network: {interfaces: [{name: eth0, addresses: [" + addr + "/24]}]}"
	}
	w := nativeWorld(t, settings("192.0.2.50"))
	// The link works only with the first address.
	w.NetworkWorks = func() bool {
		files, _ := filepath.Glob(filepath.Join(w.Root, "etc/systemd/network/*.network"))
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), "192.0.2.50/24") {
				return true
			}
		}
		return false
	}
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w.Stamp(worldtest.SlotDevice, w.Site(settings("192.0.3.50")))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.ConsoleHas("the previous settings are back") || !w.NetworkWorks() {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	// The corrected settings are not tried again at the next boot.
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if w.ConsoleHas("the previous settings are back") {
		t.Error("the bad settings were tried again")
	}
}

func TestAddressChanged(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.NodeAddr = netip.MustParseAddr("192.0.2.77")
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if hosts := w.Get("/etc/hosts"); !strings.Contains(hosts, "192.0.2.77\tedge-sn0042") || strings.Contains(hosts, "192.0.2.50") || !strings.Contains(hosts, "localhost") {
		t.Errorf("hosts:\n%s", hosts)
	}
}

// TestTwoCards checks a node that reaches one API server by one network card, and the others by
// another card. It keeps its address, whichever API server answers first.
func TestTwoCards(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	const first, second = "192.0.2.50", "198.51.100.50"
	gone := map[string]bool{} // addresses that the machine has lost
	boot := func(answering string) string {
		t.Helper()
		e := w.Env()
		dial := e.Dial
		e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if strings.HasPrefix(addr, "192.0.2.1") && addr != answering {
				return nil, errors.New("connection refused")
			}
			return dial(ctx, network, addr)
		}
		e.Source = func(_ context.Context, addr string) (netip.Addr, error) {
			src := second
			if addr == "192.0.2.11:6443" {
				src = first
			}
			if gone[src] {
				return netip.Addr{}, errors.New("network is unreachable")
			}
			return netip.MustParseAddr(src), nil
		}
		w.PowerOn()
		if err := w.Run(New(e)); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		return network.NodeAddress(e)
	}
	for _, tt := range []struct{ answering, gone, want string }{
		{"192.0.2.12:6443", "", second},
		{"192.0.2.11:6443", "", second},
		{"192.0.2.13:6443", "", second},
		{"192.0.2.11:6443", second, first},
		{"192.0.2.12:6443", "", first},
	} {
		clear(gone)
		gone[tt.gone] = true
		if got := boot(tt.answering); got != tt.want {
			t.Errorf("%s answers, %q is gone: the address is %s, expected %s", tt.answering, tt.gone, got, tt.want)
		}
	}
}

// TestFirstAddressByTheList checks that when all API servers answer a new machine, its address is
// the one towards the first in the list.
func TestFirstAddressByTheList(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.Env()
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == "192.0.2.11:6443" {
			time.Sleep(100 * time.Millisecond)
		}
		return dial(ctx, network, addr)
	}
	e.Source = func(_ context.Context, addr string) (netip.Addr, error) {
		if addr == "192.0.2.11:6443" {
			return netip.MustParseAddr("192.0.2.50"), nil
		}
		return netip.MustParseAddr("198.51.100.50"), nil
	}
	if err := w.Run(New(e)); err != nil || network.NodeAddress(e) != "192.0.2.50" {
		t.Errorf("%v; the address is %s", err, network.NodeAddress(e))
	}
}

// TestRollbackOfDropins checks that drop-ins and masks count as network settings.
func TestRollbackOfDropins(t *testing.T) {
	t.Parallel()
	ignition := func(storage string) string {
		return `ignition: '{"ignition":{"version":"3.4.0"},"storage":{` + storage + `}}'`
	}
	file := func(path, text string) string {
		return `{"path":"` + path + `","contents":{"source":"data:,` + url.PathEscape(text) + `"}}`
	}
	dropin := func(addr string) string {
		return ignition(`"files":[` + file("/etc/systemd/network/30-lan.network.d/10.conf", "[Network]\nAddress="+addr+"/24\n") + `]`)
	}
	const mask = "/etc/systemd/network/80-lan.link"
	masked := ignition(`"links":[{"path":"` + mask + `","target":"/dev/null"}]`)
	text := func(w *world, path string) string {
		b, _ := os.ReadFile(filepath.Join(w.Root, path))
		return string(b)
	}
	target := func(w *world, path string) string {
		link, _ := os.Readlink(filepath.Join(w.Root, path))
		return link
	}
	for _, tt := range []struct {
		name, former, corrected string
		link                    func(*world) bool
	}{
		{"another drop-in", dropin("192.0.2.50"), dropin("198.51.100.50"), func(w *world) bool {
			return strings.Contains(text(w, "/etc/systemd/network/30-lan.network.d/10.conf"), "192.0.2.50/24")
		}},
		{"a drop-in comes", "", dropin("198.51.100.50"), func(w *world) bool { return !w.Has("/etc/systemd/network/30-lan.network.d") }},
		{"a drop-in goes", dropin("192.0.2.50"), "", func(w *world) bool {
			return strings.Contains(text(w, "/etc/systemd/network/30-lan.network.d/10.conf"), "192.0.2.50/24")
		}},
		{"a mask goes", masked, "", func(w *world) bool { return target(w, mask) == "/dev/null" }},
		{"a mask comes", "", masked, func(w *world) bool { return !w.Has(mask) }},
		{"a file instead of a mask", masked, ignition(`"files":[` + file(mask, "[Match]\n") + `]`), func(w *world) bool { return target(w, mask) == "/dev/null" }},
		{"a mask instead of a file", ignition(`"files":[` + file(mask, "[Match]\n") + `]`), masked, func(w *world) bool { return text(w, mask) == "[Match]\n" && target(w, mask) == "" }},
		{"a mask instead of drop-ins", dropin("192.0.2.50"), ignition(`"links":[{"path":"/etc/systemd/network/30-lan.network.d","target":"/dev/null","overwrite":true}]`), func(w *world) bool {
			return strings.Contains(text(w, "/etc/systemd/network/30-lan.network.d/10.conf"), "192.0.2.50/24")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t, tt.former)
			w.NetworkWorks = func() bool { return tt.link(w) }
			w.MustBoot()
			w.Stamp(worldtest.SlotDevice, w.Site(tt.corrected))
			w.PowerOn()
			w.MustBoot()
			if !w.NetworkWorks() || !w.ConsoleHas("the previous settings are back") {
				t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
			}
			// After another correction, nothing of either setting is left.
			w.Stamp(worldtest.SlotDevice, w.Site("network: {dns: [192.0.2.9]}"))
			w.NetworkWorks = nil
			w.PowerOn()
			w.MustBoot()
			if w.Has(mask) || w.Has("/etc/systemd/network/30-lan.network.d/10.conf") {
				t.Error("a file of the previous settings is left")
			}
		})
	}
}

// TestAddressChangesAfterARollback checks that another Site replaces the former settings, even if
// DHCP has assigned another address while they were in effect.
func TestAddressChangesAfterARollback(t *testing.T) {
	t.Parallel()
	const dropin = "/etc/systemd/network/30-lan.network.d/10.conf"
	w := nativeWorld(t, `ignition: '{"ignition":{"version":"3.4.0"},"storage":{"files":[{"path":"`+dropin+`","contents":{"source":"data:,%5BNetwork%5D%0ADHCP=yes%0A"}}]}}'`)
	w.NetworkWorks = func() bool { return w.Has(dropin) }
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.Site())
	w.PowerOn()
	if w.MustBoot(); !w.ConsoleHas("the previous settings are back") {
		t.Fatalf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	w.NodeAddr = netip.MustParseAddr("192.0.2.77")
	w.PowerOn()
	if w.MustBoot(); network.NodeAddress(w.Env()) != "192.0.2.77" || !w.Has(dropin) {
		t.Fatalf("the address is %s", network.NodeAddress(w.Env()))
	}
	w.Stamp(worldtest.SlotDevice, w.Site("network: {dns: [192.0.2.9]}"))
	w.NetworkWorks = nil
	w.PowerOn()
	if w.MustBoot(); w.Has(dropin) {
		t.Error("a file of the previous settings is left")
	}
}

// TestRollbackOfPermissions checks that a file that networkd, which does not run as root, cannot
// read does not count as the same setting.
func TestRollbackOfPermissions(t *testing.T) {
	t.Parallel()
	const path, networkd = "/etc/systemd/network/30-lan.netdev", 152
	site := func(meta string) string {
		return `ignition: '{"ignition":{"version":"3.4.0"},"storage":{"files":[{"path":"` + path + `",` + meta + `,"contents":{"source":"data:,%5BNetDev%5D%0A"}}]}}'`
	}
	for _, tt := range []struct{ name, corrected string }{
		{"another mode", `"mode":384,"group":{"id":152}`},
		{"another group", `"mode":416`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			desk.NeedRoot(t, "only root gives files to others")
			w := nativeWorld(t, site(`"mode":416,"group":{"id":152}`))
			w.NetworkWorks = func() bool {
				st, err := os.Stat(filepath.Join(w.Root, path))
				return err == nil && st.Mode().Perm() == 0o640 && st.Sys().(*syscall.Stat_t).Gid == networkd
			}
			w.MustBoot()
			w.Stamp(worldtest.SlotDevice, w.Site(site(tt.corrected)))
			w.PowerOn()
			if err := w.Boot(); err != nil || !w.NetworkWorks() || !w.ConsoleHas("the previous settings are back") {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestSettingsAreCollectedSafely checks that links are not followed, and files that no daemon reads
// are left out.
func TestSettingsAreCollectedSafely(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	const dir = "/etc/systemd/network"
	w.Put(dir+"/30-lan.network.d/10.conf", "[Network]\n")
	w.Put("/etc/secret/key", "key")
	w.Put(dir+"/40-large.network", strings.Repeat("#", 1<<20+1))
	w.Put(dir+"/a/b/c/d/e/deep.conf", "")
	for path, to := range map[string]string{dir + "/50-secret.network.d": "/etc/secret", dir + "/60-loop": "."} {
		if err := os.Symlink(to, filepath.Join(w.Root, path)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(w.Root, dir, "70-pipe.network"), 0o600); err != nil {
		t.Fatal(err)
	}
	files, err := network.Files(w.Env())
	if err != nil {
		t.Fatal(err)
	}
	got := slices.Sorted(maps.Keys(files))
	want := []string{dir + "/30-lan.network.d/10.conf", dir + "/50-secret.network.d", dir + "/60-loop"}
	if !slices.Equal(got, want) || files[want[1]].Link != "/etc/secret" || files[want[0]].UID != os.Getuid() {
		t.Errorf("%q, %+v", got, files)
	}
}
