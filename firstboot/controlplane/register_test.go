package controlplane_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// TestNodeOfAControlPlaneNodeIsDeleted checks that first boot restarts kubelet, because kubelet
// registers a Node only when it starts, and labels the new Node. A snapshot is made even without a
// Node.
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
			m.Later(26 * time.Hour)
			err := m.Boot()
			if len(m.snapshots()) <= before {
				t.Errorf("no snapshot was taken: %q", m.snapshots())
			}
			if refused {
				if n := m.EffectCount("restart " + ondisk.UnitKubelet); err == nil || n != 1 || !m.ConsoleHas("kubelet has not registered the Node m1") {
					t.Errorf("kubelet was restarted %d times, %v\n%s", n, err, strings.Join(m.Console, "\n"))
				}
				return
			}
			n := m.Cluster.Nodes["m1"]
			if err != nil || n == nil || m.EffectCount("restart "+ondisk.UnitKubelet) != 1 {
				t.Fatalf("Node %v, kubelet was restarted %d times, %v\n%s", n, m.EffectCount("restart "+ondisk.UnitKubelet), err, strings.Join(m.Console, "\n"))
			}
			if _, marked := n.Metadata.Labels[controlplane.Label]; !marked {
				t.Errorf("the Node has labels %v", n.Metadata.Labels)
			}
		})
	}
}

// snapshots lists the snapshots of etcd on the disk.
func (m *controlPlane) snapshots() (names []string) {
	entries, _ := os.ReadDir(filepath.Join(m.Root, member.SnapshotDir)) // none if it is missing
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
