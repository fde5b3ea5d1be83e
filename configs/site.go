package configs

import (
	"cmp"
	"fmt"
	"iter"
	"time"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk"
	"go.yaml.in/yaml/v3"
)

// Site is one machine's identity and join data: `edgebake stamp` writes it into
// the slot of a golden image. Field names follow those of kubeadm and yurtadm.
type Site struct {
	// APIVersion is the version of the document format.
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	// Kind is the kind of this document.
	Kind string `yaml:"kind" json:"kind" jsonschema:"enum=Site"`

	// Masters are the API servers, each host:port; host is an IP address or a
	// DNS name other than endpoint.
	Masters []string `yaml:"masters" json:"masters"`
	// Endpoint is the cluster's domain name. The node itself maps it to the
	// VIP.
	Endpoint string `yaml:"endpoint,omitempty" json:"endpoint,omitempty" jsonschema:"default=apiserver.cluster.local" check:"endpoint"`
	// VIP is the virtual address that IPVS balances to the API servers. Nothing in
	// the site's networks and no Service of the cluster may use it. Its port is
	// that of the first API server.
	VIP string `yaml:"vip,omitempty" json:"vip,omitempty" jsonschema:"default=10.103.97.2"`
	// Credentials prove to the cluster that this node may join.
	Credentials Credentials `yaml:"credentials" json:"credentials"`
	// CACertHashes pin the cluster's CA: sha256:<hex> of its public key, as
	// `kubeadm token create --print-join-command` prints it. One match is
	// enough. Required unless caCert, caFile or unsafeSkipCAVerification is
	// set.
	CACertHashes []string `yaml:"caCertHashes,omitempty" json:"caCertHashes,omitempty" check:"caHash" unique:"yes"`
	// CACert is the cluster's CA, PEM (/etc/kubernetes/pki/ca.crt of a
	// control-plane node). With it, discovery needs no anonymous access to the
	// API servers.
	CACert string `yaml:"caCert,omitempty" json:"caCert,omitempty" text:"lines"`
	// CAFile is the path of a file with the certificate of the cluster's CA, relative to the
	// Site's file. Stamping copies the certificate into caCert.
	CAFile string `yaml:"caFile,omitempty" json:"caFile,omitempty"`
	// UnsafeSkipCAVerification joins any cluster that answers.
	UnsafeSkipCAVerification bool `yaml:"unsafeSkipCAVerification,omitempty" json:"unsafeSkipCAVerification,omitempty"`

	// NodeName is the node's name, or a template of it. {{.Serial}} and {{.UUID}} come from the
	// firmware. {{.MAC}} is a MAC address without colons: that of the first interface here whose
	// mac the machine has, or else of the machine's first network card. {{.Hostname}} is the
	// machine's host name. {{or .Serial .MAC}} is the first of these values that the machine has.
	// The result is converted to lower case.
	NodeName string `yaml:"nodeName,omitempty" json:"nodeName,omitempty" jsonschema:"default=node-{{.MAC}}"`
	// Match selects the machine: other machines reject the Site, on their own
	// disk or on a stick. Default: any machine. In an Inventory, each site
	// has its own match.
	Match Match `yaml:"match,omitempty" json:"match,omitempty"`
	// NodeType is native (a plain kubeadm worker), edge (behind yurthub, keeps
	// working without the cluster), cloud (behind yurthub, always online) or
	// control-plane (`edgebake cluster sites` writes such Sites).
	NodeType string `yaml:"nodeType,omitempty" json:"nodeType,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud,enum=control-plane,default=native"`
	// Arch is the machine's processor architecture; stamping rejects an image
	// for a different architecture. Default: any.
	Arch string `yaml:"arch,omitempty" json:"arch,omitempty" jsonschema:"enum=amd64,enum=arm64"`
	// NodePool is the node's OpenYurt pool. It is required for edge and cloud, and invalid for
	// other node types.
	NodePool string `yaml:"nodePool,omitempty" json:"nodePool,omitempty" check:"nodePool"`
	// NodeIP selects the node's address if the machine has several: a CIDR,
	// e.g. 10.0.0.0/8, an address, or one of each family (10.0.0.0/8,fd00::/8).
	// If several addresses match, the node uses the one with the route to the
	// API servers, otherwise the lowest. Default: the address with the route to
	// the API servers.
	NodeIP string `yaml:"nodeIP,omitempty" json:"nodeIP,omitempty" check:"nodeIP"`
	// Labels are node labels set at registration. Labels a kubelet may not set
	// are rejected.
	Labels map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"`
	// Taints are node taints set at registration.
	Taints []Taint `yaml:"taints,omitempty" json:"taints,omitempty" unique:"key,effect"`
	// Organizations are added to yurthub's certificate (edge and cloud). Only
	// a yurthub of OpenYurt before v1.7 (form staticPod) has its own
	// certificate; stamping rejects organizations for other images. OpenYurt's
	// approver accepts only openyurt:tenant:NAME.
	Organizations []string `yaml:"organizations,omitempty" json:"organizations,omitempty" check:"organization" unique:"yes"`
	// CRISocket is the container runtime's socket.
	CRISocket string `yaml:"criSocket,omitempty" json:"criSocket,omitempty" jsonschema:"default=unix:///run/containerd/containerd.sock" check:"criSocket"`
	// SkipPhases are phases of `kubeadm join` to skip.
	SkipPhases []string `yaml:"skipPhases,omitempty" json:"skipPhases,omitempty" check:"joinPhase" unique:"yes"`
	// IgnorePreflightErrors are kubeadm checks whose errors become warnings,
	// e.g. Swap; or all.
	IgnorePreflightErrors []string `yaml:"ignorePreflightErrors,omitempty" json:"ignorePreflightErrors,omitempty" check:"preflight" unique:"yes"`
	// KubeletExtraArgs are additional kubelet flags, by name without dashes.
	// Flags that other fields set are rejected. A later change restarts
	// kubelet.
	KubeletExtraArgs map[string]string `yaml:"kubeletExtraArgs,omitempty" json:"kubeletExtraArgs,omitempty"`

	// ControlPlane describes the cluster to a control-plane node; required for
	// nodeType control-plane, rejected for others.
	ControlPlane *SiteControlPlane `yaml:"controlPlane,omitempty" json:"controlPlane,omitempty"`

	// SpreadSeconds is the time in seconds (3 to 600) over which the machines of a cluster spread
	// requests that all of them would otherwise send at once: the first requests after power-on
	// and, if the value is above 15, requests after an API server has returned. With a value above
	// 3, ipvscare also checks API servers less often. Default: 3, but in an Inventory or Cluster
	// of more than 300 machines a hundredth of their number.
	SpreadSeconds int `yaml:"spreadSeconds,omitempty" json:"spreadSeconds,omitempty" jsonschema:"minimum=3,maximum=600"`
	// IPVS sets how API servers are probed and balanced.
	IPVS IPVS `yaml:"ipvs,omitempty" json:"ipvs,omitempty"`
	// Yurthub sets up yurthub on edge and cloud nodes.
	Yurthub SiteYurthub `yaml:"yurthub,omitempty" json:"yurthub,omitempty"`

	// Network is the machine's network. Default: DHCP on every wired
	// interface.
	Network Network `yaml:"network,omitempty" json:"network,omitempty"`
	// Users are login accounts. Without any, nobody can log in.
	Users []User `yaml:"users,omitempty" json:"users,omitempty" unique:"name"`
	// Ignition is an Ignition v3 config (JSON) for settings without a field
	// here: files, directories, links, units, users. Contents must be inline
	// (data:). Setting the same thing here and in the Site is an error.
	Ignition Secret `yaml:"ignition,omitempty" json:"ignition,omitempty"`
	// IgnitionFile is the path of an Ignition config, relative to the Site's file. Stamping copies
	// the config into the slot.
	IgnitionFile string `yaml:"ignitionFile,omitempty" json:"ignitionFile,omitempty"`
	// Report sets where first boot sends its progress, in addition to the
	// console and the slot.
	Report Report `yaml:"report,omitempty" json:"report,omitempty"`
	// Updates sets when the machine installs updates automatically.
	Updates SiteUpdates `yaml:"updates,omitempty" json:"updates,omitempty"`
}

// Spread returns SpreadSeconds as a duration, at least ondisk.BootSpread.
func (s *Site) Spread() time.Duration {
	return max(time.Duration(s.SpreadSeconds)*time.Second, ondisk.BootSpread)
}

// ApplyDefaults sets the defaults of empty fields, as parsing does.
func (s *Site) ApplyDefaults() { strict.ApplyDefaults(s) }

// Credentials is a union: exactly one member is set.
type Credentials struct {
	// Token is a bootstrap token, e.g. abcdef.0123456789abcdef. It is never
	// written to the node's disk and is wiped from the slot after the join.
	Token Secret `yaml:"token,omitempty" json:"token,omitempty" check:"token"`
	// Keys are the cluster's private keys and CAs, for nodeType control-plane.
	// They are wiped from the slot once the machine is a control-plane node.
	Keys *ClusterKeys `yaml:"keys,omitempty" json:"keys,omitempty"`
}

// IsZero reports whether there are no credentials.
func (c Credentials) IsZero() bool { return c.Token.IsZero() && c.Keys == nil }

// Taint is a taint with which kubelet registers the node.
type Taint struct {
	// Key of the taint.
	Key string `yaml:"key" json:"key" check:"labelKey"`
	// Value of the taint.
	Value string `yaml:"value,omitempty" json:"value,omitempty" check:"labelValue"`
	// Effect on pods that do not tolerate it.
	Effect string `yaml:"effect" json:"effect" jsonschema:"enum=NoSchedule,enum=PreferNoSchedule,enum=NoExecute"`
}

// IPVS configures ipvscare, which balances the VIP across the API servers.
type IPVS struct {
	// Disabled disables IPVS. Then /etc/hosts maps the endpoint to one API server.
	Disabled bool `yaml:"disabled,omitempty" json:"disabled,omitempty"`
	// Scheduler is the kernel's IPVS scheduler.
	Scheduler string `yaml:"scheduler,omitempty" json:"scheduler,omitempty" jsonschema:"enum=rr,enum=wrr,enum=lc,enum=wlc,enum=sh,enum=dh,default=rr"`
	// Profile sets how often API servers are probed: with lan, every second while the node uses
	// them, otherwise every 5 s; with metered, for slow or metered links, rarely.
	Profile string `yaml:"profile,omitempty" json:"profile,omitempty" jsonschema:"enum=lan,enum=metered,default=lan"`
	// ProbePath is the path requested from an API server.
	ProbePath string `yaml:"probePath,omitempty" json:"probePath,omitempty" jsonschema:"default=/readyz" check:"probePath"`
	// Rise is the number of consecutive successful probes after which an API
	// server is used again (1 to 100).
	Rise int `yaml:"rise,omitempty" json:"rise,omitempty" jsonschema:"default=2,minimum=1,maximum=100"`
	// Fall is the number of consecutive failed probes after which an API server
	// is not used (1 to 100).
	Fall int `yaml:"fall,omitempty" json:"fall,omitempty" jsonschema:"default=2,minimum=1,maximum=100"`
	// LearnMasters lets the cluster's own list (ConfigMap
	// kube-public/edgebake-masters) replace masters.
	LearnMasters bool `yaml:"learnMasters,omitempty" json:"learnMasters,omitempty"`
}

// SiteYurthub configures yurthub on one machine.
type SiteYurthub struct {
	// Namespace is the namespace of yurthub's settings in the cluster.
	Namespace string `yaml:"namespace,omitempty" json:"namespace,omitempty" jsonschema:"default=kube-system" check:"namespace"`
	// OpenPort leaves yurthub's port 10269 reachable from outside the node. There, yurthub
	// (OpenYurt v1.7 and later) serves other nodes of the pool, with this node's rights and
	// without authentication. Default: the node's firewall closes the port.
	OpenPort bool `yaml:"openPort,omitempty" json:"openPort,omitempty"`
	// LocalClients are user IDs of processes that may use yurthub's ports, in addition to root,
	// e.g. 65534 for a pod with hostNetwork that runs as nobody. Every process of such a user acts
	// with this node's rights. Pods without hostNetwork do not need it.
	LocalClients []int `yaml:"localClients,omitempty" json:"localClients,omitempty"`
	// ExtraArgs are additional arguments, each --name=value, after the
	// Image's. Arguments that first boot sets or relies on are rejected;
	// stamping rejects those that the image's yurthub does not know.
	ExtraArgs []string `yaml:"extraArgs,omitempty" json:"extraArgs,omitempty"`
}

// Network of the machine.
type Network struct {
	// Interfaces are matched in this order: an interface gets the settings of the first entry that
	// matches it. An interface without a matching entry is not configured.
	Interfaces []Interface `yaml:"interfaces,omitempty" json:"interfaces,omitempty"`
	// DNS servers, by IP address; they replace those from DHCP.
	DNS []string `yaml:"dns,omitempty" json:"dns,omitempty" check:"dns" unique:"yes"`
	// Search are DNS search domains.
	Search []string `yaml:"search,omitempty" json:"search,omitempty" check:"domain"`
	// NTP are time servers; they replace those from DHCP.
	NTP []string `yaml:"ntp,omitempty" json:"ntp,omitempty" check:"ntp" unique:"yes"`
	// Proxy is the HTTP proxy for containerd, kubelet and kubeadm.
	Proxy Proxy `yaml:"proxy,omitempty" json:"proxy,omitempty"`
}

// Interface is one network interface, which name or mac selects. It has dhcp, addresses or
// VLANs. With bond or bridge, edgebake makes the interface.
type Interface struct {
	// Name of the interface, e.g. enp1s0, or a pattern, e.g. en*. A bond or bridge gets this name,
	// e.g. bond0.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	// MAC address of the card.
	MAC string `yaml:"mac,omitempty" json:"mac,omitempty" check:"cardMAC"`
	// DHCP requests addresses (IPv4 and IPv6).
	DHCP bool `yaml:"dhcp,omitempty" json:"dhcp,omitempty"`
	// Addresses with prefix length, e.g. 192.168.7.20/24.
	Addresses []string `yaml:"addresses,omitempty" json:"addresses,omitempty"`
	// Gateway is the default router. It must be in the network of one of the addresses, unless all
	// of them have the prefix length /32 or /128: then it may be any router on the link.
	Gateway string `yaml:"gateway,omitempty" json:"gateway,omitempty"`
	// Metric of the default route, from the gateway or DHCP: the lowest one is
	// used while its interface is up. Two gateways of a family need different
	// metrics.
	Metric int `yaml:"metric,omitempty" json:"metric,omitempty" jsonschema:"minimum=1,maximum=65535"`
	// NoDefaultRoute accepts addresses from DHCP and routers, but no default
	// route, for example on a second uplink or a network of devices.
	NoDefaultRoute bool `yaml:"noDefaultRoute,omitempty" json:"noDefaultRoute,omitempty"`
	// AcceptRA accepts IPv6 router advertisements in addition to static addresses. Any machine on
	// the network can then add addresses, routes and DNS servers. With dhcp, router advertisements
	// are always accepted.
	AcceptRA bool `yaml:"acceptRA,omitempty" json:"acceptRA,omitempty"`
	// Routes are additional static routes.
	Routes []Route `yaml:"routes,omitempty" json:"routes,omitempty"`
	// MTU in bytes, 576 to 65535.
	MTU int `yaml:"mtu,omitempty" json:"mtu,omitempty" jsonschema:"minimum=576,maximum=65535"`
	// VLANs on top of this interface.
	VLANs []VLAN `yaml:"vlans,omitempty" json:"vlans,omitempty"`
	// WiFi joins a wireless network; name must be the interface's exact name,
	// e.g. wlan0. The image needs wpasupplicant.
	WiFi *WiFi `yaml:"wifi,omitempty" json:"wifi,omitempty"`
	// Bond makes this interface a bond of several cards.
	Bond *Bond `yaml:"bond,omitempty" json:"bond,omitempty"`
	// Bridge makes this interface a bridge with these ports.
	Bridge []string `yaml:"bridge,omitempty" json:"bridge,omitempty"`
}

// Bond combines several cards into one interface.
type Bond struct {
	// Interfaces are the names of the cards.
	Interfaces []string `yaml:"interfaces" json:"interfaces"`
	// Mode of the bond. active-backup works with any switch. 802.3ad (LACP) needs a switch that is
	// configured for it.
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" jsonschema:"default=active-backup,enum=active-backup,enum=802.3ad,enum=balance-rr,enum=balance-xor,enum=balance-alb,enum=balance-tlb,enum=broadcast"`
}

// Ports returns the names of the ports of a bond or bridge.
func (f *Interface) Ports() []string {
	if f.Bond != nil {
		return f.Bond.Interfaces
	}
	return f.Bridge
}

// Route is one static route.
type Route struct {
	// To is the destination CIDR, e.g. 10.20.0.0/16.
	To string `yaml:"to" json:"to"`
	// Via is the router's address.
	Via string `yaml:"via" json:"via"`
}

// VLAN is a tagged interface on top of another.
type VLAN struct {
	// ID is the VLAN ID, 1 to 4094, unique in a Site.
	ID int `yaml:"id" json:"id" jsonschema:"minimum=1,maximum=4094"`
	// DHCP requests addresses.
	DHCP bool `yaml:"dhcp,omitempty" json:"dhcp,omitempty"`
	// Addresses with prefix length.
	Addresses []string `yaml:"addresses,omitempty" json:"addresses,omitempty"`
	// Gateway is the default router.
	Gateway string `yaml:"gateway,omitempty" json:"gateway,omitempty"`
	// Metric of the default route.
	Metric int `yaml:"metric,omitempty" json:"metric,omitempty" jsonschema:"minimum=1,maximum=65535"`
	// NoDefaultRoute accepts no default route from DHCP and routers.
	NoDefaultRoute bool `yaml:"noDefaultRoute,omitempty" json:"noDefaultRoute,omitempty"`
	// AcceptRA accepts IPv6 router advertisements in addition to static
	// addresses.
	AcceptRA bool `yaml:"acceptRA,omitempty" json:"acceptRA,omitempty"`
	// MTU in bytes, at most that of the interface below.
	MTU int `yaml:"mtu,omitempty" json:"mtu,omitempty" jsonschema:"minimum=576,maximum=65535"`
}

// Name returns the name of the VLAN's interface. It depends only on the ID, which is unique in a
// Site.
func (v *VLAN) Name() string { return fmt.Sprintf("vlan%d", v.ID) }

// Addressing contains the address settings that interfaces and VLANs have in common.
type Addressing struct {
	DHCP, AcceptRA, NoDefaultRoute bool
	Addresses                      []string
	Gateway                        string
	Metric, MTU                    int
}

// Addressing returns the interface's address settings.
func (f *Interface) Addressing() Addressing {
	return Addressing{f.DHCP, f.AcceptRA, f.NoDefaultRoute, f.Addresses, f.Gateway, f.Metric, f.MTU}
}

// Addressing returns the VLAN's address settings.
func (v *VLAN) Addressing() Addressing {
	return Addressing{v.DHCP, v.AcceptRA, v.NoDefaultRoute, v.Addresses, v.Gateway, v.Metric, v.MTU}
}

// addressings yields the path and the address settings of each interface and VLAN.
func (n *Network) addressings() iter.Seq2[string, Addressing] {
	return func(yield func(string, Addressing) bool) {
		for i := range n.Interfaces {
			f, path := &n.Interfaces[i], fmt.Sprintf("network.interfaces[%d]", i)
			if !yield(path, f.Addressing()) {
				return
			}
			for j := range f.VLANs {
				if !yield(fmt.Sprintf("%s.vlans[%d]", path, j), f.VLANs[j].Addressing()) {
					return
				}
			}
		}
	}
}

// WiFi joins a wireless network.
type WiFi struct {
	// SSID is the network's name.
	SSID string `yaml:"ssid" json:"ssid" text:"any"`
	// PSK is the passphrase (8 to 63 ASCII characters) or the key (64
	// hexadecimal digits). Without it, the network is open.
	PSK Secret `yaml:"psk,omitempty" json:"psk,omitempty" text:"any" check:"psk"`
	// EAP is the method of a network with logins (WPA-Enterprise).
	EAP string `yaml:"eap,omitempty" json:"eap,omitempty" jsonschema:"enum=peap,enum=ttls"`
	// Identity is the user name of the login.
	Identity string `yaml:"identity,omitempty" json:"identity,omitempty" text:"any"`
	// Password of the login.
	Password Secret `yaml:"password,omitempty" json:"password,omitempty" text:"any"`
	// CACert is the PEM certificate of the CA that signed the network's certificate. Without it,
	// anybody can impersonate the network and learn the password.
	CACert string `yaml:"caCert,omitempty" json:"caCert,omitempty" text:"lines" check:"ca"`
	// Country is the ISO 3166 code of the regulatory domain, e.g. DE.
	Country string `yaml:"country,omitempty" json:"country,omitempty" check:"country"`
}

// Proxy is the HTTP proxy of the site. Masters, VIP and endpoint are always
// reached directly.
type Proxy struct {
	// HTTP is the proxy's URL for HTTP, optionally with a login:
	// http://user:password@proxy.example.com:3128. Write special characters as
	// in any URL (@ as %40).
	HTTP Secret `yaml:"http,omitempty" json:"http,omitempty"`
	// HTTPS is the proxy's URL for HTTPS.
	HTTPS Secret `yaml:"https,omitempty" json:"https,omitempty"`
	// NoProxy lists hosts, .domains and CIDRs that are reached directly. The pods
	// of a control plane also reach pods, Services and private addresses directly.
	NoProxy []string `yaml:"noProxy,omitempty" json:"noProxy,omitempty" check:"noProxy"`
}

// User is a login of the node.
type User struct {
	// Name of the user; root is allowed.
	Name string `yaml:"name" json:"name" check:"user"`
	// SSHAuthorizedKeys are public keys in the format of authorized_keys. The
	// image needs openssh-server.
	SSHAuthorizedKeys []string `yaml:"sshAuthorizedKeys,omitempty" json:"sshAuthorizedKeys,omitempty" text:"tabs" check:"sshKey"`
	// PasswordHash is the hash of the password in the format of crypt(3). `mkpasswd` prints one.
	PasswordHash Secret `yaml:"passwordHash,omitempty" json:"passwordHash,omitempty" check:"passwordHash"`
	// Groups are the user's supplementary groups.
	Groups []string `yaml:"groups,omitempty" json:"groups,omitempty" check:"group" unique:"yes"`
	// Shell is the path of the login shell.
	Shell string `yaml:"shell,omitempty" json:"shell,omitempty" check:"filePath"`
}

// Report sets where first boot sends its progress, in addition to the console
// and the slot.
type Report struct {
	// URL receives the report as an HTTPS POST.
	URL string `yaml:"url,omitempty" json:"url,omitempty" check:"https"`
	// CACert is the PEM certificate of the CA that signed the receiver's certificate, or the
	// receiver's own certificate if it is self-signed, as with `edgebake cluster listen`. Default:
	// the CAs in the image.
	CACert string `yaml:"caCert,omitempty" json:"caCert,omitempty" text:"lines" check:"certificates"`
}

// SiteUpdates sets when the machine installs updates automatically.
type SiteUpdates struct {
	// Window is the time of each day in which the machine installs updates that its cluster orders
	// or that are on a stick, e.g. 22:00-05:00. Default: any time. `firstboot update` does not
	// wait for it.
	Window string `yaml:"window,omitempty" json:"window,omitempty" check:"window"`
	// TimeZone is the time zone of window, e.g. Europe/Berlin. Default: UTC.
	TimeZone string `yaml:"timeZone,omitempty" json:"timeZone,omitempty" check:"timeZone"`
}

// Open reports whether now is in the window.
func (u SiteUpdates) Open(now time.Time) bool {
	var w forms.Window
	zone, err := time.LoadLocation(u.TimeZone)
	if u.Window != "" && err == nil {
		err = w.Set(u.Window)
	}
	return err == nil && w.Open(now.In(zone))
}

// String returns the window followed by its time zone.
func (u SiteUpdates) String() string { return u.Window + " " + cmp.Or(u.TimeZone, "UTC") }

// EncodeSlot encodes the Site for the slot, including its secrets, which json.Marshal and
// yaml.Marshal replace by Mask. Equal Sites give equal bytes.
func EncodeSlot(s *Site) ([]byte, error) { return encodeSite(s, nil) }

// SlotNode returns the YAML tree that EncodeSlot encodes.
func SlotNode(s *Site) *yaml.Node { return strict.Node(s, nil) }

// EncodeSlotFor is like EncodeSlot, but includes only the fields in known.
func EncodeSlotFor(s *Site, known []string) ([]byte, error) {
	set := map[string]bool{}
	for _, f := range known {
		set[f] = true
	}
	return encodeSite(s, func(path string) bool { return set[path] })
}

func encodeSite(s *Site, keep func(path string) bool) ([]byte, error) {
	b, err := strict.Encode(s, keep)
	if err != nil {
		return nil, fmt.Errorf("encoding the Site: %w", err)
	}
	return b, nil
}

// OpenYurt reports whether this is an OpenYurt node, whose kubelet connects to yurthub.
func (s *Site) OpenYurt() bool { return s.NodeType == NodeEdge || s.NodeType == NodeCloud }
