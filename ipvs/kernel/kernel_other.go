//go:build !linux

package kernel

import (
	"errors"
	"runtime"
)

// Open fails: IPVS is a part of Linux.
func Open(string) (Kernel, error) {
	return nil, errors.New("ipvscare runs on Linux only, this is " + runtime.GOOS)
}
