// Package kernel reads and changes the kernel's IPVS table, connections,
// sockets and routes for ipvscare. [Diff] returns the steps from one state of a
// virtual server to another; [Kernel] applies one step at a time.
//
// Invariants: only the given virtual servers are changed. No step of Diff removes a real server
// that is in both states.
package kernel

import (
	"context"
	"errors"
	"net/netip"
)

// ErrNoIPVS means that the kernel has no IP_VS.
var ErrNoIPVS = errors.New("the kernel has no IP_VS: load it with `modprobe ip_vs`, or use a kernel that has it")

// Kernel is the interface between ipvs's reconciler and the machine. It is not safe for concurrent
// use; only the reconciler's goroutine calls it. Open returns the real implementation; tests use
// one in memory.
type Kernel interface {
	// Ready returns ErrNoIPVS if the kernel has no IP_VS. It tries to load the
	// module, with growing pauses between attempts.
	Ready() error
	// Service returns a virtual TCP server with its real servers, or nil if
	// there is none.
	Service(vip netip.AddrPort) (*Service, error)
	// Apply applies one step. A Sever step is made with the method Sever instead.
	Apply(Op) error
	// Sent returns the number of packets that this node's programs have sent through IPVS. It is
	// exact; the kernel's counters of the real servers are updated only every 2 s.
	Sent() (uint64, error)
	// Conns returns the connections to vip that IPVS forwards to dest.
	Conns(vip, dest netip.AddrPort) ([]Conn, error)
	// Sever closes this node's sockets of the connections and returns their
	// number.
	Sever([]Conn) (int, error)
	// Untrack deletes from connection tracking the connections to vip that are forwarded to dest.
	Untrack(vip, dest netip.AddrPort) error
	// Stuck returns the real servers that do not acknowledge packets of this node's connections to
	// vip.
	Stuck(vip netip.AddrPort) ([]netip.AddrPort, error)
	// SeverRemote closes this node's sockets connected to addr and returns
	// their number.
	SeverRemote(addr netip.AddrPort) (int, error)
	// Source returns the address from which this node reaches dst.
	Source(dst netip.Addr) (netip.Addr, error)
	// Route returns the source address of the local route to vip, and whether there is such a
	// route.
	Route(vip netip.Addr) (netip.Addr, bool, error)
	SetRoute(vip, src netip.Addr) error
	// DelRoute removes the route that SetRoute made.
	DelRoute(vip netip.Addr) error
	// Settings corrects the kernel's settings and returns the files that it
	// changed.
	Settings() ([]string, error)
	// Watch calls wake after changes of routes or addresses, until the context ends.
	Watch(ctx context.Context, wake func()) error
}

// ProcSysNet is the directory of the kernel's network settings.
const ProcSysNet = "/proc/sys/net"
