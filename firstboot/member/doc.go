// Package member is what a machine holds of a cluster: credentials and certificates, the
// CA that it trusts, the API servers that it knows, its Node as it sees it, and the notes
// by which it recognises its cluster, also one that was born again with the same keys.
//
// It runs no phase. Most of it reads files and answers a question, without a network
// where that is possible. What changes here: what is kept of a cluster, with the paths in
// files.go, which machines in the field have on their disks.
package member
