package e2e

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/lab"
)

// TestClockAhead starts a cluster whose clocks are eight hours ahead, like those of PCs with local
// time in the hardware clock. When a time server corrects them, the control plane's certificates
// are not valid yet:
//
//   - The control plane must recover by itself.
//   - A worker whose clock is ahead must join.
//   - A control-plane node whose Node is deleted must register again, and continue to take
//     snapshots.
//
// The test is slow: the machines need this host's time, so they cannot run in lockstep, and a busy
// host slows down an emulated control plane. systemd-timesyncd retries a server that did not answer
// only every five minutes.
func TestClockAhead(t *testing.T) {
	nightly(t)
	const ahead = 8 * time.Hour
	w := newNet(t, need(t))
	golden, err := madeControlPlane()
	if err != nil {
		t.Fatal(err)
	}
	hosts := w.machines(0, "m1", "shop1")
	for i := range hosts {
		hosts[i].NTP = lab.Gateway
	}
	minted := w.mint(lab.Minted{Masters: hosts[:1], Workers: hosts[1:]})
	shop1, m1 := w.stamp(w.golden, minted, "shop1"), w.stamp(golden, minted, "m1")
	clock := func() string { return time.Now().Add(ahead).UTC().Format("2006-01-02T15:04:05") }
	master := w.start(lab.VMConfig{Name: "m1", Image: m1, Guest: 0, CPUs: 2, Memory: 2560, Clock: clock()})
	w.expect(master, 0, lab.FirstBootDone.String())
	if w.c, err = w.lab.Attach(w.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), w.net.GuestAddr(0).String()+":6443"); err != nil {
		t.Fatal(err)
	}
	w.until(master, "the API server's certificate is not valid yet", func() error {
		_, err := w.c.Node(t.Context(), "m1")
		if err == nil {
			t.Fatal("the certificate is still valid: the test proves nothing")
		}
		if !strings.Contains(err.Error(), "not yet valid") {
			return err
		}
		return nil
	})

	if err := w.lab.ServeTime(t.Context(), w.net); err != nil {
		t.Fatal(err)
	}
	w.ready(master, nil)
	w.t.Logf("%6.1f s from power-on: the API server answers a client whose clock is right", master.Serial.Note("").At.Seconds())
	w.makePod(master, "hello") // this works only if kubelet on the control-plane node has a valid certificate

	worker := w.start(lab.VMConfig{Name: "shop1", Image: shop1, Guest: 1, CPUs: 1, Clock: clock()})
	w.ready(worker, nil)
	w.makePod(worker, "hello2")
	w.off(worker)

	// First boot checks every two hours whether its Node exists. Restart it, so that it checks now.
	before, err := w.c.Node(t.Context(), "m1")
	if err != nil {
		t.Fatal(err)
	}
	if err := w.c.SetOff(t.Context(), master, "tells", helloImage, `systemd-run --quiet --unit=tells --collect bash -c '
rm -f /var/lib/edgebake/snapshots/*.db; sleep 60; systemctl restart firstboot
until ls /var/lib/edgebake/snapshots/*.db >/dev/null 2>&1; do sleep 2; done; echo "edgebake-test: a snapshot was taken" >/dev/ttyS0'
echo "edgebake-test: set off" >/dev/ttyS0`); err != nil {
		t.Fatal(err)
	}
	mark := w.expect(master, 0, `edgebake-test: set off`)
	if err := w.c.Delete(t.Context(), "/api/v1/nodes/m1"); err != nil {
		t.Fatal(err)
	}
	w.expect(master, mark, `edgebake: the cluster has no Node of this machine: restarting kubelet, which registers it`)
	ctx, cancel := master.Patience(t.Context(), bootLimit)
	defer cancel()
	if _, err := w.c.WaitNode(ctx, master, "m1", func(o *lab.Object) (bool, string) {
		if _, ok := o.Metadata.Labels["node-role.kubernetes.io/control-plane"]; o.Metadata.UID == before.Metadata.UID || !ok {
			return false, "the Node was not registered again as a control-plane node's yet"
		}
		return lab.Ready(o)
	}); err != nil {
		t.Fatal(err)
	}
	w.expect(master, mark, `edgebake-test: a snapshot was taken`)
	w.off(master)
}

// makePod creates a pod of the hello image on a node and waits until it runs.
func (w *world) makePod(vm *lab.VM, name string) {
	w.t.Helper()
	if err := w.c.Pod(w.t.Context(), name, helloImage, vm.Node); err != nil {
		w.t.Fatal(err)
	}
	w.podRuns(vm, name)
}
