package ipvs

import (
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// peer returns the ID of the process that listens on a unix socket, in the
// caller's PID namespace.
func peer(path string) (pid int, err error) {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var cerr error
	err = raw.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, cerr); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
