// Package ondisk is the contract between the programs: the paths, partition
// labels and JSON documents through which they communicate. They share nothing
// else. It imports nothing of ours and contains names and types, no logic.
//
// Every document carries a version; a reader rejects one it does not know.
package ondisk

import (
	"cmp"
	"net/netip"
	"time"
)

// GPT partition names, in the order of the table.
const (
	LabelESP   = "ESP"      // FAT32: loader, kernels, initrds, image.json
	LabelSlot  = "EDGEBAKE" // FAT16, FAT12 on 4Kn disks: one Site
	LabelRootA = "ROOT-A"   // ext4: the system
	LabelRootB = "ROOT-B"   // of the same size, empty until an update
	LabelData  = "DATA"     // ext4, last: mounted on /var, grown at first boot
)

// BootSpread bounds how long a machine waits after power-on before its first word
// to the API servers, for their sake when the power comes back in a thousand shops
// at once. A Site can set more.
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
	// SlotSignature signs the other files of the site (slot.Digests), in
	// minisign's format. It counts on removable devices only.
	SlotSignature = "site.minisig"
	// SlotClaims is where machines note on a stick which site of its inventory
	// they have taken (slot.Claim).
	SlotClaims = "claims.txt"
	// SlotSize is the slot's size in bytes, and the alignment of its
	// neighbours' frames in a compressed image.
	SlotSize = 16 << 20
	// SlotRoom is what the site's files may have together; the rest of the
	// slot is for the reports and the file system itself.
	SlotRoom = 15 << 20
)

// ESPImageInfo is the path of ImageInfo inside the ESP.
const ESPImageInfo = "edgebake/image.json"

// ESPSBOM is the path of the SPDX document inside the ESP.
const ESPSBOM = "edgebake/sbom.spdx.json"

// The boot entry of the system on ROOT-A. Of the entries with tries left
// systemd-boot takes the one with the highest version within ESPSortKey: an
// update's entry has one more than the highest on the ESP, whatever the dates
// of the two images, and is named for its root partition.
const (
	ESPEntryA       = "loader/entries/edgebake-a.conf"
	ESPSortKey      = "edgebake"
	ESPFirstVersion = 1
)

// Files on the ESP of an image for Raspberry Pi boards, whose firmware reads
// ESPPiConfig. That names the directory of a system (os_prefix), in which are its
// kernel, initrd and command line, the device trees and overlays.
const (
	ESPPiConfig      = "config.txt"
	ESPPiCommandLine = "cmdline.txt"
)

// ESPSystemDir is the directory of a system's kernel and initrd inside the ESP.
// It is named by plan: two systems may have kernels of the same release.
func ESPSystemDir(plan string) string { return "edgebake/" + plan[:min(16, len(plan))] }

// Paths on the node.
const (
	EtcDir         = "/etc/edgebake"
	IPVSConfig     = "/etc/edgebake/ipvs.json"        // IPVS; firstboot writes, ipvscare reads
	StateDir       = "/var/lib/edgebake"              // firstboot's own, on DATA
	StagedStore    = "/var/lib/edgebake/update/store" // container images of an update: see UnitMerge
	StateFile      = "/var/lib/edgebake/state.json"   // State
	SiteCopy       = "/var/lib/edgebake/site.yaml"    // the site last taken, without its token, 0600
	MachineID      = "/var/lib/edgebake/machine-id"   // the machine's, for a root that has none; also read in the initrd
	PersistDir     = "/var/lib/edgebake/persist"      // what is bind-mounted out of DATA, or linked to
	RunDir         = "/run/edgebake"                  // secrets, for as long as they are needed
	RunMark        = "/run/edgebake-"                 // begins the paths of firstboot's marks that last until the machine is switched off: RunDir goes when firstboot ends
	IPVSStateDir   = "/var/lib/ipvscare"              // ipvscare's own
	IPVSLearned    = "/var/lib/ipvscare/learned.json" // API servers learned from the cluster and from DNS
	IPVSRunDir     = "/run/ipvscare"                  // ipvscare's own, 0700: locks, sockets, what was made
	HostsLock      = "/run/ipvscare/hosts.lock"       // held by flock(2) while /etc/hosts is read and replaced
	LogDir         = "/var/log/edgebake"              // evidence of convert and reset
	ImageInfoFile  = "/usr/share/edgebake/image.json" // ImageInfo of the running system, without partitions
	HealthyFile    = "/run/edgebake-healthy"          // this boot is as good as the last: UnitHealthy waits for it
	HeldFile       = "/run/edgebake-held"             // nobody can tell yet whether it is: UnitHealthy goes on waiting
	ImportImageDir = "/var/lib/edgebake/import"       // archives of mode "import", removed once imported
	YurthubEnv     = "/etc/edgebake/yurthub.env"      // yurthub's arguments, for its unit
	ProxyEnv       = "/etc/edgebake/proxy.env"        // the Site's proxy, for containerd and kubelet
	KubeletConfig  = "/var/lib/kubelet/config.yaml"   // kubelet is held by its absence
	KubernetesDir  = "/etc/kubernetes"                // kubeadm's and kubelet's, on DATA
	ManifestsDir   = "/etc/kubernetes/manifests"      // static pods
	KubeletConf    = "/etc/kubernetes/kubelet.conf"   // kubelet's credentials
	KubeCA         = "/etc/kubernetes/pki/ca.crt"     // the cluster's CA
	CRISocket      = "unix:///run/containerd/containerd.sock"
)

// systemd units that the image carries.
const (
	UnitFirstboot = "firstboot.service"
	UnitAgain     = "firstboot-again.timer" // runs first boot once more
	UnitIPVSCare  = "ipvscare.service"
	UnitKubelet   = "kubelet.service"
	// UnitRelease ends an update once the system is kept.
	UnitRelease = "edgebake-release.service"
	// UnitHealthy ends once firstboot has written HealthyFile.
	UnitHealthy = "edgebake-healthy.service"
	// UnitMerge adds StagedStore to containerd's store, and stops containerd meanwhile.
	UnitMerge = "edgebake-merge.service"
)

// SlotInfoVersion is the version of SlotInfo.
const SlotInfoVersion = 1

// SlotInfo is edgebake.json in the slot. The builder writes it; stamping
// keeps it but for Stamped.
type SlotInfo struct {
	Version int `json:"version"`
	// Plan is the id of the plan the image was built from.
	Plan string `json:"plan"`
	// Golden is the digest of all partitions but the slot, in table order,
	// before first boot: SHA-256 over the SHA-256 of each 4 MiB of them
	// (docs/decisions/0002-golden-digest.md).
	Golden string `json:"golden"`
	// Parts are the digests of the same partitions by themselves, by label: they
	// say which one is damaged. Older images have none.
	Parts        map[string]string `json:"parts,omitempty"`
	SiteVersions []string          `json:"siteVersions"`
	// SectorSize is that of the disk, and so of the slot's file system; 0: 512.
	SectorSize int64 `json:"sectorSize,omitempty"`
	// Signature is minisign's, over the golden digest and image.json
	// (slot.ImageMessage); empty: the image is not signed.
	Signature string `json:"signature,omitempty"`
	// Stamped is when the site was written, in seconds since the epoch; 0 in
	// a golden image and without a date. It is one of the floors of the node's
	// clock, if it lies within the image's StampDates.
	Stamped int64 `json:"stamped,omitempty"`
}

// What a machine takes of the sites on removable devices.
const (
	SitesNever         = "never"
	SitesUntilEnrolled = "untilEnrolled"
	SitesRepair        = "repair"
	SitesSigned        = "signed"
	SitesAlways        = "always"
)

// ImageInfoVersion is the version of ImageInfo.
const ImageInfoVersion = 1

// ImageInfo is image.json on the ESP and in the root file system: what this
// image is and which sites it can serve. `stamp` rejects what it cannot.
type ImageInfo struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
	Plan    string `json:"plan"`
	Arch    string `json:"arch"`
	// Boards are the boards whose own firmware starts the kernel, and which it
	// has drivers for: "Raspberry Pi 4". Empty: any machine of the architecture
	// with UEFI.
	Boards     []string `json:"boards,omitempty"`
	SourceDate int64    `json:"sourceDate"` // seconds since the epoch
	// Removable is what a machine takes of the site on a stick; empty: repair.
	Removable string `json:"removable,omitempty"`
	// SiteKeys are the minisign public keys whose signatures admit a whole
	// Site on a stick.
	SiteKeys []string `json:"siteKeys,omitempty"`
	// SitesNotBefore is when a Site must have been signed at the earliest, in seconds
	// since the epoch; 0: at any time.
	SitesNotBefore int64 `json:"sitesNotBefore,omitempty"`
	// UpdateSerial orders images: a machine takes no image with a lower one than its own.
	UpdateSerial int `json:"updateSerial,omitempty"`
	// UpdateKeys are the minisign public keys one of which must have signed an update of
	// this image.
	UpdateKeys   []string `json:"updateKeys,omitempty"`
	NodeTypes    []string `json:"nodeTypes"`
	SiteVersions []string `json:"siteVersions"`
	// SiteFields are the fields of Sites that first boot knows (configs.SiteFields); it
	// rejects others. Older images have no list.
	SiteFields []string `json:"siteFields,omitempty"`
	// InventoryVersions are those of the inventories that first boot reads.
	InventoryVersions []string `json:"inventoryVersions,omitempty"`
	Kubernetes        string   `json:"kubernetes"`       // "v1.36.3"
	Containerd        string   `json:"containerd"`       // "2.2.9"
	Kernel            string   `json:"kernel,omitempty"` // uname -r
	Snapshotter       string   `json:"snapshotter,omitempty"`
	// PodCIDR is where the image itself gives pods their addresses; empty
	// where an agent of the cluster does.
	PodCIDR string `json:"podCIDR,omitempty"`
	// Images are the container images on board.
	Images []ImageRef `json:"images,omitempty"`
	// Yurthub is set where the image can make OpenYurt nodes.
	Yurthub *YurthubInfo `json:"yurthub,omitempty"`
	// Partitions of the disk, in table order; on the ESP only.
	Partitions []PartitionInfo `json:"partitions,omitempty"`
}

// SnapshotterName is the snapshotter that the container images are unpacked for.
func (i ImageInfo) SnapshotterName() string { return cmp.Or(i.Snapshotter, "overlayfs") }

// release is a moment before the first image of this kind was made, for images
// whose sourceDate is set back.
const release = 1767225600 // 2026-01-01

// StampDates are the first and the last date that a Site stamped onto this
// image may carry. A computer whose clock is years ahead would otherwise put
// every node into a future where all certificates have expired. Stamping
// rejects other dates, and first boot ignores them.
func (i ImageInfo) StampDates() (first, last time.Time) {
	const day = 24 * time.Hour
	return time.Unix(i.SourceDate, 0).Add(-day).UTC(), time.Unix(max(i.SourceDate, release), 0).Add(4 * 365 * day).UTC()
}

// ImageRef is one container image on board.
type ImageRef struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"` // "sha256:…" of the manifest
	Size   int64  `json:"size"`   // unpacked bytes
}

// YurthubInfo says how yurthub runs on this image.
type YurthubInfo struct {
	Version string `json:"version"` // "v1.7.0"
	Form    string `json:"form"`    // unit | staticPod
	// Image is the container image of form staticPod.
	Image string `json:"image,omitempty"`
	// LBMode is yurthub's --lb-mode.
	LBMode    string   `json:"lbMode"`
	ExtraArgs []string `json:"extraArgs,omitempty"`
}

// PartitionInfo is one partition as it was built.
type PartitionInfo struct {
	Label string `json:"label"`
	GUID  string `json:"guid"` // PARTUUID, lower case
	FS    string `json:"fs,omitempty"`
	Start int64  `json:"start"` // bytes
	Size  int64  `json:"size"`  // bytes
	Used  int64  `json:"used,omitempty"`
	// FSSize is the size of the file system where the partition is larger.
	FSSize int64 `json:"fsSize,omitempty"`
	// Room is the largest file system that the partition takes with all that
	// may have to stand behind it; 0: Size.
	Room int64 `json:"room,omitempty"`
}

// What an installer has: edgebake makes it, the program installer on board
// reads it.
const (
	// LabelInstall is the partition of an installer's stick that has the image.
	LabelInstall = "EDGEBAKE-INSTALL"
	// InstallImage is the image there, with the Site in its slot.
	InstallImage = "image.raw.zst"
	// InstallDir is the directory of the initrd that has the installer's files.
	InstallDir     = "/edgebake"
	InstallProgram = "/edgebake/installer"
	InstallConfig  = "/edgebake/install.json"
	InstallModules = "/edgebake/modules" // kernel modules that the initrd lacks
	InstallCA      = "/edgebake/ca.crt"  // for servers with TLS
	// InstallArchive is the initrd with all that, on the EFI system partition.
	InstallArchive = "edgebake/installer.cpio"
	// InstallBootImage is the disk that firmware fetches and starts.
	InstallBootImage = "boot.img"
	// InstallScript is what initramfs-tools runs for boot=edgebake, instead of
	// mounting a root.
	InstallScript = "/scripts/edgebake"
	InstallBoot   = "edgebake"
)

// What an installer does once the disk is installed.
const (
	ThenPowerOff = "poweroff"
	ThenReboot   = "reboot"
)

// InstallVersion is the version of Install.
const InstallVersion = 1

// Install is install.json in an installer's initrd. It holds no secret: the Site
// is in the slot of the image.
type Install struct {
	Version int `json:"version"`
	// ID of this installer, hex, random: the GUIDs of its stick, and of the disks
	// it installs, follow from it.
	ID string `json:"id"`
	// Image is the name of the image, Golden its digest, and Slot the SHA-256 of
	// its slot with the Site in it: nothing else is installed.
	Image  string `json:"image"`
	Golden string `json:"golden"`
	Slot   string `json:"slot"`
	// Need is how large the disk must be, and Sector the size of its sectors, in
	// bytes.
	Need   int64 `json:"need"`
	Sector int64 `json:"sector"`
	// One of the next three says where InstallImage is. Partition is the PARTUUID
	// of the partition that has it.
	Partition string `json:"partition,omitempty"`
	// Volume is the name of the ISO 9660 volume that has InstallImage.
	Volume string `json:"volume,omitempty"`
	// URL is where InstallImage is fetched from, by ranges.
	URL string `json:"url,omitempty"`
	// Disk is the rule by which the disk is chosen (device.ParseRule).
	Disk string `json:"disk"`
	// Then is what follows: ThenPowerOff or ThenReboot.
	Then string `json:"then"`
	// Reinstall overwrites a disk that has an edgebake image already, or is part
	// of a RAID or the like; once.
	Reinstall bool `json:"reinstall,omitempty"`
}

// StateVersion is the version of State.
const StateVersion = 1

// Results of a run of firstboot.
const (
	ResultRunning = "running"
	ResultWaiting = "waiting" // a transient failure
	ResultFailed  = "failed"  // a failure that only a person can fix
	ResultDone    = "done"
)

// State is state.json: it explains what happened, it never decides what
// happens next. It holds no secret.
type State struct {
	Version  int          `json:"version"`
	Plan     string       `json:"plan"`
	BootID   string       `json:"bootID"`
	Node     string       `json:"node"`
	NodeType string       `json:"nodeType,omitempty"`
	SiteMAC  string       `json:"siteMAC"` // HMAC of the site document; notices corrections
	Result   string       `json:"result"`
	Started  time.Time    `json:"started"`
	Updated  time.Time    `json:"updated"`
	Phases   []PhaseState `json:"phases"`
	// Notes are what a person should know of a node that goes on: what of its
	// site is not in place, and why.
	Notes []string `json:"notes,omitempty"`
	// Boot is when the parts of this boot began; nil where systemd does not tell.
	Boot *BootClock `json:"boot,omitempty"`
	// Update is filled in when the state is shown; nil: there is nothing to say.
	Update *UpdateState `json:"update,omitempty"`
}

// Statuses of an update.
const (
	UpdateRunning     = "running"
	UpdateInterrupted = "interrupted" // the same command continues it
	UpdatePending     = "pending"     // the new system runs after the next restart
	UpdateTrial       = "trial"       // the new system runs, and is not kept yet
	UpdateFailed      = "failed"      // the new system was left after its last try
)

// UpdateState is how far an update of the machine's system is.
type UpdateState struct {
	Status string `json:"status"`
	// Root is the partition of the new system.
	Root string `json:"root"`
	// The others are of an update that runs. Fetched and Total count the bytes that come
	// over the network; LeftSeconds is 0 where it is not known.
	Image       string    `json:"image,omitempty"`
	Phase       string    `json:"phase,omitempty"`
	Detail      string    `json:"detail,omitempty"`
	Fetched     int64     `json:"fetched,omitempty"`
	Total       int64     `json:"total,omitempty"`
	LeftSeconds int64     `json:"leftSeconds,omitempty"`
	Updated     time.Time `json:"updated,omitzero"`
}

// BootClock is when the parts of a boot began, in microseconds, as systemd's
// manager tells in its properties of the same names (org.freedesktop.systemd1(5)).
// Firmware and Loader count back from the kernel's start, the others on from it.
// 0: not known.
type BootClock struct {
	Firmware uint64 `json:"firmwareTimestampMonotonic,omitempty"`
	Loader   uint64 `json:"loaderTimestampMonotonic,omitempty"`
	// Kernel is the start of the kernel by the clock of then, in microseconds
	// since 1970.
	Kernel    uint64 `json:"kernelTimestamp,omitempty"`
	InitRD    uint64 `json:"initRDTimestampMonotonic,omitempty"`
	Userspace uint64 `json:"userspaceTimestampMonotonic,omitempty"`
	Finish    uint64 `json:"finishTimestampMonotonic,omitempty"`
	// FirstBoot is when first boot began, which systemd does not tell.
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

// PhaseState is one phase's part of State.
type PhaseState struct {
	Name     string    `json:"name"`
	Doc      string    `json:"doc,omitempty"`
	Status   string    `json:"status"`
	Attempts int       `json:"attempts"`
	Since    time.Time `json:"since,omitzero"` // of the status
	Seconds  float64   `json:"seconds"`        // spent in the phase so far
	Waiting  string    `json:"waiting,omitempty"`
	Error    string    `json:"error,omitempty"`
	Fix      string    `json:"fix,omitempty"`
}

// IPVSVersion is the version of IPVS.
const IPVSVersion = 1

// IPVS is ipvs.json: the virtual servers ipvscare keeps.
type IPVS struct {
	Version int           `json:"version"`
	Servers []IPVSVirtual `json:"servers"`
}

// IPVSVirtual is one virtual server and what stands behind it.
type IPVSVirtual struct {
	VIP     string   `json:"vip"`     // "10.103.97.2:6443", "[fd00::2]:6443"
	Masters []string `json:"masters"` // "host:port"; host is an IP or a DNS name
	// Host is the domain name kept in /etc/hosts for the VIP and sent as
	// SNI; empty: none is kept.
	Host      string `json:"host,omitempty"`
	Scheduler string `json:"scheduler,omitempty"` // rr (default), wrr, lc, wlc, sh, dh
	// CAFile verifies the API servers. Until the file exists, health is a TCP
	// connect.
	CAFile    string `json:"caFile,omitempty"`
	ProbePath string `json:"probePath,omitempty"` // default /readyz
	Profile   string `json:"profile,omitempty"`   // lan (default) | metered
	Rise      int    `json:"rise,omitempty"`      // default 2
	Fall      int    `json:"fall,omitempty"`      // default 2
	// SpreadSeconds is the time over which the cluster's nodes spread their first
	// requests after power-on, BootSpread at least, and their return to an API server
	// that they can do without. 0: as short as possible.
	SpreadSeconds int `json:"spreadSeconds,omitempty"`
	// LearnMasters lets the cluster's ConfigMap kube-public/edgebake-masters
	// replace Masters.
	LearnMasters bool `json:"learnMasters,omitempty"`
	// Joined is the cluster that the node joined; nil: none is known. An API
	// server gets no traffic until it has shown one of the UIDs.
	Joined *IPVSJoined `json:"joined,omitempty"`
}

// IPVSJoined identifies a cluster by UIDs, which no other cluster has: not even one
// that was born again with the same keys.
type IPVSJoined struct {
	ClusterInfo string `json:"clusterInfo"` // UID of kube-public/cluster-info
	Node        string `json:"node"`        // this machine's Node
	NodeUID     string `json:"nodeUID"`
	// ServiceUID is the UID of the Service default/kubernetes; "": it was not noted.
	ServiceUID string `json:"serviceUID,omitempty"`
}

// IPVSLearnedVersion is the version of IPVSLearnedList.
const IPVSLearnedVersion = 1

// IPVSLearnedList is learned.json: what ipvscare has learned and firstboot tries too.
type IPVSLearnedList struct {
	Version int                  `json:"version"`
	Servers []IPVSLearnedVirtual `json:"servers"`
}

// IPVSLearnedVirtual is what was learned for one virtual server.
type IPVSLearnedVirtual struct {
	VIP string `json:"vip"`
	// Masters is the cluster's list. It holds as long as the configured list
	// is the one it was learned beside: a person who changes the configuration
	// means it.
	Configured []string `json:"configured,omitempty"`
	Masters    []string `json:"masters,omitempty"`
	// Names are the last answers of DNS.
	Names map[string][]netip.Addr `json:"names,omitempty"`
}

// ImportIndexFile is the name of ImportIndex in ImportImageDir.
const ImportIndexFile = "index.json"

// ImportIndexVersion is the version of ImportIndex.
const ImportIndexVersion = 1

// ImportIndex lists the archives of mode "import", in the order in which they
// are to be imported. An archive whose file is gone was imported.
type ImportIndex struct {
	Version  int             `json:"version"`
	Archives []ImportArchive `json:"archives"`
}

// ImportArchive is one OCI archive, holding one image under its whole name.
type ImportArchive struct {
	File     string `json:"file"` // in ImportImageDir
	Ref      string `json:"ref"`
	Digest   string `json:"digest"` // of the image
	SHA256   string `json:"sha256"` // of the file, hex
	Size     int64  `json:"size"`   // of the file
	Platform string `json:"platform"`
	// Names are to be given to the image beside Ref, once imported: the CRI
	// plugin finds a repository's digest by such a name.
	Names  []string          `json:"names"`
	Labels map[string]string `json:"labels"` // for the image under each of its names
}
