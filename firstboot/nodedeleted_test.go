package firstboot

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// kubeletRestarts counts how often first boot has restarted kubelet.
func (w *world) kubeletRestarts() (n int) {
	for _, effect := range w.EffectNames {
		if effect == "restart "+ondisk.UnitKubelet {
			n++
		}
	}
	return n
}

// later runs first boot again after d, while the machine stays on.
func (w *world) later(d time.Duration) {
	w.T.Helper()
	if err := os.RemoveAll(filepath.Join(w.Root, ondisk.RunDir)); err != nil {
		w.T.Fatal(err)
	}
	w.Now = w.Now.Add(d)
	w.KubeletLastActive = w.Now
	w.EffectNames, w.Console = nil, nil
}

// TestNodeOfAControlPlaneNodeIsDeleted checks that first boot restarts kubelet, which registers
// only after its start, and marks the new Node. A snapshot is made even without a Node.
func TestNodeOfAControlPlaneNodeIsDeleted(t *testing.T) {
	t.Parallel()
	for name, refused := range map[string]bool{"registers": false, "refused": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 1))
			m.bootDone()
			before := len(m.snapshots())
			delete(m.Cluster.Nodes, "m1")
			m.Cluster.NodeCreationDenied = refused
			m.later(26 * time.Hour)
			err := m.boot()
			if len(m.snapshots()) <= before {
				t.Errorf("no snapshot was taken: %q", m.snapshots())
			}
			if refused {
				if n := m.kubeletRestarts(); err == nil || n != 1 || !m.ConsoleHas("kubelet has not registered the Node m1") {
					t.Errorf("kubelet was restarted %d times, %v\n%s", n, err, strings.Join(m.Console, "\n"))
				}
				return
			}
			n := m.Cluster.Nodes["m1"]
			if err != nil || n == nil || m.kubeletRestarts() != 1 {
				t.Fatalf("Node %v, kubelet was restarted %d times, %v\n%s", n, m.kubeletRestarts(), err, strings.Join(m.Console, "\n"))
			}
			if _, marked := n.Metadata.Labels[controlplane.Label]; !marked {
				t.Errorf("the Node has labels %v", n.Metadata.Labels)
			}
		})
	}
}

// snapshots lists the snapshots of etcd on the disk.
func (w *world) snapshots() (names []string) {
	entries, _ := os.ReadDir(filepath.Join(w.Root, member.SnapshotDir)) // none if it is missing
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestNodeOfAWorkerIsDeleted checks that first boot makes kubelet register again, but only if an
// API server reports that the Node is missing, and not in another cluster with the same keys.
func TestNodeOfAWorkerIsDeleted(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change    func(w *world)
		restarts  int
		registers bool
	}{
		"deleted":                 {func(w *world) {}, 1, true},
		"deleted, and offline":    {func(w *world) { w.Offline = true }, 0, false},
		"refused since":           {func(w *world) { w.Cluster.NodeCreationDenied = true }, 1, false},
		"in another cluster":      {func(w *world) { w.Cluster.Recreations++ }, 0, false},
		"before there was a note": {func(w *world) { os.Remove(w.HostPath(member.JoinedCluster)) }, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.mustBoot()
			delete(w.Cluster.Nodes, "edge-sn0042")
			w.later(time.Hour)
			tt.change(w)
			err := w.boot()
			if n, has := w.kubeletRestarts(), w.Cluster.Nodes["edge-sn0042"] != nil; n != tt.restarts || has != tt.registers || (err == nil) != tt.registers {
				t.Errorf("kubelet was restarted %d times, Node: %v, %v\n%s", n, has, err, strings.Join(w.Console, "\n"))
			}
			if slices.Contains(w.EffectNames, "start "+ondisk.UnitKubelet) {
				t.Error("kubelet was stopped")
			}
		})
	}
}
