// Package hub runs yurthub on an OpenYurt node: as a unit or, in old releases, as a static
// pod. It redirects kubelet to yurthub, closes its ports to others, and converts a running
// node to OpenYurt and back.
//
// Package openyurt describes the needs of each yurthub release; this package installs them.
// convert.go and revert.go have the steps of Convert and Revert; ports.go has the rules for
// ports.
package hub
