// Package procgroup runs external programs, and ends them together with all
// processes that they start.
//
// An interrupt typed at a terminal reaches every process of the job. One from a
// service manager or a CI runner reaches only edgebake, but mmdebstrap, apt and
// go expect that their children received it too.
package procgroup

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// killLimit limits the wait for killed processes. A process in an uninterruptible system call ends
// only after the call.
const killLimit = 10 * time.Second

// Run runs a command of exec.CommandContext in its own process group. When its context ends, Run
// interrupts the whole group and kills it after grace. If the command fails, Run kills the rest of
// the group; if it cannot, it returns an error that mentions the remaining processes. It does not
// find processes that started their own session.
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
		return errors.Join(err, fmt.Errorf("stopping the processes that %s started: %w", cmd.Args[0], kept))
	}
	return err
}

// kill ends the rest of a group whose leader has ended.
func kill(group int) error {
	for wait := time.Millisecond; ; wait *= 2 {
		if err := syscall.Kill(-group, syscall.SIGKILL); err != nil || !running(group) {
			return nil // nothing is left but zombies
		}
		if wait > killLimit/2 {
			return fmt.Errorf("processes of group %d do not exit", group)
		}
		time.Sleep(wait)
	}
}
