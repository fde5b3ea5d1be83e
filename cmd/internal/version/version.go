// Package version returns the version of the running program.
package version

import (
	"runtime/debug"
	"strings"
)

// source is the version of this source tree, for programs to which Go gave no version. Programs for
// images are compiled without one, so that the same source gives the same image. A release commit
// removes -dev; packaging checks that.
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

// Published returns the version of this module that the Go tool downloaded, as `go install` does.
// It returns "" if the program was compiled from a source tree.
func Published() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Sum != "" {
		return info.Main.Version
	}
	return ""
}
