package openyurt

import "golang.org/x/mod/semver"

// What a cluster has of OpenYurt.
const (
	// Group is the API group of its objects, API its path.
	Group    = "apps.openyurt.io"
	KindPool = "NodePool"
	Pools    = "nodepools"
	PoolCRD  = Pools + "." + Group
	// HubRole is the ClusterRole, and its binding, that let yurthub list what it
	// caches, with the node's own rights.
	HubRole = "yurt-hub"
	// BootstrapRole is a ClusterRole of the yurt-manager chart after v1.7. It lets a
	// bootstrap token get NodePools, which edgebake's nodes never do.
	BootstrapRole = HubRole + "-bootstrap"
	// TopologyKey annotates a Service whose clients are served within the part of
	// the cluster that its value names; PoolTopology: within their own pool.
	TopologyKey  = "openyurt.io/topologyKeys"
	PoolTopology = "openyurt.io/nodepool"
)

// Manager is OpenYurt's controller, a Deployment in ManagerNamespace. It approves
// yurthub's certificates.
const (
	Manager          = "yurt-manager"
	ManagerNamespace = systemNamespace
)

// What installs the cluster's part.
const (
	InstallManager = "install OpenYurt's " + Manager + " chart, of the release that yurthub is of"
	GrantHubRole   = "install OpenYurt's yurthub chart: it grants system:nodes the ClusterRole " + HubRole
)

// Signers of yurthub's certificates. Kubelet may request a certificate of
// ServerSigner too; only yurthub's has ServerName among its names.
const (
	ClientSigner = "kubernetes.io/kube-apiserver-client"
	ServerSigner = "kubernetes.io/kubelet-serving"
	ServerName   = "kubernetes"
)

// NodeLifecycle is the controller that watches whether nodes live. Exactly one
// of kube-controller-manager and yurt-manager must run it.
const NodeLifecycle = "nodelifecycle"

// LifecycleSince is the first release of OpenYurt that leaves it to
// kube-controller-manager.
const LifecycleSince = "v1.6.0"

// RunsLifecycle reports whether Manager of that version runs NodeLifecycle unless
// it is told otherwise; false where the version is unknown.
func RunsLifecycle(version string) bool {
	return semver.IsValid(version) && semver.Compare(version, LifecycleSince) < 0
}

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
