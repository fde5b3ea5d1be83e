package builder

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/procgroup"
)

// emulation is what this computer has for running programs of another
// architecture: the scripts of Debian's packages are such programs, or call
// them. Only a base that is made from packages needs it.
type emulation struct {
	arch   string
	works  bool // they run
	tester bool // arch-test is there, which mmdebstrap asks
	// interpreter is qemu-user's program, registered whether the kernel has been
	// told to call it; systemd whether that is what tells it here.
	interpreter, registered, systemd bool
	// off is the registration that somebody has switched off.
	off string
	// distribution is ID and ID_LIKE of os-release.
	distribution string
}

// interpreters are what qemu-user calls architectures.
var interpreters = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

const binfmt = "/proc/sys/fs/binfmt_misc"

func lookForEmulation(ctx context.Context, arch string) emulation {
	e := emulation{arch: arch, interpreter: true}
	if _, err := exec.LookPath("arch-test"); err == nil {
		e.tester = true
		e.works = procgroup.Command(ctx, "arch-test", arch).Run() == nil
	}
	cpu := interpreters[arch]
	// qemu-user alone is a program that nothing tells the kernel of.
	if _, err := exec.LookPath("qemu-" + cpu + "-static"); err != nil {
		_, err := exec.LookPath("qemu-" + cpu)
		etc, _ := filepath.Glob("/etc/binfmt.d/qemu-" + cpu + "*.conf")
		lib, _ := filepath.Glob("/usr/lib/binfmt.d/qemu-" + cpu + "*.conf")
		e.interpreter = err == nil && len(etc)+len(lib) > 0
	}
	registered, _ := filepath.Glob(filepath.Join(binfmt, "qemu-"+cpu+"*"))
	e.registered = len(registered) > 0
	for _, name := range registered {
		if state, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(state), "disabled") {
			e.off = name
		}
	}
	_, err := os.Stat("/run/systemd/system")
	e.systemd = err == nil
	text, _ := os.ReadFile("/etc/os-release") // none: a distribution that is not known
	e.distribution = distribution(string(text))
	return e
}

// distribution reads ID and ID_LIKE off an os-release file.
func distribution(osRelease string) string {
	var names []string
	for line := range strings.Lines(osRelease) {
		key, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		if key == "ID" || key == "ID_LIKE" {
			names = append(names, strings.Fields(strings.Trim(v, `"'`))...)
		}
	}
	return strings.Join(names, " ")
}

// problem says why programs of the architecture do not run here, and what to
// do about it; nil: they do.
func (e emulation) problem() error {
	if e.works {
		return nil
	}
	return fmt.Errorf("making the Debian base for %[1]s runs %[1]s programs, and this computer does not run them: %[2]s; or build on an %[1]s computer, or give a base made on one (--export-base there, --base here)", e.arch, e.fix())
}

// fix is what to do, on this distribution.
func (e emulation) fix() string {
	known := strings.Fields(e.distribution)
	is := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return slices.Contains(known, n) })
	}
	cpu := interpreters[e.arch]
	switch {
	case e.interpreter && e.tester && e.off != "":
		return "qemu-" + cpu + " is registered with the kernel, but switched off: echo 1 >" + e.off + ", as root"
	case e.interpreter && e.tester && e.registered:
		return "qemu-" + cpu + " is registered with the kernel, but does not start: install qemu-user-static again"
	case e.interpreter && e.tester && e.systemd:
		return "tell the kernel to run them with qemu-" + cpu + ": systemctl restart systemd-binfmt"
	case e.interpreter && e.tester && is("debian"):
		return "tell the kernel to run them with qemu-" + cpu + ", as root, on the host where this is a container: " +
			"mount -t binfmt_misc binfmt_misc " + binfmt + "; cat /usr/lib/binfmt.d/qemu-" + cpu + ".conf >" + binfmt + "/register"
	case e.interpreter && e.tester:
		return "tell the kernel to run them with qemu-" + cpu + " (binfmt_misc), on the host where this is a container"
	case is("debian", "ubuntu"):
		return "apt-get install qemu-user-static arch-test"
	case is("fedora", "rhel"):
		return "dnf install qemu-user-static arch-test"
	case is("arch"):
		return "pacman -S qemu-user-static qemu-user-static-binfmt, and arch-test from the AUR"
	case is("suse", "opensuse"):
		return "zypper install qemu-linux-user arch-test"
	}
	return "install qemu-user-static, which tells the kernel to run them with it (binfmt_misc), and arch-test"
}
