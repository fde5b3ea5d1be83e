// Package controlplane makes a machine a control-plane node. It puts the cluster's keys
// in place, has kubeadm make certificates and pods, and publishes a new cluster. It looks
// after etcd: the decision of package seat is carried out here, snapshots are taken and
// restored.
//
// No control-plane node is the first: each carries out the same phases. What changes
// here: what a cluster gets at its birth, and when certificates are renewed. The rules by
// which etcd may start are in package seat.
package controlplane
