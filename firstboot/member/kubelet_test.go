package member_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

const cpuState = "/var/lib/kubelet/cpu_manager_state"

// updated boots the machine, which is a node, with the system of another image.
func updated(w *worldtest.World, from, to string) {
	w.T.Helper()
	image := w.Get(ondisk.ImageInfoFile)
	if !strings.Contains(image, from) {
		w.T.Fatalf("the machine runs %s", image)
	}
	w.Put(ondisk.ImageInfoFile, strings.Replace(image, from, to, 1))
	w.KubeletVersion = "Kubernetes " + to + "\n"
	w.PowerOn()
}

// beforeUpdate returns a node with v1.36.3 that is about to boot another
// system. files are kubelet's files on it.
func beforeUpdate(t *testing.T) (w *worldtest.World, files map[string]string) {
	t.Helper()
	w = readyNode(t)
	w.Put(cpuState, "state of v1.36")
	if err := member.SaveKubelet(w.Env(), 36); err != nil {
		t.Fatal(err)
	}
	w.LoseUnsynced()
	return w, kubeletFiles(w)
}

func kubeletFiles(w *worldtest.World) map[string]string {
	out := map[string]string{}
	for _, p := range []string{ondisk.KubeletConfig, member.KubeadmFlags, member.KubeletInstanceConfig, cpuState} {
		if w.Has(p) {
			out[p] = w.Get(p)
		}
	}
	return out
}

// takenOver checks that kubelet has the settings of v1.37.
func takenOver(w *worldtest.World, when string) {
	w.T.Helper()
	k := member.ReadKubeletFiles(w.Env())
	if w.Get(ondisk.KubeletConfig) != worldtest.UpgradedKubeletConfig || k.Minor != 37 || k.ConfigMinor != 37 || w.Units[ondisk.UnitKubelet] != "active" || w.Joins != 1 {
		w.T.Errorf("%s: kubelet is %s with %q, recorded are v1.%d and v1.%d, the machine joined %d times\n%s", when,
			w.Units[ondisk.UnitKubelet], w.Get(ondisk.KubeletConfig), k.Minor, k.ConfigMinor, w.Joins, strings.Join(w.Console, "\n"))
	}
	if left, _ := filepath.Glob(filepath.Join(w.Root, ondisk.KubernetesDir, "tmp/*")); len(left) > 0 {
		w.T.Errorf("%s: kubeadm's backup copies are left: %s", when, left)
	}
}

// goneBack boots the former system, and checks that kubelet has its former files.
func goneBack(w *worldtest.World, when string, files map[string]string) {
	w.T.Helper()
	updated(w, "v1.37.2", "v1.36.3")
	for p, want := range files {
		if !w.Has(p) || w.Get(p) != want {
			w.T.Errorf("%s: %s has changed: %q", when, p, w.Get(p))
		}
	}
	if w.Has(member.KubeletInstanceConfig) != (files[member.KubeletInstanceConfig] != "") {
		w.T.Errorf("%s: %s exists: %v", when, member.KubeletInstanceConfig, w.Has(member.KubeletInstanceConfig))
	}
	w.MustBoot()
	if w.Joins != 1 || w.Units[ondisk.UnitKubelet] != "active" {
		w.T.Errorf("%s: kubeadm joined %d times", when, w.Joins)
	}
}

// TestAnotherMinor checks that a system with another minor version has kubeadm write kubelet's
// settings once. Back on the former system, kubelet has its own files with the Site's present
// arguments.
func TestAnotherMinor(t *testing.T) {
	t.Parallel()
	w, files := beforeUpdate(t)
	updated(w, "v1.36.3", "v1.37.2")
	if w.Units[ondisk.UnitKubelet] != "active" || w.Get(ondisk.KubeletConfig) != files[ondisk.KubeletConfig] {
		t.Error("kubelet runs with the new settings too early")
	}
	w.Put(cpuState, "state of v1.37") // as kubelet does
	w.Put(member.KubeletInstanceConfig, "containerRuntimeEndpoint: x\n")
	w.Stamp(worldtest.SlotDevice, w.Site("kubeletExtraArgs: {max-pods: '20'}"))
	w.MustBoot()
	takenOver(w, "first boot")
	if !w.ConsoleHas("waiting for kubeadm to write kubelet's settings for v1.37") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	w.PowerOn()
	w.MustBoot()
	for _, name := range w.EffectNames {
		if strings.Contains(name, "kubeadm") {
			t.Errorf("a second run did: %s", name)
		}
	}
	if !strings.Contains(w.Get(member.KubeadmFlags), "--max-pods=20") {
		t.Errorf("flags: %s", w.Get(member.KubeadmFlags))
	}
	goneBack(w, "back", files)
	if !strings.Contains(w.Get(member.KubeadmFlags), "--max-pods=20") {
		t.Errorf("back on v1.36, flags: %s", w.Get(member.KubeadmFlags))
	}
	// The same again, with other state.
	w.Put(cpuState, "later state of v1.36")
	files = kubeletFiles(w)
	updated(w, "v1.36.3", "v1.37.2")
	w.MustBoot()
	takenOver(w, "again")
	goneBack(w, "back again", files)
}

// TestPatchKeepsSettings checks that a later image with the same minor version writes nothing.
func TestPatchKeepsSettings(t *testing.T) {
	t.Parallel()
	w, files := beforeUpdate(t)
	updated(w, "v1.36.3", "v1.36.5")
	w.MustBoot()
	if w.Get(ondisk.KubeletConfig) != files[ondisk.KubeletConfig] {
		t.Error("kubelet's settings have changed")
	}
}

// TestAnotherMinorOffline checks that without an API server kubelet runs with the former settings
// until one answers.
func TestAnotherMinorOffline(t *testing.T) {
	t.Parallel()
	w, files := beforeUpdate(t)
	w.Offline = true
	updated(w, "v1.36.3", "v1.37.2")
	if err := w.Boot(); !errors.Is(err, context.Canceled) || w.State().Result != ondisk.ResultWaiting {
		t.Errorf("%v, %s\n%s", err, w.State().Result, strings.Join(w.Console, "\n"))
	}
	if w.Units[ondisk.UnitKubelet] != "active" || w.Get(ondisk.KubeletConfig) != files[ondisk.KubeletConfig] {
		t.Error("kubelet does not run with its previous settings")
	}
	w.Offline = false
	w.MustBoot()
	takenOver(w, "online")
}

// TestKubeadmFailsToWriteSettings checks a kubeadm that fails after it has emptied a file and
// before it has written it. The node keeps its credentials and the former settings.
func TestKubeadmFailsToWriteSettings(t *testing.T) {
	t.Parallel()
	w, files := beforeUpdate(t)
	updated(w, "v1.36.3", "v1.37.2")
	w.Patience = time.Minute
	e := w.Env()
	program, tries := e.Run, 0
	e.Run = func(ctx context.Context, c machine.Cmd) error {
		if strings.HasPrefix(strings.Join(c.Args, " "), "kubeadm upgrade") {
			tries++
			w.Put(ondisk.KubeletConfig, "")
			return errors.New("exit status 1")
		}
		return program(ctx, c)
	}
	if err := w.Run(firstboot.New(e)); err == nil || tries < 2 || w.Joins != 1 || !w.Has(ondisk.KubeletConf) || w.Get(ondisk.KubeletConfig) != files[ondisk.KubeletConfig] {
		t.Fatalf("%v, after %d tries %d joins, settings %q\n%s", err, tries, w.Joins, w.Get(ondisk.KubeletConfig), strings.Join(w.Console, "\n"))
	}
	w.MustBoot()
	takenOver(w, "later")
}

// TestPowerCutsOfAnotherMinor cuts the power before each change on the way to another minor version
// and back.
func TestPowerCutsOfAnotherMinor(t *testing.T) {
	t.Parallel()
	before, files := beforeUpdate(t)
	before.UseSingleMaster()
	updated(before, "v1.36.3", "v1.37.2")
	whole := before.Clone(t)
	whole.MustBoot()
	takenOver(whole, "without a cut")
	for n := 1; n <= whole.Effects; n += worldtest.EveryCut() {
		at := whole.EffectNames[n-1]
		cut := before.Clone(t)
		cut.PowerCutAt = n
		if err := cut.Boot(); err == nil && n < whole.Effects-3 {
			t.Fatalf("cut at %d (%s): the machine continued after the power cut", n, at)
		}
		when := fmt.Sprintf("cut at %d (%s)", n, at)
		killed := cut.Clone(t)
		killed.MustBoot()
		takenOver(killed, "killed, not "+when)
		cut.LoseUnsynced()
		back := cut.Clone(t)
		goneBack(back, when, files)
		cut.PowerOn()
		cut.MustBoot()
		takenOver(cut, when)
	}
	// The power is cut in the unit before kubelet, on the way back.
	for n := 1; ; n++ {
		back := whole.Clone(t)
		back.Put(ondisk.ImageInfoFile, strings.Replace(back.Get(ondisk.ImageInfoFile), "v1.37.2", "v1.36.3", 1))
		back.Effects, back.EffectNames, back.PowerCutAt, back.Shutdown = 0, nil, n, func() {}
		err := member.TakeOverKubelet(back.Env(), 36)
		if err == nil {
			break
		}
		if n > 20 {
			t.Fatal(err)
		}
		back.Put(ondisk.ImageInfoFile, strings.Replace(back.Get(ondisk.ImageInfoFile), "v1.36.3", "v1.37.2", 1))
		forward := back.Clone(t)
		forward.PowerOn()
		forward.MustBoot()
		takenOver(forward, fmt.Sprintf("on the way back cut at %d, and forward", n))
		goneBack(back, fmt.Sprintf("back, cut at %d", n), files)
	}
}

// TestJoinForgetsFormerKubelet checks that a machine that joins again has the files of only one
// kubelet.
func TestJoinForgetsFormerKubelet(t *testing.T) {
	t.Parallel()
	w, _ := beforeUpdate(t)
	updated(w, "v1.36.3", "v1.37.2")
	w.MustBoot()
	if _, err := firstboot.Reset(t.Context(), w.Env(), func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(w.Root, member.KubeletRecord)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the record is left: %v", err)
	}
}
