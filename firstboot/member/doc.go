// Package member reads and records a machine's membership in a cluster: credentials
// and certificates, the CA, the API servers, its Node, and the record by which it
// recognizes the cluster, even if the cluster was recreated with the same keys.
//
// The package runs no phase. Most functions read files to answer a question, offline where
// possible. files.go lists the files of a membership. Their paths must not change, since
// machines in the field use them.
package member
