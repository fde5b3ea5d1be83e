package builder

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownMounts has cmd's mounts vanish with it. As root mmdebstrap mounts /proc,
// /sys and /dev below a temporary directory; if it was killed they would stay, and
// whoever cleared that directory away would reach the host's through them. An
// ordinary user's mmdebstrap has a namespace of its own anyway.
func ownMounts(cmd *exec.Cmd) {
	if os.Geteuid() != 0 {
		return
	}
	var caps [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if unix.Capget(&header, &caps[0]) != nil || caps[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return // then it cannot mount either
	}
	if !rootIsMount() {
		return // as in a chroot, where a namespace cannot be kept apart
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
}

// rootIsMount reports whether / is where a file system is mounted.
func rootIsMount() bool { return slices.Contains(mountPoints(), "/") }

// mountsBelow are the mount points in dir, the last one mounted first.
func mountsBelow(dir string) []string {
	var below []string
	for _, at := range mountPoints() {
		if strings.HasPrefix(at, dir+"/") {
			below = append(below, at)
		}
	}
	slices.Reverse(below)
	return below
}

// mountPoints are those of this process; none if the kernel does not list them.
func mountPoints() []string {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	return readMountPoints(string(mounts))
}

// readMountPoints reads them off a mountinfo, where blanks and backslashes of
// names are octal.
func readMountPoints(mounts string) []string {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var points []string
	for line := range strings.Lines(mounts) {
		// 36 35 98:0 /root /mountpoint options …, see proc_pid_mountinfo(5)
		if f := strings.Fields(line); len(f) > 4 {
			points = append(points, unescape.Replace(f[4]))
		}
	}
	return points
}
