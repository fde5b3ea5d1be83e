package configs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// kubeadmDocs are documents by kind.
type kubeadmDocs []KubeadmDocument

func (d kubeadmDocs) of(kind string) *yaml.Node {
	for _, doc := range d {
		if doc.Kind == kind {
			return doc.Root
		}
	}
	return nil
}

// readKubeadmText reads kubeadm's documents as a Site carries them.
func readKubeadmText(text string) (kubeadmDocs, Problems) {
	var docs kubeadmDocs
	var probs Problems
	dec := yaml.NewDecoder(strings.NewReader(text))
	for len(probs) <= maxProblems {
		var n yaml.Node
		err := dec.Decode(&n)
		if errors.Is(err, io.EOF) {
			return docs, probs
		}
		if err != nil {
			return docs, append(probs, syntaxProblem("", []byte(text), err))
		}
		if len(n.Content) != 1 || n.Content[0].Kind != yaml.MappingNode {
			probs = append(probs, Problem{Line: n.Line, Col: n.Column, Msg: "expected a document of kubeadm (a mapping with apiVersion and kind)"})
			continue
		}
		d := &document{root: n.Content[0], where: map[string]position{}}
		d.kind = yamltree.Text(yamltree.Value(d.root, "kind"))
		d.kubeadmDocument(nil)
		if docs.of(d.kind) != nil {
			d.problem(d.root, d.kind, "a second %s begins here", d.kind)
		}
		probs = append(probs, d.probs...)
		docs = append(docs, KubeadmDocument{d.kind, d.root})
	}
	return docs, probs.first("", 0)
}

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
	docs, probs := readKubeadmText(s.ControlPlane.Kubeadm)
	if probs != nil {
		return nil, fmt.Errorf("reading kubeadm's documents: %w", probs)
	}
	cluster, init := docs.of("ClusterConfiguration"), docs.of("InitConfiguration")
	if l.EtcdTag != "" && nodeAt(cluster, "etcd.local.imageTag") == nil {
		setAt(cluster, encodeString(l.EtcdTag), "etcd", "local", "imageTag")
	}
	if l.DNSTag != "" && nodeAt(cluster, "dns.imageTag") == nil {
		setAt(cluster, encodeString(l.DNSTag), "dns", "imageTag")
	}
	if l.CertificatesDir != "" {
		setAt(cluster, encodeString(l.CertificatesDir), "certificatesDir")
	}
	if len(l.EtcdArgs) > 0 {
		list := listAt(cluster, "etcd", "local", "extraArgs")
		for _, a := range l.EtcdArgs {
			list.Content = append(list.Content, mapping("name", encodeString(a.Name), "value", encodeString(a.Value)))
		}
	}
	if !l.Token.IsZero() {
		setAt(init, &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{mapping(
			"token", encodeString(l.Token.Reveal()),
			"ttl", encodeString(l.TokenTTL.String()),
			"description", encodeString("made by first boot while it published the cluster"),
		)}}, "bootstrapTokens")
	}
	return docs.encode()
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
	docs, probs := readKubeadmText(s.ControlPlane.Kubeadm)
	if probs != nil {
		return nil, fmt.Errorf("reading kubeadm's documents: %w", probs)
	}
	docs = slices.DeleteFunc(docs, func(d KubeadmDocument) bool { return !slices.Contains(kinds, d.Kind) })
	return docs.encode()
}

func (d kubeadmDocs) encode() ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	for _, doc := range d {
		if err := enc.Encode(doc.Root); err != nil {
			return nil, fmt.Errorf("encoding kubeadm's %s: %w", doc.Kind, err)
		}
	}
	err := enc.Close()
	return b.Bytes(), err
}

// mapping is a YAML mapping of keys and values in turn.
func mapping(pairs ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for i := 0; i < len(pairs); i += 2 {
		n.Content = append(n.Content, plain(pairs[i].(string), "!!str"), pairs[i+1].(*yaml.Node))
	}
	return n
}

// listAt is a list below m, made if need be.
func listAt(m *yaml.Node, path ...string) *yaml.Node {
	name := strings.Join(path, ".")
	if list := nodeAt(m, name); list != nil && list.Kind == yaml.SequenceNode {
		return list
	}
	setAt(m, &yaml.Node{Kind: yaml.SequenceNode}, path...)
	return nodeAt(m, name)
}

// setAt sets a field below m, with the mappings on the way.
func setAt(m, value *yaml.Node, path ...string) {
	for i, key := range path {
		n := yamltree.Get(m, key)
		if i == len(path)-1 {
			if n != nil {
				*n = *value
				return
			}
			m.Content = append(m.Content, plain(key, "!!str"), value)
			return
		}
		if n == nil || n.Kind != yaml.MappingNode {
			next := &yaml.Node{Kind: yaml.MappingNode}
			if n != nil {
				*n = *next // null
				next = n
			} else {
				m.Content = append(m.Content, plain(key, "!!str"), next)
			}
			n = next
		}
		m = n
	}
}

// KubernetesVersion is the control plane's; of a valid Site.
func (c *SiteControlPlane) KubernetesVersion() string {
	docs, _ := readKubeadmText(c.Kubeadm)
	return yamltree.Text(nodeAt(docs.of("ClusterConfiguration"), "kubernetesVersion"))
}

// CertSANs are the names that kubeadm puts into the API server's certificate
// beside its own; of a valid Site.
func (c *SiteControlPlane) CertSANs() []string {
	docs, _ := readKubeadmText(c.Kubeadm)
	var names []string
	if list := nodeAt(docs.of("ClusterConfiguration"), "apiServer.certSANs"); list != nil {
		for _, n := range list.Content {
			names = append(names, yamltree.Deref(n).Value)
		}
	}
	return names
}

// Inside lists what is reached inside the cluster: the CIDRs of pods and Services, and
// the domain of their names; of a valid Site.
func (c *SiteControlPlane) Inside() []string {
	docs, _ := readKubeadmText(c.Kubeadm)
	field := func(name string) string {
		return yamltree.Text(nodeAt(docs.of("ClusterConfiguration"), "networking."+name))
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
	docs, _ := readKubeadmText(c.Kubeadm)
	cluster := docs.of("ClusterConfiguration")
	repository := cmp.Or(yamltree.Text(nodeAt(cluster, "imageRepository")), defaultRepository)
	version := yamltree.Text(nodeAt(cluster, "kubernetesVersion"))
	var out []NeededImage
	for _, name := range ControlPlaneComponents() {
		out = append(out, NeededImage{repository + "/" + name, version})
	}
	out = append(out, NeededImage{cmp.Or(yamltree.Text(nodeAt(cluster, "etcd.local.imageRepository")), repository) + "/" + ImageEtcd, yamltree.Text(nodeAt(cluster, "etcd.local.imageTag"))})
	if !truth(nodeAt(cluster, "proxy.disabled")) {
		out = append(out, NeededImage{repository + "/kube-proxy", version})
	}
	if !truth(nodeAt(cluster, "dns.disabled")) {
		name := repository + "/" + ImageDNS
		if own := yamltree.Text(nodeAt(cluster, "dns.imageRepository")); own != "" {
			name = own + "/" + ImageDNS
		} else if repository == defaultRepository {
			name = repository + "/" + ImageDNS + "/" + ImageDNS // only there
		}
		out = append(out, NeededImage{name, yamltree.Text(nodeAt(cluster, "dns.imageTag"))})
	}
	return out
}

const defaultRepository = "registry.k8s.io"

func truth(n *yaml.Node) bool {
	yes, err := strconv.ParseBool(yamltree.Text(n))
	return err == nil && yes
}
