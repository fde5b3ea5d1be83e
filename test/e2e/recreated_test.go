package e2e

import (
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/test/lab"
)

// soleMaster mints a cluster of one control-plane node and a worker. It returns the minted
// directory, the golden image and the control-plane node's configuration. Each start with this
// configuration has an empty disk; with KeepVars, it is the same machine. The machines run in
// lockstep, because an emulated API server would be restarted again and again on a busy host.
func (w *world) soleMaster() (minted, golden string, config lab.VMConfig) {
	w.t.Helper()
	golden, err := madeControlPlane()
	if err != nil {
		w.t.Fatal(err)
	}
	minted = w.mint(lab.Minted{Masters: w.machines(0, "m1"), Workers: w.machines(1, "shop1")})
	return minted, golden, lab.VMConfig{Name: "m1", Image: w.stamp(golden, minted, "m1"), Guest: 0, CPUs: 1, Memory: 2560, Lockstep: w.lab.NewLockstep()}
}

// bootstrapAgain stamps a new bootstrap permit onto the control-plane node's image.
func (w *world) bootstrapAgain(golden, minted, image string) {
	w.t.Helper()
	again := filepath.Join(w.lab.Dir, "again")
	w.must(w.bin, "cluster", "sites", minted, "--bootstrap", "48h", "--output", again)
	w.must(w.bin, "stamp", golden, filepath.Join(again, "m1.yaml"), "--output", image, "--force")
}

// TestPermitIsForOneBootstrap reflashes a sole control-plane node while its Site still permits a
// bootstrap. The machine must stop, because its firmware has a record of the first bootstrap, and
// bootstrap again only on request. Another machine may bootstrap once with the same permit.
func TestPermitIsForOneBootstrap(t *testing.T) {
	nightly(t)
	w := newNet(t, need(t))
	minted, golden, config := w.soleMaster()
	born := func(vm *lab.VM) {
		mark := w.expect(vm, 0, `edgebake: bootstrapping an empty etcd`)
		w.expect(vm, mark, `etcd-start: done`)
		vm.Cut()
	}
	born(w.start(config))
	same := config
	same.KeepVars = true
	vm := w.start(same)
	mark := w.expect(vm, 0, `FAILED etcd-start: .*this machine has already used this bootstrap permit`)
	w.expect(vm, mark, `to fix: .*--bootstrap 48h`)
	vm.Cut()
	w.bootstrapAgain(golden, minted, config.Image)
	born(w.start(same))
	born(w.start(config))
}

// TestRecreated bootstraps a cluster again with the same keys. A worker of the former cluster must
// keep its pods and report why it is not Ready.
func TestRecreated(t *testing.T) {
	nightly(t)
	w := newNet(t, need(t))
	minted, golden, config := w.soleMaster()
	w.stamp(w.golden, minted, "shop1")
	master := w.start(config)
	var err error
	if w.c, err = w.lab.Attach(w.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), w.net.GuestAddr(0).String()+":6443"); err != nil {
		t.Fatal(err)
	}
	first := w.ready(master, nil)
	worker := w.start(lab.VMConfig{Name: "shop1", Image: filepath.Join(w.lab.Dir, "shop1.raw"), Guest: 1, CPUs: 1, Lockstep: config.Lockstep})
	w.ready(worker, nil)
	if err := w.c.Greeter(t.Context(), "greeter", helloImage, "shop1"); err != nil {
		t.Fatal(err)
	}
	w.podRuns(worker, "greeter")
	// Start a process that keeps running without an API server.
	if err := w.c.SetOff(t.Context(), worker, "tells", helloImage, `systemd-run --quiet --unit=tells --collect bash -c '
while sleep 15; do printf "\nedgebake-test: %s\n" "$(ipvscare status | tr -s " \n" " ")" >/dev/ttyS0; done'`); err != nil {
		t.Fatal(err)
	}
	w.expect(worker, 0, `edgebake-test: .* up `)
	master.Cut()

	w.bootstrapAgain(golden, minted, config.Image)
	master = w.start(config)
	if now := w.ready(master, first); now.Metadata.UID == first.Metadata.UID {
		t.Error("the new cluster has a Node of the old one")
	}
	mark := w.expect(worker, worker.Serial.Mark(), `edgebake-test: .* alien `)
	w.expect(worker, mark, `hello from shop1, up [0-9]{3,} s`) // the pod has been running since before the new bootstrap
	if _, err := w.c.Node(t.Context(), "shop1"); !lab.NotFound(err) {
		t.Errorf("the new cluster has a Node of the worker, which has not joined it: %v", err)
	}
	mark = worker.Serial.Mark()
	if err := worker.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.expect(worker, mark, `edgebake: .*the API servers are of another cluster with the same keys`)
}
