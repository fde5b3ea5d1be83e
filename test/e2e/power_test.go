package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/test/lab"
)

// cutPoint is a moment of a recorded run at which the power goes.
type cutPoint struct {
	n     int  // entries of the record
	keeps bool // some of what was not flushed, by chance
}

// TestPowerCutAtAnyWrite records what the disk of one first boot is given,
// until a minute after Ready, and boots from what a power cut would have left
// of it: each ends Ready by itself. Of other points the disk is only read: the
// machine can go on with its certificate, or with its token. CI reads three
// dozen disks, some just after Ready, the nightly run boots 200, among them each
// flush since the join.
func TestPowerCutAtAnyWrite(t *testing.T) {
	r := chance(t)
	w := newWorld(t, 1)
	w.record = true
	const name = "cut"
	vm := w.boot(0, lab.Site{NodeName: name})
	moment := func(line string) int64 {
		w.expect(vm, 0, line)
		size, err := vm.Recorded()
		if err != nil {
			t.Fatal(err)
		}
		return size
	}
	joinBegins := moment(`edgebake: .* waiting for kubeadm join`)
	joined := moment(`edgebake: .* join: done in`)
	w.ready(vm, nil)
	done := moment(`edgebake: node .* is Ready`)
	select {
	case <-time.After(time.Minute):
	case <-t.Context().Done():
		t.Fatal(context.Cause(t.Context()))
	}
	vm.Cut()
	rec, err := vm.Recording()
	if err != nil {
		t.Fatal(err)
	}
	w.record = false
	first, ready := rec.At(joinBegins), rec.At(done)
	flushes := rec.Flushes(first)
	t.Logf("%d writes and flushes; the join begins at %d and ends at %d, Ready is said at %d; %d flushes since the join began",
		rec.Len(), first, rec.At(joined), ready, len(flushes))
	if len(flushes) < 10 || ready <= first || ready >= rec.Len() {
		t.Fatal("this is no record of a first boot")
	}

	looks, boots := choose(r, rec.Len(), first, ready, flushes, os.Getenv("EDGEBAKE_NIGHTLY") != "")
	if n := rounds(t, len(boots)); n < len(boots) {
		r.Shuffle(len(boots), func(i, j int) { boots[i], boots[j] = boots[j], boots[i] })
		boots = boots[:n]
	}
	all := append(slices.Clone(looks), boots...)
	slices.SortFunc(all, func(a, b cutPoint) int { return a.n - b.n })
	all = slices.Compact(all)
	for _, p := range all {
		loss, err := rec.Cut(p.n, func() bool { return !p.keeps || r.IntN(2) == 0 })
		if err != nil {
			t.Fatal(err)
		}
		where := fmt.Sprintf("cut after entry %d of %d (%+v)", p.n, rec.Len(), loss)
		if p.n >= first { // before, the partitions themselves may be on their way
			if err := w.wayBack(rec); err != nil {
				t.Errorf("%s: %v", where, err)
			}
		}
		if !slices.Contains(boots, p) {
			continue
		}
		start := time.Now()
		w.bootsFrom(rec, name, p.n < rec.At(joined))
		t.Logf("%s: Ready after %.0f s", where, time.Since(start).Seconds())
	}
	t.Logf("the disk was read at %d points and booted from at %d", len(all), len(boots))
}

// choose picks where the power goes: to look, and to boot.
func choose(r *rand.Rand, length, join, ready int, flushes []int, nightly bool) (looks, boots []cutPoint) {
	afterReady := flushes[len(flushes)-1:]
	if i := slices.IndexFunc(flushes, func(n int) bool { return n > ready }); i >= 0 {
		afterReady = flushes[i:]
	}
	if nightly {
		for _, n := range flushes {
			boots = append(boots, cutPoint{n, false})
		}
		for len(boots) < 200 {
			boots = append(boots, cutPoint{1 + r.IntN(length), r.IntN(2) == 0})
		}
		return nil, boots
	}
	for i := range 12 { // spread over the join and what follows, and just after Ready
		looks = append(looks, cutPoint{flushes[i*(len(flushes)-1)/11], false}, cutPoint{join + r.IntN(length-join), true})
		if i < len(afterReady) {
			looks = append(looks, cutPoint{afterReady[i], false})
		}
	}
	return append(looks,
		cutPoint{join + r.IntN(ready-join), true}, // in the middle of it
		cutPoint{ready, false},                    // on the very moment, all lost that can be
		cutPoint{afterReady[0], false},
		cutPoint{ready + r.IntN(length-ready), true},
	), nil
}

// bootsFrom switches a machine on with the disk as the cut left it. Before the
// join was over, the cluster did not know it.
func (w *world) bootsFrom(rec *lab.Recording, name string, unknown bool) {
	w.t.Helper()
	if unknown {
		if err := w.c.Delete(w.t.Context(), "/api/v1/nodes/"+name); err != nil && !lab.NotFound(err) {
			w.t.Fatal(err)
		}
	}
	before, err := w.c.Node(w.t.Context(), name)
	if err != nil && !lab.NotFound(err) {
		w.t.Fatal(err)
	}
	vm := w.start(lab.VMConfig{Name: name + "-again", Image: rec.Disk})
	vm.Node = name
	w.ready(vm, before)
	vm.Cut()
}

// wayBack reads a disk after a power cut and reports why the machine could
// neither go on as the node that it is nor join.
func (w *world) wayBack(rec *lab.Recording) error {
	dir, err := os.MkdirTemp(w.lab.Dir, "look-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	info, err := media.Inspect(rec.Disk)
	if err != nil {
		return err
	}
	root := filepath.Join(dir, "root")
	var token error
	for _, p := range info.Partitions {
		switch p.Label {
		case ondisk.LabelSlot:
			token = holdsToken(rec.Disk, p)
		case ondisk.LabelRootA, ondisk.LabelData:
			// The machine's own boot replays the journal.
			part := filepath.Join(dir, p.Label)
			if err := rec.CopyPart(part, p.Start, p.Size); err != nil {
				return err
			}
			if err := repaired("e2fsck", "-fp", part); err != nil {
				return fmt.Errorf("%s: %w", p.Label, err)
			}
			if p.Label == ondisk.LabelData {
				if err := nodeFiles(part, root); err != nil {
					return err
				}
			}
		}
	}
	enrolled := firstboot.Enrolled(root, time.Now())
	if enrolled != nil && token != nil {
		return fmt.Errorf("it has no way into the cluster: %w; %w", enrolled, token)
	}
	return nil
}

// repaired runs e2fsck, which the machine's own boot does as well: that it
// repaired something is no error, that it could not is one.
func repaired(argv ...string) error {
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", argv[0], err, out)
	}
	return nil
}

// nodeFiles copies what makes a machine a node out of DATA, to where it would
// be below /.
func nodeFiles(data, root string) error {
	persist := "/lib/edgebake/persist/kubernetes"
	for _, f := range []struct{ from, to string }{
		{persist + "/kubelet.conf", ondisk.KubeletConf},
		{persist + "/pki/ca.crt", ondisk.KubeCA},
		{"/lib/kubelet/config.yaml", ondisk.KubeletConfig},
		{"/lib/kubelet/kubeadm-flags.env", "/var/lib/kubelet/kubeadm-flags.env"},
		{"/lib/kubelet/pki", "/var/lib/kubelet/pki"},
	} {
		to := filepath.Join(root, f.to)
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return err
		}
		command := fmt.Sprintf("dump %s %s", f.from, to)
		if f.from == "/lib/kubelet/pki" {
			command = fmt.Sprintf("rdump %s %s", f.from, filepath.Dir(to))
		}
		// What is not there yet is said and is no failure of the program.
		if out, err := exec.Command("debugfs", "-R", command, data).CombinedOutput(); err != nil {
			return fmt.Errorf("debugfs %s: %w: %s", command, err, out)
		}
	}
	return nil
}

// holdsToken returns nil where the slot has a token to join with.
func holdsToken(disk string, p media.Partition) error {
	f, err := os.Open(disk)
	if err != nil {
		return err
	}
	defer f.Close()
	c, err := slot.Read(io.NewSectionReader(f, p.Start, p.Size))
	if err != nil {
		return err
	}
	site, err := configs.ParsePublicSite(ondisk.SlotSite, c.Files[ondisk.SlotSite])
	if err != nil {
		return err
	}
	if site.Credentials.Token.IsZero() {
		return errors.New("the slot has no token")
	}
	return nil
}

// TestChoice: what CI and the nightly run promise of their points.
func TestChoice(t *testing.T) {
	const length, join, ready = 5000, 3000, 4000
	var flushes []int
	for n := join + 3; n <= length; n += 20 {
		flushes = append(flushes, n)
	}
	for seed := range uint64(50) {
		for _, nightly := range []bool{false, true} {
			looks, boots := choose(rand.New(rand.NewPCG(seed, 0)), length, join, ready, flushes, nightly)
			late := 0
			for _, p := range append(slices.Clone(looks), boots...) {
				if p.n < 1 || p.n > length || !nightly && p.n < join {
					t.Errorf("seed %d: a cut after entry %d", seed, p.n)
				}
				if p.n > ready && p.n < ready+100 {
					late++
				}
			}
			if late < 3 || !nightly && len(looks) < 28 || nightly && len(boots) < 200 {
				t.Errorf("seed %d: %d looks, %d boots, %d just after Ready", seed, len(looks), len(boots), late)
			}
			for _, n := range flushes {
				if nightly && !slices.Contains(boots, cutPoint{n, false}) {
					t.Errorf("seed %d: the flush at %d is left out", seed, n)
				}
			}
		}
	}
}
