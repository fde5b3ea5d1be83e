// Package boot measures a machine from power-on to a Ready node. It alternately boots in QEMU: the
// golden image of the example, an image with the same base that only reaches multi-user.target, and
// the image of EDGEBAKE_BOOT_BEFORE. Results go to test/bench/results.
//
//	EDGEBAKE_BENCH_RUNS    number of boots of each, 3 by default
//	EDGEBAKE_BOOT_BEFORE   a golden .raw that another version of edgebake built from the same Image
//	EDGEBAKE_ACCEL         as for `make demo`: kvm or tcg
package boot

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/bench"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/lab"
)

const (
	results    = "../results/boot.md"
	quickstart = "configs/examples/quickstart.yaml"
	hello      = "edgebake.test/hello:1"
	// promised is the maximum time to a Ready node, as a multiple of the base's time plus the time
	// of kubelet's own start.
	promised = 1.3
	// goal is the maximum time in seconds, for two idle processors without KVM.
	goal = 40.0
)

// ours lists the units of an image that are not in its base.
var ours = []string{"firstboot.service", "firstboot-again.timer", "ipvscare.service", "containerd.service", "kubelet.service",
	"edgebake-certificates.service", "edgebake-sshkeys.service", "edgebake-healthy.service"}

// subject is an image with the measurements of its boots.
type subject struct {
	name   string
	golden string
	joins  bool
	// at has the seconds from power-on to each milestone, for each boot.
	at    map[string][]float64
	order []string
	// cpu has the processor seconds that QEMU had used at each milestone.
	cpu map[string][]float64
	// units has the seconds that systemd waited for each unit, for each boot.
	units map[string][]float64
	// work has the processor seconds of each unit's processes, measured by the guest.
	work map[string][]float64
	last string // systemd's report of the last boot
}

func (s *subject) note(what string, at time.Duration) {
	if _, ok := s.at[what]; !ok {
		s.order = append(s.order, what)
	}
	s.at[what] = append(s.at[what], at.Seconds())
}

// used records the processor time up to a milestone; 0 means that it was not measured.
func (s *subject) used(what string, cpu time.Duration) {
	if cpu > 0 {
		s.cpu[what] = append(s.cpu[what], cpu.Seconds())
	}
}

// world has the parts that all boots share.
type world struct {
	*testing.B
	root, dir string
	lab       *lab.Lab
	net       *lab.Namespace
	cluster   *lab.Cluster
	boots     int
}

func (b *world) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatalf("%v\n%s", err, b.lab.Evidence())
	}
}

func (b *world) run(argv ...string) {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = b.root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
}

// BenchmarkBoot boots all subjects alternately.
func BenchmarkBoot(b *testing.B) {
	if b.N > 1 {
		return
	}
	desk.NeedRoot(b, "it makes a network namespace")
	desk.NeedProgram(b, "qemu-system-x86_64", "qemu-system-x86")
	runs := bench.Runs(b, 3)
	root, err := filepath.Abs("../../..")
	if err != nil {
		b.Fatal(err)
	}
	w := &world{B: b, root: root, dir: filepath.Join(root, "build", "bench-boot")}
	if err := os.RemoveAll(w.dir); err != nil {
		b.Fatal(err)
	}
	if w.lab, err = lab.New(w.dir, b.Output()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := w.lab.Close(); err != nil {
			b.Error(err)
		}
		os.RemoveAll(w.dir)
	})
	subjects := w.images()
	w.start()
	for range runs {
		for _, s := range subjects {
			w.boot(s)
		}
	}
	text := report(subjects, runs)
	b.Log("\n" + text)
	if err := os.WriteFile(results, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
}

// images builds the images to boot.
func (b *world) images() []*subject {
	bin := filepath.Join(b.dir, "edgebake")
	b.run("go", "build", "-trimpath", "-o", bin, "./cmd/edgebake")
	b.run("go", "run", "./test/images", "-o", "build/images")
	doc, err := os.ReadFile(filepath.Join(b.root, quickstart))
	b.must(err)
	// In a directory as deep as the example's, whose paths are relative.
	bare := filepath.Join(b.dir, "bare.yaml")
	args := []string{"systemd.show_status=yes"}
	for _, u := range ours {
		args = append(args, "systemd.mask="+u)
	}
	b.must(os.WriteFile(bare, fmt.Appendf(doc, "\nkernel:\n  args: [%s]\n", strings.Join(args, ", ")), 0o644))
	made := func(name, doc string, joins bool) *subject {
		s := &subject{name: name, golden: filepath.Join(b.dir, strings.Fields(name)[0]+".raw"), joins: joins, at: map[string][]float64{}, cpu: map[string][]float64{}, units: map[string][]float64{}, work: map[string][]float64{}}
		if doc != "" {
			b.run(bin, "build", doc, "--output", s.golden, "--lock", s.golden+".lock")
		}
		return s
	}
	subjects := []*subject{made("base alone, to multi-user.target", bare, false)}
	if before := os.Getenv("EDGEBAKE_BOOT_BEFORE"); before != "" {
		s := made("before", "", true)
		s.golden = before
		subjects = append(subjects, s)
	}
	return append(subjects, made("now", filepath.Join(b.root, quickstart), true))
}

// start starts the cluster that the nodes join.
func (b *world) start() {
	progs, err := lab.CachedPrograms(b.Context(), lab.KubernetesVersion, b.Output())
	b.must(err)
	b.net, err = b.lab.NewNamespace(b.Context())
	b.must(err)
	b.cluster, err = b.lab.StartCluster(b.Context(), progs, b.net, 1)
	b.must(err)
	b.must(b.cluster.LetLogsBeRead(b.Context()))
}

// boot boots a machine from a fresh copy and records the times of milestones.
func (b *world) boot(s *subject) {
	b.boots++
	name := fmt.Sprintf("boot-%d", b.boots)
	image := s.golden
	if s.joins {
		text, err := lab.Site{Cluster: b.cluster, NodeName: name, Address: fmt.Sprintf("%s/%d", b.net.GuestAddr(0), lab.GuestsCIDR), Gateway: lab.Gateway}.YAML()
		b.must(err)
		site := filepath.Join(b.dir, name+".yaml")
		b.must(os.WriteFile(site, []byte(text), 0o600))
		image = filepath.Join(b.dir, name+".raw")
		b.run(filepath.Join(b.dir, "edgebake"), "stamp", s.golden, site, "--output", image)
		defer os.Remove(image)
	}
	var mu sync.Mutex
	var vm *lab.VM
	spent := map[time.Duration]time.Duration{} // keyed by the time of each line
	each := func(l lab.Line) {
		mu.Lock()
		defer mu.Unlock()
		if vm != nil { // no value if the VM has ended or is not known yet
			spent[l.At], _ = vm.CPU()
		}
	}
	started, err := b.lab.StartVM(b.Context(), lab.VMConfig{Name: name, Image: image, Disk: 8 << 30, Net: b.net, Accel: os.Getenv("EDGEBAKE_ACCEL"), EachLine: each})
	b.must(err)
	mu.Lock()
	vm = started
	mu.Unlock()
	by := func(at time.Duration) time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return spent[at]
	}
	defer func() {
		vm.Cut()
		os.Remove(vm.Overlay)
	}()
	ctx, cancel := vm.Patience(b.Context(), 20*time.Minute)
	defer cancel()
	if !s.joins {
		line, _, err := vm.Serial.Expect(ctx, 0, regexp.MustCompile(`Reached target .*multi-user\.target`))
		b.must(err)
		cpu, err := vm.CPU()
		b.must(err)
		for _, e := range vm.Serial.Events() {
			s.note(e.What, e.At)
			s.used(e.What, by(e.At))
		}
		s.note("multi-user.target", line.At)
		s.used("multi-user.target", cpu)
		return
	}
	_, err = b.cluster.WaitNode(ctx, vm, name, lab.Ready)
	b.must(err)
	ready := vm.Serial.Note("Ready")
	cpu, err := vm.CPU()
	b.must(err)
	_, _, err = vm.Serial.Expect(ctx, 0, lab.FirstBootDone)
	b.must(err)
	for _, e := range vm.Serial.Events() {
		if !strings.HasPrefix(e.What, "since the kernel") {
			what, _, _ := strings.Cut(e.What, ":")
			s.note(what, e.At)
			s.used(what, by(e.At))
		}
	}
	s.note(ready.What, ready.At)
	s.used(ready.What, cpu)
	out, err := b.cluster.OnNode(ctx, vm, name, hello, onNode)
	b.must(err)
	s.account(out)
	b.Logf("%s, %s:\n%s", s.name, name, s.last)
}

// onNode prints systemd's report of the boot, and the times at which kubelet started and was ready,
// in microseconds since the kernel's start.
const onNode = `systemd-analyze time --no-pager
systemd-analyze critical-chain --no-pager firstboot.service containerd.service systemd-networkd.service ipvscare.service
echo ----blame
systemd-analyze blame --no-pager
echo ----kubelet
journalctl -u kubelet.service -o json --output-fields=MESSAGE,_PID --no-pager | grep -e 'Starting to serve\|Started kubelet' | head -n 4
echo ----units
systemctl show -p Id,CPUUsageNSec,InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic '*' | paste -sd ' ' | sed 's/  /\n/g'`

// worked matches a unit in the last part of onNode's output, and the nanoseconds of processor time
// that it used.
var worked = regexp.MustCompile(`CPUUsageNSec=(\d+) Id=(\S+)`)

// blamed matches a line of systemd-analyze blame.
var blamed = regexp.MustCompile(`^\s*((?:\d+min )?(?:[\d.]+m?s)?) (\S+)$`)

// account parses the output of onNode.
func (s *subject) account(out string) {
	chain, rest, _ := strings.Cut(out, "----blame\n")
	blame, rest, _ := strings.Cut(rest, "----kubelet\n")
	kubelet, units, _ := strings.Cut(rest, "----units\n")
	s.last = chain + "\n" + units
	for line := range strings.Lines(blame) {
		if m := blamed.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil {
			d, err := time.ParseDuration(strings.ReplaceAll(strings.ReplaceAll(m[1], "min ", "m"), " ", ""))
			if err == nil {
				s.units[m[2]] = append(s.units[m[2]], d.Seconds())
			}
		}
	}
	for line := range strings.Lines(units) {
		if m := worked.FindStringSubmatch(line); m != nil {
			if ns, err := strconv.ParseInt(m[1], 10, 64); err == nil {
				s.work[m[2]] = append(s.work[m[2]], float64(ns)/1e9)
			}
		}
	}
	// Kubelet's own start ends with the line in which kubelet reports it.
	var up int64
	for line := range strings.Lines(kubelet) {
		var e struct {
			At string `json:"__MONOTONIC_TIMESTAMP"`
		}
		if json.Unmarshal([]byte(line), &e) == nil {
			if at, err := strconv.ParseInt(e.At, 10, 64); err == nil {
				up = max(up, at)
			}
		}
	}
	if m := regexp.MustCompile(`Id=kubelet\.service .*`).FindString(units); m != "" {
		if f := regexp.MustCompile(`ActiveEnterTimestampMonotonic=(\d+)`).FindStringSubmatch(m); f != nil {
			if from, err := strconv.ParseInt(f[1], 10, 64); err == nil && up > from {
				s.note("kubelet's own start", time.Duration(up-from)*time.Microsecond)
			}
		}
	}
}

// report returns the page for results.
func report(subjects []*subject, runs int) string {
	var t strings.Builder
	fmt.Fprintf(&t, "# From power-on to a Ready node\n\nMade by `make bench` (test/bench/boot). %d boots each, in turns, %d processors, accelerator %s, the example's image (%s) in QEMU beside its cluster on the same computer.\n"+
		"Load average at the end: %s. Seconds are medians.\n\n", runs, runtime.NumCPU(), cmp.Or(os.Getenv("EDGEBAKE_ACCEL"), "tcg"), quickstart,
		bench.Load())
	var order []string
	for _, s := range slices.Backward(subjects) {
		for _, what := range s.order {
			if !slices.Contains(order, what) {
				order = append(order, what)
			}
		}
	}
	heads := func(first string) {
		fmt.Fprintf(&t, "| %s |", first)
		for _, s := range subjects {
			fmt.Fprintf(&t, " %s |", s.name)
		}
		t.WriteString("\n|---|" + strings.Repeat("---|", len(subjects)) + "\n")
	}
	row := func(what string, of func(*subject) []float64) {
		fmt.Fprintf(&t, "| %s |", what)
		for _, s := range subjects {
			if v := of(s); len(v) > 0 {
				fmt.Fprintf(&t, " %.1f |", bench.Median(v))
			} else {
				t.WriteString(" |")
			}
		}
		t.WriteString("\n")
	}
	heads("from power-on")
	for _, what := range order {
		row(what, func(s *subject) []float64 { return s.at[what] })
	}
	bare, now := subjects[0], subjects[len(subjects)-1]
	base := bench.Median(bare.at["multi-user.target"]) + bench.Median(now.at["kubelet's own start"])
	fmt.Fprintf(&t, "\nThe base alone and kubelet's own start take %.1f s together; promised is Ready in %.1f times that, and in %.0f s on two quiet processors without KVM.\n\n", base, promised, goal)
	for _, s := range subjects[1:] {
		fmt.Fprintf(&t, "- %s: Ready after %.1f s, %.2f times.\n", s.name, bench.Median(s.at["Ready"]), bench.Median(s.at["Ready"])/base)
	}
	t.WriteString("\nProcessor seconds that QEMU had used by then, of both processors. They hardly depend on what else the computer does:\n\n")
	heads("by")
	for _, what := range order {
		if slices.ContainsFunc(subjects, func(s *subject) bool { return len(s.cpu[what]) > 0 }) {
			row(what, func(s *subject) []float64 { return s.cpu[what] })
		}
	}
	// ofUnits writes a table of the units that take at least half a second in any subject.
	ofUnits := func(of func(*subject) map[string][]float64) {
		heads("unit")
		most := map[string]float64{}
		for _, s := range subjects {
			for u, v := range of(s) {
				most[u] = max(most[u], bench.Median(v))
			}
		}
		for _, u := range slices.SortedFunc(maps.Keys(most), func(a, b string) int { return cmp.Or(cmp.Compare(most[b], most[a]), cmp.Compare(a, b)) }) {
			if most[u] >= 0.5 {
				row("`"+u+"`", func(s *subject) []float64 { return of(s)[u] })
			}
		}
	}
	t.WriteString("\nWhat systemd says of each unit (`systemd-analyze blame`; they run side by side, so sums mean nothing), from half a second on:\n\n")
	ofUnits(func(s *subject) map[string][]float64 { return s.units })
	t.WriteString("\nProcessor seconds of each unit's processes by then, and a moment later, when a pod has asked (a slice counts those in it; `init.scope` is systemd):\n\n")
	ofUnits(func(s *subject) map[string][]float64 { return s.work })
	return t.String()
}
