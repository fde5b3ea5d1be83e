package ipvs

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// routeProtocol marks the routes that are ours, so that clean removes no
// other.
const routeProtocol = 101

// Flags of a virtual server that matter: persistent, one-packet and the
// schedulers' own. The kernel adds "hashed" (2) by itself.
const serviceFlags = 0x1 | 0x4 | 0x8 | 0x10 | 0x20

// kernel is the machine's own, by netlink and /proc, in the network
// namespace of this process.
type kernel struct {
	handle   *mobyipvs.Handle
	steady   steady
	sockets  procFile
	settings *sysctls
}

// OpenKernel returns the machine's kernel, with its settings below sysctlDir,
// ProcSysNet by default. It needs root, and no IP_VS yet.
func OpenKernel(sysctlDir string) (Kernel, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("ipvscare must run as root: it changes the kernel's tables")
	}
	return &kernel{settings: newSysctls(cmp.Or(sysctlDir, ProcSysNet))}, nil
}

// Ready asks the kernel itself first: moby/ipvs remembers forever what it
// found out first, and reports success on a kernel without IP_VS.
func (k *kernel) Ready() error {
	if _, err := netlink.GenlFamilyGet("IPVS"); err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		// No modprobe or no module: the second look tells.
		exec.CommandContext(ctx, "modprobe", "-q", "ip_vs").Run()
		if _, err := netlink.GenlFamilyGet("IPVS"); err != nil {
			k.Close()
			return errNoIPVS
		}
	}
	if k.handle != nil {
		return nil
	}
	h, err := mobyipvs.New("")
	if err != nil {
		return fmt.Errorf("opening IPVS: %w", err)
	}
	k.handle = h
	return nil
}

// Close lets go of the handle.
func (k *kernel) Close() {
	if k.handle != nil {
		k.handle.Close()
		k.handle = nil
	}
	k.steady.table.close()
}

// gone turns the error of a removed module into errNoIPVS.
func (k *kernel) gone(err error) error {
	if err == nil {
		return nil
	}
	if _, ferr := netlink.GenlFamilyGet("IPVS"); ferr != nil {
		k.Close()
		return errNoIPVS
	}
	return err
}

func (k *kernel) Services() ([]Service, error) {
	if k.handle == nil {
		if err := k.Ready(); err != nil {
			return nil, err
		}
	}
	list, err := k.handle.GetServices()
	if err != nil {
		return nil, k.gone(fmt.Errorf("listing virtual servers: %w", err))
	}
	var all []Service
	for _, s := range list {
		vip, ok := netip.AddrFromSlice(s.Address)
		if !ok || s.Protocol != unix.IPPROTO_TCP || s.FWMark != 0 {
			continue
		}
		svc := Service{VIP: netip.AddrPortFrom(vip, s.Port), Scheduler: s.SchedName, Flags: s.Flags & serviceFlags}
		dests, err := k.handle.GetDestinations(s)
		if err != nil {
			return nil, fmt.Errorf("listing real servers of %s: %w", svc.VIP, err)
		}
		for _, d := range dests {
			addr, ok := netip.AddrFromSlice(d.Address)
			if !ok {
				return nil, fmt.Errorf("listing real servers of %s: unreadable address %v", svc.VIP, d.Address)
			}
			svc.Dests = append(svc.Dests, Dest{netip.AddrPortFrom(addr, d.Port), d.Weight,
				Forward(d.ConnectionFlags & mobyipvs.ConnectionFlagFwdMask)})
		}
		all = append(all, svc)
	}
	return all, nil
}

func (k *kernel) Apply(op Op) error {
	if k.handle == nil {
		return errNoIPVS
	}
	s := &mobyipvs.Service{
		Address: op.Service.VIP.Addr().AsSlice(), Port: op.Service.VIP.Port(), Protocol: unix.IPPROTO_TCP,
		SchedName: op.Service.Scheduler, Flags: op.Service.Flags,
		AddressFamily: unix.AF_INET, Netmask: 0xffffffff,
	}
	d := &mobyipvs.Destination{AddressFamily: unix.AF_INET}
	if op.Service.VIP.Addr().Is6() {
		s.AddressFamily, s.Netmask, d.AddressFamily = unix.AF_INET6, 128, unix.AF_INET6
	}
	if op.Kind > DelService {
		d.Address, d.Port = op.Dest.Addr.Addr().AsSlice(), op.Dest.Addr.Port()
		d.Weight, d.ConnectionFlags = op.Dest.Weight, uint32(op.Dest.Forward)
	}
	switch op.Kind {
	case AddService:
		return k.handle.NewService(s)
	case UpdateService:
		return k.handle.UpdateService(s)
	case DelService:
		return k.handle.DelService(s)
	case AddDest:
		return k.handle.NewDestination(s, d)
	case UpdateDest:
		return k.handle.UpdateDestination(s, d)
	case DelDest:
		return k.handle.DelDestination(s, d)
	}
	return fmt.Errorf("%s is not a step of the kernel's", op.Kind)
}

func (k *kernel) Steady(want []Service) (bool, error) {
	if ok, err := k.settings.steady(); !ok {
		return false, err
	}
	return k.steady.same(procServices, want)
}

func (k *kernel) Settings() ([]string, error) { return k.settings.ensure() }

func (k *kernel) Conns(vip, dest netip.AddrPort) ([]Conn, error) {
	return readConns(procConns, vip, dest)
}

// destroyRequest is the kernel's struct inet_diag_req_v2, naming one socket.
type destroyRequest struct{ local, remote netip.AddrPort }

func (r *destroyRequest) Len() int { return 56 }

func (r *destroyRequest) Serialize() []byte {
	b := make([]byte, 56)
	b[0], b[1] = unix.AF_INET, unix.IPPROTO_TCP
	if r.remote.Addr().Is6() {
		b[0] = unix.AF_INET6
	}
	binary.NativeEndian.PutUint32(b[4:], 0xffffffff) // any state
	binary.BigEndian.PutUint16(b[8:], r.local.Port())
	binary.BigEndian.PutUint16(b[10:], r.remote.Port())
	copy(b[12:28], r.local.Addr().AsSlice())
	copy(b[28:44], r.remote.Addr().AsSlice())
	binary.NativeEndian.PutUint64(b[48:], ^uint64(0)) // no cookie
	return b
}

// Sever uses one netlink socket for all: opening one for each of a thousand
// connections would take most of the time.
func (k *kernel) Sever(conns []Conn) (int, error) {
	sock, err := nl.Subscribe(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, fmt.Errorf("opening socket diagnosis: %w", err)
	}
	defer sock.Close()
	handles := map[int]*nl.SocketHandle{unix.NETLINK_SOCK_DIAG: {Socket: sock}}
	n := 0
	for _, c := range conns {
		req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		req.Sockets = handles
		req.AddData(&destroyRequest{local: c.Client, remote: c.Virtual})
		_, err := req.Execute(unix.NETLINK_SOCK_DIAG, 0)
		switch {
		case err == nil:
			n++
		case errors.Is(err, unix.ENOENT): // forwarded for somebody else, or gone
		case errors.Is(err, unix.EOPNOTSUPP):
			return n, fmt.Errorf("destroying sockets: this kernel lacks CONFIG_INET_DIAG_DESTROY: %w", err)
		default:
			return n, fmt.Errorf("destroying the socket %s -> %s: %w", c.Client, c.Virtual, err)
		}
	}
	return n, nil
}

// tracked are the connections to a virtual server that are mapped to one real
// server.
type tracked struct{ vip, dest netip.AddrPort }

func (c tracked) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	to, _ := netip.AddrFromSlice(f.Forward.DstIP)
	from, _ := netip.AddrFromSlice(f.Reverse.SrcIP)
	return f.Forward.Protocol == unix.IPPROTO_TCP &&
		netip.AddrPortFrom(to.Unmap(), f.Forward.DstPort) == c.vip &&
		netip.AddrPortFrom(from.Unmap(), f.Reverse.SrcPort) == c.dest
}

func (k *kernel) Untrack(vip, dest netip.AddrPort) error {
	if n, err := os.ReadFile(k.settings.tracking); err != nil || string(n) == "0\n" {
		return nil // nothing is tracked here
	}
	family := netlink.InetFamily(unix.AF_INET)
	if vip.Addr().Is6() {
		family = unix.AF_INET6
	}
	_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, tracked{vip, dest})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a kernel without nf_conntrack_netlink; it costs a second
	}
	if err != nil {
		return fmt.Errorf("forgetting tracked connections: %w", err)
	}
	return nil
}

func (k *kernel) Stuck(vip netip.AddrPort) ([]netip.AddrPort, error) {
	path := procTCP
	if vip.Addr().Is6() {
		path = procTCP6
	}
	// Virtual servers of both families take turns with the file.
	if k.sockets.file != nil && k.sockets.file.Name() != path {
		k.sockets.close()
	}
	text, err := k.sockets.read(path)
	if err != nil {
		return nil, err
	}
	local := stuckSockets(text, vip)
	if len(local) == 0 {
		return nil, nil
	}
	conns, err := os.ReadFile(procConns)
	if err != nil {
		return nil, err
	}
	return stuckBehind(conns, vip, local), nil
}

func (k *kernel) SeverRemote(addr netip.AddrPort) (int, error) {
	family := uint8(unix.AF_INET)
	if addr.Addr().Is6() {
		family = unix.AF_INET6
	}
	socks, err := netlink.SocketDiagTCP(family)
	if err != nil {
		return 0, fmt.Errorf("listing sockets: %w", err)
	}
	var conns []Conn
	for _, s := range socks {
		remote, _ := netip.AddrFromSlice(s.ID.Destination)
		local, ok := netip.AddrFromSlice(s.ID.Source)
		if ok && netip.AddrPortFrom(remote.Unmap(), s.ID.DestinationPort) == addr {
			conns = append(conns, Conn{Client: netip.AddrPortFrom(local.Unmap(), s.ID.SourcePort), Virtual: addr})
		}
	}
	return k.Sever(conns)
}

func (k *kernel) Source(dst netip.Addr) (netip.Addr, error) {
	routes, err := netlink.RouteGet(dst.AsSlice())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("looking up the route to %s: %w", dst, err)
	}
	for _, r := range routes {
		if a, ok := netip.AddrFromSlice(r.Src); ok {
			return a.Unmap(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("the route to %s has no source address", dst)
}

// Route asks how a packet to vip would go now, which is what counts, however
// many tables and rules there are.
func (k *kernel) Route(vip netip.Addr) (netip.Addr, bool, error) {
	routes, err := netlink.RouteGet(vip.AsSlice())
	if err != nil { // no way at all: the route is to be made
		return netip.Addr{}, false, nil
	}
	for _, r := range routes {
		src, ok := netip.AddrFromSlice(r.Src)
		if ok && r.Type == unix.RTN_LOCAL {
			return src.Unmap(), true, nil
		}
	}
	return netip.Addr{}, false, nil
}

func (k *kernel) viaLoopback(vip, src netip.Addr) (*netlink.Route, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("finding lo: %w", err)
	}
	if lo.Attrs().Flags&net.FlagUp == 0 {
		if err := netlink.LinkSetUp(lo); err != nil {
			return nil, fmt.Errorf("setting lo up: %w", err)
		}
	}
	r := &netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: routeProtocol,
		Scope: netlink.SCOPE_HOST,
		Dst:   &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(vip.BitLen(), vip.BitLen())},
	}
	if vip.Is6() {
		r.Scope = netlink.SCOPE_UNIVERSE
	}
	if src.IsValid() {
		r.Src = src.AsSlice()
	}
	return r, nil
}

func (k *kernel) SetRoute(vip, src netip.Addr) error {
	r, err := k.viaLoopback(vip, src)
	if err != nil {
		return err
	}
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("making the local route to %s with the source %s: %w", vip, src, err)
	}
	return nil
}

func (k *kernel) DelRoute(vip netip.Addr) error {
	r, err := k.viaLoopback(vip, netip.Addr{})
	if err != nil {
		return err
	}
	if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing the local route to %s: %w", vip, err)
	}
	return nil
}

func (k *kernel) Watch(ctx context.Context, wake func()) error {
	sock, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return err
	}
	fd, err := unix.Dup(sock.GetFd())
	sock.Close()
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return err
	}
	f := os.NewFile(uintptr(fd), "rtnetlink") // waits in the runtime's poller, not in a thread
	context.AfterFunc(ctx, func() { f.Close() })
	go func() {
		buf := make([]byte, 8<<10)
		for ctx.Err() == nil {
			// What changed does not matter, nor does a lost message (ENOBUFS):
			// the keeper looks for itself.
			if _, err := f.Read(buf); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			wake()
		}
	}()
	return nil
}
