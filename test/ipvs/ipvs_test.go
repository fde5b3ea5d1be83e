// Package ipvs_test boots a guest and runs in it the tests of ipvscare
// against a real kernel. They are in package guest.
package ipvs_test

import (
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/ipvs/vm"
)

var (
	guestRun     = flag.String("guest.run", "", "tests to run in the guest, as a regular expression")
	guestTimeout = flag.Duration("guest.timeout", 20*time.Minute, "how long the guest may take")
)

// result is what go test says of each test.
var result = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+)`)

func TestGuest(t *testing.T) {
	if err := vm.Missing(); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip("SKIPPED, the kernel side of ipvscare is not tested:", err)
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
	err := vm.Run(t.Context(), vm.Options{Run: run, Env: env, Timeout: timeout, Dir: dir}, func(line string) {
		text.WriteString(line + "\n")
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
	failed := false
	for _, name := range order {
		t.Run(name, func(t *testing.T) {
			switch verdicts[name] {
			case "FAIL":
				failed = true
				t.Error("failed in the guest")
			case "SKIP":
				t.Skip("skipped in the guest")
			}
		})
	}
	if failed && !testing.Verbose() {
		t.Log(text.String())
	}
}
