package configs

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/ignition"
)

// Limits of DNS resolvers. kubelet and musl use three DNS servers. glibc before 2.26 in a container
// uses six search domains.
const (
	maxDNSServers    = 3
	maxSearchDomains = 6
)

// defaultPodCIDR is the default CIDR of pods in an Image.
var defaultPodCIDR = netip.MustParsePrefix("10.244.0.0/16")

// Default prefix lengths, by family, of the pod CIDR that kube-controller-manager assigns to a
// node.
const (
	NodeMask4 = 24
	NodeMask6 = 64
)

// defaultVIP is the default VIP of a Site.
var defaultVIP = netip.MustParseAddr("10.103.97.2")

// Warnings returns settings of a valid Site that are allowed but rarely correct. Their paths are
// relative to the Site: see LocateSite.
func (s *Site) Warnings() Problems {
	var w Problems
	s.Network.warnings(&w)
	if without := s.noDefaultRoute(); without != "" {
		w.Add("network.interfaces", "no interface has %s, so programs in the node's network can reach Services only (first boot adds a route without a router for these); if the site has a router, add gateway", without)
	}
	if vip, err := netip.ParseAddr(s.VIP); err == nil && defaultPodCIDR.Contains(vip) {
		w.Add("vip", "%s is in %s, the default pod network: choose an address outside the networks of pods and Services, unless the cluster uses other networks", vip, defaultPodCIDR)
	}
	if !s.Ignition.IsZero() {
		_, inline, _ := ignition.Parse("", []byte(s.Ignition.Reveal()))
		for _, p := range inline {
			w.Add("ignition", "%s", inner(p))
		}
	}
	return w
}

// warnings adds the warnings about servers and interfaces.
func (n *Network) warnings(w *Problems) {
	if len(n.DNS) > maxDNSServers {
		w.Add("network.dns", "has %d servers; pods and the node's own programs use only the first %d: remove the others", len(n.DNS), maxDNSServers)
	}
	if len(n.Search) > maxSearchDomains {
		w.Add("network.search", "has %d domains; resolvers in older containers use only the first %d, including the cluster's own: remove those that are not needed", len(n.Search), maxSearchDomains)
	}
	for i, d := range n.DNS {
		if a, err := netip.ParseAddr(d); err == nil && a.IsLinkLocalUnicast() && a.Zone() == "" {
			w.Add(fmt.Sprintf("network.dns[%d]", i), "%s is valid on one interface only: name it, as in %s%%%s", d, d, exampleInterface(n))
		}
	}
	for i, f := range n.Interfaces {
		if f.WiFi != nil && f.WiFi.EAP != "" && f.WiFi.CACert == "" {
			w.Add(fmt.Sprintf("network.interfaces[%d].wifi", i), "anyone can impersonate the network %q and learn the password: add caCert, the CA of the network's certificate", f.WiFi.SSID)
		}
		for j, o := range n.Interfaces[:i] {
			if f.MAC == "" && o.MAC == "" && f.Name != o.Name && matchesName(o.Name, f.Name) {
				w.Add(fmt.Sprintf("network.interfaces[%d]", i), "never applies: %s is matched by network.interfaces[%d] (%s), and the first match applies; put this one first", f.Name, j, o.Name)
				break
			}
		}
	}
}

// noDefaultRoute returns a name for the default route that the machine lacks in the family of the
// VIP, or "". It returns "" if other routes or an Ignition config may contain the route to
// Services.
func (s *Site) noDefaultRoute() string {
	v4 := s.ServicesAreV4()
	if !s.Ignition.IsZero() || s.IgnitionFile != "" || len(s.Unreachable()) > 0 || s.Network.GivesDefaultRoute(v4) ||
		slices.ContainsFunc(s.Network.Interfaces, func(f Interface) bool { return len(f.Routes) > 0 }) {
		return ""
	}
	for _, a := range s.Network.addressings() {
		switch {
		case !a.NeedsRoute(v4):
		case !s.Network.GivesDefaultRoute(!v4):
			return "a default route"
		case v4:
			return "a default route for IPv4"
		default:
			return "a default route for IPv6"
		}
	}
	return ""
}

// Warnings returns the warnings about each site: see LocateInventory.
func (inv *Inventory) Warnings() []Problems {
	all := make([]Problems, len(inv.Sites))
	for i := range inv.Sites {
		all[i] = inv.Sites[i].Site.Warnings()
	}
	if room := 1 << (NodeMask4 - defaultPodCIDR.Bits()); len(all) > room {
		all[room].Add("", "the default pod network, %s, has space for %d nodes (a /%d for each), but the Inventory has %d: make sure that the cluster has a larger one (podCIDRs of a Cluster, podSubnet of kubeadm); an Inventory does not contain the pod network, so this warning stays", defaultPodCIDR, room, NodeMask4, len(all))
	}
	return all
}

// exampleInterface returns the first name of an interface that is not a pattern, or else an
// example.
func exampleInterface(n *Network) string {
	for _, f := range n.Interfaces {
		if f.Name != "" && ifaceName.MatchString(f.Name) {
			return f.Name
		}
	}
	return "enp1s0"
}

// matchesName reports whether a pattern matches the name of an interface. It returns false if name
// is itself a pattern.
func matchesName(pattern, name string) bool {
	if !strings.ContainsAny(pattern, "*?[") || strings.HasPrefix(pattern, "!") || !ifaceName.MatchString(name) {
		return false
	}
	ok, err := path.Match(pattern, name)
	return err == nil && ok
}

// repeatable lists kernel arguments that may be given more than once.
var repeatable = []string{"console", "earlycon", "earlyprintk", "mtdparts", "memmap", "video", "hugepages", "hugepagesz", "acpi_osi", "systemd.setenv", "systemd.wants", "systemd.mask", "rd.driver.blacklist", "modprobe.blacklist", "module_blacklist", "dyndbg"}

// contradictions warns about kernel arguments that are given with two different values.
func (k *Kernel) contradictions(w *Problems) {
	values := map[string]string{}
	for n, a := range k.Args {
		key, value, _ := strings.Cut(a, "=")
		first, twice := values[key]
		switch {
		case !twice:
			values[key] = value
		case first != value && !slices.Contains(repeatable, key):
			w.Add(fmt.Sprintf("kernel.args[%d]", n), "%s contradicts %s=%s before it: remove one of the two", a, key, first)
		}
	}
}
