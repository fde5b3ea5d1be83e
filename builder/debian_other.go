//go:build !linux

package builder

import "os/exec"

// ownMounts does nothing: only Linux has mmdebstrap.
func ownMounts(*exec.Cmd) {}
