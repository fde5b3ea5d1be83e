package join_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestNodeOfAWorkerIsDeleted checks that first boot makes kubelet register again, but only if an
// API server reports that the Node is missing, and not in another cluster with the same keys.
func TestNodeOfAWorkerIsDeleted(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change    func(w *worldtest.World)
		restarts  int
		registers bool
	}{
		"deleted":                 {func(w *worldtest.World) {}, 1, true},
		"deleted, and offline":    {func(w *worldtest.World) { w.Offline = true }, 0, false},
		"refused since":           {func(w *worldtest.World) { w.Cluster.NodeCreationDenied = true }, 1, false},
		"in another cluster":      {func(w *worldtest.World) { w.Cluster.Recreations++ }, 0, false},
		"before there was a note": {func(w *worldtest.World) { os.Remove(w.HostPath(member.JoinedCluster)) }, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.MustBoot()
			delete(w.Cluster.Nodes, "edge-sn0042")
			w.Later(time.Hour)
			tt.change(w)
			err := w.Boot()
			if n, has := w.EffectCount("restart "+ondisk.UnitKubelet), w.Cluster.Nodes["edge-sn0042"] != nil; n != tt.restarts || has != tt.registers || (err == nil) != tt.registers {
				t.Errorf("kubelet was restarted %d times, Node: %v, %v\n%s", n, has, err, strings.Join(w.Console, "\n"))
			}
			if slices.Contains(w.EffectNames, "start "+ondisk.UnitKubelet) {
				t.Error("kubelet was stopped")
			}
		})
	}
}
