// Package version returns the version of the running program.
package version

import (
	"runtime/debug"
	"strings"
)

// source is the version of this source tree, for programs in which Go records no version. Programs
// in images have none, so that the same source gives the same image. A release commit removes -dev.
const source = "0.1.0-dev"

// unknown is Go's text for an unknown version.
const unknown = "(devel)"

// String returns the version that the Go tool recorded in the program.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return unknown
	}
	return strings.TrimPrefix(info.Main.Version, "v")
}

// OfSource returns String or, if that is unknown, the version of the source tree. Programs print it
// for --version.
func OfSource() string {
	if v := String(); v != unknown {
		return v
	}
	return source
}

// Published returns the version of this module if the Go tool downloaded it, as `go install` does.
// It returns "" if the program was compiled from a source tree.
func Published() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Sum != "" {
		return info.Main.Version
	}
	return ""
}
