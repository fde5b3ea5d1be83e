package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
)

// Paths in /proc, which shows this process's network namespace.
const (
	procServices = "/proc/net/ip_vs" // only checked for existence
	procStats    = "/proc/net/ip_vs_stats_percpu"
	procConns    = "/proc/net/ip_vs_conn"
	procTCP      = "/proc/net/tcp"
	procTCP6     = "/proc/net/tcp6"
)

// procFile is a file in /proc that is read repeatedly.
type procFile struct {
	file *os.File
	buf  []byte
	// State between two reads: off is the offset of the next part of the file, and buf[begun:end]
	// the incomplete line at the end of the last part.
	off        int64
	begun, end int
}

// open opens path unless it is open already.
func (p *procFile) open(path string) error {
	if p.file != nil && p.file.Name() == path {
		return nil
	}
	p.close()
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	p.file, p.off, p.begun, p.end = f, 0, 0, 0
	p.buf = make([]byte, 4096)
	return nil
}

// next returns the next lines of the file. At the end it returns io.EOF once, then starts again.
// The result is valid only until the next call, because a table of any size is read through one
// buffer.
func (p *procFile) next(path string) ([]byte, error) {
	if err := p.open(path); err != nil {
		return nil, err
	}
	have := copy(p.buf, p.buf[p.begun:p.end])
	p.begun, p.end = 0, 0
	for {
		n, err := p.file.ReadAt(p.buf[have:], p.off)
		p.off += int64(n)
		have += n
		switch whole := bytes.LastIndexByte(p.buf[:have], '\n') + 1; {
		case err == io.EOF && have == 0:
			p.off = 0
			return nil, err
		case err == io.EOF, have == len(p.buf) && whole == 0: // longer than any valid line
			return p.buf[:have], nil
		case err != nil:
			p.close()
			return nil, err
		case whole > 0:
			p.begun, p.end = whole, have
			return p.buf[:whole], nil
		}
	}
}

func (p *procFile) close() {
	if p.file != nil {
		p.file.Close()
		p.file = nil
	}
}

// sentPackets returns the sum of all processors' incoming packets in ip_vs_stats_percpu. The file's
// own total is updated only every two seconds.
func sentPackets(b []byte) (n uint64) {
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) != 6 {
			continue
		}
		_, err1 := strconv.ParseUint(string(f[0]), 16, 32)
		packets, err2 := strconv.ParseUint(string(f[2]), 16, 64)
		if err1 == nil && err2 == nil {
			n += packets
		}
	}
	return n
}

// field splits off the first word.
func field(b []byte) (word, rest []byte) {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	i := 0
	for i < len(b) && b[i] != ' ' && b[i] != '\t' {
		i++
	}
	return b[:i], b[i:]
}

// parseHexAddr parses an IPv4 address such as 0A676102, or an IPv6 address of eight groups of four
// digits, with or without brackets.
func parseHexAddr(b []byte) (netip.Addr, bool) {
	if len(b) == 8 {
		v, ok := hex(b, 8)
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], uint32(v))
		return netip.AddrFrom4(a), ok
	}
	if len(b) == 41 && b[0] == '[' && b[40] == ']' {
		b = b[1:40]
	}
	if len(b) != 39 {
		return netip.Addr{}, false
	}
	var a [16]byte
	for g := range 8 {
		if g > 0 && b[g*5-1] != ':' {
			return netip.Addr{}, false
		}
		v, ok := hex(b[g*5:g*5+4], 4)
		if !ok {
			return netip.Addr{}, false
		}
		binary.BigEndian.PutUint16(a[g*2:], uint16(v))
	}
	return netip.AddrFrom16(a), true
}

func hex(b []byte, digits int) (uint64, bool) {
	if len(b) != digits {
		return 0, false
	}
	var v uint64
	for _, c := range b {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		v = v<<4 | uint64(c)
	}
	return v, true
}

// Conn is a TCP connection in the table of IPVS: from Client to the virtual
// address Virtual, forwarded to the real server Dest.
type Conn struct {
	Client, Virtual, Dest netip.AddrPort
}

// parseConns parses /proc/net/ip_vs_conn and returns the TCP connections for which accept returns
// true. It skips lines that it cannot parse, because the table also has other programs'
// connections.
func parseConns(text []byte, accept func(c Conn, state []byte) bool) []Conn {
	var conns []Conn
	for line := range bytes.Lines(text) {
		proto, rest := field(bytes.TrimRight(line, "\n"))
		if string(proto) != "TCP" {
			continue
		}
		var c Conn
		ok := true
		for _, to := range []*netip.AddrPort{&c.Client, &c.Virtual, &c.Dest} {
			var a, p []byte
			a, rest = field(rest)
			p, rest = field(rest)
			addr, aok := parseHexAddr(a)
			port, pok := hex(p, 4)
			*to = netip.AddrPortFrom(addr, uint16(port))
			ok = ok && aok && pok
		}
		state, _ := field(rest)
		if ok && accept(c, state) {
			conns = append(conns, c)
		}
	}
	return conns
}

// readConns returns the connections to vip that are forwarded to dest. It omits connections that
// are being opened: once dest is removed, their next SYN goes to another real server.
func readConns(path string, vip, dest netip.AddrPort) ([]Conn, error) {
	var table procFile
	defer table.close()
	var conns []Conn
	for {
		text, err := table.next(path)
		switch {
		case err == io.EOF, errors.Is(err, os.ErrNotExist):
			return conns, nil
		case err != nil:
			return nil, fmt.Errorf("reading the table of connections: %w", err)
		}
		conns = append(conns, parseConns(text, func(c Conn, state []byte) bool {
			opening := string(state) == "SYN_RECV" || string(state) == "SYN_SENT"
			return c.Virtual == vip && c.Dest == dest && !opening
		})...)
	}
}

// sysctl is a kernel setting with a minimum value.
type sysctl struct {
	path string
	min  int
	// lacking is the error to return if the kernel is built without the setting.
	lacking error
}

// ensure raises the setting if it is too low, and reports whether it was.
func (s *sysctl) ensure() (bool, error) {
	text, err := os.ReadFile(s.path)
	if err != nil {
		return false, err
	}
	v, err := strconv.Atoi(string(bytes.TrimSpace(text)))
	if err != nil {
		return false, fmt.Errorf("reading %s: %w", s.path, err)
	}
	if v >= s.min {
		return false, nil
	}
	if err := os.WriteFile(s.path, strconv.AppendInt(nil, int64(s.min), 10), 0); err != nil {
		return false, fmt.Errorf("setting %s to %d: %w: set it on the node, in /etc/sysctl.d, if this is a container", s.path, s.min, err)
	}
	return true, nil
}

// absent reports whether the kernel is built without the setting. If the setting's directory is
// missing too, the module just is not loaded.
func (s *sysctl) absent() bool {
	if s.lacking == nil {
		return false
	}
	_, err := os.Stat(s.path)
	_, derr := os.Stat(filepath.Dir(s.path))
	return errors.Is(err, fs.ErrNotExist) && derr == nil
}

// sysctls are the settings that ipvscare maintains.
type sysctls struct {
	list []sysctl
	// tracking is the file with the number of tracked connections.
	tracking string
}

// errUntracked is the error on kernels whose IPVS does not support connection tracking.
var errUntracked = errors.New("this kernel lacks CONFIG_IP_VS_NFCT: a firewall that drops packets of no known connection (\"ct state invalid drop\") cuts the virtual address off")

// newSysctls returns the settings in dir, which is /proc/sys/net or another mount of it.
func newSysctls(dir string) *sysctls {
	return &sysctls{tracking: filepath.Join(dir, "netfilter/nf_conntrack_count"), list: []sysctl{
		// With 1, a connection whose real server was removed is dropped at its next packet.
		{path: filepath.Join(dir, "ipv4/vs/expire_nodest_conn"), min: 1},
		// With 0, IPVS removes the packets that it forwards from connection tracking, and a
		// stateful firewall does not recognise the answers. If nothing uses connection tracking, 1
		// costs nothing.
		{path: filepath.Join(dir, "ipv4/vs/conntrack"), min: 1, lacking: errUntracked},
		// The virtual address exists only on this node, so the node must neither answer nor send
		// ARP for it.
		{path: filepath.Join(dir, "ipv4/conf/all/arp_ignore"), min: 1},
		{path: filepath.Join(dir, "ipv4/conf/all/arp_announce"), min: 2},
	}}
}

// ensure corrects all settings and returns the files that it changed.
func (k *sysctls) ensure() (changed []string, err error) {
	var errs []error
	for i := range k.list {
		s := &k.list[i]
		did, err := s.ensure()
		switch {
		case err != nil && s.absent():
			errs = append(errs, s.lacking)
		case errors.Is(err, fs.ErrNotExist): // IP_VS is not loaded; the method Service reports it
		case err != nil:
			errs = append(errs, err)
		case did:
			changed = append(changed, s.path)
		}
	}
	return changed, errors.Join(errs...)
}
