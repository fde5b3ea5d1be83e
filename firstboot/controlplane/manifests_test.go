package controlplane_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
)

// TestManifests checks that manifests are applied once per cluster, in order, and retried while the
// API server rejects one of the objects.
func TestManifests(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.ApplyFails = true
	m.Patience = 15 * time.Minute // by the machine's clock
	if err := m.Boot(); err == nil || !m.ConsoleHas("1 of 3 objects of the Cluster's manifests to be applied: applying apps/shop.yaml, document 1, item 2 (ConfigMap late): ") || !m.ConsoleHas("failed calling webhook") || !m.ConsoleHas("kubectl -n kube-system label configmap edgebake-manifests edgebake.io/applying-") {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	m.keysOnlyInPlace() // a machine that waits for a worker has no keys in the slot
	if m.Cluster.AllApplied {
		t.Error("the record says that all manifests are applied")
	}
	m.Cluster.ApplyFails = false
	m.on()
	m.bootDone()
	m.wantApplied("once the webhook answers")

	// Somebody has changed one of the objects since.
	m.Cluster.Applied = nil
	again := newControlPlane(t, mintedSites(t, 1))
	m.stampSite(m.site)
	m.on()
	m.bootDone()
	if len(m.Cluster.Applied) > 0 || m.Has(controlplane.ClusterManifests) {
		t.Errorf("applied again: %q", m.Cluster.Applied)
	}

	// Everything succeeds at once.
	again.bootDone()
	again.wantApplied("at once")
	if !slices.Equal(again.Cluster.Applied, appliedPaths) {
		t.Errorf("applied in the order %q", again.Cluster.Applied)
	}
}

// TestManifestsOfAnOlderCluster checks a machine that joins a cluster without a record of applied
// manifests. It creates missing objects, and never changes an existing one.
func TestManifestsOfAnOlderCluster(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.quorum()
	m.Cluster.CreatedPaths = []string{appliedPaths[0], appliedPaths[1]} // a person has changed them since
	m.Cluster.MarkerPatchFails = true                                   // temporarily
	m.Patience = 15 * time.Minute
	if err := m.Boot(); err == nil {
		t.Fatal("first boot succeeded without a record of the applied objects")
	}
	m.Cluster.MarkerPatchFails = false
	m.on()
	m.bootDone()
	if want := appliedPaths; len(m.Cluster.Applied) > 0 || !slices.Equal(m.Cluster.CreatedPaths, want) || !m.Cluster.AllApplied || m.Has(controlplane.ClusterManifests) {
		t.Errorf("applied %q, there are %q", m.Cluster.Applied, m.Cluster.CreatedPaths)
	}
}

// TestManifestsAreAppliedOnce checks that other objects are not applied again while one waits for a
// webhook. Changes to them stay, on the machine that waits and on others.
func TestManifestsAreAppliedOnce(t *testing.T) {
	t.Parallel()
	once := map[string]int{appliedPaths[0]: 1, appliedPaths[2]: 1}
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.ApplyFails = true
	m.Patience = 30 * time.Minute // three rounds
	if err := m.Boot(); err == nil {
		t.Fatal("first boot succeeded although one object is not applied")
	}
	if got := m.Cluster.ApplyCounts(); !maps.Equal(got, once) {
		t.Errorf("in half an hour, applied %v", got)
	}
	m.on()
	m.Patience = 15 * time.Minute
	if err := m.Boot(); err == nil || !maps.Equal(m.Cluster.ApplyCounts(), once) {
		t.Errorf("after a restart, applied %v (%v)", m.Cluster.ApplyCounts(), err)
	}
	// Another control-plane node has all manifests, and has applied none.
	other := newControlPlane(t, mintedSites(t, 1))
	other.Cluster.ApplyFails, other.Cluster.ApplyMarker = true, maps.Clone(m.Cluster.ApplyMarker)
	other.Patience = 15 * time.Minute
	if err := other.Boot(); err == nil || len(other.Cluster.Applied) > 0 {
		t.Errorf("another node applied %v (%v)", other.Cluster.Applied, err)
	}
	// A person marks the manifests as applied.
	other.Cluster.AllApplied = true
	other.on()
	other.bootDone()
	if len(other.Cluster.Applied) > 0 || other.Has(controlplane.ClusterManifests) {
		t.Errorf("applied %v although a person had ended the retries", other.Cluster.Applied)
	}

	m.Cluster.ApplyFails = false
	m.on()
	m.bootDone()
	m.wantApplied("once the webhook answers")
	once[appliedPaths[1]] = 1
	if got := m.Cluster.ApplyCounts(); !maps.Equal(got, once) {
		t.Errorf("in the end, applied %v", got)
	}
}

// TestManifestsThatCannotBeNoted checks that an applied object that cannot be recorded is recorded
// later, and is not applied every few seconds.
func TestManifestsThatCannotBeNoted(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.Cluster.MarkerPatchFails = true
	m.Patience = 5 * time.Minute
	if err := m.Boot(); err == nil || !m.ConsoleHas("recording that apps/shop.yaml, document 1, item 1 (Namespace shop) is applied") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	if got := m.Cluster.ApplyCounts(); !maps.Equal(got, map[string]int{appliedPaths[0]: 1, appliedPaths[2]: 1}) {
		t.Errorf("applied %v", got)
	}
	m.Cluster.MarkerPatchFails = false
	m.on()
	m.bootDone()
	m.wantApplied("in the end")
}
