package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/test/emulator"
)

// Options configure a run of tests in the guest.
type Options struct {
	// Run selects tests in the guest, and Skip excludes tests, like the flags of go test.
	Run, Skip string
	// Env is the environment of the tests, as KEY=VALUE without spaces.
	Env []string
	// Timeout is the time after which the guest is ended.
	Timeout time.Duration
	// Log receives all output of the guest; may be nil.
	Log io.Writer
	// Extra has more programs for the guest's /bin, by name.
	Extra map[string]string
	// Dir is the directory for built files. It can be reused with the same binaries.
	Dir string
}

// done is the beginning of the last line that the guest's init prints. The exit code of the tests
// follows.
const done = "GUEST-DONE "

// ErrFailed means that tests have failed. They have printed their names.
var ErrFailed = errors.New("tests failed in the guest")

// EmulatorError means that the guest failed because of a fault in QEMU.
type EmulatorError struct{ Fault string }

func (e *EmulatorError) Error() string { return "the emulator failed: " + e.Fault }

// Run builds the guest and runs tests in it. It calls line with each line of the guest's output. If
// no test failed but the guest did, the error is not ErrFailed.
func Run(ctx context.Context, o Options, line func(string)) error {
	log := o.Log
	if log == nil {
		log = io.Discard
	}
	extra := map[string]string{
		"init":         filepath.Join(o.Dir, "guest.test"),
		"bin/ipvscare": filepath.Join(o.Dir, "ipvscare"),
	}
	for name, file := range o.Extra {
		extra["bin/"+name] = file
	}
	for _, argv := range [][]string{
		{"go", "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", extra["init"], "github.com/edgebake/edgebake/test/ipvs/guest"},
		{"go", "build", "-trimpath", "-ldflags=-s -w", "-o", extra["bin/ipvscare"], "github.com/edgebake/edgebake/cmd/ipvscare"},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("running %v: %w\n%s", argv, err, out)
		}
	}
	if err := build(ctx, o.Dir, extra, log); err != nil {
		return fmt.Errorf("building the guest: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	args := []string{"-nodefaults", "-display", "none", "-no-reboot", "-m", "1024", "-smp", "2",
		// In QEMU 7.2, cmpxchg16b is not safe with more than one processor.
		"-accel", "tcg,thread=multi", "-cpu", "max,-cx16",
		"-kernel", filepath.Join(o.Dir, "kernel"), "-initrd", filepath.Join(o.Dir, "initramfs"),
		"-append", strings.Join(append([]string{"console=ttyS0", "quiet", "panic=-1", "mitigations=off",
			// The kernel compares its timer with its clock at boot, and would panic if the emulator
			// was delayed in between.
			"no_timer_check", "guest.run=" + o.Run, "guest.skip=" + o.Skip}, o.Env...), " "),
		"-serial", "stdio"}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	code := ""
	var console []string
	scan := bufio.NewScanner(io.TeeReader(out, log))
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		text := strings.TrimRight(scan.Text(), "\r")
		if strings.Contains(text, "Kernel panic") {
			cancel()
		}
		if after, ok := strings.CutPrefix(text, done); ok {
			code = after
			continue
		}
		console = append(console, text)
		line(text)
	}
	err = cmd.Wait()
	if fault := emulator.StaleTranslation(slices.Values(console)); fault != "" && code != "0" {
		return &EmulatorError{fault}
	}
	switch {
	case code == "0":
		return nil
	case code == "1":
		return ErrFailed
	case code != "":
		return fmt.Errorf("the guest's tests ended with exit code %s", code)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("the guest did not finish in %s", o.Timeout)
	}
	return fmt.Errorf("the guest ended early: %w %s", err, stderr.String())
}
