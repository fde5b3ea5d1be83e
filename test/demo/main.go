// Command demo shows all steps on this computer, with real parts. It bakes an image, starts a small
// Kubernetes control plane, stamps a Site onto the image, boots it in QEMU, and follows first boot
// until the node is Ready and a pod runs. `make demo` runs it, without root. With -cluster (`make
// demo-cluster`), the control plane is also a machine that boots from an image.
//
// It writes only to build/demo or build/demo-cluster and to edgebake's cache, and ends everything
// that it starts. Later runs are faster because of the cache.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

const (
	quickstart = "configs/examples/quickstart.yaml"

	dir   = "build/demo"
	node  = "demo-node"
	pod   = "hello"
	image = "edgebake.test/hello:1"

	// quietBoot is the time from power-on until the machine's pod runs, on two idle processors
	// without KVM.
	quietBoot = 100 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	keep := flag.Bool("keep", false, "keep cluster and node running until Ctrl-C")
	arch := flag.String("arch", "amd64", "architecture of the node: amd64 or arm64")
	cluster := flag.Bool("cluster", false, "show a whole cluster made from images: one control-plane node and one worker")
	flag.Parse()
	d := &demo{out: os.Stdout, start: time.Now(), arch: *arch, keep: *keep}
	show := d.showNode
	if *cluster {
		show = d.showCluster
	}
	if err := d.run(ctx, show); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

// run runs one of the demonstrations while it finds out whether KVM works. That takes a while if
// KVM hangs.
func (d *demo) run(ctx context.Context, show func(context.Context) error) error {
	if _, err := os.Stat(quickstart); err != nil {
		return errors.New("run this from the root of the repository, as `make demo` does")
	}
	ctx, cancel := context.WithCancel(ctx)
	d.kvm = d.probe(ctx)
	defer func() {
		cancel()
		for range d.kvm { // wait until the probe's VM has ended
		}
	}()
	return show(ctx)
}

// showNode demonstrates a node that joins a cluster on this computer.
func (d *demo) showNode(ctx context.Context) (err error) {
	golden, err := d.bake(ctx)
	if err != nil {
		return err
	}
	d.step("Getting a control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler",
		"the first time 3 to 5 minutes: they are compiled too; later no time")
	progs, err := lab.CachedPrograms(ctx, lab.KubernetesVersion, d.out)
	if err != nil {
		return err
	}
	d.step("Starting the control plane on this computer's loopback address", "about 15 seconds")
	l, err := lab.New(dir, d.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	cluster, network, err := l.StartLocalCluster(ctx, progs)
	if err != nil {
		return err
	}
	stamped, err := d.stamp(ctx, cluster, golden)
	if err != nil {
		return err
	}
	a, err := d.accelerator("processor")
	if err != nil {
		return err
	}
	wait := "Ready in a minute on a quiet computer, in a few on a busy one"
	if a.accel == qemu.KVM {
		wait = "Ready in about 20 seconds"
	}
	d.step("Switching the machine on", wait)
	on := time.Now()
	vm, err := l.StartVM(ctx, lab.VMConfig{Name: node, Image: stamped, Arch: d.arch, Disk: 8 << 30, Net: network, Accel: a.accel,
		EachLine: d.follow})
	if err != nil {
		return err
	}
	events, err := d.watch(ctx, cluster, vm, true)
	if err != nil {
		return fmt.Errorf("%w\nThe machine's console is in %s, the control plane's logs are in %s", err, vm.SerialLog(), dir)
	}
	if err := pace.Took("demo", quietBoot, time.Since(on)); err != nil {
		return err
	}
	if err := d.list(ctx, cluster); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nFrom power-on:\n")
	lab.PrintTimeline(d.out, append(vm.Serial.Events(), events...))
	d.finish(ctx, "The node is Ready and a pod runs on it.", dir+"; the golden image is "+golden, "bin/demo -keep", cluster, progs)
	return nil
}

// bake bakes the golden image of a node.
func (d *demo) bake(ctx context.Context) (golden string, err error) {
	d.step("Making the container images pause and hello", "a few seconds")
	if err := d.command(ctx, "go", "run", "./test/images", "-o", "build/images", "-arch", d.imageArchs()); err != nil {
		return "", err
	}
	name := "quickstart"
	wait := "the first time 6 to 9 minutes: Kubernetes and containerd are compiled; then 15 seconds"
	if d.arch != "amd64" {
		name += "-" + d.arch
		wait = "the first time about 10 minutes: Kubernetes and containerd are compiled, and Debian's packages set up in emulation; then 15 seconds"
	}
	golden = filepath.Join("build", name+".raw")
	d.step("Baking "+quickstart+" into "+golden, wait)
	return golden, d.command(ctx, "bin/edgebake", "build", quickstart, "--arch", d.arch, "--output", golden, "--force", "--lock", filepath.Join("build", name+".lock"))
}

// stamp stamps the node's Site onto a copy of the golden image.
func (d *demo) stamp(ctx context.Context, cluster *lab.Cluster, golden string) (stamped string, err error) {
	d.step("Stamping a Site onto a copy of the image: the node's name, its API servers and its token", "under a second")
	site, err := lab.Site{Cluster: cluster, NodeName: node}.YAML()
	if err != nil {
		return "", err
	}
	siteFile := filepath.Join(dir, "site.yaml")
	if err := os.WriteFile(siteFile, []byte(site), 0o600); err != nil {
		return "", err
	}
	stamped = filepath.Join(dir, "node.raw")
	return stamped, d.command(ctx, "bin/edgebake", "stamp", golden, siteFile, "--output", stamped, "--force")
}

// list prints the cluster's nodes and pods with kubectl.
func (d *demo) list(ctx context.Context, cluster *lab.Cluster) error {
	for _, args := range [][]string{{"get", "nodes", "-o", "wide"}, {"get", "pods", "-o", "wide"}} {
		text, err := cluster.Kubectl(ctx, args...)
		if err != nil {
			return err
		}
		fmt.Fprintf(d.out, "\n$ kubectl %s\n%s", strings.Join(args, " "), text)
	}
	return nil
}

// finish prints the result of the demonstration and the place of its files. Then it waits for
// Ctrl-C if keep is set; otherwise it prints the command that would make the demo wait.
func (d *demo) finish(ctx context.Context, result, files, command string, cluster *lab.Cluster, progs *lab.Programs) {
	fmt.Fprintf(d.out, "\n%s The whole demo took %.0f s.\nIts files are in %s.\n", result, time.Since(d.start).Seconds(), files)
	if !d.keep {
		fmt.Fprintf(d.out, "`%s` leaves everything running until Ctrl-C.\n", command)
		return
	}
	fmt.Fprintf(d.out, "\nIn another terminal:\n  export KUBECONFIG=%s\n  %s get nodes\nCtrl-C ends it all.\n", cluster.Kubeconfig, progs.Kubectl)
	<-ctx.Done()
}

// demo prints the steps of the demonstration on the terminal.
type demo struct {
	out   io.Writer
	start time.Time
	arch  string // architecture of the node
	keep  bool   // leave everything running until Ctrl-C
	kvm   <-chan accelerator
	n     int
}

// imageArchs returns the architectures of the container images: the node's and this computer's.
// With both, the cached images also serve demos of the other architecture.
func (d *demo) imageArchs() string {
	if d.arch == "amd64" {
		return d.arch
	}
	return "amd64," + d.arch
}

// step prints the next step and its expected duration.
func (d *demo) step(what, wait string) {
	d.n++
	fmt.Fprintf(d.out, "\n[%d/6 at %3.0f s] %s (%s)\n", d.n, time.Since(d.start).Seconds(), what, wait)
}

// command runs one of edgebake's programs, and prints the command line that a person would type.
func (d *demo) command(ctx context.Context, argv ...string) error {
	fmt.Fprintf(d.out, "$ %s\n", strings.Join(argv, " "))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = d.out, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 15 * time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		return fmt.Errorf("%s: %w", strings.Join(argv[:2], " "), err)
	}
	return nil
}

// accelerator is the result of a probe: the accelerator and, if it is not KVM, the reason.
type accelerator struct {
	accel, why string
	err        error
}

// accelerator waits for the result of the probe, and prints why the processors are emulated.
func (d *demo) accelerator(processors string) (accelerator, error) {
	a := <-d.kvm
	if a.why != "" {
		fmt.Fprintf(d.out, "\nNo KVM here (%s): QEMU emulates the %s.\n", a.why, processors)
	}
	return a, a.err
}

// probe tests whether KVM works, unless EDGEBAKE_ACCEL is set. It sends one result, and closes the
// channel once its VM has ended.
func (d *demo) probe(ctx context.Context) <-chan accelerator {
	found := make(chan accelerator, 1)
	if accel := os.Getenv("EDGEBAKE_ACCEL"); accel != "" {
		found <- accelerator{accel: accel}
		close(found)
		return found
	}
	go func() {
		defer close(found)
		prog, err := qemu.Find(ctx, d.arch)
		if err != nil {
			found <- accelerator{err: err}
			return
		}
		fw, err := qemu.FindFirmware(qemu.ShareDirs(), d.arch, false)
		if err != nil {
			found <- accelerator{err: err}
			return
		}
		accel, why := qemu.Probe(ctx, prog, fw, d.arch, qemu.ProbeLimit)
		found <- accelerator{accel: accel, why: why}
	}()
	return found
}

// follow prints the console lines about first boot.
func (d *demo) follow(l lab.Line) { d.followAs("", l) }

// followAs is like follow, with the machine's name before each line.
func (d *demo) followAs(name string, l lab.Line) {
	_, text, ok := strings.Cut(l.Text, "edgebake: ")
	if strings.Contains(l.Text, "starting Boot") {
		text, ok = "the firmware starts the boot loader; kernel and systemd print only errors", true
	}
	if ok {
		fmt.Fprintf(d.out, "  %6.1f s  %s%s\n", l.At.Seconds(), name, text)
	}
}

// watch waits until the machine's node is Ready and, if runsPod is set, until a pod runs on it.
func (d *demo) watch(ctx context.Context, c *lab.Cluster, vm *lab.VM, runsPod bool) ([]lab.Event, error) {
	node := vm.Name
	ctx, cancel := context.WithTimeoutCause(ctx, 40*time.Minute, errors.New("40 minutes have passed"))
	defer cancel()
	var events []lab.Event
	note := func(what string) {
		e := vm.Serial.Note(what)
		events = append(events, e)
		fmt.Fprintf(d.out, "  %6.1f s  the cluster says: %s\n", e.At.Seconds(), what)
	}
	exists := func(*lab.Object) (bool, string) { return true, "" }
	if _, err := c.WaitNode(ctx, vm, node, exists); err != nil {
		return nil, err
	}
	note("node " + node + " is registered")
	if _, err := c.WaitNode(ctx, vm, node, lab.Ready); err != nil {
		return nil, err
	}
	note("node " + node + " is Ready")
	if runsPod {
		if err := c.Pod(ctx, pod, image, node); err != nil {
			return nil, err
		}
		if _, err := c.WaitPod(ctx, vm, pod); err != nil {
			return nil, err
		}
		note("pod " + pod + " runs")
	}
	// Wait until the last phase of first boot, after the node is Ready, has wiped the token.
	if _, _, err := vm.Serial.Expect(ctx, 0, lab.FirstBootDone); err != nil {
		return nil, err
	}
	return events, nil
}
