package configs

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/openyurt"
)

// ClusterFile is a Cluster as its file holds it.
type ClusterFile struct {
	*Cluster
	// File is its name, for problems, and Text what was read.
	File string
	Text []byte
	// Kubeadm are the documents that follow it.
	Kubeadm kubeadm.Documents
	// Warnings are what can be meant, but seldom is.
	Warnings Problems
}

// ParseCluster reads a Cluster and the documents of kubeadm that follow it.
// The error is Problems with everything found wrong. The manifests that it
// names are not looked at: see CheckManifest.
func ParseCluster(name string, data []byte) (*ClusterFile, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	c, err := d.Cluster()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Cluster is what ParseCluster returns of a document. With problems it still returns
// what could be read of one, so that those of its manifests are told in the same run.
func (d *Document) Cluster() (*ClusterFile, error) {
	doc := d.doc
	f := &ClusterFile{Cluster: new(Cluster), File: doc.File, Text: d.data}
	err := doc.Parse(KindCluster, f.Cluster, func() Problems {
		var probs Problems
		f.Kubeadm, f.Warnings, probs = kubeadm.ReadAfter(doc.File, doc.More, f.KubernetesVersion)
		doc.Probs = append(doc.Probs, probs...)
		if proxy := f.Kubeadm.Of("KubeProxyConfiguration"); proxy != nil && f.KubeProxy.Mode == "none" {
			doc.Problem(proxy, "KubeProxyConfiguration", "has no effect with kubeProxy.mode none: remove it")
		}
		for _, w := range append(f.warnings(), f.nobodyToAsk()...) {
			at := doc.Find(w.Path)
			w.File, w.Line, w.Col = doc.File, at.Line, at.Col
			f.Warnings = append(f.Warnings, w)
		}
		return f.Cluster.Validate()
	})
	return f, err
}

// HasOpenYurt reports whether the cluster carries OpenYurt.
func (c *Cluster) HasOpenYurt() bool { return c.OpenYurt == nil || *c.OpenYurt }

// TokenLifetime is TokenTTL of a valid Cluster.
func (c *Cluster) TokenLifetime() time.Duration {
	d, _ := time.ParseDuration(c.TokenTTL)
	return d
}

// defaultPods and defaultServices are the networks inside a cluster, by whether
// its control-plane nodes have IPv6.
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
			n.NodeType = NodeNative
			if n.NodePool != "" {
				n.NodeType = NodeEdge
			}
		}
	}
}

// warnings are what is allowed but seldom right.
func (c *Cluster) warnings() Problems {
	var probs Problems
	if n := len(c.Masters); n > 0 && n%2 == 0 {
		probs.Add("masters", "%d control-plane nodes survive the loss of %d, as %d would, and one more can fail: etcd needs more than half of its members; take %d or %d", n, (n-1)/2, n-1, n-1, n+1)
	} else if n > 7 {
		probs.Add("masters", "%d members make etcd slow: every write waits for more than half of them; take 3 or 5", n)
	}
	if c.KubeProxy.Mode == "ipvs" && !KubernetesBefore(c.KubernetesVersion, 35) {
		probs.Add("kubeProxy.mode", "kube-proxy's mode ipvs is deprecated since v1.35: take nftables or iptables (ipvscare does not need it)")
	}
	return probs
}

// nobodyToAsk warns of machines on which CoreDNS does not start: kubeadm has it
// forward what is not the cluster's to the DNS servers of the machine.
func (f *ClusterFile) nobodyToAsk() Problems {
	if yamltree.True(yamltree.At(f.Kubeadm.Of("ClusterConfiguration"), "dns.disabled")) {
		return nil
	}
	var paths, names []string
	look := func(path, name string, n Network) {
		if len(n.Interfaces) > 0 && len(n.DNS) == 0 && !slices.ContainsFunc(n.Interfaces, Interface.asks) {
			paths, names = append(paths, path), append(names, name)
		}
	}
	for i, m := range f.Masters {
		look(fmt.Sprintf("masters[%d].network", i), m.Name, m.Network)
	}
	for i, n := range f.Nodes {
		look(fmt.Sprintf("nodes[%d].network", i), n.Name, n.Network)
	}
	var probs Problems
	if len(names) > 0 {
		more := ""
		if len(names) > 1 {
			more = fmt.Sprintf(" and %d more", len(names)-1)
		}
		probs.Add(paths[0], "%s%s: no DNS server (neither dns nor dhcp): CoreDNS does not start there, since it forwards to the machine's; add dns, or leave CoreDNS out with dns: {disabled: true} in a ClusterConfiguration", names[0], more)
	}
	return probs
}

// asks reports whether DHCP or a router may give the interface a DNS server and
// addresses.
func (i Interface) asks() bool {
	return i.DHCP || i.AcceptRA || slices.ContainsFunc(i.VLANs, func(v VLAN) bool { return v.DHCP || v.AcceptRA })
}

const maxTokenTTL = 365 * 24 * time.Hour

// Validate returns every problem of c, nil if there is none. It changes
// nothing; the values must have their defaults.
func (c *Cluster) Validate() Problems {
	var probs Problems
	strict.Check(c, checks, &probs)
	if v := c.KubernetesVersion; v != "" {
		switch {
		case !kubeadm.VersionForm.MatchString(v):
			probs.Add("kubernetesVersion", "%s", badVersion(v, kubeadm.VersionForm, ExampleKubernetes))
		case KubernetesBefore(v, kubeadm.OldestKubernetes):
			probs.Add("kubernetesVersion", "%s is too old: kubeadm of v1.%d and later can build a cluster from images", v, kubeadm.OldestKubernetes)
		}
	}
	if a, err := netip.ParseAddr(c.KubeProxy.BindAddress); c.KubeProxy.BindAddress != "" && (err != nil || a.Zone() != "" || a.IsMulticast()) {
		probs.Add("kubeProxy.bindAddress", "%q is not an IP address to listen on, e.g. 0.0.0.0", strict.Shorten(c.KubeProxy.BindAddress))
	} else if c.KubeProxy.BindAddress != "" && c.KubeProxy.Mode == "none" {
		probs.Add("kubeProxy.bindAddress", "has no effect with kubeProxy.mode none: remove it")
	}
	switch d, err := time.ParseDuration(c.TokenTTL); {
	case err != nil:
		probs.Add("tokenTTL", "%q is not a duration, e.g. 168h", strict.Shorten(c.TokenTTL))
	case d < time.Hour || d > maxTokenTTL:
		probs.Add("tokenTTL", "must be from 1h to %dh, not %s: machines need time to be flashed, carried and switched on, and a token that never expires is a key", int(maxTokenTTL.Hours()), c.TokenTTL)
	}
	c.validateManifests(&probs)
	c.validateMachines(&probs)
	c.validateNetworks(&probs)
	strict.CheckText(c, &probs)
	return probs
}

var repositoryForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)

// badRepository says what is wrong with the prefix of image names.
func badRepository(s string) string {
	switch last := s[strings.LastIndexByte(s, '/')+1:]; {
	case strings.Contains(s, "://"):
		return fmt.Sprintf("%q: leave the scheme out, e.g. registry.k8s.io", strict.Shorten(s))
	case strings.HasSuffix(s, "/"):
		return fmt.Sprintf("%q: leave the slash at the end out", strict.Shorten(s))
	case strings.Contains(s, "@") || strings.Contains(s, "/") && strings.Contains(last, ":"):
		return fmt.Sprintf("%q names one image; give what all images' names begin with, e.g. registry.k8s.io", strict.Shorten(s))
	case !repositoryForm.MatchString(s):
		return fmt.Sprintf("%q is not a registry with an optional path, e.g. registry.example.com/kubernetes", strict.Shorten(s))
	}
	return ""
}

func (c *Cluster) validateManifests(probs *Problems) {
	seen := repeats{}
	for i, m := range c.Manifests {
		path := fmt.Sprintf("manifests[%d]", i)
		switch {
		case m == "":
			probs.Add(path, "is empty; give a file's path")
		case strings.Contains(m, "://"):
			probs.Add(path, "%q is a URL: fetch it and keep the file beside the Cluster, so that what is applied cannot change", strict.Shorten(m))
		case seen.again(m):
			probs.Add(path, "is listed twice")
		}
	}
}

// owners are who has a name, an address or a mark already.
type owners map[string]string

// take notes that path has value, and reports who has it already.
func (o owners) take(value, path, what string, probs *Problems) {
	if value == "" {
		return
	}
	if other, twice := o[value]; twice {
		probs.Add(path, "%s is %s already", strings.TrimSpace(what+" "+strict.Shorten(value)), other)
		return
	}
	o[value] = path
}

// validateMachines checks masters and nodes, each by itself and
// against the others.
func (c *Cluster) validateMachines(probs *Problems) {
	names, addresses, marks := owners{}, owners{}, owners{}
	for i := range c.Masters {
		m := &c.Masters[i]
		path := fmt.Sprintf("masters[%d]", i)
		c.validateName(m.Name, path+".name", names, probs)
		m.validateAddress(path, probs)
		own := owners{}
		if a, err := netip.ParseAddr(m.Address); err == nil {
			addresses.take(a.Unmap().String(), path+".address", "address", probs)
			own[a.Unmap().String()] = path + ".address" // its own network gives it again
		}
		m.Match.takeMatch(path+".match", marks, probs)
		site := c.siteFrame(NodeNative, "")
		site.Network = m.Network
		var inner Problems
		site.Network.validate(&inner)
		site.validateVIPUse(&inner)
		site.validateServerUse(&inner)
		c.underMachine(inner, path, probs)
		takeSubnets(&m.Network, path, addresses, own, probs)
	}
	for i := range c.Nodes {
		n := &c.Nodes[i]
		path := fmt.Sprintf("nodes[%d]", i)
		c.validateName(n.Name, path+".name", names, probs)
		n.Match.takeMatch(path+".match", marks, probs)
		if (n.NodeType == NodeEdge || n.NodeType == NodeCloud) && !c.HasOpenYurt() {
			probs.Add(path+".nodeType", "%s needs OpenYurt, which the cluster is without (openyurt: false)", n.NodeType)
		}
		c.underMachine(c.nodeProblems(n), path, probs)
		takeSubnets(&n.Network, path, addresses, nil, probs)
	}
	c.siteProblems(probs)
}

func (c *Cluster) validateName(name, path string, names owners, probs *Problems) {
	if name == "" {
		return // required
	}
	if strings.Contains(name, "{{") {
		probs.Add(path, "%q is a template; every machine of a Cluster is named", strict.Shorten(name))
		return
	}
	if err := forms.CheckNodeName(name); err != nil {
		probs.Add(path, "%s", err)
		return
	}
	if name == c.Endpoint {
		probs.Add(path, "is also the endpoint, which stands for the API servers")
	}
	names.take(name, path, "name", probs)
}

func (m *ControlPlaneNode) validateAddress(path string, probs *Problems) {
	if m.Address == "" {
		return // required
	}
	a, err := netip.ParseAddr(m.Address)
	switch {
	case err != nil:
		hint := ""
		if p, err := netip.ParsePrefix(m.Address); err == nil {
			hint = fmt.Sprintf(": write %s, and the prefix length in network.interfaces", p.Addr())
		} else if host, _, err := net.SplitHostPort(m.Address); err == nil && forms.BadHost(host) == "" {
			hint = ": leave the port out, it is port of the Cluster"
		} else if forms.BadHost(m.Address) == "" {
			hint = "; a name will not do: etcd's members know each other by address"
		}
		probs.Add(path+".address", "%q is not an IP address%s", strict.Shorten(m.Address), hint)
		return
	case forms.BadServer(a) != "":
		probs.Add(path+".address", "%s %s", a, forms.BadServer(a))
		return
	case forms.ServiceAddrs[a] != "":
		probs.Add(path+".address", "%s is the address of %s inside the cluster (kubeadm's default)", a, forms.ServiceAddrs[a])
	}
	subnets := m.Network.subnets()
	if len(subnets) > 0 && !m.Network.usesDHCP() && !slices.ContainsFunc(subnets, func(s subnet) bool { return s.Addr() == a.Unmap() }) {
		probs.Add(path+".address", "%s is not an address of the machine's network, and no interface uses DHCP: add it to an interface", a)
	}
	for _, s := range subnets {
		if part := forms.HostPart(s.Prefix, a); part != "" {
			probs.Add(path+".address", "%s is the %s address of %s, not one machine's", a, part, s.Masked())
		}
	}
}

// usesDHCP reports whether any interface or VLAN asks for addresses, of routers too.
func (n *Network) usesDHCP() bool {
	return len(n.Interfaces) == 0 || slices.ContainsFunc(n.Interfaces, Interface.asks)
}

// takeSubnets notes a machine's addresses, which no other may have.
func takeSubnets(n *Network, path string, addresses, own owners, probs *Problems) {
	for _, s := range n.subnets() {
		if a := s.Addr().Unmap().String(); own[a] == "" {
			addresses.take(a, path+"."+s.path, "address", probs)
		}
	}
}

// takeMatch checks a machine's match, if it has one, and notes what no other
// may have.
func (m Match) takeMatch(path string, marks owners, probs *Problems) {
	if m.IsZero() {
		return
	}
	m.validate(path, probs)
	for _, k := range m.keys() {
		marks.take(k.key, path+strings.TrimPrefix(k.field, "match"), "", probs)
	}
}

// underMachine adds a machine's problems to the Cluster's. That the VIP lies
// in a network of the site is said once, not for each machine there.
func (c *Cluster) underMachine(problems Problems, path string, into *Problems) {
	for _, p := range problems {
		if p.Path != "vip" {
			p.Path = strict.Join(path, p.Path)
		} else if slices.ContainsFunc(*into, func(o Problem) bool { return o.Path == "vip" }) {
			continue
		} else {
			p.Msg = strings.Replace(p.Msg, "the network of network.", "the network of "+path+".network.", 1)
		}
		*into = append(*into, p)
	}
}

// APIServers are the API servers as a Site names them, host:port.
func (c *Cluster) APIServers() []string {
	var out []string
	for _, m := range c.Masters {
		out = append(out, net.JoinHostPort(m.Address, fmt.Sprint(c.Port)))
	}
	return out
}

// siteFrame is a Site of this cluster, for a node of that name; empty: for none yet.
func (c *Cluster) siteFrame(nodeType, node string) Site {
	s := Site{APIVersion: APIVersion, Kind: KindSite, NodeName: node, Masters: c.APIServers(), Endpoint: c.Endpoint, VIP: c.VIP, NodeType: nodeType, Users: c.Users, Report: c.Report.of(node)}
	strict.ApplyDefaults(&s)
	return s
}

// NodeSite is the Site of one worker of a valid Cluster.
func (c *Cluster) NodeSite(n *ClusterNode, token Secret, caHash string) *Site {
	s := c.siteFrame(n.NodeType, n.Name)
	s.NodePool, s.NodeIP, s.Labels, s.Taints, s.Network = n.NodePool, n.NodeIP, n.Labels, n.Taints, n.Network
	s.Credentials.Token = token
	s.CACertHashes = []string{caHash}
	s.SpreadSeconds = DefaultSpread(len(c.Nodes))
	return &s
}

// fieldsOfNode are the fields of a Site that a node of a Cluster has.
var fieldsOfNode = []string{"nodePool", "nodeType", "nodeIP", "labels", "taints", "network"}

// nodeProblems are those of the node's Site that lie in the node's own fields.
func (c *Cluster) nodeProblems(n *ClusterNode) Problems {
	site := c.NodeSite(n, NewSecret(exampleToken), exampleHash)
	site.Users, site.Report = nil, Report{}
	if !slices.Contains([]string{NodeNative, NodeEdge, NodeCloud}, site.NodeType) {
		site.NodeType, site.NodePool = NodeNative, "" // reported already
	}
	if site.NodeName == "" {
		site.NodeName = "node"
	}
	var own, found Problems
	site.validateRules(true, &found)
	for _, p := range found {
		// Of the VIP only what the node's networks have to do with it.
		if inFields(Problems{p}, fieldsOfNode) != nil || p.Path == "vip" && strings.Contains(p.Msg, "network.interfaces") {
			own = append(own, p)
		}
	}
	return own
}

// siteProblems are those of fields that the Cluster shares with every Site.
func (c *Cluster) siteProblems(probs *Problems) {
	site := c.siteFrame(NodeNative, "")
	site.Credentials.Token = NewSecret(exampleToken)
	site.CACertHashes = []string{exampleHash}
	c.Report.validate(probs)
	var shared Problems
	site.validateRules(true, &shared)
	*probs = append(*probs, inFields(shared, []string{"vip", "report"})...)
	for i, m := range c.Masters {
		a, err := netip.ParseAddr(m.Address)
		if err != nil {
			continue
		}
		if vip, err := netip.ParseAddr(c.VIP); err == nil && a.Unmap() == vip.Unmap() {
			probs.Add(fmt.Sprintf("masters[%d].address", i), "%s is the VIP; the VIP is a free address that stands for all API servers, so give it another one (vip)", a)
		}
		if first, err := netip.ParseAddr(c.Masters[0].Address); err == nil && first.Is4() != a.Is4() {
			probs.Add(fmt.Sprintf("masters[%d].address", i), "%s and %s are of different families; IPVS balances one virtual address to real ones of the same family", a, first)
		}
	}
}

// inFields keeps the problems whose path begins with one of the fields.
func inFields(probs Problems, fields []string) Problems {
	var kept Problems
	for _, p := range probs {
		if slices.ContainsFunc(fields, func(f string) bool { return strict.Covers(f, p.Path) }) {
			kept = append(kept, p)
		}
	}
	return kept
}

// clusterNet is a network of the cluster, and where it is written.
type clusterNet struct {
	netip.Prefix
	path, what string
}

func (n clusterNet) isDefault() bool {
	s := n.String()
	return slices.Contains([]string{defaultPods[false], defaultPods[true], defaultServices[false], defaultServices[true]}, s)
}

// validateNetworks checks pods' and Services' networks against each other and
// against every address that machines of the cluster have.
func (c *Cluster) validateNetworks(probs *Problems) {
	pods := c.parseCIDRs("podCIDRs", c.PodCIDRs, "pods", probs)
	services := c.parseCIDRs("serviceCIDRs", c.ServiceCIDRs, "Services", probs)
	if len(pods) == len(c.PodCIDRs) && len(services) == len(c.ServiceCIDRs) && !slices.EqualFunc(pods, services, func(a, b clusterNet) bool { return a.Addr().Is4() == b.Addr().Is4() }) {
		probs.Add("serviceCIDRs", "must be of the same families as podCIDRs, in the same order (%s; %s)", strings.Join(c.ServiceCIDRs, ", "), strings.Join(c.PodCIDRs, ", "))
	}
	if len(c.Masters) > 0 && len(pods) > 0 {
		if a, err := netip.ParseAddr(c.Masters[0].Address); err == nil && a.Is4() != pods[0].Addr().Is4() {
			probs.Add("podCIDRs[0]", "%s and the API servers' addresses (%s) are of different families; the first network must be of the API servers' family", pods[0].Prefix, a)
		}
	}
	for _, p := range pods {
		c.validatePodSize(p, probs)
	}
	for _, s := range services {
		// The API server keeps an entry for each address.
		if hosts := s.Addr().BitLen() - s.Bits(); hosts > 20 {
			probs.Add(s.path, "%s is too large: the API server takes at most 2^20 Services: write %s", s.Prefix, netip.PrefixFrom(s.Addr(), s.Addr().BitLen()-20))
		} else if hosts < 4 {
			probs.Add(s.path, "%s has no room for Services; the cluster's DNS alone takes the tenth address", s.Prefix)
		}
	}
	all := append(slices.Clone(pods), services...)
	for i, n := range all {
		for _, other := range all[:i] {
			if n.Overlaps(other.Prefix) {
				at, with := n, other
				if n.isDefault() && !other.isDefault() { // nobody wrote that one
					at, with = other, n
				}
				probs.Add(at.path, "%s (%s) overlaps %s (%s, %s): one address would be two things", at.Prefix, at.what, with.Prefix, with.what, with.path)
			}
		}
		c.validateOverlap(n, probs)
	}
}

func (c *Cluster) parseCIDRs(field string, cidrs []string, what string, probs *Problems) []clusterNet {
	var out []clusterNet
	if len(cidrs) > 2 {
		probs.Add(field, "has %d networks; want one, or one IPv4 and one IPv6", len(cidrs))
	}
	for i, s := range cidrs {
		path := fmt.Sprintf("%s[%d]", field, i)
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil:
			probs.Add(path, "%q is not a CIDR, e.g. 10.244.0.0/16", strict.Shorten(s))
			continue
		case p.Addr().Is4In6():
			probs.Add(path, "%q is IPv4 written as IPv6; write it as IPv4", s)
			continue
		case p != p.Masked():
			probs.Add(path, "%s has bits set behind its prefix; write %s", s, p.Masked())
		}
		p = p.Masked()
		for _, r := range reserved {
			if p.Overlaps(r.Prefix) {
				probs.Add(path, "%s overlaps %s, %s", p, r.Prefix, r.what)
			}
		}
		if slices.ContainsFunc(out, func(o clusterNet) bool { return o.Addr().Is4() == p.Addr().Is4() }) {
			probs.Add(path, "%s: there is a network of this family already; want one IPv4 and one IPv6", p)
		}
		out = append(out, clusterNet{p, path, what})
	}
	return out
}

// reserved are networks that pods and Services cannot have on any node.
var reserved = []struct {
	netip.Prefix
	what string
}{
	{forms.ThisNetwork, "which stands for no machine"},
	{netip.MustParsePrefix("127.0.0.0/8"), "the loopback network"},
	{netip.MustParsePrefix("169.254.0.0/16"), "the link-local network, where yurthub listens (" + openyurt.PodAddress + ")"},
	{netip.MustParsePrefix("224.0.0.0/4"), "the multicast addresses"},
	{forms.ReservedV4, "which is reserved"},
	{netip.MustParsePrefix("::1/128"), "the loopback address"},
	{netip.MustParsePrefix("fe80::/10"), "the link-local addresses"},
	{netip.MustParsePrefix("ff00::/8"), "the multicast addresses"},
}

// validatePodSize checks that each machine gets its part: a /24 of IPv4, a
// /64 of IPv6, which are the controller manager's defaults.
func (c *Cluster) validatePodSize(p clusterNet, probs *Problems) {
	perNode := map[bool]int{true: 24, false: 64}[p.Addr().Is4()]
	machines := len(c.Masters) + len(c.Nodes)
	switch {
	case p.Bits() > perNode:
		probs.Add(p.path, "%s is too small: each node gets a /%d of it", p.Prefix, perNode)
	case perNode-p.Bits() > 16:
		probs.Add(p.path, "%s is too large: the controller manager divides it into at most 2^16 parts of /%d: write %s", p.Prefix, perNode, netip.PrefixFrom(p.Addr(), perNode-16))
	case 1<<(perNode-p.Bits()) < machines:
		probs.Add(p.path, "%s has room for %s (a /%d each); the cluster has %d", p.Prefix, Count(1<<(perNode-p.Bits()), "node"), perNode, machines)
	}
}

// validateOverlap reports addresses and networks of machines that lie in a
// network of the cluster.
func (c *Cluster) validateOverlap(n clusterNet, probs *Problems) {
	if vip, err := netip.ParseAddr(c.VIP); err == nil && n.Contains(vip.Unmap()) {
		probs.Add(n.path, "%s (%s) contains the VIP %s: choose another network, or another VIP (vip)", n.Prefix, n.what, vip)
	}
	for i, m := range c.Masters {
		if a, err := netip.ParseAddr(m.Address); err == nil && n.Contains(a.Unmap()) {
			probs.Add(n.path, "%s (%s) contains %s, the address of control-plane node %s (masters[%d]): choose another network", n.Prefix, n.what, a, m.Name, i)
		}
		c.overlapMachine(n, &m.Network, fmt.Sprintf("masters[%d]", i), m.Address, probs)
	}
	for i := range c.Nodes {
		c.overlapMachine(n, &c.Nodes[i].Network, fmt.Sprintf("nodes[%d]", i), "", probs)
	}
}

// overlapMachine reports the networks that a machine is in or routes to, but
// for that of address, which is reported already.
func (c *Cluster) overlapMachine(n clusterNet, network *Network, path, address string, probs *Problems) {
	for _, s := range network.subnets() {
		if s.Overlaps(n.Prefix) && (s.Addr().String() != address || !n.Contains(s.Addr())) {
			probs.Add(n.path, "%s (%s) overlaps %s, the network of %s.%s: choose another network", n.Prefix, n.what, s.Masked(), path, s.path)
		}
	}
	for i, d := range network.DNS {
		if a, err := netip.ParseAddr(d); err == nil && n.Contains(a.Unmap()) {
			probs.Add(n.path, "%s (%s) contains %s, a DNS server (%s.network.dns[%d]): choose another network", n.Prefix, n.what, d, path, i)
		}
	}
	for i, f := range network.Interfaces {
		for j, r := range f.Routes {
			if p, err := netip.ParsePrefix(r.To); err == nil && p.Bits() > 0 && p.Overlaps(n.Prefix) && !c.leadsToPods(n, p, r.Via) {
				probs.Add(n.path, "%s (%s) overlaps %s, to which %s.network.interfaces[%d].routes[%d] leads: choose another network", n.Prefix, n.what, r.To, path, i, j)
			}
		}
	}
}

// leadsToPods reports whether a route is the one to the pods of another machine, where
// no network agent makes those: it stays inside of their network.
func (c *Cluster) leadsToPods(n clusterNet, to netip.Prefix, via string) bool {
	router, err := netip.ParseAddr(via)
	if err != nil || n.what != "pods" || to.Bits() <= n.Bits() {
		return false
	}
	has := func(network *Network) bool {
		return slices.ContainsFunc(network.subnets(), func(s subnet) bool { return s.Addr() == router })
	}
	return slices.ContainsFunc(c.Masters, func(m ControlPlaneNode) bool { return m.Address == via || has(&m.Network) }) ||
		slices.ContainsFunc(c.Nodes, func(m ClusterNode) bool { return has(&m.Network) })
}
