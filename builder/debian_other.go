//go:build !linux

package builder

import (
	"errors"
	"os/exec"
)

// ownMounts does nothing: mmdebstrap exists on Linux only.
func ownMounts(*exec.Cmd) {}

// mountsBelow returns none: mmdebstrap exists on Linux only.
func mountsBelow(string) []string { return nil }

// grantAccess always fails: mmdebstrap exists on Linux only.
func grantAccess(string, uint32) error { return errors.ErrUnsupported }
