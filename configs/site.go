package configs

// Site is one machine's identity and join data: what `edgebake stamp` writes
// into the slot of a golden image. Field names are the ones kubeadm and
// yurtadm users know.
type Site struct {
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	Kind       string `yaml:"kind" json:"kind" jsonschema:"enum=Site"`

	// Masters are the kube-apiserver addresses, "host:port"; host is an IP
	// address or a DNS name.
	Masters []string `yaml:"masters" json:"masters"`
	// Endpoint is the cluster's domain name.
	Endpoint string `yaml:"endpoint,omitempty" json:"endpoint,omitempty" jsonschema:"default=apiserver.cluster.local"`
	// VIP is the virtual address that IPVS balances to the masters. Port:
	// the masters' port.
	VIP string `yaml:"vip,omitempty" json:"vip,omitempty" jsonschema:"default=10.103.97.2"`
	// Credentials prove to the cluster that this node may join.
	Credentials Credentials `yaml:"credentials" json:"credentials"`
	// CACertHashes pin the cluster's CA: "sha256:<hex>" of its public key.
	CACertHashes []string `yaml:"caCertHashes,omitempty" json:"caCertHashes,omitempty"`
	// UnsafeSkipCAVerification joins whatever cluster answers.
	UnsafeSkipCAVerification bool `yaml:"unsafeSkipCAVerification,omitempty" json:"unsafeSkipCAVerification,omitempty"`

	// NodeName is the node's name or a template of it: {{.Serial}}, {{.MAC}},
	// {{.UUID}}, {{.Hostname}}.
	NodeName string `yaml:"nodeName,omitempty" json:"nodeName,omitempty" jsonschema:"default=node-{{.MAC}}"`
	// NodeType is edge, cloud, native or control-plane.
	NodeType      string            `yaml:"nodeType,omitempty" json:"nodeType,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud,default=native"`
	NodePool      string            `yaml:"nodePool,omitempty" json:"nodePool,omitempty"`
	Labels        map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"`
	Taints        []Taint           `yaml:"taints,omitempty" json:"taints,omitempty"`
	Organizations []string          `yaml:"organizations,omitempty" json:"organizations,omitempty"`
	// CRISocket is containerd's, unless told otherwise.
	CRISocket             string            `yaml:"criSocket,omitempty" json:"criSocket,omitempty" jsonschema:"default=unix:///run/containerd/containerd.sock"`
	SkipPhases            []string          `yaml:"skipPhases,omitempty" json:"skipPhases,omitempty"`
	IgnorePreflightErrors []string          `yaml:"ignorePreflightErrors,omitempty" json:"ignorePreflightErrors,omitempty"`
	KubeletExtraArgs      map[string]string `yaml:"kubeletExtraArgs,omitempty" json:"kubeletExtraArgs,omitempty"`

	IPVS    IPVS        `yaml:"ipvs,omitempty" json:"ipvs,omitempty"`
	Yurthub SiteYurthub `yaml:"yurthub,omitempty" json:"yurthub,omitempty"`

	Network Network `yaml:"network,omitempty" json:"network,omitempty"`
	Users   []User  `yaml:"users,omitempty" json:"users,omitempty"`
	// Ignition is a whole Ignition v3 config, inline (JSON), or, in a file
	// beside the Site, named by IgnitionFile; stamping puts it into the slot.
	Ignition     Secret `yaml:"ignition,omitempty" json:"ignition,omitempty"`
	IgnitionFile string `yaml:"ignitionFile,omitempty" json:"ignitionFile,omitempty"`
	Report       Report `yaml:"report,omitempty" json:"report,omitempty"`
}

// Credentials is a union: exactly one member is set.
type Credentials struct {
	// Token is a bootstrap token, "abcdef.0123456789abcdef".
	Token Secret `yaml:"token,omitempty" json:"token,omitempty"`
}

// Taint as kubelet registers it.
type Taint struct {
	Key    string `yaml:"key" json:"key"`
	Value  string `yaml:"value,omitempty" json:"value,omitempty"`
	Effect string `yaml:"effect" json:"effect" jsonschema:"enum=NoSchedule,enum=PreferNoSchedule,enum=NoExecute"`
}

// IPVS is the Site's word on ipvscare.
type IPVS struct {
	// Disabled joins straight through one master; Endpoint then stays in
	// /etc/hosts on a master's address.
	Disabled  bool   `yaml:"disabled,omitempty" json:"disabled,omitempty"`
	Scheduler string `yaml:"scheduler,omitempty" json:"scheduler,omitempty" jsonschema:"enum=rr,enum=wrr,enum=lc,enum=wlc,enum=sh,enum=dh,default=rr"` // rr wrr lc wlc sh dh
	Profile   string `yaml:"profile,omitempty" json:"profile,omitempty" jsonschema:"enum=lan,enum=metered,default=lan"`                                // lan | metered
	ProbePath string `yaml:"probePath,omitempty" json:"probePath,omitempty" jsonschema:"default=/readyz"`
	Rise      int    `yaml:"rise,omitempty" json:"rise,omitempty" jsonschema:"default=2"`
	Fall      int    `yaml:"fall,omitempty" json:"fall,omitempty" jsonschema:"default=2"`
	// LearnMasters lets the cluster's own list replace Masters.
	LearnMasters bool `yaml:"learnMasters,omitempty" json:"learnMasters,omitempty"`
}

// SiteYurthub is the Site's word on yurthub.
type SiteYurthub struct {
	// Namespace holds yurthub's settings in the cluster.
	Namespace string `yaml:"namespace,omitempty" json:"namespace,omitempty" jsonschema:"default=kube-system"`
	// OpenPort leaves :10269 reachable from outside the node.
	OpenPort  bool     `yaml:"openPort,omitempty" json:"openPort,omitempty"`
	ExtraArgs []string `yaml:"extraArgs,omitempty" json:"extraArgs,omitempty"`
}

// Network of the node. Nothing set: DHCP on every wired interface.
type Network struct {
	Interfaces []Interface `yaml:"interfaces,omitempty" json:"interfaces,omitempty"`
	DNS        []string    `yaml:"dns,omitempty" json:"dns,omitempty"`
	Search     []string    `yaml:"search,omitempty" json:"search,omitempty"`
	NTP        []string    `yaml:"ntp,omitempty" json:"ntp,omitempty"`
	Proxy      Proxy       `yaml:"proxy,omitempty" json:"proxy,omitempty"`
}

// Interface is one network interface.
type Interface struct {
	// Name ("enp1s0", "en*") or MAC choose the interface.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	MAC  string `yaml:"mac,omitempty" json:"mac,omitempty"`
	DHCP bool   `yaml:"dhcp,omitempty" json:"dhcp,omitempty"`
	// Addresses in CIDR form.
	Addresses []string `yaml:"addresses,omitempty" json:"addresses,omitempty"`
	Gateway   string   `yaml:"gateway,omitempty" json:"gateway,omitempty"`
	Routes    []Route  `yaml:"routes,omitempty" json:"routes,omitempty"`
	MTU       int      `yaml:"mtu,omitempty" json:"mtu,omitempty"`
	VLANs     []VLAN   `yaml:"vlans,omitempty" json:"vlans,omitempty"`
	WiFi      *WiFi    `yaml:"wifi,omitempty" json:"wifi,omitempty"`
}

// Route is one static route.
type Route struct {
	To  string `yaml:"to" json:"to"`
	Via string `yaml:"via" json:"via"`
}

// VLAN is a tagged interface on top of another.
type VLAN struct {
	ID        int      `yaml:"id" json:"id"`
	DHCP      bool     `yaml:"dhcp,omitempty" json:"dhcp,omitempty"`
	Addresses []string `yaml:"addresses,omitempty" json:"addresses,omitempty"`
	Gateway   string   `yaml:"gateway,omitempty" json:"gateway,omitempty"`
}

// WiFi joins a wireless network.
type WiFi struct {
	SSID string `yaml:"ssid" json:"ssid"`
	PSK  Secret `yaml:"psk,omitempty" json:"psk,omitempty"`
	// Country is the ISO 3166 code of the regulatory domain.
	Country string `yaml:"country,omitempty" json:"country,omitempty"`
}

// Proxy is what kubeadm, kubelet and containerd use to leave the site.
type Proxy struct {
	HTTP    string   `yaml:"http,omitempty" json:"http,omitempty"`
	HTTPS   string   `yaml:"https,omitempty" json:"https,omitempty"`
	NoProxy []string `yaml:"noProxy,omitempty" json:"noProxy,omitempty"`
}

// User is a login of the node.
type User struct {
	Name              string   `yaml:"name" json:"name"`
	SSHAuthorizedKeys []string `yaml:"sshAuthorizedKeys,omitempty" json:"sshAuthorizedKeys,omitempty"`
	PasswordHash      Secret   `yaml:"passwordHash,omitempty" json:"passwordHash,omitempty"`
	Groups            []string `yaml:"groups,omitempty" json:"groups,omitempty"`
	Shell             string   `yaml:"shell,omitempty" json:"shell,omitempty"`
}

// Report is where first boot tells how it goes, besides console and slot.
type Report struct {
	// URL receives the report as an HTTPS POST.
	URL string `yaml:"url,omitempty" json:"url,omitempty"`
}
