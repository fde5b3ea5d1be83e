// Package oracle checks builder/images against containerd itself: its own
// packages unpack the same images and the trees and databases are compared,
// and its daemon is started on a baked store. systemd judges how far the services of
// a node are confined. It is a module of its own, so that containerd never becomes a
// dependency of the product.
//
// Run it as root: cd test/oracle && go test ./...
//
// EDGEBAKE_MATRIX=all starts every series of containerd that a baked store is
// said to work with, instead of 1.7 and the one our images carry; compiling
// them takes some ten minutes once. EDGEBAKE_CONTAINERD=/usr/bin takes the
// programs of that folder instead: a distribution's own.
//
// EDGEBAKE_BENCH=FOLDER runs the benchmarks and writes their results there:
// go test -run Bench -v -timeout 60m .
package oracle
