//go:build !linux

package file

import "os"

// isOpenElsewhere always returns false: only Linux can tell.
func isOpenElsewhere(*os.File) bool { return false }
