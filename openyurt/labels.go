package openyurt

import (
	"slices"
	"strconv"
)

// Labels of an OpenYurt node.
const (
	LabelEdgeWorker = "openyurt.io/is-edge-worker"
	LabelNodePool   = "apps.openyurt.io/nodepool"
)

// LabelZone is a label of Kubernetes. OpenYurt after v1.7 sets it to the node pool's name on each
// Node that it turns into an edge node.
const LabelZone = "topology.kubernetes.io/zone"

// LabelKeys returns the keys of OpenYurt's labels.
func LabelKeys() []string { return []string{LabelEdgeWorker, LabelNodePool} }

// Labels returns the labels of an OpenYurt node in this pool.
func Labels(pool string, cloud bool) map[string]string {
	return map[string]string{LabelEdgeWorker: strconv.FormatBool(!cloud), LabelNodePool: pool}
}

// IsLabel reports whether a label is one of OpenYurt's.
func IsLabel(label string) bool { return slices.Contains(LabelKeys(), label) }

// Labelled reports whether a Node has all of OpenYurt's labels.
func Labelled(labels map[string]string) bool {
	return !slices.ContainsFunc(LabelKeys(), func(k string) bool { return labels[k] == "" })
}

// PoolOf returns the node pool in a Node's labels, "" if there is none.
func PoolOf(labels map[string]string) string { return labels[LabelNodePool] }

// IsCloud reports whether an OpenYurt node with these labels is a cloud node.
func IsCloud(labels map[string]string) bool { return labels[LabelEdgeWorker] != "true" }

// Unlabel returns the command that removes a Node from its pool.
func Unlabel(node string) string { return "kubectl label node " + node + " " + LabelNodePool + "-" }

// Unpooled is the problem of a node without a node pool.
const Unpooled = "yurthub starts only with the name of a node pool"
