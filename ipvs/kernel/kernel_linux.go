package kernel

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// routeProtocol marks ipvscare's routes, so that `ipvscare clean` removes no others.
const routeProtocol = 101

// serviceFlags are the flags of a virtual server that are compared: persistent, one-packet and
// those of schedulers. "hashed" (2) is ignored, because the kernel itself adds it.
const serviceFlags = 0x1 | 0x4 | 0x8 | 0x10 | 0x20

// linux implements Kernel with netlink and /proc, in the network namespace of
// this process.
type linux struct {
	handle   *mobyipvs.Handle
	sockets  procFile
	settings *sysctls
	module   module
}

// Open returns the machine's kernel. sysctlDir is the directory of its settings; default:
// ProcSysNet. Open needs root, but not IP_VS.
func Open(sysctlDir string) (Kernel, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("ipvscare must run as root: it changes the kernel's tables")
	}
	return &linux{settings: newSysctls(cmp.Or(sysctlDir, ProcSysNet)), module: module{
		shown: func() bool {
			_, err := os.Stat(procServices)
			return err == nil
		},
		known: func() bool {
			_, err := netlink.GenlFamilyGet("IPVS")
			return err == nil
		},
		load: func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			// If modprobe or the module is missing, the next check finds that out.
			exec.CommandContext(ctx, "modprobe", "-q", "ip_vs").Run()
		},
	}}, nil
}

// Ready first checks the kernel itself, because moby/ipvs never repeats its first check and reports
// success on a kernel without IP_VS.
func (k *linux) Ready() error {
	if !k.module.ready(time.Now()) {
		k.Close()
		return ErrNoIPVS
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

// Close closes the handle.
func (k *linux) Close() {
	if k.handle != nil {
		k.handle.Close()
		k.handle = nil
	}
}

// gone returns ErrNoIPVS instead of an error caused by an unloaded module.
func (k *linux) gone(err error) error {
	if err == nil {
		return nil
	}
	if !k.module.known() {
		k.Close()
		return ErrNoIPVS
	}
	return err
}

func (k *linux) Service(vip netip.AddrPort) (*Service, error) {
	if k.handle == nil {
		if err := k.Ready(); err != nil {
			return nil, err
		}
	}
	asked := serviceAt(vip)
	s, err := k.handle.GetService(asked)
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if errors.Is(err, unix.ENOENT) { // the module was removed, and perhaps loaded again since
		k.Close()
		return nil, ErrNoIPVS
	}
	if err != nil {
		return nil, k.gone(fmt.Errorf("reading the virtual server %s: %w", vip, err))
	}
	svc := &Service{VIP: vip, Scheduler: s.SchedName, Flags: s.Flags & serviceFlags, Conns: make(map[netip.AddrPort]Conns)}
	dests, err := k.handle.GetDestinations(asked)
	if err != nil {
		return nil, k.gone(fmt.Errorf("listing real servers of %s: %w", vip, err))
	}
	for _, d := range dests {
		addr, ok := netip.AddrFromSlice(d.Address)
		if !ok {
			return nil, fmt.Errorf("listing real servers of %s: unreadable address %v", vip, d.Address)
		}
		dest := Dest{netip.AddrPortFrom(addr, d.Port), d.Weight, Forward(d.ConnectionFlags & mobyipvs.ConnectionFlagFwdMask)}
		svc.Dests = append(svc.Dests, dest)
		svc.Conns[dest.Addr] = Conns{d.ActiveConnections, d.InactiveConnections}
	}
	return svc, nil
}

func (k *linux) Sent() (uint64, error) {
	b, err := os.ReadFile(procStats)
	if errors.Is(err, fs.ErrNotExist) { // IP_VS was unloaded; reading the services reports that
		return 0, nil
	}
	return sentPackets(b), err
}

// serviceAt returns the key that identifies a virtual TCP server to the kernel.
func serviceAt(vip netip.AddrPort) *mobyipvs.Service {
	s := &mobyipvs.Service{Address: vip.Addr().AsSlice(), Port: vip.Port(), Protocol: unix.IPPROTO_TCP,
		AddressFamily: unix.AF_INET, Netmask: 0xffffffff}
	if vip.Addr().Is6() {
		s.AddressFamily, s.Netmask = unix.AF_INET6, 128
	}
	return s
}

func (k *linux) Apply(op Op) error {
	if k.handle == nil {
		return ErrNoIPVS
	}
	s := serviceAt(op.Service.VIP)
	s.SchedName, s.Flags = op.Service.Scheduler, op.Service.Flags
	d := &mobyipvs.Destination{AddressFamily: s.AddressFamily}
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
	return fmt.Errorf("%s does not change the kernel's table", op.Kind)
}

func (k *linux) Settings() ([]string, error) { return k.settings.ensure() }

func (k *linux) Conns(vip, dest netip.AddrPort) ([]Conn, error) {
	return readConns(procConns, vip, dest)
}

// destroyRequest is the kernel's struct inet_diag_req_v2 for one socket.
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

// Sever uses one netlink socket for all connections. With a thousand connections, opening a socket
// for each would take most of the time.
func (k *linux) Sever(conns []Conn) (int, error) {
	sock, err := nl.Subscribe(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, fmt.Errorf("opening socket diagnosis: %w", err)
	}
	defer sock.Close()
	handles := map[int]*nl.SocketHandle{unix.NETLINK_SOCK_DIAG: {Socket: sock}}
	n := 0
	var failed error
	for _, c := range conns {
		req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		req.Sockets = handles
		req.AddData(&destroyRequest{local: c.Client, remote: c.Virtual})
		_, err := req.Execute(unix.NETLINK_SOCK_DIAG, 0)
		switch {
		case err == nil:
			n++
		case errors.Is(err, unix.ENOENT): // not a socket of this node, or already closed
		case failed == nil:
			failed = fmt.Errorf("destroying a socket connected to %s: %w", c.Virtual, err)
		}
	}
	if errors.Is(failed, unix.EOPNOTSUPP) {
		// Before 6.0, Linux does not destroy closed sockets, which it keeps for a minute. If it
		// destroyed any others, that is success.
		if n > 0 {
			return n, nil
		}
		return 0, fmt.Errorf("destroying sockets: this kernel lacks CONFIG_INET_DIAG_DESTROY, or they are closed: %w", failed)
	}
	return n, failed
}

func (k *linux) Untrack(vip, dest netip.AddrPort) error {
	if n, err := os.ReadFile(k.settings.tracking); err != nil || string(n) == "0\n" {
		return nil // connection tracking is not in use
	}
	err := untrack(vip, dest, true)
	if unsupported(err) {
		err = untrack(vip, dest, false)
	}
	if unsupported(err) {
		return nil // kernel without nf_conntrack_netlink: a connecting client waits one second
	}
	if err != nil {
		return fmt.Errorf("removing tracked connections: %w", err)
	}
	return nil
}

func unsupported(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

func (k *linux) Stuck(vip netip.AddrPort) ([]netip.AddrPort, error) {
	path := procTCP
	if vip.Addr().Is6() {
		path = procTCP6
	}
	var local []netip.AddrPort
	for {
		text, err := k.sockets.next(path)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		local = append(local, stuckSockets(text, vip)...)
	}
	if len(local) == 0 {
		return nil, nil
	}
	var table procFile
	defer table.close()
	var behind []netip.AddrPort
	for {
		text, err := table.next(procConns)
		if err == io.EOF {
			return behind, nil
		}
		if err != nil {
			return nil, err
		}
		for _, a := range stuckBehind(text, vip, local) {
			if !slices.Contains(behind, a) {
				behind = append(behind, a)
			}
		}
	}
}

func (k *linux) SeverRemote(addr netip.AddrPort) (int, error) {
	conns, err := socketsTo(addr)
	if err != nil {
		return 0, fmt.Errorf("listing sockets: %w", err)
	}
	return k.Sever(conns)
}

func (k *linux) Source(dst netip.Addr) (netip.Addr, error) {
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

// Route uses the kernel's route lookup, so the result includes all routing tables and rules.
func (k *linux) Route(vip netip.Addr) (netip.Addr, bool, error) {
	routes, err := netlink.RouteGet(vip.AsSlice())
	if err != nil { // no route: SetRoute must add one
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

func (k *linux) viaLoopback(vip, src netip.Addr) (*netlink.Route, error) {
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

func (k *linux) SetRoute(vip, src netip.Addr) error {
	r, err := k.viaLoopback(vip, src)
	if err != nil {
		return err
	}
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("making the local route to %s with the source %s: %w", vip, src, err)
	}
	return nil
}

func (k *linux) DelRoute(vip netip.Addr) error {
	r, err := k.viaLoopback(vip, netip.Addr{})
	if err != nil {
		return err
	}
	if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing the local route to %s: %w", vip, err)
	}
	return nil
}

func (k *linux) Watch(ctx context.Context, wake func()) error {
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
			// The content of a message is irrelevant, and a lost message (ENOBUFS) does no harm:
			// the reconciler checks the routes itself.
			if _, err := f.Read(buf); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			wake()
		}
	}()
	return nil
}

// The kernel's tables of connections and sockets may be large: a busy node tracks a hundred
// thousand connections. The entries are read one by one through one buffer, and filtered by the
// kernel if possible.

// dumpBuffer is the size of a netlinkConn's read buffer. The kernel never sends larger messages.
const dumpBuffer = 32 << 10

// askTime is the timeout for each part of an answer.
const askTime = 10 * time.Second

// netlinkConn is a netlink socket that reads through one buffer.
type netlinkConn struct {
	fd  int
	buf []byte
}

func dialNetlink(protocol int) (*netlinkConn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	c := &netlinkConn{fd: fd, buf: make([]byte, dumpBuffer)}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, new(unix.NsecToTimeval(askTime.Nanoseconds())))
	}
	if err != nil {
		c.close()
		return nil, os.NewSyscallError("bind", err)
	}
	return c, nil
}

func (c *netlinkConn) close() { unix.Close(c.fd) }

// ask sends one request and calls f with each entry of the answer. f must not keep the entry. ask
// returns at the end of the answer or with the first error of f. After an error the connection must
// not be used again.
func (c *netlinkConn) ask(kind, flags uint16, request []byte, f func(entry []byte) error) error {
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(request)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|flags)
	m = append(m, make([]byte, 8)...) // no sequence number: only one request at a time
	if err := unix.Sendto(c.fd, append(m, request...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	for {
		n, _, status, _, err := unix.Recvmsg(c.fd, c.buf, nil, 0)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return fmt.Errorf("no answer from the kernel in %s", askTime)
		case err != nil:
			return os.NewSyscallError("recvmsg", err)
		case status&unix.MSG_TRUNC != 0:
			return fmt.Errorf("the kernel sent more than %d bytes at once", len(c.buf))
		}
		for b := c.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.NLMSG_HDRLEN || size > len(b) {
				return fmt.Errorf("the kernel sent a message of %d bytes in a packet of %d", size, len(b))
			}
			body := b[unix.NLMSG_HDRLEN:size]
			switch binary.NativeEndian.Uint16(b[4:]) {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if len(body) >= 4 {
					if errno := int32(binary.NativeEndian.Uint32(body)); errno != 0 {
						return unix.Errno(-errno)
					}
				}
				return nil
			}
			if f != nil {
				if err := f(body); err != nil {
					return err
				}
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// Messages of connection tracking, from linux/netfilter/nfnetlink_conntrack.h.
const (
	trackNew    = unix.NFNL_SUBSYS_CTNETLINK << 8
	trackGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	trackDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	attrOrigin, attrReply, attrFilter = 1, 2, 25
	attrTupleIP, attrTupleProto       = 1, 2
	attrSource4, attrDest4            = 1, 2 // the numbers for IPv6 are larger by two
	attrProto, attrSourcePort         = 1, 2
	attrDestPort                      = 3
	attrOriginFlags, attrReplyFlags   = 1, 2

	// Parts of a tuple that a filter can compare.
	filterSource, filterDest         = 1 << 0, 1 << 1
	filterProto                      = 1 << 3
	filterSourcePort, filterDestPort = 1 << 4, 1 << 5
)

// appendAttr appends one attribute. Attributes that contain attributes are
// flagged as nested.
func appendAttr(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, -len(value)&3)...)
}

func appendNest(b []byte, kind uint16, values ...[]byte) []byte {
	var all []byte
	for _, v := range values {
		all = append(all, v...)
	}
	return appendAttr(b, kind|unix.NLA_F_NESTED, all)
}

// attr returns the value of an attribute, or nil.
func attr(b []byte, kind uint16) []byte {
	for len(b) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofNlAttr || size > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER) == kind {
			return b[unix.SizeofNlAttr:size]
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}

// tuple is one direction of a tracked TCP connection. In a filter, an invalid address matches any
// address.
type tuple struct{ source, dest netip.AddrPort }

// encode returns the tuple as an attribute, and the flags of its valid parts
// for a filter.
func (t tuple) encode(kind uint16) (nest []byte, flags uint32) {
	proto := appendAttr(nil, attrProto, []byte{unix.IPPROTO_TCP})
	flags = filterProto
	var ip []byte
	for _, end := range []struct {
		addr           netip.AddrPort
		kind, portKind uint16
		flags          uint32
	}{{t.source, attrSource4, attrSourcePort, filterSource | filterSourcePort}, {t.dest, attrDest4, attrDestPort, filterDest | filterDestPort}} {
		if !end.addr.IsValid() {
			continue
		}
		if end.addr.Addr().Is6() {
			end.kind += 2
			// A filter with an IPv6 address makes Linux (for example 6.18) omit exactly the
			// matching entries.
			end.flags &^= filterSource | filterDest
		}
		ip = appendAttr(ip, end.kind, end.addr.Addr().AsSlice())
		proto = appendAttr(proto, end.portKind, binary.BigEndian.AppendUint16(nil, end.addr.Port()))
		flags |= end.flags
	}
	return appendNest(nil, kind, appendNest(nil, attrTupleIP, ip), appendNest(nil, attrTupleProto, proto)), flags
}

// decodeTuple decodes a tuple without allocating. ok is false if the tuple is not TCP.
func decodeTuple(b []byte) (t tuple, ok bool) {
	ip, proto := attr(b, attrTupleIP), attr(b, attrTupleProto)
	if p := attr(proto, attrProto); len(p) != 1 || p[0] != unix.IPPROTO_TCP {
		return t, false
	}
	end := func(kind, portKind uint16) (netip.AddrPort, bool) {
		a := attr(ip, kind)
		if a == nil {
			a = attr(ip, kind+2)
		}
		addr, ok := netip.AddrFromSlice(a)
		port := attr(proto, portKind)
		if !ok || len(port) != 2 {
			return netip.AddrPort{}, false
		}
		return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port)), true
	}
	var ok1, ok2 bool
	t.source, ok1 = end(attrSource4, attrSourcePort)
	t.dest, ok2 = end(attrDest4, attrDestPort)
	return t, ok1 && ok2
}

// netfilterHeader returns the header of a connection tracking message.
func netfilterHeader(a netip.Addr) []byte { return []byte{family(a), 0, 0, 0} }

func family(a netip.Addr) byte {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// untrack deletes from connection tracking the connections to vip that are forwarded to dest. With
// filter, the kernel lists only those, which requires Linux 5.8.
func untrack(vip, dest netip.AddrPort, filter bool) error {
	origin, originFlags := tuple{dest: vip}.encode(attrOrigin)
	reply, replyFlags := tuple{source: dest}.encode(attrReply)
	request := netfilterHeader(vip.Addr())
	if filter {
		request = append(append(request, origin...), reply...)
		request = appendNest(request, attrFilter,
			appendAttr(nil, attrOriginFlags, binary.NativeEndian.AppendUint32(nil, originFlags)),
			appendAttr(nil, attrReplyFlags, binary.NativeEndian.AppendUint32(nil, replyFlags)))
	}
	table, err := dialNetlink(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer table.close()
	var remover *netlinkConn
	defer func() {
		if remover != nil {
			remover.close()
		}
	}()
	var failed error // the first error; the other connections are still deleted
	err = table.ask(trackGet, unix.NLM_F_DUMP, request, func(entry []byte) error {
		if len(entry) < 4 {
			return nil
		}
		there, ok1 := decodeTuple(attr(entry[4:], attrOrigin))
		back, ok2 := decodeTuple(attr(entry[4:], attrReply))
		if !ok1 || !ok2 || there.dest != vip || back.source != dest {
			return nil
		}
		if remover == nil {
			var err error
			if remover, err = dialNetlink(unix.NETLINK_NETFILTER); err != nil {
				return err
			}
		}
		err := remover.ask(trackDelete, unix.NLM_F_ACK, append(netfilterHeader(vip.Addr()), entry[4:]...), nil)
		if failed == nil && err != unix.ENOENT { // ENOENT: the connection has ended already
			failed = err
		}
		return nil
	})
	return cmp.Or(err, failed)
}

// socketsTo returns this machine's TCP sockets that are connected to addr.
func socketsTo(addr netip.AddrPort) ([]Conn, error) {
	c, err := dialNetlink(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, err
	}
	defer c.close()
	// The kernel compares only the port in a request, not the address.
	request := (&destroyRequest{local: netip.AddrPortFrom(addr.Addr(), 0), remote: addr}).Serialize()
	clear(request[12:28])
	clear(request[48:])
	var conns []Conn
	err = c.ask(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP, request, func(entry []byte) error {
		const size = 72 // struct inet_diag_msg
		if len(entry) < size {
			return nil
		}
		at := func(port, ip int) netip.AddrPort {
			n := 4
			if entry[0] == unix.AF_INET6 {
				n = 16
			}
			a, _ := netip.AddrFromSlice(entry[ip : ip+n])
			return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(entry[port:]))
		}
		if at(6, 24) == addr {
			conns = append(conns, Conn{Client: at(4, 8), Virtual: addr})
		}
		return nil
	})
	return conns, err
}
