// Package oracle checks builder/images against containerd itself: its own packages unpack the same
// images, and the trees and databases are compared; its daemon is started on a baked store. systemd
// rates the confinement of a node's services. The package is a separate module, so that containerd
// never becomes a dependency of the product.
//
// Run it as root: cd test/oracle && go test ./...
//
// EDGEBAKE_MATRIX=all starts every series of containerd that edgebake supports,
// instead of 1.7 and the one in our images; compiling them takes some ten
// minutes once. EDGEBAKE_CONTAINERD=/usr/bin uses the programs in that
// directory instead, for example a distribution's.
//
// EDGEBAKE_BENCH=DIR runs the benchmarks and writes their results there: go
// test -run Bench -v -timeout 60m .
package oracle
