package builder

import (
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownMounts has cmd's mounts vanish with it. As root mmdebstrap mounts /proc,
// /sys and /dev below a temporary folder; if it was killed they would stay, and
// whoever cleared that folder away would reach the host's through them. An
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
func rootIsMount() bool {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(mounts)) {
		// 36 35 98:0 /root /mountpoint options …, see proc_pid_mountinfo(5)
		if f := strings.Fields(line); len(f) > 4 && f[4] == "/" {
			return true
		}
	}
	return false
}
