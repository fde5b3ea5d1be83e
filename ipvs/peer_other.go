//go:build !linux

package ipvs

import "errors"

// peer returns an error: SO_PEERCRED exists only on Linux.
func peer(string) (pid int, err error) {
	return 0, errors.ErrUnsupported
}
