// Package ondisk is the contract between edgebake's programs: the paths, partition labels and JSON
// documents through which they communicate. It also has rules that several programs must compute in
// the same way (StampDates). It imports nothing from edgebake.
//
// Every document has a version. Readers reject versions that they do not know.
package ondisk

import (
	"net/netip"
	"time"
)

// GPT partition names, in the order of the partition table.
const (
	LabelESP   = "ESP"      // FAT32: loader, kernels, initrds, image.json
	LabelSlot  = "EDGEBAKE" // FAT16, FAT12 on 4Kn disks: one Site
	LabelRootA = "ROOT-A"   // ext4: the system
	LabelRootB = "ROOT-B"   // ext4: as large as ROOT-A, empty until the first update
	LabelData  = "DATA"     // ext4, last: mounted on /var, grown at first boot
)

// BootSpread is the maximum random delay between power-on and a machine's first request to the API
// servers. It spreads the load if many machines get power at the same time. A Site can set a longer
// one.
const BootSpread = 3 * time.Second

// Files in the slot (paths inside its FAT file system).
const (
	SlotMeta       = "edgebake.json" // SlotInfo
	SlotSite       = "site.yaml"
	SlotInventory  = "inventory.yaml"
	SlotIgnition   = "config.ign"
	SlotFilesDir   = "files"
	SlotPKIDir     = "pki"
	SlotReportText = "report.txt"
	SlotReportJSON = "report.json"
	// SlotSignature is the minisign signature of the Site's files
	// (slot.Digests). It is used only on removable devices.
	SlotSignature = "site.minisig"
	// SlotClaims is a file on a stick. In it, machines record which Site of the stick's Inventory
	// they use (slot.Claim).
	SlotClaims = "claims.txt"
	// SlotSize is the size of the slot in bytes.
	SlotSize = 16 << 20
	// SlotCapacity is the maximum total size of the Site's files in bytes. The rest of the slot is
	// for the reports and for the file system's own data.
	SlotCapacity = 15 << 20
)

// Loader is the path, inside the ESP, of the boot loader that UEFI starts by default. It is empty
// for an unknown architecture.
func Loader(arch string) string {
	return map[string]string{"amd64": "EFI/BOOT/BOOTX64.EFI", "arm64": "EFI/BOOT/BOOTAA64.EFI"}[arch]
}

// ESPImageInfo is the path of ImageInfo inside the ESP.
const ESPImageInfo = "edgebake/image.json"

// ESPSBOM is the path of the SBOM, an SPDX document, inside the ESP.
const ESPSBOM = "edgebake/sbom.spdx.json"

// The boot entry of the system on ROOT-A. systemd-boot boots the entry with the highest version
// within ESPSortKey that has tries left. An update's entry is named after its root partition, and
// its version is the highest on the ESP plus one, whatever the images' dates.
const (
	ESPEntryA       = "loader/entries/edgebake-a.conf"
	ESPSortKey      = "edgebake"
	ESPFirstVersion = 1
)

// Files on the ESP of an image for Raspberry Pi boards. The firmware reads ESPPiConfig, which names
// the directory of one system (os_prefix). That directory has the system's kernel, initrd, command
// line, device trees and overlays.
const (
	ESPPiConfig      = "config.txt"
	ESPPiCommandLine = "cmdline.txt"
)

// ESPSystemDir returns the directory, inside the ESP, of a system's kernel and initrd. Its name
// contains the plan's ID, because two systems may have kernels of the same release.
func ESPSystemDir(plan string) string { return "edgebake/" + plan[:min(16, len(plan))] }

// Paths on the node.
const (
	EtcDir         = "/etc/edgebake"
	IPVSConfig     = "/etc/edgebake/ipvs.json"        // IPVS; firstboot writes, ipvscare reads
	StateDir       = "/var/lib/edgebake"              // firstboot's state, on DATA
	StagedStore    = "/var/lib/edgebake/update/store" // container images of an update; see UnitMerge
	StateFile      = "/var/lib/edgebake/state.json"   // State
	SiteCopy       = "/var/lib/edgebake/site.yaml"    // the Site that was applied last, without its token; mode 0600
	MachineID      = "/var/lib/edgebake/machine-id"   // the machine ID, for a root file system that has none; the initrd also reads it
	PersistDir     = "/var/lib/edgebake/persist"      // files and directories on DATA that are bind-mounted or linked to from the root file system
	RunDir         = "/run/edgebake"                  // directory for secrets while they are needed
	RunMark        = "/run/edgebake-"                 // prefix of firstboot's marker files that last until shutdown; RunDir is removed when firstboot ends
	IPVSStateDir   = "/var/lib/ipvscare"              // ipvscare's state
	IPVSLearned    = "/var/lib/ipvscare/learned.json" // API servers learned from the cluster and from DNS
	IPVSRunDir     = "/run/ipvscare"                  // ipvscare's locks, sockets and records of its changes, 0700
	IPVSStarted    = "/run/ipvscare/started"          // exists if ipvscare must not delay its first requests: it has started since power-on, or first boot has just configured it
	HostsLock      = "/run/ipvscare/hosts.lock"       // locked with flock(2) while /etc/hosts is read and replaced
	LogDir         = "/var/log/edgebake"              // logs of convert and reset
	ImageInfoFile  = "/usr/share/edgebake/image.json" // ImageInfo of the running system, without partitions
	HealthyFile    = "/run/edgebake-healthy"          // exists if this boot works as well as the last one; UnitHealthy waits for it
	HeldFile       = "/run/edgebake-held"             // exists while it is undecided whether this boot works; UnitHealthy keeps waiting
	ImportImageDir = "/var/lib/edgebake/import"       // archives of image store mode "import"; each is removed after its import
	YurthubEnv     = "/etc/edgebake/yurthub.env"      // yurthub's arguments, for its unit
	ProxyEnv       = "/etc/edgebake/proxy.env"        // the Site's proxy, for containerd and kubelet
	KubeletConfig  = "/var/lib/kubelet/config.yaml"   // kubelet does not start without it
	KubernetesDir  = "/etc/kubernetes"                // files of kubeadm and kubelet, on DATA
	ManifestsDir   = "/etc/kubernetes/manifests"      // static pods
	KubeletConf    = "/etc/kubernetes/kubelet.conf"   // kubelet's credentials
	KubeCA         = "/etc/kubernetes/pki/ca.crt"     // the cluster's CA
	CRISocket      = "unix:///run/containerd/containerd.sock"
)

// systemd units in the image.
const (
	UnitFirstboot  = "firstboot.service"
	UnitAgain      = "firstboot-again.timer" // starts UnitFirstboot again later
	UnitIPVSCare   = "ipvscare.service"
	UnitKubelet    = "kubelet.service"
	UnitContainerd = "containerd.service"
	// UnitUpdateFinish completes an update once the new system is kept.
	UnitUpdateFinish = "edgebake-update-finish.service"
	// UnitHealthy waits until HealthyFile exists.
	UnitHealthy = "edgebake-healthy.service"
	// UnitOrders carries out the update that the cluster has ordered, if any. UnitOrdersTimer
	// starts it.
	UnitOrders      = "edgebake-orders.service"
	UnitOrdersTimer = "edgebake-orders.timer"
	// UnitMerge adds StagedStore to containerd's store while containerd is stopped.
	UnitMerge = "edgebake-merge.service"
)

// SlotInfoVersion is the version of SlotInfo.
const SlotInfoVersion = 1

// SlotInfo is edgebake.json in the slot. The builder writes it. Stamping changes only Stamped.
type SlotInfo struct {
	Version int `json:"version"`
	// Plan is the ID of the plan from which the image was built.
	Plan string `json:"plan"`
	// Golden is the golden digest of all partitions except the slot, in table order, as they are
	// before first boot: the SHA-256 over the SHA-256 of each 4 MiB block
	// (docs/decisions/0002-golden-digest.md).
	Golden string `json:"golden"`
	// Parts are the digests of the individual partitions, by label. They show which partition is
	// damaged. Older images have none.
	Parts        map[string]string `json:"parts,omitempty"`
	SiteVersions []string          `json:"siteVersions"`
	// SectorSize is the sector size of the disk and of the slot's file system. 0 means 512.
	SectorSize int64 `json:"sectorSize,omitempty"`
	// Signature is the minisign signature of the golden digest and image.json (slot.ImageMessage).
	// It is empty if the image is not signed.
	Signature string `json:"signature,omitempty"`
	// Stamped is the time at which the Site was written, in seconds since 1970; 0 in a golden image
	// and if unknown. The node's clock is never set to an earlier time, if Stamped is within
	// StampDates.
	Stamped int64 `json:"stamped,omitempty"`
}

// Values of ImageInfo.Removable, which determine when a machine accepts a Site on a removable
// device.
const (
	SitesNever         = "never"
	SitesUntilEnrolled = "untilEnrolled"
	SitesRepair        = "repair"
	SitesSigned        = "signed"
	SitesAlways        = "always"
)

// ImageInfoVersion is the version of ImageInfo.
const ImageInfoVersion = 1

// ImageInfo is image.json on the ESP and in the root file system. It describes the image and the
// Sites that the image supports. `edgebake stamp` rejects other Sites.
type ImageInfo struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	Plan    string `json:"plan"`
	Arch    string `json:"arch"`
	// Boards are the boards for which the image has drivers and whose own firmware starts the
	// kernel ("Raspberry Pi 4"). If it is empty, the image is for any machine of the architecture
	// with UEFI.
	Boards     []string `json:"boards,omitempty"`
	SourceDate int64    `json:"sourceDate"` // seconds since 1970
	// Removable determines when a machine accepts the Site on a stick. Empty means SitesRepair.
	Removable string `json:"removable,omitempty"`
	// SiteKeys are minisign public keys. A Site on a stick that is signed with one of them is
	// accepted as a whole, unless Removable is SitesNever.
	SiteKeys []string `json:"siteKeys,omitempty"`
	// SitesNotBefore is the earliest date, in seconds since 1970, of an accepted signature of a
	// Site. 0 means any date.
	SitesNotBefore int64 `json:"sitesNotBefore,omitempty"`
	// UpdateSerial orders images. A machine rejects an update whose serial is lower than its own.
	UpdateSerial int `json:"updateSerial,omitempty"`
	// UpdateKeys are minisign public keys. An update of this image must be signed with one of them.
	UpdateKeys []string `json:"updateKeys,omitempty"`
	// ControlPlaneUpdates is set if this image's first boot completes the update of a control-plane
	// node. Other control-plane nodes wait for that. Older images do not set it.
	ControlPlaneUpdates bool     `json:"controlPlaneUpdates,omitempty"`
	NodeTypes           []string `json:"nodeTypes"`
	SiteVersions        []string `json:"siteVersions"`
	// SiteFields lists the fields of a Site that first boot supports (configs.SiteFields). First
	// boot rejects Sites with other fields. Older images have no list.
	SiteFields []string `json:"siteFields,omitempty"`
	// InventoryVersions are the versions of Inventories that first boot supports.
	InventoryVersions []string `json:"inventoryVersions,omitempty"`
	Kubernetes        string   `json:"kubernetes"`            // "v1.36.3"
	Containerd        string   `json:"containerd"`            // "2.2.9"
	Kernel            string   `json:"kernel,omitempty"`      // uname -r
	Snapshotter       string   `json:"snapshotter,omitempty"` // "overlayfs"
	// PodCIDR is the CIDR from which the image itself assigns addresses to pods. It is empty if an
	// agent of the cluster assigns them.
	PodCIDR string `json:"podCIDR,omitempty"`
	// Images are the container images in the image.
	Images []ImageRef `json:"images,omitempty"`
	// Yurthub is set if the image supports OpenYurt nodes.
	Yurthub *YurthubInfo `json:"yurthub,omitempty"`
	// Partitions are the partitions of the disk, in table order. Only the copy on the ESP has them.
	Partitions []PartitionInfo `json:"partitions,omitempty"`
}

// minDate replaces an older sourceDate when StampDates computes the last date.
const minDate = 1767225600 // 2026-01-01

// StampDates returns the first and last date on which a Site may be stamped onto this image.
// Stamping rejects other dates, and first boot ignores them: a stamping computer whose clock is
// years ahead would otherwise set node clocks to a time when all certificates have expired.
func (i ImageInfo) StampDates() (first, last time.Time) {
	const day = 24 * time.Hour
	return time.Unix(i.SourceDate, 0).Add(-day).UTC(), time.Unix(max(i.SourceDate, minDate), 0).Add(4 * 365 * day).UTC()
}

// ImageRef is a container image in the image.
type ImageRef struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"` // "sha256:…" of the manifest
	Size   int64  `json:"size"`   // size of the unpacked image in bytes
}

// YurthubInfo describes how yurthub runs on this image.
type YurthubInfo struct {
	Version string `json:"version"` // "v1.7.0"
	Form    string `json:"form"`    // unit | staticPod
	// Image is yurthub's container image if Form is staticPod.
	Image string `json:"image,omitempty"`
	// LBMode is yurthub's --lb-mode.
	LBMode    string   `json:"lbMode"`
	ExtraArgs []string `json:"extraArgs,omitempty"`
}

// PartitionInfo describes a partition as it was built.
type PartitionInfo struct {
	Label string `json:"label"`
	GUID  string `json:"guid"` // PARTUUID, lower case
	FS    string `json:"fs,omitempty"`
	Start int64  `json:"start"` // bytes
	Size  int64  `json:"size"`  // bytes
	Used  int64  `json:"used,omitempty"`
	// FSSize is the size of the file system if that is smaller than the partition.
	FSSize int64 `json:"fsSize,omitempty"`
	// Room is the maximum size of the file system in bytes; the partition also stores data after the
	// file system. 0 means Size.
	Room int64 `json:"room,omitempty"`
}

// Files of an installer. edgebake writes them, and the installer program reads them.
const (
	// LabelInstall is the label of the partition on an installer stick that contains the image.
	LabelInstall = "EDGEBAKE-INSTALL"
	// InstallImage is the image on that partition. Its slot contains the Site.
	InstallImage = "image.raw.zst"
	// InstallDir is the directory in the initrd that contains the installer's files.
	InstallDir     = "/edgebake"
	InstallProgram = "/edgebake/installer"
	InstallConfig  = "/edgebake/install.json"
	InstallModules = "/edgebake/modules" // kernel modules that the initrd lacks
	InstallCA      = "/edgebake/ca.crt"  // CA certificates for servers with TLS
	// InstallArchive is a cpio archive of the installer's files, on the EFI system partition. The
	// boot loader loads it as an additional initrd.
	InstallArchive = "edgebake/installer.cpio"
	// InstallBootImage is the disk image that firmware downloads and boots.
	InstallBootImage = "boot.img"
	// InstallScript is the script that initramfs-tools runs for boot=edgebake, in place of mounting
	// a root file system.
	InstallScript = "/scripts/edgebake"
	InstallBoot   = "edgebake"
)

// Values of Install.Then.
const (
	ThenPowerOff = "poweroff"
	ThenReboot   = "reboot"
)

// InstallVersion is the version of Install.
const InstallVersion = 1

// Install is install.json in an installer's initrd. It contains no secret, because the Site is in
// the slot of the image.
type Install struct {
	Version int `json:"version"`
	// ID is a random hexadecimal ID of this installer. The GUIDs of its stick and of the installed
	// disks are derived from it.
	ID string `json:"id"`
	// Image is the name of the image, Golden its golden digest, and Slot the SHA-256 of its slot,
	// which contains the Site. The installer accepts no other image.
	Image  string `json:"image"`
	Golden string `json:"golden"`
	Slot   string `json:"slot"`
	// Need is the minimum size of the disk in bytes, and Sector the sector size of the disk in
	// bytes.
	Need   int64 `json:"need"`
	Sector int64 `json:"sector"`
	// Exactly one of Partition, Volume and URL is set. Partition is the PARTUUID of the partition
	// that contains InstallImage.
	Partition string `json:"partition,omitempty"`
	// Volume is the name of the ISO 9660 volume that contains InstallImage.
	Volume string `json:"volume,omitempty"`
	// URL is the URL of InstallImage on a server that supports range requests.
	URL string `json:"url,omitempty"`
	// Disk is the rule that selects the disk to overwrite (device.ParseRule).
	Disk string `json:"disk"`
	// Then is the action after installation: ThenPowerOff or ThenReboot.
	Then string `json:"then"`
	// Reinstall permits overwriting, once, a disk that already has an edgebake image or is part of
	// a RAID or similar.
	Reinstall bool `json:"reinstall,omitempty"`
}

// StateVersion is the version of State.
const StateVersion = 1

// Results of a run of firstboot.
const (
	ResultRunning = "running"
	ResultWaiting = "waiting" // a temporary failure
	ResultFailed  = "failed"  // a failure that a person must fix
	ResultDone    = "done"
)

// State is state.json. It reports what first boot has done; no program depends on it. It contains
// no secret.
type State struct {
	Version  int          `json:"version"`
	Plan     string       `json:"plan"`
	BootID   string       `json:"bootID"`
	Node     string       `json:"node"`
	NodeType string       `json:"nodeType,omitempty"`
	SiteMAC  string       `json:"siteMAC"` // HMAC of the Site document; detects changes
	Result   string       `json:"result"`
	Started  time.Time    `json:"started"`
	Updated  time.Time    `json:"updated"`
	Phases   []PhaseState `json:"phases"`
	// Notes describe problems that do not stop the node: parts of its Site that were not applied,
	// and why.
	Notes []string `json:"notes,omitempty"`
	// Boot has the start times of the parts of this boot. It is nil if systemd does not report
	// them.
	Boot *BootClock `json:"boot,omitempty"`
	// Update is set only when the state is displayed. It is nil if there is no update to report.
	Update *UpdateState `json:"update,omitempty"`
	// Order is set only by `firstboot status`. It is nil if the cluster ordered nothing, or the order
	// is done.
	Order *OrderState `json:"order,omitempty"`
}

// OrderState is the state of an order from the cluster, in the words of order.Answer.
type OrderState struct {
	Order  string `json:"order"`
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// Statuses of an update.
const (
	UpdateRunning     = "running"
	UpdateInterrupted = "interrupted" // repeating the same command continues it
	UpdatePending     = "pending"     // the new system runs after the next restart
	UpdateTrial       = "trial"       // the new system runs, but may still be given up
	UpdateFailed      = "failed"      // the machine returned to the old system after the last try
)

// UpdateState is the progress of an update of the machine's system.
type UpdateState struct {
	Status string `json:"status"`
	// Root is the partition of the new system.
	Root string `json:"root"`
	// The following fields are set only while an update runs. Fetched is the number of
	// bytes downloaded so far, out of Total. LeftSeconds is 0 if unknown.
	Image       string    `json:"image,omitempty"`
	Phase       string    `json:"phase,omitempty"`
	Detail      string    `json:"detail,omitempty"`
	Fetched     int64     `json:"fetched,omitempty"`
	Total       int64     `json:"total,omitempty"`
	LeftSeconds int64     `json:"leftSeconds,omitempty"`
	Updated     time.Time `json:"updated,omitzero"`
}

// BootClock has the start times of the parts of a boot in microseconds, as in the properties of
// systemd's manager (org.freedesktop.systemd1(5)). Firmware and Loader are times before the start
// of the kernel, the others times after it. 0 means unknown.
type BootClock struct {
	Firmware uint64 `json:"firmwareTimestampMonotonic,omitempty"`
	Loader   uint64 `json:"loaderTimestampMonotonic,omitempty"`
	// Kernel is the time at which the kernel started, in microseconds since 1970, according to the
	// clock at that moment.
	Kernel    uint64 `json:"kernelTimestamp,omitempty"`
	InitRD    uint64 `json:"initRDTimestampMonotonic,omitempty"`
	Userspace uint64 `json:"userspaceTimestampMonotonic,omitempty"`
	Finish    uint64 `json:"finishTimestampMonotonic,omitempty"`
	// FirstBoot is the time at which first boot started. systemd does not report it.
	FirstBoot uint64 `json:"firstBootMonotonic,omitempty"`
}

// Phase statuses.
const (
	PhasePending = "pending"
	PhaseRunning = "running"
	PhaseWaiting = "waiting"
	PhaseFailed  = "failed"
	PhaseDone    = "done"
)

// PhaseState is the state of one phase.
type PhaseState struct {
	Name     string    `json:"name"`
	Doc      string    `json:"doc,omitempty"`
	Status   string    `json:"status"`
	Attempts int       `json:"attempts"`
	Since    time.Time `json:"since,omitzero"` // time of the last change of the status
	Seconds  float64   `json:"seconds"`        // time spent in the phase so far
	Waiting  string    `json:"waiting,omitempty"`
	Error    string    `json:"error,omitempty"`
	Fix      string    `json:"fix,omitempty"`
}

// IPVSVersion is the version of IPVS.
const IPVSVersion = 1

// IPVS is ipvs.json: the virtual servers that ipvscare maintains.
type IPVS struct {
	Version int           `json:"version"`
	Servers []IPVSVirtual `json:"servers"`
}

// IPVSVirtual is one virtual server and its real servers.
type IPVSVirtual struct {
	VIP     string   `json:"vip"`     // "10.103.97.2:6443", "[fd00::2]:6443"
	Masters []string `json:"masters"` // "host:port"; host is an IP address or a DNS name
	// Host is the domain name that /etc/hosts maps to the VIP. It is also sent as SNI. It may be
	// empty.
	Host      string `json:"host,omitempty"`
	Scheduler string `json:"scheduler,omitempty"` // rr (default), wrr, lc, wlc, sh, dh
	// CAFile is the CA that verifies the API servers. Until the file exists, the health check
	// verifies no certificate.
	CAFile    string `json:"caFile,omitempty"`
	ProbePath string `json:"probePath,omitempty"` // default /readyz
	Profile   string `json:"profile,omitempty"`   // lan (default) | metered
	Rise      int    `json:"rise,omitempty"`      // default 2
	Fall      int    `json:"fall,omitempty"`      // default 2
	// SpreadSeconds is the time over which the cluster's nodes spread their first requests after
	// power-on, at least BootSpread. The nodes also spread their return to a recovered API server
	// over this time if another API server is up. 0 means BootSpread.
	SpreadSeconds int `json:"spreadSeconds,omitempty"`
	// LearnMasters allows the ConfigMap kube-public/edgebake-masters in the cluster to replace
	// Masters.
	LearnMasters bool `json:"learnMasters,omitempty"`
	// Joined is the cluster that the node joined; nil if unknown. An API server gets traffic
	// once it has shown one of these UIDs, or has hidden them for a long time.
	Joined *IPVSJoined `json:"joined,omitempty"`
}

// IPVSJoined identifies a cluster by UIDs. A cluster that is re-created with the same keys has other
// UIDs.
type IPVSJoined struct {
	ClusterInfo string `json:"clusterInfo"` // UID of kube-public/cluster-info
	Node        string `json:"node"`        // name of this machine's Node
	NodeUID     string `json:"nodeUID"`
	// ServiceUID is the UID of the Service default/kubernetes. It is empty if it was not recorded.
	ServiceUID string `json:"serviceUID,omitempty"`
}

// IPVSLearnedVersion is the version of IPVSLearnedList.
const IPVSLearnedVersion = 1

// IPVSLearnedList is learned.json: the API servers that ipvscare has learned. firstboot tries them
// too.
type IPVSLearnedList struct {
	Version int                  `json:"version"`
	Servers []IPVSLearnedVirtual `json:"servers"`
}

// IPVSLearnedVirtual has the learned API servers of one virtual server.
type IPVSLearnedVirtual struct {
	VIP string `json:"vip"`
	// Masters is the cluster's own list. It is used only while the configured list equals
	// Configured, so that a change of the configured list takes precedence.
	Configured []string `json:"configured,omitempty"`
	Masters    []string `json:"masters,omitempty"`
	// Names maps names to their last DNS answers.
	Names map[string][]netip.Addr `json:"names,omitempty"`
}

// ImportIndexFile is the name of ImportIndex in ImportImageDir.
const ImportIndexFile = "index.json"

// ImportIndexVersion is the version of ImportIndex.
const ImportIndexVersion = 1

// ImportIndex lists the archives of image store mode "import", in the order of their import. If the
// file of an archive is missing, the archive has been imported.
type ImportIndex struct {
	Version  int             `json:"version"`
	Archives []ImportArchive `json:"archives"`
}

// ImportArchive is an OCI archive with one image.
type ImportArchive struct {
	File     string `json:"file"` // in ImportImageDir
	Ref      string `json:"ref"`
	Digest   string `json:"digest"` // digest of the image
	SHA256   string `json:"sha256"` // SHA-256 of the file in hexadecimal
	Size     int64  `json:"size"`   // size of the file in bytes
	Platform string `json:"platform"`
	// Names are additional names that the image gets after its import. The CRI plugin needs such a
	// name to find an image by its digest.
	Names  []string          `json:"names"`
	Labels map[string]string `json:"labels"` // labels of the image under each of its names
}
