// Package join makes a worker node a member of its cluster: it finds the cluster, runs kubeadm
// join, redirects kubelet to the endpoint, waits for a Ready Node and forgets the token. It
// also configures ipvscare and kubelet's arguments, and imports container images.
//
// What changes here: when a Node counts as Ready, and how API servers are verified.
package join
