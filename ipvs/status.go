package ipvs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Status is the JSON document that a daemon sends over its socket.
type Status struct {
	Version int       `json:"version"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// IPVS is false if the kernel has no IPVS. Then the hosts file has the address of an API server
	// instead of the virtual address.
	IPVS    bool           `json:"ipvs"`
	Servers []ServerStatus `json:"servers"`
	// Problems are the current errors.
	Problems []string `json:"problems,omitempty"`
}

// ServerStatus is the status of a virtual server.
type ServerStatus struct {
	VIP       string `json:"vip"`
	Host      string `json:"host,omitempty"`
	HostAddr  string `json:"hostAddr,omitempty"` // the host's address in the hosts file
	Scheduler string `json:"scheduler"`
	Profile   string `json:"profile"`
	// Verified is false until the CA is known.
	Verified bool           `json:"verified"`
	Learned  bool           `json:"learned"` // the list is the cluster's own
	Masters  []MasterStatus `json:"masters"`
}

// MasterStatus is the status of an API server.
type MasterStatus struct {
	Addr    string    `json:"addr"`           // "address:port"
	Name    string    `json:"name,omitempty"` // DNS name
	State   string    `json:"state"`          // a State as text
	Since   time.Time `json:"since"`          // time of the last change of State
	Serving bool      `json:"serving"`        // accepts new connections
	Last    string    `json:"last"`           // outcome of the last probe
	Error   string    `json:"error,omitempty"`
	Falls   int       `json:"falls"`
}

// Status returns the current status.
func (d *Daemon) Status() Status {
	d.mu.Lock()
	s := Status{Version: 1, PID: os.Getpid(), Started: d.started, IPVS: !d.absent.Load()}
	for subject, msg := range d.logged {
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
		Profile: g.server.Profile.Name, Verified: g.roots.Load() != nil && !g.server.Probe.Unsafe, Learned: g.list.learned != nil}
	if g.hostsAddr.IsValid() {
		v.HostAddr = g.hostsAddr.String()
	}
	serving := g.serving()
	for a, srv := range g.apiServers {
		ms := MasterStatus{Addr: a.String(), State: srv.health.State.String(), Since: srv.health.Since,
			Serving: slices.Contains(serving, a), Last: srv.health.Outcome.String(), Error: srv.err, Falls: srv.health.Falls}
		if srv.health.State == Unknown && srv.err == "" {
			ms.Last = ""
		}
		if srv.name != a.Addr().String() {
			ms.Name = srv.name
		}
		v.Masters = append(v.Masters, ms)
	}
	for _, a := range serving { // real servers in use may not be in the list any more
		if g.apiServers[a] == nil {
			v.Masters = append(v.Masters, MasterStatus{Addr: a.String(), State: "unlisted", Serving: true})
		}
	}
	slices.SortFunc(v.Masters, func(a, b MasterStatus) int { return strings.Compare(a.Addr, b.Addr) })
	return v
}

// socketPath returns the path of a virtual server's status socket. Only root
// can access RunDir.
func socketPath(runDir string, vip netip.AddrPort) string {
	return filepath.Join(runDir, vip.String()+socketSuffix)
}

const socketSuffix = ".sock"

// answerStatus sends the status to every client of the socket. The caller holds the lock of the
// virtual server, so an existing socket was left by a process that has ended.
func (d *Daemon) answerStatus(ctx context.Context, path string) (stop func(), err error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("answering `ipvscare status`: %w", err)
	}
	ln, err := net.Listen("unix", path)
	if err == nil {
		err = os.Chmod(path, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("answering `ipvscare status`: %w", err)
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
	unhook := context.AfterFunc(ctx, func() { ln.Close() })
	return func() {
		unhook()
		ln.Close()
		<-done // from here on, the next daemon may create the socket
	}, nil
}

// ReadStatus returns the status of each daemon with a socket in runDir. If there is none, it
// returns an error.
func ReadStatus(runDir string) ([]Status, error) {
	entries, err := os.ReadDir(runDir)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("asking ipvscare: %w: run this as root", err)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("asking ipvscare: %w", err)
	}
	var all []Status
	seen := make(map[string]bool)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), socketSuffix) {
			continue
		}
		s, err := askStatus(filepath.Join(runDir, e.Name()))
		if errors.Is(err, syscall.ECONNREFUSED) {
			continue // left by a process that was killed
		}
		if err != nil {
			return nil, fmt.Errorf("asking ipvscare: %w", err)
		}
		// One daemon may maintain several virtual servers. The PID alone does not identify it,
		// because in containers it is 1.
		if id := fmt.Sprint(s.PID, s.Started.UnixNano()); !seen[id] {
			seen[id] = true
			all = append(all, s)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("ipvscare is not running: start it with `systemctl start ipvscare`")
	}
	return all, nil
}

func askStatus(path string) (s Status, err error) {
	c, err := net.DialTimeout("unix", path, 2*time.Second)
	if err != nil {
		return s, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if err := json.NewDecoder(c).Decode(&s); err != nil {
		return s, fmt.Errorf("reading from %s: %w", path, err)
	}
	return s, nil
}
