package controlplane_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/member"
)

// TestSnapshots checks that one snapshot is made a day, and a limited number is kept.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	saved := func() []controlplane.SavedSnapshot {
		all, err := controlplane.Snapshots(m.Env())
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	if all := saved(); len(all) != 1 || !strings.HasPrefix(m.Get(member.SnapshotDir+"/"+all[0].Name), "all objects") {
		t.Fatalf("%v", all)
	}
	m.Put(member.SnapshotDir+"/.20260101-000000.db.edgebake-new", "half")
	for range 10 {
		m.Now = m.Now.Add(25 * time.Hour)
		m.bootDone()
		m.Now = m.Now.Add(time.Hour)
		m.bootDone() // the last snapshot is new enough
	}
	all := saved()
	newest, err := time.Parse("20060102-150405.db", all[0].Name)
	if err != nil || len(all) != controlplane.SnapshotsKept || m.Now.Sub(newest) > 2*time.Hour || m.Has(member.SnapshotDir+"/.20260101-000000.db.edgebake-new") {
		t.Errorf("%v on %s", all, m.Now)
	}
	m.own.short = true
	m.Now = m.Now.Add(25 * time.Hour)
	m.bootDone()
	if !slices.Equal(saved(), all) || !slices.ContainsFunc(m.State().Notes, func(n string) bool { return strings.Contains(n, "the daily snapshot of etcd failed") }) {
		t.Errorf("%v, notes %q", saved(), m.State().Notes)
	}
	path, err := controlplane.Snapshot(t.Context(), m.Env())
	if err == nil || m.Has(path) && path != "" {
		t.Errorf("an incomplete snapshot is at %q", path)
	}
}

// TestSnapshotsLeaveRoom checks that a snapshot never uses the space that etcd and the pods need.
// Old snapshots are removed first. If that is not enough, none is made.
func TestSnapshotsLeaveRoom(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	days := func(n int) []controlplane.SavedSnapshot {
		t.Helper()
		for range n {
			m.Now = m.Now.Add(25 * time.Hour)
			m.bootDone()
		}
		all, err := controlplane.Snapshots(m.Env())
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	if all := days(5); len(all) != 6 {
		t.Fatalf("%v", all)
	}
	const total = 4 << 30
	size := m.DirSize(member.SnapshotDir) / 6
	m.PutUnsynced("/var/lib/etcd/member/snap/db", strings.Repeat("x", int(size)))
	m.VarUsed = total - total/100*controlplane.SnapshotLeaves - 3*size // space for three
	if all := days(1); len(all) != 3 || m.DirSize(member.SnapshotDir) != 3*size {
		t.Errorf("%v", all)
	}
	// An incomplete file that a power cut left is removed first.
	half := member.SnapshotDir + "/.20260101-000000.db.edgebake-new"
	m.PutUnsynced(half, strings.Repeat("x", int(size)))
	if all := days(1); len(all) != 3 || m.Has(half) {
		t.Errorf("%v, an incomplete snapshot exists: %v", all, m.Has(half))
	}
	m.VarUsed += 3 * size // not even one would fit without all others, so none is removed
	before, again := days(1), days(1)
	if len(before) != 3 || !slices.Equal(before, again) || !slices.ContainsFunc(m.State().Notes, func(n string) bool { return strings.Contains(n, "checking the space for a snapshot") }) {
		t.Errorf("%v, notes %q", before, m.State().Notes)
	}
	m.VarUsed -= 2 * size // only one fits in addition to the newest
	if all := days(1); len(all) != 2 || all[1] != before[0] {
		t.Errorf("%v, before %v", all, before)
	}
	// Two snapshots at the same time are made one after the other.
	unlock, err := m.Env().Lock(t.Context(), controlplane.SnapshotLock)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := controlplane.Snapshot(ctx, m.Env()); err == nil || !strings.Contains(err.Error(), "waiting for another snapshot") {
		t.Error(err)
	}
}

// TestSnapshotsOfTheFuture checks that snapshots that were made while the clock was ahead neither
// displace correct ones nor prevent a new one.
func TestSnapshotsOfTheFuture(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for _, name := range []string{"20400101-000000.db", "20400102-000000.db"} {
		m.Put(member.SnapshotDir+"/"+name, "of a clock that was wrong")
	}
	for range 10 {
		m.Now = m.Now.Add(25 * time.Hour)
		m.bootDone()
		for range 3 { // first boot runs every two hours
			m.Now = m.Now.Add(2 * time.Hour)
			m.bootDone()
		}
	}
	all, err := controlplane.Snapshots(m.Env())
	if err != nil || len(all) != controlplane.SnapshotsKept {
		t.Fatalf("%v, %v", all, err)
	}
	oldest, err := time.Parse("20060102-150405.db", all[len(all)-1].Name)
	if err != nil || m.Now.Sub(oldest) < 6*24*time.Hour || oldest.After(m.Now) {
		t.Errorf("on %s: %v", m.Now.Format(time.DateTime), all)
	}
}
