// Package arch measures the cost of a second architecture: of its base, which is made once under
// emulation, and of later builds.
package arch

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/bench"
	"github.com/edgebake/edgebake/test/desk"
)

const results = "../results/arch.md"

// measured has the times of one architecture's builds in seconds: elapsed time, and processor time,
// which does not depend on other programs on the computer.
type measured struct{ base, build, baseCPU, buildCPU, sizes []float64 }

// BenchmarkArchitectures makes each base without a cache. Then it alternately builds the same
// document for each architecture, with everything cached.
func BenchmarkArchitectures(b *testing.B) {
	if b.N > 1 {
		return
	}
	desk.NeedProgram(b, "mmdebstrap", "mmdebstrap")
	if exec.Command("arch-test", "arm64").Run() != nil {
		desk.Lacks(b, "this computer runs no arm64 programs: `test/deps/install.sh demo arm64`")
	}
	root, err := filepath.Abs("../../..")
	if err != nil {
		b.Fatal(err)
	}
	dir := filepath.Join(root, "build", "bench-arch")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	w := &work{B: b, root: root, dir: dir, bin: filepath.Join(dir, "edgebake"), all: map[string]*measured{}}
	w.run("go", "build", "-trimpath", "-o", w.bin, "./cmd/edgebake")
	w.run("go", "run", "./test/images", "-arch", strings.Join(configs.Architectures(), ","), "-o", filepath.Join(dir, "images"))
	doc, err := os.ReadFile(filepath.Join(root, "configs/examples/quickstart.yaml"))
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "image.yaml"), []byte(strings.ReplaceAll(string(doc), "../../build/images", "images")), 0o644); err != nil {
		b.Fatal(err)
	}
	runs := bench.Runs(b, 3)
	for _, arch := range configs.Architectures() {
		w.all[arch] = &measured{}
		w.build(arch, "--update")
	}
	for range runs {
		for _, arch := range configs.Architectures() {
			w.build(arch)
		}
	}
	text := w.report(runs)
	b.Log("\n" + text)
	if err := os.WriteFile(results, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
}

type work struct {
	*testing.B
	root, dir, bin string
	all            map[string]*measured
}

// run returns the processor seconds of a command and its children.
func (w *work) run(argv ...string) (cpu float64) {
	w.Helper()
	cmd := exec.CommandContext(w.Context(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = w.root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		w.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
}

// build builds for an architecture and records the time.
func (w *work) build(arch string, more ...string) {
	w.Helper()
	image := filepath.Join(w.dir, arch+".raw")
	start := time.Now()
	cpu := w.run(append([]string{w.bin, "build", filepath.Join(w.dir, "image.yaml"), "--arch", arch, "--output", image, "--force"}, more...)...)
	took := time.Since(start).Seconds()
	raw, err := os.ReadFile(filepath.Join(w.dir, arch+".report.json"))
	if err != nil {
		w.Fatal(err)
	}
	var r builder.Report
	if err := json.Unmarshal(raw, &r); err != nil {
		w.Fatal(err)
	}
	m := w.all[arch]
	for _, s := range r.Timings {
		if s.Step == "base" {
			m.base = append(m.base, s.Seconds)
		}
	}
	if len(more) > 0 {
		m.baseCPU = append(m.baseCPU, cpu)
		return
	}
	m.build, m.buildCPU, m.sizes = append(m.build, took), append(m.buildCPU, cpu), append(m.sizes, float64(r.Size)/1e6)
}

func (w *work) report(runs int) string {
	host, foreign := w.all["amd64"], w.all["arm64"]
	var t strings.Builder
	fmt.Fprintf(&t, `# The second architecture

Made by `+"`make bench`"+` (test/bench/arch) on an amd64 computer: configs/examples/quickstart.yaml for amd64 and for arm64. Bases are made anew, once each; the builds, in turns and %d of each, have everything else in the cache. Load average at the end: %s. Seconds are medians.

| | amd64 | arm64 | arm64 ÷ amd64 |
|---|---|---|---|
`, runs, bench.Load())
	line := func(what string, a, b []float64) {
		fmt.Fprintf(&t, "| %s | %.1f s | %.1f s | %.2f |\n", what, bench.Median(a), bench.Median(b), bench.Median(b)/bench.Median(a))
	}
	line("the Debian base, made by mmdebstrap (arm64: in emulation)", host.base, foreign.base)
	line("processor time of the build that makes it", host.baseCPU, foreign.baseCPU)
	line("a build with the base cached", host.build, foreign.build)
	line("processor time of that", host.buildCPU, foreign.buildCPU)
	fmt.Fprintf(&t, "| size of the image | %.0f MB | %.0f MB | %.2f |\n", bench.Median(host.sizes), bench.Median(foreign.sizes), bench.Median(foreign.sizes)/bench.Median(host.sizes))
	fmt.Fprintf(&t, "\nEmulation's share of making the arm64 base is what processors work longer than for the other: %.0f s, %.0f %%. It is made once for a list of packages; versions, files, overlays and container images never make it again.\n",
		bench.Median(foreign.baseCPU)-bench.Median(host.baseCPU), 100*(1-bench.Median(host.baseCPU)/bench.Median(foreign.baseCPU)))
	return t.String()
}
