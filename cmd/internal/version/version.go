// Package version tells which edgebake a program was built from.
package version

import (
	"runtime/debug"
	"strings"
)

// String is what the Go tool stamped into the program.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return strings.TrimPrefix(info.Main.Version, "v")
}
