package firstboot

import (
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// TestPortsAreClosedOrYurthubDoesNotRun checks that if the rules cannot be loaded, the phase fails
// and yurthub is not started.
func TestPortsAreClosedOrYurthubDoesNotRun(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.NoNFT = true
	if err := w.Boot(); err == nil || !w.ConsoleHas("closing the ports of yurthub, which give this node's rights to any client") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if slices.ContainsFunc(w.EffectNames, func(n string) bool {
		return strings.HasSuffix(n, "start "+openyurt.Unit)
	}) {
		t.Error("yurthub was started")
	}

	w.NoNFT = false
	w.PowerOn()
	if err := w.Boot(); err != nil || !strings.Contains(w.NFTRules, "10261") {
		t.Fatalf("%v; rules %q", err, w.NFTRules)
	}
	load, start := slices.Index(w.EffectNames, "run nft -f "+hub.NFTFile), slices.Index(w.EffectNames, "restart "+openyurt.Unit)
	if load < 0 || start < load {
		t.Errorf("the rules are loaded after yurthub was started: %d, %d", load, start)
	}
	for _, unit := range []string{"enable " + hub.PortsUnit, "enable " + hub.PortsTimer, "start " + hub.PortsTimer} {
		if !slices.Contains(w.EffectNames, unit) {
			t.Errorf("no %s", unit)
		}
	}

	// Somebody flushes all rules. The Check at a later boot notices that.
	w.PowerOn()
	w.NFTRules = ""
	if err := w.Boot(); err != nil || !strings.Contains(w.NFTRules, "10261") {
		t.Errorf("%v; rules %q", err, w.NFTRules)
	}
}

// TestKubeletIsHeldWithoutRules checks that if yurthub is a static pod, kubelet does not start at a
// boot at which the rules cannot be loaded, nor on a root without rules.
func TestKubeletIsHeldWithoutRules(t *testing.T) {
	for _, exchanged := range []bool{false, true} {
		w := podWorld(t)
		w.MustBoot()
		if exchanged {
			w.ExchangeRoot()
		}
		w.NoNFT = true
		w.PowerOn()
		if err := w.Boot(); err == nil || !w.ConsoleHas("closing the ports of yurthub") {
			t.Errorf("exchanged %v: %v\n%s", exchanged, err, strings.Join(w.Console, "\n"))
		}
		if w.Units[ondisk.UnitKubelet] == "active" {
			t.Errorf("exchanged %v: kubelet and yurthub run without the rules", exchanged)
		}
		w.NoNFT = false
		w.PowerOn() // or systemd's next attempt
		if err := w.Boot(); err != nil || w.Units[ondisk.UnitKubelet] != "active" || !strings.Contains(w.NFTRules, "10261") {
			t.Fatalf("exchanged %v: %v; kubelet %s, rules %q\n%s", exchanged, err, w.Units[ondisk.UnitKubelet], w.NFTRules, strings.Join(w.Console, "\n"))
		}

		// Removing the rules leaves no file that kubelet would wait for.
		if err := hub.RemovePortRules(t.Context(), w.Env()); err != nil || w.Has(hub.PortsKubelet) || w.Has(hub.NFTFile) {
			t.Errorf("%v: the drop-in or the rules still exist", err)
		}
	}
}

// TestRulesComeBeforeKubelet checks that on a newly written root, the rules are loaded before
// kubelet starts.
func TestRulesComeBeforeKubelet(t *testing.T) {
	w := podWorld(t)
	w.MustBoot()
	w.ExchangeRoot()
	w.PowerOn()
	w.MustBoot()
	load, start := slices.Index(w.EffectNames, "run nft -f "+hub.NFTFile), slices.Index(w.EffectNames, "start "+ondisk.UnitKubelet)
	if load < 0 || start < load {
		t.Errorf("kubelet is started before the rules are loaded: %d, %d", load, start)
	}
}

// TestRemovePortRulesIsCutOff checks that after a power cut at any point, kubelet does not wait for
// removed rules.
func TestRemovePortRulesIsCutOff(t *testing.T) {
	whole := podWorld(t)
	whole.MustBoot()
	whole.PowerOn()
	for n := 1; ; n++ {
		w := whole.Clone(t)
		w.Shutdown, w.PowerCutAt = func() {}, n
		err := hub.RemovePortRules(t.Context(), w.Env())
		if w.Has(hub.PortsKubelet) && !w.Has(hub.NFTFile) {
			t.Errorf("cut at effect %d: kubelet waits for rules that are gone", n)
		}
		if err == nil {
			break
		}
	}
}
