package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// smallPages keeps the kernel from backing a heap of one megabyte by huge
// pages of two. The runtime touched its first page long before main, so the
// program starts itself once more: the setting outlives exec. It is no matter
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

// letGo gives back what only the start needed: freed heap, and those pages of
// the program's text that were used but once. They are clean pages of a file,
// so that the kernel brings back what is used after all.
func letGo() {
	debug.FreeOSMemory()
	self, err := os.Executable()
	if err != nil {
		return
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		// Text only: other pages may have been written to before they became
		// read-only.
		if len(f) < 6 || f[1] != "r-xp" || f[5] != self {
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err == nil {
			unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED)
		}
	}
}
