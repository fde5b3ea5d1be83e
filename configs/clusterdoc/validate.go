package clusterdoc

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/strict"
)

const maxTokenTTL = 365 * 24 * time.Hour

// Validate returns all problems of c, or nil. It does not change c, whose defaults must be set.
func (c *Cluster) Validate() configs.Problems {
	var probs configs.Problems
	strict.Check(c, checks, &probs)
	if v := c.KubernetesVersion; v != "" {
		switch {
		case !kubeadm.VersionForm.MatchString(v):
			probs.Add("kubernetesVersion", "%s", forms.BadVersion(v, kubeadm.VersionForm, configs.ExampleKubernetes))
		case kubeadm.Before(v, kubeadm.OldestKubernetes):
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
		probs.Add("tokenTTL", "must be from 1h to %dh, not %s: long enough to flash, ship and switch on the machines, but not unlimited", int(maxTokenTTL.Hours()), c.TokenTTL)
	}
	c.validateMachines(&probs)
	c.validateNetworks(&probs)
	strict.CheckText(c, &probs)
	return probs
}

var repositoryForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)

// checks contains the functions for the tag check in a Cluster.
var checks = func() strict.Checks {
	all := maps.Clone(configs.FieldChecks)
	maps.Copy(all, strict.Checks{"clusterName": badClusterName, "repository": badRepository, "manifestPath": badManifestPath})
	return all
}()

func badClusterName(s string) string {
	if forms.DNSLabel.MatchString(s) {
		return ""
	}
	return fmt.Sprintf("%q cannot name a cluster: lower-case letters, digits and - only, at most 63, beginning and ending with a letter or digit", strict.Shorten(s))
}

// badRepository returns why s cannot be the beginning of image names, or "".
func badRepository(s string) string {
	switch last := s[strings.LastIndexByte(s, '/')+1:]; {
	case strings.Contains(s, "://"):
		return fmt.Sprintf("%q: leave the scheme out, e.g. registry.k8s.io", strict.Shorten(s))
	case strings.HasSuffix(s, "/"):
		return fmt.Sprintf("%q: leave the slash at the end out", strict.Shorten(s))
	case strings.Contains(s, "@") || strings.Contains(s, "/") && strings.Contains(last, ":"):
		return fmt.Sprintf("%q names one image; give the prefix of all images, e.g. registry.k8s.io", strict.Shorten(s))
	case !repositoryForm.MatchString(s):
		return fmt.Sprintf("%q is not a registry with an optional path, e.g. registry.example.com/kubernetes", strict.Shorten(s))
	}
	return ""
}

func badManifestPath(s string) string {
	switch {
	case s == "":
		return "is empty; give a file's path"
	case strings.Contains(s, "://"):
		return fmt.Sprintf("%q is a URL; download the file and keep it beside the Cluster, so that it cannot change", strict.Shorten(s))
	}
	return ""
}

// owners maps a value that only one machine can have to the field that contains it.
type owners map[string]string

// claim records that a field contains a value, or reports that another field already contains it.
func (o owners) claim(value, path, what string, probs *configs.Problems) {
	if value == "" {
		return
	}
	if other, twice := o[value]; twice {
		probs.Add(path, "%s is also %s", strings.TrimSpace(what+" "+strict.Shorten(value)), other)
		return
	}
	o[value] = path
}

// validateMachines validates masters and nodes. No two machines may have the same name, address or
// match.
func (c *Cluster) validateMachines(probs *configs.Problems) {
	names, addresses, marks := owners{}, owners{}, owners{}
	for i := range c.Masters {
		m := &c.Masters[i]
		path := fmt.Sprintf("masters[%d]", i)
		c.validateName(m.Name, path+".name", names, probs)
		m.validateAddress(path, probs)
		own := owners{}
		if a, err := netip.ParseAddr(m.Address); err == nil {
			addresses.claim(a.Unmap().String(), path+".address", "address", probs)
			own[a.Unmap().String()] = path + ".address" // the machine's network may repeat its address
		}
		claimMatch(m.Match, path+".match", marks, probs)
		site := c.siteFrame(configs.NodeNative, m.Name)
		site.Network = m.Network
		c.validateSite(&site, path, probs)
		claimSubnets(&m.Network, path, addresses, own, probs)
	}
	for i := range c.Nodes {
		n := &c.Nodes[i]
		path := fmt.Sprintf("nodes[%d]", i)
		c.validateName(n.Name, path+".name", names, probs)
		claimMatch(n.Match, path+".match", marks, probs)
		if (n.NodeType == configs.NodeEdge || n.NodeType == configs.NodeCloud) && !c.HasOpenYurt() {
			probs.Add(path+".nodeType", "%s requires OpenYurt, which the cluster does not have (openyurt: false)", n.NodeType)
		}
		site := c.NodeSite(n, configs.Secret{}, "")
		if !slices.Contains([]string{configs.NodeNative, configs.NodeEdge, configs.NodeCloud}, site.NodeType) {
			site.NodeType, site.NodePool = configs.NodeNative, "" // the wrong node type has already been reported
		}
		c.validateSite(site, path, probs)
		claimSubnets(&n.Network, path, addresses, nil, probs)
	}
	c.validateShared(probs)
}

func (c *Cluster) validateName(name, path string, names owners, probs *configs.Problems) {
	if name == "" {
		return // a missing required field is reported elsewhere
	}
	if strings.Contains(name, "{{") {
		probs.Add(path, "%q is a template, but each machine of a Cluster needs a name", strict.Shorten(name))
		return
	}
	if err := forms.CheckNodeName(name); err != nil {
		probs.Add(path, "%s", err)
		return
	}
	if name == c.Endpoint {
		probs.Add(path, "is also the cluster's endpoint; choose another name")
	}
	names.claim(name, path, "name", probs)
}

func (m *ControlPlaneNode) validateAddress(path string, probs *configs.Problems) {
	if m.Address == "" {
		return // a missing required field is reported elsewhere
	}
	a, err := netip.ParseAddr(m.Address)
	switch {
	case err != nil:
		hint := ""
		if p, err := netip.ParsePrefix(m.Address); err == nil {
			hint = fmt.Sprintf(": write %s, and the prefix length in network.interfaces", p.Addr())
		} else if host, _, err := net.SplitHostPort(m.Address); err == nil && forms.BadHost(host) == "" {
			hint = ": leave the port out; it is in the field port of the Cluster"
		} else if forms.BadHost(m.Address) == "" {
			hint = "; a name is not enough, since etcd's members use addresses"
		}
		probs.Add(path+".address", "%q is not an IP address%s", strict.Shorten(m.Address), hint)
		return
	case forms.BadServer(a) != "":
		probs.Add(path+".address", "%s %s", a, forms.BadServer(a))
		return
	case forms.ServiceAddrs[a] != "":
		probs.Add(path+".address", "%s is the address of %s inside the cluster (kubeadm's default)", a, forms.ServiceAddrs[a])
	}
	subnets := m.Network.Subnets()
	if len(subnets) > 0 && !m.Network.UsesDHCP() && !slices.ContainsFunc(subnets, func(s configs.Subnet) bool { return s.Addr() == a.Unmap() }) {
		probs.Add(path+".address", "%s is not an address of the machine's network, and no interface uses DHCP: add it to an interface", a)
	}
	for _, s := range subnets {
		if part := forms.HostPart(s.Prefix, a); part != "" {
			probs.Add(path+".address", "%s is the %s address of %s, not the address of a machine", a, part, s.Masked())
		}
	}
}

// claimSubnets records the addresses of a machine, except those in own.
func claimSubnets(n *configs.Network, path string, addresses, own owners, probs *configs.Problems) {
	for _, s := range n.Subnets() {
		if a := s.Addr().Unmap().String(); own[a] == "" {
			addresses.claim(a, path+"."+s.Path, "address", probs)
		}
	}
}

// claimMatch validates the match of a machine, if it has one, and records its members.
func claimMatch(m configs.Match, path string, marks owners, probs *configs.Problems) {
	if m.IsZero() {
		return
	}
	m.Validate(path, probs)
	for _, k := range m.Keys() {
		marks.claim(k.Key, path+strings.TrimPrefix(k.Field, "match"), "", probs)
	}
}

// machineFields lists the fields that both a Site and a machine of a Cluster have.
var machineFields = []string{"nodePool", "nodeType", "nodeIP", "labels", "taints", "network"}

// validateSite reports the problems of a machine's Site that are about the machine's own fields. A
// VIP inside a machine's network is reported only once.
func (c *Cluster) validateSite(site *configs.Site, path string, probs *configs.Problems) {
	var found configs.Problems
	site.ValidateRules(&found)
	for _, p := range found {
		if isIn(p, machineFields) {
			p.Path = strict.Join(path, p.Path)
			*probs = append(*probs, p)
		}
	}
	if !slices.ContainsFunc(*probs, func(o configs.Problem) bool { return o.Path == "vip" }) {
		site.ValidateVIPNetwork(path, probs)
	}
}

// validateShared reports problems of the fields that every machine's Site copies from the Cluster.
func (c *Cluster) validateShared(probs *configs.Problems) {
	site := c.siteFrame(configs.NodeNative, "")
	c.Report.validate(probs)
	var found configs.Problems
	site.ValidateRules(&found)
	for _, p := range found {
		if isIn(p, []string{"vip", "report"}) {
			*probs = append(*probs, p)
		}
	}
	for i, m := range c.Masters {
		a, err := netip.ParseAddr(m.Address)
		if err != nil {
			continue
		}
		if vip, err := netip.ParseAddr(c.VIP); err == nil && a.Unmap() == vip.Unmap() {
			probs.Add(fmt.Sprintf("masters[%d].address", i), "%s is the VIP, which must be a free address; choose another VIP (vip)", a)
		}
		if first, err := netip.ParseAddr(c.Masters[0].Address); err == nil && first.Is4() != a.Is4() {
			probs.Add(fmt.Sprintf("masters[%d].address", i), "%s and %s are of different families; IPVS balances one virtual address to real ones of the same family", a, first)
		}
	}
}

// isIn reports whether a problem is about one of the fields.
func isIn(p configs.Problem, fields []string) bool {
	return slices.ContainsFunc(fields, func(f string) bool { return strict.Covers(f, p.Path) })
}
