package main

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// smallPages disables huge pages of 2 MiB, which waste memory for a heap of less than one megabyte.
// The setting survives exec, so the program runs itself again before the Go runtime uses a huge page.
func smallPages() {
	if off, err := unix.PrctlRetInt(unix.PR_GET_THP_DISABLE, 0, 0, 0, 0); err != nil || off != 0 {
		return
	}
	if unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0) != nil {
		return
	}
	if self, err := os.Executable(); err == nil {
		_ = syscall.Exec(self, os.Args, os.Environ())
	}
}
