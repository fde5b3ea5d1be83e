//go:build !linux

package kernel

import (
	"errors"
	"runtime"
)

// Open returns an error: IPVS exists only on Linux.
func Open(string) (Kernel, error) {
	return nil, errors.New("ipvscare runs only on Linux, not on " + runtime.GOOS)
}
