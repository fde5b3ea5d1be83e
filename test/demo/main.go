// Command demo shows the whole chain on this computer, on real parts: it
// bakes an image, starts a small Kubernetes control plane, stamps a site onto
// the image, boots it in QEMU and follows first boot until the node is Ready
// and a pod runs. `make demo` runs it; it needs no root.
//
// All it makes lies in build/demo and in edgebake's cache; all it starts it
// ends. What took long the first time comes from the cache the second.
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

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/test/lab"
)

const (
	dir   = "build/demo"
	node  = "demo-node"
	pod   = "hello"
	image = "edgebake.test/hello:1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	keep := flag.Bool("keep", false, "keep cluster and node running until Ctrl-C")
	flag.Parse()
	if err := run(ctx, os.Stdout, *keep); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, keep bool) (err error) {
	d := demo{out: out, start: time.Now()}
	if _, err := os.Stat("configs/examples/quickstart.yaml"); err != nil {
		return errors.New("run it from the root of the repository, as `make demo` does")
	}

	// A KVM that hangs takes a while to be found out; meanwhile there is
	// enough to do.
	ctx, cancel := context.WithCancel(ctx)
	kvm := d.probe(ctx)
	defer func() {
		cancel()
		for range kvm { // until it has ended its guest
		}
	}()

	d.step("Making the container images pause and hello", "a few seconds")
	if err := d.command(ctx, "go", "run", "./test/images", "-o", "build/images"); err != nil {
		return err
	}

	golden := filepath.Join("build", "quickstart.raw")
	d.step("Baking configs/examples/quickstart.yaml into "+golden,
		"the first time about 6 minutes: Kubernetes and containerd are compiled; then 15 seconds")
	if err := d.command(ctx, "bin/edgebake", "build", "configs/examples/quickstart.yaml", "--output", golden, "--force", "--lock", filepath.Join("build", "quickstart.lock")); err != nil {
		return err
	}

	d.step("Getting a control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler",
		"the first time about 3 minutes: they are compiled too; then nothing")
	cacheDir, err := fetch.DefaultDir()
	if err != nil {
		return err
	}
	cache, err := fetch.Open(cacheDir)
	if err != nil {
		return err
	}
	progs, err := lab.BuildPrograms(ctx, cache, lab.KubernetesVersion, out)
	if err != nil {
		return err
	}

	d.step("Starting it on this computer's loopback", "about 15 seconds")
	l, err := lab.New(dir, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	network, err := lab.FreeLoopback()
	if err != nil {
		return err
	}
	cluster, err := l.StartCluster(ctx, progs, network, 1)
	if err != nil {
		return err
	}

	stamped := filepath.Join(dir, "node.raw")
	d.step("Stamping a site onto a copy of the image: who the node is, and its way into the cluster", "under a second")
	site, err := lab.Site{Cluster: cluster, NodeName: node}.YAML()
	if err != nil {
		return err
	}
	siteFile := filepath.Join(dir, "site.yaml")
	if err := os.WriteFile(siteFile, []byte(site), 0o600); err != nil {
		return err
	}
	if err := d.command(ctx, "bin/edgebake", "stamp", golden, siteFile, "--output", stamped, "--force"); err != nil {
		return err
	}

	a := <-kvm
	if a.err != nil {
		return a.err
	}
	if a.why != "" {
		fmt.Fprintf(out, "\nNo KVM here (%s): QEMU emulates the processor.\n", a.why)
	}
	wait := "Ready in a minute on a quiet computer, in a few on a busy one"
	if a.accel == qemu.KVM {
		wait = "Ready in about 20 seconds"
	}
	d.step("Switching the machine on", wait)
	vm, err := l.StartVM(ctx, lab.VMConfig{Name: node, Image: stamped, Disk: 8 << 30, Net: network, Accel: a.accel,
		EachLine: d.follow})
	if err != nil {
		return err
	}
	events, err := d.watch(ctx, cluster, vm)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, d.where(vm))
	}

	for _, args := range [][]string{{"get", "nodes", "-o", "wide"}, {"get", "pods", "-o", "wide"}} {
		text, err := cluster.Kubectl(ctx, args...)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "\n$ kubectl %s\n%s", strings.Join(args, " "), text)
	}
	fmt.Fprintf(out, "\nFrom power-on:\n")
	lab.PrintTimeline(out, append(vm.Serial.Events(), events...))
	fmt.Fprintf(out, "\nThe node is Ready and a pod runs on it. The whole demo took %.0f s.\n", time.Since(d.start).Seconds())
	fmt.Fprintf(out, "Its files are in %s; the golden image is %s.\n", dir, golden)
	if keep {
		fmt.Fprintf(out, "\nIn another terminal:\n  export KUBECONFIG=%s\n  %s get nodes\nCtrl-C ends it all.\n", cluster.Kubeconfig, progs.Kubectl)
		<-ctx.Done()
	} else {
		fmt.Fprintln(out, "`bin/demo -keep` leaves cluster and node running until Ctrl-C.")
	}
	return nil
}

// demo is what the terminal shows.
type demo struct {
	out   io.Writer
	start time.Time
	n     int
}

// step says what comes next and how long it takes.
func (d *demo) step(what, wait string) {
	d.n++
	fmt.Fprintf(d.out, "\n[%d/6 at %3.0f s] %s (%s)\n", d.n, time.Since(d.start).Seconds(), what, wait)
}

// command runs one program of ours and shows it, so that a person could type
// the same.
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

// accelerator is how the processor is had, and why not by KVM.
type accelerator struct {
	accel, why string
	err        error
}

// probe finds out whether KVM works, or takes what EDGEBAKE_ACCEL says. The
// channel has one answer and is closed when nothing runs any more.
func (d *demo) probe(ctx context.Context) <-chan accelerator {
	found := make(chan accelerator, 1)
	if accel := os.Getenv("EDGEBAKE_ACCEL"); accel != "" {
		found <- accelerator{accel: accel}
		close(found)
		return found
	}
	go func() {
		defer close(found)
		prog, err := qemu.Find(ctx, "amd64")
		if err != nil {
			found <- accelerator{err: err}
			return
		}
		fw, err := qemu.FindFirmware(qemu.ShareDirs(), "amd64", false)
		if err != nil {
			found <- accelerator{err: err}
			return
		}
		accel, why := qemu.Probe(ctx, prog, fw, "amd64", qemu.ProbeLimit)
		found <- accelerator{accel: accel, why: why}
	}()
	return found
}

// follow shows the console lines that tell how first boot goes.
func (d *demo) follow(l lab.Line) {
	_, said, ok := strings.Cut(l.Text, "edgebake: ")
	if strings.Contains(l.Text, "starting Boot") {
		said, ok = "the firmware starts the loader; kernel and systemd say nothing while all is well", true
	}
	if ok {
		fmt.Fprintf(d.out, "  %6.1f s  %s\n", l.At.Seconds(), said)
	}
}

// watch waits for the node and its pod.
func (d *demo) watch(ctx context.Context, c *lab.Cluster, vm *lab.VM) ([]lab.Event, error) {
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
	if err := c.Pod(ctx, pod, image, node); err != nil {
		return nil, err
	}
	if _, err := c.WaitPod(ctx, vm, pod); err != nil {
		return nil, err
	}
	note("pod " + pod + " runs")
	// Its last phase forgets the token, once the node is Ready.
	if _, _, err := vm.Serial.Expect(ctx, 0, lab.FirstBootDone); err != nil {
		return nil, err
	}
	return events, nil
}

func (d *demo) where(vm *lab.VM) string {
	return fmt.Sprintf("The machine's console is in %s, the control plane's logs are in %s.", vm.SerialLog(), dir)
}
