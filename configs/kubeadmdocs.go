package configs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// KubeadmLocal is what kubeadm's documents need beside the Site's when kubeadm
// runs on the machine.
type KubeadmLocal struct {
	// EtcdTag and DNSTag are those of the images on board; empty: kubeadm's own.
	EtcdTag, DNSTag string
	// CertificatesDir is where kubeadm reads and makes certificates; empty:
	// where the control plane has them.
	CertificatesDir string
	// EtcdArgs are how etcd starts; of what is uploaded to the cluster, none:
	// they hold for one start of one member.
	EtcdArgs []KubeadmArg
	// Token is a bootstrap token, valid for TokenTTL; zero: kubeadm is not to
	// make one.
	Token    Secret
	TokenTTL time.Duration
}

// KubeadmArg is an argument of a component.
type KubeadmArg struct{ Name, Value string }

// KubeadmDocuments are the documents for kubeadm on this machine; of a valid
// Site. With a token, they are secret.
func (s *Site) KubeadmDocuments(l KubeadmLocal) ([]byte, error) {
	docs, probs := kubeadm.ReadText(s.ControlPlane.Kubeadm)
	if probs != nil {
		return nil, fmt.Errorf("reading kubeadm's documents: %w", probs)
	}
	cluster, init := docs.Of("ClusterConfiguration"), docs.Of("InitConfiguration")
	if l.EtcdTag != "" && yamltree.At(cluster, "etcd.local.imageTag") == nil {
		yamltree.SetAt(cluster, yamltree.Quoted(l.EtcdTag), "etcd", "local", "imageTag")
	}
	if l.DNSTag != "" && yamltree.At(cluster, "dns.imageTag") == nil {
		yamltree.SetAt(cluster, yamltree.Quoted(l.DNSTag), "dns", "imageTag")
	}
	if l.CertificatesDir != "" {
		yamltree.SetAt(cluster, yamltree.Quoted(l.CertificatesDir), "certificatesDir")
	}
	if len(l.EtcdArgs) > 0 {
		list := yamltree.ListAt(cluster, "etcd", "local", "extraArgs")
		for _, a := range l.EtcdArgs {
			list.Content = append(list.Content, yamltree.Mapping("name", yamltree.Quoted(a.Name), "value", yamltree.Quoted(a.Value)))
		}
	}
	if !l.Token.IsZero() {
		yamltree.SetAt(init, yamltree.List(yamltree.Mapping(
			"token", yamltree.Quoted(l.Token.Reveal()),
			"ttl", yamltree.Quoted(l.TokenTTL.String()),
			"description", yamltree.Quoted("made by first boot while it published the cluster"),
		)), "bootstrapTokens")
	}
	return docs.Encode()
}

// ClusterDocuments are the documents that kubeadm uploads to the cluster; of a valid Site.
func (s *Site) ClusterDocuments() ([]byte, error) {
	return s.documentsOfKind("ClusterConfiguration", "KubeletConfiguration")
}

// ProxyDocument is the KubeProxyConfiguration of a valid Site; empty: it has none.
func (s *Site) ProxyDocument() ([]byte, error) {
	return s.documentsOfKind("KubeProxyConfiguration")
}

func (s *Site) documentsOfKind(kinds ...string) ([]byte, error) {
	docs, probs := kubeadm.ReadText(s.ControlPlane.Kubeadm)
	if probs != nil {
		return nil, fmt.Errorf("reading kubeadm's documents: %w", probs)
	}
	docs = slices.DeleteFunc(docs, func(d kubeadm.Document) bool { return !slices.Contains(kinds, d.Kind) })
	return docs.Encode()
}

// KubernetesVersion is the control plane's; of a valid Site.
func (c *SiteControlPlane) KubernetesVersion() string {
	docs, _ := kubeadm.ReadText(c.Kubeadm)
	return yamltree.Text(yamltree.At(docs.Of("ClusterConfiguration"), "kubernetesVersion"))
}

// CertSANs are the names that kubeadm puts into the API server's certificate
// beside its own; of a valid Site.
func (c *SiteControlPlane) CertSANs() []string {
	docs, _ := kubeadm.ReadText(c.Kubeadm)
	var names []string
	if list := yamltree.At(docs.Of("ClusterConfiguration"), "apiServer.certSANs"); list != nil {
		for _, n := range list.Content {
			names = append(names, yamltree.Deref(n).Value)
		}
	}
	return names
}

// Inside lists what is reached inside the cluster: the CIDRs of pods and Services, and
// the domain of their names; of a valid Site.
func (c *SiteControlPlane) Inside() []string {
	docs, _ := kubeadm.ReadText(c.Kubeadm)
	field := func(name string) string {
		return yamltree.Text(yamltree.At(docs.Of("ClusterConfiguration"), "networking."+name))
	}
	var all []string
	for _, cidrs := range []string{field("podSubnet"), field("serviceSubnet")} {
		all = append(all, strings.FieldsFunc(cidrs, func(r rune) bool { return r == ',' || r == ' ' })...)
	}
	if domain := field("dnsDomain"); domain != "" {
		all = append(all, "."+domain)
	}
	return all
}

// NeededImage is a container image that a control plane runs.
type NeededImage struct {
	Name string // without a tag
	// Tag; empty: any, of which kubeadm is told.
	Tag string
}

func (n NeededImage) String() string {
	if n.Tag == "" {
		return n.Name
	}
	return n.Name + ":" + n.Tag
}

// ControlPlaneImages are the names of a control plane's images below a
// repository, those first that every control plane runs.
const (
	ImageEtcd = "etcd"
	ImageDNS  = "coredns"
)

// ControlPlaneComponents are the images with Kubernetes' own tag that every
// control plane runs.
func ControlPlaneComponents() []string {
	return []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}
}

// NeededImages are the images that kubeadm has the control plane run; of a
// valid Site. CoreDNS and kube-proxy are left out where the Cluster has none.
func (c *SiteControlPlane) NeededImages() []NeededImage {
	docs, _ := kubeadm.ReadText(c.Kubeadm)
	cluster := docs.Of("ClusterConfiguration")
	repository := cmp.Or(yamltree.Text(yamltree.At(cluster, "imageRepository")), defaultRepository)
	version := yamltree.Text(yamltree.At(cluster, "kubernetesVersion"))
	var out []NeededImage
	for _, name := range ControlPlaneComponents() {
		out = append(out, NeededImage{repository + "/" + name, version})
	}
	out = append(out, NeededImage{cmp.Or(yamltree.Text(yamltree.At(cluster, "etcd.local.imageRepository")), repository) + "/" + ImageEtcd, yamltree.Text(yamltree.At(cluster, "etcd.local.imageTag"))})
	if !yamltree.True(yamltree.At(cluster, "proxy.disabled")) {
		out = append(out, NeededImage{repository + "/kube-proxy", version})
	}
	if !yamltree.True(yamltree.At(cluster, "dns.disabled")) {
		name := repository + "/" + ImageDNS
		if own := yamltree.Text(yamltree.At(cluster, "dns.imageRepository")); own != "" {
			name = own + "/" + ImageDNS
		} else if repository == defaultRepository {
			name = repository + "/" + ImageDNS + "/" + ImageDNS // only there
		}
		out = append(out, NeededImage{name, yamltree.Text(yamltree.At(cluster, "dns.imageTag"))})
	}
	return out
}

const defaultRepository = "registry.k8s.io"

// DNSDomain is the cluster's DNS domain where ClusterConfiguration sets one.
func (f *ClusterFile) DNSDomain() string {
	return yamltree.Text(yamltree.At(f.Kubeadm.Of("ClusterConfiguration"), "networking.dnsDomain"))
}
