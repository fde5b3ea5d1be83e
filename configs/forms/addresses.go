package forms

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
)

// hexNumber matches the last label of a host name if inet_aton(3) would parse the label as a
// number.
var hexNumber = regexp.MustCompile(`^(0x[0-9a-f]*|[0-9]+)$`)

// IsLoopbackName reports whether every machine resolves the name to itself.
func IsLoopbackName(name string) bool {
	name = strings.TrimSuffix(strings.ToLower(name), ".")
	switch name {
	case "localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback":
		return true
	}
	return strings.HasSuffix(name, ".localhost") || strings.HasPrefix(name, "localhost.") ||
		strings.HasPrefix(name, "localhost4.") || strings.HasPrefix(name, "localhost6.")
}

// IPv4 networks whose addresses cannot belong to a machine.
var (
	ThisNetwork = netip.MustParsePrefix("0.0.0.0/8")
	ReservedV4  = netip.MustParsePrefix("240.0.0.0/4")
	broadcastV4 = netip.MustParseAddr("255.255.255.255")
)

// BadMachine returns why a cannot be the address of a machine, or "".
func BadMachine(a netip.Addr) string {
	switch {
	case a.IsUnspecified() || ThisNetwork.Contains(a):
		return "is not the address of a machine"
	case a.IsLoopback():
		return "is a loopback address, which always refers to the machine itself"
	case a.IsMulticast():
		return "is a multicast address, not the address of one machine"
	case a == broadcastV4:
		return "is the broadcast address"
	case ReservedV4.Contains(a):
		return "is in 240.0.0.0/4, which is reserved"
	case a.Is4In6():
		return fmt.Sprintf("is an IPv4 address written as IPv6; write %s", a.Unmap())
	}
	return ""
}

// BadServer returns why a cannot be the address of a server that every program on the node can
// reach, or "".
func BadServer(a netip.Addr) string {
	if bad := BadMachine(a.WithZone("")); bad != "" {
		if a.Is4In6() {
			return bad
		}
		return bad + "; use the server's own address"
	}
	if a.Zone() != "" && !a.IsLinkLocalUnicast() {
		return fmt.Sprintf("names an interface (%%%s), which only a link-local address may have; write %s", strict.Shorten(a.Zone()), a.WithZone(""))
	}
	if a.IsLinkLocalUnicast() {
		want := "unique local (fd…) or global"
		if a.Is4() {
			want = "private or public"
		}
		return "is a link-local address, which is valid on one link only; use the server's " + want + " address"
	}
	return ""
}

// BadRouter returns why a cannot be the next hop of a route on an interface, or "".
func BadRouter(a netip.Addr) string {
	if a.Zone() != "" {
		return fmt.Sprintf("names an interface (%%%s); write %s, since the router is reached through the interface of this entry", strict.Shorten(a.Zone()), a.WithZone(""))
	}
	return BadMachine(a)
}

// ServiceAddrs contains the addresses that kubeadm by default gives to the cluster's API and DNS. A
// machine cannot have one of them, because kube-proxy redirects their traffic.
var ServiceAddrs = map[netip.Addr]string{
	netip.MustParseAddr("10.96.0.1"):  "the Service kubernetes",
	netip.MustParseAddr("10.96.0.10"): "the cluster's DNS",
}

// HostPart returns "network" or "broadcast" if a is that address of the network p. Otherwise, it
// returns "".
func HostPart(p netip.Prefix, a netip.Addr) string {
	if !a.Is4() || !p.Contains(a) || p.Bits() >= 31 {
		return ""
	}
	switch {
	case a == p.Masked().Addr():
		return "network"
	case IsBroadcast(netip.PrefixFrom(a, p.Bits())):
		return "broadcast"
	}
	return ""
}

// IsBroadcast reports whether the address of p is the last one of its network.
func IsBroadcast(p netip.Prefix) bool {
	a := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		if a[bit/8]&(0x80>>(bit%8)) == 0 {
			return false
		}
	}
	return true
}
