package kubeadm

import (
	"cmp"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// Local contains the settings for kubeadm that are not in the documents, because they differ
// between machines.
type Local struct {
	// Kubernetes is the version in the machine's image. If it is empty, the version in the
	// documents is used. A machine runs the patch release of its image, which has the same minor
	// version.
	Kubernetes string
	// EtcdTag and DNSTag are the tags of etcd and CoreDNS in the machine's image. If a tag is
	// empty, kubeadm's default is used.
	EtcdTag, DNSTag string
	// CertificatesDir is kubeadm's certificate directory. If it is empty, kubeadm's default is
	// used.
	CertificatesDir string
	// EtcdArgs contains arguments for one start of this machine's etcd member. They are not
	// uploaded to the cluster.
	EtcdArgs []Arg
	// Token, if not zero, is a bootstrap token that kubeadm creates. It is valid for TokenTTL.
	Token    strict.Secret
	TokenTTL time.Duration
}

// Arg is a command-line argument of a component.
type Arg struct{ Name, Value string }

// EncodeFor encodes the documents for kubeadm on one machine. If l contains a token, the result is
// secret.
func (d Documents) EncodeFor(l Local) ([]byte, error) {
	docs := slices.Clone(d)
	for i := range docs {
		docs[i].Root = yamltree.Clone(docs[i].Root)
	}
	cluster, init := docs.Of("ClusterConfiguration"), docs.Of("InitConfiguration")
	if l.Kubernetes != "" {
		yamltree.SetAt(cluster, yamltree.Quoted(l.Kubernetes), "kubernetesVersion")
	}
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

// Only returns the documents of these kinds.
func (d Documents) Only(kinds ...string) Documents {
	return slices.DeleteFunc(slices.Clone(d), func(doc Document) bool { return !slices.Contains(kinds, doc.Kind) })
}

// cluster returns the text of a field in ClusterConfiguration, or "".
func (d Documents) cluster(field string) string {
	return yamltree.Text(yamltree.At(d.Of("ClusterConfiguration"), field))
}

// KubernetesVersion returns the version of the control plane.
func (d Documents) KubernetesVersion() string { return d.cluster("kubernetesVersion") }

// DNSDomain returns the DNS domain of the cluster. If it is empty, kubeadm uses its default.
func (d Documents) DNSDomain() string { return d.cluster("networking.dnsDomain") }

// CertSANs returns the additional names for the API server's certificate. kubeadm adds further
// names itself.
func (d Documents) CertSANs() []string {
	var names []string
	if list := yamltree.At(d.Of("ClusterConfiguration"), "apiServer.certSANs"); list != nil {
		for _, n := range list.Content {
			names = append(names, yamltree.Deref(n).Value)
		}
	}
	return names
}

// Inside returns the destinations inside the cluster: the CIDRs of pods and Services, and the DNS
// domain.
func (d Documents) Inside() []string {
	var all []string
	for _, field := range []string{"networking.podSubnet", "networking.serviceSubnet"} {
		all = append(all, strings.FieldsFunc(d.cluster(field), func(r rune) bool { return r == ',' || r == ' ' })...)
	}
	if domain := d.DNSDomain(); domain != "" {
		all = append(all, "."+domain)
	}
	return all
}

// Image is a container image that a control plane runs.
type Image struct {
	Name string // name without a tag
	Tag  string // if empty, any tag is allowed; Local passes the image's tag to kubeadm
}

// Names of the control plane's container images, without the repository.
const (
	ImageEtcd  = "etcd"
	ImageDNS   = "coredns"
	imagePause = "pause"
)

// DefaultRepository is kubeadm's default of imageRepository.
const DefaultRepository = "registry.k8s.io"

// Components returns the names of the container images that every control plane runs and that have
// the version of Kubernetes as their tag.
func Components() []string {
	return []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}
}

// defaultTags contains kubeadm's default tags of etcd, CoreDNS and the pause image for each minor
// version of kubeadm (cmd/kubeadm/app/constants).
var defaultTags = map[int]struct{ etcd, dns, pause string }{
	34: {"3.6.5-0", "v1.12.1", "3.10.1"},
	35: {"3.6.6-0", "v1.13.1", "3.10.1"},
	36: {"3.6.8-0", "v1.14.2", "3.10.2"},
	37: {"3.7.0-0", "v1.14.6", "3.10.2"},
}

// Example returns the image's name with a tag. If any tag is allowed, it uses kubeadm's default for
// the version of Kubernetes or, if that is unknown, the word TAG.
func (i Image) Example(version string) string {
	tags := defaultTags[Minor(version)]
	own := map[string]string{ImageEtcd: tags.etcd, ImageDNS: tags.dns, imagePause: tags.pause}[path.Base(i.Name)]
	return i.Name + ":" + cmp.Or(i.Tag, own, "TAG")
}

// DefaultImages returns kubeadm's default images for a version of Kubernetes. Every control plane
// runs the images in always. A Cluster may leave out those in optional. pause is the pause image.
func DefaultImages(version string) (always, optional []Image, pause Image) {
	image := func(name, tag string) Image { return Image{DefaultRepository + "/" + name, tag} }
	for _, name := range Components() {
		always = append(always, image(name, version))
	}
	return append(always, image(ImageEtcd, "")), []Image{image("kube-proxy", version), image(ImageDNS+"/"+ImageDNS, "")}, image(imagePause, "")
}

// Images returns the images that the control plane runs with this version of Kubernetes.
func (d Documents) Images(version string) []Image {
	root := d.Of("ClusterConfiguration")
	repository := cmp.Or(d.cluster("imageRepository"), DefaultRepository)
	var all []Image
	for _, name := range Components() {
		all = append(all, Image{repository + "/" + name, version})
	}
	all = append(all, Image{cmp.Or(d.cluster("etcd.local.imageRepository"), repository) + "/" + ImageEtcd, d.cluster("etcd.local.imageTag")})
	if !yamltree.True(yamltree.At(root, "proxy.disabled")) {
		all = append(all, Image{repository + "/kube-proxy", version})
	}
	if !yamltree.True(yamltree.At(root, "dns.disabled")) {
		name := repository + "/" + ImageDNS
		if own := d.cluster("dns.imageRepository"); own != "" {
			name = own + "/" + ImageDNS
		} else if repository == DefaultRepository {
			name = repository + "/" + ImageDNS + "/" + ImageDNS // only the default repository uses this path
		}
		all = append(all, Image{name, d.cluster("dns.imageTag")})
	}
	return all
}
