package configs

// Cluster is a whole cluster, masters included: what `edgebake cluster new`
// makes the keys and tokens of. Documents of kubeadm (ClusterConfiguration,
// InitConfiguration, KubeletConfiguration, KubeProxyConfiguration) may follow
// in the same file, each after a line `---`; what they set is merged in.
type Cluster struct {
	// APIVersion is the version of this document's form.
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	// Kind says that this is a Cluster.
	Kind string `yaml:"kind" json:"kind" jsonschema:"enum=Cluster"`
	// Name of the cluster: lower-case letters, digits and -.
	Name string `yaml:"name" json:"name"`
	// KubernetesVersion is the version of the control plane, e.g. v1.36.3.
	// v1.31 and later can be built from images.
	KubernetesVersion string `yaml:"kubernetesVersion" json:"kubernetesVersion"`

	// Endpoint is the cluster's domain name. Every node maps it to the VIP,
	// every master to itself.
	Endpoint string `yaml:"endpoint,omitempty" json:"endpoint,omitempty" jsonschema:"default=apiserver.cluster.local"`
	// VIP is the virtual address that IPVS balances to the masters: one that
	// no network of the site, no pod and no Service uses.
	VIP string `yaml:"vip,omitempty" json:"vip,omitempty" jsonschema:"default=10.103.97.2"`
	// Port of the API servers.
	Port int `yaml:"port,omitempty" json:"port,omitempty" jsonschema:"default=6443,minimum=1,maximum=65535"`
	// PodCIDRs are the pods' networks: one, or one IPv4 and one IPv6. Without
	// any: 10.244.0.0/16, or fd00:244::/56 where the masters are IPv6.
	PodCIDRs []string `yaml:"podCIDRs,omitempty" json:"podCIDRs,omitempty"`
	// ServiceCIDRs are the Services' networks, of the same families in the
	// same order. Without any: 10.96.0.0/16, or fd00:96::/112. (kubeadm's own
	// default, 10.96.0.0/12, contains the default VIP.)
	ServiceCIDRs []string `yaml:"serviceCIDRs,omitempty" json:"serviceCIDRs,omitempty"`
	// ImageRepository is where the control plane's container images come
	// from.
	ImageRepository string `yaml:"imageRepository,omitempty" json:"imageRepository,omitempty" jsonschema:"default=registry.k8s.io"`
	// KubeProxy is the Services' way on each node.
	KubeProxy ClusterKubeProxy `yaml:"kubeProxy,omitempty" json:"kubeProxy,omitempty"`
	// OpenYurt says that the cluster carries OpenYurt, so that edge and cloud
	// nodes can join. Default true; false for a native one.
	OpenYurt *bool `yaml:"openyurt,omitempty" json:"openyurt,omitempty"`
	// Manifests are files of Kubernetes objects (YAML), seen from this file's
	// folder and applied in this order once the API answers: the CNI,
	// OpenYurt, whatever else. Render charts first (helm template).
	Manifests []string `yaml:"manifests,omitempty" json:"manifests,omitempty"`

	// Masters are the control-plane nodes, each with an API server and a
	// member of etcd. An odd number: 1, 3 or 5.
	Masters []ClusterMaster `yaml:"masters" json:"masters"`
	// Nodes are the workers known so far. Each gets a bootstrap token and a
	// Site of its own.
	Nodes []ClusterNode `yaml:"nodes,omitempty" json:"nodes,omitempty"`
	// TokenTTL is how long the bootstrap tokens are valid after they are
	// made, e.g. 168h (a week): the time from minting to the last join.
	TokenTTL string `yaml:"tokenTTL,omitempty" json:"tokenTTL,omitempty" jsonschema:"default=168h"`

	// Users are logins of every machine. Without any there is no way to log
	// in.
	Users []User `yaml:"users,omitempty" json:"users,omitempty"`
	// Report is where first boot of every machine tells how it goes, besides
	// console and slot.
	Report Report `yaml:"report,omitempty" json:"report,omitempty"`
}

// ClusterKubeProxy is the Services' way on each node.
type ClusterKubeProxy struct {
	// Mode is how kube-proxy balances Services. none leaves kube-proxy out,
	// for a CNI that does its work.
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" jsonschema:"enum=iptables,enum=ipvs,enum=nftables,enum=none,default=iptables"`
	// BindAddress is the IP address that kube-proxy listens on.
	BindAddress string `yaml:"bindAddress,omitempty" json:"bindAddress,omitempty"`
}

// ClusterMaster is one control-plane node.
type ClusterMaster struct {
	// Name of the node.
	Name string `yaml:"name" json:"name"`
	// Address is the IP address that the other masters and all nodes reach
	// it at. It can never change.
	Address string `yaml:"address" json:"address"`
	// Match says which machine it is, for an Inventory.
	Match Match `yaml:"match,omitempty" json:"match,omitempty"`
	// Network of the machine. Nothing set: DHCP on every wired interface,
	// where address must be reserved for it.
	Network Network `yaml:"network,omitempty" json:"network,omitempty"`
}

// ClusterNode is one worker.
type ClusterNode struct {
	// Name of the node.
	Name string `yaml:"name" json:"name"`
	// NodeType is edge, cloud or native, as in a Site. Default: edge with a
	// nodePool, else native.
	NodeType string `yaml:"nodeType,omitempty" json:"nodeType,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud"`
	// NodePool is OpenYurt's pool of the node.
	NodePool string `yaml:"nodePool,omitempty" json:"nodePool,omitempty"`
	// Labels that kubelet registers the node with.
	Labels map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"`
	// Taints that kubelet registers the node with.
	Taints []Taint `yaml:"taints,omitempty" json:"taints,omitempty"`
	// Match says which machine it is, for an Inventory.
	Match Match `yaml:"match,omitempty" json:"match,omitempty"`
	// Network of the machine. Nothing set: DHCP on every wired interface.
	Network Network `yaml:"network,omitempty" json:"network,omitempty"`
}
