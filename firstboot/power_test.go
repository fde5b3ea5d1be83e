package firstboot

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestPowerGoesRightAfterReady checks that before the token is removed, all of the node's files are
// synced.
func TestPowerGoesRightAfterReady(t *testing.T) {
	t.Parallel()
	for name, world := range map[string]func(*testing.T) *world{
		"native": func(t *testing.T) *world { return nativeWorld(t) },
		"edge":   func(t *testing.T) *world { return edgeWorld(t) },
		"pod":    podWorld,
	} {
		t.Run(name, func(t *testing.T) {
			w := world(t)
			if err := w.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			w.LoseUnsynced()
			w.PowerOn()
			if err := w.Boot(); err != nil || w.Joins != 1 {
				t.Errorf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestSyncFails checks that if syncing fails, the token is kept.
func TestSyncFails(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.Env()
	broken, sync := true, e.Sync
	e.Sync = func(paths ...string) error {
		if broken {
			broken = false
			if !strings.Contains(w.SlotSite(worldtest.SlotDevice), worldtest.TestToken) {
				t.Error("the token was removed before the other files were synced to the disk")
			}
			return errors.New("input/output error")
		}
		return sync(paths...)
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.ConsoleHas("forget-token: will be tried again: syncing the node's credentials: input/output error") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestStateDecidesNothing checks that the next boot does not depend on the contents of state.json
// after a power cut, or on its existence.
func TestStateDecidesNothing(t *testing.T) {
	t.Parallel()
	for name, newWorld := range map[string]func(*testing.T, ...string) *world{"native": nativeWorld, "edge": edgeWorld} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			machine := newWorld(t)
			machine.UseSingleMaster()
			whole := machine.Clone(t)
			whole.MustBoot()
			for _, at := range []string{"write " + ondisk.IPVSConfig, "kubeadm ends", "write " + member.ReadyMark} {
				cut := machine.Clone(t)
				cut.PowerCutAt = slices.Index(whole.EffectNames, at) + 1
				if err := cut.Boot(); err == nil || cut.PowerCutAt == 0 {
					t.Fatalf("cut at %s: the machine continued after the power cut", at)
				}
				cut.PowerOn()
				as := cut.Clone(t)
				as.MustBoot()
				for what, state := range map[string]func(*world) error{
					"gone":     func(w *world) error { return os.Remove(filepath.Join(w.Root, ondisk.StateFile)) },
					"empty":    func(w *world) error { w.Put(ondisk.StateFile, ""); return nil },
					"a node's": func(w *world) error { w.Put(ondisk.StateFile, whole.Get(ondisk.StateFile)); return nil },
					"this boot": func(w *world) error {
						w.Put(ondisk.StateFile, strings.Replace(whole.Get(ondisk.StateFile), "boot-0", "boot-1", 1))
						return nil
					},
				} {
					w := cut.Clone(t)
					if err := state(w); err != nil {
						t.Fatal(err)
					}
					w.MustBoot()
					if !slices.Equal(w.EffectNames, as.EffectNames) {
						t.Errorf("cut at %s, the state is %s: first boot did\n%q, not\n%q", at, what, w.EffectNames, as.EffectNames)
					}
					sameTree(t, "cut at "+at+", the state is "+what, w.tree(), as.tree())
				}
			}
		})
	}
}

// states returns funcs that replace state.json, by name. ofNode is the state.json of a finished
// node.
func states(ofNode string) map[string]func(*world) error {
	put := func(text string) func(*world) error {
		return func(w *world) error { w.Put(ondisk.StateFile, text); return nil }
	}
	return map[string]func(*world) error{
		"as it was":  func(*world) error { return nil },
		"gone":       func(w *world) error { return os.Remove(filepath.Join(w.Root, ondisk.StateFile)) },
		"empty":      put(""),
		"a newer's":  put(strings.Replace(ofNode, `"version": 1`, `"version": 2`, 1)),
		"a node's":   put(ofNode),
		"a waiter's": put(strings.ReplaceAll(ofNode, `"done"`, `"waiting"`)),
	}
}

// TestStateDecidesNoReset checks that a reset removes the token of an unfinished join, and keeps
// that of the next Site, whatever state.json contains.
func TestStateDecidesNoReset(t *testing.T) {
	t.Parallel()
	machine := edgeWorld(t)
	machine.UseSingleMaster()
	node := machine.Clone(t)
	node.MustBoot()
	joining := machine.Clone(t)
	joining.Cluster.HubServerCSR = "pending"
	if err := joining.Boot(); err == nil {
		t.Fatal("first boot succeeded although no CSR was approved")
	}
	joining.Cluster.HubServerCSR = "Approved"
	searching := machine.Clone(t) // no join has begun, but the Site is in place
	searching.Offline = true
	if err := searching.Boot(); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	searching.Offline = false
	stamped := node.Clone(t)
	stamped.Stamp(worldtest.SlotDevice, stamped.Site(worldtest.WithToken, "nodeType: edge", "nodePool: shanghai"))
	ofNode := node.Get(ondisk.StateFile)
	for _, tc := range []struct {
		name    string
		machine *world
		again   int // joins after the reset
	}{
		{"in the middle of the join", joining, 0},
		{"on the way to it", searching, 0},
		{"with the next Site", stamped, 1},
	} {
		for what, state := range states(ofNode) {
			w := tc.machine.Clone(t)
			if err := state(w); err != nil {
				t.Fatal(err)
			}
			if _, err := w.reset(); err != nil {
				t.Fatal(err)
			}
			if tc.again == 0 {
				w.NoSecret()
			}
			delete(w.Cluster.Nodes, "edge-sn0042") // kubectl delete node
			joins := w.Joins
			w.PowerOn()
			if err := w.Boot(); (err == nil) != (tc.again == 1) || w.Joins != joins+tc.again {
				t.Errorf("reset %s, the state is %s: then the machine joined %d times, not %d: %v", tc.name, what, w.Joins-joins, tc.again, err)
			}
		}
	}
}

// TestStateDecidesNoConvert checks that a convert is rejected only while first boot is running and
// not yet done, whatever state.json contains.
func TestStateDecidesNoConvert(t *testing.T) {
	t.Parallel()
	node := readyNode(t)
	ofNode := node.Get(ondisk.StateFile)
	node.Now = node.Now.Add(time.Minute)
	for what, state := range states(ofNode) {
		for _, unit := range []string{"active", "inactive"} {
			w := node.Clone(t)
			w.Units[ondisk.UnitFirstboot], w.Started[ondisk.UnitFirstboot] = unit, w.Now // after the last write of state.json
			if err := state(w); err != nil {
				t.Fatal(err)
			}
			_, err := w.convert(pool)
			switch {
			case unit == "active" && (err == nil || !strings.Contains(err.Error(), "first boot has not finished on this machine")):
				t.Errorf("the state is %s, and first boot runs: %v", what, err)
			case unit == "inactive" && err != nil:
				t.Errorf("the state is %s, and first boot does not run: %v", what, err)
			}
		}
	}
	// First boot is done, and is sending its last report.
	node.Units[ondisk.UnitFirstboot] = "active"
	node.Started[ondisk.UnitFirstboot] = node.Now.Add(-time.Hour)
	if _, err := node.convert(pool); err != nil {
		t.Error(err)
	}
}
