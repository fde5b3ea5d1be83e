package controlplane_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
)

// TestEtcdIsLookedAfter checks that the leader's machine defragments if the disk has space, and
// clears the alarm of a full database. Problems that only a person can fix are reported.
func TestEtcdIsLookedAfter(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	half := func() map[string]string {
		return map[string]string{"dbSize": "419430400", "dbSizeInUse": "104857600"}
	}
	for name, tt := range map[string]struct {
		status map[string]string
		alarm  string
		used   int64
		asked  []string
		note   string
	}{
		"nothing is wrong": {},
		"half is unused":   {status: half(), asked: []string{"defragment"}},
		"no room for it":   {status: half(), used: 7 << 29, note: "was not defragmented: it needs 100"},
		"another leads":    {status: map[string]string{"leader": "2", "dbSize": "419430400", "dbSizeInUse": "1048576"}},
		"it is full": {status: map[string]string{"dbSize": "2147483648", "dbSizeInUse": "104857600"}, alarm: etcdmember.NoSpace,
			asked: []string{"compaction", "defragment", "DEACTIVATE NOSPACE"}},
		"it is full of data": {status: map[string]string{"dbSize": "2147483648", "dbSizeInUse": "2147000000"}, alarm: etcdmember.NoSpace,
			asked: []string{"compaction", "defragment"}, note: "etcd's database on m1 uses 2047.5 MiB of its quota of 2048 MiB"},
		"it is damaged": {alarm: etcdmember.Corrupt, note: "etcd's data on m1 differs from that of the other members (alarm CORRUPT)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.own.status, m.VarUsed = tt.status, tt.used
			if tt.alarm != "" {
				m.own.alarms = []map[string]string{{"memberID": "1", "alarm": tt.alarm}}
			}
			m.bootDone()
			notes := strings.Join(m.State().Notes, "\n")
			if !slices.Equal(m.own.asked, tt.asked) || !strings.Contains(notes, tt.note) || tt.note == "" && strings.Contains(notes, "etcd's") {
				t.Errorf("etcd was asked for %q; notes: %s", m.own.asked, notes)
			}
		})
	}
}

// TestRoomOnOtherMachines checks that another machine's free disk space is read from its kubelet.
func TestRoomOnOtherMachines(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for summary, want := range map[string]string{
		`{"node":{"fs":{"availableBytes":4000000000,"capacityBytes":5000000000}}}`: "",
		`{"node":{"fs":{"availableBytes":500000000,"capacityBytes":5000000000}}}`:  "must stay",
		`{"node":{}}`: "does not report the free space on its disk",
		"":            "for the free space on its disk: ",
	} {
		m.Cluster.KubeletStats = summary
		err := controlplane.SpaceOn(t.Context(), m.Env(), m.site, "m2", 100<<20)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", summary, err, want)
		}
	}
}
