package network

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// Uplink defines which machines a node must reach over the network. Settings that reach them are
// kept, and are restored if later settings reach less.
type Uplink struct {
	// peers describes the machines that must be reached, for example "an API server".
	peers string
	// wait waits until the peers are reached, at most for StartTimeout.
	wait func(ctx context.Context, e *machine.Env) Reached
}

// Reached is the result of waiting for an Uplink.
type Reached struct {
	Extent Extent
	// by is the API server that answered; empty on a control-plane node.
	by string
	// Err is the reason why something was not reached.
	Err error
}

// Extent describes how much of the network works.
type Extent int

// Extents: each includes those before it.
const (
	Nothing    Extent = iota
	OwnAddress        // enough to start a control-plane node
	everything
)

// toAPIServers returns the Uplink of a node without its own API server.
func toAPIServers(masters []string) Uplink {
	return Uplink{"an API server", func(ctx context.Context, e *machine.Env) Reached {
		master, err := waitForAPIServer(ctx, e, masters)
		if err != nil {
			return Reached{Err: err}
		}
		return Reached{Extent: everything, by: master}
	}}
}

// ToNeighbours returns the Uplink of a control-plane node: its own address, and another
// control-plane node or a gateway. If the Site has neither, the address is sufficient.
func ToNeighbours(site *configs.Site) Uplink {
	return Uplink{"another control-plane node or a gateway", func(ctx context.Context, e *machine.Env) Reached {
		r := Reached{}
		r.Err = e.Retry(ctx, machine.Wait{Every: 2 * time.Second, For: StartTimeout}, func() error {
			r.Extent = Nothing
			e.Waiting("this machine's address %s", site.Self().Address)
			if err := HasOwnAddress(ctx, e, site); err != nil {
				return err
			}
			r.Extent = OwnAddress
			e.Waiting("another control-plane node or a gateway to answer")
			if err := NeighbourAnswers(ctx, e, site); err != nil {
				return err
			}
			r.Extent = everything
			return nil
		})
		return r
	}}
}

// HasOwnAddress returns nil if this machine has the address in its Site, at which the other
// control-plane nodes reach it.
func HasOwnAddress(ctx context.Context, e *machine.Env, site *configs.Site) error {
	own := site.Self().Address
	src, err := e.Source(ctx, OwnHostPort(site))
	if err != nil {
		return fmt.Errorf("looking for the address %s on this machine: %w", own, machine.PlainNet(err))
	}
	if want, err := netip.ParseAddr(own); err != nil || src.Unmap() != want.Unmap() {
		return fmt.Errorf("this machine does not have its address %s (it would send from %s)", own, src)
	}
	return nil
}

const (
	// GatewayPort may be any port: a gateway that rejects the connection counts as reached too.
	GatewayPort = "53"
	// neighbourTimeout exceeds the three seconds after which the kernel reports that no host has
	// the address.
	neighbourTimeout = 6 * time.Second
)

// NeighbourAnswers returns nil if another control-plane node or a gateway is reached. A rejected
// connection counts as reached, as does a gateway that drops packets: if no host has the address,
// the kernel reports an error.
func NeighbourAnswers(ctx context.Context, e *machine.Env, site *configs.Site) error {
	type neighbour struct {
		addr    string
		gateway bool
	}
	var all []neighbour
	for _, m := range site.ControlPlane.Members {
		if m.Name != site.Self().Name {
			all = append(all, neighbour{addr: net.JoinHostPort(m.Address, configs.EtcdPeerPort)})
		}
	}
	for _, g := range GatewaysOf(e, site) {
		all = append(all, neighbour{net.JoinHostPort(g, GatewayPort), true})
	}
	if len(all) == 0 {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, neighbourTimeout)
	defer cancel()
	type answer struct {
		addr string
		err  error
	}
	answers := make(chan answer, len(all))
	for _, n := range all {
		go func() {
			conn, err := e.Dial(bounded, "tcp", n.addr)
			if err == nil {
				conn.Close()
			}
			if dropped := n.gateway && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil; dropped || errors.Is(err, syscall.ECONNREFUSED) {
				err = nil
			}
			answers <- answer{n.addr, err}
		}()
	}
	var errs []error
	answered := false
	for range all { // wait for all of them, so that no goroutine outlives this call
		a := <-answers
		if a.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", a.addr, machine.PlainNet(a.err)))
		} else if !answered {
			answered = true
			cancel()
		}
	}
	if answered {
		return nil
	}
	return fmt.Errorf("no other control-plane node and no gateway answers: %w", errors.Join(errs...))
}

// GatewaysOf returns the gateways on the interface with the machine's own address: those in the
// kernel's routes, which may be wrong, and those in the Site.
func GatewaysOf(e *machine.Env, site *configs.Site) []string {
	own, err := netip.ParseAddr(site.Self().Address)
	if err != nil {
		return nil
	}
	var out []string
	add := func(gateway string) {
		if gateway != "" && !slices.Contains(out, gateway) {
			out = append(out, gateway)
		}
	}
	named := func(addresses []string, gateway string) {
		for _, a := range addresses {
			if p, err := netip.ParsePrefix(a); err == nil && p.Addr() == own {
				add(gateway)
			}
		}
	}
	for _, i := range site.Network.Interfaces {
		named(i.Addresses, i.Gateway)
		for _, v := range i.VLANs {
			named(v.Addresses, v.Gateway)
		}
	}
	routes := routes(e, own.Is4())
	for _, direct := range routes {
		if direct.via.IsUnspecified() && direct.to.Bits() > 0 && direct.to.Contains(own) {
			for _, r := range routes {
				if r.card == direct.card && !r.via.IsUnspecified() {
					via := r.via
					if via.IsLinkLocalUnicast() && via.Is6() {
						via = via.WithZone(r.card)
					}
					add(via.String())
				}
			}
		}
	}
	return out
}

// route is a kernel route; via is unspecified if the route has no gateway.
type route struct {
	card string
	to   netip.Prefix
	via  netip.Addr
}

// routes reads the kernel's routes for one address family.
func routes(e *machine.Env, v4 bool) []route {
	var out []route
	if v4 {
		for line := range strings.Lines(string(e.Contents("/proc/net/route"))) {
			f := strings.Fields(line) // Iface Destination Gateway Flags RefCnt Use Metric Mask …
			if len(f) < 8 {
				continue
			}
			to, err1 := procIPv4(f[1])
			via, err2 := procIPv4(f[2])
			mask, err3 := procIPv4(f[7])
			if errors.Join(err1, err2, err3) == nil {
				ones, _ := net.IPMask(mask.AsSlice()).Size()
				out = append(out, route{f[0], netip.PrefixFrom(to, ones), via})
			}
		}
		return out
	}
	for line := range strings.Lines(string(e.Contents("/proc/net/ipv6_route"))) {
		f := strings.Fields(line) // destination length source length gateway metric refcnt use flags card
		if len(f) < 10 || f[9] == "lo" {
			continue
		}
		to, err1 := procIPv6(f[0])
		bits, err2 := strconv.ParseUint(f[1], 16, 8)
		via, err3 := procIPv6(f[4])
		if errors.Join(err1, err2, err3) == nil {
			out = append(out, route{f[9], netip.PrefixFrom(to, int(bits)), via})
		}
	}
	return out
}

// procIPv4 parses an address in /proc/net/route. The address is in the machine's byte order, which
// is little-endian on all architectures that edgebake supports.
func procIPv4(text string) (netip.Addr, error) {
	n, err := strconv.ParseUint(text, 16, 32)
	return netip.AddrFrom4([4]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)}), err
}

func procIPv6(text string) (netip.Addr, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != 16 {
		return netip.Addr{}, fmt.Errorf("reading a route of the kernel: %q", text)
	}
	return netip.AddrFrom16([16]byte(b)), nil
}
