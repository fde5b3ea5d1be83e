// Package member reads and records a machine's membership in a cluster: credentials
// and certificates, the CA, the API servers, its Node, and the record by which it
// recognizes the cluster, even if the cluster was re-created with the same keys.
//
// It runs no phase. Most of it reads files and answers a question,
// offline where possible. files.go names the files of a membership.
// Machines in the field have them on their disks, except those on /run.
package member
