// Package kubeadm runs unmodified kubeadm, and undoes a failed join. It changes the arguments that
// kubeadm wrote for kubelet, and restarts kubelet.
//
// kubeadm.go builds kubeadm's command lines, and adds advice to common errors of kubeadm join.
package kubeadm
