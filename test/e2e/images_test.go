package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/edgebake/edgebake/test/lab"
)

// quickGC makes kubelet remove an image as soon as it is unused, and admit pods soon after disk
// pressure ends. By default both take minutes.
var quickGC = map[string]string{
	"minimum-image-ttl-duration":          "1s",
	"eviction-pressure-transition-period": "15s",
}

// spareImage is not baked. A node imports it, so it is not pinned.
const spareImage = "edgebake.test/spare:1"

// podOf creates a pod of the hello image with this pull policy.
func (w *world) podOf(vm *lab.VM, name, policy string) {
	w.t.Helper()
	if err := w.c.Create(w.t.Context(), "/api/v1/namespaces/default/pods", map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"nodeName": vm.Node, "terminationGracePeriodSeconds": 1, "tolerations": lab.Stays(),
			"containers": []any{map[string]any{"name": name, "image": helloImage, "imagePullPolicy": policy}},
		},
	}); err != nil {
		w.t.Fatal(err)
	}
}

// spareArchive returns the spare image as an OCI archive.
func spareArchive(t *testing.T) []byte {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "spare")
	if _, err := imagetest.WriteLayout(dir, imagetest.Image{Ref: spareImage, Layers: []imagetest.Layer{
		imagetest.Script(imagetest.File("spare", 0o644, 0, 0, "spare")),
	}}); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-cf", "-", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// fillScript fills DATA after the pod that started it has ended. It waits until kubelet has removed
// the spare image and evicted every pod, so that no image is in use. After kubelet has searched
// twice more for images to remove, it frees the space. It reports each step on the console.
const fillScript = `
say() { printf '\nedgebake-test: %%s\n' "$*" >/dev/ttyS0; }
passes() { journalctl -u kubelet -b --no-pager -o cat | grep -c 'Attempting to delete unused images'; }
until [ -z "$(ctr -n k8s.io containers ls -q 'labels."io.kubernetes.pod.name"~="^script-"')" ]; do sleep 1; done
set -- $(df -B1 --output=size,avail /var | tail -n 1)
fallocate -l $(($2 - $1 / 50)) /var/filler
say "disk is full: $(df -h --output=pcent /var | tail -n 1)"
while ctr -n k8s.io images ls -q | grep -qx '%s'; do sleep 1; done
say spare image is gone
while [ -n "$(ctr -n k8s.io tasks ls -q)" ]; do sleep 1; done
say all pods are gone
n=$(($(passes) + 2))
while [ "$(passes)" -lt "$n" ]; do sleep 1; done
ctr -n k8s.io images ls -q >/run/images-after
rm /var/filler
say there is room again
`

// underDiskPressure fills the node's disk until kubelet finds nothing more to delete. The imported
// image must be removed; baked images must stay, used or not, and pods must run from them
// afterwards. The machine must have booted with quickGC.
func (w *world) underDiskPressure(vm *lab.VM) {
	w.t.Helper()
	mark := vm.Serial.Mark()
	told := w.mustOnNode(vm, fmt.Sprintf(`set -eu
ctr -n k8s.io images ls -q
echo --
base64 -d >/run/spare.tar <<'END'
%s
END
ctr -n k8s.io images import /run/spare.tar >/dev/null
cat >/run/fill.sh <<'END'
%s
END
systemd-run --quiet --unit=fill bash /run/fill.sh
`, base64.StdEncoding.EncodeToString(spareArchive(w.t)), fmt.Sprintf(fillScript, spareImage)))
	baked, _, _ := strings.Cut(told, "--\n")
	before := strings.Fields(baked)

	ctx, cancel := vm.Patience(w.t.Context(), 15*time.Minute)
	defer cancel()
	for _, step := range []string{"disk is full", "spare image is gone", "all pods are gone", "there is room again"} {
		line, next, err := vm.Serial.Expect(ctx, mark, regexp.MustCompile("edgebake-test: "+step))
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Logf("%6.1f s from power-on: %s", line.At.Seconds(), line.Text)
		mark = next
	}
	if _, err := w.c.WaitNode(ctx, vm, vm.Node, func(o *lab.Object) (bool, string) {
		status, why := o.Condition("DiskPressure")
		return status == "False", why
	}); err != nil {
		w.t.Fatal(err)
	}
	w.podOf(vm, "never-again", "Never")
	w.podOf(vm, "if-not-present-again", "IfNotPresent")
	w.podRuns(vm, "never-again")
	w.podRuns(vm, "if-not-present-again")

	told = w.mustOnNode(vm, `cat /run/images-after
journalctl -u kubelet -b --no-pager -o cat | grep -E 'delete unused images|Removing image|must evict|evicted pod' | cut -c -200 | sed 's/^/kubelet: /'`)
	var after, kubelet []string
	for line := range strings.Lines(told) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "kubelet: ") {
			kubelet = append(kubelet, line)
		} else {
			after = append(after, line)
		}
	}
	w.t.Logf("before: %q\nafter:  %q\n%s", before, after, strings.Join(kubelet, "\n"))
	if len(before) < 6 || !slices.Contains(before, helloImage) {
		w.t.Errorf("before the disk was full the node had %q", before)
	}
	for _, name := range before {
		if !slices.Contains(after, name) {
			w.t.Errorf("kubelet has deleted the baked image %s", name)
		}
	}
	if slices.Contains(after, spareImage) {
		w.t.Error("kubelet has deleted no image: the spare one still exists")
	}
}

// modeRun has the measurements of one first boot with one imageStore mode.
type modeRun struct {
	at      map[string]time.Duration // time of each event since power-on
	used    int64                    // bytes of DATA when a pod runs
	written int64                    // bytes written to the disk until then
}

// TestFirstBootOfBothModes boots the same images prebaked, and as archives that first boot imports.
// EDGEBAKE_BENCH names a directory for a table of both timelines.
func TestFirstBootOfBothModes(t *testing.T) {
	results := os.Getenv("EDGEBAKE_BENCH")
	if results == "" {
		nightly(t)
	}
	w := newWorld(t, 1)
	refs := w.writeManyImages()
	var order []string
	runs := map[string]modeRun{}
	var size int64
	for n, mode := range []string{"import", "prebaked"} {
		report := w.buildMode(mode, refs)
		if mode == "prebaked" {
			size = report.Images.Size
		}
		vm := w.boot(n, lab.Site{NodeName: mode})
		// Importing may take longer than the rest of first boot.
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, errors.New("an hour has passed"))
		_, _, err := vm.Serial.Expect(ctx, 0, imagesThere)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		w.ready(vm, nil)
		w.podOf(vm, "pod-of-"+mode, "Never")
		w.podRuns(vm, "pod-of-"+mode)
		events := append(vm.Serial.Events(), vm.Serial.Note("a pod runs"))
		run := modeRun{at: map[string]time.Duration{}}
		for _, e := range events {
			what, _, _ := strings.Cut(e.What, ": ")
			if _, seen := run.at[what]; !seen {
				run.at[what] = e.At
				if mode == "import" {
					order = append(order, what)
				}
			}
		}
		told := strings.Fields(w.mustOnNode(vm, `
df -B1 --output=used /var | tail -n 1
while read -r _ _ dev _ _ _ _ _ _ sectors _; do case $dev in vda) echo $((sectors * 512)); esac; done </proc/diskstats
ctr -n k8s.io images ls -q`))
		if len(told) < 2 {
			t.Fatalf("the node's output is %q", told)
		}
		for i, v := range []*int64{&run.used, &run.written} {
			if *v, err = strconv.ParseInt(told[i], 10, 64); err != nil {
				t.Fatal(err)
			}
		}
		for _, ref := range refs {
			if !slices.Contains(told[2:], ref) {
				t.Errorf("%s: %s is not on the node", mode, ref)
			}
		}
		runs[mode] = run
		w.off(vm)
		// Free the space, because the next image is as large.
		os.Remove(w.golden)
		os.Remove(vm.Overlay)
	}
	if len(refs) < 8 || size < 450<<20 {
		t.Errorf("%d images of %d MB: too little to compare", len(refs), size>>20)
	}
	if a, b := runs["prebaked"].written, runs["import"].written; a >= b {
		t.Errorf("%d bytes were written with prebaked images, %d where they are imported", a, b)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `# First boot: prebaked against imported

%d images, %d MB unpacked, on the same machine: QEMU without KVM, 2 CPUs, UEFI, containerd %s, kubeadm %s, once
prebaked and once with `+"`imageStore: {mode: import}`"+`. Seconds since power-on, and since the line before, as the console and the
cluster told them. One run each; %d CPUs for all, load %s at the end, %s.

| | prebaked | import |
|---|---|---|
`, len(refs), size>>20, configs.ExampleContainerd, lab.KubernetesVersion, runtime.NumCPU(), loadAverage(), time.Now().UTC().Format(time.DateOnly))
	last := map[string]time.Duration{}
	for _, what := range order {
		cell := func(mode string) string {
			at, ok := runs[mode].at[what]
			if !ok {
				return "–"
			}
			since := at - last[mode]
			last[mode] = at
			return fmt.Sprintf("%.1f s (+%.1f)", at.Seconds(), since.Seconds())
		}
		fmt.Fprintf(&out, "| %s | %s | %s |\n", what, cell("prebaked"), cell("import"))
	}
	for _, row := range []struct {
		name string
		of   func(modeRun) int64
	}{
		{"bytes written to the disk until then", func(r modeRun) int64 { return r.written }},
		{"used on DATA then", func(r modeRun) int64 { return r.used }},
	} {
		fmt.Fprintf(&out, "| %s | %d MB | %d MB |\n", row.name, row.of(runs["prebaked"])/1e6, row.of(runs["import"])/1e6)
	}
	t.Logf("\n%s", out.Bytes())
	if results != "" {
		if err := os.WriteFile(filepath.Join(results, "images-first-boot.md"), out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var imagesThere = regexp.MustCompile(`edgebake: \[\d+/\d+\] images: (done in|as it should be)`)

func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	one, _, _ := strings.Cut(string(b), " ")
	return one
}

// writeManyImages makes a layout of images of realistic sizes from files of this computer, and
// returns their names.
func (w *world) writeManyImages() []string {
	w.t.Helper()
	goroot, err := exec.CommandContext(w.t.Context(), "go", "env", "GOROOT").Output()
	if err != nil {
		w.t.Fatal(err)
	}
	root := strings.TrimSpace(string(goroot))
	base := layerOf(filepath.Join(root, "src"), "usr/src/go")
	var imgs []imagetest.Image
	add := func(name string, layers ...imagetest.Layer) {
		imgs = append(imgs, imagetest.Image{Ref: "edgebake.test/" + name + ":1", Layers: layers})
	}
	add("source", base)
	add("tools", base, layerOf(filepath.Join(root, "pkg", "tool"), "usr/lib/go/tool"))
	add("go", base, layerOf(filepath.Join(root, "bin"), "usr/bin"))
	add("apiserver", layerOf(w.progs.APIServer, "usr/bin/kube-apiserver"))
	add("controller-manager", layerOf(w.progs.ControllerManager, "usr/bin/kube-controller-manager"))
	add("kubectl", layerOf(w.progs.Kubectl, "usr/bin/kubectl"))
	add("etcd", layerOf(w.progs.Etcd, "usr/bin/etcd"))
	if _, err := imagetest.WriteLayout(filepath.Join(w.lab.Dir, "layout"), imgs...); err != nil {
		w.t.Fatal(err)
	}
	refs := []string{pauseImage, helloImage}
	for _, i := range imgs {
		refs = append(refs, i.Ref)
	}
	return refs
}

// layerOf returns a layer with a file or directory of this computer.
func layerOf(from, to string) imagetest.Layer {
	return imagetest.Layer{Tar: func(w *imagetest.Writer) error { return w.Tree(from, to) }}
}

// buildMode bakes the quickstart image with these container images in this mode. It becomes the
// world's golden image.
func (w *world) buildMode(mode string, refs []string) *builder.Report {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.root, "configs", "examples", "quickstart.yaml"))
	if err != nil {
		w.t.Fatal(err)
	}
	doc := strings.Replace(string(b), "name: quickstart\n", "name: "+mode+"\n", 1)
	doc = strings.ReplaceAll(doc, "../../build/images", filepath.Join(w.root, "build", "images"))
	for _, ref := range refs[2:] {
		doc += fmt.Sprintf("  - {ref: %q, layout: layout}\n", ref)
	}
	doc += fmt.Sprintf("imageStore: {mode: %s}\n", mode)
	file := filepath.Join(w.lab.Dir, mode+"-image.yaml")
	if err := os.WriteFile(file, []byte(doc), 0o644); err != nil {
		w.t.Fatal(err)
	}
	parts := *w.parts
	parts.golden = filepath.Join(w.lab.Dir, mode+"-golden.raw")
	start := time.Now()
	if err := w.run(w.t.Context(), w.bin, "build", file, "--output", parts.golden); err != nil {
		w.t.Fatal(err)
	}
	w.t.Logf("built with mode %s in %.1f s", mode, time.Since(start).Seconds())
	w.parts = &parts
	var report builder.Report
	if b, err = os.ReadFile(filepath.Join(w.lab.Dir, mode+"-golden.report.json")); err == nil {
		err = json.Unmarshal(b, &report)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return &report
}
