package clusterdoc

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/openyurt"
)

// clusterNet is a CIDR of the cluster, with the field that contains it.
type clusterNet struct {
	netip.Prefix
	path, what string
}

func (n clusterNet) isDefault() bool {
	s := n.String()
	return slices.Contains([]string{defaultPods[false], defaultPods[true], defaultServices[false], defaultServices[true]}, s)
}

// validateNetworks reports CIDRs of pods and Services that overlap each other or contain an address
// of a machine.
func (c *Cluster) validateNetworks(probs *configs.Problems) {
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
		// The API server stores an entry for each address of the CIDR.
		if hosts := s.Addr().BitLen() - s.Bits(); hosts > 20 {
			probs.Add(s.path, "%s is too large: the API server accepts at most 2^20 Services; write %s", s.Prefix, netip.PrefixFrom(s.Addr(), s.Addr().BitLen()-20))
		} else if hosts < 4 {
			probs.Add(s.path, "%s is too small for Services: the cluster's DNS alone uses the tenth address", s.Prefix)
		}
	}
	all := append(slices.Clone(pods), services...)
	for i, n := range all {
		for _, other := range all[:i] {
			if n.Overlaps(other.Prefix) {
				at, with := n, other
				if n.isDefault() && !other.isDefault() { // report the CIDR that the user wrote, not a default
					at, with = other, n
				}
				probs.Add(at.path, "%s (%s) overlaps %s (%s, %s); choose networks without common addresses", at.Prefix, at.what, with.Prefix, with.what, with.path)
			}
		}
		c.validateOverlap(n, probs)
	}
}

func (c *Cluster) parseCIDRs(field string, cidrs []string, what string, probs *configs.Problems) []clusterNet {
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
			probs.Add(path, "%s has bits set after its prefix; write %s", s, p.Masked())
		}
		p = p.Masked()
		for _, r := range reserved {
			if p.Overlaps(r.Prefix) {
				probs.Add(path, "%s overlaps %s, %s", p, r.Prefix, r.what)
			}
		}
		if slices.ContainsFunc(out, func(o clusterNet) bool { return o.Addr().Is4() == p.Addr().Is4() }) {
			probs.Add(path, "%s is a second network of the same family; want one IPv4 and one IPv6", p)
		}
		out = append(out, clusterNet{p, path, what})
	}
	return out
}

// reserved lists the networks that pods and Services cannot use.
var reserved = []struct {
	netip.Prefix
	what string
}{
	{forms.ThisNetwork, "whose addresses no machine can have"},
	{netip.MustParsePrefix("127.0.0.0/8"), "the loopback network"},
	{netip.MustParsePrefix("169.254.0.0/16"), "the link-local network, where yurthub listens (" + openyurt.PodAddress + ")"},
	{netip.MustParsePrefix("224.0.0.0/4"), "the multicast addresses"},
	{forms.ReservedV4, "which is reserved"},
	{netip.MustParsePrefix("::1/128"), "the loopback address"},
	{netip.MustParsePrefix("fe80::/10"), "the link-local addresses"},
	{netip.MustParsePrefix("ff00::/8"), "the multicast addresses"},
}

// validatePodSize checks that the CIDR is large enough for all machines. Each machine gets a /24 of
// IPv4 or a /64 of IPv6, which are the defaults of kube-controller-manager.
func (c *Cluster) validatePodSize(p clusterNet, probs *configs.Problems) {
	perNode := map[bool]int{true: 24, false: 64}[p.Addr().Is4()]
	machines := len(c.Masters) + len(c.Nodes)
	switch {
	case p.Bits() > perNode:
		probs.Add(p.path, "%s is too small: each node gets a /%d of it", p.Prefix, perNode)
	case perNode-p.Bits() > 16:
		probs.Add(p.path, "%s is too large: the controller manager divides it into at most 2^16 parts of /%d; write %s", p.Prefix, perNode, netip.PrefixFrom(p.Addr(), perNode-16))
	case 1<<(perNode-p.Bits()) < machines:
		probs.Add(p.path, "%s has space for %s (a /%d each); the cluster has %d", p.Prefix, configs.Count(1<<(perNode-p.Bits()), "node"), perNode, machines)
	}
}

// validateOverlap reports addresses and networks of machines that overlap n.
func (c *Cluster) validateOverlap(n clusterNet, probs *configs.Problems) {
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

// overlapMachine reports networks and routes of a machine that overlap n. It skips the network that
// contains the machine's address, which has already been reported.
func (c *Cluster) overlapMachine(n clusterNet, network *configs.Network, path, address string, probs *configs.Problems) {
	for _, s := range network.Subnets() {
		if s.Overlaps(n.Prefix) && (s.Addr().String() != address || !n.Contains(s.Addr())) {
			probs.Add(n.path, "%s (%s) overlaps %s, the network of %s.%s: choose another network", n.Prefix, n.what, s.Masked(), path, s.Path)
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
				probs.Add(n.path, "%s (%s) overlaps %s, the destination of %s.network.interfaces[%d].routes[%d]: choose another network", n.Prefix, n.what, r.To, path, i, j)
			}
		}
	}
}

// leadsToPods reports whether a route to the prefix "to", via another machine of the cluster, leads
// to that machine's pods. Clusters without a network plugin have such routes.
func (c *Cluster) leadsToPods(n clusterNet, to netip.Prefix, via string) bool {
	router, err := netip.ParseAddr(via)
	if err != nil || n.what != "pods" || to.Bits() <= n.Bits() {
		return false
	}
	has := func(network *configs.Network) bool {
		return slices.ContainsFunc(network.Subnets(), func(s configs.Subnet) bool { return s.Addr() == router })
	}
	return slices.ContainsFunc(c.Masters, func(m ControlPlaneNode) bool { return m.Address == via || has(&m.Network) }) ||
		slices.ContainsFunc(c.Nodes, func(m Node) bool { return has(&m.Network) })
}
