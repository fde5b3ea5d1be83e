package builder

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

// identities lists files that identify one machine. A golden image is for many machines, so it must
// not contain them. The value is true if an empty file is allowed.
var identities = map[string]bool{
	"etc/machine-id":                        true,
	"var/lib/dbus/machine-id":               false,
	"var/lib/systemd/random-seed":           false,
	"var/lib/systemd/credential.secret":     false,
	"var/lib/urandom/random-seed":           false,
	"etc/ssl/private/ssl-cert-snakeoil.key": false,
	"etc/iscsi/initiatorname.iscsi":         false,
	"etc/nvme/hostid":                       false,
	"etc/nvme/hostnqn":                      false,
}

func isIdentity(n tree.Node) bool {
	emptyOK, ok := identities[n.Path]
	if !ok {
		dir, base := path.Split(n.Path)
		ok = dir == "etc/ssh/" && strings.HasPrefix(base, "ssh_host_") && strings.Contains(base, "key")
	}
	if !ok || n.IsDir() {
		return false
	}
	return !(emptyOK && n.IsRegular() && n.Data.Size == 0)
}

// leftovers lists directories whose files come only from making the base, such as caches and logs.
var leftovers = []string{"var/cache/apt/", "var/lib/apt/lists/", "var/log/", "var/cache/debconf/", "tmp/", "var/tmp/", "run/", "dev/", "proc/", "sys/"}

// keptLeftovers lists files in the leftovers directories that the node needs.
var keptLeftovers = map[string]bool{
	"var/cache/debconf/config.dat": true, "var/cache/debconf/templates.dat": true, "var/cache/debconf/passwords.dat": true,
}

var leftoverNames = []string{
	"root/.bash_history", "root/.wget-hsts", "etc/.pwd.lock", ".dockerenv",
	"var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock",
	"var/lib/dpkg/status-old", "var/lib/dpkg/available-old", "var/lib/dpkg/diversions-old", "var/lib/dpkg/statoverride-old",
	"etc/passwd-", "etc/shadow-", "etc/group-", "etc/gshadow-", "etc/subuid-", "etc/subgid-",
}

// cleanBase removes identities and leftovers from a base. It keeps all directories.
func cleanBase(nodes []tree.Node) []tree.Node {
	removed := map[string]bool{}
	for _, p := range leftoverNames {
		removed[p] = true
	}
	out := make([]tree.Node, 0, len(nodes))
	for _, n := range nodes {
		switch {
		case isIdentity(n), removed[n.Path]:
			continue
		case !n.IsDir() && !n.IsSymlink() && !keptLeftovers[n.Path] && isLeftover(n.Path):
			continue
		}
		out = append(out, n)
	}
	return out
}

func isLeftover(p string) bool {
	for _, dir := range leftovers {
		if strings.HasPrefix(p, dir) {
			return true
		}
	}
	return false
}

// checkModules warns about modules in kernel.modules that the kernel has neither as a file, nor
// built in, nor under an alias.
func (b *executor) checkModules(nodes []tree.Node) error {
	if len(b.img.Kernel.Modules) == 0 {
		return nil
	}
	kernel, err := overlays.KernelVersion(nodes)
	if err != nil || kernel == "" {
		return nil // checkTree reports a missing kernel
	}
	dir := "usr/lib/modules/" + kernel + "/"
	builtin, err := b.readBase(nodes, dir+"modules.builtin", maxModulesBuiltin)
	if err != nil {
		return err
	}
	aliases, err := b.readBase(nodes, dir+"modules.alias", maxModulesAlias)
	if err != nil {
		return err
	}
	have := overlays.Modules(nodes, kernel, string(builtin))
	for i, m := range b.img.Kernel.Modules {
		if !have(m) && !bytes.Contains(aliases, []byte("alias "+m+" ")) {
			b.event(Event{Step: "merge", State: StateWarning, Text: fmt.Sprintf(
				"kernel.modules[%d]: kernel %s has no module %s: correct its name, or use a base whose kernel has it (hardware: generic)", i, kernel, m)})
		}
	}
	return nil
}

// maxModulesAlias is the largest accepted size of modules.alias, in bytes.
const maxModulesAlias = 16 << 20

// networkManagers lists services that run DHCP or configure interfaces in addition to
// systemd-networkd.
var networkManagers = map[string]bool{
	"NetworkManager.service": true, "dhcpcd.service": true, "networking.service": true, "connman.service": true, "wicd.service": true,
}

// checkNetworkManagers warns about enabled services of networkManagers, which a base or a package's
// dependencies may contain.
func (b *executor) checkNetworkManagers(nodes []tree.Node) {
	const units = "etc/systemd/system/"
	masked := map[string]bool{}
	for _, n := range nodes {
		if name, ok := strings.CutPrefix(n.Path, units); ok && n.IsSymlink() && n.Target == "/dev/null" {
			masked[name] = true
		}
	}
	for _, n := range nodes {
		dir, name := path.Split(n.Path)
		if networkManagers[name] && !masked[name] && n.IsSymlink() && strings.HasPrefix(dir, units) && strings.HasSuffix(dir, ".wants/") {
			masked[name] = true // report each service once
			b.event(Event{Step: "merge", State: StateWarning, Text: fmt.Sprintf(
				"%s is enabled (%s), and would configure the network in addition to systemd-networkd, which applies the Site's settings: remove its package, or mask it with a file: {path: /%s%s, link: /dev/null}", name, n.Layer, units, name)})
		}
	}
}

// checkTree returns an error if the merged tree lacks something that is required to boot, or has a
// file that identifies a machine, is hidden on a booted machine, or is not the expected program.
func (b *executor) checkTree(nodes []tree.Node) error {
	var errs []error
	bad := func(err error) { errs = append(errs, &tree.LayerError{Layer: inputBase, Err: err}) }
	kernel, err := overlays.KernelVersion(nodes)
	if err != nil {
		bad(err)
	}
	by := make(map[string]tree.Node, len(nodes))
	for _, n := range nodes {
		by[n.Path] = n
	}
	if _, ok := by[pid1]; !ok {
		bad(errors.New("the base has no systemd: usr/lib/systemd/systemd is missing; add the package systemd-sysv"))
	}
	if kernel != "" {
		if _, ok := by["usr/lib/modules/"+kernel]; !ok {
			bad(fmt.Errorf("the base has kernel %s but not its modules: usr/lib/modules/%s is missing; use both from one linux-image package", kernel, kernel))
		}
		if _, ok := by["boot/initrd.img-"+kernel]; !ok {
			bad(fmt.Errorf("the base has kernel %s but no initrd for it: boot/initrd.img-%s is missing; install initramfs-tools in the base", kernel, kernel))
		}
	}
	if err := overlays.CheckPlaces(nodes); err != nil {
		errs = append(errs, err)
	}
	if v := systemdVersion(nodes); v > 0 && v < minSystemd {
		bad(fmt.Errorf("the base has systemd %d, which does not support the boot entry's systemd.mount-extra=: use a base with systemd %d or later (Debian trixie)", v, minSystemd))
	}
	for _, n := range nodes {
		if isIdentity(n) {
			errs = append(errs, &tree.LayerError{Layer: n.Layer, Err: fmt.Errorf("%s identifies a single machine, so it must not be in an image for many machines: remove it", n.Path)})
		}
	}
	errs = append(errs, checkHidden(nodes)...)
	errs = append(errs, checkPrograms(nodes, b.Cache, b.img)...)
	return errors.Join(errs...)
}

// checkHidden returns errors for files of overlays that are hidden on a booted machine, because
// something is mounted over them.
func checkHidden(nodes []tree.Node) []error {
	var errs []error
	for _, n := range nodes {
		if n.IsDir() || !isOverlay(n.Layer) {
			continue
		}
		if by := configs.HiddenAtBoot("/" + n.Path); by != "" {
			errs = append(errs, &tree.LayerError{Layer: n.Layer, Path: n.Path, Err: fmt.Errorf("a booted machine would not see this file: %s", by)})
		}
	}
	return errs
}

// minSystemd is the first version that supports systemd.mount-extra=. An older systemd would start
// without DATA.
const minSystemd = 254

var systemdLibrary = regexp.MustCompile(`/libsystemd-shared-([0-9]+)[^/]*\.so$`)

// systemdVersion returns the version in the file name of systemd's shared library, or 0 if there is
// none.
func systemdVersion(nodes []tree.Node) int {
	for _, n := range nodes {
		if m := systemdLibrary.FindStringSubmatch(n.Path); m != nil {
			v, _ := strconv.Atoi(m[1]) // m[1] contains only digits
			return v
		}
	}
	return 0
}

// programDirs lists the directories that contain the machine's own programs. Elsewhere, firmware
// and container images may contain code for other processors.
var programDirs = []string{"usr/bin/", "usr/sbin/", "usr/lib/", "usr/libexec/", "usr/local/", "opt/", "bin/", "sbin/", "lib/"}

// programs lists the paths at which the build accepts only an ELF program. A release archive or an
// error page of a server is rejected.
var programs = []string{"usr/bin/kubelet", "usr/bin/kubeadm", "usr/bin/containerd", "usr/bin/firstboot", "usr/bin/ipvscare", yurthubPath}

// maxArchErrors is the largest number of errors about programs for another architecture.
const maxArchErrors = 5

// checkPrograms returns errors for programs of another architecture, and for files at a program's
// path that are not a program.
func checkPrograms(nodes []tree.Node, blobs tree.Blobs, img *configs.Image) []error {
	open := map[string]tree.BlobFile{}
	defer func() {
		for _, f := range open {
			f.Close()
		}
	}()
	var errs []error
	more := 0
	for _, n := range nodes {
		if !n.IsRegular() || !inProgramDir(n.Path) {
			continue
		}
		var f io.ReaderAt = bytes.NewReader(n.Data.Inline)
		if blob := n.Data.Blob; blob != "" {
			if open[blob] == nil {
				var err error
				if open[blob], err = blobs.OpenBlob(blob); err != nil {
					return append(errs, err)
				}
			}
			f = io.NewSectionReader(open[blob], n.Data.Off, n.Data.Size)
		}
		problem, err := checkProgram(f, n.Path, n.Path, img)
		if err != nil {
			return append(errs, err)
		}
		if arch := (*archError)(nil); errors.As(problem, &arch) && len(errs) >= maxArchErrors {
			more++
		} else if problem != nil {
			errs = append(errs, &tree.LayerError{Layer: n.Layer, Err: problem})
		}
	}
	if more > 0 {
		errs = append(errs, fmt.Errorf("and %s of another architecture", configs.Count(more, "more file")))
	}
	return errs
}

// checkProgram returns a problem if f is an ELF file for another architecture, a yurthub of another
// version, or no ELF file although path is in programs. name describes f in messages. err is set
// only if f could not be read.
func checkProgram(f io.ReaderAt, path, name string, img *configs.Image) (problem, err error) {
	var head [64]byte // large enough for an ELF header
	n, err := f.ReadAt(head[:], 0)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	if n < len(head) || string(head[:4]) != elf.ELFMAG {
		if slices.Contains(programs, path) {
			return fmt.Errorf("%s is not a program for Linux (ELF); name the program itself, not an archive that contains it", name), nil
		}
		return nil, nil
	}
	problem = checkELF(head, img.Arch)
	if problem == nil && path == yurthubPath {
		problem = checkYurthub(f, img.Yurthub)
	}
	if problem != nil {
		problem = fmt.Errorf("%s %w", name, problem)
	}
	return problem, nil
}

// checkFile runs checkProgram on a cached local file, so that the error comes before anything is
// compiled.
func (b *resolver) checkFile(sha, path, name string) error {
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer f.Close()
	problem, err := checkProgram(f, path, name, b.img)
	return errors.Join(problem, err)
}

// pid1 is the path of systemd, which every base must contain.
const pid1 = "usr/lib/systemd/systemd"

// checkBase returns an error if a local base is for another architecture, before anything is made.
func (b *executor) checkBase(ctx context.Context) error {
	sha := b.input(inputBase).SHA256
	switch {
	case b.Base != "":
		var err error
		if sha, err = b.importFile(ctx, b.Base, ""); err != nil {
			return b.origins[inputBase].withOrigin(err)
		}
	case b.input(inputBase).Make != "" || sha == "" || !b.Cache.Has(sha):
		return nil
	}
	sha, err := fetch.Uncompressed(ctx, b.Cache, sha, maxArchive)
	if err != nil {
		return b.origins.locate(&tree.LayerError{Layer: inputBase, Err: err})
	}
	nodes, err := b.index(sha, inputBase)
	if err != nil {
		return b.origins.locate(err)
	}
	b.base.sha, b.base.nodes = sha, nodes
	i := slices.IndexFunc(nodes, func(n tree.Node) bool { return n.Path == pid1 && n.IsRegular() && n.Data.Size >= 64 })
	if i < 0 {
		return nil // checkTree reports everything that is missing
	}
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer f.Close()
	problem, err := checkProgram(io.NewSectionReader(f, nodes[i].Data.Off, nodes[i].Data.Size), pid1, "its "+pid1, b.img)
	if problem != nil {
		return b.origins.locate(&tree.LayerError{Layer: inputBase, Err: problem})
	}
	return err
}

func inProgramDir(p string) bool {
	for _, d := range []string{"usr/lib/firmware/", "lib/firmware/", "usr/lib/raspi-firmware/"} {
		if strings.HasPrefix(p, d) {
			return false
		}
	}
	for _, d := range programDirs {
		if strings.HasPrefix(p, d) {
			return true
		}
	}
	return false
}

// archError reports a program for another architecture.
type archError struct{ have, want string }

func (e *archError) Error() string {
	return fmt.Sprintf("is for %s, but the image is for %s; use a program for %s", e.have, e.want, e.want)
}

// checkELF checks that a program or shared library is for arch, from its ELF header. It ignores
// object files (kernel modules, BPF).
func checkELF(head [64]byte, arch string) error {
	order := binary.ByteOrder(binary.LittleEndian)
	if elf.Data(head[elf.EI_DATA]) == elf.ELFDATA2MSB {
		order = binary.BigEndian
	}
	kind := elf.Type(order.Uint16(head[16:]))
	machine := elf.Machine(order.Uint16(head[18:]))
	if kind != elf.ET_EXEC && kind != elf.ET_DYN || archOf(machine) == arch {
		return nil
	}
	if arch == "amd64" && machine == elf.EM_386 {
		return nil // amd64 machines also run 32-bit programs
	}
	return &archError{machineName(machine), arch}
}

func machineName(m elf.Machine) string {
	if a := archOf(m); a != "" {
		return a
	}
	return m.String()
}

// checkCNI checks that the image has the plugins of the user's network configuration.
func (b *executor) checkCNI(c *composition) error {
	if c.facts.CNI == nil {
		return nil
	}
	plugins, err := overlays.CNIPlugins(c.facts.CNI)
	if err != nil {
		return fieldError("cni.config", err)
	}
	return checkPlugins(c.merged, plugins, b.inputs[inputCNI].File)
}

// checkPlugins returns an error for each plugin of the network configuration file that is missing.
func checkPlugins(nodes []tree.Node, plugins []string, file string) error {
	have := map[string]bool{}
	for _, n := range nodes {
		dir, name := path.Split(n.Path)
		if dir != "usr/lib/cni/" && dir != "opt/cni/bin/" || n.IsDir() {
			continue
		}
		if n.IsRegular() && n.Mode&0o111 == 0 {
			continue // not executable
		}
		have[name] = true
	}
	var errs []error
	for _, p := range plugins {
		if !have[p] {
			errs = append(errs, fieldError("cni.config", fmt.Errorf("%s uses plugin %s, which is not in /opt/cni/bin or not executable: add it with an overlay (chmod 755), or use another plugin", file, p)))
			have[p] = true // report each plugin once
		}
	}
	return errors.Join(errs...)
}
