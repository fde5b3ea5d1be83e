package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/pace"
)

// memoryArgs is the environment variable with the command line of a child process.
const memoryArgs = "EDGEBAKE_TEST_MEMORY_ARGS"

// TestMemoryOfThousands checks that an Inventory of 5,000 rows can be imported, validated, stamped,
// inspected and checked by preflight with at most 256 MiB for each command.
func TestMemoryOfThousands(t *testing.T) {
	if args := os.Getenv(memoryArgs); args != "" {
		memoryChild(t, args)
		return
	}
	pace.Takes(t, 10*time.Second)
	c := newCLI(t)
	c.project(nil)
	c.run(0, "build", "image.yaml", "--output", "g.raw")
	c.file("site.yaml", strings.ReplaceAll(site, "nodeName: berlin-7\n", ""))
	var b strings.Builder
	b.WriteString("name;serial;mac;interface;address;gateway;labels.example.com/region;token\r\n")
	for i := range 5000 {
		fmt.Fprintf(&b, "shop-%d;PF3X%05d;52:54:00:00:%02x:%02x;en*;10.%d.%d.10/24;10.%d.%d.1;north;abcdef.%016d\r\n", i, i, i>>8, i&255, 20+i/250, i%250, 20+i/250, i%250, i)
	}
	c.file("stores.csv", b.String())
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"inventory", "import", "stores.csv", "--template", "site.yaml", "-o", "stores.yaml"},
		{"stamp", "g.raw", "stores.yaml", "--output", "all.raw"},
		{"inspect", "all.raw"},
		{"validate", "stores.yaml"},
		{"preflight", "stores.yaml", "--image", "g.raw", "--offline"},
	} {
		given, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(exe, "-test.run", "^TestMemoryOfThousands$")
		cmd.Env = append(os.Environ(), memoryArgs+"="+string(given))
		said, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", args, err, said)
		}
		_, peak, _ := strings.Cut(string(said), "VmHWM:")
		var kib int64
		if _, err := fmt.Sscan(peak, &kib); err != nil {
			t.Fatalf("%s: no peak in %q", args, said)
		}
		t.Logf("%s: %d MiB, %s of processor time", args[0], kib>>10, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
		if kib > 256<<10 {
			t.Errorf("edgebake %s of 5,000 sites takes %d MiB, want at most 256", strings.Join(args, " "), kib>>10)
		}
	}
}

// memoryChild runs one command in a separate process.
func memoryChild(t *testing.T, args string) {
	var given []string
	if err := json.Unmarshal([]byte(args), &given); err != nil {
		t.Fatal(err)
	}
	if code := run(t.Context(), given, streams{In: strings.NewReader(""), Out: os.Stdout, Err: os.Stderr}); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	fmt.Println("VmHWM:", strings.Fields(peak)[0])
}
