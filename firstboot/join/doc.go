// Package join makes a worker node a member of its cluster: it finds the cluster, runs kubeadm
// join, redirects kubelet to the endpoint, waits until the Node is Ready and removes the token. It
// also configures ipvscare and kubelet's arguments, and imports container images.
//
// ready.go decides when a Node counts as Ready. discovery.go finds the cluster and verifies that it
// is the Site's.
package join
