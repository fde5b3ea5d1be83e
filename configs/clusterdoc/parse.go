package clusterdoc

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// File is a Cluster with the documents that follow it in the same file.
type File struct {
	*Cluster
	// File is the name of the file for messages, and Text its content.
	File string
	Text []byte
	// Kubeadm contains the documents after the Cluster.
	Kubeadm kubeadm.Documents
	// Warnings lists settings that are allowed but rarely correct.
	Warnings configs.Problems
}

// Parse parses a Cluster and the kubeadm documents after it. Its error is of type Problems. It does
// not check the manifests that the Cluster names: package manifest does.
func Parse(name string, data []byte) (*File, error) {
	d, err := configs.Read(name, data)
	if err != nil {
		return nil, err
	}
	c, err := Read(d)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Read decodes a document that is a Cluster. Even if there is an error, it returns the fields that
// it could decode, so that their manifests can be checked too.
func Read(doc *configs.Document) (*File, error) {
	f := &File{Cluster: new(Cluster), File: doc.File, Text: doc.Data}
	err := doc.Parse(configs.KindCluster, f.Cluster, func() configs.Problems {
		var probs configs.Problems
		f.Kubeadm, f.Warnings, probs = kubeadm.ReadAfter(doc.File, doc.More, f.KubernetesVersion)
		doc.Probs = append(doc.Probs, probs...)
		if proxy := f.Kubeadm.Of("KubeProxyConfiguration"); proxy != nil && f.KubeProxy.Mode == "none" {
			doc.Addf(proxy, "KubeProxyConfiguration", "has no effect with kubeProxy.mode none: remove it")
		}
		for _, w := range append(f.warnings(), f.withoutDNS()...) {
			at := doc.Find(w.Path)
			w.File, w.Line, w.Col = doc.File, at.Line, at.Col
			f.Warnings = append(f.Warnings, w)
		}
		return f.Cluster.Validate()
	})
	return f, err
}

// HasOpenYurt reports whether the cluster runs OpenYurt.
func (c *Cluster) HasOpenYurt() bool { return c.OpenYurt == nil || *c.OpenYurt }

// TokenLifetime returns TokenTTL as a duration. The Cluster must be valid.
func (c *Cluster) TokenLifetime() time.Duration {
	d, _ := time.ParseDuration(c.TokenTTL)
	return d
}

// Default CIDRs of pods and Services. The key is true if control-plane nodes have IPv6 addresses.
var (
	defaultPods     = map[bool]string{false: "10.244.0.0/16", true: "fd00:244::/56"}
	defaultServices = map[bool]string{false: "10.96.0.0/16", true: "fd00:96::/112"}
)

// SetDefaults sets the defaults that depend on other fields.
func (c *Cluster) SetDefaults() {
	v6 := false
	if len(c.Masters) > 0 {
		a, err := netip.ParseAddr(c.Masters[0].Address)
		v6 = err == nil && a.Is6()
	}
	if len(c.PodCIDRs) == 0 {
		c.PodCIDRs = []string{defaultPods[v6]}
	}
	if len(c.ServiceCIDRs) == 0 {
		c.ServiceCIDRs = []string{defaultServices[v6]}
	}
	for i := range c.Nodes {
		if n := &c.Nodes[i]; n.NodeType == "" {
			n.NodeType = configs.NodeNative
			if n.NodePool != "" {
				n.NodeType = configs.NodeEdge
			}
		}
	}
}

// warnings returns settings that are allowed but rarely correct.
func (c *Cluster) warnings() configs.Problems {
	var probs configs.Problems
	if n := len(c.Masters); n > 0 && n%2 == 0 {
		probs.Add("masters", "%d control-plane nodes survive no more failures than %d: etcd needs more than half of its members; use %d or %d", n, n-1, n-1, n+1)
	} else if n > 7 {
		probs.Add("masters", "%d members make etcd slow: every write waits for more than half of them; use 3 or 5", n)
	}
	if c.KubeProxy.Mode == "ipvs" && !kubeadm.Before(c.KubernetesVersion, 35) {
		probs.Add("kubeProxy.mode", "kube-proxy's mode ipvs is deprecated since v1.35; use nftables or iptables (ipvscare does not need it)")
	}
	return probs
}

// withoutDNS warns about machines without a DNS server. CoreDNS cannot start on them, because
// kubeadm makes it forward other names to the machine's DNS servers.
func (f *File) withoutDNS() configs.Problems {
	if yamltree.True(yamltree.At(f.Kubeadm.Of("ClusterConfiguration"), "dns.disabled")) {
		return nil
	}
	var paths, names []string
	look := func(path, name string, n configs.Network) {
		if len(n.DNS) == 0 && !n.UsesDHCP() {
			paths, names = append(paths, path), append(names, name)
		}
	}
	for i, m := range f.Masters {
		look(fmt.Sprintf("masters[%d].network", i), m.Name, m.Network)
	}
	for i, n := range f.Nodes {
		look(fmt.Sprintf("nodes[%d].network", i), n.Name, n.Network)
	}
	var probs configs.Problems
	if len(names) > 0 {
		more := ""
		if len(names) > 1 {
			more = fmt.Sprintf(" and %d more", len(names)-1)
		}
		probs.Add(paths[0], "%s%s: no DNS server (neither dns nor dhcp): CoreDNS, which forwards to the machine's DNS servers, does not start there; add dns, or leave CoreDNS out with dns: {disabled: true} in a ClusterConfiguration", names[0], more)
	}
	return probs
}
