package join_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

func TestWithoutIPVS(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "ipvs: {disabled: true}")
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	hosts := w.Get("/etc/hosts")
	if w.Has(ondisk.IPVSConfig) || w.Units[ondisk.UnitIPVSCare] == "active" || !strings.Contains(hosts, "\tapiserver.cluster.local") {
		t.Errorf("ipvscare %s, hosts:\n%s", w.Units[ondisk.UnitIPVSCare], hosts)
	}
}

func TestMastersChanged(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(), "192.0.2.13", "192.0.2.14", 1))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !strings.Contains(w.Get(ondisk.IPVSConfig), "192.0.2.14:6443") || w.Joins != 1 {
		t.Errorf("kubeadm joined %d times, %s", w.Joins, w.Get(ondisk.IPVSConfig))
	}
}

// TestMastersComeLate checks a join during which no API server answers for longer than kubeadm or
// any phase would wait.
func TestMastersComeLate(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Patience = 30 * time.Minute
	w.Cluster.AllDown(true)
	e := w.Env()
	on, sleep := w.Now, e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		err := sleep(ctx, d)
		if w.Now.Sub(on) > 17*time.Minute {
			w.Cluster.AllDown(false)
		}
		return err
	}
	if err := w.Run(firstboot.New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if took := w.Now.Sub(on); w.Joins != 1 || took < 17*time.Minute || took > 20*time.Minute {
		t.Errorf("%d joins, Ready after %s", w.Joins, took)
	}
	if !w.ConsoleHas("network: will be tried again: no API server answers") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestOneWordForAWait checks that first boot reports a wait on the console and in state.json when
// its reason changes, and not again for each API server.
func TestOneWordForAWait(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Cluster.AllDown(true)
	e := w.Env()
	on, sleep, source := w.Now, e.Sleep, e.Source
	down, asked := true, 0
	e.Source = func(ctx context.Context, addr string) (netip.Addr, error) {
		if down && addr == "192.0.2.11:6443" { // the Site's first one
			asked++
			return netip.Addr{}, errors.New("network is unreachable")
		}
		return source(ctx, addr)
	}
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		err := sleep(ctx, d)
		if down = w.Now.Sub(on) <= time.Minute; !down {
			w.Cluster.AllDown(false)
		}
		return err
	}
	if err := w.Run(firstboot.New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	var waits []string
	for _, line := range w.Console {
		if strings.Contains(line, "network: waiting for ") {
			waits = append(waits, line)
		}
	}
	if asked < 10 || len(waits) != 1 || !strings.Contains(waits[0], "an API server to answer (") {
		t.Errorf("%d lines in %d polls:\n%s", len(waits), asked, strings.Join(waits, "\n"))
	}
}

// TestMastersGoDuringTheJoin stops the API servers during the join. kubeadm waits, and is killed
// after its timeout.
func TestMastersGoDuringTheJoin(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Patience = 30 * time.Minute
	e := w.Env()
	gone, back := time.Time{}, time.Time{}
	e.Run = func(ctx context.Context, c machine.Cmd) error {
		if c.Args[0] != "kubeadm" || !gone.IsZero() {
			return w.RunProgram(ctx, c)
		}
		w.Cluster.AllDown(true)
		gone = w.Now
		for {
			if err := w.Sleep(ctx, 10*time.Second); err != nil {
				back = w.Now.Add(7 * time.Minute)
				return err
			}
		}
	}
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		err := sleep(ctx, d)
		if !back.IsZero() && w.Now.After(back) {
			w.Cluster.AllDown(false)
		}
		return err
	}
	if err := w.Run(firstboot.New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.ConsoleHas("join: will be tried again: context deadline exceeded") || w.Joins != 1 {
		t.Errorf("kubeadm joined %d times, console:\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
	if late := w.Now.Sub(back); late > 3*time.Minute {
		t.Errorf("Ready %s after the masters were back", late)
	}
	w.NoSecret()
}

func TestFirstMasterDead(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Cluster.Down["192.0.2.11:6443"] = true
	w.Cluster.Down["192.0.2.13:6443"] = true
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if server, name, err := member.KubeletServer(w.Env()); err != nil || server != "https://apiserver.cluster.local:6443" || name != "kubernetes" {
		t.Errorf("kubelet connects to %s (%s), %v", server, name, err)
	}
}

// TestJoinsThroughTheEndpoint checks that if the API server's certificate has the endpoint's name,
// kubelet is not restarted after the join.
func TestJoinsThroughTheEndpoint(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "apiserver.cluster.local")
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if server, name, err := member.KubeletServer(w.Env()); err != nil || server != "https://apiserver.cluster.local:6443" || name != "" {
		t.Errorf("kubelet connects to %s (%s), %v", server, name, err)
	}
	if slices.Contains(w.EffectNames, "restart kubelet.service") {
		t.Error("kubelet was restarted for nothing")
	}
}

// TestHealedInTheCluster checks that the machine joins without help once the stale Node is deleted.
func TestHealedInTheCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Patience = 30 * time.Minute
	w.Cluster.Register("edge-sn0042", "", "another")
	e := w.Env()
	sleep, removed := e.Sleep, false
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if !removed && w.ConsoleHas("FAILED discovery") {
			removed = true
			w.Cluster.Mu.Lock()
			delete(w.Cluster.Nodes, "edge-sn0042")
			w.Cluster.Mu.Unlock()
		}
		return sleep(ctx, d)
	}
	if err := w.Run(firstboot.New(e)); err != nil || w.State().Result != ondisk.ResultDone {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestAFailedLookUndoesNothing checks that kubelet stays redirected to yurthub on an edge node
// that reaches no API server, even if systemd does not answer the first calls.
func TestAFailedLookUndoesNothing(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	for _, before := range []bool{true, false} {
		w.PowerOn()
		w.Offline, w.Patience = true, 10*time.Minute
		e := w.Env()
		state, failed := e.UnitState, 0
		e.UnitState = func(ctx context.Context, unit string) (string, error) {
			if unit == ondisk.UnitKubelet && failed < 3 {
				failed++
				return "", errors.New("connecting to systemd: context deadline exceeded")
			}
			return state(ctx, unit)
		}
		if !before { // after a successful Run
			if err := os.Remove(filepath.Join(w.Root, openyurt.KubeletConf)); err != nil {
				t.Fatal(err)
			}
			failed = 3
			unit := e.Unit
			e.Unit = func(ctx context.Context, verb, name string) error {
				if verb == "restart" && name == ondisk.UnitKubelet {
					failed = 0
				}
				return unit(ctx, verb, name)
			}
		}
		if err := w.Run(firstboot.New(e)); err == nil {
			t.Fatal("first boot succeeded although no API server answers")
		}
		if failed != 3 {
			t.Errorf("the state of the unit was read %d times while systemd did not answer, want 3", failed)
		}
		if slices.Contains(w.EffectNames, "remove "+openyurt.KubeletConf) || !strings.Contains(w.Get(member.KubeadmFlags), openyurt.KubeletConf) {
			t.Errorf("kubelet was redirected away from yurthub: %s", w.EffectNames)
		}
	}
}
