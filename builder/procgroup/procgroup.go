// Package procgroup runs external programs. It ends them together with all processes that they have
// started.
//
// If a person interrupts edgebake at a terminal, every process of the job gets the signal. A
// service manager or a CI runner sends it only to edgebake, but mmdebstrap, apt and go rely on
// their children getting it too.
package procgroup

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"
)

// killLimit is how long kill waits for killed processes. A process in an uninterruptible system
// call ends only after that call.
const killLimit = 10 * time.Second

// Run runs a command from exec.CommandContext in its own process group. When the context ends, Run
// interrupts the group, and kills it after grace. If the command fails, Run kills the rest of the
// group, and returns an error if processes remain. It does not find processes in a session of their
// own.
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

// kill kills the rest of a group whose leader has ended.
func kill(group int) error {
	for wait := time.Millisecond; ; wait *= 2 {
		if err := syscall.Kill(-group, syscall.SIGKILL); err != nil || !running(group) {
			return nil // no process is left, or only zombies
		}
		if wait > killLimit/2 {
			return fmt.Errorf("processes of group %d do not exit", group)
		}
		time.Sleep(wait)
	}
}
