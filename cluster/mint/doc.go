// Package mint makes a cluster's identity at a desk, before any of its
// machines is switched on: the CAs, the key of its service accounts, a
// bootstrap token for each node and an administrator's kubeconfig, all in one
// directory.
//
// Why offline: every control-plane node is stamped with the same keys, so none
// of them is the first, and every node knows the cluster's CA before the
// cluster exists.
//
// Invariants:
//   - The directory appears whole or not at all, and what is added later
//     appears file by file, whole. Nothing in it is ever replaced by a new key.
//   - The directory is one cluster's forever: what identifies the cluster is
//     compared each time, and a difference is an error.
//   - The directory is readable by its owner alone. With recipients, secrets
//     in it are encrypted; what stays in clear (certificates, names, ids of
//     tokens) gives no access.
//   - What kubeadm's phases find in pki they take as their own.
package mint
