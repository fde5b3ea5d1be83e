package main

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// smallPages keeps the kernel from backing a heap of one megabyte by huge
// pages of two. The runtime touched its first page long before main, so the
// program starts itself once more: the setting outlives exec. It does not matter
// if that does not work.
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
