//go:build !linux

package ipvs

import (
	"errors"
	"runtime"
)

// OpenKernel fails: IPVS is a part of Linux.
func OpenKernel(string) (Kernel, error) {
	return nil, errors.New("ipvscare runs on Linux only, this is " + runtime.GOOS)
}

// peer fails: SO_PEERCRED is Linux'.
func peer(string) (pid int, err error) {
	return 0, errors.ErrUnsupported
}
