package firstboot

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestASiteForAnotherMachine checks that a Site for another machine is rejected from the slot, from
// an unsigned and from a signed stick, and none of it is applied.
func TestASiteForAnotherMachine(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	for _, match := range []string{"match: {serial: SN0099}", "match: {serial: SN0042, macs: ['52:54:00:99:99:99']}", `"\x6datch": {serial: SN0099}`} {
		for _, from := range []string{"slot", "stick", "signed stick"} {
			for _, member := range []bool{true, false} {
				w := nativeWorld(t)
				w.setStickPolicy(ondisk.SitesAlways, key)
				if member {
					w.MustBoot()
				} else {
					w.Stamp(worldtest.SlotDevice, "")
				}
				files := map[string]string{ondisk.SlotSite: w.reportTo("other", worldtest.WithToken, rootKey, match)}
				switch from {
				case "slot":
					w.StampAt(worldtest.SlotDevice, worldtest.Day(9), files)
				case "stick":
					w.Plug("")
					w.StampAt(worldtest.StickDevice, worldtest.Day(9), files)
				default:
					w.signed(key, worldtest.Day(9), nil, files)
				}
				w.PowerOn()
				w.Patience = 30 * time.Second
				if err := w.Boot(); (err == nil) != member {
					t.Errorf("%s, %s, member %v: %v", match, from, member, err)
				}
				if w.Has("/root/.ssh/authorized_keys") || !w.ConsoleHas("the Site is for another machine (match)") {
					t.Errorf("%s, %s, member %v: applied: %v\n%s", match, from, member, w.Has("/root/.ssh/authorized_keys"), strings.Join(w.Console, "\n"))
				}
			}
		}
	}
}

// TestASiteForThisMachine checks that a Site for this machine is accepted like any other, and stays
// valid when a network card is added.
func TestASiteForThisMachine(t *testing.T) {
	t.Parallel()
	for _, from := range []string{"slot", "stick"} {
		w := newWorld(t)
		site := w.Site(worldtest.WithToken, "match: {serial: sn0042, macs: ['52:54:00:12:34:56']}")
		if w.Stamp(worldtest.SlotDevice, site); from == "stick" {
			w.Stamp(worldtest.SlotDevice, "")
			w.Plug(site)
		}
		w.MustBoot()
		if got := w.SlotSite(worldtest.SlotDevice); w.Joins != 1 || strings.Contains(got, "match") || !strings.Contains(got, "edge-{{.Serial}}") {
			t.Errorf("%s: %d joins, the slot has\n%s", from, w.Joins, got)
		}
		w.Put("/sys/class/net/enp1s0/address", "52:54:00:99:99:99\n")
		w.PowerOn()
		w.MustBoot()
		if w.State().Result != ondisk.ResultDone || w.ConsoleHas("is ignored: its Site") && from == "slot" {
			t.Errorf("%s:\n%s", from, strings.Join(w.Console, "\n"))
		}
	}
}

// TestANeighboursSite checks that a member rejects a Site with another node name before it applies
// any of it, unless the Site moves it to another cluster.
func TestANeighboursSite(t *testing.T) {
	t.Parallel()
	key := newSiteKey(t)
	for _, c := range []struct {
		name, from     string
		expired, moves bool
	}{
		{"stick", "stick", false, false},
		{"stick, certificate expired", "stick", true, false},
		{"slot", "slot", false, false},
		{"stick of another cluster", "stick", false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.setStickPolicy(ondisk.SitesSigned, key)
			w.MustBoot()
			if c.expired { // and the join that would repair it has failed
				w.expire()
				w.JoinError = func(int) error { return errors.New("kubelet is not well") }
				w.PowerOn()
				if err := w.Boot(); err == nil || member.HasCredentials(w.Env()) {
					t.Fatal(err)
				}
				w.JoinError = nil
			}
			if c.moves {
				w.Rebuild()
			}
			files := map[string]string{ondisk.SlotSite: strings.Replace(w.Site(worldtest.WithToken, rootKey), "edge-{{.Serial}}", "other", 1)}
			if c.from == "slot" {
				w.StampAt(worldtest.SlotDevice, worldtest.Day(9), files)
			} else {
				w.signed(key, worldtest.Day(19), nil, files)
			}
			w.PowerOn()
			err := w.Boot()
			if c.moves {
				if err != nil || w.Cluster.Nodes["other"] == nil || !w.Has("/root/.ssh/authorized_keys") {
					t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
				}
				return
			}
			if w.Has("/root/.ssh/authorized_keys") || w.Cluster.Nodes["other"] != nil || !w.ConsoleHas("this machine is enrolled as edge-sn0042, but the Site names it other") {
				t.Errorf("%v: the machine has another machine's keys: %v\n%s", err, w.Has("/root/.ssh/authorized_keys"), strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestANeighboursRepair checks that with policy repair, a member accepts nothing from a Site that
// names another machine. A name made from the machine's facts does not name another machine.
func TestANeighboursRepair(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		nodeName string
		taken    bool
	}{
		{"other", false}, {"edge-sn0042", true}, {"EDGE-SN0042", true}, {"node-{{.MAC}}", true},
	} {
		w := nativeWorld(t)
		w.MustBoot()
		w.setStickPolicy(ondisk.SitesRepair)
		w.Plug(strings.Replace(w.Site("network: {dns: [192.0.2.123]}"), "edge-{{.Serial}}", "'"+c.nodeName+"'", 1))
		w.PowerOn()
		w.MustBoot()
		if strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") != c.taken || w.ConsoleHas("stick /dev/sdb1 is ignored: this machine is enrolled as edge-sn0042, but the Site names it other") == c.taken {
			t.Errorf("%s: %s\n%s", c.nodeName, w.SlotSite(worldtest.SlotDevice), strings.Join(w.Console, "\n"))
		}
	}
}
