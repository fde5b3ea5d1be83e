//go:build !linux

package procgroup

import "syscall"

// running reports whether a process of the group exists.
func running(group int) bool { return syscall.Kill(-group, 0) == nil }
