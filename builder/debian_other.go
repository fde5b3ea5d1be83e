//go:build !linux

package builder

import "os/exec"

// ownMounts does nothing: only Linux has mmdebstrap.
func ownMounts(*exec.Cmd) {}

// mountsBelow finds none, for the same reason.
func mountsBelow(string) []string { return nil }
