package configs

import (
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/templates"
)

// Image describes the contents of a golden image. It contains no secrets and nothing that
// differs between sites. Relative paths are relative to the directory of the Image's file.
type Image struct {
	// APIVersion is the version of the document format.
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	// Kind is the kind of this document.
	Kind string `yaml:"kind" json:"kind" jsonschema:"enum=Image"`
	// Name is the image's name: lower-case letters, digits, -, _ and ., at
	// most 63.
	Name string `yaml:"name" json:"name" check:"imageName"`
	// Arch is the processor architecture of the machines, amd64 or arm64. With a list, e.g.
	// [amd64, arm64], a build makes an image for each architecture, NAME-ARCH.raw. In paths of the
	// Image, {arch} is replaced by the architecture.
	Arch string `yaml:"arch,omitempty" json:"arch,omitempty" jsonschema:"enum=amd64,enum=arm64,default=amd64" list:"too"`
	// SourceDate is the date (RFC 3339) of all files that have no date of their own, so that a
	// second build gives the same bytes. The node's clock never shows an earlier time. Set it
	// once, to the current date.
	SourceDate string `yaml:"sourceDate,omitempty" json:"sourceDate,omitempty" jsonschema:"default=2026-01-01T00:00:00Z"`
	// Hardware selects the kernel and the firmware. cloud is a small kernel for virtual machines.
	// generic has the drivers, firmware and microcode of real machines with UEFI. raspberry-pi
	// (arm64) is for Raspberry Pi boards, which have no UEFI: the 4, and the 5 if the kernel has
	// its drivers.
	Hardware string `yaml:"hardware,omitempty" json:"hardware,omitempty" jsonschema:"enum=cloud,enum=generic,enum=raspberry-pi,default=cloud"`
	// NodeTypes are the node types that Sites may choose. Default: native, and
	// with yurthub also edge and cloud. control-plane needs the control plane's
	// container images in images.
	NodeTypes []string `yaml:"nodeTypes,omitempty" json:"nodeTypes,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud,enum=control-plane" unique:"yes"`

	// Base is the root file system to start from.
	Base Base `yaml:"base" json:"base"`
	// Kubernetes is the node's kubelet and kubeadm.
	Kubernetes Kubernetes `yaml:"kubernetes" json:"kubernetes"`
	// Containerd is the container runtime.
	Containerd Containerd `yaml:"containerd" json:"containerd"`
	// CNI is pod networking.
	CNI CNI `yaml:"cni,omitempty" json:"cni,omitempty"`
	// Yurthub makes OpenYurt nodes possible (node types edge and cloud).
	Yurthub *Yurthub `yaml:"yurthub,omitempty" json:"yurthub,omitempty"`

	// Sites sets where a node's Site may come from.
	Sites Sites `yaml:"sites,omitempty" json:"sites,omitempty"`

	// Updates sets which images may replace this one on a machine.
	Updates Updates `yaml:"updates,omitempty" json:"updates,omitzero"`

	// Images are the container images to include in the image; they run without
	// a registry.
	Images []ContainerImage `yaml:"images,omitempty" json:"images,omitempty" unique:"ref"`
	// ImagesFrom lists Kubernetes manifests (paths or patterns, e.g.
	// manifests/*.yaml) whose images are included too.
	ImagesFrom []string `yaml:"imagesFrom,omitempty" json:"imagesFrom,omitempty" check:"manifestPattern" path:"pattern"`
	// ImagesIgnore lists images in these manifests that nodes do not need, as
	// references or patterns (quay.io/prometheus/*).
	ImagesIgnore []string `yaml:"imagesIgnore,omitempty" json:"imagesIgnore,omitempty" check:"imagePattern"`
	// ImageStore sets how container images are stored.
	ImageStore ImageStore `yaml:"imageStore,omitempty" json:"imageStore,omitempty"`
	// Registries sets how registries are reached while building.
	Registries []Registry `yaml:"registries,omitempty" json:"registries,omitempty" unique:"host"`

	// Overlays are directories copied over the root file system, in order.
	Overlays []Overlay `yaml:"overlays,omitempty" json:"overlays,omitempty" unique:"dir"`
	// Files are single files added after the overlays.
	Files []File `yaml:"files,omitempty" json:"files,omitempty"`
	// Kernel sets the kernel's command line, modules and sysctls.
	Kernel Kernel `yaml:"kernel,omitempty" json:"kernel,omitempty"`
	// Disk sets the partitions of the disk image.
	Disk Disk `yaml:"disk,omitempty" json:"disk,omitempty"`
	// Agents replaces the programs for the node that come with edgebake.
	Agents Agents `yaml:"agents,omitempty" json:"agents,omitempty"`
}

// Sites sets where the node's Site may come from, in addition to its own disk.
type Sites struct {
	// Removable sets which parts of a Site on a USB stick or card a machine
	// accepts. never: none, and no update from a stick starts automatically.
	// untilEnrolled: the whole Site until the machine has joined, then none.
	// repair: the whole Site until the machine has joined, then API servers,
	// network (without the proxy and time servers) and token. signed: only a
	// Site that is signed with one of keys. always: the whole Site. Except with
	// never, a Site that is signed with one of keys is always accepted
	// completely.
	Removable string `yaml:"removable,omitempty" json:"removable,omitempty" jsonschema:"enum=never,enum=untilEnrolled,enum=repair,enum=signed,enum=always,default=repair"`
	// Keys are minisign public keys, each the second line of the file that
	// minisign -G writes. edgebake site sign signs Sites for sticks.
	Keys []string `yaml:"keys,omitempty" json:"keys,omitempty"`
	// NotBefore is a date (RFC 3339, e.g. 2026-11-30T00:00:00Z). A Site on a stick that was signed
	// before it is rejected. Set it in a new image if a signed stick is lost.
	NotBefore string `yaml:"notBefore,omitempty" json:"notBefore,omitempty"`
}

// Updates sets which images may replace this one on a machine.
type Updates struct {
	// Serial orders images: a machine rejects an image whose serial is lower than that of its own
	// image. Raise it in each image that must not be replaced by an earlier one, e.g. after a
	// security fix.
	Serial int `yaml:"serial,omitempty" json:"serial,omitempty" jsonschema:"minimum=0,maximum=2147483647"`
	// Keys are minisign public keys, each the second line of the file that
	// minisign -G writes. A machine with this image accepts only updates that
	// are signed with one of them (edgebake build --sign).
	Keys []string `yaml:"keys,omitempty" json:"keys,omitempty"`
}

// Base is the root file system to start from; exactly one member is set.
type Base struct {
	// Debian is made from Debian packages by mmdebstrap, without root.
	Debian *DebianBase `yaml:"debian,omitempty" json:"debian,omitempty" oneof:"one"`
	// OCI is the flattened file system of a container image.
	OCI *OCISource `yaml:"oci,omitempty" json:"oci,omitempty" oneof:"one"`
	// Tar is a root file system in a tar archive.
	Tar *FileSource `yaml:"tar,omitempty" json:"tar,omitempty" oneof:"one"`
}

// DebianBase is made by mmdebstrap.
type DebianBase struct {
	// Suite is the name of the Debian release.
	Suite string `yaml:"suite,omitempty" json:"suite,omitempty" jsonschema:"default=trixie" check:"suite"`
	// Sources are lines for sources.list (deb URI SUITE COMPONENT). Default:
	// the distribution's own mirror.
	Sources []string `yaml:"sources,omitempty" json:"sources,omitempty" check:"aptSource"`
	// Keyrings are files with the keys that verify sources.
	Keyrings []string `yaml:"keyrings,omitempty" json:"keyrings,omitempty" check:"path" path:"file"`
	// Packages are installed in addition to those that edgebake needs: NAME,
	// NAME=VERSION or NAME/SUITE, followed by " [ARCH]" for one architecture
	// only.
	Packages []string `yaml:"packages,omitempty" json:"packages,omitempty" check:"package" unique:"yes"`
	// Run lists shell commands that run inside the base, in order, after all
	// packages are installed. The first one that fails ends the build.
	Run []string `yaml:"run,omitempty" json:"run,omitempty" text:"lines" check:"command"`
}

// OCISource is a container image; exactly one of ref, layout and archive is
// set.
type OCISource struct {
	// Ref is an image in a registry: REGISTRY/PATH:TAG.
	Ref string `yaml:"ref,omitempty" json:"ref,omitempty" check:"imageRef" oneof:"one"`
	// Layout is a directory in the OCI image layout.
	Layout string `yaml:"layout,omitempty" json:"layout,omitempty" oneof:"one" path:"layout"`
	// Archive is a tar of an OCI image layout, or of docker save.
	Archive string `yaml:"archive,omitempty" json:"archive,omitempty" oneof:"one" path:"file"`
	// Digest pins the manifest or index: sha256:<hex>. Without it image.lock
	// pins the digest that was found.
	Digest string `yaml:"digest,omitempty" json:"digest,omitempty" check:"digest"`
}

// FileSource is one file, by path or URL; exactly one of the two is set.
type FileSource struct {
	// File is a path.
	File string `yaml:"file,omitempty" json:"file,omitempty" oneof:"one" path:"file"`
	// URL is downloaded while building.
	URL string `yaml:"url,omitempty" json:"url,omitempty" check:"download" oneof:"one" path:"url"`
	// SHA256 is the file's digest, 64 hexadecimal digits; required with url.
	SHA256 string `yaml:"sha256,omitempty" json:"sha256,omitempty" check:"sha256"`
}

// Source is where programs come from; exactly one member is set.
type Source struct {
	// GoModule compiles the programs from the Go module proxy: goModule: {}.
	GoModule *GoModuleSource `yaml:"goModule,omitempty" json:"goModule,omitempty" oneof:"one"`
	// URL downloads the programs from a release server or a mirror, which must have these files
	// for each version: BASE/v1.37.2/bin/linux/amd64/kubelet (and kubeadm) for Kubernetes,
	// BASE/v2.3.7/containerd-2.3.7-linux-amd64.tar.gz for containerd,
	// BASE/v1.37.0/crictl-v1.37.0-linux-amd64.tar.gz for crictl.
	URL *URLSource `yaml:"url,omitempty" json:"url,omitempty" oneof:"one"`
	// File copies the programs from a directory, or from the directory bin in
	// it. The files must have the programs' names: kubelet, kubeadm and so on.
	File *DirSource `yaml:"file,omitempty" json:"file,omitempty" oneof:"one"`
}

// GoModuleSource has no settings: edgebake determines the module and version.
type GoModuleSource struct{}

// URLSource is a release server, or a mirror with the same directories.
type URLSource struct {
	// Base is the URL that contains a directory for each version.
	Base string `yaml:"base" json:"base" check:"download"`
	// SHA256 maps file names, or ARCH/NAME if the name does not contain the
	// architecture, to digests.
	SHA256 map[string]string `yaml:"sha256,omitempty" json:"sha256,omitempty"`
	// SHA256FromServer gets digests that are not in sha256 from the server
	// (FILE.sha256), over HTTPS, at the first download; image.lock pins them
	// afterwards.
	SHA256FromServer bool `yaml:"sha256FromServer,omitempty" json:"sha256FromServer,omitempty"`
}

// DirSource is a directory of programs.
type DirSource struct {
	// Dir is the directory's path.
	Dir string `yaml:"dir" json:"dir" path:"programs"`
	// SHA256 maps file names, or ARCH/NAME, to digests; a file without one is
	// not checked.
	SHA256 map[string]string `yaml:"sha256,omitempty" json:"sha256,omitempty"`
}

// Kubernetes sets the version of kubelet and kubeadm and where they come from.
type Kubernetes struct {
	// Version, e.g. v1.37.2: v1.30 or later. With yurthub 1.6 it must be
	// v1.30.
	Version string `yaml:"version" json:"version"`
	// Source is where kubelet and kubeadm come from.
	Source Source `yaml:"source" json:"source"`
	// Kubectl adds kubectl.
	Kubectl bool `yaml:"kubectl,omitempty" json:"kubectl,omitempty"`
}

// Containerd sets the version of containerd and where it comes from: either
// version and source, or debian.
type Containerd struct {
	// Version, e.g. 2.3.7. Supported are 1.7, 2.0 to 2.4 and, with imageStore.mode: import, later
	// 2.x.
	Version string `yaml:"version,omitempty" json:"version,omitempty"`
	// Source is where containerd comes from.
	Source Source `yaml:"source,omitempty" json:"source,omitempty"`
	// Debian uses the package of the Debian base.
	Debian bool `yaml:"debian,omitempty" json:"debian,omitempty"`
	// Sandbox is the reference of the pause image, which every pod starts
	// with. List it in images too.
	Sandbox string `yaml:"sandbox,omitempty" json:"sandbox,omitempty" check:"imageRef"`
	// Crictl adds crictl, which Kubernetes v1.30 requires.
	Crictl *Crictl `yaml:"crictl,omitempty" json:"crictl,omitempty"`
}

// Crictl sets the version of crictl and where it comes from.
type Crictl struct {
	// Version, e.g. v1.37.0.
	Version string `yaml:"version" json:"version"`
	// Source is where crictl comes from.
	Source Source `yaml:"source" json:"source"`
}

// CNI configures pod networking until the cluster's network plugin does.
type CNI struct {
	// Config is bridge (a bridge on the node, enough for a single node), none (the cluster's
	// network plugin brings its own configuration), or the path of a .conflist.
	Config string `yaml:"config,omitempty" json:"config,omitempty" jsonschema:"default=bridge" path:"file"`
	// PodCIDR is the CIDR from which bridge assigns pod addresses.
	PodCIDR string `yaml:"podCIDR,omitempty" json:"podCIDR,omitempty" jsonschema:"default=10.244.0.0/16" check:"podCIDR"`
}

// Yurthub sets the version of yurthub and how it runs.
type Yurthub struct {
	// Version must match the cluster's yurt-manager, e.g. v1.7.0.
	Version string `yaml:"version" json:"version"`
	// Form is how yurthub runs: unit is a program under systemd (1.7 and
	// later), staticPod a static pod. Default: unit; staticPod for 1.6.
	Form string `yaml:"form,omitempty" json:"form,omitempty" jsonschema:"enum=unit,enum=staticPod"`
	// Binary is the program, for form unit.
	Binary *FileSource `yaml:"binary,omitempty" json:"binary,omitempty"`
	// Image is the container image, for form staticPod.
	Image *ContainerImage `yaml:"image,omitempty" json:"image,omitempty"`
	// LBMode is how yurthub chooses an API server: priority uses the first
	// healthy one, rr uses them in turn.
	LBMode string `yaml:"lbMode,omitempty" json:"lbMode,omitempty" jsonschema:"enum=priority,enum=rr,default=priority"`
	// ExtraArgs are additional arguments, each --name=value. Arguments that
	// first boot sets or relies on, or that this version does not know, are
	// rejected.
	ExtraArgs []string `yaml:"extraArgs,omitempty" json:"extraArgs,omitempty"`
}

// ContainerImage is one container image to include in the image.
type ContainerImage struct {
	// Ref is the image's full name on the node: REGISTRY/PATH:TAG. It is
	// pulled from there unless layout or archive is set.
	Ref string `yaml:"ref" json:"ref" check:"imageRef"`
	// Layout is a directory in the OCI image layout that contains the image.
	Layout string `yaml:"layout,omitempty" json:"layout,omitempty" oneof:"atmost" path:"layout"`
	// Archive is a tar of an OCI image layout, or of docker save.
	Archive string `yaml:"archive,omitempty" json:"archive,omitempty" oneof:"atmost" path:"file"`
	// Digest pins the manifest or index: sha256:<hex>. Without it image.lock
	// pins the digest that was found.
	Digest string `yaml:"digest,omitempty" json:"digest,omitempty" check:"digest"`
}

// ImageStore sets how container images are stored.
type ImageStore struct {
	// Mode is prebaked (unpacked in the image, nothing is imported at first
	// boot) or import (archives that first boot imports).
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" jsonschema:"enum=prebaked,enum=import,default=prebaked"`
	// KeepLayers also keeps the compressed layers, which only `ctr images
	// export` needs.
	KeepLayers bool `yaml:"keepLayers,omitempty" json:"keepLayers,omitempty"`
	// MaxLayerSize is the maximum uncompressed size of a layer, e.g. 20Gi;
	// default 8Gi. All layers of one image together may have four times that
	// size. The sparse files of all images together may have an eighth of
	// maxLayerSize.
	MaxLayerSize string `yaml:"maxLayerSize,omitempty" json:"maxLayerSize,omitempty" check:"size"`
	// MaxFiles is the maximum number of files and directories in all images
	// together; default 2000000.
	MaxFiles int64 `yaml:"maxFiles,omitempty" json:"maxFiles,omitempty" jsonschema:"minimum=1,maximum=1000000000"`
}

// RenderFile renders the text of a file that has template: true.
func (i *Image) RenderFile(text string) (string, error) { return templates.File(text, i) }

// MaxLayer returns MaxLayerSize in bytes, or 0 if it is not set.
func (s *ImageStore) MaxLayer() int64 {
	n, err := forms.ParseSize(s.MaxLayerSize)
	if err != nil {
		return 0 // Validate reports the error
	}
	return n
}

// Registry sets how one registry is reached while building.
type Registry struct {
	// Host is the registry, as references name it: HOST or HOST:PORT.
	Host string `yaml:"host" json:"host" check:"registry"`
	// Mirrors are tried first, in order: HOST or HOST:PORT, optionally with a
	// path, or a URL.
	Mirrors []string `yaml:"mirrors,omitempty" json:"mirrors,omitempty" check:"mirror"`
	// Insecure allows plain HTTP and certificates that cannot be verified.
	Insecure bool `yaml:"insecure,omitempty" json:"insecure,omitempty"`
	// AuthFile is a docker config.json with the login or its credential
	// helper. Default: the user's own.
	AuthFile string `yaml:"authFile,omitempty" json:"authFile,omitempty" path:"login"`
}

// Overlay is a directory copied over the root file system. All files are owned
// by root; modes are kept.
type Overlay struct {
	// Dir is the directory's path.
	Dir string `yaml:"dir" json:"dir" path:"overlay"`
	// Replace allows replacing existing files, which is an error without it.
	Replace bool `yaml:"replace,omitempty" json:"replace,omitempty"`
}

// File is one file added to the root file system; exactly one of contents,
// source and link is set.
type File struct {
	// Path is the absolute path on the node.
	Path string `yaml:"path" json:"path"`
	// Contents is the file's text; "" makes an empty file.
	Contents *string `yaml:"contents,omitempty" json:"contents,omitempty" text:"lines" oneof:"one"`
	// Source is the path of a file to copy.
	Source string `yaml:"source,omitempty" json:"source,omitempty" oneof:"one" path:"file"`
	// Link makes the file a symbolic link to this target.
	Link string `yaml:"link,omitempty" json:"link,omitempty" oneof:"one"`
	// Mode in octal; default 0644. Not for links.
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" check:"mode"`
	// UID is the owner's numeric ID.
	UID uint32 `yaml:"uid,omitempty" json:"uid,omitempty" jsonschema:"minimum=0,maximum=4294967294"`
	// GID is the group's numeric ID.
	GID uint32 `yaml:"gid,omitempty" json:"gid,omitempty" jsonschema:"minimum=0,maximum=4294967294"`
	// Template renders contents or source as a Go template with the Image
	// document as its data.
	Template bool `yaml:"template,omitempty" json:"template,omitempty"`
	// Replace allows replacing an existing file, which is an error without it.
	Replace bool `yaml:"replace,omitempty" json:"replace,omitempty"`
}

// Kernel sets the kernel's command line, modules and sysctls.
type Kernel struct {
	// Args are added to the kernel's command line, one argument per item.
	Args []string `yaml:"args,omitempty" json:"args,omitempty"`
	// Consoles are values for console=, e.g. tty0 or ttyS0,115200; the last
	// one is /dev/console. Default: the serial port and the screen.
	Consoles []string `yaml:"consoles,omitempty" json:"consoles,omitempty" check:"console" unique:"yes"`
	// Modules of the kernel, which are loaded at boot.
	Modules []string `yaml:"modules,omitempty" json:"modules,omitempty" check:"module"`
	// Sysctl maps kernel settings to values, e.g. vm.overcommit_memory: "1".
	Sysctl map[string]string `yaml:"sysctl,omitempty" json:"sysctl,omitempty"`
}

// Disk sets the partitions of the disk image. Sizes are whole numbers with Mi, Gi or Ti (or k, M, G
// or T), as in 512Mi, and are rounded up to whole MiB.
type Disk struct {
	// Root is the size of the root file system. Every later update must fit into it. Default: the
	// size of the contents, some free space, and half the size of the contents (at least 256Mi)
	// for larger updates.
	Root string `yaml:"root,omitempty" json:"root,omitempty" check:"partition"`
	// Data is the size of the data partition before it grows to fill the
	// device. Default: the size of the contents plus some free space.
	Data string `yaml:"data,omitempty" json:"data,omitempty" check:"partition"`
	// Reserve is same (a second root partition of the same size, which updates require) or none
	// (for tiny disks).
	Reserve string `yaml:"reserve,omitempty" json:"reserve,omitempty" jsonschema:"enum=same,enum=none,default=same"`
	// Sector is the logical sector size of the machines' disks in bytes: 4096 for 4Kn disks;
	// default 512. An image does not boot from a disk with another sector size, and flash rejects
	// such a disk.
	Sector int `yaml:"sector,omitempty" json:"sector,omitempty" jsonschema:"enum=512,enum=4096"`
}

// Agents are edgebake's own programs in the image. Without a path, a program comes from edgebake's
// package, from the source tree around the current directory, or from the directory of the edgebake
// program. If it is in none of them, it is compiled from edgebake's Go module.
type Agents struct {
	// Firstboot is the path of the firstboot program.
	Firstboot string `yaml:"firstboot,omitempty" json:"firstboot,omitempty" path:"agent"`
	// IPVSCare is the path of the ipvscare program.
	IPVSCare string `yaml:"ipvscare,omitempty" json:"ipvscare,omitempty" path:"agent"`
}
