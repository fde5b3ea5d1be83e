package configs

import "net/netip"

// ServicesAreV4 reports whether the Services of the cluster have IPv4 addresses. It assumes that
// they have the family of the VIP.
func (s *Site) ServicesAreV4() bool {
	vip, err := netip.ParseAddr(s.VIP)
	return err != nil || vip.Is4()
}

// GivesDefaultRoute reports whether a default route of a family may come from a gateway, a route,
// DHCP or router advertisements.
func (n *Network) GivesDefaultRoute(v4 bool) bool {
	for _, a := range n.addressings() {
		g, err := netip.ParseAddr(a.Gateway)
		if err == nil && g.Is4() == v4 || a.learns(v4) && !a.NoDefaultRoute {
			return true
		}
	}
	for i := range n.Interfaces {
		for _, r := range n.Interfaces[i].Routes {
			if p, err := netip.ParsePrefix(r.To); err == nil && p.Bits() == 0 && p.Addr().Is4() == v4 {
				return true
			}
		}
	}
	return false
}

// learns reports whether addresses and routes of a family may come from DHCP or router
// advertisements.
func (a Addressing) learns(v4 bool) bool { return a.DHCP || a.AcceptRA && !v4 }

// NeedsRoute reports whether the interface has static addresses of a family, or IPv4 addresses from
// DHCP without a default route. Whether another default route exists is not checked: see
// GivesDefaultRoute.
func (a Addressing) NeedsRoute(v4 bool) bool {
	if v4 && a.DHCP && a.NoDefaultRoute {
		return true
	}
	for _, p := range parsedPrefixes(a.Addresses) {
		if p.Addr().Is4() == v4 {
			return true
		}
	}
	return false
}
