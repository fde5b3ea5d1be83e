// Package procgroup runs external programs, and ends them together with all
// processes that they start.
//
// An interrupt typed at a terminal reaches every process of the job. One that a
// service manager or a CI runner sends reaches edgebake alone, while mmdebstrap,
// apt and go expect that their children received it too.
package procgroup

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// killLimit bounds the wait for processes that were killed: one that the kernel
// holds in a system call ends when that does.
const killLimit = 10 * time.Second

// Run runs a command of exec.CommandContext in a process group of its own. When
// its context ends, all of the group are interrupted. What still runs after
// grace, or after the program itself, is killed: where Run returns an error,
// nothing that the program started runs any longer, or the error says so. A
// process that makes a session of its own has left.
func Run(cmd *exec.Cmd, grace time.Duration) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = grace
	err := cmd.Run()
	if err == nil || cmd.Process == nil {
		return err
	}
	if kept := kill(cmd.Process.Pid); kept != nil {
		return errors.Join(err, fmt.Errorf("ending what %s started: %w", cmd.Args[0], kept))
	}
	return err
}

// kill ends what is left of a group whose leader has ended.
func kill(group int) error {
	for wait := time.Millisecond; ; wait *= 2 {
		if err := syscall.Kill(-group, syscall.SIGKILL); err != nil || !running(group) {
			return nil // nobody is left, or nobody but those that init has not asked for
		}
		if wait > killLimit/2 {
			return fmt.Errorf("processes of group %d do not end", group)
		}
		time.Sleep(wait)
	}
}
