// Package openyurt is everything that edgebake knows about OpenYurt: the labels
// of its nodes; the supported releases of yurthub and what differs between them;
// yurthub's flags, unit, static pod, ports and paths; the arguments that turn
// kubelet to it; and what it requires of a cluster.
//
// To support a new release, compare OpenYurt's source with each of these files.
// Add a row to releases, set since or until of flags that were added or removed,
// and adapt Needs. Everything here is a value or a pure function; package
// firstboot uses them on a machine.
package openyurt
