// Package join makes a worker node a member of its cluster, and keeps it one: it finds
// the cluster, has kubeadm join, turns kubelet to the endpoint, waits for a Ready node
// and has the token forgotten. ipvscare, kubelet's arguments and the container images on
// board belong to it.
//
// What changes here: what a Node must have to count as Ready, and what is asked of API
// servers before they are trusted.
package join
