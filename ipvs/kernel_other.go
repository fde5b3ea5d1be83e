//go:build !linux

package ipvs

import (
	"errors"
	"runtime"
)

// OpenKernel fails: IPVS is a part of Linux.
func OpenKernel() (Kernel, error) {
	return nil, errors.New("ipvscare runs on Linux only, this is " + runtime.GOOS)
}

// peer fails: there are no abstract sockets.
func peer(string) (pid, uid int, err error) {
	return 0, 0, errors.ErrUnsupported
}
