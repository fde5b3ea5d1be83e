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

// Published is the version in which the Go tool fetched our module, as with
// `go install`; empty where the program was compiled from a source tree.
func Published() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Sum != "" {
		return info.Main.Version
	}
	return ""
}
