//go:build !linux

package ipvs

import "errors"

// peer fails: SO_PEERCRED is Linux'.
func peer(string) (pid int, err error) {
	return 0, errors.ErrUnsupported
}
