package update

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/run"
)

// benchURL is the environment variable with the URL of the image for BenchmarkMachine.
const benchURL = "EDGEBAKE_BENCH_UPDATE"

// BenchmarkUpdate updates a machine from the quickstart image to the same image with one more
// package, both built by edgebake. It measures the memory and the processor time.
func BenchmarkUpdate(b *testing.B) {
	if b.N > 1 {
		return
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		b.Fatal(err)
	}
	dir := filepath.Join(root, "build", "bench-update")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	command := func(argv ...string) {
		b.Helper()
		cmd := exec.CommandContext(b.Context(), argv[0], argv[1:]...)
		cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
		}
	}
	bin := filepath.Join(dir, "edgebake")
	command("go", "build", "-trimpath", "-o", bin, "./cmd/edgebake")
	command("go", "run", "./test/images", "-o", filepath.Join(dir, "images"))
	doc, err := os.ReadFile(filepath.Join(root, "configs/examples/quickstart.yaml"))
	if err != nil {
		b.Fatal(err)
	}
	text := strings.ReplaceAll(string(doc), "../../build/images", "images")
	const suite = "    suite: trixie\n"
	if !strings.Contains(text, suite) {
		b.Fatal("the quickstart image has another base")
	}
	for name, packages := range map[string]string{"old.raw": "", "new.raw.zst": "    packages: [nano]\n"} {
		file := filepath.Join(dir, name+".yaml")
		if err := os.WriteFile(file, []byte(strings.Replace(text, suite, suite+packages, 1)), 0o644); err != nil {
			b.Fatal(err)
		}
		command(bin, "build", file, "--quiet", "--output", filepath.Join(dir, name))
	}
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	for range 3 {
		cmd := exec.CommandContext(b.Context(), os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkMachine$", "-test.benchtime=1x")
		cmd.Env = append(os.Environ(), benchURL+"="+server.URL+"/new.raw.zst", "EDGEBAKE_BENCH_DIR="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			b.Fatalf("%v\n%s", err, out)
		}
		b.Logf("%s", out)
	}
}

// BenchmarkMachine is the machine of BenchmarkUpdate. It runs in its own process.
func BenchmarkMachine(b *testing.B) {
	url := os.Getenv(benchURL)
	if url == "" || b.N > 1 {
		return
	}
	images.dir = os.Getenv("EDGEBAKE_BENCH_DIR")
	defer func() { images.dir = "" }() // TestMain removes it
	machine := boxOf(b, "old.raw")
	e := machine.env()
	e.Get, e.Now = host.New(os.Stderr).Get, time.Now
	e.FSFree = func(string) (int64, error) { return 1 << 30, nil }
	fetched, done := int64(0), false
	debug.FreeOSMemory()
	// From here on the peak memory is that of the update.
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		b.Fatal(err)
	}
	before := processorTime(b)
	err := Update(b.Context(), e, Options{Image: url, Unsigned: true}, func(s run.Step) {
		if u := Status(e); u != nil {
			fetched = max(fetched, u.Fetched)
		}
		done = done || s.Name == "esp" && s.Status == "done"
	})
	if err != nil || !done {
		b.Fatal(err)
	}
	b.ReportMetric(float64(peak(b))/1e6, "MB-peak")
	b.ReportMetric((processorTime(b) - before).Seconds(), "processor-s")
	b.ReportMetric(float64(fetched)/1e6, "MB-fetched")
}

// processorTime returns the processor time that this process has used.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// peak returns the largest resident set of this process, in bytes.
func peak(b *testing.B) int64 {
	b.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				b.Fatal(fmt.Errorf("%s: %w", line, err))
			}
			return kib << 10
		}
	}
	b.Fatal("the kernel reports no peak")
	return 0
}
