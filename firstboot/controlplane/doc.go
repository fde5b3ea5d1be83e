// Package controlplane makes a machine a control-plane node. It puts the cluster's keys in
// place, makes kubeadm create certificates and pods, and publishes a new cluster. It starts
// etcd as package etcdmember decides, maintains it, and makes and restores snapshots.
//
// No control-plane node is the first: each carries out the same phases. publish.go
// decides what a new cluster gets; certificates.go decides when certificates are renewed. The
// rules by which etcd may start are in package etcdmember.
package controlplane
