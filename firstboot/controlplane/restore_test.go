package controlplane_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// TestRestoreASnapshot checks a restore after everything except a snapshot was lost. The machine
// named in the request restores it once, from its disk or from a stick, with old data or a blank
// disk. It does not restore another snapshot.
func TestRestoreASnapshot(t *testing.T) {
	t.Parallel()
	const text = "all objects of last week"
	digest := sha256.Sum256([]byte(text))
	sum := hex.EncodeToString(digest[:])
	for name, tt := range map[string]struct{ stick, old, rejected, wrong bool }{
		"from its own disk":             {},
		"from its own disk, old data":   {old: true},
		"after a start that failed":     {rejected: true},
		"from a stick":                  {stick: true},
		"from a stick, old data":        {stick: true, old: true},
		"there is another on the stick": {stick: true, wrong: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Now = m.Now.Add(200 * time.Hour) // after the end of the permit
			m.Cluster.NoClusterInfo = false
			m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: sum})
			if tt.old {
				m.lived(m.site.ControlPlane.ID)
			}
			if tt.rejected {
				m.rejected()
			}
			if tt.stick {
				m.Plug("")
				m.SlotFiles = map[string]string{worldtest.StickDevice + "/" + controlplane.SnapshotOnStick: text}
				if tt.wrong {
					m.SlotFiles[worldtest.StickDevice+"/"+controlplane.SnapshotOnStick] = "another"
				}
			} else {
				m.Put(member.SnapshotDir+"/20261111-000000.db", text)
				m.Put(member.SnapshotDir+"/20261112-000000.db", "a newer one")
			}
			if tt.wrong {
				if err := m.Boot(); err == nil || len(m.starts) > 0 || m.Has(controlplane.EtcdManifest) || !m.ConsoleHas("there is no snapshot with the SHA-256 "+sum) {
					t.Errorf("%v, started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
				}
				return
			}
			for range 2 {
				m.bootDone()
				if m.Get("/var/lib/etcd/member/snap/db") != text || m.Has(controlplane.RestoreDir) || tt.old != (len(m.aside("/wal")) == 1) || m.started != "has data\n" {
					t.Fatalf("etcd runs as %q\n%s", m.started, strings.Join(m.Console, "\n"))
				}
				m.on()
			}
		})
	}
}

// TestRestoreIsDoneOnce checks that a request to restore is carried out once, even if the machine
// is flashed again or gets an old stick, so that newer data stays. A new request is carried out.
func TestRestoreIsDoneOnce(t *testing.T) {
	t.Parallel()
	const text, other, db = "all objects of last week", "all objects of yesterday", "/var/lib/etcd/member/snap/db"
	restore := func(text string, said time.Time) mint.Requests {
		digest := sha256.Sum256([]byte(text))
		return mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:]), RequestedAt: said}
	}
	sites := mintedSites(t, 3)
	for name, uefi := range map[string]bool{"UEFI": true, "no UEFI": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			machine := func(firmware string) *controlPlane {
				m := newControlPlane(t, sites)
				m.Now = m.Now.Add(200 * time.Hour)
				m.Cluster.NoClusterInfo = false
				if uefi {
					m.Put(filepath.Dir(controlplane.BootstrappedVar)+"/BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c", "")
				}
				if firmware != "" {
					m.Put(controlplane.RestoredVar, firmware)
				}
				m.Put(member.SnapshotDir+"/20261111-000000.db", text)
				m.Put(member.SnapshotDir+"/20261112-000000.db", other)
				return m
			}
			m := machine("")
			first := restore(text, m.Now)
			// boot boots the machine with these requests, and checks that
			// it then has the data in want.
			boot := func(what string, w mint.Requests, want string, noted bool) {
				t.Helper()
				m.withRequests(w)
				m.on()
				m.bootDone()
				if got := m.Get(db); got != want || m.ConsoleHas("it does not restore the snapshot") != noted {
					t.Fatalf("%s: etcd has %q, want %q\n%s", what, got, want, strings.Join(m.Console, "\n"))
				}
			}
			boot("said", first, text, false)
			firmware := string(m.Env().Contents(controlplane.RestoredVar))
			if (len(firmware) > 4) != uefi {
				t.Fatalf("the firmware has %q", firmware)
			}
			m.Put(db, "with a new object")
			boot("the same again", first, "with a new object", false)
			boot("taken out", mint.Requests{}, "with a new object", false)
			m.Now = m.Now.Add(40 * 24 * time.Hour)
			boot("there again, as on a stick that was left", first, "with a new object", true)
			second := restore(other, m.Now)
			boot("another one", second, other, false)
			boot("the first one, after that", first, other, true)
			m.Now = m.Now.Add(time.Hour)
			boot("the first one, said again", restore(text, m.Now), text, false)

			again := machine(firmware)
			again.withRequests(first)
			if err := again.Boot(); uefi && (err == nil || len(again.starts) > 0 || again.Has(controlplane.EtcdManifest) || !again.ConsoleHas("its data is gone")) {
				t.Fatalf("%v, etcd was started as %q\n%s", err, again.starts, strings.Join(again.Console, "\n"))
			}
			again.withRequests(restore(text, again.Now.Add(time.Hour)))
			again.on()
			again.bootDone()
			if again.Get(db) != text || uefi && string(again.Env().Contents(controlplane.RestoredVar)) == firmware {
				t.Errorf("after the request was made again, etcd has %q", again.Get(db))
			}
		})
	}
}

// TestLostDataIsNotRestoredAgain checks that the same request does not restore the snapshot again
// if the restored data is lost, because newer data may be on another disk.
func TestLostDataIsNotRestoredAgain(t *testing.T) {
	t.Parallel()
	const text = "all objects of last week"
	m := newControlPlane(t, mintedSites(t, 1))
	m.Now = m.Now.Add(200 * time.Hour)
	m.Cluster.NoClusterInfo = false
	m.Put(member.SnapshotDir+"/20261111-000000.db", text)
	digest := sha256.Sum256([]byte(text))
	m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:]), RequestedAt: m.Now})
	m.on()
	m.bootDone()
	if err := os.RemoveAll(m.HostPath(controlplane.EtcdMember)); err != nil {
		t.Fatal(err)
	}
	m.starts, m.Console = nil, nil
	m.on()
	if err := m.Boot(); err == nil || len(m.starts) > 0 || !m.ConsoleHas("its data is gone") {
		t.Errorf("%v, etcd was started as %q\n%s", err, m.starts, strings.Join(m.Console, "\n"))
	}
}

// TestRestoreWithoutASnapshot checks that the present data is not set aside if the requested
// snapshot is missing: the machine would have nothing left.
func TestRestoreWithoutASnapshot(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	m.Put(controlplane.AsideDir+"/wal/0.wal", "of a former loss")
	m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: strings.Repeat("ab", 32)})
	if err := m.Boot(); err == nil || !m.ConsoleHas("there is no snapshot with the SHA-256 abab") || !m.Has("/var/lib/etcd/member/wal/0.wal") || m.Get(controlplane.AsideDir+"/wal/0.wal") != "of a former loss" {
		t.Errorf("%v, data in place: %v\n%s", err, m.Has("/var/lib/etcd/member/wal/0.wal"), strings.Join(m.Console, "\n"))
	}
}

// TestSetAsideIsKept checks that data that was set aside stays, also after the next request, until
// etcd has been healthy for a week. The same applies to data that an older program set aside.
func TestSetAsideIsKept(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(controlplane.AsideDir+"/wal/0.wal", "of a former program")
	for i, text := range []string{"first", "second"} {
		digest := sha256.Sum256([]byte(text))
		m.Put(member.SnapshotDir+"/2026111"+fmt.Sprint(i)+"-000000.db", text)
		if i > 0 {
			m.Now = m.Now.Add(time.Hour)
		}
		m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:])})
		m.on()
		m.bootDone()
	}
	if got := m.aside("/wal"); len(got) != 3 {
		t.Fatalf("set aside: %q", got)
	}
	days := func(n int) {
		t.Helper()
		for range n {
			m.Now = m.Now.Add(24 * time.Hour)
			m.bootDone()
			m.Now = m.Now.Add(2 * time.Hour)
			m.bootDone()
		}
	}
	days(4)
	m.own.alarms = []map[string]string{{"memberID": "1", "alarm": etcdmember.Corrupt}}
	days(1)
	m.own.alarms = nil
	days(6)
	if got := m.aside("/wal"); len(got) != 3 {
		t.Fatalf("after six days of health, set aside: %q", got)
	}
	days(3)
	if got := m.aside(""); len(got) != 0 {
		t.Errorf("after a week of health, set aside: %q", got)
	}
}

// TestRestoreKeepsALog checks that SetAsideLogless does not move data with a write-ahead log.
func TestRestoreKeepsALog(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.rejected()
	m.Put("/var/lib/etcd/member/wal/0.wal", "")
	if err := controlplane.SetAsideLogless(m.Env()); err == nil || !m.Has("/var/lib/etcd/member/snap/db") || !m.Has("/var/lib/etcd/member/wal/0.wal") {
		t.Errorf("%v, but the data is gone", err)
	}
}

func TestPowerCutOfRestore(t *testing.T) {
	t.Parallel()
	const text = "all objects of last week"
	digest := sha256.Sum256([]byte(text))
	sites := mintedSites(t, 3)
	for old, tt := range map[string]struct {
		disk  func(*controlPlane)
		first string // of the effects
		kept  bool
	}{
		"old data":         {func(m *controlPlane) { m.lived(m.site.ControlPlane.ID) }, "rename " + configs.EtcdDataDir + "/member", true},
		"a rejected start": {(*controlPlane).rejected, "mkdir " + controlplane.RestoreDir, false},
	} {
		begin := func(t *testing.T) *controlPlane {
			m := newControlPlane(t, sites)
			m.Now = m.Now.Add(200 * time.Hour)
			m.Cluster.NoClusterInfo = false
			m.Put(filepath.Dir(controlplane.BootstrappedVar)+"/BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c", "")
			m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:])})
			tt.disk(m)
			m.Plug("")
			m.SlotFiles = map[string]string{worldtest.StickDevice + "/" + controlplane.SnapshotOnStick: text}
			return m
		}
		whole := begin(t)
		whole.bootDone()
		from := slices.Index(whole.EffectNames, tt.first)
		to := slices.Index(whole.EffectNames, "rename "+controlplane.RestoreDir+"/data/member") + 4
		if from < 0 || to-from < 8 {
			t.Fatalf("effects: %q", whole.EffectNames)
		}
		for n := from; n <= to; n += worldtest.EveryCut() {
			t.Run(fmt.Sprint(old, ", at ", whole.EffectNames[n]), func(t *testing.T) {
				t.Parallel()
				m := begin(t)
				m.PowerCutAt = n + 1
				if err := m.Boot(); err == nil {
					t.Fatal("the machine continued after the power cut")
				}
				m.LoseUnsynced()
				m.on()
				m.bootDone()
				if m.Get("/var/lib/etcd/member/snap/db") != text || len(m.starts) > 0 || m.started != "has data\n" || (len(m.aside("/wal")) == 1) != tt.kept {
					t.Errorf("etcd runs as %q, started as %q, set aside %q", m.started, m.starts, m.aside(""))
				}
			})
		}
	}
}
