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
			if err := w.boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			w.LoseUnsynced()
			w.PowerOn()
			if err := w.boot(); err != nil || w.Joins != 1 {
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
			whole := machine.clone(t)
			whole.mustBoot()
			for _, at := range []string{"write " + ondisk.IPVSConfig, "kubeadm ends", "write " + member.ReadyMark} {
				cut := machine.clone(t)
				cut.PowerCutAt = slices.Index(whole.EffectNames, at) + 1
				if err := cut.boot(); err == nil || cut.PowerCutAt == 0 {
					t.Fatalf("cut at %s: the machine continued after the power cut", at)
				}
				cut.PowerOn()
				as := cut.clone(t)
				as.mustBoot()
				for what, state := range map[string]func(*world) error{
					"gone":     func(w *world) error { return os.Remove(filepath.Join(w.Root, ondisk.StateFile)) },
					"empty":    func(w *world) error { w.Put(ondisk.StateFile, ""); return nil },
					"a node's": func(w *world) error { w.Put(ondisk.StateFile, whole.Get(ondisk.StateFile)); return nil },
					"this boot": func(w *world) error {
						w.Put(ondisk.StateFile, strings.Replace(whole.Get(ondisk.StateFile), "boot-0", "boot-1", 1))
						return nil
					},
				} {
					w := cut.clone(t)
					if err := state(w); err != nil {
						t.Fatal(err)
					}
					w.mustBoot()
					if !slices.Equal(w.EffectNames, as.EffectNames) {
						t.Errorf("cut at %s, the state is %s: it did\n%q, not\n%q", at, what, w.EffectNames, as.EffectNames)
					}
					sameTree(t, "cut at "+at+", the state is "+what, w.tree(), as.tree())
				}
			}
		})
	}
}

// states returns possible state files. They do not depend on the machine.
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

// TestStateDecidesNoReset checks that a reset removes the token if its join is complete, whatever
// state.json contains.
func TestStateDecidesNoReset(t *testing.T) {
	t.Parallel()
	machine := edgeWorld(t)
	machine.UseSingleMaster()
	node := machine.clone(t)
	node.mustBoot()
	joining := machine.clone(t)
	joining.Cluster.HubServerCSR = "pending"
	if err := joining.boot(); err == nil {
		t.Fatal("first boot succeeded although no CSR was approved")
	}
	joining.Cluster.HubServerCSR = "Approved"
	searching := machine.clone(t) // no join has begun, but the Site is in place
	searching.Offline = true
	if err := searching.boot(); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	searching.Offline = false
	stamped := node.clone(t)
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
			w := tc.machine.clone(t)
			if err := state(w); err != nil {
				t.Fatal(err)
			}
			if _, err := w.reset(); err != nil {
				t.Fatal(err)
			}
			if tc.again == 0 {
				noSecret(t, w)
			}
			delete(w.Cluster.Nodes, "edge-sn0042") // kubectl delete node
			joins := w.Joins
			w.PowerOn()
			if err := w.boot(); (err == nil) != (tc.again == 1) || w.Joins != joins+tc.again {
				t.Errorf("reset %s, the state is %s: then it joined %d times, not %d: %v", tc.name, what, w.Joins-joins, tc.again, err)
			}
		}
	}
}

// TestStateDecidesNoConvert checks that a convert is rejected only while first boot is running.
func TestStateDecidesNoConvert(t *testing.T) {
	t.Parallel()
	node := readyNode(t)
	ofNode := node.Get(ondisk.StateFile)
	node.Now = node.Now.Add(time.Minute)
	for what, state := range states(ofNode) {
		for _, unit := range []string{"active", "inactive"} {
			w := node.clone(t)
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

// TestEnrolledReadsWhatItFinds checks that an empty, truncated or zeroed certificate does not count
// as an enrolment.
func TestEnrolledReadsWhatItFinds(t *testing.T) {
	t.Parallel()
	ready := readyNode(t)
	for _, file := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, member.KubeadmFlags, ondisk.KubeCA, member.ClientCert} {
		for spoilt, spoil := range map[string]func([]byte) []byte{
			"empty":   func([]byte) []byte { return nil },
			"cut off": func(b []byte) []byte { return b[:len(b)/2] },
			"zeros":   func(b []byte) []byte { return make([]byte, len(b)) },
		} {
			w := ready.clone(t)
			p := filepath.Join(w.Root, file)
			if file == member.ClientCert {
				p = filepath.Join(w.Root, "/var/lib/kubelet/pki/kubelet-client-2026-11-20-10-00-00.pem")
			}
			b, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, spoil(b), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := member.Enrolled(w.Env()); !errors.Is(err, member.ErrNotEnrolled) {
				t.Errorf("%s is %s: enrolled says %v", file, spoilt, err)
			}
			if file != member.ClientCert {
				continue
			}
			// Without a token the machine cannot continue, which is reported.
			w.PowerOn()
			if err := w.boot(); err == nil || !w.ConsoleHas("FAILED discovery") {
				t.Errorf("%s is %s:\n%s", file, spoilt, strings.Join(w.Console, "\n"))
			}
		}
	}
	if err := member.Enrolled(ready.Env()); err != nil {
		t.Error(err)
	}
}

// TestRestoreCertificates damages the current certificate of each store, after two rotations, in
// every way in which a power cut may damage it.
func TestRestoreCertificates(t *testing.T) {
	t.Parallel()
	base := newWorld(t, "testdata/machine.txtar")
	pair := func(days int) string {
		return base.Cluster.ClientFrom("system:node:edge-sn0042", base.Now.AddDate(0, 0, days), base.Now.AddDate(1, 0, days))
	}
	first, second, third := pair(0), pair(100), pair(200)
	otherKey := third[:strings.Index(third, "-----BEGIN PRIVATE")] + second[strings.Index(second, "-----BEGIN PRIVATE"):]
	for _, s := range member.CertStores() {
		// The clock may be wrong: the second certificate has the greatest name.
		dated := func(date string) string { return s.Dir + "/" + s.Name + "-" + date + ".pem" }
		one, two, three := dated("2026-11-20-10-00-00"), dated("2031-01-01-00-00-00"), dated("2027-06-08-10-00-00")
		for name, tc := range map[string]struct {
			third  string
			target string // of the link; "": no link
			want   string // the link's target afterwards
		}{
			"sound":                 {third, three, three},
			"sound, not the newest": {third, one, one},
			"empty":                 {"", three, two},
			"cut off":               {third[:len(third)/2], three, two},
			"zeros":                 {strings.Repeat("\x00", len(third)), three, two},
			"another's key":         {otherKey, three, two},
			"dangling":              {third, dated("2027-07-07-00-00-00"), three},
			"no link":               {third, "", three},
			"relative":              {"", filepath.Base(three), two},
		} {
			w := newWorld(t, "testdata/machine.txtar")
			w.Put(one, first)
			w.Put(two, second)
			w.Put(three, tc.third)
			w.Put(s.Dir+"/"+s.Name+"-other-2035-01-01-00-00-00.pem", third) // of another store
			if tc.target != "" {
				if err := os.Symlink(tc.target, filepath.Join(w.Root, s.Current())); err != nil {
					t.Fatal(err)
				}
			}
			if err := member.RestoreCertificates(w.Env()); err != nil {
				t.Error(err)
			}
			if got, err := os.Readlink(filepath.Join(w.Root, s.Current())); err != nil || got != tc.want {
				t.Errorf("%s, %s: the link leads to %s, not %s (%v)", s.Name, name, got, tc.want, err)
			}
		}
		// If no certificate is usable, and the program requests a new one,
		// the broken one must be removed.
		w := newWorld(t, "testdata/machine.txtar")
		w.Put(one, "")
		if err := os.Symlink(one, filepath.Join(w.Root, s.Current())); err != nil {
			t.Fatal(err)
		}
		if err := member.RestoreCertificates(w.Env()); err != nil {
			t.Error(err)
		}
		if w.Has(s.Current()) == s.Replaceable {
			t.Errorf("%s has no usable certificate; its link exists: %v", s.Name, w.Has(s.Current()))
		}
	}
}

// TestRestoreKubeletsOwnPair checks that a pair with a damaged file is removed, because kubelet
// only checks that the files exist.
func TestRestoreKubeletsOwnPair(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	pair := w.Cluster.Client("edge-sn0042@1", w.Now.AddDate(1, 0, 0))
	cert, key := member.KubeletPKI+"/kubelet.crt", member.KubeletPKI+"/kubelet.key"
	for _, tc := range []struct {
		cert, key string
		stays     bool
	}{{pair, pair, true}, {"", pair, false}, {pair, "", false}} {
		w.Put(cert, tc.cert)
		w.Put(key, tc.key)
		if err := member.RestoreCertificates(w.Env()); err != nil {
			t.Error(err)
		}
		if w.Has(cert) != tc.stays || w.Has(key) != tc.stays {
			t.Errorf("certificate of %d bytes, key of %d: left are %v and %v", len(tc.cert), len(tc.key), w.Has(cert), w.Has(key))
		}
	}
}

// TestRotationCutOff checks that the node recovers without a token if, months after the join, the
// power is cut right after a certificate was rotated.
func TestRotationCutOff(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	rotated := member.KubeletPKI + "/kubelet-client-2027-08-01-00-00-00.pem"
	w.Now = w.Now.Add(200 * 24 * time.Hour)
	w.PutUnsynced(rotated, w.Cluster.Client("system:node:edge-sn0042", w.Now.AddDate(1, 0, 0)))
	link := filepath.Join(w.Root, member.ClientCert)
	if err := errors.Join(os.Remove(link), os.Symlink(rotated, link)); err != nil {
		t.Fatal(err)
	}
	w.LoseUnsynced()
	w.PowerOn()
	if err := w.boot(); err != nil || w.Joins != 1 {
		t.Errorf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
	}
}
