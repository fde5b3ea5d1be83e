package configs

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
)

func (n *Network) validate(probs *Problems) {
	seen := map[netip.Addr]string{}
	gateways := map[bool]string{} // by family: is it IPv4
	vlans := map[int]string{}
	for i := range n.Interfaces {
		n.Interfaces[i].validate(fmt.Sprintf("network.interfaces[%d]", i), n.Interfaces[:i], seen, gateways, vlans, probs)
	}
	checkDNS(n.DNS, probs)
	for i, d := range n.Search {
		if !isDNSName(strings.ToLower(d)) {
			probs.add(fmt.Sprintf("network.search[%d]", i), "%q is not a domain", shorten(d))
		}
	}
	checkNTP(n.NTP, probs)
	n.Proxy.validate(probs)
}

func checkDNS(servers []string, probs *Problems) {
	seen := repeats{}
	for i, d := range servers {
		if a, err := netip.ParseAddr(d); err != nil {
			probs.add(fmt.Sprintf("network.dns[%d]", i), "%q is not the IP address of a DNS server", shorten(d))
		} else if bad := badMachine(a.WithZone("")); bad != "" {
			probs.add(fmt.Sprintf("network.dns[%d]", i), "%s is not the address of a DNS server: it %s", shorten(d), bad)
		} else if a.Zone() != "" && !ifaceName.MatchString(a.Zone()) {
			probs.add(fmt.Sprintf("network.dns[%d]", i), "%q: what stands behind the %% is not an interface's name", shorten(d))
		} else if seen.again(d) {
			probs.add(fmt.Sprintf("network.dns[%d]", i), "is listed twice")
		}
	}
}

func checkNTP(servers []string, probs *Problems) {
	seen := repeats{}
	for i, h := range servers {
		path := fmt.Sprintf("network.ntp[%d]", i)
		a, err := netip.ParseAddr(h)
		switch bad := badHost(h); {
		case bad != "":
			probs.add(path, "%s", bad)
		case err == nil && badServer(a) != "":
			probs.add(path, "%s %s", a, badServer(a))
		case isLoopbackName(h):
			probs.add(path, "%q is every machine's name for itself; name a time server", h)
		case seen.again(h):
			probs.add(path, "is listed twice")
		}
	}
}

func (p *Proxy) validate(probs *Problems) {
	for _, u := range []struct{ path, url string }{{"network.proxy.http", p.HTTP}, {"network.proxy.https", p.HTTPS}} {
		if u.url == "" {
			continue
		}
		if bad := badURL(u.url, "http", "https"); bad != "" {
			probs.add(u.path, "%s", bad)
		} else if strings.ContainsAny(u.url, `"'\$%`) || badText(u.url) != "" {
			probs.add(u.path, "contains a quote, $, %% or control character")
		}
	}
	for i, h := range p.NoProxy {
		path := fmt.Sprintf("network.proxy.noProxy[%d]", i)
		if h == "" || strings.ContainsAny(h, ", \"'\\$%") || badText(h) != "" {
			probs.add(path, "%q: one host, .domain or CIDR an item, without commas, spaces and quotes", shorten(h))
		} else if _, err := netip.ParsePrefix(h); err != nil && strings.Contains(h, "/") {
			probs.add(path, "%q is neither a host, a .domain nor a CIDR, e.g. example.com or 10.0.0.0/8", shorten(h))
		}
	}
	if len(p.NoProxy) > 0 && p.HTTP == "" && p.HTTPS == "" {
		probs.add("network.proxy.noProxy", "has no meaning without network.proxy.http or .https")
	}
}

func (f *Interface) validate(path string, before []Interface, seen map[netip.Addr]string, gateways map[bool]string, vlans map[int]string, probs *Problems) {
	glob := strings.ContainsAny(f.Name, "*?[!")
	switch {
	case f.Name == "" && f.MAC == "":
		probs.add(path, "name or mac must say which interface is meant")
	}
	if bad := badInterfaceName(f.Name, glob); bad != "" {
		probs.add(path+".name", "%s", bad)
	}
	if f.MAC != "" {
		mac, err := net.ParseMAC(f.MAC)
		if err != nil || len(mac) != 6 || mac[0]&1 == 1 || bytes.Equal(mac, make([]byte, 6)) {
			probs.add(path+".mac", "%q is not the MAC address of an interface, as 52:54:00:12:34:56", shorten(f.MAC))
		}
	}
	if slices.ContainsFunc(before, func(o Interface) bool {
		return o.Name == f.Name && sameMAC(o.MAC, f.MAC) && (f.Name != "" || f.MAC != "")
	}) {
		probs.add(path, "this interface is listed twice; put all its addresses into one item")
	}
	if !f.DHCP && len(f.Addresses) == 0 && len(f.VLANs) == 0 {
		probs.add(path, "has neither dhcp: true nor addresses nor vlans")
	}
	checkRA(path, f.DHCP, f.AcceptRA, f.Addresses, probs)
	prefixes := checkAddressing(path, f.DHCP, f.Addresses, f.Gateway, f.MTU, seen, gateways, probs)
	routes := repeats{}
	for i, r := range f.Routes {
		sub := fmt.Sprintf("%s.routes[%d]", path, i)
		r.validate(sub, f.DHCP, prefixes, probs)
		to, err := netip.ParsePrefix(r.To)
		switch {
		case err != nil:
		case to.Bits() == 0:
			defaultRoute(sub+".to", to.Addr().Is4(), gateways, probs)
		case routes.again(r.To):
			probs.add(sub+".to", "the interface has a route to %s already", r.To)
		}
	}
	if len(f.VLANs) > 0 && glob {
		probs.add(path+".vlans", "need one parent: name the interface (%q is a pattern)", f.Name)
	}
	for i, v := range f.VLANs {
		sub := fmt.Sprintf("%s.vlans[%d]", path, i)
		if other, twice := vlans[v.ID]; twice {
			probs.add(sub+".id", "VLAN %d is %s already", v.ID, other)
		} else {
			vlans[v.ID] = sub
		}
		if !v.DHCP && len(v.Addresses) == 0 {
			probs.add(sub, "has neither dhcp: true nor addresses")
		}
		checkRA(sub, v.DHCP, v.AcceptRA, v.Addresses, probs)
		checkAddressing(sub, v.DHCP, v.Addresses, v.Gateway, 0, seen, gateways, probs)
	}
	if f.WiFi != nil {
		f.WiFi.validate(path+".wifi", probs)
		if f.Name == "" || glob {
			probs.add(path+".name", "Wi-Fi needs the interface's own name, e.g. wlan0 or wlp2s0")
		}
	}
}

// badInterfaceName says what is wrong with the name, or the pattern of names,
// of a network card.
func badInterfaceName(name string, glob bool) string {
	switch name {
	case "":
		return ""
	case "lo":
		return "lo is the loopback interface, which the system sets up itself; name a network card"
	case ".", "..", "all", "default":
		return fmt.Sprintf("%q is not a name that an interface can have", name)
	}
	_, err := path.Match(strings.TrimPrefix(name, "!"), "")
	if !ifacePattern.MatchString(name) || !glob && !ifaceName.MatchString(name) || err != nil {
		return fmt.Sprintf("%q is not an interface's name (at most 15 letters, digits, _, . and -) or a pattern of one, as enp1s0 or en*", shorten(name))
	}
	return ""
}

func sameMAC(a, b string) bool {
	x, errX := net.ParseMAC(a)
	y, errY := net.ParseMAC(b)
	return a == b || errX == nil && errY == nil && bytes.Equal(x, y)
}

func checkRA(path string, dhcp, acceptRA bool, addresses []string, probs *Problems) {
	if acceptRA && !dhcp && len(addresses) == 0 {
		probs.add(path+".acceptRA", "needs addresses beside it, or dhcp: true")
	}
}

// checkAddressing checks the addresses and the gateway of one interface or
// VLAN and returns the subnets it is in.
func checkAddressing(path string, dhcp bool, addresses []string, gateway string, mtu int, seen map[netip.Addr]string, gateways map[bool]string, probs *Problems) []netip.Prefix {
	var prefixes []netip.Prefix
	var bad bool
	for i, s := range addresses {
		sub := fmt.Sprintf("%s.addresses[%d]", path, i)
		p, err := netip.ParsePrefix(s)
		if err != nil {
			bad = true
			if a, err := netip.ParseAddr(s); err == nil && a.Zone() != "" {
				probs.add(sub, "%q names an interface, which this item does already; write the address and its prefix length alone, e.g. %s/64", shorten(s), a.WithZone(""))
			} else if err == nil {
				probs.add(sub, "%q has no prefix length; write %q if that is the network's size", s, netip.PrefixFrom(a, map[bool]int{true: 24, false: 64}[a.Is4()]))
			} else {
				probs.add(sub, "%q is not an address with prefix length, e.g. 192.168.1.20/24", shorten(s))
			}
			continue
		}
		a := p.Addr()
		if a.IsUnspecified() {
			probs.add(sub, "%s cannot be a machine's address: it %s; write the interface's own, e.g. 192.168.1.20/24", s, badMachine(a))
			bad = true
			continue
		}
		if shortest := map[bool]int{true: 8, false: 16}[a.Is4()]; p.Bits() < shortest {
			probs.add(sub, "%s: a prefix length of %d makes most of the internet the interface's own network; write that of the network, e.g. %s", s, p.Bits(), netip.PrefixFrom(a, map[bool]int{true: 24, false: 64}[a.Is4()]))
			bad = true
			continue
		}
		if a.Is4() && (thisNetwork.Contains(a) || reservedV4.Contains(a)) || a.Is4In6() {
			probs.add(sub, "%s cannot be a machine's address: it %s", s, badMachine(a))
			continue
		}
		if host := p.Bits() < a.BitLen()-1; a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || host && (a == p.Masked().Addr() || a.Is4() && isBroadcast(p)) {
			probs.add(sub, "%s is the address of a network or group, not of one machine", s)
		}
		if a.Is6() && mtu != 0 && mtu < 1280 {
			probs.add(path+".mtu", "IPv6 (%s) needs at least 1280, not %d", s, mtu)
		}
		if other, twice := seen[a]; twice {
			probs.add(sub, "%s is %s already", a, other)
		} else {
			seen[a] = sub
		}
		prefixes = append(prefixes, p)
	}
	if gateway == "" {
		return prefixes
	}
	sub := path + ".gateway"
	g, err := netip.ParseAddr(gateway)
	if err != nil {
		probs.add(sub, "%q is not the IP address of a router", shorten(gateway))
		return prefixes
	}
	if bad := badRouter(g); bad != "" {
		probs.add(sub, "%s cannot be a router: it %s", shorten(gateway), bad)
		return prefixes
	}
	switch {
	case partOf(prefixes, g) != "":
		probs.add(sub, "%s is the %s address of the interface's network, not a router's", g, partOf(prefixes, g))
	case bad || g.Is6() && g.IsLinkLocalUnicast():
	case len(prefixes) == 0 && dhcp:
		probs.add(sub, "comes from DHCP here; remove it, or give addresses")
	case !containsAddr(prefixes, g):
		probs.add(sub, "%s is in none of the interface's networks (%s)", g, strings.Join(addresses, ", "))
	case slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == g }):
		probs.add(sub, "%s is the machine's own address", g)
	}
	defaultRoute(sub, g.Is4(), gateways, probs)
	return prefixes
}

// defaultRoute notes the field that gives a family's default route, of which
// there can be one.
func defaultRoute(path string, v4 bool, gateways map[bool]string, probs *Problems) {
	if other, twice := gateways[v4]; twice {
		probs.add(path, "there is a default gateway already (%s); use routes for further networks", other)
		return
	}
	gateways[v4] = path
}

// partOf is the hostPart of a in the first network that it is special in.
func partOf(prefixes []netip.Prefix, a netip.Addr) string {
	for _, p := range prefixes {
		if part := hostPart(p, a); part != "" {
			return part
		}
	}
	return ""
}

func containsAddr(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// isBroadcast reports whether p's address is its network's last one.
func isBroadcast(p netip.Prefix) bool {
	a := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		if a[bit/8]&(0x80>>(bit%8)) == 0 {
			return false
		}
	}
	return true
}

func (r Route) validate(path string, dhcp bool, prefixes []netip.Prefix, probs *Problems) {
	to, err := netip.ParsePrefix(r.To)
	if r.To != "" && err != nil {
		probs.add(path+".to", "%q is not a CIDR, e.g. 10.0.0.0/8", shorten(r.To))
	} else if err == nil && to != to.Masked() {
		probs.add(path+".to", "%s has bits set behind its prefix; write %s", r.To, to.Masked())
	}
	if err == nil && to.Bits() > 0 && (to.Addr().IsLoopback() || to.Addr().IsMulticast() || to.Addr().IsLinkLocalUnicast() || to.Addr().IsUnspecified()) {
		probs.add(path+".to", "%s is not reached through a router", r.To)
	}
	via, viaErr := netip.ParseAddr(r.Via)
	switch {
	case r.Via == "":
	case viaErr != nil:
		probs.add(path+".via", "%q is not the IP address of a router", shorten(r.Via))
	case badRouter(via) != "":
		probs.add(path+".via", "%s cannot be a router: it %s", shorten(r.Via), badRouter(via))
		return
	case partOf(prefixes, via) != "":
		probs.add(path+".via", "%s is the %s address of the interface's network, not a router's", via, partOf(prefixes, via))
	case slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == via }):
		probs.add(path+".via", "%s is the machine's own address", via)
	}
	if err != nil || viaErr != nil {
		return
	}
	if to.Addr().Is4() != via.Is4() {
		probs.add(path, "%s and %s are of different families", r.To, r.Via)
	} else if !dhcp && len(prefixes) > 0 && !via.IsLinkLocalUnicast() && !containsAddr(prefixes, via) {
		probs.add(path+".via", "%s is in none of the interface's networks", via)
	}
}

func (w *WiFi) validate(path string, probs *Problems) {
	if len(w.SSID) > 32 {
		probs.add(path+".ssid", "has %d bytes; a network's name has at most 32", len(w.SSID))
	}
	if psk := w.PSK.Reveal(); psk != "" && !pskHex.MatchString(psk) {
		// IEEE 802.11: a passphrase is 8 to 63 printable ASCII characters.
		if len(psk) < 8 || len(psk) > 63 || strings.ContainsFunc(psk, func(r rune) bool { return r < 0x20 || r > 0x7e }) {
			probs.add(path+".psk", "must be 8 to 63 printable ASCII characters, or 64 hexadecimal digits")
		}
	}
	if w.Country != "" && !countryCode.MatchString(w.Country) {
		probs.add(path+".country", "%q is not a country code of two capital letters, e.g. DE", shorten(w.Country))
	}
}
