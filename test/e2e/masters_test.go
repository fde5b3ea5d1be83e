package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/lab"
)

// TestClusterOfThree makes a cluster of three control-plane nodes and two workers from images. The
// machines are switched on in any order; the cluster bootstraps once each control-plane node has
// seen the others. Then these events follow:
//
//   - m3 dies with its disk. The worker stays Ready, its pod keeps running, and a new worker joins.
//   - m3, reflashed, joins and votes, so the cluster survives the loss of m2.
//   - m1 is lost too, and reflashed. It stops, because the data on m3 must not be overwritten.
//   - A person names m3 as the machine to continue from. It continues alone, and m1 joins it.
func TestClusterOfThree(t *testing.T) {
	nightly(t)
	p := need(t)
	golden, err := madeControlPlane()
	if err != nil {
		t.Fatal(err)
	}
	w := newNet(t, p)
	masters, workers := []string{"m1", "m2", "m3"}, []string{"shop1", "shop2"}
	minted := w.mint(lab.Minted{Masters: w.machines(0, masters...), Workers: w.machines(len(masters), workers...)})
	images := map[string]string{}
	for _, name := range masters {
		images[name] = w.stamp(golden, minted, name)
	}
	for _, name := range workers {
		images[name] = w.stamp(p.golden, minted, name)
	}
	// kube-apiserver ends if its start takes more than 30 to 60 s. Three of them, emulated on two
	// processors, would each end a dozen times.
	clock := w.lab.NewLockstep()
	on := func(name string, guest, memory int) *lab.VM {
		return w.start(lab.VMConfig{Name: name, Image: images[name], Guest: guest, CPUs: 1, Memory: memory, Lockstep: clock})
	}
	master := func(n int) *lab.VM { return on(masters[n], n, 2560) } // on an empty disk
	worker := func(n int) *lab.VM { return on(workers[n], len(masters)+n, 0) }
	var hosts []string
	for n := range masters {
		hosts = append(hosts, w.net.GuestAddr(n).String()+":6443")
	}
	if w.c, err = w.lab.Attach(p.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), hosts...); err != nil {
		t.Fatal(err)
	}

	start, began := time.Now(), clock.Now()
	passed := func(what string) {
		t.Logf("%6.1f s from the first power-on, %.0f on the machines' clock: %s", time.Since(start).Seconds(), clock.Now().Sub(began).Seconds(), what)
	}
	shop1, m3 := worker(0), master(2)
	w.expect(shop1, 0, lab.WaitsForAPIServer.String())
	w.expect(m3, 0, `no answer yet from m1, m2`)
	m1, m2 := master(0), master(1)
	for _, vm := range []*lab.VM{m1, m2, m3} {
		w.expect(vm, 0, `edgebake: bootstrapping an empty etcd`)
	}
	before := map[string]*lab.Object{} // the Nodes
	for _, vm := range []*lab.VM{m1, m2, m3} {
		before[vm.Name] = w.ready(vm, nil)
	}
	passed("three control-plane nodes are Ready")
	before["shop1"] = w.ready(shop1, nil)
	w.makePod(shop1, "hello")
	passed("a worker is Ready and runs a pod")

	since := w.readySince("shop1")
	m3.Cut()
	w.ready(worker(1), nil)
	passed("m3 is dead, and a new worker has joined")
	w.renews(shop1)
	if now := w.readySince("shop1"); !now.Equal(since) {
		t.Errorf("the worker became Ready at %v, so it was not Ready for a time after m3 died", now)
	}

	m3 = master(2)
	before["m3"] = w.ready(m3, before["m3"])
	passed("m3, reflashed, is a member again")
	m2.Cut()
	w.writes(m1)
	passed("m2 is dead, and the cluster accepts writes, so m3 votes")
	pod, err := w.c.WaitPod(t.Context(), shop1, "hello")
	if err != nil {
		t.Fatal(err)
	}
	if s := pod.Status.ContainerStatuses; len(s) != 1 || s[0].RestartCount != 0 {
		t.Errorf("the pod's container was restarted: %+v", s)
	}
	for _, vm := range []*lab.VM{m1, shop1} {
		vm.Cut()
	}
	w.keysOn(w.disk(m1), minted, 1)
	w.keysOn(w.disk(m2), minted, 1)
	w.keysOn(w.disk(shop1), minted, 0)
	m1 = master(0) // m2 stays off
	w.expect(m1, 0, `FAILED etcd-start: the cluster has been in use \(m3\), and has no quorum`)
	passed("m1 and m2 are lost; m1, reflashed, stops")
	for _, vm := range []*lab.VM{m1, m3} {
		vm.Cut()
	}
	disk := w.disk(m3)
	w.keysOn(disk, minted, 1)

	lost := filepath.Join(w.lab.Dir, "lost")
	w.must(p.bin, "cluster", "sites", minted, "--continue-from", "m3", "--output", lost)
	w.must(p.bin, "stamp", disk, filepath.Join(lost, "m3.yaml"), "--in-place")
	w.must(p.bin, "stamp", golden, filepath.Join(lost, "m1.yaml"), "--output", images["m1"], "--force")
	images["m3"] = disk
	m1, m3 = master(0), master(2)
	w.expect(m3, 0, `edgebake: etcd continues with this machine's data alone`)
	w.ready(m3, before["m3"])
	w.ready(m1, before["m1"])
	w.writes(m3)
	if err := w.c.Get(t.Context(), "/api/v1/namespaces/default/pods/hello", new(lab.Object)); err != nil {
		t.Errorf("reading the pod, which is in m3's data: %v", err)
	}
	passed("m3, named by a person, continues, and m1 has joined it")
	w.on(shop1)
	w.ready(shop1, before["shop1"])
	w.podRuns(shop1, "hello")
	passed("the worker and its pod are back")
}

// readySince returns when a Node became Ready.
func (w *world) readySince(name string) time.Time {
	w.t.Helper()
	node, err := w.c.Node(w.t.Context(), name)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, c := range node.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" {
			return c.LastTransitionTime
		}
	}
	w.t.Fatalf("%s is not Ready: %+v", name, node.Status.Conditions)
	return time.Time{}
}

// renews waits until the machine's kubelet has renewed its lease.
func (w *world) renews(vm *lab.VM) {
	w.t.Helper()
	renewed := func() (at string) {
		var lease struct{ Spec struct{ RenewTime string } }
		if err := w.c.Get(w.t.Context(), "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"+vm.Node, &lease); err != nil {
			return ""
		}
		return lease.Spec.RenewTime
	}
	first := ""
	w.until(vm, "its kubelet renews its Lease", func() error {
		at := renewed()
		if first == "" {
			first = at
		}
		if at == first {
			return fmt.Errorf("renewed at %q", at)
		}
		return nil
	})
}

// writes waits until the cluster accepts a write.
func (w *world) writes(vm *lab.VM) {
	w.t.Helper()
	w.until(vm, "the cluster takes a write", func() error {
		err := w.c.Create(w.t.Context(), "/api/v1/namespaces/default/configmaps", map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "written"}})
		var se *lab.StatusError
		if errors.As(err, &se) && se.Code == http.StatusConflict { // the response to the earlier write was lost
			return nil
		}
		return err
	})
}

// until retries until try returns no error.
func (w *world) until(vm *lab.VM, what string, try func() error) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), 10*time.Minute)
	defer cancel()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			w.t.Fatalf("waiting until %s: %v: %v", what, context.Cause(ctx), err)
		case <-time.After(2 * time.Second):
		}
	}
}
