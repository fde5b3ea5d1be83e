// Package hub runs yurthub on an OpenYurt node: as a unit or, in old releases, as a static pod. It
// redirects kubelet to yurthub, closes yurthub's ports to others, and converts a running node to
// OpenYurt and back.
//
// Package openyurt describes the needs of each yurthub release; this package applies them to a
// machine. convert.go and revert.go contain the steps of Convert and Revert, and ports.go the rules
// for ports.
package hub
