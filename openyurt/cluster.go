package openyurt

import "golang.org/x/mod/semver"

// OpenYurt's API objects in a cluster.
const (
	// Group is the API group of its objects.
	Group    = "apps.openyurt.io"
	KindPool = "NodePool"
	Pools    = "nodepools"
	PoolCRD  = Pools + "." + Group
	// HubRole is the name of a ClusterRole and of its binding. It allows yurthub, which uses the
	// node's own rights, to list the objects that it caches.
	HubRole = "yurt-hub"
	// BootstrapRole is a ClusterRole of the yurt-manager chart after v1.7. It allows bootstrap
	// tokens to get NodePools; edgebake's nodes do not use it.
	BootstrapRole = HubRole + "-bootstrap"
	// TopologyKey is an annotation of a Service. Clients then use only endpoints in their part of
	// the cluster; the value PoolTopology means their own node pool.
	TopologyKey  = "openyurt.io/topologyKeys"
	PoolTopology = "openyurt.io/nodepool"
)

// Manager is OpenYurt's controller, a Deployment in ManagerNamespace. It approves yurthub's
// certificate requests.
const (
	Manager          = "yurt-manager"
	ManagerNamespace = systemNamespace
)

// Fixes that install OpenYurt's components in the cluster.
const (
	InstallManager = "install OpenYurt's " + Manager + " chart of yurthub's release"
	GrantHubRole   = "install OpenYurt's yurthub chart: it grants system:nodes the ClusterRole " + HubRole
)

// Signers of yurthub's certificates. kubelet may also request certificates from ServerSigner, but
// only those of yurthub contain ServerName.
const (
	ClientSigner = "kubernetes.io/kube-apiserver-client"
	ServerSigner = "kubernetes.io/kubelet-serving"
	ServerName   = "kubernetes"
)

// NodeLifecycle is the controller that detects dead nodes. It must run in exactly one of
// kube-controller-manager and yurt-manager.
const NodeLifecycle = "nodelifecycle"

// LifecycleSince is the first release of OpenYurt that leaves NodeLifecycle to
// kube-controller-manager.
const LifecycleSince = "v1.6.0"

// RunsLifecycle reports whether this version of Manager runs NodeLifecycle by default. It returns
// false if the version is unknown.
func RunsLifecycle(version string) bool {
	return semver.IsValid(version) && semver.Compare(version, LifecycleSince) < 0
}

// Types of node pools.
const (
	PoolEdge  = "Edge"
	PoolCloud = "Cloud"
)

// PoolProblem returns why an edge or cloud node does not belong in a pool of this type, and the
// fix; "" if it belongs there. OpenYurt's controller turns every node in a pool of type Edge into
// an edge node, but never turns an edge node into a cloud node.
func PoolProblem(poolType string, cloud bool) (what, fix string) {
	switch {
	case cloud && poolType == PoolEdge:
		return "is of type Edge, and OpenYurt would turn this cloud node into an edge node", "choose a node pool of type Cloud, or node type edge"
	case !cloud && poolType == PoolCloud:
		return "is of type Cloud, and the node is an edge node", "choose a node pool of type Edge, or node type cloud"
	}
	return "", ""
}
