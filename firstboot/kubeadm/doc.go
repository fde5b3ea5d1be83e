// Package kubeadm runs kubeadm, unmodified, and undoes what a join of it left. It changes
// the arguments of the kubelet that kubeadm has made, and restarts it.
//
// What changes here: how kubeadm is called, and which of its words have a fix.
package kubeadm
