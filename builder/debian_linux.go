package builder

import (
	"encoding/binary"
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

// letEnter lets one more user than the owner list and enter a directory that is the
// owner's alone. It is the access control list of setfacl -m u:UID:r-x.
func letEnter(dir string, uid uint32) error {
	const (
		version                   = 2
		owner, user, group        = 0x01, 0x02, 0x04 // linux/posix_acl.h
		mask, other               = 0x10, 0x20
		read, write, enter uint16 = 4, 2, 1
		noID               uint32 = 1<<32 - 1
	)
	acl := binary.LittleEndian.AppendUint32(nil, version)
	for _, e := range []struct {
		tag, may uint16
		id       uint32
	}{{owner, read | write | enter, noID}, {user, read | enter, uid}, {group, 0, noID}, {mask, read | enter, noID}, {other, 0, noID}} {
		acl = binary.LittleEndian.AppendUint16(acl, e.tag)
		acl = binary.LittleEndian.AppendUint16(acl, e.may)
		acl = binary.LittleEndian.AppendUint32(acl, e.id)
	}
	return unix.Setxattr(dir, "system.posix_acl_access", acl, 0)
}
