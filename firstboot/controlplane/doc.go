// Package controlplane makes a machine a control-plane node. It puts the cluster's keys in place,
// makes kubeadm create certificates and pods, and publishes a new cluster. It starts and maintains
// etcd, and makes and restores snapshots.
//
// No control-plane node is the first one: all carry out the same phases. publish.go decides which
// objects a new cluster gets, and certificates.go when certificates are renewed. Package etcdmember
// decides when and how etcd may start.
package controlplane
