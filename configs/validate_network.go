package configs

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
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
	for i, d := range n.DNS {
		if a, err := netip.ParseAddr(d); err != nil || a.IsUnspecified() || a.IsMulticast() {
			probs.add(fmt.Sprintf("network.dns[%d]", i), "%q is not the IP address of a DNS server", shorten(d))
		} else if slices.Contains(n.DNS[:i], d) {
			probs.add(fmt.Sprintf("network.dns[%d]", i), "is listed twice")
		}
	}
	for i, d := range n.Search {
		if !isDNSName(strings.ToLower(d)) {
			probs.add(fmt.Sprintf("network.search[%d]", i), "%q is not a domain", shorten(d))
		}
	}
	for i, h := range n.NTP {
		if bad := badHost(h); bad != "" {
			probs.add(fmt.Sprintf("network.ntp[%d]", i), "%s", bad)
		}
	}
	for _, p := range []struct{ path, url string }{{"network.proxy.http", n.Proxy.HTTP}, {"network.proxy.https", n.Proxy.HTTPS}} {
		if p.url == "" {
			continue
		}
		if bad := badURL(p.url, "http", "https"); bad != "" {
			probs.add(p.path, "%s", bad)
		} else if strings.ContainsAny(p.url, `"'\$%`) || badText(p.url) != "" {
			probs.add(p.path, "contains a quote, $, %% or control character")
		}
	}
	for i, h := range n.Proxy.NoProxy {
		if h == "" || strings.ContainsAny(h, ", \t\r\n\"'\\$%") {
			probs.add(fmt.Sprintf("network.proxy.noProxy[%d]", i), "%q: one host, .domain or CIDR an item, without commas, spaces and quotes", shorten(h))
		}
	}
	if len(n.Proxy.NoProxy) > 0 && n.Proxy.HTTP == "" && n.Proxy.HTTPS == "" {
		probs.add("network.proxy.noProxy", "has no meaning without network.proxy.http or .https")
	}
}

func (f *Interface) validate(path string, before []Interface, seen map[netip.Addr]string, gateways map[bool]string, vlans map[int]string, probs *Problems) {
	glob := strings.ContainsAny(f.Name, "*?[!")
	switch {
	case f.Name == "" && f.MAC == "":
		probs.add(path, "name or mac must say which interface is meant")
	case f.Name != "" && (!ifacePattern.MatchString(f.Name) || !glob && !ifaceName.MatchString(f.Name)):
		probs.add(path+".name", "%q is not an interface's name (at most 15 letters, digits, _, . and -) or a pattern of one, as enp1s0 or en*", shorten(f.Name))
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
	prefixes := checkAddressing(path, f.DHCP, f.Addresses, f.Gateway, f.MTU, seen, gateways, probs)
	for i, r := range f.Routes {
		r.validate(fmt.Sprintf("%s.routes[%d]", path, i), f.DHCP, prefixes, probs)
	}
	if f.MTU != 0 && (f.MTU < 576 || f.MTU > 65535) {
		probs.add(path+".mtu", "must be from 576 to 65535, not %d", f.MTU)
	}
	if len(f.VLANs) > 0 && glob {
		probs.add(path+".vlans", "need one parent: name the interface (%q is a pattern)", f.Name)
	}
	for i, v := range f.VLANs {
		sub := fmt.Sprintf("%s.vlans[%d]", path, i)
		if v.ID < 1 || v.ID > 4094 {
			if v.ID != 0 { // 0: reported as missing
				probs.add(sub+".id", "must be from 1 to 4094, not %d", v.ID)
			}
		} else if other, twice := vlans[v.ID]; twice {
			probs.add(sub+".id", "VLAN %d is %s already", v.ID, other)
		} else {
			vlans[v.ID] = sub
		}
		if !v.DHCP && len(v.Addresses) == 0 {
			probs.add(sub, "has neither dhcp: true nor addresses")
		}
		checkAddressing(sub, v.DHCP, v.Addresses, v.Gateway, 0, seen, gateways, probs)
	}
	if f.WiFi != nil {
		f.WiFi.validate(path+".wifi", probs)
		if f.Name == "" || glob {
			probs.add(path+".name", "Wi-Fi needs the interface's own name, as wlan0 or wlp2s0")
		}
	}
}

func sameMAC(a, b string) bool {
	x, errX := net.ParseMAC(a)
	y, errY := net.ParseMAC(b)
	return a == b || errX == nil && errY == nil && bytes.Equal(x, y)
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
			if a, err := netip.ParseAddr(s); err == nil {
				probs.add(sub, "%q has no prefix length; write %q if that is the network's size", s, netip.PrefixFrom(a, map[bool]int{true: 24, false: 64}[a.Is4()]))
			} else {
				probs.add(sub, "%q is not an address with prefix length, as 192.168.1.20/24", shorten(s))
			}
			continue
		}
		a := p.Addr()
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
	if err != nil || g.IsUnspecified() || g.IsMulticast() {
		probs.add(sub, "%q is not the IP address of a router", shorten(gateway))
		return prefixes
	}
	switch {
	case bad || g.Is6() && g.IsLinkLocalUnicast():
	case len(prefixes) == 0 && dhcp:
		probs.add(sub, "comes from DHCP here; take it out, or give addresses")
	case !containsAddr(prefixes, g):
		probs.add(sub, "%s is in none of the interface's networks (%s)", g, strings.Join(addresses, ", "))
	case slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == g }):
		probs.add(sub, "%s is the machine's own address", g)
	}
	if other, twice := gateways[g.Is4()]; twice {
		probs.add(sub, "there is a default gateway already (%s); use routes for further networks", other)
	} else {
		gateways[g.Is4()] = sub
	}
	return prefixes
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
		probs.add(path+".to", "%q is not a network, as 10.0.0.0/8", shorten(r.To))
	} else if err == nil && to != to.Masked() {
		probs.add(path+".to", "%s has bits set behind its prefix; write %s", r.To, to.Masked())
	}
	via, viaErr := netip.ParseAddr(r.Via)
	if r.Via != "" && viaErr != nil {
		probs.add(path+".via", "%q is not the IP address of a router", shorten(r.Via))
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
		probs.add(path+".country", "%q is not a country code of two capital letters, as DE", shorten(w.Country))
	}
}
