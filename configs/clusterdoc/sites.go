package clusterdoc

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// APIServers returns the API servers as host:port.
func (c *Cluster) APIServers() []string {
	var out []string
	for _, m := range c.Masters {
		out = append(out, net.JoinHostPort(m.Address, fmt.Sprint(c.Port)))
	}
	return out
}

// siteFrame returns a Site with the type and the name of a machine, and the fields that the Cluster
// sets for all machines.
func (c *Cluster) siteFrame(nodeType, node string) configs.Site {
	s := configs.Site{APIVersion: configs.APIVersion, Kind: configs.KindSite, NodeName: node, Masters: c.APIServers(), Endpoint: c.Endpoint, VIP: c.VIP, NodeType: nodeType, Users: c.Users, Report: c.Report.of(node)}
	strict.ApplyDefaults(&s)
	return s
}

// NodeSite returns the Site of a worker. The Cluster must be valid.
func (c *Cluster) NodeSite(n *Node, token configs.Secret, caHash string) *configs.Site {
	s := c.siteFrame(n.NodeType, n.Name)
	s.NodePool, s.NodeIP, s.Labels, s.Taints, s.Match, s.Network = n.NodePool, n.NodeIP, n.Labels, n.Taints, n.Match, n.Network
	s.Credentials.Token = token
	s.CACertHashes = []string{caHash}
	s.SpreadSeconds = configs.DefaultSpread(len(c.Nodes))
	return &s
}

// ControlPlaneSite returns the Site of a control-plane node, without credentials. The Cluster must
// be valid. bootstrap is the time until which the cluster may be initialized. If it is zero, the
// Site never allows that.
func (f *File) ControlPlaneSite(m *ControlPlaneNode, id, caHash string, bootstrap time.Time) (*configs.Site, error) {
	s := f.siteFrame(configs.NodeControlPlane, m.Name)
	s.Match, s.Network = m.Match, m.Network
	s.IPVS.Disabled = true
	s.CACertHashes = []string{caHash}
	c := &configs.SiteControlPlane{ID: id}
	for _, o := range f.Masters {
		c.Members = append(c.Members, configs.ControlPlaneMember{Name: o.Name, Address: o.Address})
	}
	if !bootstrap.IsZero() {
		c.BootstrapUntil = bootstrap.UTC().Format(time.RFC3339)
	}
	docs, err := f.controlPlaneDocuments(m)
	if err != nil {
		return nil, err
	}
	c.Kubeadm = string(docs)
	s.ControlPlane = c
	return &s, nil
}

// Rate limits for the requests of kube-controller-manager, which sends two requests for the
// certificate of each node that joins. With these rates, 4,000 nodes that start together wait one
// minute. With the default, 20 requests per second, they would wait nearly seven minutes.
const (
	managerQPS   = "kube-api-qps"
	managerBurst = "kube-api-burst"
	// ManagerQPS is the value of --kube-api-qps.
	ManagerQPS = 150
)

// setManagerRates sets managerQPS and managerBurst, unless the Cluster's own kubeadm documents set one
// of them.
func setManagerRates(cluster *yaml.Node) {
	list := yamltree.ListAt(cluster, "controllerManager", "extraArgs")
	for _, arg := range list.Content {
		if name := yamltree.Text(yamltree.Get(yamltree.Deref(arg), "name")); name == managerQPS || name == managerBurst {
			return
		}
	}
	for _, a := range []struct {
		name  string
		value int
	}{{managerQPS, ManagerQPS}, {managerBurst, 2 * ManagerQPS}} {
		list.Content = append(list.Content, yamltree.Mapping("name", yamltree.Quoted(a.name), "value", yamltree.Quoted(strconv.Itoa(a.value))))
	}
}

// controlPlaneDocuments returns the kubeadm documents for a control-plane node: those in the
// Cluster's file, completed from fields of the Cluster.
func (f *File) controlPlaneDocuments(m *ControlPlaneNode) ([]byte, error) {
	docs := kubeadm.Documents{
		f.document("ClusterConfiguration"), f.document("InitConfiguration"), f.document("KubeletConfiguration"),
	}
	cluster, init := docs[0].Root, docs[1].Root
	str := func(n *yaml.Node, value string, path ...string) {
		if value != "" {
			yamltree.SetAt(n, yamltree.Quoted(value), path...)
		}
	}
	str(cluster, f.Name, "clusterName")
	str(cluster, f.KubernetesVersion, "kubernetesVersion")
	str(cluster, fmt.Sprintf("%s:%d", f.Endpoint, f.Port), "controlPlaneEndpoint")
	str(cluster, f.ImageRepository, "imageRepository")
	str(cluster, "ECDSA-P256", "encryptionAlgorithm")
	str(cluster, strings.Join(f.PodCIDRs, ","), "networking", "podSubnet")
	str(cluster, strings.Join(f.ServiceCIDRs, ","), "networking", "serviceSubnet")
	str(cluster, configs.EtcdDataDir, "etcd", "local", "dataDir")
	setManagerRates(cluster)
	names := []string{f.Endpoint, f.VIP}
	for _, o := range f.Masters {
		names = append(names, strings.Split(f.nodeIP(&o), ",")...)
	}
	addItems(cluster, names, "apiServer", "certSANs")
	str(init, m.Name, "nodeRegistration", "name")
	str(init, defaultCRISocket, "nodeRegistration", "criSocket")
	str(init, m.Address, "localAPIEndpoint", "advertiseAddress")
	yamltree.SetAt(init, yamltree.Plain(fmt.Sprint(f.Port), "!!int"), "localAPIEndpoint", "bindPort")
	if yamltree.At(init, "timeouts.controlPlaneComponentHealthCheck") == nil {
		str(init, componentTimeout, "timeouts", "controlPlaneComponentHealthCheck")
	}
	args := yamltree.List(yamltree.Mapping("name", yamltree.Quoted("node-ip"), "value", yamltree.Quoted(f.nodeIP(m))))
	if own := yamltree.At(init, "nodeRegistration.kubeletExtraArgs"); own != nil && own.Kind == yaml.SequenceNode {
		args.Content = append(args.Content, own.Content...)
	}
	yamltree.SetAt(init, args, "nodeRegistration", "kubeletExtraArgs")
	if f.KubeProxy.Mode == "none" {
		yamltree.SetAt(cluster, yamltree.Plain("true", "!!bool"), "proxy", "disabled")
		return docs.Encode()
	}
	proxy := f.document("KubeProxyConfiguration")
	str(proxy.Root, f.KubeProxy.Mode, "mode")
	str(proxy.Root, f.KubeProxy.BindAddress, "bindAddress")
	if f.KubeProxy.Mode == "ipvs" {
		// kube-proxy would remove virtual servers that it has not created, such as ipvscare's.
		bits := 32
		if strings.Contains(f.VIP, ":") {
			bits = 128
		}
		addItems(proxy.Root, []string{fmt.Sprintf("%s/%d", f.VIP, bits)}, "ipvs", "excludeCIDRs")
	}
	return append(docs, proxy).Encode()
}

// nodeIP returns kubelet's --node-ip for a control-plane node. It contains addresses of both
// families if the cluster has both families and the machine has a static address of each.
func (f *File) nodeIP(m *ControlPlaneNode) string {
	if len(f.ServiceCIDRs) < 2 {
		return m.Address
	}
	return cmp.Or(m.Network.BothAddresses(m.Address), m.Address)
}

// componentTimeout is the time that a control-plane component may need to start. kubeadm also uses
// it for startup probes: with the default of four minutes, kubelet would kill an API server on a
// slow machine again and again.
const componentTimeout = "20m0s"

const defaultCRISocket = "unix:///run/containerd/containerd.sock"

// document returns a copy of the user's document of this kind, or an empty document.
func (f *File) document(kind string) kubeadm.Document {
	root := yamltree.Mapping()
	if own := f.Kubeadm.Of(kind); own != nil {
		root = cloneNode(own)
	}
	yamltree.SetAt(root, yamltree.Plain(kubeadm.Versions[kind], "!!str"), "apiVersion")
	yamltree.SetAt(root, yamltree.Plain(kind, "!!str"), "kind")
	return kubeadm.Document{Kind: kind, Root: root}
}

// cloneNode copies a tree and replaces aliases by their values.
func cloneNode(n *yaml.Node) *yaml.Node {
	c := *yamltree.Deref(n)
	c.Anchor, c.Alias = "", nil
	c.Content = slices.Clone(c.Content)
	for i := range c.Content {
		c.Content[i] = cloneNode(c.Content[i])
	}
	return &c
}

// addItems adds the items that a list does not contain yet.
func addItems(root *yaml.Node, items []string, path ...string) {
	list := yamltree.ListAt(root, path...)
	for _, item := range items {
		if !slices.ContainsFunc(list.Content, func(n *yaml.Node) bool { return yamltree.Deref(n).Value == item }) {
			list.Content = append(list.Content, yamltree.Quoted(item))
		}
	}
}
