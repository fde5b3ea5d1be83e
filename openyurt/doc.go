// Package openyurt has everything that edgebake knows about OpenYurt: the labels of its nodes;
// the supported releases of yurthub and their differences; yurthub's flags, unit, static pod,
// ports and paths; the arguments that redirect kubelet to it; and its requirements of a
// cluster.
//
// To support a new release, compare OpenYurt's source with each of these files. Add a row to
// releases, set since or until of flags that were added or removed, and adapt Needs.
// Everything here is a value or a pure function; package hub applies it to a machine.
package openyurt
