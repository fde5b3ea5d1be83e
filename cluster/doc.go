// Package cluster does what an operator asks of a living cluster: tokens,
// status, OpenYurt's preconditions. It is the one place with client-go, for
// kubeconfigs and requests of every kind; nothing that runs on a node imports
// it.
//
// Invariants:
//   - Before anything is written, the rights for all of it are asked for, and
//     those missing are named together, by verb and resource.
//   - An error names the object and what to do, never a secret.
package cluster
