// Package openyurt has all of edgebake's knowledge about OpenYurt: the labels of its nodes; the
// supported releases of yurthub and how they differ; yurthub's flags, unit, static pod, ports and
// paths; the arguments that redirect kubelet to it; and what it requires of a cluster.
//
// To support a new release, compare OpenYurt's source with each of these files. Add a row to
// releases, set since or until of flags that were added or removed, and adapt Needs. This package
// has only values and pure functions; package hub applies them to a machine.
package openyurt
