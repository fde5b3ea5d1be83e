package ipvs

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Status is what a daemon says of itself.
type Status struct {
	Version int       `json:"version"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// IPVS is false where the kernel has none and the hosts file points to a
	// master instead.
	IPVS    bool           `json:"ipvs"`
	Servers []ServerStatus `json:"servers"`
	// Problems are the errors that hold now.
	Problems []string `json:"problems,omitempty"`
}

// ServerStatus is one virtual server's part.
type ServerStatus struct {
	VIP       string `json:"vip"`
	Host      string `json:"host,omitempty"`
	HostAddr  string `json:"hostAddr,omitempty"` // what the hosts file says
	Scheduler string `json:"scheduler"`
	Profile   string `json:"profile"`
	// Verified is false until the CA is known.
	Verified bool           `json:"verified"`
	Learned  bool           `json:"learned"` // the list is the cluster's own
	Masters  []MasterStatus `json:"masters"`
}

// MasterStatus is one master's part.
type MasterStatus struct {
	Addr    string    `json:"addr"`
	Name    string    `json:"name,omitempty"` // DNS name
	State   string    `json:"state"`
	Since   time.Time `json:"since"`
	Serving bool      `json:"serving"` // gets new connections
	Last    string    `json:"last"`    // outcome of the last probe
	Error   string    `json:"error,omitempty"`
	Falls   int       `json:"falls"`
}

// Status returns the present state.
func (d *Daemon) Status() Status {
	d.mu.Lock()
	s := Status{Version: 1, PID: os.Getpid(), Started: d.started, IPVS: !d.absent.Load()}
	for subject, msg := range d.said {
		s.Problems = append(s.Problems, subject+": "+msg)
	}
	var groups []*group
	for _, r := range d.groups {
		groups = append(groups, r.group)
	}
	d.mu.Unlock()
	slices.Sort(s.Problems)
	slices.SortFunc(groups, func(a, b *group) int { return a.vip.Compare(b.vip) })
	for _, g := range groups {
		s.Servers = append(s.Servers, g.status())
	}
	return s
}

func (g *group) status() ServerStatus {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := ServerStatus{VIP: g.vip.String(), Host: g.server.Host, Scheduler: g.server.Scheduler,
		Profile: g.server.Profile.Name, Verified: g.roots.Load() != nil && !g.server.Probe.Unsafe, Learned: g.learned != nil}
	if g.hostsAt.IsValid() {
		v.HostAddr = g.hostsAt.String()
	}
	for a, m := range g.members {
		ms := MasterStatus{Addr: a.String(), State: m.health.State.String(), Since: m.health.Since,
			Serving: slices.Contains(g.last, a), Last: m.health.Class.String(), Error: m.err, Falls: m.health.Falls}
		if m.health.State == Unknown && m.err == "" {
			ms.Last = ""
		}
		if m.name != a.Addr().String() {
			ms.Name = m.name
		}
		v.Masters = append(v.Masters, ms)
	}
	for _, a := range g.last { // the last set stays even when it is listed no more
		if g.members[a] == nil {
			v.Masters = append(v.Masters, MasterStatus{Addr: a.String(), State: "unlisted", Serving: true})
		}
	}
	slices.SortFunc(v.Masters, func(a, b MasterStatus) int { return strings.Compare(a.Addr, b.Addr) })
	return v
}

// socketPrefix begins the names of the daemon's sockets, one per virtual
// server: holding it is the lock on the virtual server, connecting to it
// gives the status. They are abstract, which makes them belong to the network
// namespace as the rules do, and leaves nothing behind after a kill.
const socketPrefix = "@ipvscare/"

// claim takes the lock on a virtual server and answers on it.
func (d *Daemon) claim(ctx context.Context, vip netip.AddrPort) (release func(), err error) {
	name := socketPrefix + vip.String()
	ln, err := net.Listen("unix", name)
	if errors.Is(err, syscall.EADDRINUSE) {
		pid, uid, perr := peer(name)
		switch {
		case perr == nil && uid == 0:
			return nil, fmt.Errorf("another ipvscare (process %d) already keeps %s: stop it, or give this one another virtual address", pid, vip)
		case perr == nil:
			// Anybody may take the name; only root may keep us from working.
			d.logf("process %d of user %d holds the name %s; it is no ipvscare, going on without a lock", pid, uid, name)
			return func() {}, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", vip, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.SetDeadline(time.Now().Add(2 * time.Second))
			if b, err := json.MarshalIndent(d.Status(), "", "  "); err == nil {
				c.Write(append(b, '\n'))
			}
			c.Close()
		}
	}()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	return func() {
		stop()
		ln.Close()
		<-done // the name is free only when nobody accepts any more
	}, nil
}

// Locked reports whether an ipvscare keeps the virtual server.
func Locked(vip netip.AddrPort) (pid int, locked bool) {
	pid, uid, err := peer(socketPrefix + vip.String())
	return pid, err == nil && uid == 0
}

// ReadStatus asks the daemons of this network namespace.
func ReadStatus() ([]Status, error) {
	f, err := os.Open("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []Status
	seen := make(map[int]bool)
	for scan := bufio.NewScanner(f); scan.Scan(); {
		words := strings.Fields(scan.Text())
		name := words[len(words)-1]
		if !strings.HasPrefix(name, socketPrefix) || len(words) < 8 || words[3] != "00010000" { // listening
			continue
		}
		pid, uid, err := peer(name)
		if err != nil || uid != 0 || seen[pid] {
			continue
		}
		seen[pid] = true
		c, err := net.DialTimeout("unix", name, 2*time.Second)
		if err != nil {
			return nil, fmt.Errorf("asking process %d: %w", pid, err)
		}
		c.SetDeadline(time.Now().Add(5 * time.Second))
		var s Status
		err = json.NewDecoder(c).Decode(&s)
		c.Close()
		if err != nil {
			return nil, fmt.Errorf("asking process %d: %w", pid, err)
		}
		all = append(all, s)
	}
	if len(all) == 0 {
		return nil, errors.New("no ipvscare runs in this network namespace: start it with `systemctl start ipvscare`")
	}
	return all, nil
}
