package openyurt

// What a cluster has of OpenYurt.
const (
	// Group is the API group of its objects, API its path.
	Group   = "apps.openyurt.io"
	PoolCRD = "nodepools." + Group
	// HubRole is the ClusterRole, and its binding, that let yurthub list what it
	// caches, with the node's own rights.
	HubRole = "yurt-hub"
	// TopologyKey annotates a Service whose clients are served within the part of
	// the cluster that its value names; PoolTopology: within their own pool.
	TopologyKey  = "openyurt.io/topologyKeys"
	PoolTopology = "openyurt.io/nodepool"
)

// Types of node pools.
const (
	PoolEdge  = "Edge"
	PoolCloud = "Cloud"
)

// PoolProblem says why an edge or a cloud node does not belong into a pool of
// that type, and the fix; empty: it does. OpenYurt's controller makes edge nodes
// of all nodes in pools of type Edge; an edge node in a pool of another type
// stays one.
func PoolProblem(poolType string, cloud bool) (what, fix string) {
	switch {
	case cloud && poolType == PoolEdge:
		return "is of type Edge, and OpenYurt would turn this cloud node into an edge node", "choose a node pool of type Cloud, or node type edge"
	case !cloud && poolType == PoolCloud:
		return "is of type Cloud, and the node is an edge node", "choose a node pool of type Edge, or node type cloud"
	}
	return "", ""
}
