package ipvs

import (
	"bytes"
	"context"
	"encoding/binary"
	"net/netip"
	"slices"
	"time"
)

// Where PINGs cost money, the node's own traffic tells of a dead API server, at
// no cost: kubelet renews its lease every few seconds, and what an API server
// does not acknowledge is sent again and again. That alone decides nothing; it
// has the API server asked at once.

// stuckEvery is the pause between looks at the node's sockets, on the beat.
const stuckEvery = 5 * keepTick

// stuckSockets finds in /proc/net/tcp the node's sockets that are connected to
// vip, or are connecting, and wait for an acknowledgement in vain.
func stuckSockets(text []byte, vip netip.AddrPort) []netip.AddrPort {
	var local []netip.AddrPort
	for line := range bytes.Lines(text) {
		var f [7][]byte // number, local, remote, state, queues, timer, retransmits
		rest := bytes.TrimRight(line, "\n")
		for i := range f {
			f[i], rest = field(rest)
		}
		if remote, ok := parseSocketAddr(f[2]); !ok || remote != vip {
			continue
		}
		const synSent = 2
		state, ok1 := hex(f[3], 2)
		again, ok2 := hex(f[6], 8)
		// One packet lost means nothing on a poor link; the second time a socket
		// has waited for half a second at least, a new connection for a second.
		if !ok1 || !ok2 || again == 0 || again == 1 && state != synSent {
			continue
		}
		if a, ok := parseSocketAddr(f[1]); ok {
			local = append(local, a)
		}
	}
	return local
}

// parseSocketAddr reads 0261670A:192B: words in the machine's byte order.
func parseSocketAddr(b []byte) (netip.AddrPort, bool) {
	i := bytes.LastIndexByte(b, ':')
	if i != 8 && i != 32 {
		return netip.AddrPort{}, false
	}
	var a [16]byte
	for w := 0; w < i; w += 8 {
		v, ok := hex(b[w:w+8], 8)
		if !ok {
			return netip.AddrPort{}, false
		}
		binary.NativeEndian.PutUint32(a[w/2:], uint32(v))
	}
	port, ok := hex(b[i+1:], 4)
	addr, _ := netip.AddrFromSlice(a[:i/2])
	return netip.AddrPortFrom(addr.Unmap(), uint16(port)), ok
}

// stuckBehind returns the real servers to which IPVS maps the sockets.
func stuckBehind(conns []byte, vip netip.AddrPort, sockets []netip.AddrPort) []netip.AddrPort {
	var dests []netip.AddrPort
	parseConns(conns, func(c Conn, _ []byte) bool {
		if c.Virtual == vip && slices.Contains(sockets, c.Client) && !slices.Contains(dests, c.Dest) {
			dests = append(dests, c.Dest)
		}
		return false
	})
	return dests
}

// listener has those API servers asked at once on which the node's own
// connections wait, if the profile sends no PINGs.
func (g *group) listener(ctx context.Context) {
	k := g.d.keeper
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		look.Reset(k.beat.after(stuckEvery - keepTick))
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		if g.profile().Ping > 0 {
			continue
		}
		var dests []netip.AddrPort
		err := k.do(ctx, func() (err error) {
			if !k.absent {
				dests, err = k.kernel.Stuck(g.vip)
			}
			return err
		})
		if ctx.Err() != nil {
			return
		}
		g.d.say(g.vip.String()+": looking at the node's connections", err)
		g.suspect(dests, time.Now())
	}
}

// suspectPause is how long an API server that answered is not asked again for
// the same reason: a poor link loses packets all the time.
const suspectPause = 15 * time.Second

func (g *group) suspect(dests []netip.AddrPort, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, a := range dests {
		m := g.members[a]
		if m != nil && m.health.State == Up && now.Sub(m.suspected) >= suspectPause {
			m.suspected = now
			poke(m.stuck)
		}
	}
}
