package configs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// NodeSubnets returns the CIDRs in nodeIP: at most one for each family.
func (s *Site) NodeSubnets() []netip.Prefix {
	subnets, _ := parseNodeSubnets(s.NodeIP)
	return subnets
}

func badNodeSubnets(s string) string {
	_, bad := parseNodeSubnets(s)
	return bad
}

// parseNodeSubnets parses a CIDR or an address, or one of each family separated by a comma. If the
// text is invalid, bad describes the problem.
func parseNodeSubnets(s string) (subnets []netip.Prefix, bad string) {
	if s == "" {
		return nil, ""
	}
	for _, text := range strings.Split(s, ",") {
		text = strings.TrimSpace(text)
		p, err := netip.ParsePrefix(text)
		a, addrErr := netip.ParseAddr(text)
		if addrErr == nil && a.Zone() == "" {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		switch own := p.Addr(); {
		case err != nil:
			return nil, fmt.Sprintf("%q is neither a CIDR nor an address, e.g. 10.0.0.0/8, or one of each family: 10.0.0.0/8,fd00::/8", strict.Shorten(text))
		case p != p.Masked():
			return nil, fmt.Sprintf("%s has bits set after its prefix; write %s", text, p.Masked())
		case own.IsLinkLocalUnicast():
			return nil, fmt.Sprintf("%s cannot be the node's address: it is valid on one link only", text)
		case forms.BadMachine(own) != "" && (p.Bits() > 0 || !own.IsUnspecified()):
			return nil, fmt.Sprintf("%s cannot be the node's address: it %s", text, forms.BadMachine(own))
		case slices.ContainsFunc(subnets, func(o netip.Prefix) bool { return o.Addr().Is4() == own.Is4() }):
			return nil, fmt.Sprintf("%q has two networks of the same family; want at most one IPv4 and one IPv6", strict.Shorten(s))
		}
		subnets = append(subnets, p)
	}
	return subnets, ""
}

// validateNodeIP reports a nodeIP that matches no address of this machine, unless DHCP, a router or
// an Ignition config may add addresses.
func (s *Site) validateNodeIP(probs *Problems) {
	subnets := s.NodeSubnets()
	if len(subnets) == 0 {
		return
	}
	if s.NodeType == NodeControlPlane {
		probs.Add("nodeIP", "is for workers: a control-plane node uses its address in the Cluster; remove it")
	}
	if _, given := s.KubeletExtraArgs["node-ip"]; given {
		probs.Add(strict.KeyPath("kubeletExtraArgs", "node-ip"), "sets the same value as nodeIP; keep one of the two")
	}
	if len(s.Network.Interfaces) == 0 || !s.Ignition.IsZero() || s.IgnitionFile != "" {
		return
	}
	var own []netip.Addr
	learned := map[bool]bool{} // families with addresses from DHCP or a router (true: IPv4)
	for _, a := range s.Network.addressings() {
		learned[true] = learned[true] || a.DHCP
		learned[false] = learned[false] || a.DHCP || a.AcceptRA
		for _, p := range parsedPrefixes(a.Addresses) {
			own = append(own, p.Addr())
		}
	}
	for _, p := range subnets {
		if !learned[p.Addr().Is4()] && !slices.ContainsFunc(own, p.Contains) {
			probs.Add("nodeIP", "no interface has an address in %s (the interfaces have %s): correct nodeIP, or network.interfaces", p, orNone(own))
		}
	}
}

func orNone(addrs []netip.Addr) string {
	if len(addrs) == 0 {
		return "none"
	}
	var out []string
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}
