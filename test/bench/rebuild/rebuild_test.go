// Package rebuild measures how long a person who edits an Image waits: for a build after a change
// in an overlay, and for stamping.
package rebuild

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/test/bench"
)

const (
	results = "../results/rebuild.md"
	// promisedStamp is the maximum time of stamping in place, promisedBuild that of a build, on an
	// idle computer.
	promisedStamp = 20 * time.Millisecond
	promisedBuild = 500 * time.Millisecond
)

const site = `apiVersion: edgebake.io/v1alpha1
kind: Site
masters: [192.168.7.11:6443]
credentials: {token: abcdef.0123456789abcdef}
caCertHashes: ["sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"]
nodeName: shop-%d
`

// subject is one measured action, in seconds of elapsed and of processor time.
type subject struct {
	name       string
	run        func(round int)
	clock, cpu []float64
}

type work struct {
	*testing.B
	root, dir, bin string
	clock, cpu     float64 // of the last command and its children
}

// BenchmarkRebuild builds the quickstart image with an overlay, with everything else cached, and
// stamps it.
func BenchmarkRebuild(b *testing.B) {
	if b.N > 1 {
		return
	}
	root, err := filepath.Abs("../../..")
	if err != nil {
		b.Fatal(err)
	}
	w := &work{B: b, root: root, dir: filepath.Join(root, "build", "bench-rebuild")}
	w.bin = filepath.Join(w.dir, "edgebake")
	if err := os.MkdirAll(filepath.Join(w.dir, "overlay/etc"), 0o755); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(w.dir) })
	w.command("go", "build", "-trimpath", "-o", w.bin, "./cmd/edgebake")
	w.command("go", "run", "./test/images", "-o", filepath.Join(w.dir, "images"))
	doc, err := os.ReadFile(filepath.Join(root, "configs/examples/quickstart.yaml"))
	if err != nil {
		b.Fatal(err)
	}
	w.file("image.yaml", strings.ReplaceAll(string(doc), "../../build/images", "images")+"overlays: [{dir: overlay}]\n")
	image, dd := w.path("image.raw"), w.path("dd")
	build := func(more ...string) {
		w.command(append([]string{w.bin, "build", w.path("image.yaml"), "--quiet", "--force", "--output", image}, more...)...)
	}
	w.file("overlay/etc/round", "made\n")
	build()
	info, err := media.Inspect(image)
	if err != nil {
		b.Fatal(err)
	}
	w.file("dd.in", strings.Repeat("dd copies bytes.", int(info.Stored)/16))

	golden := map[int]string{} // of each round's rebuild
	subjects := []*subject{
		{name: "dd of as many bytes, stored, in place of the former file", run: func(int) {
			w.command("sh", "-c", `dd if="$1" of="$2.new" bs=4M conv=fsync && mv "$2.new" "$2"`, "sh", w.path("dd.in"), dd)
		}},
		{name: "a build after one file of an overlay has changed", run: func(round int) {
			build()
			golden[round] = w.golden(image)
		}},
		{name: "the same with --locked, which hashes all inputs", run: func(round int) {
			build("--locked")
			if got := w.golden(image); got != golden[round] {
				w.Fatalf("round %d: the rebuild has the golden digest %s, a locked build %s", round, golden[round], got)
			}
		}},
		{name: "stamping a copy", run: func(int) {
			w.command(w.bin, "stamp", image, w.path("site.yaml"), "--quiet", "--force", "--output", w.path("copy.raw"))
		}},
		{name: "stamping in place", run: func(int) { w.command(w.bin, "stamp", w.path("copy.raw"), w.path("site.yaml"), "--quiet", "--in-place") }},
	}
	subjects[0].run(0) // makes the file that each measured run replaces
	runs := bench.Runs(b, 9)
	for round := range runs {
		w.file("overlay/etc/round", fmt.Sprintf("made %d\n", round))
		w.file("site.yaml", fmt.Sprintf(site, round))
		for _, s := range subjects {
			s.run(round)
			s.clock, s.cpu = append(s.clock, w.clock), append(s.cpu, w.cpu)
		}
	}
	w.command(w.bin, "verify", w.path("copy.raw"), "--quiet")
	text := report(runs, info.Stored, subjects)
	b.Log("\n" + text)
	if err := os.WriteFile(results, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
}

func (w *work) path(name string) string { return filepath.Join(w.dir, name) }

func (w *work) file(name, text string) {
	w.Helper()
	if err := os.WriteFile(w.path(name), []byte(text), 0o644); err != nil {
		w.Fatal(err)
	}
}

func (w *work) command(argv ...string) {
	w.Helper()
	cmd := exec.CommandContext(w.Context(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = w.root, append(os.Environ(), "CGO_ENABLED=0")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	start := time.Now()
	if err := cmd.Run(); err != nil {
		w.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, &said)
	}
	w.clock = time.Since(start).Seconds()
	w.cpu = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
}

func (w *work) golden(image string) string {
	w.Helper()
	info, err := media.Inspect(image)
	if err != nil {
		w.Fatal(err)
	}
	return info.Slot.Golden
}

func report(runs int, stored int64, subjects []*subject) string {
	var t strings.Builder
	fmt.Fprintf(&t, "# A build after a small change, and stamping\n\n"+
		"Made by `make bench` (test/bench/rebuild): configs/examples/quickstart.yaml with an overlay, %d MiB stored, everything but the changed file in the cache. Whole commands, %d of each in turns, %d processors. Load average at the end: %s.\n"+
		"Aims on a quiet computer of the time when they were set: %.1f s for the build, %d ms for stamping in place. All of them leave their files stored, as a power cut finds them. The golden digest of each build is compared with that of a locked one.\n\n"+
		"| | seconds | least | × dd | processor s |\n|---|---|---|---|---|\n",
		stored>>20, runs, runtime.NumCPU(), bench.Load(), promisedBuild.Seconds(), promisedStamp.Milliseconds())
	rival := bench.Median(subjects[0].clock)
	for _, s := range subjects {
		least := s.clock[0]
		for _, x := range s.clock {
			least = min(least, x)
		}
		fmt.Fprintf(&t, "| %s | %.3f | %.3f | %.2f | %.3f |\n", s.name, bench.Median(s.clock), least, bench.Median(s.clock)/rival, bench.Median(s.cpu))
	}
	return t.String()
}
