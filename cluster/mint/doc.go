// Package mint makes a cluster's identity before any of its machines is switched
// on: the CAs, the key for service accounts, a bootstrap token for each node and
// an administrator's kubeconfig. All are in one directory.
//
// Why offline: every control-plane node (master) is stamped with the same keys,
// so none of them has to be the first, and every node knows the cluster's CA
// before the cluster exists.
//
// Invariants:
//   - The directory appears complete or not at all. Files added later appear one by one,
//     each complete. No key in it is ever replaced; a CA's certificate that ends soon is
//     issued again with its own key.
//   - The directory belongs to one cluster forever. The fields that identify the
//     cluster are compared each time; a difference is an error.
//   - Only its owner can read the directory. With recipients, its secrets are
//     encrypted; what stays in clear (certificates, names, IDs of tokens) gives
//     no access.
//   - kubeadm's phases can use the contents of pki unchanged.
package mint
