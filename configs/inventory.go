package configs

// Inventory contains the Sites of many machines in one file. On an image or a USB stick, it
// gives each machine the Site that matches the machine.
//
// A Site consists of the defaults and the site's own fields:
//   - A field of the site replaces that of defaults. Objects (network, ipvs, yurthub, report,
//     network.proxy) are merged field by field, labels and kubeletExtraArgs key by key. Lists
//     and credentials are replaced as a whole.
//   - One of caCertHashes, caCert, caFile and unsafeSkipCAVerification replaces all four of
//     them. One of ignition and ignitionFile replaces both.
//   - A field without a value ("vip:" or "vip: null") removes the default.
type Inventory struct {
	// APIVersion is the version of the document format.
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	// Kind is the kind of this document.
	Kind string `yaml:"kind" json:"kind" jsonschema:"enum=Inventory"`
	// Defaults are fields of a Site that apply to all sites. None of them is required here.
	Defaults Site `yaml:"defaults,omitempty" json:"defaults,omitempty"`
	// Sites has one entry per machine: name, match, and the fields of a Site
	// that differ from defaults.
	Sites []InventorySite `yaml:"sites" json:"sites"`

	merged *mergedInventory
}

// InventorySite is one machine of an Inventory.
type InventorySite struct {
	// Name identifies the site in the Inventory: lower-case letters, digits, -
	// and . (at most 63). Files made for the site have this name. The node has
	// it too, unless the site or defaults set nodeName. Default: nodeName,
	// which then must not be a template.
	Name string `yaml:"name,omitempty" json:"name,omitempty"`
	// Match selects the machine. Every member that is set must match.
	Match Match `yaml:"match" json:"match"`
	// Site is the whole Site: the defaults, changed by the fields that are set here.
	Site `yaml:",inline"`
}

// Match selects the machine of a site: all members that are set must match.
// Placeholders that vendors leave in the firmware ("To Be Filled By O.E.M.",
// zeros) are rejected, because many machines have them. No two sites may have
// the same member.
type Match struct {
	// MACs are MAC addresses of the machine's own network cards. One match is enough.
	MACs []string `yaml:"macs,omitempty" json:"macs,omitempty"`
	// Serial is the serial number in SMBIOS (of the product, else the board, else the chassis) or,
	// on boards without SMBIOS, in the device tree. Case does not matter. On Linux:
	// /sys/class/dmi/id/product_serial or /sys/firmware/devicetree/base/serial-number.
	Serial string `yaml:"serial,omitempty" json:"serial,omitempty"`
	// UUID is the system UUID in SMBIOS, e.g.
	// 4c4c4544-0042-3510-8052-c7c04f4e4232.
	UUID string `yaml:"uuid,omitempty" json:"uuid,omitempty"`
	// AssetTag is the asset tag in SMBIOS: that of the chassis, or else of the board.
	AssetTag string `yaml:"assetTag,omitempty" json:"assetTag,omitempty"`
}
