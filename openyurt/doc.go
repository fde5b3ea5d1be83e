// Package openyurt is all that edgebake knows of OpenYurt: the labels of its
// nodes, the releases of yurthub that are supported and what each runs with, its
// flags, its unit and its static pod, its ports and paths, how kubelet is turned
// to it, and what it lists in the cluster before it is ready.
//
// To support a new release of OpenYurt, compare its source with each of these
// files and add a row to releases; flags that came or went get since or until, and
// what the cluster must have is in Needs. Everything is a value or a pure function;
// package firstboot uses them on a machine.
package openyurt
