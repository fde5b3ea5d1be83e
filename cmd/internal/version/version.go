// Package version tells which edgebake a program was built from.
package version

import (
	"runtime/debug"
	"strings"
)

// source is the version of this source tree, for what Go stamps no version into:
// programs for images are made without one, so that the same source gives the
// same image however edgebake was compiled. A release is a commit that drops
// -dev, which packaging checks; the next one names the next version.
const source = "0.1.0-dev"

// unknown is what Go says where it knows no version.
const unknown = "(devel)"

// String is what the Go tool stamped into the program.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return unknown
	}
	return strings.TrimPrefix(info.Main.Version, "v")
}

// OfSource is String where the program has one, else the version of the source
// that it was compiled from: what a program says of itself.
func OfSource() string {
	if v := String(); v != unknown {
		return v
	}
	return source
}

// Published is the version in which the Go tool fetched our module, as with
// `go install`; empty where the program was compiled from a source tree.
func Published() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Sum != "" {
		return info.Main.Version
	}
	return ""
}
