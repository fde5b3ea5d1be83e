package siteconf

import (
	"crypto/pbkdf2"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/configs"
)

// header is the first line of every rendered file.
const header = "# Made by edgebake from the site; edit the site instead.\n"

const networkDir = "/etc/systemd/network/"

// renderNetwork renders the files of systemd-networkd, resolved, timesyncd and wpa_supplicant.
// Their numbers are below 85, the number of the image's files, so that the Site's settings are
// used.
func renderNetwork(cfg *types.Config, n *configs.Network, servicesV4 bool) error {
	ifaces := n.Interfaces
	if len(ifaces) == 0 && (len(n.DNS) > 0 || len(n.NTP) > 0) {
		// Use the image's default interfaces, with the Site's servers instead of those from DHCP.
		ifaces = []configs.Interface{{Name: "en* eth*", DHCP: true}}
	}
	ports := portsOf(ifaces)
	cards := slices.DeleteFunc(slices.Clone(ifaces), func(f configs.Interface) bool { return ports[f.Name] != "" })
	last := lastResorts(ifaces, servicesV4)
	for i, f := range ifaces {
		base := fmt.Sprintf("%s20-edgebake-%02d", networkDir, i)
		text := interfaceFile(n, &f, ports[f.Name], len(cards) == 1)
		text += last[vlanOf(i, -1)]
		addFile(cfg, base+".network", 0o644, text)
		if len(f.Ports()) > 0 {
			addFile(cfg, base+"-"+f.Name+".netdev", 0o644, madeDevice(&f))
			// Otherwise udev would assign a random MAC address to a bond or bridge, for which a
			// DHCP server has no reservation.
			addFile(cfg, base+"-"+f.Name+".link", 0o644, fmt.Sprintf("%s[Match]\nOriginalName=%s\n\n[Link]\nMACAddressPolicy=none\n", header, f.Name))
		}
		for _, port := range f.Ports() {
			if !slices.ContainsFunc(ifaces, func(o configs.Interface) bool { return o.Name == port }) {
				addFile(cfg, base+"-port-"+port+".network", 0o644, portFile(&f, port))
			}
		}
		for j, v := range f.VLANs {
			name := v.Name()
			addFile(cfg, base+"-"+name+".netdev", 0o644,
				fmt.Sprintf("%s[NetDev]\nName=%s\nKind=vlan\n\n[VLAN]\nId=%d\n", header, name, v.ID))
			var b strings.Builder
			fmt.Fprintf(&b, "%s[Match]\nName=%s\n", header, name)
			if v.MTU != 0 {
				fmt.Fprintf(&b, "\n[Link]\nMTUBytes=%d\n", v.MTU)
			}
			b.WriteString("\n[Network]\n")
			a := addressed(v.Addressing())
			a.network(&b, false)
			if len(cards) == 1 && f.WiFi == nil && isStatic(v.DHCP, v.Addresses) {
				b.WriteString(withoutCarrier)
			}
			a.learned(&b, n)
			a.gatewayRoute(&b)
			b.WriteString(last[vlanOf(i, j)])
			addFile(cfg, base+"-"+name+".network", 0o644, b.String())
		}
		if f.WiFi != nil {
			if err := renderWiFi(cfg, &f); err != nil {
				return err
			}
		}
	}
	renderServers(cfg, n)
	return nil
}

// renderWiFi renders wpa_supplicant's files for an interface.
func renderWiFi(cfg *types.Config, f *configs.Interface) error {
	ca := "/etc/wpa_supplicant/ca-" + f.Name + ".pem"
	if f.WiFi.CACert != "" {
		addFile(cfg, ca, 0o644, f.WiFi.CACert)
	}
	wpa, err := wpaFile(f.WiFi, ca)
	if err != nil {
		return fmt.Errorf("rendering the Wi-Fi of %s: %w", f.Name, err)
	}
	addFile(cfg, "/etc/wpa_supplicant/wpa_supplicant-"+f.Name+".conf", 0o600, wpa)
	cfg.Systemd.Units = append(cfg.Systemd.Units, types.Unit{
		Name: "wpa_supplicant@" + f.Name + ".service", Enabled: ptr(true),
	})
	return nil
}

// renderServers renders the files of resolved and timesyncd.
func renderServers(cfg *types.Config, n *configs.Network) {
	if len(n.DNS) > 0 || len(n.Search) > 0 {
		text := header + "[Resolve]\n"
		if len(n.DNS) > 0 {
			text += "DNS=" + strings.Join(n.DNS, " ") + "\n"
		}
		if len(n.Search) > 0 {
			text += "Domains=" + strings.Join(n.Search, " ") + "\n"
		}
		addFile(cfg, "/etc/systemd/resolved.conf.d/20-edgebake.conf", 0o644, text)
	}
	if len(n.NTP) > 0 {
		addFile(cfg, "/etc/systemd/timesyncd.conf.d/20-edgebake.conf", 0o644,
			header+"[Time]\nNTP="+strings.Join(n.NTP, " ")+"\n")
	}
}

// portsOf maps each port to the line that adds it to its bond or bridge.
func portsOf(ifaces []configs.Interface) map[string]string {
	ports := map[string]string{}
	for i := range ifaces {
		for _, p := range ifaces[i].Ports() {
			ports[p] = portLine(&ifaces[i])
		}
	}
	return ports
}

func portLine(f *configs.Interface) string {
	if f.Bond != nil {
		return "Bond=" + f.Name + "\n"
	}
	return "Bridge=" + f.Name + "\n"
}

// portFile renders the file of a port that has no settings of its own in the Site.
func portFile(f *configs.Interface, port string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s[Match]\nName=%s\n", header, port)
	if f.MTU != 0 {
		fmt.Fprintf(&b, "\n[Link]\nMTUBytes=%d\n", f.MTU)
	}
	b.WriteString("\n[Network]\n" + portLine(f))
	return b.String()
}

// madeDevice renders a bond or bridge, which gets the MAC address of a port.
func madeDevice(f *configs.Interface) string {
	if f.Bond == nil {
		return fmt.Sprintf("%s[NetDev]\nName=%s\nKind=bridge\nMACAddress=none\n", header, f.Name)
	}
	return fmt.Sprintf("%s[NetDev]\nName=%s\nKind=bond\nMACAddress=none\n\n[Bond]\nMode=%s\nMIIMonitorSec=100ms\n", header, f.Name, f.Bond.Mode)
}

var madeDeviceFile = regexp.MustCompile(`^/etc/systemd/network/20-edgebake-[0-9]+-(.+)\.netdev$`)

// MadeDevice returns the name of the interface that a .netdev file creates.
func MadeDevice(file string) (name string, ok bool) {
	if m := madeDeviceFile.FindStringSubmatch(file); m != nil {
		return m[1], true
	}
	return "", false
}

// vlanOf returns the map key of an interface (vlan -1) or of one of its VLANs.
func vlanOf(iface, vlan int) [2]int { return [2]int{iface, vlan} }

// lastResorts returns routes of last resort, by interface. Without any route to a Service's
// address, host processes cannot connect to it, although kube-proxy would redirect the connection.
// So if the address family of Services has no default route, each family without one gets such a
// route.
func lastResorts(ifaces []configs.Interface, servicesV4 bool) map[[2]int]string {
	routes := map[[2]int]string{}
	n := configs.Network{Interfaces: ifaces}
	for _, family := range []struct {
		v4    bool
		route string
	}{{true, "Destination=0.0.0.0/0\nScope=link"}, {false, "Destination=::/0"}} {
		if n.GivesDefaultRoute(family.v4) || family.v4 != servicesV4 && n.GivesDefaultRoute(servicesV4) {
			continue
		}
		if at, found := firstWith(ifaces, family.v4); found {
			routes[at] += fmt.Sprintf("\n# The addresses of Services need some route; no gateway is known.\n[Route]\n%s\nMetric=65535\n", family.route)
		}
	}
	return routes
}

// firstWith returns the first interface or VLAN with addresses of a family.
func firstWith(ifaces []configs.Interface, v4 bool) (at [2]int, found bool) {
	for i, f := range ifaces {
		if f.Addressing().NeedsRoute(v4) {
			return vlanOf(i, -1), true
		}
		for j, v := range f.VLANs {
			if v.Addressing().NeedsRoute(v4) {
				return vlanOf(i, j), true
			}
		}
	}
	return at, false
}

func interfaceFile(n *configs.Network, f *configs.Interface, port string, only bool) string {
	var b strings.Builder
	b.WriteString(header + "[Match]\n")
	if f.Name != "" {
		fmt.Fprintf(&b, "Name=%s\n", f.Name)
	}
	if mac, err := net.ParseMAC(f.MAC); err == nil {
		fmt.Fprintf(&b, "MACAddress=%s\n", mac)
	}
	if f.Name == "" || strings.ContainsAny(f.Name, "*?[!") {
		// Other interfaces may have the same MAC address or match the pattern: VLANs and bridges of
		// this card, or pods' interfaces. Restrict the match to physical cards.
		b.WriteString("Kind=!*\n")
	}
	if loopback, err := path.Match(strings.TrimPrefix(f.Name, "!"), "lo"); err == nil && f.Name != "" && loopback != strings.HasPrefix(f.Name, "!") {
		b.WriteString("Type=!loopback\n")
	}
	if f.MTU != 0 {
		fmt.Fprintf(&b, "\n[Link]\nMTUBytes=%d\n", f.MTU)
	}
	b.WriteString("\n[Network]\n")
	a := addressed(f.Addressing())
	a.network(&b, port != "")
	b.WriteString(port)
	for _, v := range f.VLANs {
		fmt.Fprintf(&b, "VLAN=%s\n", v.Name())
	}
	if only && !f.DHCP && f.WiFi == nil && (len(f.Addresses) > 0 || slices.ContainsFunc(f.VLANs, func(v configs.VLAN) bool { return isStatic(v.DHCP, v.Addresses) })) {
		b.WriteString(withoutCarrier)
	}
	a.learned(&b, n)
	a.gatewayRoute(&b)
	for _, r := range f.Routes {
		fmt.Fprintf(&b, "\n[Route]\nDestination=%s\nGateway=%s\n", r.To, r.Via)
		if f.Metric != 0 && strings.HasSuffix(r.To, "/0") {
			fmt.Fprintf(&b, "Metric=%d\n", f.Metric)
		}
	}
	return b.String()
}

// withoutCarrier keeps the address while the cable is unplugged, even through a reboot, so that
// pods and yurthub keep working. It is only for a machine with one interface, and for the VLANs on
// it: of two interfaces, the unplugged one must not be used.
const withoutCarrier = "ConfigureWithoutCarrier=yes\nIgnoreCarrierLoss=yes\n"

func isStatic(dhcp bool, addresses []string) bool { return !dhcp && len(addresses) > 0 }

// addressed renders the address settings that interfaces and VLANs have in common.
type addressed configs.Addressing

// network renders the address settings of the section Network.
func (a addressed) network(b *strings.Builder, isPort bool) {
	if a.DHCP {
		b.WriteString("DHCP=yes\n")
	}
	for _, s := range a.Addresses {
		fmt.Fprintf(b, "Address=%s\n", s)
	}
	if a.Gateway != "" && !a.ownRoute() {
		fmt.Fprintf(b, "Gateway=%s\n", a.Gateway)
	}
	switch {
	case a.DHCP: // DHCP=yes also accepts router advertisements
	case len(a.Addresses) == 0 || isPort:
		// This is a trunk or a port: only the interfaces on top of it have addresses.
		b.WriteString("LinkLocalAddressing=no\nIPv6AcceptRA=no\n")
	case a.AcceptRA:
		b.WriteString("IPv6AcceptRA=yes\n")
	default:
		// Any machine on the network can send router advertisements, with routes and DNS servers.
		b.WriteString("IPv6AcceptRA=no\n")
	}
}

// ownRoute reports whether the gateway needs its own section Route.
func (a addressed) ownRoute() bool { return a.Metric != 0 || a.onLink() }

func (a addressed) onLink() bool {
	g, err := netip.ParseAddr(a.Gateway)
	return err == nil && !g.IsLinkLocalUnicast() && configs.OnLink(a.Addresses, g)
}

// gatewayRoute renders the default route, if it needs its own section.
func (a addressed) gatewayRoute(b *strings.Builder) {
	if a.Gateway == "" || !a.ownRoute() {
		return
	}
	fmt.Fprintf(b, "\n[Route]\nGateway=%s\n", a.Gateway)
	if a.onLink() {
		b.WriteString("GatewayOnLink=yes\n")
	}
	if a.Metric != 0 {
		fmt.Fprintf(b, "Metric=%d\n", a.Metric)
	}
}

// learned limits the settings that are accepted from DHCP servers and routers: the Site sets the
// host name, and its DNS and NTP servers replace the learned ones. The DHCP client identifies
// itself by MAC address, because the machine ID is new at first boot.
func (a addressed) learned(b *strings.Builder, n *configs.Network) {
	var route, use string
	if a.NoDefaultRoute {
		route = "UseGateway=no\n"
	}
	if a.Metric != 0 {
		route = fmt.Sprintf("RouteMetric=%d\n", a.Metric)
	}
	if len(n.DNS) > 0 {
		use += "UseDNS=no\n"
	}
	ra := route + use
	if a.DHCP {
		if len(n.NTP) > 0 {
			use += "UseNTP=no\n"
		}
		b.WriteString("\n[DHCPv4]\nUseHostname=no\nClientIdentifier=mac\n" + route + use)
		b.WriteString("\n[DHCPv6]\nUseHostname=no\n" + use)
	}
	if (a.DHCP || a.AcceptRA) && ra != "" {
		b.WriteString("\n[IPv6AcceptRA]\n" + ra)
	}
}

// wpaFile renders wpa_supplicant's configuration for one network. ca is the path of the network's
// CA certificate. The SSID is in hexadecimal, which needs no quoting.
func wpaFile(w *configs.WiFi, ca string) (string, error) {
	var b strings.Builder
	b.WriteString(header + "ctrl_interface=/run/wpa_supplicant\n")
	if w.Country != "" {
		fmt.Fprintf(&b, "country=%s\n", w.Country)
	}
	fmt.Fprintf(&b, "\nnetwork={\n\tscan_ssid=1\n\tssid=%s\n", hex.EncodeToString([]byte(w.SSID)))
	switch psk := w.PSK.Reveal(); {
	case w.EAP != "":
		// The values are in hexadecimal, which needs no quoting. Both EAP methods use MSCHAPv2.
		fmt.Fprintf(&b, "\tkey_mgmt=WPA-EAP WPA-EAP-SHA256\n\tieee80211w=1\n\teap=%s\n\tidentity=%x\n\tpassword=%x\n\tphase2=\"auth=MSCHAPV2\"\n",
			strings.ToUpper(w.EAP), w.Identity, w.Password.Reveal())
		if w.CACert != "" {
			fmt.Fprintf(&b, "\tca_cert=\"%s\"\n", ca)
		}
	case psk == "":
		b.WriteString("\tkey_mgmt=NONE\n")
	case len(psk) == 64: // the derived key, which WPA3 cannot use
		fmt.Fprintf(&b, "\tkey_mgmt=WPA-PSK WPA-PSK-SHA256\n\tpsk=%s\n", psk)
	default:
		// wpa_supplicant truncates a quoted passphrase that contains both " and #. So write the
		// derived key (IEEE 802.11, J.4), and for WPA3 the passphrase in hexadecimal.
		key, err := pbkdf2.Key(sha1.New, psk, []byte(w.SSID), 4096, 32)
		if err != nil {
			return "", fmt.Errorf("deriving the key from the passphrase: %w", err)
		}
		fmt.Fprintf(&b, "\tkey_mgmt=WPA-PSK WPA-PSK-SHA256 SAE\n\tieee80211w=1\n\tpsk=%x\n\tsae_password=%x\n", key, psk)
	}
	b.WriteString("}\n")
	return b.String(), nil
}
