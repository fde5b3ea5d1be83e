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

// ownMounts runs cmd in its own mount namespace if this process is root. Otherwise, a killed
// mmdebstrap would leave /proc, /sys and /dev mounted in its directory, and removing the directory
// would remove this computer's files. For an ordinary user, mmdebstrap makes its own namespace.
func ownMounts(cmd *exec.Cmd) {
	if os.Geteuid() != 0 {
		return
	}
	var caps [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if unix.Capget(&header, &caps[0]) != nil || caps[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return // without this capability, mmdebstrap cannot mount either
	}
	if !rootIsMount() {
		return // in a chroot, mounts cannot be made private
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
}

// rootIsMount reports whether / is a mount point.
func rootIsMount() bool { return slices.Contains(mountPoints(), "/") }

// mountsBelow returns the mount points below dir in reverse order of mounting.
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

// mountPoints returns the mount points of this process, or nil if they cannot be read.
func mountPoints() []string {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	return readMountPoints(string(mounts))
}

// readMountPoints parses a mountinfo file, in which blanks and backslashes are octal escapes.
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

// grantAccess lets another user list and enter a directory, like setfacl -m u:UID:r-x.
func grantAccess(dir string, uid uint32) error {
	const (
		version                   = 2
		owner, user, group        = 0x01, 0x02, 0x04 // from linux/posix_acl.h
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
