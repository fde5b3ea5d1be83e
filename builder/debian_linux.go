package builder

import (
	"os"
	"os/exec"
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
}
