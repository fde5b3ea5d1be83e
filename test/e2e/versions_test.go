package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/lab"
)

// pairs are common combinations of versions, the most common first.
var pairs = []struct{ kubernetes, containerd, arch string }{
	{"v1.36.5", "2.3.7", "amd64"},
	{"v1.37.2", "2.4.2", "amd64"},
	{"v1.35.4", "2.3.7", "amd64"},
	{"v1.36.5", "2.4.2", "amd64"},
	{"v1.35.4", "2.4.2", "amd64"},
	{"v1.37.2", "2.3.7", "amd64"},
	{"v1.37.2", "2.3.7", "arm64"},
}

// TestVersions checks that a node of each pair joins a cluster of its Kubernetes version and runs a
// pod. The lines that begin with "RESULT" are for docs/compatibility.md.
func TestVersions(t *testing.T) {
	nightly(t)
	for _, pair := range pairs {
		t.Run(fmt.Sprintf("%s,%s,%s", pair.kubernetes, pair.containerd, pair.arch), func(t *testing.T) {
			p := need(t)
			if pair.arch != "amd64" {
				needArm64(t)
			}
			p, err := p.of(t.Context(), pair.kubernetes, pair.containerd, pair.arch)
			if err != nil {
				t.Fatal(err)
			}
			w := newWorldOf(t, p, 1)
			vm := w.bootWith(lab.VMConfig{Arch: pair.arch}, 0, lab.Site{NodeName: "node1"})
			info := w.ready(vm, nil).Status.NodeInfo
			took := vm.Serial.Note("").At
			if info.KubeletVersion != pair.kubernetes || !strings.HasSuffix(info.ContainerRuntimeVersion, "//v"+pair.containerd) && !strings.HasSuffix(info.ContainerRuntimeVersion, "//"+pair.containerd) || info.Architecture != pair.arch {
				t.Errorf("the node is %+v", info)
			}
			w.makePod(vm, "hello")
			w.off(vm)
			w.result("node", "Kubernetes %s, containerd %s, %s, %s: Ready after %.0f s, a pod ran", pair.kubernetes, pair.containerd, pair.arch, info.KernelVersion, took.Seconds())
		})
	}
}

// TestControlPlaneVersions bootstraps a cluster from images of each release.
func TestControlPlaneVersions(t *testing.T) {
	nightly(t)
	for _, r := range lab.Releases()[1:] { // TestClusterIsBorn tests the first
		t.Run(r.Kubernetes, func(t *testing.T) {
			p, err := need(t).of(t.Context(), r.Kubernetes, configs.ExampleContainerd, "amd64")
			if err != nil {
				t.Fatal(err)
			}
			golden, err := bakeMaster("master-"+r.Kubernetes, r)
			if err != nil {
				t.Fatal(err)
			}
			w := clusterIsBorn(t, p, golden, r.Kubernetes)
			w.result("control plane", "Kubernetes %s, etcd %s, containerd %s: a control-plane node and a worker Ready, a pod ran", r.Kubernetes, r.Etcd, configs.ExampleContainerd)
		})
	}
}

// TestOpenYurtVersions checks an OpenYurt 1.7 edge node on the newest Kubernetes for which OpenYurt
// is certified, and on a later one.
func TestOpenYurtVersions(t *testing.T) {
	nightly(t)
	for _, kubernetes := range []string{"v1.34.10", "v1.36.5"} {
		t.Run(kubernetes, func(t *testing.T) {
			p := need(t)
			golden, err := p.bakeEdge("edge-"+kubernetes, kubernetes)
			if err != nil {
				t.Fatal(err)
			}
			progs, err := lab.CachedPrograms(t.Context(), kubernetes, os.Stdout)
			if err != nil {
				t.Fatal(err)
			}
			w := &edgeWorld{world: newWorldOf(t, &parts{root: p.root, bin: p.bin, golden: golden, progs: progs}, 1)}
			w.openYurt(lab.Approve, lab.NodePools)
			vm := w.bootEdge("edge1")
			if got := w.ready(vm, nil).Status.NodeInfo.KubeletVersion; got != kubernetes {
				t.Errorf("kubelet is %s", got)
			}
			took := vm.Serial.Note("").At
			w.throughHub(vm)
			w.greeter(vm)
			w.off(vm)
			hub := "yurthub 1.7.0"
			if os.Getenv(envYurthub) == "" {
				hub = "the stand-in for yurthub 1.7.0"
			}
			w.result("edge node", "Kubernetes %s, %s: Ready through it after %.0f s, a pod ran", kubernetes, hub, took.Seconds())
		})
	}
}

// result prints a line for docs/compatibility.md.
func (w *world) result(what, format string, args ...any) {
	w.t.Helper()
	commit, err := exec.CommandContext(w.t.Context(), "git", "-C", w.root, "describe", "--always", "--dirty").Output()
	if err != nil {
		commit = []byte("of an unknown commit")
	}
	w.t.Logf("RESULT %s: %s (%s, %s)", what, fmt.Sprintf(format, args...), time.Now().UTC().Format("2 January 2006"), strings.TrimSpace(string(commit)))
}

// of returns parts with the quickstart image of these versions, and a control plane of the same
// Kubernetes version.
func (p *parts) of(ctx context.Context, kubernetes, containerd, arch string) (*parts, error) {
	quickstart, err := os.ReadFile(filepath.Join(p.root, "configs", "examples", "quickstart.yaml"))
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("quickstart-%s-%s-%s", kubernetes, containerd, arch)
	doc := strings.NewReplacer(configs.ExampleKubernetes, kubernetes, "version: "+configs.ExampleContainerd, "version: "+containerd).Replace(string(quickstart))
	layout := "images"
	if arch != "amd64" {
		layout += "-" + arch
		if err := makeLayout(layout, "-arch", arch); err != nil {
			return nil, err
		}
		doc = strings.ReplaceAll(doc, "layout: ../../build/images\n", "layout: ../../build/"+layout+"\n")
	}
	base := filepath.Join(p.root, "build", "e2e", name)
	if err := os.WriteFile(base+".yaml", []byte(doc), 0o644); err != nil {
		return nil, err
	}
	start := time.Now()
	if err := p.run(ctx, p.bin, "build", base+".yaml", "--arch", arch, "--output", base+".raw", "--force", "--lock", base+".lock"); err != nil {
		return nil, err
	}
	fmt.Printf("%6.1f s  edgebake build, %s\n", time.Since(start).Seconds(), name)
	progs, err := lab.CachedPrograms(ctx, kubernetes, os.Stdout)
	return &parts{root: p.root, bin: p.bin, golden: base + ".raw", progs: progs}, err
}
