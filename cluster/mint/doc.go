// Package mint makes ("mints") a cluster's identity before any of its machines is switched on: the
// CAs, the key for service accounts, a bootstrap token for each node and an administrator's
// kubeconfig. All are stored in one directory.
//
// It works offline because every control-plane node (master) is stamped with the same keys. So none
// of them has to be the first, and every node knows the cluster's CA before the cluster exists.
//
// Invariants:
//   - The directory appears complete or not at all. Files added later appear one by one,
//     each complete. No key of a CA or of the service accounts is ever replaced: a CA's
//     certificate that expires soon is issued again with the same key.
//   - The directory belongs to one cluster forever. Each run compares the fields that
//     identify the cluster; a difference is an error.
//   - Only its owner can read the directory. With recipients, its secrets are
//     encrypted. The files that stay unencrypted (certificates, names, IDs of tokens)
//     give no access.
//   - kubeadm's phases can use the contents of pki without changes.
package mint
