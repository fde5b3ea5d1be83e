// Command report runs `go test` with its arguments. It prints a line for each package, the output
// of failed tests, and at the end the skipped tests and the ten slowest ones. Finally it kills all
// processes that tests have left running, even after an interrupt.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	slowest = 10
	// grace is the time that go test and its tests have to end after an interrupt.
	grace = 10 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	os.Exit(run(ctx, os.Stdout, os.Args[1:]))
}

func run(ctx context.Context, out io.Writer, args []string) int {
	// Make this process a subreaper, so that processes that a test leaves behind become its
	// children, which it can end.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintf(out, "ending the tests' processes: %v\n", err)
		return 1
	}
	defer endChildren()
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS // tests' mounts end with them
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = grace
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintf(out, "running go test: %v\n", err)
		return 1
	}
	r := report{out: out, verbose: slices.Contains(args, "-v"), output: map[string][]string{}, skips: map[string]int{}}
	read := r.read(stdout)
	err = cmd.Wait()
	r.end()
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(out, "INTERRUPTED")
		return 130
	case err != nil:
		return 1
	case read != nil:
		fmt.Fprintf(out, "reading the output of go test: %v\n", read)
		return 1
	}
	return 0
}

// endChildren kills all processes below this one. It repeats until none is left, because the
// children of a killed process become children of this one.
func endChildren() {
	children := func() []int {
		b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
		if err != nil {
			return nil
		}
		var pids []int
		for _, f := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	for end := time.Now().Add(grace); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		pids := children()
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		}
	}
}

// event is one line of the output of go test -json.
type event struct {
	Action, Package, Test, Output string
	ImportPath                    string
	Elapsed                       float64
}

type took struct {
	seconds float64
	name    string
}

type report struct {
	out     io.Writer
	verbose bool

	output map[string][]string // output of a test, or of a package without a test, until it ends
	skips  map[string]int
	tests  []took
	passed int
	failed []string
}

func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(r.out, "%s", line) // a message of the go command itself
			} else {
				r.add(e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) add(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		fmt.Fprint(r.out, e.Output)
	case "output":
		if r.verbose && e.Test != "" {
			fmt.Fprint(r.out, e.Output)
		}
		r.output[key] = append(r.output[key], e.Output)
	case "pass", "fail", "skip":
		output := r.output[key]
		delete(r.output, key)
		if e.Test == "" {
			r.endPackage(e, output)
			return
		}
		if e.Action == "skip" {
			for _, line := range output {
				if _, why, ok := strings.Cut(line, "SKIPPED, NOT TESTED: "); ok {
					r.skips[strings.TrimSpace(why)]++
				}
			}
		}
		if e.Action == "fail" {
			if !r.verbose {
				fmt.Fprint(r.out, strings.Join(output, ""))
			}
			r.failed = append(r.failed, short(e.Package)+" "+e.Test)
		}
		if e.Action == "pass" {
			r.passed++
		}
		if !strings.Contains(e.Test, "/") {
			r.tests = append(r.tests, took{e.Elapsed, short(e.Package) + " " + e.Test})
		}
	}
}

func (r *report) endPackage(e event, output []string) {
	if e.Action == "fail" { // after a panic or a timeout, no test is named
		for key, lines := range r.output {
			if strings.HasPrefix(key, e.Package+" ") {
				delete(r.output, key)
				if !r.verbose {
					fmt.Fprint(r.out, strings.Join(lines, ""))
				}
				r.failed = append(r.failed, short(e.Package)+strings.TrimPrefix(key, e.Package))
			}
		}
		fmt.Fprint(r.out, strings.Join(output, ""))
		if !slices.ContainsFunc(r.failed, func(f string) bool { return strings.HasPrefix(f, short(e.Package)+" ") }) {
			r.failed = append(r.failed, short(e.Package))
		}
		return
	}
	for _, line := range output {
		if strings.HasPrefix(line, "ok ") {
			fmt.Fprint(r.out, line)
		}
	}
}

// end prints the summary.
func (r *report) end() {
	if len(r.skips) > 0 {
		fmt.Fprintln(r.out, "SKIPPED, NOT TESTED:")
		for _, why := range slices.Sorted(maps.Keys(r.skips)) {
			fmt.Fprintf(r.out, "  %3d times: %s\n", r.skips[why], why)
		}
	}
	slices.SortStableFunc(r.tests, func(a, b took) int { return cmp.Compare(b.seconds, a.seconds) })
	if len(r.tests) > 0 {
		fmt.Fprintln(r.out, "The slowest tests:")
	}
	for _, t := range r.tests[:min(slowest, len(r.tests))] {
		fmt.Fprintf(r.out, "  %6.1f s  %s\n", t.seconds, t.name)
	}
	for _, f := range r.failed {
		fmt.Fprintf(r.out, "FAILED: %s\n", f)
	}
	fmt.Fprintf(r.out, "%d tests passed, %d failed\n", r.passed, len(r.failed))
}

func short(pkg string) string { return strings.TrimPrefix(pkg, "github.com/edgebake/edgebake/") }
