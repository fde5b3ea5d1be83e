package configs

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// Subnet is an address of the machine with its prefix length.
type Subnet struct {
	netip.Prefix
	Path string // path of the field that contains the address
}

// Subnets returns the valid addresses of all interfaces and VLANs.
func (n *Network) Subnets() []Subnet {
	var out []Subnet
	for path, a := range n.addressings() {
		for i, text := range a.Addresses {
			if p, err := netip.ParsePrefix(text); err == nil {
				out = append(out, Subnet{p, fmt.Sprintf("%s.addresses[%d]", path, i)})
			}
		}
	}
	return out
}

// UsesDHCP reports whether any interface or VLAN gets its addresses, and perhaps DNS servers, from
// DHCP or router advertisements.
func (n *Network) UsesDHCP() bool {
	for _, a := range n.addressings() {
		if a.DHCP || a.AcceptRA {
			return true
		}
	}
	return len(n.Interfaces) == 0
}

// validateVIPUse reports each field whose address is the VIP or, if there is none, a VIP inside a
// network of the machine.
func (s *Site) validateVIPUse(probs *Problems) {
	if !s.vipTaken(probs) {
		s.vipInNetwork("", probs)
	}
}

// ValidateVIPNetwork reports a VIP inside a network of the machine, unless a field has the VIP
// itself. at is the path of the Site in its document.
func (s *Site) ValidateVIPNetwork(at string, probs *Problems) {
	var uses Problems
	if !s.vipTaken(&uses) {
		s.vipInNetwork(at, probs)
	}
}

// vipTaken reports each field whose address is the VIP, and whether there is one.
func (s *Site) vipTaken(probs *Problems) (taken bool) {
	vip, err := netip.ParseAddr(s.VIP)
	if err != nil || s.IPVS.Disabled {
		return false
	}
	use := func(path, value string) {
		addr, err := netip.ParseAddr(value)
		if err != nil {
			p, perr := netip.ParsePrefix(value)
			addr, err = p.Addr(), perr
		}
		if err == nil && addr == vip {
			taken = true
			probs.Add(path, "%s is the VIP, which must be free; give the VIP another address (vip)", addr)
		}
	}
	for path, a := range s.Network.addressings() {
		use(path+".gateway", a.Gateway)
	}
	for i, f := range s.Network.Interfaces {
		for j, r := range f.Routes {
			use(fmt.Sprintf("network.interfaces[%d].routes[%d].via", i, j), r.Via)
		}
	}
	for _, n := range s.Network.Subnets() {
		use(n.Path, n.Addr().String())
	}
	for i, d := range s.Network.DNS {
		use(fmt.Sprintf("network.dns[%d]", i), d)
	}
	for i, h := range s.Network.NTP {
		use(fmt.Sprintf("network.ntp[%d]", i), h)
	}
	return taken
}

func (s *Site) vipInNetwork(at string, probs *Problems) {
	vip, err := netip.ParseAddr(s.VIP)
	if err != nil || s.IPVS.Disabled {
		return
	}
	for _, n := range s.Network.Subnets() {
		if n.Contains(vip) && n.Bits() >= 8 {
			probs.Add("vip", "%s is in %s, the network of %s; choose an address that no network of the site contains", vip, n.Masked(), strict.Join(at, n.Path))
			return
		}
	}
}

// validateMasterUse reports each API server whose address is this machine's own, or cannot belong
// to any machine in this machine's networks.
func (s *Site) validateMasterUse(probs *Problems) {
	subnets := s.Network.Subnets()
	for i, m := range s.Masters {
		path := fmt.Sprintf("masters[%d]", i)
		host, _, err := net.SplitHostPort(m)
		if err != nil || forms.BadHostPort(m) != "" {
			continue
		}
		if s.NodeType == NodeControlPlane {
			continue // a control-plane node is itself one of the API servers
		}
		if strings.EqualFold(host, s.NodeName) {
			probs.Add(path, "%s is this node itself (nodeName); write the address or name of a control-plane node", host)
		}
		a, err := netip.ParseAddr(host)
		if err != nil {
			continue
		}
		if what := forms.ServiceAddrs[a]; what != "" {
			probs.Add(path, "%s is the address of %s inside the cluster (kubeadm's default); give the control-plane node's own address", a, what)
		}
		own := slices.IndexFunc(subnets, func(n Subnet) bool { return n.Addr() == a })
		if own >= 0 {
			probs.Add(path, "%s is this machine's own address (%s); give the control-plane node's address", a, subnets[own].Path)
			continue
		}
		for _, n := range subnets {
			if part := forms.HostPart(n.Prefix, a); part != "" {
				probs.Add(path, "%s is the %s address of %s (%s), not the address of a machine", a, part, n.Masked(), n.Path)
				break
			}
		}
	}
}

// validateServerUse reports each server whose address is this machine's own, or cannot belong to
// any machine.
func (s *Site) validateServerUse(probs *Problems) {
	subnets := s.Network.Subnets()
	nobody := func(path, host string) {
		a, err := netip.ParseAddr(host)
		if err != nil {
			return
		}
		if what := forms.ServiceAddrs[a]; what != "" {
			probs.Add(path, "%s is the address of %s (kubeadm's default), which answers only once the node is in the cluster; name a server outside of it", a, what)
			return
		}
		for _, n := range subnets {
			if part := forms.HostPart(n.Prefix, a); part != "" {
				probs.Add(path, "%s is the %s address of %s (%s), not the address of a machine", a, part, n.Masked(), n.Path)
				return
			}
		}
	}
	itself := func(path, host string) {
		if strings.EqualFold(host, s.NodeName) && !forms.IsLoopbackName(host) {
			probs.Add(path, "%s is the node itself (nodeName); name a server", host)
		}
		if a, err := netip.ParseAddr(host); err == nil && host != s.VIP {
			if own := slices.IndexFunc(subnets, func(n Subnet) bool { return n.Addr() == a }); own >= 0 {
				probs.Add(path, "%s is this machine's own address (%s); name a server", a, subnets[own].Path)
			}
		}
	}
	for i, d := range s.Network.DNS {
		nobody(fmt.Sprintf("network.dns[%d]", i), d)
	}
	for i, h := range s.Network.NTP {
		path := fmt.Sprintf("network.ntp[%d]", i)
		nobody(path, h)
		itself(path, h)
	}
	u, err := url.Parse(s.Report.URL)
	if err != nil || u.Hostname() == "" {
		return
	}
	host := u.Hostname()
	nobody("report.url", host)
	itself("report.url", host)
	if a, err := netip.ParseAddr(host); err == nil && forms.BadServer(a) != "" {
		probs.Add("report.url", "%s %s", a, forms.BadServer(a))
	}
	if forms.IsLoopbackName(host) {
		probs.Add("report.url", "%s always refers to the machine itself; name a server", host)
	}
}

// OtherAddress finds the interface with the address own, and returns its first static address of
// the other family, or the zero Addr. It ignores addresses from DHCP and router advertisements,
// because kubelet's --node-ip must not change.
func (n Network) OtherAddress(own netip.Addr) netip.Addr {
	for _, addressing := range n.addressings() {
		has, other := false, netip.Addr{}
		for _, text := range addressing.Addresses {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				continue
			}
			a := p.Addr()
			has = has || a == own
			if a.Is4() != own.Is4() && !a.IsLinkLocalUnicast() && !other.IsValid() {
				other = a
			}
		}
		if has && other.IsValid() {
			return other
		}
	}
	return netip.Addr{}
}

// BothAddresses returns own and its OtherAddress, separated by a comma. It returns "" if there is
// no OtherAddress.
func (n Network) BothAddresses(own string) string {
	addr, err := netip.ParseAddr(own)
	if err != nil {
		return ""
	}
	if other := n.OtherAddress(addr); other.IsValid() {
		return addr.String() + "," + other.String()
	}
	return ""
}
