package node

import (
	"crypto/pbkdf2"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net"
	"path"
	"slices"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/configs"
)

// header begins every file we render.
const header = "# Made by edgebake from the site; edit the site instead.\n"

const networkDir = "/etc/systemd/network/"

// renderNetwork writes systemd-networkd's files, the ones of resolved and
// timesyncd, and wpa_supplicant's. Their numbers come before those of the
// image (85), so that what the site says of an interface is all that holds.
func renderNetwork(cfg *types.Config, n *configs.Network) error {
	ifaces := n.Interfaces
	if len(ifaces) == 0 && (len(n.DNS) > 0 || len(n.NTP) > 0) {
		// The image's default, but with the site's servers instead of DHCP's.
		ifaces = []configs.Interface{{Name: "en* eth*", DHCP: true}}
	}
	for i, f := range ifaces {
		base := fmt.Sprintf("%s20-edgebake-%02d", networkDir, i)
		addFile(cfg, base+".network", 0o644, interfaceFile(n, &f, len(ifaces) == 1))
		for _, v := range f.VLANs {
			name := vlanName(v.ID)
			addFile(cfg, base+"-"+name+".netdev", 0o644,
				fmt.Sprintf("%s[NetDev]\nName=%s\nKind=vlan\n\n[VLAN]\nId=%d\n", header, name, v.ID))
			var b strings.Builder
			fmt.Fprintf(&b, "%s[Match]\nName=%s\n\n[Network]\n", header, name)
			addressing(&b, v.DHCP, v.AcceptRA, v.Addresses, v.Gateway)
			if len(ifaces) == 1 && f.WiFi == nil && isStatic(v.DHCP, v.Addresses) {
				b.WriteString(withoutCarrier)
			}
			learnedSections(&b, n, v.DHCP, v.AcceptRA)
			addFile(cfg, base+"-"+name+".network", 0o644, b.String())
		}
		if f.WiFi != nil {
			wpa, err := wpaFile(f.WiFi)
			if err != nil {
				return fmt.Errorf("rendering the Wi-Fi of %s: %w", f.Name, err)
			}
			addFile(cfg, "/etc/wpa_supplicant/wpa_supplicant-"+f.Name+".conf", 0o600, wpa)
			cfg.Systemd.Units = append(cfg.Systemd.Units, types.Unit{
				Name: "wpa_supplicant@" + f.Name + ".service", Enabled: ptr(true),
			})
		}
	}
	if len(n.DNS) > 0 || len(n.Search) > 0 {
		var b strings.Builder
		b.WriteString(header + "[Resolve]\n")
		if len(n.DNS) > 0 {
			fmt.Fprintf(&b, "DNS=%s\n", strings.Join(n.DNS, " "))
		}
		if len(n.Search) > 0 {
			fmt.Fprintf(&b, "Domains=%s\n", strings.Join(n.Search, " "))
		}
		addFile(cfg, "/etc/systemd/resolved.conf.d/20-edgebake.conf", 0o644, b.String())
	}
	if len(n.NTP) > 0 {
		addFile(cfg, "/etc/systemd/timesyncd.conf.d/20-edgebake.conf", 0o644,
			header+"[Time]\nNTP="+strings.Join(n.NTP, " ")+"\n")
	}
	return nil
}

// VLAN ids are unique in a site, so the id is enough of a name.
func vlanName(id int) string { return fmt.Sprintf("vlan%d", id) }

func interfaceFile(n *configs.Network, f *configs.Interface, only bool) string {
	var b strings.Builder
	b.WriteString(header + "[Match]\n")
	if f.Name != "" {
		fmt.Fprintf(&b, "Name=%s\n", f.Name)
	}
	if mac, err := net.ParseMAC(f.MAC); err == nil {
		fmt.Fprintf(&b, "MACAddress=%s\n", mac)
	}
	if f.Name == "" || strings.ContainsAny(f.Name, "*?[!") {
		// A VLAN and a bridge have the MAC address of their parent, and pods'
		// interfaces may fit a pattern: only real cards are meant.
		b.WriteString("Kind=!*\n")
	}
	if loopback, err := path.Match(strings.TrimPrefix(f.Name, "!"), "lo"); err == nil && f.Name != "" && loopback != strings.HasPrefix(f.Name, "!") {
		b.WriteString("Type=!loopback\n")
	}
	if f.MTU != 0 {
		fmt.Fprintf(&b, "\n[Link]\nMTUBytes=%d\n", f.MTU)
	}
	b.WriteString("\n[Network]\n")
	addressing(&b, f.DHCP, f.AcceptRA, f.Addresses, f.Gateway)
	for _, v := range f.VLANs {
		fmt.Fprintf(&b, "VLAN=%s\n", vlanName(v.ID))
	}
	if only && !f.DHCP && f.WiFi == nil && (len(f.Addresses) > 0 || slices.ContainsFunc(f.VLANs, func(v configs.VLAN) bool { return isStatic(v.DHCP, v.Addresses) })) {
		b.WriteString(withoutCarrier)
	}
	learnedSections(&b, n, f.DHCP, f.AcceptRA)
	for _, r := range f.Routes {
		fmt.Fprintf(&b, "\n[Route]\nDestination=%s\nGateway=%s\n", r.To, r.Via)
	}
	return b.String()
}

// withoutCarrier is for what is on the only cable: an edge node keeps its address
// with the cable out, also through a boot, and its pods and yurthub go on. With two
// interfaces the dead one must give way. A VLAN has no carrier when its parent has
// none.
const withoutCarrier = "ConfigureWithoutCarrier=yes\nIgnoreCarrierLoss=yes\n"

func isStatic(dhcp bool, addresses []string) bool { return !dhcp && len(addresses) > 0 }

func addressing(b *strings.Builder, dhcp, acceptRA bool, addresses []string, gateway string) {
	if dhcp {
		b.WriteString("DHCP=yes\n")
	}
	for _, a := range addresses {
		fmt.Fprintf(b, "Address=%s\n", a)
	}
	if gateway != "" {
		fmt.Fprintf(b, "Gateway=%s\n", gateway)
	}
	switch {
	case dhcp: // which router advertisements belong to
	case len(addresses) == 0:
		// A trunk: only its VLANs speak.
		b.WriteString("LinkLocalAddressing=no\nIPv6AcceptRA=no\n")
	case acceptRA:
		b.WriteString("IPv6AcceptRA=yes\n")
	default:
		// Any machine on the network can send one, and with it routes and DNS servers.
		b.WriteString("IPv6AcceptRA=no\n")
	}
}

// learnedSections limits what is taken from DHCP servers and routers. Never the host
// name: the node's name is the site's. The site's own servers replace theirs, and a
// lease is requested by MAC address, since the machine ID is new at first boot.
func learnedSections(b *strings.Builder, n *configs.Network, dhcp, acceptRA bool) {
	if dhcp {
		var use string
		if len(n.DNS) > 0 {
			use += "UseDNS=no\n"
		}
		if len(n.NTP) > 0 {
			use += "UseNTP=no\n"
		}
		b.WriteString("\n[DHCPv4]\nUseHostname=no\nClientIdentifier=mac\n" + use)
		b.WriteString("\n[DHCPv6]\nUseHostname=no\n" + use)
	}
	if (dhcp || acceptRA) && len(n.DNS) > 0 {
		b.WriteString("\n[IPv6AcceptRA]\nUseDNS=no\n")
	}
}

// wpaFile is wpa_supplicant's configuration for one network. The SSID goes
// in as hexadecimal digits, which need no quoting.
func wpaFile(w *configs.WiFi) (string, error) {
	var b strings.Builder
	b.WriteString(header + "ctrl_interface=/run/wpa_supplicant\n")
	if w.Country != "" {
		fmt.Fprintf(&b, "country=%s\n", w.Country)
	}
	fmt.Fprintf(&b, "\nnetwork={\n\tscan_ssid=1\n\tssid=%s\n", hex.EncodeToString([]byte(w.SSID)))
	switch psk := w.PSK.Reveal(); {
	case psk == "":
		b.WriteString("\tkey_mgmt=NONE\n")
	case len(psk) == 64: // the key itself, which WPA3 cannot use
		fmt.Fprintf(&b, "\tkey_mgmt=WPA-PSK WPA-PSK-SHA256\n\tpsk=%s\n", psk)
	default:
		// A quoted passphrase that holds " and # is cut off at the #, so the
		// key goes in as it follows from the passphrase (IEEE 802.11, J.4),
		// and for WPA3 the passphrase in hexadecimal digits.
		key, err := pbkdf2.Key(sha1.New, psk, []byte(w.SSID), 4096, 32)
		if err != nil {
			return "", fmt.Errorf("deriving the key from the passphrase: %w", err)
		}
		fmt.Fprintf(&b, "\tkey_mgmt=WPA-PSK WPA-PSK-SHA256 SAE\n\tieee80211w=1\n\tpsk=%x\n\tsae_password=%x\n", key, psk)
	}
	b.WriteString("}\n")
	return b.String(), nil
}
