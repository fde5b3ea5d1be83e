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
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

// cutPoint is a moment of a recorded run at which the power fails.
type cutPoint struct {
	n     int  // number of entries of the record
	keeps bool // keep a random part of the unflushed writes
}

// lanes is the number of machines that TestPowerCutAtAnyWrite runs at the same time. Each has only
// one processor, because QEMU sometimes fails with two.
const lanes = 2

// TestPowerCutAtAnyWrite records the disk writes of two first boots, until a minute after Ready,
// and simulates power cuts at many points of these records:
//
//   - At some points, a machine boots from the disk and must become Ready by itself.
//   - At others, the test only reads the disk, which must have the machine's certificate or
//     its token.
//
// CI boots from a dozen points and reads two dozen, some just after Ready. The nightly run boots
// from 200, including each flush since the join.
func TestPowerCutAtAnyWrite(t *testing.T) {
	pace.Takes(t, 300*time.Second)
	r := chance(t)
	w := newWorld(t, 1)
	for n := range lanes {
		own := rand.New(rand.NewPCG(r.Uint64(), 0))
		t.Run(fmt.Sprintf("cut%d", n+1), func(t *testing.T) {
			t.Parallel()
			lane := *w
			lane.t = t
			lane.cutAnywhere(own, n, fmt.Sprintf("cut%d", n+1))
		})
	}
}

// cutAnywhere records the first boot of one machine, simulates power cuts at many points of the
// record, and boots from the results.
func (w *world) cutAnywhere(r *rand.Rand, guest int, name string) {
	rec, marks := w.firstBoot(guest, name)
	looks, boots := choose(r, marks, os.Getenv("EDGEBAKE_NIGHTLY") != "")
	if n := rounds(w.t, len(boots)); n < len(boots) {
		r.Shuffle(len(boots), func(i, j int) { boots[i], boots[j] = boots[j], boots[i] })
		boots = boots[:n]
	}
	all := append(slices.Clone(looks), boots...)
	slices.SortFunc(all, func(a, b cutPoint) int { return a.n - b.n })
	all = slices.Compact(all)
	for _, p := range all {
		loss, err := rec.Cut(p.n, func() bool { return !p.keeps || r.IntN(2) == 0 })
		if err != nil {
			w.t.Fatal(err)
		}
		where := fmt.Sprintf("cut after entry %d of %d (%+v)", p.n, rec.Len(), loss)
		if p.n >= marks.join { // before the join, the partitions may not be complete
			if err := w.wayBack(rec); err != nil {
				w.t.Errorf("%s: %v", where, err)
			}
		}
		if !slices.Contains(boots, p) {
			continue
		}
		start := time.Now()
		ran, err := w.bootsFrom(rec, guest, name, p.n < marks.joined)
		if err != nil {
			w.t.Fatalf("%s: %v", where, err)
		}
		w.t.Logf("%s: Ready after %.0f s, with %.0f s of processor time", where, time.Since(start).Seconds(), ran.Seconds())
	}
	w.t.Logf("the disk was read at %d points and booted from at %d", len(all), len(boots))
}

// moments are positions in the record of a first boot: numbers of entries before them.
type moments struct {
	join, joined, ready, end int
	flushes                  []int // since the join began
}

// firstBoot records a machine until a minute after Ready.
func (w *world) firstBoot(guest int, name string) (*lab.Recording, moments) {
	w.record = true
	vm := w.bootWith(lab.VMConfig{CPUs: 1}, guest, lab.Site{NodeName: name})
	moment := func(line string) int64 {
		w.expect(vm, 0, line)
		size, err := vm.Recorded()
		if err != nil {
			w.t.Fatal(err)
		}
		return size
	}
	join := moment(`edgebake: .* waiting for kubeadm join`)
	joined := moment(`edgebake: .* join: done in`)
	w.ready(vm, nil)
	ready := moment(`edgebake: node .* is Ready`)
	select {
	case <-time.After(time.Minute):
	case <-w.t.Context().Done():
		w.t.Fatal(context.Cause(w.t.Context()))
	}
	vm.Cut()
	rec, err := vm.Recording()
	if err != nil {
		w.t.Fatal(err)
	}
	w.record = false
	m := moments{join: rec.At(join), joined: rec.At(joined), ready: rec.At(ready), end: rec.Len()}
	m.flushes = rec.Flushes(m.join)
	w.t.Logf("%d writes and flushes; the join begins at %d and ends at %d, the console reports Ready at %d; %d flushes since the join began",
		m.end, m.join, m.joined, m.ready, len(m.flushes))
	if len(m.flushes) < 10 || m.ready <= m.join || m.ready >= m.end {
		w.t.Fatal("the record of writes lacks a part of first boot")
	}
	return rec, m
}

// choose selects the points of the power cuts: looks are only read, boots are also booted from.
func choose(r *rand.Rand, m moments, nightly bool) (looks, boots []cutPoint) {
	if nightly {
		for _, n := range m.flushes {
			boots = append(boots, cutPoint{n, false})
		}
		for len(boots) < 200/lanes {
			boots = append(boots, cutPoint{1 + r.IntN(m.end), r.IntN(2) == 0})
		}
		return nil, boots
	}
	// Select flushes from before and after Ready. If there is none after Ready, use the end.
	i, _ := slices.BinarySearch(m.flushes, m.ready+1)
	early, late := m.flushes[:i], append(slices.Clone(m.flushes[i:]), m.end)
	boots = []cutPoint{
		{m.join + r.IntN(m.ready-m.join), true},           // in the middle of the join
		{early[r.IntN(len(early))] - 1, true},             // before a flush of the join, so that most is lost
		{m.ready, false},                                  // exactly at Ready, without unflushed writes
		{late[0], false},                                  // at the first flush after Ready
		{max(m.ready, late[min(1, len(late)-1)]-1), true}, // before the next flush
		{late[min(len(late)-1, 1+r.IntN(len(late)))], false},
	}
	for i := range 6 { // spread over the join and the time just after Ready
		looks = append(looks, cutPoint{m.flushes[i*(len(m.flushes)-1)/5], false}, cutPoint{m.join + r.IntN(m.end-m.join), true})
		if i < len(late) {
			looks = append(looks, cutPoint{late[i], false})
		}
	}
	return looks, boots
}

// emulatorTries is the number of boots from one point before a fault of the emulator fails the
// test.
const emulatorTries = 3

// bootsFrom boots a machine from the disk after a power cut, and returns the machine's processor
// time, which does not depend on the host's load. unknown means that the cluster had no Node of the
// machine at that point.
func (w *world) bootsFrom(rec *lab.Recording, guest int, name string, unknown bool) (ran time.Duration, err error) {
	for try := 1; ; try++ {
		if unknown {
			if err := w.c.Delete(w.t.Context(), "/api/v1/nodes/"+name); err != nil && !lab.NotFound(err) {
				return 0, err
			}
		}
		before, err := w.c.Node(w.t.Context(), name)
		if err != nil && !lab.NotFound(err) {
			return 0, err
		}
		// Use a new overlay, so that another try starts from the same bytes.
		vm := w.start(lab.VMConfig{Name: name + "-again", Image: rec.Disk, Guest: guest, CPUs: 1})
		vm.Node = name
		_, err = w.becomesReady(vm, before)
		ran = vm.Ran()
		vm.Cut()
		if err == nil {
			return ran, nil
		}
		blame := vm.Serial.EmulatorsFault()
		if blame == "" || try == emulatorTries {
			return ran, err
		}
		w.t.Logf("BOOTED AGAIN from the same disk, try %d of %d: the emulator failed in this one: %s", try+1, emulatorTries, blame)
	}
}

// wayBack reads a disk after a power cut. It returns an error if the machine could neither continue
// as its node nor join again.
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
			// Replay the journal and repair, as the machine's own boot does.
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
	enrolled := member.Enrolled(&machine.Env{Root: root, Clock: machine.Clock{Now: time.Now}})
	if enrolled != nil && token != nil {
		return fmt.Errorf("the machine has no credentials to join: %w; %w", enrolled, token)
	}
	return nil
}

// repaired runs e2fsck as the machine's own boot does. It returns an error if the file system could
// not be repaired.
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

// nodeFiles copies the files that make a machine a node from the file system DATA to their usual
// paths below root.
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
		// For a missing file, debugfs prints a message but succeeds.
		if out, err := exec.Command("debugfs", "-R", command, data).CombinedOutput(); err != nil {
			return fmt.Errorf("debugfs %s: %w: %s", command, err, out)
		}
	}
	return nil
}

// holdsToken returns nil if the slot has a token with which the machine can join.
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

// TestChoice checks the number and kinds of points in CI and in the nightly run.
func TestChoice(t *testing.T) {
	m := moments{join: 3000, joined: 3500, ready: 4000, end: 5000}
	for n := m.join + 3; n <= m.end; n += 20 {
		m.flushes = append(m.flushes, n)
	}
	for seed := range uint64(50) {
		for _, nightly := range []bool{false, true} {
			looks, boots := choose(rand.New(rand.NewPCG(seed, 0)), m, nightly)
			late := 0
			for _, p := range append(slices.Clone(looks), boots...) {
				if p.n < 1 || p.n > m.end || !nightly && p.n < m.join {
					t.Errorf("seed %d: a cut after entry %d", seed, p.n)
				}
			}
			for _, p := range boots {
				if p.n >= m.ready && p.n < m.ready+100 {
					late++
				}
			}
			if late < 3 || lanes*len(boots) < 12 || !nightly && len(looks) < 12 || nightly && lanes*len(boots) < 200 {
				t.Errorf("seed %d: %d looks, %d boots, %d of them just after Ready", seed, len(looks), len(boots), late)
			}
			for _, n := range m.flushes {
				if nightly && !slices.Contains(boots, cutPoint{n, false}) {
					t.Errorf("seed %d: no boot from the flush at %d", seed, n)
				}
			}
		}
	}
}
