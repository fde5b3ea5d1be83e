package kernel

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
)

// stuckSockets returns the local addresses of the sockets in /proc/net/tcp that are connected or
// connecting to vip and get no acknowledgements.
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
		// On a poor link a single retransmission is normal. After two, a socket has waited for at
		// least half a second; a connecting socket has waited for a second after its first.
		if !ok1 || !ok2 || again == 0 || again == 1 && state != synSent {
			continue
		}
		if a, ok := parseSocketAddr(f[1]); ok {
			local = append(local, a)
		}
	}
	return local
}

// parseSocketAddr parses an address such as 0261670A:192B, whose words are in the machine's byte
// order.
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

// stuckBehind returns the real servers to which IPVS forwards these sockets.
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
