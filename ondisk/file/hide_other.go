//go:build !linux

package file

import "os"

// isOpenElsewhere always returns false: only Linux can detect this.
func isOpenElsewhere(*os.File) bool { return false }
