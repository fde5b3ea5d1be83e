package configs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// SetDefaults sets the defaults that depend on other fields.
func (i *Image) SetDefaults() {
	i.expandPaths()
	if y := i.Yurthub; y != nil && y.Form == "" {
		y.Form = openyurt.FormUnit
		if openyurt.RunsAsPod(y.Version) {
			y.Form = openyurt.FormStaticPod
		}
	}
	if len(i.Kernel.Consoles) == 0 {
		// The screen and the first serial port. Both show the status of systemd.
		i.Kernel.Consoles = []string{"tty0", "ttyS0,115200"}
		if i.Arch == "arm64" {
			i.Kernel.Consoles = []string{"tty0", "ttyAMA0,115200"}
		}
		if i.Hardware == RaspberryPi {
			// The screen, the serial connector of a Raspberry Pi 5, and pins 8 and 10 of a
			// Raspberry Pi 4. Each board has only one of the two serial ports.
			i.Kernel.Consoles = []string{"tty0", "ttyAMA10,115200", "ttyS1,115200"}
		}
	}
	for n := range i.Files {
		if f := &i.Files[n]; f.Mode == "" && f.Link == "" {
			f.Mode = "0644"
		}
	}
	if len(i.NodeTypes) == 0 {
		i.NodeTypes = []string{NodeNative}
		if i.Yurthub != nil {
			i.NodeTypes = []string{NodeNative, NodeEdge, NodeCloud}
		}
	}
}

// SourceTime returns SourceDate as a time. The Image must be valid.
func (i *Image) SourceTime() time.Time {
	t, err := time.Parse(time.RFC3339, i.SourceDate)
	if err != nil {
		panic("BUG: SourceTime of an Image that was not validated: " + err.Error())
	}
	return t.UTC()
}

var (
	imageName         = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`)
	containerdVersion = regexp.MustCompile(`^([0-9]+)\.([0-9]+)\.([0-9]+)(-(alpha|beta|rc)\.[0-9]+)?$`)
	crictlVersion     = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+$`)
	releaseVersion    = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+$`)
	suiteName         = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
	mirrorForm        = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9._-]+)*/?$`)
	hostForm          = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]{1,5})?$`)
)

// oldestKubernetes is the oldest tested minor version of Kubernetes.
const (
	oldestKubernetes = 30
)

// RaspberryPi is the value of hardware for Raspberry Pi boards, which have no UEFI.
const RaspberryPi = "raspberry-pi"

// Validate returns all problems of i, or nil. It does not change i, whose defaults must be set.
func (i *Image) Validate() Problems {
	var probs Problems
	strict.Check(i, FieldChecks, &probs)
	if t, err := time.Parse(time.RFC3339, i.SourceDate); err != nil {
		probs.Add("sourceDate", "%q is not an RFC 3339 date, e.g. 2026-01-31T12:00:00Z", strict.Shorten(i.SourceDate))
	} else if t.Year() < 1980 || t.Year() > 2107 {
		// FAT can store only dates between these years.
		probs.Add("sourceDate", "must be between 1980 and 2107")
	}
	if i.Hardware == RaspberryPi {
		i.validateRaspberryPi(&probs)
	}
	for n, t := range i.NodeTypes {
		p := fmt.Sprintf("nodeTypes[%d]", n)
		if (t == NodeEdge || t == NodeCloud) && i.Yurthub == nil {
			probs.Add(p, "%s nodes need yurthub in the image; add the field yurthub or remove the type", t)
		}
	}
	i.validateControlPlane(&probs)
	i.validateSites(&probs)
	i.validateSums(&probs)
	i.validatePrograms(&probs)
	i.validateImages(&probs)
	i.validateFiles(&probs)
	i.Kernel.validate(&probs)
	strict.CheckText(i, &probs)
	return probs
}

var (
	// ofUEFI matches packages that boot machines with UEFI.
	ofUEFI      = regexp.MustCompile(`^(shim-.*|systemd-boot|systemd-boot-efi.*|grub-efi.*)$`)
	packageName = regexp.MustCompile(`^[^:=/ ]*`)
)

// validateRaspberryPi reports settings that do not work on boards without UEFI.
func (i *Image) validateRaspberryPi(probs *Problems) {
	if i.Arch != "arm64" {
		probs.Add("hardware", "raspberry-pi boards are arm64: set arch: arm64, or hardware: generic for machines with UEFI")
	}
	if i.Disk.Sector == 4096 {
		probs.Add("disk.sector", "a Raspberry Pi starts from cards and drives with sectors of 512 bytes: remove it")
	}
	if i.Base.Debian == nil {
		return
	}
	for n, p := range i.Base.Debian.Packages {
		name := packageName.FindString(p)
		switch {
		case !PackageIsFor(p, i.Arch):
		case strings.HasPrefix(name, "linux-image-cloud-"):
			probs.Add(fmt.Sprintf("base.debian.packages[%d]", n), "%s has no drivers for boards: remove it; hardware: raspberry-pi installs linux-image-arm64", name)
		case ofUEFI.MatchString(name):
			probs.Add(fmt.Sprintf("base.debian.packages[%d]", n), "%s is for machines with UEFI, which a Raspberry Pi does not have: remove it, or use hardware: generic", name)
		}
	}
}

// networkManagers lists packages whose services start after installation, and run DHCP or configure
// interfaces.
var networkManagers = map[string]bool{"network-manager": true, "dhcpcd": true, "dhcpcd5": true, "ifupdown": true, "ifupdown2": true, "ifupdown-ng": true, "connman": true, "wicd": true, "netplan.io": true, "netscript-2.4": true}

// validateSums requires a digest for each file that is downloaded.
func (i *Image) validateSums(probs *Problems) {
	check := func(path string, f *FileSource) {
		if f != nil && f.URL != "" && f.SHA256 == "" {
			probs.AddMissing(path+".sha256", "is required with url, to verify the download")
		}
	}
	check("base.tar", i.Base.Tar)
	if i.Yurthub != nil {
		check("yurthub.binary", i.Yurthub.Binary)
	}
}

// validate validates a source. files lists the names of the files that would be downloaded from a
// release server for this architecture.
func (s *Source) validate(path, arch string, files []string, probs *Problems) {
	if s.URL != nil {
		s.URL.validate(path+".url", arch, files, probs)
	}
	if f := s.File; f != nil {
		checkSums(path+".file.sha256", f.SHA256, probs)
	}
}

func (u *URLSource) validate(path, arch string, files []string, probs *Problems) {
	checkSums(path+".sha256", u.SHA256, probs)
	switch {
	case u.SHA256FromServer:
		if strings.HasPrefix(u.Base, "http://") {
			probs.Add(path+".sha256FromServer", "requires a base that begins with https://: otherwise, anyone on the network could change both file and digest")
		}
		return
	case len(u.SHA256) == 0:
		probs.AddMissing(path+".sha256", "is required: the digest of each file by its name, or sha256FromServer: true")
		return
	}
	for _, f := range files {
		if u.Sum(arch, f) != "" {
			continue
		}
		if perArch(u.SHA256) && !strings.Contains(f, arch) {
			f = arch + "/" + f
		}
		probs.Add(path+".sha256", "has no digest of %s; add it, or sha256FromServer: true", f)
	}
}

// sumName matches the name of a file, with or without an architecture.
var sumName = regexp.MustCompile(`^((amd64|arm64)/)?[^/]+$`)

// Sum returns the digest of a file in the release for an architecture, or "".
func (u *URLSource) Sum(arch, file string) string { return sum(u.SHA256, arch, file) }

// Sum returns the digest of a program for an architecture, or "".
func (d *DirSource) Sum(arch, file string) string { return sum(d.SHA256, arch, file) }

func sum(sums map[string]string, arch, file string) string {
	return cmp.Or(sums[arch+"/"+file], sums[file])
}

// perArch reports whether the digests are given for each architecture.
func perArch(sums map[string]string) bool {
	for name := range sums {
		if strings.Contains(name, "/") {
			return true
		}
	}
	return false
}

func checkSums(path string, sums map[string]string, probs *Problems) {
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		if !sumName.MatchString(name) {
			probs.Add(strict.KeyPath(path, name), "must be the name of a file, without a path, or ARCH/NAME")
		}
		if bad := badSHA256(sums[name]); bad != "" {
			probs.Add(strict.KeyPath(path, name), "%s", bad)
		}
	}
}

func (i *Image) validatePrograms(probs *Problems) {
	i.validateKubernetes(probs)
	i.validateContainerd(probs)
	i.validatePair(probs)
	i.validateCrictl(probs)
	if c := i.CNI.Config; c != "bridge" && c != "none" && !strings.HasSuffix(c, ".conflist") {
		probs.Add("cni.config", "%q must be bridge, none or the path of a file that ends in .conflist%s", strict.Shorten(c), strict.DidYouMean(c, []string{"bridge", "none"}))
	}
	if y := i.Yurthub; y != nil {
		y.validate(probs)
		if openyurt.RunsAsPod(y.Version) && kubeadm.VersionForm.MatchString(i.Kubernetes.Version) && !kubeadm.Before(i.Kubernetes.Version, openyurt.LastKubernetesOfPods+1) {
			const last = openyurt.LastKubernetesOfPods
			probs.Add("kubernetes.version", "%s cannot run pods with yurthub %s, which does not serve Services to kubelet v1.%d and later: use yurthub %s, or Kubernetes v1.%d", i.Kubernetes.Version, y.Version, last+1, openyurt.Release(openyurt.FirstUnit), last)
		}
	}
}

func (i *Image) validateKubernetes(probs *Problems) {
	k := &i.Kubernetes
	if m := kubeadm.VersionForm.FindStringSubmatch(k.Version); m == nil {
		if k.Version != "" {
			probs.Add("kubernetes.version", "%s", forms.BadVersion(k.Version, kubeadm.VersionForm, ExampleKubernetes))
		}
	} else if minor, err := strconv.Atoi(m[1]); err == nil && minor < oldestKubernetes {
		probs.Add("kubernetes.version", "%s is too old: v1.%d and later are supported", k.Version, oldestKubernetes)
	}
	files := []string{"kubelet", "kubeadm"}
	if k.Kubectl {
		files = append(files, "kubectl")
	}
	k.Source.validate("kubernetes.source", i.Arch, files, probs)
}

func (i *Image) validateContainerd(probs *Problems) {
	c := &i.Containerd
	hasSource := c.Source.GoModule != nil || c.Source.URL != nil || c.Source.File != nil
	if c.Debian {
		if c.Version != "" || hasSource {
			probs.Add("containerd.debian", "uses the version in the base; remove version and source")
		}
		if i.Base.Debian == nil {
			probs.Add("containerd.debian", "needs base.debian, which installs the package")
		}
		return
	}
	switch m := containerdVersion.FindStringSubmatch(c.Version); {
	case c.Version == "":
		probs.AddMissing("containerd.version", "is required, e.g. "+ExampleContainerd+" (or debian: true for the base's own)")
	case m == nil:
		probs.Add("containerd.version", "%s", forms.BadVersion(c.Version, containerdVersion, ExampleContainerd))
	case m[1] != "2" && (m[1] != "1" || m[2] != "7"):
		probs.Add("containerd.version", "%s is not supported; 1.7 and 2.x are", c.Version)
	}
	if !hasSource {
		probs.Add("containerd.source", "exactly one of file, goModule, url is required")
	}
	var files []string
	if containerdVersion.MatchString(c.Version) { // without a valid version, the names of its files are unknown
		files = []string{fmt.Sprintf("containerd-%s-linux-%s.tar.gz", c.Version, i.Arch)}
	}
	c.Source.validate("containerd.source", i.Arch, files, probs)
}

func (i *Image) validateCrictl(probs *Problems) {
	k := &i.Kubernetes
	if t := i.Containerd.Crictl; t != nil {
		var files []string
		if crictlVersion.MatchString(t.Version) {
			files = []string{fmt.Sprintf("crictl-%s-linux-%s.tar.gz", t.Version, i.Arch)}
		} else if t.Version != "" {
			probs.Add("containerd.crictl.version", "%s", forms.BadVersion(t.Version, crictlVersion, ExampleCrictl))
		}
		t.Source.validate("containerd.crictl.source", i.Arch, files, probs)
	} else if kubeadm.Before(k.Version, 31) && !kubeadm.Before(k.Version, oldestKubernetes) {
		probs.AddMissing("containerd.crictl", "is required with Kubernetes %s, whose kubeadm does not join without crictl", k.Version)
	}
}

// badPodCIDR returns why s cannot be the CIDR of a node's pods, or "".
func badPodCIDR(s string) string {
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return fmt.Sprintf("%q is not a CIDR, e.g. 10.244.0.0/16", strict.Shorten(s))
	case p != p.Masked():
		return fmt.Sprintf("%q has bits set after its prefix; write %s", s, p.Masked())
	case p.Bits() > p.Addr().BitLen()-4:
		return fmt.Sprintf("%s is too small for pods: write a network of /%d or larger, e.g. 10.244.0.0/16", s, p.Addr().BitLen()-4)
	case p.Bits() < map[bool]int{true: 8, false: 16}[p.Addr().Is4()]:
		return fmt.Sprintf("%s covers most of the internet, which pods could not reach then; write a private network, e.g. 10.244.0.0/16", s)
	case forms.BadMachine(p.Addr()) != "" || p.Addr().IsLinkLocalUnicast():
		return fmt.Sprintf("%s is not a network that machines can have; write a private one, e.g. 10.244.0.0/16", s)
	case p.Contains(netip.MustParseAddr("10.96.0.1")):
		return fmt.Sprintf("%s contains 10.96.0.1, the address of the Service kubernetes (kubeadm's default); write another private network, e.g. 10.244.0.0/16", s)
	}
	return ""
}

func (y *Yurthub) validate(probs *Problems) {
	minor, ok := openyurt.Minor(y.Version)
	switch {
	case y.Version == "":
	case !ok && !releaseVersion.MatchString(y.Version):
		probs.Add("yurthub.version", "%s", forms.BadVersion(y.Version, openyurt.VersionForm, openyurt.Example()))
	case ok && minor < openyurt.Oldest:
		probs.Add("yurthub.version", "%s is too old: %s are supported", y.Version, openyurt.Supported())
	case !ok || minor > openyurt.Newest:
		probs.Add("yurthub.version", "%s is unknown to this edgebake: %s are supported", y.Version, openyurt.Supported())
	}
	firstUnit := openyurt.Release(openyurt.FirstUnit)
	switch y.Form {
	case openyurt.FormUnit:
		if openyurt.RunsAsPod(y.Version) {
			probs.Add("yurthub.form", "unit requires %s or later, where yurthub can use kubelet's certificate; %s runs as staticPod", firstUnit, y.Version)
		}
		if y.Binary == nil {
			probs.AddMissing("yurthub.binary", "is required for form unit")
		}
		if y.Image != nil {
			probs.Add("yurthub.image", "is for form staticPod; form unit runs binary")
		}
	case openyurt.FormStaticPod:
		if ok && openyurt.FormOf(minor) == openyurt.FormUnit {
			probs.Add("yurthub.form", "staticPod is for releases before %s, as OpenYurt runs them; %s runs as unit", firstUnit, y.Version)
		}
		if y.Image == nil {
			probs.AddMissing("yurthub.image", "is required for form staticPod")
		}
		if y.Binary != nil {
			probs.Add("yurthub.binary", "is for form unit; form staticPod runs image")
		}
	}
	if y.Image != nil {
		y.Image.validate("yurthub.image", probs)
	}
	version := y.Version
	if !ok {
		version = ""
	}
	validateYurthubArgs("yurthub.extraArgs", y.ExtraArgs, version, probs)
}

// badImageRef returns why ref is not a full image reference, or "". It rejects short names, because
// programs expand them in different ways and the node finds an image only by its full name.
func badImageRef(ref string) string {
	name, digest, hasDigest := strings.Cut(ref, "@")
	host, _, hasHost := strings.Cut(name, "/")
	_, err := imageref.Parse(ref)
	_, digestErr := imageref.ParseDigest(digest)
	switch {
	case hasDigest && digestErr != nil:
		return fmt.Sprintf("%q: the part after @ is not sha256: and 64 hexadecimal digits", strict.Shorten(ref))
	case !hasHost || !strings.ContainsAny(host, ".:") && host != "localhost":
		return fmt.Sprintf("%q is a short name; write it in full: REGISTRY/PATH:TAG", strict.Shorten(ref))
	case errors.As(err, new(*imageref.UntaggedError)):
		return fmt.Sprintf("%q has no tag; latest is not assumed, since it changes", strict.Shorten(ref))
	case err != nil || strings.ToLower(host) != host: // the host must be in lower case
		return fmt.Sprintf("%q is not an image reference: REGISTRY/PATH:TAG", strict.Shorten(ref))
	}
	return ""
}

func (c *ContainerImage) validate(path string, probs *Problems) {
	if _, inRef, ok := strings.Cut(c.Ref, "@"); ok && c.Digest != "" && inRef != c.Digest {
		probs.Add(path+".digest", "differs from the digest in ref: omit one of them")
	}
}

// validateControlPlane reports missing container images that every control plane runs. It skips an
// Image with imagesFrom, whose images are not known yet: stamping checks these.
func (i *Image) validateControlPlane(probs *Problems) {
	at := slices.Index(i.NodeTypes, NodeControlPlane)
	if at < 0 || len(i.ImagesFrom) > 0 || !kubeadm.VersionForm.MatchString(i.Kubernetes.Version) {
		return // if the version is invalid, the images are unknown
	}
	if kubeadm.Before(i.Kubernetes.Version, kubeadm.OldestKubernetes) {
		probs.Add(fmt.Sprintf("nodeTypes[%d]", at), "control-plane needs Kubernetes v1.%d or later", kubeadm.OldestKubernetes)
	}
	always, optional, _ := kubeadm.DefaultImages(i.Kubernetes.Version)
	missing := i.lackedImages(always)
	if len(missing) == 0 {
		return
	}
	more := ""
	if rest := i.lackedImages(optional); len(rest) > 0 {
		more = fmt.Sprintf("; and unless the Cluster leaves them out, %s", strings.Join(rest, ", "))
	}
	probs.Add(fmt.Sprintf("nodeTypes[%d]", at), "control-plane needs the control plane's container images: add to images %s%s (`kubeadm config images list --kubernetes-version %s` prints them, `edgebake init --cluster` writes an Image with them; for another registry, use its names)",
		strings.Join(missing, ", "), more, i.Kubernetes.Version)
}

// MissingImages returns the default images of kubeadm's control plane that the field images does
// not list.
func (i *Image) MissingImages() []string {
	always, optional, _ := kubeadm.DefaultImages(i.Kubernetes.Version)
	return i.lackedImages(append(always, optional...))
}

// lackedImages returns the wanted images that i.Images does not contain in any registry. etcd and
// CoreDNS may have any tag, because first boot passes the tag to kubeadm. The tags of Kubernetes' own
// components must match.
func (i *Image) lackedImages(wanted []kubeadm.Image) (missing []string) {
	for _, want := range wanted {
		name := path.Base(want.Name)
		if !slices.ContainsFunc(i.Images, func(c ContainerImage) bool {
			own, _, _ := strings.Cut(c.Ref, "@")
			colon := strings.LastIndexByte(own, ':')
			return colon > 0 && strings.HasSuffix(own[:colon], "/"+name) && (want.Tag == "" || own[colon+1:] == want.Tag)
		}) {
			missing = append(missing, want.Example(i.Kubernetes.Version))
		}
	}
	return missing
}

func (i *Image) validateImages(probs *Problems) {
	for n, c := range i.Images {
		c.validate(fmt.Sprintf("images[%d]", n), probs)
	}
	if len(i.ImagesIgnore) > 0 && len(i.ImagesFrom) == 0 {
		probs.Add("imagesIgnore", "has no effect without imagesFrom: remove it")
	}
}

// identity reports whether p is a file that differs on every machine and must not be in an image.
func identity(p string) bool {
	host, _ := path.Match("/etc/ssh/ssh_host_*", p)
	return host || slices.Contains([]string{"/etc/machine-id", "/var/lib/dbus/machine-id", "/var/lib/systemd/random-seed", "/var/lib/systemd/credential.secret"}, p)
}

// HiddenAtBoot returns the reason why the path p is hidden on a booted machine, or "".
func HiddenAtBoot(p string) string {
	for _, over := range []struct{ dir, by string }{
		{"/etc/kubernetes", "each machine has its own /etc/kubernetes, on DATA; put the file below " + ondisk.PersistDir + "/kubernetes"},
		{"/efi", "the EFI system partition is mounted there"},
		{"/proc", "the kernel's own file system is mounted there"},
		{"/sys", "the kernel's own file system is mounted there"},
		{"/dev", "the kernel's own file system is mounted there"},
		{"/run", "a file system in memory is mounted there; create the file at boot, by a file in /usr/lib/tmpfiles.d"},
	} {
		if p == over.dir || strings.HasPrefix(p, over.dir+"/") {
			return over.by
		}
	}
	return ""
}

func (i *Image) validateFiles(probs *Problems) {
	for n, f := range i.Files {
		p := fmt.Sprintf("files[%d]", n)
		if bad := forms.BadFilePath(f.Path); f.Path != "" && bad != "" {
			probs.Add(p+".path", "%s", bad)
		} else if by := HiddenAtBoot(f.Path); by != "" {
			probs.Add(p+".path", "%s would be hidden: %s", f.Path, by)
		} else if identity(f.Path) {
			probs.Add(p+".path", "%s identifies a machine, and all machines of the image would share it; first boot makes one for each machine", f.Path)
		}
		for m, o := range i.Files[:n] {
			switch {
			case f.Path == "" || forms.BadFilePath(o.Path) != "":
			case o.Path == f.Path:
				probs.Add(p+".path", "%s is also the path of files[%d]", f.Path, m)
			case strings.HasPrefix(f.Path, o.Path+"/"):
				probs.Add(p+".path", "%s is inside files[%d], which is a file", f.Path, m)
			case strings.HasPrefix(o.Path, f.Path+"/"):
				probs.Add(p+".path", "%s is a file, but files[%d] is inside it", f.Path, m)
			}
		}
		if f.Link != "" && f.Template {
			probs.Add(p+".template", "has no effect on a link, which has no contents; remove it")
		}
		if f.Link != "" && f.Mode != "" {
			probs.Add(p+".mode", "a link has no mode; remove it")
		}
		if len(f.Link) > 4095 {
			probs.Add(p+".link", "is longer than 4095 bytes")
		}
		if f.Template && f.Contents != nil {
			if _, err := i.RenderFile(*f.Contents); err != nil {
				probs.Add(p+".contents", "%v", err)
			}
		}
	}
}

// spaceOutsideQuotes reports whether a contains a blank outside quotes, where the kernel would
// split it into several arguments.
func spaceOutsideQuotes(a string) bool {
	for n, part := range strings.Split(a, `"`) {
		if n%2 == 0 && strings.ContainsAny(part, " \t") {
			return true
		}
	}
	return false
}

// toAShell lists kernel arguments that make a machine boot to a shell, so that kubelet never
// starts.
var toAShell = []string{"1", "s", "S", "single", "rescue", "emergency", "break", "rd.break",
	"systemd.unit=rescue.target", "systemd.unit=emergency.target", "rd.systemd.unit=rescue.target", "rd.systemd.unit=emergency.target"}

// plainSysctl returns a key of sysctl.d without an optional dash, and with dots instead of slashes.
func plainSysctl(key string) string {
	key = strings.TrimPrefix(key, "-")
	dot, slash := strings.IndexByte(key, '.'), strings.IndexByte(key, '/')
	if slash < 0 || dot >= 0 && dot < slash {
		return key
	}
	return strings.Map(func(r rune) rune {
		switch r {
		case '/':
			return '.'
		case '.':
			return '/'
		}
		return r
	}, key)
}

func (k *Kernel) validate(probs *Problems) {
	arguments := repeats{}
	for n, a := range k.Args {
		p := fmt.Sprintf("kernel.args[%d]", n)
		key, _, _ := strings.Cut(a, "=")
		switch {
		case a == "" || strict.BadText(a) != "":
			probs.Add(p, "must be one argument, without line breaks")
		case key == "console":
			probs.Add(p, "use kernel.consoles")
		case slices.Contains([]string{"root", "rootfstype", "rootflags", "ro", "rw", "init", "rdinit", "initrd"}, key):
			probs.Add(p, "%s is set by edgebake", key)
		case strings.ReplaceAll(key, "-", "_") == "systemd.machine_id":
			probs.Add(p, "%s identifies a machine, and all machines of the image would share it; first boot makes one for each machine", key)
		case slices.Contains(toAShell, a):
			probs.Add(p, "%s boots to a shell, and kubelet never starts; remove it", a)
		case a == "--":
			probs.Add(p, "ends the kernel's arguments; the arguments after it would go to init")
		case strings.Count(a, `"`)%2 == 1:
			probs.Add(p, "%q has an unclosed quote, which would include the next arguments", strict.Shorten(a))
		case spaceOutsideQuotes(a):
			probs.Add(p, "%q contains a space; write each argument as its own item", strict.Shorten(a))
		case arguments.again(a):
			probs.Add(p, "%s is listed twice", a)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(k.Sysctl)) {
		if !sysctlKey.MatchString(key) {
			probs.Add(strict.KeyPath("kernel.sysctl", key), "is not a sysctl name, e.g. net.ipv4.ip_forward")
		} else if plainSysctl(key) == "net.ipv4.ip_forward" && strings.TrimSpace(k.Sysctl[key]) != "1" {
			probs.Add(strict.KeyPath("kernel.sysctl", key), "must be 1, since kubeadm rejects nodes that do not forward packets; remove it")
		}
		if bad := strict.BadText(k.Sysctl[key]); bad != "" {
			probs.Add(strict.KeyPath("kernel.sysctl", key), "%s", bad)
		}
	}
}
