// Package hub runs yurthub on an OpenYurt node: as a unit or, in old releases, as a static
// pod. It redirects kubelet to yurthub, closes its ports to others, and converts a running
// node to OpenYurt and back.
//
// Package openyurt describes what a release of yurthub needs; this
// package installs that on a machine. convert.go and revert.go have
// the steps of Convert and Revert; ports.go has the rules for ports.
package hub
