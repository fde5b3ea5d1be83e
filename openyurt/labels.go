package openyurt

import (
	"slices"
	"strconv"
)

// Labels of a Node that is OpenYurt's.
const (
	LabelEdgeWorker = "openyurt.io/is-edge-worker"
	LabelNodePool   = "apps.openyurt.io/nodepool"
)

// LabelZone is a label of Kubernetes. OpenYurt after v1.7 sets it to the node pool's
// name on each Node that it converts to an edge node.
const LabelZone = "topology.kubernetes.io/zone"

// LabelKeys are all of them.
func LabelKeys() []string { return []string{LabelEdgeWorker, LabelNodePool} }

// Labels make a Node OpenYurt's.
func Labels(pool string, cloud bool) map[string]string {
	return map[string]string{LabelEdgeWorker: strconv.FormatBool(!cloud), LabelNodePool: pool}
}

// IsLabel reports whether a label is one of OpenYurt's.
func IsLabel(label string) bool { return slices.Contains(LabelKeys(), label) }

// Labelled reports whether a Node with these labels is OpenYurt's, whole.
func Labelled(labels map[string]string) bool {
	return !slices.ContainsFunc(LabelKeys(), func(k string) bool { return labels[k] == "" })
}

// PoolOf is the node pool that a Node with these labels is in; "": none.
func PoolOf(labels map[string]string) string { return labels[LabelNodePool] }

// IsCloud reports whether a Node of OpenYurt's with these labels is a cloud node.
func IsCloud(labels map[string]string) bool { return labels[LabelEdgeWorker] != "true" }

// Unlabel is how a person takes a Node out of its pool.
func Unlabel(node string) string { return "kubectl label node " + node + " " + LabelNodePool + "-" }

// Unpooled says what is wrong with a node that names no pool.
const Unpooled = "yurthub starts only with the name of a node pool"
