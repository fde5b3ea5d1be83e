//go:build !linux

package builder

import (
	"errors"
	"os/exec"
)

// ownMounts does nothing: mmdebstrap exists only on Linux.
func ownMounts(*exec.Cmd) {}

// mountsBelow returns nil: mmdebstrap exists only on Linux.
func mountsBelow(string) []string { return nil }

// grantAccess always fails: mmdebstrap exists only on Linux.
func grantAccess(string, uint32) error { return errors.ErrUnsupported }
