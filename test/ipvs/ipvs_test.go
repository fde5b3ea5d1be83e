// Package ipvs_test boots a guest and runs in it the tests of ipvscare
// against a real kernel. They are in package guest.
package ipvs_test

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/ipvs/vm"
)

var (
	guestRun     = flag.String("guest.run", "", "tests to run in the guest, as a regular expression")
	guestTimeout = flag.Duration("guest.timeout", 20*time.Minute, "how long the guest may take")
)

// What go test says: whose output follows, and how a test ended.
var (
	current = regexp.MustCompile(`^=== (?:RUN|NAME|CONT)\s+(\S+)`)
	result  = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+)`)
	where   = regexp.MustCompile(`^\s+\w+_test\.go:\d+: `)
)

// outputs collects what each of the guest's tests says, to show it where the
// test is reported. What a part of a test says belongs to the whole too.
type outputs struct {
	now   string
	lines map[string][]string
}

func (o *outputs) add(line string) {
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

// tail is the end of what a test said. Of what came before, it keeps what the
// test itself said, since a long journal of ipvscare may follow the reason.
func (o *outputs) tail(name string) string {
	const most = 50
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
	o := outputs{lines: make(map[string][]string)}
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
}

func TestGuest(t *testing.T) {
	if err := vm.Missing(); err != nil {
		desk.Lacks(t, "the kernel side of ipvscare: %v", err)
	}
	if testing.Short() && *guestRun == "" {
		t.Skip("SKIPPED with -short: the kernel side of ipvscare is not tested")
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
	if os.Getenv("EDGEBAKE_NIGHTLY") != "" { // the long form of each
		timeout = max(timeout, 7*time.Hour)
		env = append([]string{"GUEST_LOSS=10m", "GUEST_FAILOVERS=1000", "GUEST_PINGS=3600"}, env...)
	}
	dir := os.Getenv("IPVS_GUEST_DIR")
	if dir == "" {
		dir = t.TempDir()
	}
	verdicts := map[string]string{}
	var order []string
	var text strings.Builder
	said := outputs{lines: make(map[string][]string)}
	err := vm.Run(t.Context(), vm.Options{Run: run, Env: env, Timeout: timeout, Dir: dir}, func(line string) {
		text.WriteString(line + "\n")
		said.add(line)
		if m := result.FindStringSubmatch(line); m != nil {
			verdicts[m[2]] = m[1]
			order = append(order, m[2])
		}
		if testing.Verbose() {
			t.Log(line)
		}
	})
	if err != nil {
		t.Errorf("%v\n%s", err, text.String())
	}
	if len(order) == 0 {
		t.Fatalf("the guest ran no test\n%s", text.String())
	}
	for _, name := range order {
		t.Run(name, func(t *testing.T) {
			switch verdicts[name] {
			case "FAIL":
				t.Errorf("failed in the guest; it said last:\n%s", said.tail(name))
			case "SKIP":
				t.Skip("skipped in the guest")
			}
		})
	}
}
