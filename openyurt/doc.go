// Package openyurt is all that edgebake knows of OpenYurt: the labels of its
// nodes, the releases of yurthub that are supported and what each runs with, its
// flags, its unit and its static pod, its ports and paths, how kubelet is turned
// to it, and what it lists in the cluster before it is ready.
//
// A new release of OpenYurt is taken up here: hold its source against each of
// the files, and widen Newest. Everything is a value or a pure function; what
// is done with them on a machine is firstboot's.
package openyurt
