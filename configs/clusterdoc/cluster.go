// Package clusterdoc has the Cluster document: control-plane nodes, workers, their common settings,
// and the kubeadm documents that may follow in the same file. It makes the Sites of a Cluster's
// machines.
package clusterdoc

import "github.com/edgebake/edgebake/configs"

// Cluster describes a whole cluster, including its control-plane nodes (masters). `edgebake
// cluster new` makes its keys and tokens. kubeadm documents (ClusterConfiguration,
// InitConfiguration, KubeletConfiguration, KubeProxyConfiguration) may follow in the same
// file, each after a line `---`. edgebake merges their settings with those of the Cluster.
type Cluster struct {
	// APIVersion is the version of the document format.
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	// Kind is the kind of this document.
	Kind string `yaml:"kind" json:"kind" jsonschema:"enum=Cluster"`
	// Name of the cluster: lower-case letters, digits and -.
	Name string `yaml:"name" json:"name" check:"clusterName"`
	// KubernetesVersion is the version of the control plane, e.g. v1.37.2.
	// It must be v1.31 or later. A control-plane node runs the
	// patch release of its image, which must have the same minor version.
	KubernetesVersion string `yaml:"kubernetesVersion" json:"kubernetesVersion"`

	// Endpoint is the cluster's domain name. Every worker maps it to the VIP, and every
	// control-plane node maps it to itself.
	Endpoint string `yaml:"endpoint,omitempty" json:"endpoint,omitempty" jsonschema:"default=apiserver.cluster.local" check:"endpoint"`
	// VIP is the virtual address that IPVS balances to the API servers. No
	// network of the site, no pod and no Service may use it.
	VIP string `yaml:"vip,omitempty" json:"vip,omitempty" jsonschema:"default=10.103.97.2"`
	// Port of the API servers.
	Port int `yaml:"port,omitempty" json:"port,omitempty" jsonschema:"default=6443,minimum=1,maximum=65535"`
	// PodCIDRs are the CIDRs of pods: one, or one IPv4 and one IPv6. Default:
	// 10.244.0.0/16, or fd00:244::/56 if the control-plane nodes use IPv6.
	PodCIDRs []string `yaml:"podCIDRs,omitempty" json:"podCIDRs,omitempty"`
	// ServiceCIDRs are the CIDRs of Services. They must have the families of podCIDRs, in the same
	// order. Default: 10.96.0.0/16, or fd00:96::/112. (kubeadm's own default, 10.96.0.0/12,
	// contains the default VIP.)
	ServiceCIDRs []string `yaml:"serviceCIDRs,omitempty" json:"serviceCIDRs,omitempty"`
	// ImageRepository is where the control plane's container images come from.
	ImageRepository string `yaml:"imageRepository,omitempty" json:"imageRepository,omitempty" jsonschema:"default=registry.k8s.io" check:"repository"`
	// KubeProxy sets how Services are reached on each node.
	KubeProxy KubeProxy `yaml:"kubeProxy,omitempty" json:"kubeProxy,omitempty"`
	// OpenYurt is whether the cluster runs OpenYurt, so that edge and cloud
	// nodes can join. Default true; false for a native cluster.
	OpenYurt *bool `yaml:"openyurt,omitempty" json:"openyurt,omitempty"`
	// Manifests are files of Kubernetes objects (YAML), e.g. for the CNI plugin and OpenYurt.
	// Their paths are relative to this file. They are applied in this order once the API server
	// answers. Render charts first (helm template).
	Manifests []string `yaml:"manifests,omitempty" json:"manifests,omitempty" check:"manifestPath" unique:"yes"`

	// Masters are the control-plane nodes, each with an API server and an etcd member. Use an odd
	// number of them: 1, 3 or 5.
	Masters []ControlPlaneNode `yaml:"masters" json:"masters"`
	// Nodes are the workers known so far. Each gets its own bootstrap token
	// and Site.
	Nodes []Node `yaml:"nodes,omitempty" json:"nodes,omitempty"`
	// TokenTTL is how long a bootstrap token is valid after it was made, e.g. 168h (a week). The
	// nodes must join within this time.
	TokenTTL string `yaml:"tokenTTL,omitempty" json:"tokenTTL,omitempty" jsonschema:"default=168h"`

	// Users are login accounts of every machine. Without any, nobody can log
	// in.
	Users []configs.User `yaml:"users,omitempty" json:"users,omitempty" unique:"name"`
	// Report sets where first boot of every machine sends its progress, in
	// addition to the console and the slot.
	Report Receiver `yaml:"report,omitempty" json:"report,omitempty"`
}

// Receiver is where first boot of the cluster's machines sends its progress.
type Receiver struct {
	// URL receives the reports as HTTPS POSTs. If key is set, the URL must not have a path.
	URL string `yaml:"url,omitempty" json:"url,omitempty" check:"https"`
	// Key is the key that `edgebake cluster listen` prints. With it, each machine's Site gets its
	// own URL, which is derived from the key, so that a machine cannot report as another one.
	// Without it, all machines share one URL.
	Key configs.Secret `yaml:"key,omitempty" json:"key,omitempty"`
	// CACert is the PEM certificate of the CA that signed the receiver's certificate, or the
	// receiver's own certificate if it is self-signed, as with `edgebake cluster listen`. Default:
	// the CAs in the image.
	CACert string `yaml:"caCert,omitempty" json:"caCert,omitempty" text:"lines" check:"certificates"`
}

// KubeProxy sets how Services are reached on each node.
type KubeProxy struct {
	// Mode is how kube-proxy balances Services. Use none if a CNI plugin replaces kube-proxy: then
	// the cluster has no kube-proxy.
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" jsonschema:"enum=iptables,enum=ipvs,enum=nftables,enum=none,default=iptables"`
	// BindAddress is the IP address that kube-proxy listens on.
	BindAddress string `yaml:"bindAddress,omitempty" json:"bindAddress,omitempty"`
}

// ControlPlaneNode is one control-plane node.
type ControlPlaneNode struct {
	// Name of the node.
	Name string `yaml:"name" json:"name"`
	// Address is the IP address at which the other machines of the cluster reach this node. It
	// cannot be changed later.
	Address string `yaml:"address" json:"address"`
	// Match selects the machine, as in a Site. An Inventory and `edgebake site sign` require it.
	Match configs.Match `yaml:"match,omitempty" json:"match,omitempty"`
	// Network of the machine. Default: DHCP on every wired interface. The DHCP server must then
	// always give this machine the IP address in the field address.
	Network configs.Network `yaml:"network,omitempty" json:"network,omitempty"`
}

// Node is one worker.
type Node struct {
	// Name of the node.
	Name string `yaml:"name" json:"name"`
	// NodeType is edge, cloud or native, as in a Site. Default: edge with a
	// nodePool, else native.
	NodeType string `yaml:"nodeType,omitempty" json:"nodeType,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud"`
	// NodePool is the node's OpenYurt pool.
	NodePool string `yaml:"nodePool,omitempty" json:"nodePool,omitempty" check:"nodePool"`
	// NodeIP selects the node's address if the machine has several, as in a
	// Site: for example 10.0.0.0/8.
	NodeIP string `yaml:"nodeIP,omitempty" json:"nodeIP,omitempty" check:"nodeIP"`
	// Labels are node labels set at registration.
	Labels map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"`
	// Taints are node taints set at registration.
	Taints []configs.Taint `yaml:"taints,omitempty" json:"taints,omitempty" unique:"key,effect"`
	// Match selects the machine, as in a Site. An Inventory and `edgebake site sign` require it.
	Match configs.Match `yaml:"match,omitempty" json:"match,omitempty"`
	// Network of the machine. Default: DHCP on every wired interface.
	Network configs.Network `yaml:"network,omitempty" json:"network,omitempty"`
}
