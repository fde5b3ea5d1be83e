// Package kubeadm runs unmodified kubeadm, and undoes a failed join. It changes the arguments
// that kubeadm has given kubelet, and restarts kubelet.
//
// What changes here: how kubeadm is called, and which of its errors have a fix.
package kubeadm
