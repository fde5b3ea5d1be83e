// Package cluster works on a running cluster for an operator: tokens, status, preconditions of
// OpenYurt, and updates of many nodes (rollout). It is the only package that imports client-go; no
// program that runs on a node imports it.
//
// Invariants:
//   - Before anything is written, the rights for all of it are checked, and all missing ones
//     are listed by verb and resource.
//   - An error names the object and the fix, never a secret.
package cluster
