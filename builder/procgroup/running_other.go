//go:build !linux

package procgroup

import "syscall"

// running reports whether the group has a process.
func running(group int) bool { return syscall.Kill(-group, 0) == nil }
