package procgroup

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestRunEndsChildren runs a parent that lets its child handle the interrupt. Each child reacts in
// another way.
func TestRunEndsChildren(t *testing.T) {
	const parent = `trap 'echo heard' INT; sh -c "$0"; echo "child: $?"; exit 3`
	for name, c := range map[string]struct {
		child, says string
		grace       time.Duration
	}{
		"listens":      {`echo $$; exec sleep 1000`, "heard", time.Minute},
		"cleans up":    {`trap 'echo clean; exit 1' INT; echo $$; while :; do sleep 0.05; done`, "clean", time.Minute},
		"does neither": {`trap '' INT; echo $$; exec sleep 1000`, "", 10 * time.Millisecond},
		"is elsewhere": {`trap '' INT; sleep 1000 >/dev/null 2>&1 & echo $!; kill -INT $PPID; kill -9 $$`, "heard", time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := signal.NotifyContext(t.Context(), os.Interrupt) // as in edgebake's main
			defer cancel()
			cmd := exec.CommandContext(ctx, "sh", "-c", parent, c.child)
			out, in := io.Pipe()
			cmd.Stdout = in
			ended := make(chan error, 1)
			go func() {
				err := Run(cmd, c.grace)
				in.Close()
				ended <- err
			}()
			r := bufio.NewReader(out)
			line, err := r.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			said, err := io.ReadAll(r)
			if err != nil || !strings.Contains(string(said), c.says) {
				t.Errorf("the programs printed %q, %v", said, err)
			}
			if err := <-ended; err == nil {
				t.Error("no error")
			}
			if running(cmd.Process.Pid) {
				t.Errorf("a process of group %d still runs", cmd.Process.Pid)
			}
			if group, err := syscall.Getpgid(pid); err == nil && group != cmd.Process.Pid {
				t.Errorf("process %d is in group %d, want %d", pid, group, cmd.Process.Pid)
			}
		})
	}
}

func TestRunOf(t *testing.T) {
	out := new(strings.Builder)
	cmd := exec.CommandContext(t.Context(), "echo", "well")
	cmd.Stdout = out
	if err := Run(cmd, time.Minute); err != nil || out.String() != "well\n" {
		t.Errorf("%q, %v", out, err)
	}
	if err := Run(exec.CommandContext(t.Context(), "/nowhere/at/all"), time.Minute); err == nil {
		t.Error("no error for a missing program")
	}
}
