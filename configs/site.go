package configs

// Site is one machine's identity and join data: what `edgebake stamp` writes
// into the slot of a golden image. Field names are the ones kubeadm and
// yurtadm users know.
type Site struct {
	// APIVersion is the version of this document's form.
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	// Kind says that this is a Site.
	Kind string `yaml:"kind" json:"kind" jsonschema:"enum=Site"`

	// Masters are the kube-apiservers, each host:port; host is an IP address
	// or a DNS name of its own.
	Masters []string `yaml:"masters" json:"masters"`
	// Endpoint is the cluster's domain name. The node itself maps it to the
	// VIP.
	Endpoint string `yaml:"endpoint,omitempty" json:"endpoint,omitempty" jsonschema:"default=apiserver.cluster.local"`
	// VIP is the virtual address that IPVS balances to the masters: one that
	// nothing in the site's networks uses, and no Service of the cluster. Its
	// port is that of the first master.
	VIP string `yaml:"vip,omitempty" json:"vip,omitempty" jsonschema:"default=10.103.97.2"`
	// Credentials prove to the cluster that this node may join.
	Credentials Credentials `yaml:"credentials" json:"credentials"`
	// CACertHashes pin the cluster's CA: sha256:<hex> of its public key, as
	// `kubeadm token create --print-join-command` shows it. One that fits is
	// enough. Required, unless caCert, caFile or unsafeSkipCAVerification is
	// given.
	CACertHashes []string `yaml:"caCertHashes,omitempty" json:"caCertHashes,omitempty"`
	// CACert is the cluster's CA itself, PEM (/etc/kubernetes/pki/ca.crt of a
	// control-plane node). With it discovery needs no anonymous access to the
	// API servers.
	CACert string `yaml:"caCert,omitempty" json:"caCert,omitempty" text:"lines"`
	// CAFile is the path of that certificate, seen from the Site's file;
	// stamping puts its contents into caCert.
	CAFile string `yaml:"caFile,omitempty" json:"caFile,omitempty"`
	// UnsafeSkipCAVerification joins whatever cluster answers.
	UnsafeSkipCAVerification bool `yaml:"unsafeSkipCAVerification,omitempty" json:"unsafeSkipCAVerification,omitempty"`

	// NodeName is the node's name or a template of it: {{.Serial}} and
	// {{.UUID}} come from the firmware, {{.MAC}} (without colons) is the
	// first network card's or that of an interface named here by mac,
	// {{.Hostname}} the machine's. {{or .Serial .MAC}} takes the first that
	// the machine has. The result is put in lower case.
	NodeName string `yaml:"nodeName,omitempty" json:"nodeName,omitempty" jsonschema:"default=node-{{.MAC}}"`
	// NodeType is native (a plain kubeadm worker), edge (behind yurthub,
	// works on without the cluster) or cloud (behind yurthub, always online).
	NodeType string `yaml:"nodeType,omitempty" json:"nodeType,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud,default=native"`
	// Arch is the machine's processor architecture: stamping refuses an image
	// of another. Empty: whatever the image is for.
	Arch string `yaml:"arch,omitempty" json:"arch,omitempty" jsonschema:"enum=amd64,enum=arm64"`
	// NodePool is OpenYurt's pool of the node; required for edge and cloud,
	// refused for native.
	NodePool string `yaml:"nodePool,omitempty" json:"nodePool,omitempty"`
	// Labels that kubelet registers the node with. Those that a kubelet may
	// not set are refused.
	Labels map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"`
	// Taints that kubelet registers the node with.
	Taints []Taint `yaml:"taints,omitempty" json:"taints,omitempty"`
	// Organizations are added to yurthub's certificate (edge and cloud). Only
	// yurthub before 1.7, form staticPod, has one of its own: stamping refuses
	// them for other images. OpenYurt's approver takes openyurt:tenant:NAME
	// alone.
	Organizations []string `yaml:"organizations,omitempty" json:"organizations,omitempty"`
	// CRISocket is the container runtime's socket.
	CRISocket string `yaml:"criSocket,omitempty" json:"criSocket,omitempty" jsonschema:"default=unix:///run/containerd/containerd.sock"`
	// SkipPhases are phases of `kubeadm join` to leave out.
	SkipPhases []string `yaml:"skipPhases,omitempty" json:"skipPhases,omitempty"`
	// IgnorePreflightErrors are checks of kubeadm that may fail, as Swap; or
	// all.
	IgnorePreflightErrors []string `yaml:"ignorePreflightErrors,omitempty" json:"ignorePreflightErrors,omitempty"`
	// KubeletExtraArgs are further flags of kubelet, by name without dashes.
	// Those that other fields set are refused. A later change restarts kubelet.
	KubeletExtraArgs map[string]string `yaml:"kubeletExtraArgs,omitempty" json:"kubeletExtraArgs,omitempty"`

	// IPVS is how the way to the masters is kept open.
	IPVS IPVS `yaml:"ipvs,omitempty" json:"ipvs,omitempty"`
	// Yurthub is for node types edge and cloud.
	Yurthub SiteYurthub `yaml:"yurthub,omitempty" json:"yurthub,omitempty"`

	// Network is the machine's. Nothing set: DHCP on every wired interface.
	Network Network `yaml:"network,omitempty" json:"network,omitempty"`
	// Users are logins. Without any there is no way to log in.
	Users []User `yaml:"users,omitempty" json:"users,omitempty"`
	// Ignition is an Ignition v3 config (JSON) for what has no field here:
	// files, directories, links, units, users. Contents must be inline
	// (data:). What it and the Site both set is an error.
	Ignition Secret `yaml:"ignition,omitempty" json:"ignition,omitempty"`
	// IgnitionFile is the path of one, seen from the Site's file; stamping
	// puts it into the slot.
	IgnitionFile string `yaml:"ignitionFile,omitempty" json:"ignitionFile,omitempty"`
	// Report is where first boot tells how it goes, besides console and slot.
	Report Report `yaml:"report,omitempty" json:"report,omitempty"`
}

// Credentials is a union: exactly one member is set.
type Credentials struct {
	// Token is a bootstrap token, abcdef.0123456789abcdef. It is never
	// written to the node's disk and is wiped from the slot after the join.
	Token Secret `yaml:"token,omitempty" json:"token,omitempty"`
}

// Taint is one taint, as kubelet registers it.
type Taint struct {
	// Key of the taint.
	Key string `yaml:"key" json:"key"`
	// Value of the taint.
	Value string `yaml:"value,omitempty" json:"value,omitempty"`
	// Effect on pods that do not tolerate it.
	Effect string `yaml:"effect" json:"effect" jsonschema:"enum=NoSchedule,enum=PreferNoSchedule,enum=NoExecute"`
}

// IPVS is the Site's word on ipvscare, which balances the VIP to the masters.
type IPVS struct {
	// Disabled leaves it out: the endpoint then stands in /etc/hosts with
	// the address of one master.
	Disabled bool `yaml:"disabled,omitempty" json:"disabled,omitempty"`
	// Scheduler is the kernel's way to choose a master.
	Scheduler string `yaml:"scheduler,omitempty" json:"scheduler,omitempty" jsonschema:"enum=rr,enum=wrr,enum=lc,enum=wlc,enum=sh,enum=dh,default=rr"`
	// Profile is how often masters are probed: lan every second, metered
	// seldom, for links that are far or paid by the byte.
	Profile string `yaml:"profile,omitempty" json:"profile,omitempty" jsonschema:"enum=lan,enum=metered,default=lan"`
	// ProbePath is what is asked of a master.
	ProbePath string `yaml:"probePath,omitempty" json:"probePath,omitempty" jsonschema:"default=/readyz"`
	// Rise is how many good probes bring a master back (1 to 100).
	Rise int `yaml:"rise,omitempty" json:"rise,omitempty" jsonschema:"default=2,minimum=1,maximum=100"`
	// Fall is how many bad probes take a master out (1 to 100).
	Fall int `yaml:"fall,omitempty" json:"fall,omitempty" jsonschema:"default=2,minimum=1,maximum=100"`
	// LearnMasters lets the cluster's own list (ConfigMap
	// kube-public/edgebake-masters) replace masters.
	LearnMasters bool `yaml:"learnMasters,omitempty" json:"learnMasters,omitempty"`
}

// SiteYurthub is the Site's word on yurthub.
type SiteYurthub struct {
	// Namespace holds yurthub's settings in the cluster.
	Namespace string `yaml:"namespace,omitempty" json:"namespace,omitempty" jsonschema:"default=kube-system"`
	// OpenPort leaves port 10269 reachable from outside the node, where
	// anybody who reaches it acts with the node's rights.
	OpenPort bool `yaml:"openPort,omitempty" json:"openPort,omitempty"`
	// ExtraArgs are further arguments, each --name=value, after the Image's.
	// Those that first boot sets or counts on are refused; stamping refuses
	// those that the image's yurthub has not.
	ExtraArgs []string `yaml:"extraArgs,omitempty" json:"extraArgs,omitempty"`
}

// Network of the machine.
type Network struct {
	// Interfaces are set up in this order of preference: the first that fits
	// a card holds for it. Cards that none fits are left alone.
	Interfaces []Interface `yaml:"interfaces,omitempty" json:"interfaces,omitempty"`
	// DNS servers, by IP address; they replace those of DHCP.
	DNS []string `yaml:"dns,omitempty" json:"dns,omitempty"`
	// Search are domains that short names are tried in.
	Search []string `yaml:"search,omitempty" json:"search,omitempty"`
	// NTP are time servers; they replace those of DHCP.
	NTP []string `yaml:"ntp,omitempty" json:"ntp,omitempty"`
	// Proxy is the way out of the site for containerd, kubelet and kubeadm.
	Proxy Proxy `yaml:"proxy,omitempty" json:"proxy,omitempty"`
}

// Interface is one network interface: name or mac choose it, and it has
// dhcp, addresses or VLANs.
type Interface struct {
	// Name, as enp1s0, or a pattern, as en*.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	// MAC address of the card.
	MAC string `yaml:"mac,omitempty" json:"mac,omitempty"`
	// DHCP asks for addresses (IPv4 and IPv6).
	DHCP bool `yaml:"dhcp,omitempty" json:"dhcp,omitempty"`
	// Addresses with prefix length, as 192.168.7.20/24.
	Addresses []string `yaml:"addresses,omitempty" json:"addresses,omitempty"`
	// Gateway is the default router, in one of the addresses' networks; one
	// IPv4 and one IPv6 in a Site.
	Gateway string `yaml:"gateway,omitempty" json:"gateway,omitempty"`
	// Routes are further networks.
	Routes []Route `yaml:"routes,omitempty" json:"routes,omitempty"`
	// MTU in bytes, 576 to 65535.
	MTU int `yaml:"mtu,omitempty" json:"mtu,omitempty" jsonschema:"minimum=576,maximum=65535"`
	// VLANs on top of this interface.
	VLANs []VLAN `yaml:"vlans,omitempty" json:"vlans,omitempty"`
	// WiFi joins a wireless network; name must be the interface's own, as
	// wlan0. The image needs wpasupplicant.
	WiFi *WiFi `yaml:"wifi,omitempty" json:"wifi,omitempty"`
}

// Route is one static route.
type Route struct {
	// To is a network, as 10.20.0.0/16.
	To string `yaml:"to" json:"to"`
	// Via is the router's address.
	Via string `yaml:"via" json:"via"`
}

// VLAN is a tagged interface on top of another.
type VLAN struct {
	// ID is the tag, 1 to 4094, once in a Site.
	ID int `yaml:"id" json:"id" jsonschema:"minimum=1,maximum=4094"`
	// DHCP asks for addresses.
	DHCP bool `yaml:"dhcp,omitempty" json:"dhcp,omitempty"`
	// Addresses with prefix length.
	Addresses []string `yaml:"addresses,omitempty" json:"addresses,omitempty"`
	// Gateway is the default router.
	Gateway string `yaml:"gateway,omitempty" json:"gateway,omitempty"`
}

// WiFi joins a wireless network.
type WiFi struct {
	// SSID is the network's name.
	SSID string `yaml:"ssid" json:"ssid"`
	// PSK is the passphrase (8 to 63 ASCII characters), or the key itself
	// (64 hexadecimal digits). Without it: an open network.
	PSK Secret `yaml:"psk,omitempty" json:"psk,omitempty"`
	// Country is the ISO 3166 code of the regulatory domain, as DE.
	Country string `yaml:"country,omitempty" json:"country,omitempty"`
}

// Proxy is the way out of the site. Masters, VIP and endpoint are always
// reached straight.
type Proxy struct {
	// HTTP is the proxy's URL for http.
	HTTP string `yaml:"http,omitempty" json:"http,omitempty"`
	// HTTPS is the proxy's URL for https.
	HTTPS string `yaml:"https,omitempty" json:"https,omitempty"`
	// NoProxy are hosts, .domains and networks that are reached straight.
	NoProxy []string `yaml:"noProxy,omitempty" json:"noProxy,omitempty"`
}

// User is a login of the node.
type User struct {
	// Name of the user; root is one.
	Name string `yaml:"name" json:"name"`
	// SSHAuthorizedKeys are public keys, as authorized_keys holds them. The
	// image needs openssh-server.
	SSHAuthorizedKeys []string `yaml:"sshAuthorizedKeys,omitempty" json:"sshAuthorizedKeys,omitempty" text:"tabs"`
	// PasswordHash as crypt(3) makes it; `mkpasswd` prints one.
	PasswordHash Secret `yaml:"passwordHash,omitempty" json:"passwordHash,omitempty"`
	// Groups that the user is in besides their own.
	Groups []string `yaml:"groups,omitempty" json:"groups,omitempty"`
	// Shell is the path of the login shell.
	Shell string `yaml:"shell,omitempty" json:"shell,omitempty"`
}

// Report is where first boot tells how it goes, besides console and slot.
type Report struct {
	// URL receives the report as an HTTPS POST.
	URL string `yaml:"url,omitempty" json:"url,omitempty"`
}
