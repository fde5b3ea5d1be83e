// Package cluster works on a running cluster for an operator: tokens, status, preconditions of
// OpenYurt, and updates of many nodes (rollout). It is the only package that imports client-go; no
// program that runs on a node imports it.
//
// Invariants:
//   - Before the first write, the rights for all writes are checked. The error lists all missing
//     rights by verb and resource.
//   - An error names the object and the fix, never a secret.
package cluster
