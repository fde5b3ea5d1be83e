// Package e2e tests the whole chain as a user would run it, with real parts: the edgebake command
// bakes and stamps, QEMU boots through UEFI firmware, and unmodified kubeadm joins a cluster. A
// network namespace has a bridge and a tap for each machine. The tests need root.
package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

const (
	pauseImage = "edgebake.test/pause:1"
	helloImage = "edgebake.test/hello:1"
	// bootLimit is about thirty times the time from power-on to Ready on an idle computer without
	// KVM. If a machine gives up, its test fails at once.
	bootLimit = 25 * time.Minute
)

// parts are shared by the tests of this package. They are made once and not changed.
type parts struct {
	root   string // of the repository
	bin    string // edgebake
	golden string // image
	progs  *lab.Programs
}

var made = sync.OnceValues(makeParts)

// need returns the shared parts. If this computer lacks root or a program, the test is skipped; in
// CI it fails.
func need(t *testing.T) *parts {
	t.Helper()
	if testing.Short() {
		t.Skip("with -short: `make test` boots only the machine of the demo")
	}
	var missing []string
	if os.Geteuid() != 0 {
		missing = append(missing, "root")
	}
	for _, tool := range []string{"qemu-system-x86_64", "qemu-img", "ip", "mmdebstrap"} {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	if len(missing) > 0 {
		desk.Lacks(t, "the end-to-end test needs %s (`make deps` installs programs; sudo gives root)", strings.Join(missing, ", "))
	}
	p, err := made()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func makeParts() (*parts, error) {
	ctx := context.Background()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		return nil, err
	}
	// A developer may name another document in order to examine a node.
	image := cmp.Or(os.Getenv("EDGEBAKE_E2E_IMAGE"), "configs/examples/quickstart.yaml")
	p := &parts{root: root, bin: filepath.Join(root, "bin", "edgebake"), golden: filepath.Join(root, "build", "e2e", "golden.raw")}
	for _, step := range [][]string{
		{"go", "build", "-trimpath", "-o", "bin/", "./cmd/..."},
		{"go", "run", "./test/images", "-o", "build/images"},
		{"mkdir", "-p", "build/e2e"},
		{p.bin, "build", image, "--output", p.golden, "--force", "--lock", "build/e2e/quickstart.lock"},
	} {
		start := time.Now()
		if err := p.run(ctx, step...); err != nil {
			return nil, err
		}
		fmt.Printf("%6.1f s  %s\n", time.Since(start).Seconds(), strings.Join(step[:2], " "))
	}
	p.progs, err = lab.CachedPrograms(ctx, lab.KubernetesVersion, os.Stdout)
	return p, err
}

func (p *parts) run(ctx context.Context, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = p.root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return nil
}

func nightly(t *testing.T) {
	t.Helper()
	if os.Getenv("EDGEBAKE_NIGHTLY") == "" {
		t.Skip("a long test, which `make nightly` runs")
	}
}

// world is one test's cluster and network.
type world struct {
	*parts
	t   *testing.T
	lab *lab.Lab
	net *lab.Namespace
	c   *lab.Cluster

	record  bool   // record the machines' writes to their disks
	key     string // file of the key that signs the images of toUpdate; "": they are not signed
	scripts int    // number of scripts run on nodes
	disks   int    // number of disks read
}

func newWorld(t *testing.T, masters int) *world {
	t.Helper()
	return newWorldOf(t, need(t), masters)
}

func newWorldOf(t *testing.T, p *parts, masters int) *world {
	t.Helper()
	return newWorldIn(t, p, masters, false)
}

// newWorldIn is newWorldOf, optionally with masters that use only IPv6.
func newWorldIn(t *testing.T, p *parts, masters int, ipv6 bool) *world {
	t.Helper()
	w := newNet(t, p)
	w.net.IPv6 = ipv6
	var err error
	if w.c, err = w.lab.StartCluster(t.Context(), w.progs, w.net, masters); err != nil {
		t.Fatal(err)
	}
	return w
}

// newNet returns a world without a cluster.
func newNet(t *testing.T, p *parts) *world {
	t.Helper()
	w := &world{parts: p, t: t}
	dir := filepath.Join(w.root, "build", "e2e", t.Name())
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	var err error
	if w.lab, err = lab.New(dir, t.Output()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the ends of the logs in %s:\n%s", dir, w.lab.Evidence())
		}
		if err := w.lab.Close(); err != nil {
			t.Error(err)
		}
		if !t.Failed() {
			os.RemoveAll(dir)
		}
	})
	if w.net, err = w.lab.NewNamespace(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w
}

// boot stamps a Site onto a copy of the golden image and switches on a machine with it.
func (w *world) boot(guest int, site lab.Site) *lab.VM {
	w.t.Helper()
	return w.bootWith(lab.VMConfig{}, guest, site)
}

// bootWith is like boot, for a machine with special hardware.
func (w *world) bootWith(cfg lab.VMConfig, guest int, site lab.Site) *lab.VM {
	w.t.Helper()
	image := filepath.Join(w.lab.Dir, site.NodeName+".raw")
	file := w.site(guest, site)
	start := time.Now()
	if err := w.run(w.t.Context(), w.bin, "stamp", w.golden, file, "--output", image); err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("stamped in %.2f s", time.Since(start).Seconds())
	cfg.Name, cfg.Image, cfg.Guest = site.NodeName, image, guest
	return w.start(cfg)
}

// start switches a machine on in the test's network.
func (w *world) start(cfg lab.VMConfig) *lab.VM {
	w.t.Helper()
	cfg.Net, cfg.Disk, cfg.Accel, cfg.Record = w.net, cmp.Or(cfg.Disk, 8<<30), os.Getenv("EDGEBAKE_ACCEL"), w.record
	vm, err := w.lab.StartVM(w.t.Context(), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return vm
}

// site writes the Site of a guest. If the Site has no address, it gets the guest's own.
func (w *world) site(guest int, site lab.Site, more ...string) (file string) {
	w.t.Helper()
	site.Cluster = w.c
	if site.Address == "" {
		site.Address = w.net.GuestAddr(guest).String() + "/" + strconv.Itoa(lab.GuestsCIDR)
		site.Gateway = lab.Gateway
	}
	text, err := site.YAML()
	if err != nil {
		w.t.Fatal(err)
	}
	text += strings.Join(append(more, ""), "\n")
	file = filepath.Join(w.lab.Dir, site.NodeName+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return file
}

// ready waits until the machine's node is Ready in this boot and first boot has reported that.
func (w *world) ready(vm *lab.VM, before *lab.Object) *lab.Object {
	w.t.Helper()
	node, err := w.becomesReady(vm, before)
	if err != nil {
		w.t.Fatal(err)
	}
	return node
}

// becomesReady is like ready, but returns an error instead of failing the test.
func (w *world) becomesReady(vm *lab.VM, before *lab.Object) (*lab.Object, error) {
	ctx, cancel := vm.Patience(w.t.Context(), bootLimit)
	defer cancel()
	node, err := w.c.WaitNode(ctx, vm, vm.Node, func(o *lab.Object) (bool, string) {
		if before != nil && o.Status.NodeInfo.BootID == before.Status.NodeInfo.BootID {
			return false, "the Node has the boot ID of the previous boot"
		}
		return lab.Ready(o)
	})
	if err != nil {
		return nil, err
	}
	events := append(vm.Serial.Events(), vm.Serial.Note("node Ready"))
	if _, _, err := vm.Serial.Expect(ctx, 0, lab.FirstBootDone); err != nil {
		return nil, err
	}
	var b strings.Builder
	lab.PrintTimeline(&b, append(events, vm.Serial.Note("first boot done")))
	w.t.Logf("%s, from power-on:\n%s", vm.Node, b.String())
	return node, nil
}

func (w *world) off(vm *lab.VM) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), 10*time.Minute)
	defer cancel()
	if err := vm.Off(ctx); err != nil {
		w.t.Fatal(err)
	}
}

// disk returns a copy of a stopped machine's disk, which exists until the test ends.
func (w *world) disk(vm *lab.VM) string {
	w.t.Helper()
	w.disks++ // number the copies, because a machine may run from an earlier copy
	path := filepath.Join(w.lab.Dir, fmt.Sprintf("%s.disk%d.raw", vm.Name, w.disks))
	if err := vm.RawDisk(w.t.Context(), path); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { os.Remove(path) })
	return path
}

// onNode runs a script on the node and returns its output.
func (w *world) onNode(vm *lab.VM, script string) (string, error) {
	ctx, cancel := vm.Patience(w.t.Context(), 20*time.Minute)
	defer cancel()
	w.scripts++
	return w.c.OnNode(ctx, vm, fmt.Sprintf("script-%d", w.scripts), helloImage, script)
}

func (w *world) mustOnNode(vm *lab.VM, script string) string {
	w.t.Helper()
	out, err := w.onNode(vm, script)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// expect waits for a line on the console, logs its time, and returns the mark after it.
func (w *world) expect(vm *lab.VM, from int, line string) int {
	w.t.Helper()
	l, mark := w.hear(vm, from, line)
	w.t.Logf("%6.1f s from power-on: %s", l.At.Seconds(), l.Text)
	return mark
}

// hear waits for a line on the console, and returns it and the mark after it.
func (w *world) hear(vm *lab.VM, from int, line string) (lab.Line, int) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), bootLimit)
	defer cancel()
	l, mark, err := vm.Serial.Expect(ctx, from, regexp.MustCompile(line))
	if err != nil {
		w.t.Fatal(err)
	}
	return l, mark
}

// secretForms returns the encodings in which a secret may be on a disk.
func secretForms(secret string) map[string][]byte {
	forms := map[string][]byte{"in plain text": []byte(secret)}
	for shift := range 3 {
		// There are three alignments of base64. The characters at the ends also encode the
		// neighbouring bytes, so omit them.
		enc := base64.StdEncoding.EncodeToString(append(bytes.Repeat([]byte{0}, shift), secret...))
		from := []int{0, 2, 3}[shift]
		forms["in base64, shifted by "+strconv.Itoa(shift)] = []byte(enc[from : len(enc)-4])
	}
	return forms
}

// noSecret checks that the token's secret is neither on a machine's disk, including free blocks,
// nor on its console.
func (w *world) noSecret(vm *lab.VM, disk string) {
	w.t.Helper()
	_, secret, _ := strings.Cut(w.c.Token, ".")
	for _, file := range []string{disk, vm.SerialLog()} {
		for how, form := range secretForms(secret) {
			hits, err := lab.FindInFile(file, form)
			if err != nil {
				w.t.Fatal(err)
			}
			if len(hits) > 0 {
				w.t.Errorf("the token's secret, %s, is in %s at %d", how, filepath.Base(file), hits)
			}
		}
	}
}

// TestNodeJoinsAndComesBack checks that a node joins although the first of three masters is dead
// and the power fails while kubeadm runs. The node must run a pod from a baked image, forget its
// token, come back after a reboot with another master dead, and keep its images when its disk is
// full.
func TestNodeJoinsAndComesBack(t *testing.T) {
	pace.Takes(t, 350*time.Second)
	w := newWorld(t, 3)
	w.record = true
	w.c.APIServers[0].Kill()
	vm := w.boot(0, lab.Site{NodeName: "edge1", KubeletArgs: quickGC})
	w.expect(vm, 0, `edgebake: .* waiting for kubeadm join`)
	time.Sleep(2 * time.Second) // into the middle of the phase
	odd := false
	w.cut(vm, func() bool { odd = !odd; return odd })
	node := w.ready(vm, nil)

	if got := node.Status.NodeInfo.KubeletVersion; got != lab.KubernetesVersion {
		t.Errorf("kubelet is %s, want %s", got, lab.KubernetesVersion)
	}
	if got := node.Status.NodeInfo.ContainerRuntimeVersion; !strings.HasPrefix(got, "containerd://2.") {
		t.Errorf("container runtime is %s", got)
	}
	if node.Metadata.Labels["edgebake.test/lab"] != "yes" {
		t.Errorf("the site's label is not on the node: %v", node.Metadata.Labels)
	}
	if a := node.Status.Addresses; len(a) == 0 || a[0].Address != w.net.GuestAddr(0).String() {
		t.Errorf("addresses %v, want %v", a, w.net.GuestAddr(0))
	}
	if err := w.c.Pod(t.Context(), "hello", helloImage, vm.Node); err != nil {
		t.Fatal(err)
	}
	w.podOf(vm, "if-not-present", "IfNotPresent")
	w.podRuns(vm, "hello")
	w.podRuns(vm, "if-not-present")

	w.off(vm)
	disk := w.disk(vm)
	w.noSecret(vm, disk)
	w.checkDisk(disk)

	if err := w.c.StartAPIServer(0); err != nil {
		t.Fatal(err)
	}
	if err := w.c.WaitAPIServer(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	w.c.APIServers[1].Kill()
	if err := vm.On(); err != nil {
		t.Fatal(err)
	}
	again := w.ready(vm, node)
	if again.Metadata.UID != node.Metadata.UID {
		t.Error("after the reboot the Node has another UID: the machine joined again")
	}
	w.podRuns(vm, "hello")
	w.podRuns(vm, "if-not-present")
	w.underDiskPressure(vm)
}

func (w *world) podRuns(vm *lab.VM, name string) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), 15*time.Minute)
	defer cancel()
	if _, err := w.c.WaitPod(ctx, vm, name); err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("%6.1f s from power-on: pod %s runs", vm.Serial.Note("").At.Seconds(), name)
}

// checkDisk checks the disk of a machine that is off: the partition table and file systems are
// valid, DATA fills the device, and the slot has first boot's report.
func (w *world) checkDisk(disk string) {
	w.t.Helper()
	w.oracle("No problems found", "sgdisk", "-v", disk)
	info, err := media.Inspect(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range info.Partitions {
		if p.FS == "ext4" {
			w.oracle("", "e2fsck", "-fn", fmt.Sprintf("%s?offset=%d", disk, p.Start))
		}
		if p.Label == ondisk.LabelData && p.Start+p.Size < info.Size-4<<20 {
			w.t.Errorf("DATA ends at %d of a disk of %d bytes: it was not grown", p.Start+p.Size, info.Size)
		}
	}
	if !regexp.MustCompile(`(?m)^result: +done$`).MatchString(info.Slot.Report) {
		w.t.Errorf("the report on the slot does not say that first boot is done:\n%s", info.Slot.Report)
	}
}

// oracle runs a program that checks the disk. The program's output must contain want.
func (w *world) oracle(want string, argv ...string) {
	w.t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) && os.Getenv("CI") == "" {
		w.t.Logf("NOT CHECKED by %s, which is not installed", argv[0])
		return
	}
	if err != nil || !bytes.Contains(out, []byte(want)) {
		w.t.Errorf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
}

// TestPowerCuts cuts the power at random moments of first boot, several times in each round. In the
// end the node must become Ready.
func TestPowerCuts(t *testing.T) {
	nightly(t)
	r := chance(t)
	w := newWorld(t, 3)
	w.record = true
	for round := range rounds(t, 10) {
		name := fmt.Sprintf("cut%d", round+1)
		vm := w.boot(0, lab.Site{NodeName: name})
		for range 1 + r.IntN(3) {
			w.cutDuringFirstBoot(vm, time.Duration(r.Int64N(int64(60*time.Second))), func() bool { return r.IntN(2) == 0 })
		}
		w.ready(vm, nil)
		w.off(vm)
		w.noSecret(vm, w.disk(vm))
	}
}

// chance returns the source of all randomness. It logs the seed, so that a run can be repeated.
func chance(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("EDGEBAKE_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("EDGEBAKE_SEED=%d repeats these moments", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// rounds returns the number of rounds of a test.
func rounds(t *testing.T, n int) int {
	t.Helper()
	if s := os.Getenv("EDGEBAKE_ROUNDS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

var firstBootStarts = regexp.MustCompile(`edgebake: \[1[]/]`)

// cutDuringFirstBoot cuts the power at a time after the start of first boot. The disk loses those
// unflushed writes for which lose returns true.
func (w *world) cutDuringFirstBoot(vm *lab.VM, after time.Duration, lose func() bool) {
	w.t.Helper()
	ctx, cancel := vm.Patience(w.t.Context(), bootLimit)
	defer cancel()
	if _, _, err := vm.Serial.Expect(ctx, 0, firstBootStarts); err != nil {
		w.t.Fatal(err)
	}
	time.Sleep(after)
	w.cut(vm, lose)
}

// cut cuts the power and switches the machine on again.
func (w *world) cut(vm *lab.VM, lose func() bool) {
	w.t.Helper()
	w.t.Logf("%s: cut %.1f s after power-on, after:\n%s", vm.Name, vm.Serial.Note("").At.Seconds(), vm.Serial.Tail(2))
	loss, err := vm.CutPower(lose)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("%s: the disk kept %d writes, lost %d, and %d more stayed by chance", vm.Name, loss.Kept, loss.Dropped, loss.Chance)
	if err := vm.On(); err != nil {
		w.t.Fatal(err)
	}
}
