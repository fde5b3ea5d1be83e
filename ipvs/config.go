package ipvs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/ondisk"
)

// Defaults of a virtual server.
const (
	DefaultVIP       = "10.103.97.2:6443" // address and port
	DefaultScheduler = "rr"               // one of Schedulers
	DefaultPath      = "/readyz"          // requested by a probe
	DefaultSpread    = 15 * time.Second   // see Profile.Spread
)

// Schedulers returns the IPVS schedulers that a configuration may use, by their
// kernel names.
func Schedulers() []string { return []string{"rr", "lc", "dh", "sh", "wrr", "wlc"} }

// Server is one virtual server, validated and with defaults.
type Server struct {
	VIP       netip.AddrPort
	Masters   []Master
	Host      string // kept in /etc/hosts and sent as SNI; may be empty
	Scheduler string
	Source    netip.Addr // source address of the local route; if unset, chosen automatically
	Profile   Profile
	// BootSpread is the maximum delay of the first probe after power-on. It is at least
	// ondisk.BootSpread and at most Profile.Spread.
	BootSpread time.Duration
	Rise       int // consecutive successful probes until an API server is up, 1 to 100
	Fall       int // consecutive failed probes until it is down, 1 to 100
	Probe      probe.Spec
	// Learn allows a ConfigMap in the cluster to replace Masters.
	Learn bool
	// Joined is the cluster to which API servers must belong.
	Joined Joined
}

// Master is a kube-apiserver address: the host is an IP address or a DNS name.
type Master struct {
	Host string
	Port uint16
}

func (m Master) String() string {
	return net.JoinHostPort(m.Host, strconv.Itoa(int(m.Port)))
}

// addr returns the API server's address if Host is an IP address.
func (m Master) addr() (netip.AddrPort, bool) {
	a, err := netip.ParseAddr(m.Host)
	if err != nil {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(a.Unmap(), m.Port), true
}

// Profile has the intervals and timeouts of probes.
type Profile struct {
	Name string
	// Ping is the interval between PING frames on the open connection while no program of the node
	// uses the API server. While a program uses it, the interval is keepTick. 0 means that there
	// are no regular PINGs.
	Ping time.Duration
	// Ready is the interval between requests for the probe's path. It must be below 90 s:
	// kube-apiserver closes a connection after 90 s without requests, and a new one costs five
	// kilobytes.
	Ready time.Duration
	// ReadyTimeout limits the wait for the answer to a request.
	ReadyTimeout time.Duration
	// Tick and Ticks define a round of an inquiry: Ticks-1 PINGs, one every Tick. Counting ticks
	// instead of seconds keeps a stall of the node from counting against the API servers.
	Tick  time.Duration
	Ticks int
	// Retry is the pause before the first reconnection to an API server that is down. While no API
	// server is up, the pause doubles with each attempt, up to RetryMax.
	Retry, RetryMax time.Duration
	// Spread is the time over which the nodes of a cluster return to a recovered API server while
	// another one is up.
	Spread time.Duration
	// Resolve is the interval between DNS lookups.
	Resolve time.Duration
	// Learn is the interval between reads of the cluster's own list of API servers.
	Learn time.Duration
}

// LAN returns the profile for local networks. It detects a dead API server within about two seconds
// while programs of the node use it, and otherwise within six.
func LAN() Profile {
	return Profile{Name: "lan",
		Ping: 5 * time.Second, Ready: 10 * time.Second, ReadyTimeout: 4 * time.Second,
		Tick: 130 * time.Millisecond, Ticks: 5, Retry: time.Second, RetryMax: 3500 * time.Millisecond, Spread: DefaultSpread,
		Resolve: 30 * time.Second, Learn: 5 * time.Minute}
}

// Metered returns the profile for links that are billed by volume: a healthy
// API server gets one request in 85 s.
func Metered() Profile {
	return Profile{Name: "metered",
		Ready: 85 * time.Second, ReadyTimeout: 10 * time.Second,
		Tick: 400 * time.Millisecond, Ticks: 5, Retry: 15 * time.Second, RetryMax: 20 * time.Second, Spread: 20 * time.Second,
		Resolve: 30 * time.Minute, Learn: 6 * time.Hour}
}

// maxReady is the longest interval between requests for the probe's path that FromVirtual derives
// from BootSpread. With 1,000 nodes and shorter intervals, these requests would be a large part of
// an API server's work.
const maxReady = 30 * time.Second

// parseConfig decodes and validates ipvs.json. It reports all problems at once.
func parseConfig(name string, data []byte) ([]Server, error) {
	var doc ondisk.IPVS
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&doc); err != nil {
		return nil, fmt.Errorf("reading %s: %w; ipvscare reads the file again when it changes", name, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("reading %s: more text follows the document", name)
	}
	servers, err := fromConfig(doc)
	if err != nil {
		return nil, fmt.Errorf("checking %s:\n%w", name, err)
	}
	return servers, nil
}

// fromConfig validates the document and sets defaults.
func fromConfig(doc ondisk.IPVS) ([]Server, error) {
	if doc.Version != ondisk.IPVSVersion {
		return nil, fmt.Errorf("version: unsupported version %d: want %d", doc.Version, ondisk.IPVSVersion)
	}
	if len(doc.Servers) == 0 {
		return nil, errors.New("servers: must not be empty: name at least one virtual server")
	}
	var servers []Server
	var errs []error
	for i, v := range doc.Servers {
		s, err := FromVirtual(v)
		if err != nil {
			errs = append(errs, joined.Each(err, func(e error) error { return fmt.Errorf("servers[%d]: %w", i, e) }))
			continue
		}
		for j, other := range servers {
			if other.VIP == s.VIP {
				errs = append(errs, fmt.Errorf("servers[%d].vip: %s is already used by servers[%d]", i, s.VIP, j))
			}
			if s.Host != "" && other.Host == s.Host && other.VIP.Addr().Is4() == s.VIP.Addr().Is4() {
				errs = append(errs, fmt.Errorf("servers[%d].host: %s is already used by servers[%d]", i, s.Host, j))
			}
		}
		servers = append(servers, s)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return servers, nil
}

// FieldError is a problem of one field of a virtual server.
type FieldError struct {
	Field string // as in ipvs.json, e.g. masters[1]
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }
func (e *FieldError) Unwrap() error { return e.Err }

func wrongField(field, format string, args ...any) error {
	return &FieldError{field, fmt.Errorf(format, args...)}
}

// FromVirtual validates one virtual server of ipvs.json and sets defaults. The
// error joins all problems, each of which is a FieldError.
func FromVirtual(v ondisk.IPVSVirtual) (Server, error) {
	s := Server{
		Host: v.Host, Scheduler: v.Scheduler, Rise: v.Rise, Fall: v.Fall, Learn: v.LearnMasters,
		Probe: probe.Spec{CAFile: v.CAFile, Path: v.ProbePath},
	}
	var errs []error
	if j := v.Joined; j != nil {
		s.Joined = Joined(*j)
		if j.ClusterInfo == "" || j.NodeUID == "" || j.Node == "" || strings.ContainsAny(j.Node, "/?#% \t\r\n") {
			errs = append(errs, wrongField("joined", "must have clusterInfo, node and nodeUID: let first boot write it, or leave it out"))
		}
	}
	switch v.Profile {
	case "", "lan":
		s.Profile = LAN()
	case "metered":
		s.Profile = Metered()
	default:
		errs = append(errs, wrongField("profile", "unknown profile %q: want lan or metered", v.Profile))
	}
	if v.SpreadSeconds < 0 || v.SpreadSeconds > 600 {
		errs = append(errs, wrongField("spreadSeconds", "must be between 0 and 600: %d", v.SpreadSeconds))
	}
	s.BootSpread = max(time.Duration(v.SpreadSeconds)*time.Second, ondisk.BootSpread)
	s.Profile.Spread = max(s.Profile.Spread, s.BootSpread)
	s.Profile.Ready = max(s.Profile.Ready, min(3*s.BootSpread, maxReady))
	vip := v.VIP
	if vip == "" {
		vip = DefaultVIP
	}
	if err := s.fill(vip, v.Masters); err != nil {
		errs = append(errs, err)
	}
	return s, errors.Join(errs...)
}

// fill validates the fields and sets defaults.
func (s *Server) fill(vip string, masters []string) error {
	var errs []error
	addr, err := parseVIP(vip)
	if err != nil {
		errs = append(errs, wrongField("vip", "%w", err))
	}
	s.VIP = addr
	s.Masters, err = parseMasters(s.VIP, masters)
	if err != nil {
		errs = append(errs, err)
	}
	if s.Scheduler == "" {
		s.Scheduler = DefaultScheduler
	}
	if !slices.Contains(Schedulers(), s.Scheduler) {
		errs = append(errs, wrongField("scheduler", "unknown scheduler %q: want one of %s", s.Scheduler, strings.Join(Schedulers(), ", ")))
	}
	if strings.ContainsAny(s.Host, " \t\r\n#:/") {
		errs = append(errs, wrongField("host", "invalid domain name %q", s.Host))
	}
	if s.Probe.Path == "" {
		s.Probe.Path = DefaultPath
	}
	if !strings.HasPrefix(s.Probe.Path, "/") || strings.ContainsAny(s.Probe.Path, " \r\n") {
		errs = append(errs, wrongField("probePath", "must begin with / and contain no space: %q", s.Probe.Path))
	}
	if s.Probe.Method == "" {
		s.Probe.Method = "GET"
	}
	for _, n := range []struct {
		name  string
		value *int
	}{{"rise", &s.Rise}, {"fall", &s.Fall}} {
		if *n.value == 0 {
			*n.value = 2
		}
		if *n.value < 1 || *n.value > 100 {
			errs = append(errs, wrongField(n.name, "must be between 1 and 100: %d", *n.value))
		}
	}
	return errors.Join(errs...)
}

func parseVIP(s string) (netip.AddrPort, error) {
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		if a, aerr := netip.ParseAddr(strings.Trim(s, "[]")); aerr == nil {
			return netip.AddrPort{}, fmt.Errorf("%q has no port: write %s", s, netip.AddrPortFrom(a, 6443))
		}
		return netip.AddrPort{}, fmt.Errorf("invalid address %q: write address:port", s)
	}
	ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	switch a := ap.Addr(); {
	case ap.Port() == 0:
		return netip.AddrPort{}, fmt.Errorf("%q has port 0", s)
	case a.Zone() != "":
		return netip.AddrPort{}, fmt.Errorf("%q has an IPv6 zone, which is not supported", s)
	case a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast():
		return netip.AddrPort{}, fmt.Errorf("%q cannot be a virtual address: use one that no host owns, e.g. %s", s, DefaultVIP)
	}
	return ap, nil
}

// parseMasters parses and checks the API servers of a virtual server.
func parseMasters(vip netip.AddrPort, list []string) ([]Master, error) {
	if len(list) == 0 {
		return nil, wrongField("masters", "must not be empty: name at least one API server as host:port")
	}
	var masters []Master
	var errs []error
	seen := make(map[Master]string) // as it was written
	for i, text := range list {
		bad := func(format string, args ...any) {
			errs = append(errs, wrongField(fmt.Sprintf("masters[%d]", i), format, args...))
		}
		host, port, err := net.SplitHostPort(text)
		if err != nil || port == "" {
			bad("%.100q has no port: write host:port, IPv6 as [address]:port", text)
			continue
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			bad("%.100q: invalid port %.100q", text, port)
			continue
		}
		m := Master{Host: strings.ToLower(host), Port: uint16(n)}
		if ap, ok := m.addr(); ok {
			m.Host = ap.Addr().String()
			switch a := ap.Addr(); {
			case vip.IsValid() && a == vip.Addr():
				bad("%s is the virtual address itself", text)
				continue
			case vip.IsValid() && a.Is4() != vip.Addr().Is4():
				bad("%s and the virtual address %s are of different families", text, vip.Addr())
				continue
			case a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.Zone() != "":
				bad("%s cannot be reached through IPVS: give the API server's own address", text)
				continue
			}
		} else if !isDNSName(m.Host) {
			bad("invalid host %.100q: write an address or a DNS name", host)
			continue
		}
		if before, dup := seen[m]; dup {
			bad("%s is already listed, as %s", text, before)
			continue
		}
		seen[m] = text
		masters = append(masters, m)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return masters, nil
}
