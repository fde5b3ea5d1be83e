package configs

// Image is what is baked into a golden image. It holds no secret and nothing
// of a site.
type Image struct {
	APIVersion string `yaml:"apiVersion" json:"apiVersion" jsonschema:"enum=edgebake.io/v1alpha1"`
	Kind       string `yaml:"kind" json:"kind" jsonschema:"enum=Image"`
	Name       string `yaml:"name" json:"name"`
	// Arch is the GOARCH of the machines: amd64 (default) or arm64.
	Arch string `yaml:"arch,omitempty" json:"arch,omitempty" jsonschema:"enum=amd64,enum=arm64,default=amd64"`
	// SourceDate (RFC 3339) stamps everything that has no date of its own
	// and is the floor of the node's clock.
	SourceDate string `yaml:"sourceDate,omitempty" json:"sourceDate,omitempty" jsonschema:"default=2026-01-01T00:00:00Z"`
	// Hardware is cloud (virtual machines, small) or generic (firmware and
	// drivers of real machines).
	Hardware string `yaml:"hardware,omitempty" json:"hardware,omitempty" jsonschema:"enum=cloud,enum=generic,default=cloud"`
	// NodeTypes that sites of this image may choose: native, edge, cloud.
	NodeTypes []string `yaml:"nodeTypes,omitempty" json:"nodeTypes,omitempty" jsonschema:"enum=native,enum=edge,enum=cloud"`

	Base       Base       `yaml:"base" json:"base"`
	Kubernetes Kubernetes `yaml:"kubernetes" json:"kubernetes"`
	Containerd Containerd `yaml:"containerd" json:"containerd"`
	CNI        CNI        `yaml:"cni,omitempty" json:"cni,omitempty"`
	Yurthub    *Yurthub   `yaml:"yurthub,omitempty" json:"yurthub,omitempty"`

	// Images are the container images on board.
	Images []ContainerImage `yaml:"images,omitempty" json:"images,omitempty"`
	// ImagesFrom lists Kubernetes manifests (globs) whose images are taken
	// on board too.
	ImagesFrom []string   `yaml:"imagesFrom,omitempty" json:"imagesFrom,omitempty"`
	ImageStore ImageStore `yaml:"imageStore,omitempty" json:"imageStore,omitempty"`
	// Registries configures where image references are fetched from.
	Registries []Registry `yaml:"registries,omitempty" json:"registries,omitempty"`

	// Overlays are folders laid over the root file system, in order.
	Overlays []Overlay `yaml:"overlays,omitempty" json:"overlays,omitempty"`
	// Files are single files laid over it, after the overlays.
	Files  []File `yaml:"files,omitempty" json:"files,omitempty"`
	Kernel Kernel `yaml:"kernel,omitempty" json:"kernel,omitempty"`
	Disk   Disk   `yaml:"disk,omitempty" json:"disk,omitempty"`
	Agents Agents `yaml:"agents,omitempty" json:"agents,omitempty"`
}

// Base is the root file system we start from; exactly one member is set.
type Base struct {
	Debian *DebianBase `yaml:"debian,omitempty" json:"debian,omitempty"`
	OCI    *OCISource  `yaml:"oci,omitempty" json:"oci,omitempty"`
	Tar    *FileSource `yaml:"tar,omitempty" json:"tar,omitempty"`
}

// DebianBase is made by mmdebstrap.
type DebianBase struct {
	Suite string `yaml:"suite,omitempty" json:"suite,omitempty" jsonschema:"default=trixie"` // trixie
	// Sources are apt source lines; empty: the distribution's own mirror.
	Sources []string `yaml:"sources,omitempty" json:"sources,omitempty"`
	// Keyrings verify Sources, paths beside the Image document.
	Keyrings []string `yaml:"keyrings,omitempty" json:"keyrings,omitempty"`
	// Packages beside the ones edgebake needs.
	Packages []string `yaml:"packages,omitempty" json:"packages,omitempty"`
	// Run are shell commands carried out inside the base, last.
	Run []string `yaml:"run,omitempty" json:"run,omitempty"`
}

// OCISource is a container image in a registry, layout or archive.
type OCISource struct {
	Ref     string `yaml:"ref,omitempty" json:"ref,omitempty"`
	Layout  string `yaml:"layout,omitempty" json:"layout,omitempty"`
	Archive string `yaml:"archive,omitempty" json:"archive,omitempty"`
	// Digest pins the manifest or index, "sha256:…".
	Digest string `yaml:"digest,omitempty" json:"digest,omitempty"`
}

// FileSource is a file by path or URL.
type FileSource struct {
	File   string `yaml:"file,omitempty" json:"file,omitempty"`
	URL    string `yaml:"url,omitempty" json:"url,omitempty"`
	SHA256 string `yaml:"sha256,omitempty" json:"sha256,omitempty"`
}

// Source is where programs come from; exactly one member is set.
type Source struct {
	// GoModule compiles them from the Go module proxy.
	GoModule *GoModuleSource `yaml:"goModule,omitempty" json:"goModule,omitempty"`
	// URL takes them from a release server's layout.
	URL *URLSource `yaml:"url,omitempty" json:"url,omitempty"`
	// File takes them from a folder.
	File *DirSource `yaml:"file,omitempty" json:"file,omitempty"`
}

// GoModuleSource has no settings: module and version follow from what is
// built.
type GoModuleSource struct{}

// URLSource is a release server or a mirror of one.
type URLSource struct {
	Base string `yaml:"base" json:"base"`
	// SHA256 of each file, by its name.
	SHA256 map[string]string `yaml:"sha256,omitempty" json:"sha256,omitempty"`
	// SHA256FromServer takes the digest of each file that SHA256 does not
	// name from the server itself (FILE.sha256), over HTTPS, when it is
	// first fetched; image.lock keeps it from then on.
	SHA256FromServer bool `yaml:"sha256FromServer,omitempty" json:"sha256FromServer,omitempty"`
}

// DirSource is a folder of programs, beside the Image document.
type DirSource struct {
	Dir    string            `yaml:"dir" json:"dir"`
	SHA256 map[string]string `yaml:"sha256,omitempty" json:"sha256,omitempty"`
}

// Kubernetes on board: kubelet and kubeadm, and kubectl where asked for.
type Kubernetes struct {
	Version string `yaml:"version" json:"version"` // v1.36.3
	Source  Source `yaml:"source" json:"source"`
	Kubectl bool   `yaml:"kubectl,omitempty" json:"kubectl,omitempty"`
}

// Containerd on board.
type Containerd struct {
	// Version, "2.2.9"; with Debian set, whatever the base has.
	Version string `yaml:"version,omitempty" json:"version,omitempty"`
	Source  Source `yaml:"source,omitempty" json:"source,omitempty"`
	// Debian takes the base's own package.
	Debian bool `yaml:"debian,omitempty" json:"debian,omitempty"`
	// Sandbox is the pause image's reference.
	Sandbox string  `yaml:"sandbox,omitempty" json:"sandbox,omitempty"`
	Crictl  *Crictl `yaml:"crictl,omitempty" json:"crictl,omitempty"`
}

// Crictl on board.
type Crictl struct {
	Version string `yaml:"version" json:"version"`
	Source  Source `yaml:"source" json:"source"`
}

// CNI configures pod networking until the cluster's own agent does.
type CNI struct {
	// Config is bridge (a self-contained default for single sites), none (an
	// agent of the cluster brings it) or a path to a .conflist.
	Config  string `yaml:"config,omitempty" json:"config,omitempty" jsonschema:"default=bridge"`
	PodCIDR string `yaml:"podCIDR,omitempty" json:"podCIDR,omitempty" jsonschema:"default=10.244.0.0/16"`
}

// Yurthub on board: makes edge and cloud nodes possible.
type Yurthub struct {
	Version   string          `yaml:"version" json:"version"`                                                     // v1.7.0
	Form      string          `yaml:"form,omitempty" json:"form,omitempty" jsonschema:"enum=unit,enum=staticPod"` // unit | staticPod
	Binary    *FileSource     `yaml:"binary,omitempty" json:"binary,omitempty"`
	Image     *ContainerImage `yaml:"image,omitempty" json:"image,omitempty"`
	LBMode    string          `yaml:"lbMode,omitempty" json:"lbMode,omitempty" jsonschema:"enum=priority,enum=rr,default=priority"` // priority | rr
	ExtraArgs []string        `yaml:"extraArgs,omitempty" json:"extraArgs,omitempty"`
}

// ContainerImage is one container image to take on board.
type ContainerImage struct {
	// Ref is its name on the node, and where it is fetched unless Layout or
	// Archive is set.
	Ref     string `yaml:"ref" json:"ref"`
	Layout  string `yaml:"layout,omitempty" json:"layout,omitempty"`
	Archive string `yaml:"archive,omitempty" json:"archive,omitempty"`
	Digest  string `yaml:"digest,omitempty" json:"digest,omitempty"`
}

// ImageStore says how container images are laid down.
type ImageStore struct {
	// Mode is prebaked (default) or import.
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" jsonschema:"enum=prebaked,enum=import,default=prebaked"`
	// KeepLayers keeps the compressed layer blobs, for `ctr images export`.
	KeepLayers bool `yaml:"keepLayers,omitempty" json:"keepLayers,omitempty"`
}

// Registry is how one registry is reached at build time.
type Registry struct {
	Host    string   `yaml:"host" json:"host"`
	Mirrors []string `yaml:"mirrors,omitempty" json:"mirrors,omitempty"`
	// Insecure allows plain HTTP and unverified TLS.
	Insecure bool `yaml:"insecure,omitempty" json:"insecure,omitempty"`
	// AuthFile is a docker config.json; empty: the user's own.
	AuthFile string `yaml:"authFile,omitempty" json:"authFile,omitempty"`
}

// Overlay is a folder laid over the root file system. Everything becomes
// root's; modes are kept.
type Overlay struct {
	Dir     string `yaml:"dir" json:"dir"`
	Replace bool   `yaml:"replace,omitempty" json:"replace,omitempty"`
}

// File is one file laid over the root file system.
type File struct {
	Path string `yaml:"path" json:"path"`
	// Exactly one of Contents, Source (a path) and Link (a symlink's target).
	Contents string `yaml:"contents,omitempty" json:"contents,omitempty"`
	Source   string `yaml:"source,omitempty" json:"source,omitempty"`
	Link     string `yaml:"link,omitempty" json:"link,omitempty"`
	// Mode in octal, "0644".
	Mode string `yaml:"mode,omitempty" json:"mode,omitempty" jsonschema:"default=0644"`
	UID  uint32 `yaml:"uid,omitempty" json:"uid,omitempty"`
	GID  uint32 `yaml:"gid,omitempty" json:"gid,omitempty"`
	// Template renders Contents or Source with the Image document as data.
	Template bool `yaml:"template,omitempty" json:"template,omitempty"`
	Replace  bool `yaml:"replace,omitempty" json:"replace,omitempty"`
}

// Kernel settings.
type Kernel struct {
	Args []string `yaml:"args,omitempty" json:"args,omitempty"`
	// Consoles as in console=; the last one is /dev/console.
	Consoles []string          `yaml:"consoles,omitempty" json:"consoles,omitempty"`
	Modules  []string          `yaml:"modules,omitempty" json:"modules,omitempty"`
	Sysctl   map[string]string `yaml:"sysctl,omitempty" json:"sysctl,omitempty"`
}

// Disk is the shape of the output.
type Disk struct {
	// Root is ROOT-A's size ("3GiB"); empty: content and headroom.
	Root string `yaml:"root,omitempty" json:"root,omitempty"`
	// Data is DATA's size before it grows; empty: content and headroom.
	Data string `yaml:"data,omitempty" json:"data,omitempty"`
	// Reserve is same (room for ROOT-B) or none.
	Reserve string `yaml:"reserve,omitempty" json:"reserve,omitempty" jsonschema:"enum=same,enum=none,default=same"`
}

// Agents are the programs of ours that the image carries, for its arch.
// Empty paths: the ones beside the running edgebake (firstboot-linux-ARCH,
// or firstboot where the arch is the same), else compiled from its module.
type Agents struct {
	Firstboot string `yaml:"firstboot,omitempty" json:"firstboot,omitempty"`
	IPVSCare  string `yaml:"ipvscare,omitempty" json:"ipvscare,omitempty"`
}
