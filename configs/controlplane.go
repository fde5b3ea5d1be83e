package configs

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// SiteControlPlane describes the cluster to a control-plane node.
type SiteControlPlane struct {
	// ID is the ID of the cluster's keys, as in mint.json. Data of an etcd
	// cluster with another ID is rejected.
	ID string `yaml:"id" json:"id" check:"mintID"`
	// Members are all control-plane nodes, including this one. Each is a member of etcd.
	Members []ControlPlaneMember `yaml:"members" json:"members" unique:"name"`
	// BootstrapUntil is the time (RFC 3339) until which the cluster may be initialized. Until then,
	// etcd starts empty as soon as every member has been seen without data. If it is not set, this
	// machine only joins an existing cluster.
	BootstrapUntil string `yaml:"birthUntil,omitempty" json:"birthUntil,omitempty" check:"date"`
	// Absent lists members that have never started. The cluster is initialized without them, and
	// they join later. Remove it once the cluster runs.
	Absent []string `yaml:"absent,omitempty" json:"absent,omitempty" unique:"yes"`
	// ContinueFrom is for a cluster that has permanently lost more than half of its etcd members.
	// It names the member whose data is kept: this member forms a new etcd cluster once, and the
	// other members join it without data. Data that only lost members had is lost. Remove it once
	// the cluster runs.
	ContinueFrom string `yaml:"continueFrom,omitempty" json:"continueFrom,omitempty"`
	// Restore is the SHA-256 (hex) of a snapshot of etcd, with which the member in continueFrom
	// starts instead of its own data. The member looks for the snapshot in
	// /var/lib/edgebake/snapshots and, as etcd-snapshot.db, on a stick.
	Restore string `yaml:"restore,omitempty" json:"restore,omitempty"`
	// RequestedAt is the time (RFC 3339) at which continueFrom was set. A machine carries out each
	// such request once, and ignores requests that are older than its last one.
	RequestedAt string `yaml:"said,omitempty" json:"said,omitempty" check:"date"`
	// Kubeadm contains the kubeadm documents for this machine: ClusterConfiguration and
	// InitConfiguration, and the configurations of kubelet and kube-proxy.
	Kubeadm string `yaml:"kubeadm" json:"kubeadm" text:"lines"`
}

// Documents returns the kubeadm documents for this machine. The Site must be valid.
func (c *SiteControlPlane) Documents() kubeadm.Documents {
	docs, _ := kubeadm.ReadText(c.Kubeadm)
	return docs
}

// RequestTime returns RequestedAt as a time. The Site must be valid.
func (c *SiteControlPlane) RequestTime() time.Time {
	t, _ := time.Parse(time.RFC3339, c.RequestedAt)
	return t
}

// ControlPlaneMember is one control-plane node.
type ControlPlaneMember struct {
	// Name of the node.
	Name string `yaml:"name" json:"name" check:"nodeName"`
	// Address is the node's IP address.
	Address string `yaml:"address" json:"address"`
}

// ClusterKeys are the keys of a cluster, and the objects that a control-plane node creates in a new
// cluster.
type ClusterKeys struct {
	// CA is the cluster's CA.
	CA KeyPair `yaml:"ca" json:"ca"`
	// EtcdCA is the CA of etcd's members.
	EtcdCA KeyPair `yaml:"etcdCA" json:"etcdCA"`
	// FrontProxyCA is the CA of the aggregation layer.
	FrontProxyCA KeyPair `yaml:"frontProxyCA" json:"frontProxyCA"`
	// ServiceAccount is the key that signs the tokens of service accounts.
	ServiceAccount Secret `yaml:"serviceAccount" json:"serviceAccount"`
	// Objects contains the Kubernetes objects for the nodes' bootstrap tokens (gzip, base64).
	// `edgebake cluster sites` writes this field. A control-plane node creates them once, when the
	// cluster is new.
	Objects Secret `yaml:"objects,omitempty" json:"objects,omitempty"`
	// Manifests contains the manifests of the Cluster, in order (gzip, base64). `edgebake cluster
	// sites` writes this field. They are applied only once.
	Manifests Secret `yaml:"manifests,omitempty" json:"manifests,omitempty"`
}

// KeyPair is a certificate and its private key, both in PEM.
type KeyPair struct {
	// Cert is the certificate.
	Cert string `yaml:"cert" json:"cert" text:"lines"`
	// Key is the private key of the certificate.
	Key Secret `yaml:"key" json:"key"`
}

// Secrets returns all secrets in the keys.
func (k *ClusterKeys) Secrets() []Secret {
	return []Secret{k.CA.Key, k.EtcdCA.Key, k.FrontProxyCA.Key, k.ServiceAccount, k.Objects, k.Manifests}
}

// Ports of etcd.
const (
	EtcdPeerPort   = "2380"
	EtcdClientPort = "2379"
)

// PeerURL returns the URL of this member's etcd for the other members.
func (m ControlPlaneMember) PeerURL() string {
	return "https://" + net.JoinHostPort(m.Address, EtcdPeerPort)
}

// Self returns this machine's entry in members. The Site must be valid.
func (s *Site) Self() ControlPlaneMember {
	for _, m := range s.ControlPlane.Members {
		if m.Name == s.NodeName {
			return m
		}
	}
	panic("BUG: the member of a Site that was not validated")
}

// BootstrapEnd returns BootstrapUntil as a time. It is zero if this Site must not initialize the
// cluster.
func (c *SiteControlPlane) BootstrapEnd() time.Time {
	t, err := time.Parse(time.RFC3339, c.BootstrapUntil)
	if err != nil {
		return time.Time{}
	}
	return t
}

// validateControlPlane validates the fields for control-plane nodes, which other nodes must not
// have.
func (s *Site) validateControlPlane(credentials bool, probs *Problems) {
	if s.NodeType != NodeControlPlane {
		if s.ControlPlane != nil {
			probs.Add("controlPlane", "needs nodeType control-plane")
		}
		if s.Credentials.Keys != nil {
			probs.Add("credentials.keys", "needs nodeType control-plane: no other node may have the cluster's keys")
		}
		return
	}
	for path, given := range map[string]bool{
		"labels": len(s.Labels) > 0, "taints": len(s.Taints) > 0, "kubeletExtraArgs": len(s.KubeletExtraArgs) > 0,
		"skipPhases": len(s.SkipPhases) > 0, "ignorePreflightErrors": len(s.IgnorePreflightErrors) > 0,
	} {
		if given {
			probs.Add(path, "is not for nodeType control-plane: set it in the kubeadm documents of the Cluster, and write the Sites again")
		}
	}
	if s.NodePool != "" {
		probs.Add("nodePool", "needs nodeType edge or cloud: a control-plane node is in no pool")
	}
	if !s.IPVS.Disabled {
		probs.Add("ipvs.disabled", "must be true for nodeType control-plane: the node maps the endpoint to its own API server")
	}
	if !s.Credentials.Token.IsZero() {
		probs.Add("credentials.token", "is not for nodeType control-plane, which has the cluster's keys: remove it")
	}
	switch {
	case s.Credentials.Keys != nil:
		s.Credentials.Keys.validate(s, probs)
	case credentials:
		probs.AddMissing("credentials.keys", "is required for nodeType control-plane (`edgebake cluster sites` writes it)")
	}
	if s.ControlPlane == nil {
		probs.AddMissing("controlPlane", "is required for nodeType control-plane (`edgebake cluster sites` writes it)")
		return
	}
	s.validateMembers(probs)
	s.validateLostMembers(probs)
	if s.ControlPlane.Kubeadm != "" {
		s.validateKubeadmDocuments(probs)
	}
}

// validateLostMembers validates the fields about absent and lost members.
func (s *Site) validateLostMembers(probs *Problems) {
	c := s.ControlPlane
	member := func(name string) bool {
		return slices.ContainsFunc(c.Members, func(m ControlPlaneMember) bool { return m.Name == name })
	}
	for i, name := range c.Absent {
		path := fmt.Sprintf("controlPlane.absent[%d]", i)
		switch {
		case !member(name):
			probs.Add(path, "%q is not among controlPlane.members", strict.Shorten(name))
		case name == c.ContinueFrom:
			probs.Add(path, "%s is named by controlPlane.continueFrom: it cannot be absent", strict.Shorten(name))
		}
	}
	if len(c.Members) > 0 && !slices.ContainsFunc(c.Members, func(m ControlPlaneMember) bool { return !slices.Contains(c.Absent, m.Name) }) {
		probs.Add("controlPlane.absent", "lists every member: one must remain to initialize the cluster")
	}
	if c.Restore != "" && c.ContinueFrom == "" {
		probs.Add("controlPlane.restore", "requires continueFrom, the member that starts with the snapshot")
	}
	if sum, err := hex.DecodeString(c.Restore); c.Restore != "" && (err != nil || len(sum) != 32) {
		probs.Add("controlPlane.restore", "%q is not a SHA-256 in hexadecimal digits (`sha256sum FILE`)", strict.Shorten(c.Restore))
	}
	if (c.RequestedAt != "") != (c.ContinueFrom != "") {
		probs.Add("controlPlane.said", "must be set together with continueFrom: `edgebake cluster sites DIR --continue-from NAME` writes both")
	}
	if c.ContinueFrom != "" && !member(c.ContinueFrom) {
		probs.Add("controlPlane.continueFrom", "%q is not among controlPlane.members", strict.Shorten(c.ContinueFrom))
	}
}

func (s *Site) validateMembers(probs *Problems) {
	self := false
	for i, m := range s.ControlPlane.Members {
		path := fmt.Sprintf("controlPlane.members[%d]", i)
		before := s.ControlPlane.Members[:i]
		self = self || m.Name == s.NodeName
		a, err := netip.ParseAddr(m.Address)
		switch {
		case m.Address == "":
		case err != nil:
			probs.Add(path+".address", "%q is not an IP address", strict.Shorten(m.Address))
		case forms.BadServer(a) != "":
			probs.Add(path+".address", "%s %s", a, forms.BadServer(a))
		case len(s.Masters) == len(s.ControlPlane.Members) && hostOf(s.Masters[i]) != m.Address:
			probs.Add(path+".address", "%s is not the address of masters[%d] (%s): both must list the same machines in the same order", a, i, strict.Shorten(s.Masters[i]))
		}
		if slices.ContainsFunc(before, func(o ControlPlaneMember) bool { return o.Address == m.Address }) {
			probs.Add(path+".address", "%s is listed twice", strict.Shorten(m.Address))
		}
	}
	if len(s.Masters) != len(s.ControlPlane.Members) {
		probs.Add("controlPlane.members", "has %s, but masters has %d: both must list the same machines", Count(len(s.ControlPlane.Members), "machine"), len(s.Masters))
	}
	if !self && len(s.ControlPlane.Members) > 0 {
		probs.Add("nodeName", "%q is not among controlPlane.members", strict.Shorten(s.NodeName))
	}
}

func hostOf(hostPort string) string {
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		return ""
	}
	return host
}

// validateKubeadmDocuments validates the kubeadm documents, and checks them against the Site.
func (s *Site) validateKubeadmDocuments(probs *Problems) {
	const path = "controlPlane.kubeadm"
	docs, bad := kubeadm.ReadText(s.ControlPlane.Kubeadm)
	for _, p := range bad {
		probs.Add(path, "%s", inner(p))
	}
	if bad != nil {
		return
	}
	want := func(kind, field, value, why string) {
		root := docs.Of(kind)
		if root == nil {
			return
		}
		n := yamltree.At(root, field)
		if got := yamltree.Text(n); got != value {
			probs.Add(path, "%s.%s is %q, but must be %q: %s", kind, field, strict.Shorten(got), strict.Shorten(value), why)
		}
	}
	for _, kind := range []string{"ClusterConfiguration", "InitConfiguration"} {
		if docs.Of(kind) == nil {
			probs.Add(path, "has no %s", kind)
		}
	}
	if len(s.Masters) > 0 && forms.BadHostPort(s.Masters[0]) == "" {
		want("ClusterConfiguration", "controlPlaneEndpoint", s.EndpointHostPort(), "that is the Site's endpoint and the API servers' port")
		_, port, _ := net.SplitHostPort(s.Masters[0])
		want("InitConfiguration", "localAPIEndpoint.bindPort", port, "that is the API servers' port")
	}
	want("InitConfiguration", "nodeRegistration.name", s.NodeName, "that is the Site's nodeName")
	for _, m := range s.ControlPlane.Members {
		if m.Name == s.NodeName {
			want("InitConfiguration", "localAPIEndpoint.advertiseAddress", m.Address, "that is this member's address")
		}
	}
	want("ClusterConfiguration", "etcd.local.dataDir", EtcdDataDir, "first boot looks for etcd's data there")
	if c := docs.Of("ClusterConfiguration"); c != nil && !kubeadm.VersionForm.MatchString(yamltree.Text(yamltree.At(c, "kubernetesVersion"))) {
		probs.Add(path, "ClusterConfiguration.kubernetesVersion is required, e.g. "+ExampleKubernetes)
	}
}

// EtcdDataDir is the data directory of etcd.
const EtcdDataDir = "/var/lib/etcd"

// KubernetesCA is the Base of the CA that every component of a cluster trusts.
const KubernetesCA = "ca"

// ClusterCA is one of a cluster's CAs.
type ClusterCA struct {
	// Base is the path of the CA's files, relative to kubeadm's certificate directory, without the
	// extension .crt or .key.
	Base string
	Name string // common name, the same as in kubeadm
	// Of returns the key pair of this CA from a cluster's keys.
	Of    func(*ClusterKeys) *KeyPair
	field string // name of the field in ClusterKeys
}

// ClusterCAs returns all CAs of a cluster.
func ClusterCAs() []ClusterCA {
	return []ClusterCA{
		{KubernetesCA, "kubernetes", func(k *ClusterKeys) *KeyPair { return &k.CA }, "ca"},
		{"etcd/ca", "etcd-ca", func(k *ClusterKeys) *KeyPair { return &k.EtcdCA }, "etcdCA"},
		{"front-proxy-ca", "front-proxy-ca", func(k *ClusterKeys) *KeyPair { return &k.FrontProxyCA }, "frontProxyCA"},
	}
}

// validate checks that each key belongs to its certificate, and that the Site accepts the cluster's
// CA.
func (k *ClusterKeys) validate(s *Site, probs *Problems) {
	pins, field := s.CACertHashes, "caCertHashes"
	if len(pins) == 0 {
		pins, field = s.CAPins(), "the keys of caCert"
	}
	for _, ca := range ClusterCAs() {
		path, pair := "credentials.keys."+ca.field, ca.Of(k)
		if pair.Key.IsZero() {
			probs.AddMissing(path+".key", "is required")
		}
		if pair.Cert == "" || pair.Key.IsZero() {
			continue
		}
		certs, err := forms.ParseCA(pair.Cert)
		if err != nil {
			probs.Add(path+".cert", "%v", err)
			continue
		}
		if len(certs) != 1 {
			probs.Add(path+".cert", "has %d certificates, want only the CA's", len(certs))
			continue
		}
		if public, err := forms.ParsePrivateKey(pair.Key.Reveal()); err != nil {
			probs.Add(path+".key", "%v", err)
		} else if !public.Equal(certs[0].PublicKey) {
			probs.Add(path+".key", "is not the key of the certificate in cert")
		}
		if ca.Base == KubernetesCA && len(pins) > 0 && !slices.ContainsFunc(pins, func(pin string) bool { return strings.EqualFold(pin, caPin(certs[0])) }) {
			probs.Add(path+".cert", "does not match %s (its hash is %s): they belong to different clusters", field, caPin(certs[0]))
		}
	}
	if k.ServiceAccount.IsZero() {
		probs.AddMissing("credentials.keys.serviceAccount", "is required")
	} else if _, err := forms.ParsePrivateKey(k.ServiceAccount.Reveal()); err != nil {
		probs.Add("credentials.keys.serviceAccount", "%v", err)
	}
	manifest.CheckPacked("credentials.keys.objects", k.Objects, probs)
	manifest.CheckPacked("credentials.keys.manifests", k.Manifests, probs)
}
