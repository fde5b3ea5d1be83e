package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/test/lab"
)

// Machines of the cluster: a control-plane node and a worker.
const (
	clusterDir = "build/demo-cluster"
	master     = "m1"
	worker     = "shop1"
)

// showCluster demonstrates a cluster whose machines all boot from images. It mints and stamps on
// this computer, and switches the worker on before the cluster exists.
func (d *demo) showCluster(ctx context.Context) (err error) {
	if d.arch != "amd64" {
		return errors.New("the demo of a whole cluster supports only amd64; the demo of one node (make demo) also supports arm64")
	}
	l, err := lab.New(clusterDir, d.out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	network, err := l.NewPair()
	if err != nil {
		return err
	}
	minted, err := d.prepareCluster(ctx, network)
	if err != nil {
		return err
	}
	a, err := d.accelerator("processors")
	if err != nil {
		return err
	}
	start := func(vm lab.VMConfig) (*lab.VM, error) {
		vm.Image, vm.Disk, vm.Net, vm.Accel = filepath.Join(clusterDir, vm.Name+".raw"), 8<<30, network, a.accel
		vm.EachLine = func(line lab.Line) { d.followAs(vm.Name+"  ", line) }
		return l.StartVM(ctx, vm)
	}
	d.step("Switching the worker on before its cluster exists", "until it reports that it waits")
	shop, err := start(lab.VMConfig{Name: worker, Guest: 1})
	if err != nil {
		return err
	}
	limited, stop := context.WithTimeoutCause(ctx, 10*time.Minute, errors.New("10 minutes have passed"))
	defer stop()
	if _, _, err := shop.Serial.Expect(limited, 0, lab.WaitsForAPIServer); err != nil {
		return fmt.Errorf("%w\nThe machine's console is in %s", err, shop.SerialLog())
	}
	wait := "a minute on a quiet computer"
	if a.why != "" {
		wait = "seven minutes and more, emulated"
	}
	d.step("Switching the control-plane node on: the cluster begins, and the worker joins it", wait)
	// Choose the port again, because another program may have taken it since.
	if network, err = l.NewPair(); err != nil {
		return err
	}
	outside := network.Outside()
	m1, err := start(lab.VMConfig{Name: master, Guest: 0, NIC: &outside, CPUs: 2, Memory: 2560})
	if err != nil {
		return err
	}
	return d.watchCluster(ctx, l, network, minted, m1, shop)
}

// prepareCluster makes the keys of the cluster and the disk image of each machine.
func (d *demo) prepareCluster(ctx context.Context, network lab.Pair) (minted string, err error) {
	images, err := d.bakeCluster(ctx)
	if err != nil {
		return "", err
	}
	if minted, err = d.mint(ctx, network); err != nil {
		return "", err
	}
	d.step("Stamping each machine's Site onto a copy of its image", "a second")
	for _, name := range []string{master, worker} {
		if err := d.command(ctx, "bin/edgebake", "stamp", images[name], filepath.Join(minted, "sites", name+".yaml"), "--output", filepath.Join(clusterDir, name+".raw"), "--force"); err != nil {
			return "", err
		}
	}
	return minted, nil
}

// watchCluster waits until both machines are Ready and a pod runs on the worker, and prints the
// result.
func (d *demo) watchCluster(ctx context.Context, l *lab.Lab, network lab.Pair, minted string, m1, shop *lab.VM) error {
	progs, err := lab.CachedPrograms(ctx, lab.KubernetesVersion, d.out)
	if err != nil {
		return err
	}
	kubeconfig, err := adminConfig(minted, network)
	if err != nil {
		return err
	}
	cluster, err := l.Attach(progs, network, filepath.Join(minted, "pki", "ca.crt"), kubeconfig, network.GuestAddr(0).String()+":6443")
	if err != nil {
		return err
	}
	timelines := map[*lab.VM][]lab.Event{}
	for _, vm := range []*lab.VM{m1, shop} {
		if timelines[vm], err = d.watch(ctx, cluster, vm, vm == shop); err != nil {
			return fmt.Errorf("%w\nThe machines' consoles are in %s and %s", err, m1.SerialLog(), shop.SerialLog())
		}
	}
	if err := d.list(ctx, cluster); err != nil {
		return err
	}
	for _, vm := range []*lab.VM{m1, shop} {
		fmt.Fprintf(d.out, "\n%s, from its power-on:\n", vm.Name)
		lab.PrintTimeline(d.out, append(vm.Serial.Events(), timelines[vm]...))
	}
	d.finish(ctx, "Both machines are Ready, and a pod runs. Nobody has logged in to either.", clusterDir, "bin/demo -cluster -keep", cluster, progs)
	return nil
}

// bakeCluster bakes an image for each machine. It returns the images by the machines' names.
func (d *demo) bakeCluster(ctx context.Context) (map[string]string, error) {
	d.step("Making container images: pause, hello, and a control plane's", "the first time 3 to 5 minutes: Kubernetes and etcd are compiled; then seconds")
	for _, args := range [][]string{{"-o", "build/images"}, {"-control-plane", "-o", "build/control-plane"}} {
		if err := d.command(ctx, append([]string{"go", "run", "./test/images"}, args...)...); err != nil {
			return nil, err
		}
	}
	d.step("Baking an image for workers, and one for control-plane nodes", "the first time 6 to 9 minutes; then half a minute")
	example, err := os.ReadFile(quickstart)
	if err != nil {
		return nil, err
	}
	document := filepath.Join(clusterDir, "master.yaml")
	// The document must be in a directory as deep as the examples', so that relative paths still
	// work.
	if err := os.WriteFile(document, []byte(lab.ControlPlaneImage(string(example), "../../build/control-plane", lab.Releases()[0])), 0o644); err != nil {
		return nil, err
	}
	images := map[string]string{worker: filepath.Join("build", "quickstart.raw"), master: filepath.Join(clusterDir, "control-plane.raw")}
	for name, doc := range map[string]string{worker: quickstart, master: document} {
		if err := d.command(ctx, "bin/edgebake", "build", doc, "--output", images[name], "--force", "--lock", strings.TrimSuffix(images[name], ".raw")+".lock"); err != nil {
			return nil, err
		}
	}
	return images, nil
}

// mint creates the cluster's keys and its machines' Sites.
func (d *demo) mint(ctx context.Context, network lab.Pair) (dir string, err error) {
	d.step("Minting the cluster: its CAs, tokens and Sites, on this computer", "a second")
	document := filepath.Join(clusterDir, "cluster.yaml")
	machine := func(name string, n int) lab.MintedMachine {
		return lab.MintedMachine{Name: name, Address: network.GuestAddr(n).String(),
			Cards: fmt.Sprintf("{mac: %q, addresses: [%s/%d]}", network.GuestMAC(n), network.GuestAddr(n), lab.PairCIDR)}
	}
	first := machine(master, 0)
	first.Cards += fmt.Sprintf(", {mac: %q, dhcp: true}", network.Outside().MAC) // this computer reaches the machine through this card
	text, err := lab.Minted{Kubernetes: lab.KubernetesVersion, Masters: []lab.MintedMachine{first}, Workers: []lab.MintedMachine{machine(worker, 1)},
		CertSANs: []string{"127.0.0.1"}}.YAML()
	if err == nil {
		err = os.WriteFile(document, []byte(text), 0o600)
	}
	dir = filepath.Join(clusterDir, "shops")
	if err == nil {
		err = os.RemoveAll(dir) // each demo has a new cluster
	}
	if err != nil {
		return "", err
	}
	if err := d.command(ctx, "bin/edgebake", "cluster", "new", document, "--output", dir); err != nil {
		return "", err
	}
	return dir, d.command(ctx, "bin/edgebake", "cluster", "sites", dir)
}

// adminConfig returns the minted administrator's kubeconfig for this computer, which reaches the
// control-plane node at a port of its own loopback address.
func adminConfig(minted string, network lab.Pair) (string, error) {
	text, err := os.ReadFile(filepath.Join(minted, "admin.conf"))
	if err != nil {
		return "", err
	}
	file, err := filepath.Abs(filepath.Join(clusterDir, "admin.conf"))
	if err != nil {
		return "", err
	}
	here := strings.ReplaceAll(string(text), "https://"+network.GuestAddr(0).String()+":6443", fmt.Sprintf("https://127.0.0.1:%d", network.Port))
	return file, os.WriteFile(file, []byte(here), 0o600)
}
