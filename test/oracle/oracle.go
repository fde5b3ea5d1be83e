// Package oracle checks builder/images against containerd itself: containerd's own packages unpack
// the same images, and the resulting trees and databases are compared. It also starts containerd's
// daemon on a baked store, and makes systemd rate the confinement of a node's services. It is a
// separate module, so that containerd never becomes a dependency of the product.
//
// Run it as root: cd test/oracle && go test ./...
//
// EDGEBAKE_MATRIX=all starts every series of containerd that edgebake supports, instead of only 1.7
// and the one in edgebake's images. Compiling them takes about ten minutes, once.
// EDGEBAKE_CONTAINERD=/usr/bin uses the programs in that directory instead, for example a
// distribution's.
//
// EDGEBAKE_BENCH=DIR also runs the benchmarks, and writes their results to DIR: go test -run Bench
// -v -timeout 60m .
package oracle
