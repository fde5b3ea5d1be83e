package controlplane_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// peersRow is a state of the other control-plane nodes after a power cut. blank and data are the
// decisions without and with etcd's data on this disk.
type peersRow struct {
	name        string
	set         func(m *controlPlane)
	blank, data string
}

// TestPowerCutThenTheTable checks that after any power cut in a bootstrap or a replacement, the
// decision follows the table: etcd never starts blank if the others have had a cluster.
func TestPowerCutThenTheTable(t *testing.T) {
	t.Parallel()
	const late = 200 * time.Hour // the bootstrap permit has expired
	ownMember := func(o map[string]any) bool {
		return strings.Contains(fmt.Sprint(o["peerURLs"]), "https://192.0.2.11:2380")
	}
	t.Run("bootstrap", func(t *testing.T) {
		t.Parallel()
		m := newControlPlane(t, mintedSites(t, 3))
		m.all(etcdmember.Blank)
		m.cutThenRows(t, []peersRow{
			{"all are blank still", func(*controlPlane) {}, "bootstrap", "start"},
			{"all are blank, late", func(m *controlPlane) { m.Now = m.Now.Add(late) }, "stop", "start"},
			{"a quorum lives, with this member", func(m *controlPlane) { m.quorum() }, "join", "start"},
			{"a quorum lives, without it", func(m *controlPlane) { f := m.quorum(); f.members = f.members[1:] }, "join", "stop"},
			{"they have lived, and have no quorum", func(m *controlPlane) { m.all(etcdmember.InUse) }, "stop", "start"},
			{"one has lived, one is blank", func(m *controlPlane) { m.others["192.0.2.13"].state = etcdmember.InUse }, "stop", "start"},
			{"they are silent", func(m *controlPlane) { m.all(etcdmember.Silent) }, "wait", "start"},
			{"one is silent", func(m *controlPlane) { m.others["192.0.2.13"].state = etcdmember.Silent }, "wait", "start"},
		})
	})
	t.Run("replacement", func(t *testing.T) {
		t.Parallel()
		m := newControlPlane(t, mintedSites(t, 3))
		m.Now = m.Now.Add(late)
		m.Cluster.NoClusterInfo = false
		m.quorum()
		m.cutThenRows(t, []peersRow{
			{"as they were", func(*controlPlane) {}, "join", "start"},
			{"its new member was removed meanwhile", func(m *controlPlane) {
				f := m.others["192.0.2.12"]
				var kept []map[string]any
				for _, o := range f.members {
					if !ownMember(o) {
						kept = append(kept, o)
					}
				}
				f.members = kept
			}, "join", "stop"},
			{"the quorum is lost", func(m *controlPlane) { m.all(etcdmember.InUse) }, "stop", "start"},
			{"they are silent", func(m *controlPlane) { m.all(etcdmember.Silent) }, "wait", "start"},
			{"all were written anew", func(m *controlPlane) { m.all(etcdmember.Blank) }, "stop", "start"},
		})
	})
}

var decisionLine = regexp.MustCompile(`decision=(\S+)`)

// cutThenRows cuts the power of copies of m before effects of their first boot, loses unsynced
// files, and tests each result with the rows. Only nightly runs try all effects and rows.
func (m *controlPlane) cutThenRows(t *testing.T, rows []peersRow) {
	t.Helper()
	files := m.Files()
	whole := m.CloneWith(t, files)
	whole.bootDone()
	disks, views := map[bool]int{}, 0
	nightly := os.Getenv("EDGEBAKE_NIGHTLY") != ""
	every := worldtest.EveryCut()
	if every == 1 && !nightly {
		every = 3
	}
	for n := every; n <= whole.Effects; n += every {
		cut := m.CloneWith(t, files)
		cut.PowerCutAt = n
		_ = cut.Boot() // decides checks the result
		cut.LoseUnsynced()
		at, left := cut.EffectNames[len(cut.EffectNames)-1], cut.Files()
		data := cut.Has("/var/lib/etcd/member/wal/0.wal")
		disks[data]++
		for r, row := range rows {
			if r != n%len(rows) && !nightly && !strings.Contains(at, "etcd") {
				continue
			}
			views++
			c := cut.CloneWith(t, left)
			c.on()
			c.Log.Reset()
			row.set(c)
			want := row.blank
			if data {
				want = row.data
			}
			if got := c.decides(); got != want {
				t.Errorf("cut at %d (%s), then %s, data %v: %s, want %s\n%s", n, at, row.name, data, got, want, strings.Join(c.Console, "\n"))
			}
		}
	}
	if least := 30 / every; disks[true] < least || disks[false] < least {
		t.Errorf("etcd's data was on %d of the disks, and not on %d", disks[true], disks[false])
	}
	t.Logf("%d cuts, %d views", disks[true]+disks[false], views)
}

// decides boots until first boot lets etcd start, or waits. It checks that etcd would start
// according to the decision, and returns the decision.
func (m *controlPlane) decides() string {
	m.T.Helper()
	m.Patience = 90 * time.Second // a former member is watched for a minute
	m.BeforeEffect = func(string) {
		if controlplane.Decided(m.Env()) {
			m.PowerCutAt = 1
		}
	}
	_ = m.Boot() // decides cuts the power itself
	m.BeforeEffect = nil
	all := decisionLine.FindAllStringSubmatch(m.Log.String(), -1)
	if len(all) == 0 {
		return "nothing"
	}
	d := all[len(all)-1][1]
	ends, starts := map[string]string{"bootstrap": " new\n", "join": " existing\n", "start": "has data\n"}[d]
	if controlplane.Decided(m.Env()) != starts {
		return d + ", but etcd may start: " + fmt.Sprint(!starts)
	}
	if starts && !strings.HasSuffix(m.Get(controlplane.EtcdRun), ends) {
		return d + ", but etcd is started with " + m.Get(controlplane.EtcdRun)
	}
	return d
}
