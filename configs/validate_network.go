package configs

import (
	"bytes"
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

func (n *Network) validate(probs *Problems) {
	c := networkCheck{probs, map[netip.Addr]string{}, map[gatewayKey]string{}, map[int]string{}}
	for i := range n.Interfaces {
		c.interfaceAt(fmt.Sprintf("network.interfaces[%d]", i), &n.Interfaces[i], n.Interfaces[:i])
	}
	n.validatePorts(probs)
	n.Proxy.validate(probs)
}

func (p *Proxy) validate(probs *Problems) {
	for _, u := range []struct{ path, url string }{{"network.proxy.http", p.HTTP.Reveal()}, {"network.proxy.https", p.HTTPS.Reveal()}} {
		if u.url == "" {
			continue
		}
		// Messages must not quote the URL, which may contain a password.
		login, rest := splitLogin(u.url)
		_, err := url.ParseRequestURI(u.url)
		switch bad := forms.BadURL(rest, "http", "https"); {
		case login != "" && (bad != "" || err != nil):
			probs.Add(u.path, "is not a URL, such as http://user:password@proxy.example.com:3128; percent-encode special characters of the login (@ as %%40, : as %%3A, / as %%2F, %% as %%25)")
		case bad != "":
			probs.Add(u.path, "%s", bad)
		case strings.ContainsAny(u.url, `"'\$`) || strict.BadText(u.url) != "":
			probs.Add(u.path, "contains a quote, $ or control character: percent-encode it ($ as %%24)")
		}
	}
	if len(p.NoProxy) > 0 && p.HTTP.IsZero() && p.HTTPS.IsZero() {
		probs.Add("network.proxy.noProxy", "has no effect without network.proxy.http or .https")
	}
}

// splitLogin splits the login, including the @, from a URL.
func splitLogin(u string) (login, rest string) {
	scheme, after, ok := strings.Cut(u, "://")
	if !ok {
		return "", u
	}
	at := strings.LastIndexByte(after, '@')
	return after[:at+1], scheme + "://" + after[at+1:]
}

// gatewayKey identifies a default route. Two default routes must not have the same key.
type gatewayKey struct {
	v4     bool
	metric int
}

// validatePorts validates the ports of bonds and bridges. It compares them with the other
// interfaces.
func (n *Network) validatePorts(probs *Problems) {
	owners := map[string]string{} // port → the field that lists it
	named := map[string]int{}
	for i, f := range n.Interfaces {
		if f.Name != "" {
			named[f.Name] = i
		}
	}
	for i := range n.Interfaces {
		f := &n.Interfaces[i]
		field := fmt.Sprintf("network.interfaces[%d].bridge", i)
		if f.Bond != nil {
			field = fmt.Sprintf("network.interfaces[%d].bond.interfaces", i)
		}
		for j, port := range f.Ports() {
			sub := fmt.Sprintf("%s[%d]", field, j)
			if bad := n.badPort(f, port, owners[port], named); bad != "" {
				probs.Add(sub, "%s", bad)
			}
			owners[port] = cmp.Or(owners[port], sub)
		}
	}
	for i, f := range n.Interfaces {
		if _, isPort := owners[f.Name]; !f.DHCP && len(f.Addresses) == 0 && len(f.VLANs) == 0 && (f.Name == "" || !isPort) {
			probs.Add(fmt.Sprintf("network.interfaces[%d]", i), "has neither dhcp: true nor addresses nor vlans")
		}
	}
}

// badPort returns why f cannot have this port, or "". owner is another field that lists the port,
// or "". named maps the names of interfaces to their indexes.
func (n *Network) badPort(f *Interface, port, owner string, named map[string]int) string {
	at, listed := named[port]
	switch {
	case badInterfaceName(port, false) != "" || port == "":
		return fmt.Sprintf("%q is not the name of an interface, e.g. eno1", strict.Shorten(port))
	case port == f.Name:
		return port + " cannot be a port of itself"
	case n.vlanParent(port) != "":
		return fmt.Sprintf("%s is a VLAN of %s with its own addresses: name %[2]s here, and list the VLAN under vlans of %s", port, n.vlanParent(port), f.Name)
	case owner != "":
		return fmt.Sprintf("%s is also %s", port, owner)
	case listed && (n.Interfaces[at].DHCP || len(n.Interfaces[at].Addresses) > 0):
		return fmt.Sprintf("%s has its own addresses in network.interfaces[%d]: move them to %s", port, at, f.Name)
	case listed && slices.Contains(n.Interfaces[at].Ports(), f.Name):
		return fmt.Sprintf("%s is built on %s, and cannot be a port of it", port, f.Name)
	case listed && n.Interfaces[at].Bridge != nil:
		return port + " is a bridge: list its ports here instead"
	case listed:
		return ""
	}
	for k, o := range n.Interfaces {
		if matchesName(o.Name, port) && o.MAC == "" && len(o.Ports()) == 0 {
			return fmt.Sprintf("%s is matched by network.interfaces[%d] (%s), which configures it separately: replace that pattern with the names of its interfaces", port, k, o.Name)
		}
	}
	return ""
}

// vlanParent returns the interface of the VLAN with this name, or "".
func (n *Network) vlanParent(name string) string {
	for _, f := range n.Interfaces {
		for _, v := range f.VLANs {
			if v.Name() == name {
				return cmp.Or(f.Name, f.MAC)
			}
		}
	}
	return ""
}

// validateMade validates an interface that edgebake makes: a bond or a bridge.
func (f *Interface) validateMade(path string, glob bool, probs *Problems) {
	if f.Bond == nil && f.Bridge == nil {
		return
	}
	what := "bond"
	if f.Bond == nil {
		what = "bridge"
	}
	switch {
	case f.Bond != nil && f.Bridge != nil:
		probs.Add(path, "has both bond and bridge: write the bond as its own item, and its name as a port of the bridge")
	case f.Bond == nil && len(f.Ports()) == 0: // the tags report a bond without ports
		probs.Add(path+"."+what, "has no interfaces: name at least one, e.g. eno1")
	}
	if f.Name == "" || glob {
		probs.Add(path+".name", "a %s needs its own name, e.g. %s", what, map[string]string{"bond": "bond0", "bridge": "br0"}[what])
	} else if slices.Contains(takenNames, f.Name) || strings.HasPrefix(f.Name, "vlan") {
		probs.Add(path+".name", "%s is used by the node's own networks: choose another, e.g. %s", f.Name, map[string]string{"bond": "bond0", "bridge": "br0"}[what])
	}
	if f.MAC != "" {
		probs.Add(path+".mac", "selects an existing card, but a %s is a new interface: remove it", what)
	}
	if f.WiFi != nil {
		probs.Add(path+".wifi", "a %s cannot join a wireless network", what)
	}
}

// takenNames lists interfaces that network plugins and other programs of a cluster make on a node.
var takenNames = []string{"cni0", "docker0", "flannel.1", "kube-ipvs0", "kube-bridge", "cilium_host", "nodelocaldns", "yurthub-dummy0"}

// networkCheck contains the values that must be unique among a machine's interfaces, each with its
// field.
type networkCheck struct {
	probs    *Problems
	seen     map[netip.Addr]string
	gateways map[gatewayKey]string
	vlans    map[int]string
}

func (c *networkCheck) interfaceAt(path string, f *Interface, before []Interface) {
	glob := strings.ContainsAny(f.Name, "*?[!")
	if f.Name == "" && f.MAC == "" {
		c.probs.Add(path, "name or mac is required, to select an interface")
	}
	if bad := badInterfaceName(f.Name, glob); bad != "" {
		c.probs.Add(path+".name", "%s", bad)
	}
	if slices.ContainsFunc(before, func(o Interface) bool {
		return o.Name == f.Name && sameMAC(o.MAC, f.MAC) && (f.Name != "" || f.MAC != "")
	}) {
		c.probs.Add(path, "this interface is listed twice; put all its addresses into one item")
	}
	f.validateMade(path, glob, c.probs)
	c.routes(path, f, c.addressing(path, f.Addressing()))
	if len(f.VLANs) > 0 && glob {
		c.probs.Add(path+".vlans", "need one parent: name the interface (%q is a pattern)", f.Name)
	}
	for i, v := range f.VLANs {
		c.vlan(fmt.Sprintf("%s.vlans[%d]", path, i), &v, cmp.Or(f.MTU, 1500))
	}
	if f.WiFi != nil {
		f.WiFi.validate(path+".wifi", c.probs)
		if f.Name == "" || glob {
			c.probs.Add(path+".name", "Wi-Fi needs the interface's exact name, e.g. wlan0 or wlp2s0")
		}
	}
}

func (c *networkCheck) routes(path string, f *Interface, prefixes []netip.Prefix) {
	seen := repeats{}
	for i, r := range f.Routes {
		sub := fmt.Sprintf("%s.routes[%d]", path, i)
		r.validate(sub, f.DHCP, prefixes, c.probs)
		to, err := netip.ParsePrefix(r.To)
		switch {
		case err != nil:
		case to.Bits() == 0:
			c.defaultRoute(sub+".to", gatewayKey{to.Addr().Is4(), f.Metric})
		case seen.again(r.To):
			c.probs.Add(sub+".to", "the interface already has a route to %s", r.To)
		}
	}
}

func (c *networkCheck) vlan(path string, v *VLAN, parentMTU int) {
	if other, twice := c.vlans[v.ID]; twice {
		c.probs.Add(path+".id", "VLAN %d is also %s", v.ID, other)
	} else {
		c.vlans[v.ID] = path
	}
	if !v.DHCP && len(v.Addresses) == 0 {
		c.probs.Add(path, "has neither dhcp: true nor addresses")
	}
	c.addressing(path, v.Addressing())
	if v.MTU > parentMTU {
		c.probs.Add(path+".mtu", "%d is larger than the MTU of the interface below (%d): set mtu there too", v.MTU, parentMTU)
	}
}

// badInterfaceName returns why name cannot be the name of a network card or, with glob, a pattern
// of names. It returns "" for a valid name.
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
		return fmt.Sprintf("%q is not an interface's name (at most 15 letters, digits, _, . and -) or a pattern of one, e.g. enp1s0 or en*", strict.Shorten(name))
	}
	return ""
}

func sameMAC(a, b string) bool {
	x, errX := net.ParseMAC(a)
	y, errY := net.ParseMAC(b)
	return a == b || errX == nil && errY == nil && bytes.Equal(x, y)
}

// addressing validates the addresses and the gateway of an interface or VLAN, and returns its
// networks.
func (c *networkCheck) addressing(path string, f Addressing) (prefixes []netip.Prefix) {
	if f.AcceptRA && !f.DHCP && len(f.Addresses) == 0 {
		c.probs.Add(path+".acceptRA", "requires addresses, or dhcp: true")
	}
	switch {
	case f.NoDefaultRoute && f.Gateway != "":
		c.probs.Add(path+".noDefaultRoute", "contradicts gateway: remove one of the two")
	case f.NoDefaultRoute && !f.DHCP:
		c.probs.Add(path+".noDefaultRoute", "has no effect without dhcp: remove it")
	case f.Metric != 0 && f.NoDefaultRoute:
		c.probs.Add(path+".metric", "has no effect with noDefaultRoute: remove it")
	}
	prefixes, unparsed := c.addresses(path, f)
	if f.Gateway != "" {
		c.gateway(path+".gateway", f, prefixes, unparsed)
	}
	return prefixes
}

// addresses validates the addresses of an interface. unparsed means that an address is invalid, for
// example without a prefix length, so that its network, which may contain the gateway, is unknown.
func (c *networkCheck) addresses(path string, f Addressing) (prefixes []netip.Prefix, unparsed bool) {
	for i, text := range f.Addresses {
		sub := fmt.Sprintf("%s.addresses[%d]", path, i)
		p, err := netip.ParsePrefix(text)
		if bad := badAddress(text, p, err); bad != "" {
			c.probs.Add(sub, "%s", bad)
			unparsed = unparsed || !isReserved(p.Addr())
			continue
		}
		a := p.Addr()
		if host := p.Bits() < a.BitLen()-1; a.IsMulticast() || a.IsLoopback() || host && (a == p.Masked().Addr() || a.Is4() && forms.IsBroadcast(p)) {
			c.probs.Add(sub, "%s is the address of a network or group, not of one machine", text)
		}
		if a.Is6() && f.MTU != 0 && f.MTU < 1280 {
			c.probs.Add(path+".mtu", "IPv6 (%s) needs at least 1280, not %d", text, f.MTU)
		}
		if other, twice := c.seen[a]; twice {
			c.probs.Add(sub, "%s is also %s", a, other)
		} else {
			c.seen[a] = sub
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, unparsed
}

// isReserved reports whether a is in a reserved network. No prefix length makes such an address
// valid.
func isReserved(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && (a.Is4() && (forms.ThisNetwork.Contains(a) || forms.ReservedV4.Contains(a)) || a.Is4In6())
}

// badAddress returns what is wrong with an address and its prefix length, or "". p and err are the
// result of parsing text.
func badAddress(text string, p netip.Prefix, err error) string {
	usual := func(a netip.Addr) netip.Prefix {
		return netip.PrefixFrom(a, map[bool]int{true: 24, false: 64}[a.Is4()])
	}
	if err != nil {
		switch a, err := netip.ParseAddr(text); {
		case err != nil:
			return fmt.Sprintf("%q is not an address with prefix length, e.g. 192.168.1.20/24", strict.Shorten(text))
		case a.Zone() != "":
			return fmt.Sprintf("%q names an interface, which this item already does; write only the address and its prefix length, e.g. %s/64", strict.Shorten(text), a.WithZone(""))
		default:
			return fmt.Sprintf("%q has no prefix length; write %q if that is the network's size", text, usual(a))
		}
	}
	switch a := p.Addr(); {
	case a.IsUnspecified():
		return fmt.Sprintf("%s cannot be a machine's address: it %s; write the interface's own, e.g. 192.168.1.20/24", text, forms.BadMachine(a))
	case p.Bits() < map[bool]int{true: 8, false: 16}[a.Is4()]:
		return fmt.Sprintf("%s: the prefix length %d is too short for the network of an interface; write the network's prefix length, e.g. %s", text, p.Bits(), usual(a))
	case isReserved(a):
		return fmt.Sprintf("%s cannot be a machine's address: it %s", text, forms.BadMachine(a))
	}
	return ""
}

// gateway validates the default router of an interface with these networks. unparsed means that the
// interface also has a network of unknown size.
func (c *networkCheck) gateway(path string, f Addressing, prefixes []netip.Prefix, unparsed bool) {
	g, err := netip.ParseAddr(f.Gateway)
	if err != nil {
		c.probs.Add(path, "%q is not the IP address of a router", strict.Shorten(f.Gateway))
		return
	}
	if bad := forms.BadRouter(g); bad != "" {
		c.probs.Add(path, "%s cannot be a router: it %s", strict.Shorten(f.Gateway), bad)
		return
	}
	switch {
	case partOf(prefixes, g) != "":
		c.probs.Add(path, "%s is the %s address of the interface's network, not a router's", g, partOf(prefixes, g))
	case unparsed || g.Is6() && g.IsLinkLocalUnicast():
	case len(prefixes) == 0 && f.DHCP:
		c.probs.Add(path, "comes from DHCP here; remove it, or give addresses")
	case !containsAddr(prefixes, g) && !OnLink(f.Addresses, g):
		c.probs.Add(path, "%s is in none of the interface's networks (%s); to reach a router outside of them, write single addresses (%s)", g, strings.Join(f.Addresses, ", "), singleAddress(prefixes, g))
	case slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == g }):
		c.probs.Add(path, "%s is the machine's own address", g)
	}
	c.defaultRoute(path, gatewayKey{g.Is4(), f.Metric})
}

// OnLink reports whether a gateway outside the interface's networks is reached directly. This
// requires that all addresses of the gateway's family have the prefix length /32 or /128.
func OnLink(addresses []string, gateway netip.Addr) bool {
	single := false
	for _, s := range addresses {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().Is4() != gateway.Is4() {
			continue
		}
		if !p.IsSingleIP() {
			return false
		}
		single = true
	}
	return single
}

// singleAddress returns an example of an address with the prefix length /32 or /128, of the
// gateway's family.
func singleAddress(prefixes []netip.Prefix, gateway netip.Addr) string {
	for _, p := range prefixes {
		if p.Addr().Is4() == gateway.Is4() {
			return netip.PrefixFrom(p.Addr(), p.Addr().BitLen()).String()
		}
	}
	return "192.0.2.1/32"
}

// defaultRoute records the field of a default route. It reports a second default route with the
// same family and metric.
func (c *networkCheck) defaultRoute(path string, key gatewayKey) {
	if other, twice := c.gateways[key]; twice {
		c.probs.Add(path, "is a second default route, after %s: give one of the two interfaces a metric (the lowest is used first), or use routes for further networks", other)
		return
	}
	c.gateways[key] = path
}

// Unreachable reports API servers to which the machine has no route. The Site must be valid. It
// checks only static networks, and nothing if an Ignition config may add others. The edgebake
// command rejects such a Site, but a machine that already has it accepts it.
func (s *Site) Unreachable() (probs Problems) {
	if len(s.Network.Interfaces) == 0 || !s.Ignition.IsZero() || s.IgnitionFile != "" {
		return nil
	}
	var direct []netip.Prefix
	known := map[bool]bool{true: true, false: true} // by family (true: IPv4)
	for _, a := range s.Network.addressings() {
		for v4 := range known {
			known[v4] = known[v4] && !a.learns(v4)
		}
		direct = append(direct, parsedPrefixes(a.Addresses)...)
	}
	for _, f := range s.Network.Interfaces {
		for _, r := range f.Routes {
			direct = append(direct, parsedPrefixes([]string{r.To})...)
		}
	}
	for i, m := range s.Masters {
		a, err := netip.ParseAddrPort(m)
		if v4 := a.Addr().Unmap().Is4(); err != nil || len(direct) == 0 || a.Addr().Zone() != "" || !known[v4] || s.Network.GivesDefaultRoute(v4) {
			continue
		}
		if !slices.ContainsFunc(direct, func(p netip.Prefix) bool { return p.Masked().Contains(a.Addr().Unmap()) }) {
			probs.Add(fmt.Sprintf("masters[%d]", i), "no route leads to %s: add network.interfaces[].gateway, or a route to its network", a.Addr())
		}
	}
	return probs
}

// parsedPrefixes returns the valid prefixes in list.
func parsedPrefixes(list []string) (prefixes []netip.Prefix) {
	for _, s := range list {
		if p, err := netip.ParsePrefix(s); err == nil {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

// partOf returns the result of forms.HostPart for a and the first prefix for which it is not "".
func partOf(prefixes []netip.Prefix, a netip.Addr) string {
	for _, p := range prefixes {
		if part := forms.HostPart(p, a); part != "" {
			return part
		}
	}
	return ""
}

func containsAddr(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (r Route) validate(path string, dhcp bool, prefixes []netip.Prefix, probs *Problems) {
	to, err := netip.ParsePrefix(r.To)
	switch {
	case r.To == "":
	case err != nil:
		probs.Add(path+".to", "%q is not a CIDR, e.g. 10.0.0.0/8", strict.Shorten(r.To))
	case to != to.Masked():
		probs.Add(path+".to", "%s has bits set after its prefix; write %s", r.To, to.Masked())
	}
	if a := to.Addr(); err == nil && to.Bits() > 0 && (a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.IsUnspecified()) {
		probs.Add(path+".to", "%s is not reached through a router", r.To)
	}
	via, viaErr := netip.ParseAddr(r.Via)
	if bad := badVia(r.Via, via, viaErr, prefixes); r.Via != "" && bad != "" {
		probs.Add(path+".via", "%s", bad)
	}
	switch {
	case err != nil || viaErr != nil || forms.BadRouter(via) != "":
	case to.Addr().Is4() != via.Is4():
		probs.Add(path, "%s and %s are of different families", r.To, r.Via)
	case !dhcp && len(prefixes) > 0 && !via.IsLinkLocalUnicast() && !containsAddr(prefixes, via):
		probs.Add(path+".via", "%s is in none of the interface's networks", via)
	}
}

// badVia returns what is wrong with the router of a route, or "". via and err are the result of
// parsing text.
func badVia(text string, via netip.Addr, err error, prefixes []netip.Prefix) string {
	switch {
	case err != nil:
		return fmt.Sprintf("%q is not the IP address of a router", strict.Shorten(text))
	case forms.BadRouter(via) != "":
		return fmt.Sprintf("%s cannot be a router: it %s", strict.Shorten(text), forms.BadRouter(via))
	case partOf(prefixes, via) != "":
		return fmt.Sprintf("%s is the %s address of the interface's network, not a router's", via, partOf(prefixes, via))
	case slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == via }):
		return fmt.Sprintf("%s is the machine's own address", via)
	}
	return ""
}

func (w *WiFi) validate(path string, probs *Problems) {
	if len(w.SSID) > 32 {
		probs.Add(path+".ssid", "has %d bytes; a network's name has at most 32", len(w.SSID))
	}
	switch login := w.Identity != "" || !w.Password.IsZero() || w.CACert != ""; {
	case w.EAP == "" && login:
		probs.Add(path+".eap", "is required with identity and password: name the method, peap or ttls")
	case w.EAP == "":
	case !w.PSK.IsZero():
		probs.Add(path+".psk", "is for networks without logins: remove psk, or eap")
	default:
		if w.Identity == "" {
			probs.AddMissing(path+".identity", "is required with eap")
		}
		if w.Password.IsZero() {
			probs.AddMissing(path+".password", "is required with eap")
		}
	}
}
