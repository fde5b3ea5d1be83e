// Package kubeadm runs unmodified kubeadm, and undoes a failed join. It changes the arguments
// that kubeadm has given kubelet, and restarts kubelet.
//
// kubeadm.go decides how kubeadm is called, and adds advice to common errors of kubeadm join.
package kubeadm
