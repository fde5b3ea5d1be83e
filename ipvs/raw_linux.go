package ipvs

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// All raw system calls are in this file. They are for what is done forever and
// never waits in the kernel: the scheduler is not told of them. A call that it
// is told of wakes the runtime's monitor thread whenever the process was idle,
// which then looks around every 20 µs for a while. Together with one timer for
// all alarms that took sensing from 55 ms to 16 ms of processor time in 20 s
// (docs/decisions/0010-ipvscare-own-http2.md), and from 1.1 to 1.3 times
// lvscare's to half of it (test/bench/results/ipvs.md).

// quietConn is a TCP connection whose reads and writes the scheduler is not
// told of. Waiting for more is done by the runtime's poller, as ever.
type quietConn struct {
	net.Conn
	raw syscall.RawConn

	// One reader and one writer at a time; tls.Conn sees to that. The calls
	// are made once, since a closure for each would be garbage.
	in, out   exchange
	readOnce  func(fd uintptr) bool
	writeOnce func(fd uintptr) bool
}

// exchange is one call and its result.
type exchange struct {
	b     []byte
	n     int
	errno syscall.Errno
}

// do calls read or write until a signal does not interrupt it.
func (x *exchange) do(trap, fd uintptr) {
	for {
		n, _, errno := unix.RawSyscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(x.b))), uintptr(len(x.b)))
		if errno == unix.EINTR {
			continue
		}
		x.n, x.errno = int(n), errno
		if errno != 0 {
			x.n = 0
		}
		return
	}
}

// quiet makes a TCP connection a quiet one. Of any other it makes none.
func quiet(nc net.Conn) *quietConn {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	c := &quietConn{Conn: nc, raw: raw}
	c.readOnce = func(fd uintptr) bool {
		c.in.do(unix.SYS_READ, fd)
		return c.in.errno != unix.EAGAIN
	}
	c.writeOnce = func(fd uintptr) bool {
		c.out.do(unix.SYS_WRITE, fd)
		return true
	}
	return c
}

func (c *quietConn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	c.in = exchange{b: b}
	err := c.raw.Read(c.readOnce)
	x := c.in
	c.in = exchange{}
	switch {
	case err != nil:
		return 0, c.failed("read", err)
	case x.errno != 0:
		return 0, c.failed("read", os.NewSyscallError("read", x.errno))
	case x.n == 0:
		return 0, io.EOF
	}
	return x.n, nil
}

// Write waits at most writeTime where the socket's buffer is full.
func (c *quietConn) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	c.out = exchange{b: b}
	err := c.raw.Write(c.writeOnce)
	x := c.out
	c.out = exchange{}
	switch {
	case err != nil:
		return 0, c.failed("write", err)
	case x.errno != 0 && x.errno != unix.EAGAIN:
		return 0, c.failed("write", os.NewSyscallError("write", x.errno))
	case x.n == len(b):
		return x.n, nil
	}
	c.Conn.SetWriteDeadline(time.Now().Add(writeTime))
	m, err := c.Conn.Write(b[x.n:])
	return x.n + m, err
}

// failed words an error as net does.
func (c *quietConn) failed(op string, err error) error {
	if raw, ok := errors.AsType[*net.OpError](err); ok {
		err = raw.Err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// setTimer sets a timerfd, which never waits.
func setTimer(fd uintptr, spec *unix.ItimerSpec) {
	unix.RawSyscall6(unix.SYS_TIMERFD_SETTIME, fd, 0, uintptr(unsafe.Pointer(spec)), 0, 0, 0)
}

// pread is File.ReadAt, once, of a file that is there without waiting, as
// those of /proc are.
func pread(f *os.File, b []byte, off int64) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	vec := unix.Iovec{Base: unsafe.SliceData(b)}
	vec.SetLen(len(b))
	for {
		// The offset goes in two halves of a word's size each.
		n, _, errno := unix.RawSyscall6(unix.SYS_PREADV, f.Fd(), uintptr(unsafe.Pointer(&vec)), 1,
			uintptr(off), uintptr(uint64(off)>>32), 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return 0, &os.PathError{Op: "read", Path: f.Name(), Err: errno}
		case n == 0:
			return 0, io.EOF
		}
		return int(n), nil
	}
}
