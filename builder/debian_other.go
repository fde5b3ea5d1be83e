//go:build !linux

package builder

import (
	"errors"
	"os/exec"
)

// ownMounts does nothing: only Linux has mmdebstrap.
func ownMounts(*exec.Cmd) {}

// mountsBelow finds none, for the same reason.
func mountsBelow(string) []string { return nil }

// grantAccess has nobody to let in, for the same reason.
func grantAccess(string, uint32) error { return errors.ErrUnsupported }
