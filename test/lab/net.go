package lab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/builder/qemu"
)

// Net is the network of the control plane and the guests.
type Net interface {
	// Master returns the addresses of the nth master (from 0): the one for this host and the one
	// for a guest.
	Master(n int) (host, guest netip.AddrPort)
	// NIC returns the network card of the nth guest (from 0).
	NIC(n int) qemu.NIC
	// Wrap returns the command line with which argv runs in this network.
	Wrap(argv []string) []string
	// Dial connects from within this network.
	Dial(ctx context.Context, network, addr string) (net.Conn, error)
}

// Loopback is a network that needs no root. The masters listen on this host's loopback address, and
// guests reach them through QEMU's user-mode network, at 10.0.2.2. It is not suitable for tests of
// IPVS: the user-mode network accepts any source address, so wrong configurations would pass.
type Loopback struct {
	// Port is the first master's port. The other masters have the ports after it.
	Port int
}

// FreeLoopback chooses port 6443 if it is free, otherwise another port.
func FreeLoopback() (Loopback, error) {
	if ln, err := net.Listen("tcp", "127.0.0.1:6443"); err == nil {
		return Loopback{6443}, ln.Close()
	}
	ports, err := FreePorts(1)
	if err != nil {
		return Loopback{}, err
	}
	return Loopback{ports[0]}, nil
}

// FreePorts returns ports of 127.0.0.1 that are not in use. They stay free, because they are
// outside the range from which the kernel assigns ports, unless that range leaves too few.
func FreePorts(n int) ([]int, error) {
	const first = 10000
	var given, last int
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(text), &given, &last)
	}
	if err != nil {
		return nil, fmt.Errorf("finding free ports on 127.0.0.1: %w", err)
	}
	if given < first+100*n {
		given = last // the kernel may assign nearly all ports, so use those too
	}
	var ports []int
	for range 1000 {
		port := first + rand.IntN(given-first)
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		defer ln.Close()
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, fmt.Errorf("finding %d free ports on 127.0.0.1: there are %d", n, len(ports))
}

func (l Loopback) Master(n int) (host, guest netip.AddrPort) {
	port := uint16(l.Port + n)
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), netip.AddrPortFrom(netip.MustParseAddr("10.0.2.2"), port)
}

func (l Loopback) NIC(n int) qemu.NIC { return qemu.NIC{MAC: mac(n)} }

func (l Loopback) Wrap(argv []string) []string { return argv }

func (l Loopback) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, addr)
}

func mac(n int) string { return fmt.Sprintf("52:54:00:eb:00:%02x", n+1) }

// Pair is a network that needs no root: two guests connected by a cable. Guest 0 is a master. This
// host reaches the master through a second card. QEMU's user-mode network is not on the cable,
// because it would answer in place of the other guest.
type Pair struct {
	// Port is the port on this host's loopback address that is forwarded to the master's API
	// server.
	Port int
	dir  string // directory of the cable's sockets
}

// PairCIDR is the prefix length of the addresses in a Pair. The network has no DHCP and no gateway.
const PairCIDR = 24

// NewPair returns a Pair that uses a free port.
func (l *Lab) NewPair() (Pair, error) {
	free, err := FreeLoopback()
	return Pair{free.Port, l.sockets}, err
}

// GuestAddr returns the address of the nth guest on the cable.
func (p Pair) GuestAddr(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 103, 0, byte(101 + n)})
}

// GuestMAC returns the MAC address of the nth guest's card on the cable.
func (p Pair) GuestMAC(n int) string { return mac(n) }

func (p Pair) Master(n int) (host, guest netip.AddrPort) {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(p.Port)), netip.AddrPortFrom(p.GuestAddr(n), 6443)
}

func (p Pair) NIC(n int) qemu.NIC {
	end := func(i int) string { return filepath.Join(p.dir, "cable"+strconv.Itoa(i)) }
	return qemu.NIC{MAC: mac(n), Cable: &qemu.Cable{Own: end(n), Other: end(1 - n)}}
}

// Outside returns the master's second card, which gets its address by DHCP.
func (p Pair) Outside() qemu.NIC {
	return qemu.NIC{MAC: mac(MaxGuests), Forwards: []qemu.Forward{{Host: p.Port, Guest: 6443}}}
}

func (p Pair) Wrap(argv []string) []string { return argv }

// Dial connects to the master and ignores addr's host and port.
func (p Pair) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, net.JoinHostPort("127.0.0.1", strconv.Itoa(p.Port)))
}

// Namespace is a network that needs root: a bridge with one address per master, and a tap per
// guest. It has no DHCP, so guests get GuestAddr from their Sites.
type Namespace struct {
	Name string
	// IPv6 makes the masters and the cluster use only IPv6. The bridge has addresses of both
	// families, and guests may have both too.
	IPv6 bool
}

// Addresses in a Namespace.
const (
	Gateway     = "10.103.0.1"
	GuestsCIDR  = 24
	Gateway6    = "fd00:103::1"
	GuestsCIDR6 = 64
)

// MaxMasters and MaxGuests are the maximum numbers of masters and guests in a Namespace.
const (
	MaxMasters = 3
	MaxGuests  = 5
)

func masterAddr(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 103, 0, byte(11 + n)}) }

func masterAddr6(n int) netip.Addr { return numbered(Gateway6, 0x11+n) }

// numbered returns addr with n as its last byte.
func numbered(addr string, n int) netip.Addr {
	b := netip.MustParseAddr(addr).As16()
	b[15] = byte(n)
	return netip.AddrFrom16(b)
}

// GuestAddr returns the IPv4 address of the nth guest.
func (ns *Namespace) GuestAddr(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 103, 0, byte(101 + n)})
}

// GuestAddr6 returns the IPv6 address of the nth guest.
func (ns *Namespace) GuestAddr6(n int) netip.Addr { return numbered(Gateway6, 0x65+n) }

// GuestMAC returns the MAC address of the nth guest's network card.
func (ns *Namespace) GuestMAC(n int) string { return mac(n) }

func (ns *Namespace) Master(n int) (host, guest netip.AddrPort) {
	a := netip.AddrPortFrom(masterAddr(n), 6443)
	if ns.IPv6 {
		a = netip.AddrPortFrom(masterAddr6(n), 6443)
	}
	return a, a
}

func (ns *Namespace) NIC(n int) qemu.NIC {
	return qemu.NIC{MAC: mac(n), Tap: "tap" + strconv.Itoa(n)}
}

func (ns *Namespace) Wrap(argv []string) []string {
	return append([]string{"ip", "netns", "exec", ns.Name}, argv...)
}

const netnsDir = "/run/netns"

// namespacePrefix is the beginning of a namespace's name. The ID of the process that made it
// follows.
const namespacePrefix = "edgebake-lab-"

// NewNamespace makes a network namespace that ends when the lab is closed. First it removes the
// namespaces of killed runs.
func (l *Lab) NewNamespace(ctx context.Context) (*Namespace, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("making a network namespace: only root can")
	}
	l.removeStaleNamespaces(ctx)
	ns := &Namespace{Name: namespacePrefix + strconv.Itoa(os.Getpid())}
	if _, err := l.run(ctx, "ip", "netns", "add", ns.Name); err != nil {
		return nil, fmt.Errorf("making a network namespace: %w", err)
	}
	l.onClose(func() error {
		_, err := l.run(context.Background(), "ip", "netns", "del", ns.Name)
		return err
	})
	steps := [][]string{
		{"link", "set", "lo", "up"},
		{"link", "add", "br0", "type", "bridge"},
		{"link", "set", "br0", "up"},
		{"addr", "add", Gateway + "/" + strconv.Itoa(GuestsCIDR), "dev", "br0"},
		// Skip the check for duplicates, because no other host can have this address.
		{"addr", "add", Gateway6 + "/" + strconv.Itoa(GuestsCIDR6), "dev", "br0", "nodad"},
	}
	for n := range MaxMasters {
		steps = append(steps,
			[]string{"addr", "add", masterAddr(n).String() + "/" + strconv.Itoa(GuestsCIDR), "dev", "br0"},
			[]string{"addr", "add", masterAddr6(n).String() + "/" + strconv.Itoa(GuestsCIDR6), "dev", "br0", "nodad"})
	}
	for n := range MaxGuests {
		tap := "tap" + strconv.Itoa(n)
		steps = append(steps,
			[]string{"tuntap", "add", tap, "mode", "tap"},
			[]string{"link", "set", tap, "master", "br0", "up"})
	}
	for _, s := range steps {
		if _, err := l.run(ctx, append([]string{"ip", "-n", ns.Name}, s...)...); err != nil {
			return nil, fmt.Errorf("setting up network namespace %s: %w", ns.Name, err)
		}
	}
	return ns, nil
}

func (l *Lab) removeStaleNamespaces(ctx context.Context) {
	names, err := filepath.Glob(filepath.Join(netnsDir, namespacePrefix+"*"))
	if err != nil {
		return
	}
	for _, n := range names {
		pid := strings.TrimPrefix(filepath.Base(n), namespacePrefix)
		if _, err := os.Stat("/proc/" + pid); errors.Is(err, os.ErrNotExist) {
			l.say("removing network namespace %s of a run that was killed", filepath.Base(n))
			if _, err := l.run(ctx, "ip", "netns", "del", filepath.Base(n)); err != nil {
				l.say("%v", err)
			}
		}
	}
}

// PullMaster removes a master's address, or adds it again. Without the address the guests get no
// answer, as with an unplugged cable.
func (l *Lab) PullMaster(ctx context.Context, ns *Namespace, n int, pulled bool) error {
	verb := "add"
	if pulled {
		verb = "del"
	}
	addr := masterAddr(n).String() + "/" + strconv.Itoa(GuestsCIDR)
	if ns.IPv6 {
		addr = masterAddr6(n).String() + "/" + strconv.Itoa(GuestsCIDR6)
	}
	_, err := l.run(ctx, "ip", "-n", ns.Name, "addr", verb, addr, "dev", "br0")
	return err
}

// Dial connects from within the namespace.
func (ns *Namespace) Dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	inside := ns.within(func() {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, addr)
	})
	return conn, errors.Join(inside, err)
}

// Listen listens within the namespace.
func (ns *Namespace) Listen(ctx context.Context, network, addr string) (l net.Listener, err error) {
	inside := ns.within(func() {
		var c net.ListenConfig
		l, err = c.Listen(ctx, network, addr)
	})
	return l, errors.Join(inside, err)
}

// ListenPacket listens for packets within the namespace.
func (ns *Namespace) ListenPacket(ctx context.Context, network, addr string) (conn net.PacketConn, err error) {
	inside := ns.within(func() {
		var c net.ListenConfig
		conn, err = c.ListenPacket(ctx, network, addr)
	})
	return conn, errors.Join(inside, err)
}

// within runs f on a thread in the namespace. A socket stays in the namespace in which it was made.
func (ns *Namespace) within(f func()) error {
	// Use a new goroutine. If the thread cannot return to its own namespace, the goroutine ends
	// while locked to it, so that Go discards the thread.
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		back, err := ns.visit(f)
		if back {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// visit runs f in the namespace. back reports whether the thread has returned to its own namespace.
func (ns *Namespace) visit(f func()) (back bool, err error) {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return true, fmt.Errorf("entering network namespace %s: %w", ns.Name, err)
	}
	defer home.Close()
	there, err := os.Open(filepath.Join(netnsDir, ns.Name))
	if err != nil {
		return true, fmt.Errorf("entering network namespace %s: %w", ns.Name, err)
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		return true, fmt.Errorf("entering network namespace %s: %w", ns.Name, err)
	}
	f()
	return unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil, nil
}
