package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/test/lab"
)

// TestUpdateControlPlaneNode updates a sole control-plane node. The cluster must be the same
// afterwards, and there must be a snapshot from before the update.
func TestUpdateControlPlaneNode(t *testing.T) {
	nightly(t)
	updateMasters(t, "m1")
}

// TestUpdateControlPlane updates three control-plane nodes one after the other while the test
// writes to the cluster. The cluster must accept writes all the time, and lose none that it
// acknowledged.
func TestUpdateControlPlane(t *testing.T) {
	nightly(t)
	updateMasters(t, "m1", "m2", "m3")
}

func updateMasters(t *testing.T, names ...string) {
	p := need(t)
	golden, err := madeControlPlane()
	if err != nil {
		t.Fatal(err)
	}
	w := newNet(t, p)
	www := filepath.Join(w.lab.Dir, "www")
	if err := os.MkdirAll(www, 0o755); err != nil {
		t.Fatal(err)
	}
	document, err := os.ReadFile(filepath.Join(p.root, "build", "e2e", "master.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	later := filepath.Join(p.root, "build", "e2e", "later-master.yaml")
	text := strings.Replace(string(document), "name: master\n", "name: later-master\nkernel: {sysctl: {kernel.pid_max: \"99999\"}}\n", 1)
	if err := os.WriteFile(later, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w.must(p.bin, "build", later, "--output", filepath.Join(www, "later.raw.zst"), "--lock", filepath.Join(w.lab.Dir, "later.lock"))
	minted := w.mint(lab.Minted{Masters: w.machines(0, names...)})
	clock := w.lab.NewLockstep()
	var masters []*lab.VM
	var hosts []string
	for n, name := range names {
		masters = append(masters, w.start(lab.VMConfig{Name: name, Image: w.stamp(golden, minted, name), Guest: n, CPUs: 1, Memory: 2560, Lockstep: clock}))
		hosts = append(hosts, w.net.GuestAddr(n).String()+":6443")
	}
	if w.c, err = w.lab.Attach(p.progs, w.net, filepath.Join(minted, "pki", "ca.crt"), filepath.Join(minted, "admin.conf"), hosts...); err != nil {
		t.Fatal(err)
	}
	nodes := map[string]*lab.Object{}
	for _, vm := range masters {
		nodes[vm.Name] = w.ready(vm, nil)
	}
	if err := w.c.LetLogsBeRead(t.Context()); err != nil && !conflicts(err) {
		t.Fatal(err)
	}
	url, err := w.lab.ServeNetBoot(t.Context(), w.net, www, "none", nil)
	if err != nil {
		t.Fatal(err)
	}
	written, stop := w.keepsWriting(t.Context())
	for _, vm := range masters {
		mark := w.updateAtOnce(vm, url+"/later.raw.zst")
		mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
		if len(names) > 1 {
			before := written()
			w.until(vm, "the cluster takes writes without "+vm.Name, func() error {
				if now := written(); len(now) < len(before)+3 {
					return fmt.Errorf("%d writes, before %d", len(now), len(before))
				}
				return nil
			})
			if holder := w.leaseHolder(); holder != vm.Name {
				t.Errorf("while %s restarts, %q holds the Lease", vm.Name, holder)
			}
		}
		nodes[vm.Name] = w.readyAgain(vm, mark, nodes[vm.Name])
		w.until(vm, "the Lease is released", func() error {
			if holder := w.leaseHolder(); holder != "" {
				return fmt.Errorf("%q holds it", holder)
			}
			return nil
		})
		w.aboutNode(vm).want(t, map[string]string{"partition": "ROOT-B", "system": "later-master", "bless": "active", "entries": "edgebake-a.conf edgebake-b.conf"})
		w.saysOnNode(vm, "ls /var/lib/edgebake/snapshots; ls /var/lib/edgebake/update 2>&1 | head -3", ".db")
	}
	stop()
	all := written()
	t.Logf("%d acknowledged writes", len(all))
	for _, name := range all {
		w.until(masters[0], name+" is there", func() error {
			err := w.c.Get(t.Context(), configMaps+"/"+name, new(lab.Object))
			if lab.NotFound(err) {
				t.Fatalf("the write %s was acknowledged, but is lost", name)
			}
			return err
		})
	}
	for _, vm := range masters {
		w.off(vm)
		w.checkDisk(w.disk(vm))
		w.keysOn(w.disk(vm), minted, 1)
	}
}

const configMaps = "/api/v1/namespaces/default/configmaps"

func conflicts(err error) bool {
	var se *lab.StatusError
	return errors.As(err, &se) && se.Code == http.StatusConflict
}

// keepsWriting writes ConfigMaps until stop is called. written returns the names of those that the
// cluster has acknowledged.
func (w *world) keepsWriting(ctx context.Context) (written func() []string, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var mu sync.Mutex
	var all []string
	var writing sync.WaitGroup
	writing.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			name := fmt.Sprintf("write-%d", n)
			one, done := context.WithTimeout(ctx, 20*time.Second)
			err := w.c.Create(one, configMaps, map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": name}})
			done()
			if err == nil {
				mu.Lock()
				all = append(all, name)
				mu.Unlock()
			}
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Second):
			}
		}
	})
	stop = func() { cancel(); writing.Wait() }
	w.t.Cleanup(stop)
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), all...)
	}, stop
}

// leaseHolder returns the control-plane node that is being updated, or "?" if that is unknown.
func (w *world) leaseHolder() string {
	var lease struct {
		Spec struct{ HolderIdentity string }
	}
	if err := w.c.Get(w.t.Context(), "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/"+controlplane.LeaseName, &lease); err != nil {
		return "?"
	}
	return lease.Spec.HolderIdentity
}
