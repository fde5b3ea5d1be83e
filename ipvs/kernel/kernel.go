// Package kernel reads and changes the kernel's IPVS table, connections, sockets and
// routes for ipvscare. [Diff] returns the steps from one state of a virtual server to
// another; [Kernel] performs them, one at a time.
//
// Invariants: only the virtual servers that are asked for are touched, and a step never
// leaves a virtual server without a real server that it had and keeps.
package kernel

import (
	"context"
	"errors"
	"net/netip"
)

// ErrNoIPVS means that the kernel has no IP_VS.
var ErrNoIPVS = errors.New("the kernel has no IP_VS: load it with `modprobe ip_vs`, or use a kernel that has it")

// Kernel is what the keeper needs of the machine. It is not safe for
// concurrent use; the keeper's goroutine is its only caller. The real one is
// in kernel_linux.go, tests have one in memory.
type Kernel interface {
	// Ready looks whether IP_VS is there, loading it now and then if that is
	// possible, and returns ErrNoIPVS if it is not.
	Ready() error
	// Service returns a virtual TCP server with its real servers, nil if there is none.
	Service(vip netip.AddrPort) (*Service, error)
	// Apply does one step other than Sever.
	Apply(Op) error
	// Conns returns the connections to vip that are mapped to dest.
	Conns(vip, dest netip.AddrPort) ([]Conn, error)
	// Sever destroys this node's sockets of the connections.
	Sever([]Conn) (int, error)
	// Untrack has connection tracking forget the connections to vip that are
	// mapped to dest.
	Untrack(vip, dest netip.AddrPort) error
	// Stuck returns the real servers from which this node's connections to vip
	// wait for an acknowledgement.
	Stuck(vip netip.AddrPort) ([]netip.AddrPort, error)
	// SeverRemote destroys this node's sockets connected to addr.
	SeverRemote(addr netip.AddrPort) (int, error)
	// Source returns the address from which this node reaches dst.
	Source(dst netip.Addr) (netip.Addr, error)
	// Route returns the source of the local route to vip, if there is one.
	Route(vip netip.Addr) (netip.Addr, bool, error)
	SetRoute(vip, src netip.Addr) error
	// DelRoute removes the route that SetRoute made.
	DelRoute(vip netip.Addr) error
	// Settings puts the kernel's settings right and returns what it changed.
	Settings() ([]string, error)
	// Watch calls wake after routes or addresses changed.
	Watch(ctx context.Context, wake func()) error
}

// ProcSysNet is where the kernel's network settings are.
const ProcSysNet = "/proc/sys/net"
