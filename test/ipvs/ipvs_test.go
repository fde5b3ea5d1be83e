// Package ipvs_test boots a VM and runs the tests of ipvscare in it (package guest), with a real
// kernel.
package ipvs_test

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/ipvs/vm"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

var (
	guestRun     = flag.String("guest.run", "", "tests to run in the guest, as a regular expression")
	guestTimeout = flag.Duration("guest.timeout", 40*time.Minute, "how long the guest may take")
)

// Lines of go test: the name of the test whose output follows, and the end of a test.
var (
	current = regexp.MustCompile(`^=== (?:RUN|NAME|CONT)\s+(\S+)`)
	result  = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+)`)
	where   = regexp.MustCompile(`^\s+\w+_test\.go:\d+: `)
)

// outputs collects the output of each test in the VM, to show it with the result. A subtest's
// output belongs to its test.
type outputs struct {
	now      string
	lines    map[string][]string
	verdicts map[string]string // PASS, FAIL or SKIP, by test
	order    []string          // in the order of their ends
}

func newOutputs() *outputs {
	return &outputs{lines: make(map[string][]string), verdicts: make(map[string]string)}
}

func (o *outputs) add(line string) {
	if m := result.FindStringSubmatch(line); m != nil {
		if o.verdicts[m[2]] == "" {
			o.order = append(o.order, m[2])
		}
		if o.verdicts[m[2]] != "FAIL" { // a failed test stays failed even if another run passes
			o.verdicts[m[2]] = m[1]
		}
	}
	if m := current.FindStringSubmatch(line); m != nil {
		o.now = m[1]
		return
	}
	for name := o.now; name != ""; {
		o.lines[name] = append(o.lines[name], line)
		i := strings.LastIndexByte(name, '/')
		name = name[:max(i, 0)]
	}
}

// finished returns the tests that have ended, as a pattern for go test -skip.
func (o *outputs) finished() string {
	var names []string
	for _, name := range o.order {
		if !strings.Contains(name, "/") {
			names = append(names, name)
		}
	}
	if names == nil {
		return ""
	}
	return "^(" + strings.Join(names, "|") + ")$"
}

func (o *outputs) failed() bool {
	return slices.Contains(slices.Collect(maps.Values(o.verdicts)), "FAIL")
}

// most is the maximum number of lines that a report shows.
const most = 50

// tail returns the end of a test's output. Of the earlier lines it keeps the test's own, because a
// long journal of ipvscare may follow the reason of a failure.
func (o *outputs) tail(name string) string {
	lines := o.lines[name]
	from := max(len(lines)-most, 0)
	var kept []string
	for _, line := range lines[:from] {
		if where.MatchString(line) {
			kept = append(kept, line)
		}
	}
	kept = kept[max(len(kept)-most, 0):]
	return strings.Join(append(kept, lines[from:]...), "\n")
}

func TestOutputs(t *testing.T) {
	o := newOutputs()
	for _, line := range []string{"=== RUN   TestA", "    a_test.go:1: the reason", "=== RUN   TestA/part", "    a_test.go:2: of the part"} {
		o.add(line)
	}
	for i := range 60 {
		o.add(fmt.Sprintf("journal %d", i))
	}
	o.add("=== NAME  TestB")
	o.add("    b_test.go:1: of another")
	got := o.tail("TestA")
	if !strings.HasPrefix(got, "    a_test.go:1: the reason\n    a_test.go:2: of the part\njournal 10\n") || !strings.HasSuffix(got, "journal 59") {
		t.Error(got)
	}
	if got := o.tail("TestA/part"); !strings.HasPrefix(got, "    a_test.go:2: of the part\njournal 10\n") {
		t.Error(got)
	}
	if got := o.tail("TestB"); got != "    b_test.go:1: of another" {
		t.Error(got)
	}
	if got := o.finished(); got != "" {
		t.Errorf("nothing has ended, but %s", got)
	}
	// Subtests are reported with their test, whose output ends here.
	for _, line := range []string{"--- PASS: TestA (1.2s)", "    --- PASS: TestA/part (0.10s)", "--- SKIP: TestB (0.00s)", "=== RUN   TestC"} {
		o.add(line)
	}
	if got := o.finished(); got != "^(TestA|TestB)$" || o.failed() {
		t.Error(got, o.failed())
	}
	o.add("--- FAIL: TestC (3.4s)")
	o.add("--- PASS: TestC (3.4s)")
	if !o.failed() {
		t.Error("nothing has failed")
	}
}

func TestGuest(t *testing.T) {
	pace.Takes(t, 440*time.Second)
	if err := vm.Missing(); err != nil {
		desk.Lacks(t, "the kernel side of ipvscare: %v", err)
	}
	run := *guestRun
	if run == "" {
		run = "^Test"
	}
	var env []string
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "GUEST_") {
			env = append(env, kv)
		}
	}
	timeout := *guestTimeout
	if os.Getenv("EDGEBAKE_NIGHTLY") != "" { // the long form of each test
		timeout = max(timeout, 7*time.Hour)
		env = append([]string{"GUEST_LOSS=10m", "GUEST_FAILOVERS=1000", "GUEST_PINGS=3600"}, env...)
	}
	dir := os.Getenv("IPVS_GUEST_DIR")
	if dir == "" {
		dir = t.TempDir()
	}
	proxy, err := lab.CachedKubeProxy(t.Context(), lab.KubernetesVersion, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	said := newOutputs()
	for boots := 1; ; boots++ {
		var console []string
		o := vm.Options{Run: run, Skip: said.finished(), Env: env, Timeout: timeout, Dir: dir,
			Extra: map[string]string{"kube-proxy": proxy}}
		err = vm.Run(t.Context(), o, func(line string) {
			console = append(console, line)
			said.add(line)
			if testing.Verbose() {
				t.Log(line)
			}
		})
		if fault := (*vm.EmulatorError)(nil); errors.As(err, &fault) && boots < 4 {
			t.Logf("boot %d: %v; the tests that have not ended are run again", boots, err)
			continue
		}
		if len(said.order) == 0 {
			t.Fatalf("the guest ran no test\n%s\n%v", strings.Join(console, "\n"), err)
		}
		if err != nil && (err != vm.ErrFailed || !said.failed()) {
			t.Errorf("the guest said last:\n%s\n%v", strings.Join(console[max(0, len(console)-most):], "\n"), err)
		}
		break
	}
	for _, name := range said.order {
		t.Run(name, func(t *testing.T) {
			switch said.verdicts[name] {
			case "FAIL":
				t.Errorf("failed in the guest; it said last:\n%s", said.tail(name))
			case "SKIP":
				t.Skip("skipped in the guest")
			}
		})
	}
}
