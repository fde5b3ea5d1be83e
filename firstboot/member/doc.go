// Package member reads and records a machine's membership in a cluster: credentials and
// certificates, the CA, the API servers, the machine's Node, and the record that distinguishes its
// cluster from one that was recreated with the same keys.
//
// The package runs no phase. Most functions answer a question by reading files, offline if
// possible. files.go lists the files of a membership. Their paths must not change, because machines
// in use have them.
package member
