package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Reach connects to all API servers in parallel. It returns the first one that answers, or the
// errors of all.
func Reach(ctx context.Context, e *machine.Env, masters []string) (string, error) {
	ctx, cancel := e.ForProbe(ctx)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	found := ""
	errs := make([]error, len(masters))
	for i, m := range masters {
		wg.Go(func() {
			conn, err := e.Dial(ctx, "tcp", m)
			if err != nil {
				errs[i] = fmt.Errorf("%s: %w", m, machine.PlainNet(err))
				return
			}
			conn.Close()
			mu.Lock()
			if found == "" {
				found = m
				cancel() // one answer is sufficient
			}
			mu.Unlock()
		})
	}
	wg.Wait()
	if found != "" {
		return found, nil
	}
	return "", fmt.Errorf("no API server answers: %w", errors.Join(errs...))
}

// Names of first boot's blocks in /etc/hosts.
const (
	NodeOwner     = "edgebake node"
	EndpointOwner = "edgebake endpoint"
)

// Phase waits until the node has an address and an API server answers.
func Phase(site *configs.Site) run.Phase {
	p := &networkPhase{site: site}
	return run.Phase{
		Name: "network", Doc: "the node has an address, and an API server answers", Timeout: Timeout,
		Check: p.check, Run: p.run,
	}
}

// networkPhase is the phase network of one pass.
type networkPhase struct {
	site    *configs.Site
	late    LateReload
	reached bool // set by run, so that the next check does not connect again
}

func (p *networkPhase) check(ctx context.Context, e *machine.Env) (run.Verdict, error) {
	if TrialCutOff(e) || p.late.Due(e) {
		return run.Todo, nil
	}
	skip := p.reached
	p.reached = false
	return check(ctx, e, p.site, skip), nil
}

func (p *networkPhase) run(ctx context.Context, e *machine.Env) error {
	if err := p.late.Run(ctx, e); err != nil {
		return err
	}
	up := toAPIServers(member.MastersOf(e, p.site))
	found, former, err := KeepOrRollBack(ctx, e, up)
	if err != nil {
		return err
	}
	if found.Err != nil && !former {
		return run.Advise(found.Err, "check the cable, the switch port and the Site's network settings (addresses, gateway, VLAN, masters)")
	}
	if found.Err != nil {
		return found.Err
	}
	src, err := presentAddr(ctx, e, p.site)
	if err != nil {
		src, err = newAddr(ctx, e, p.site)
	}
	if err != nil {
		return err
	}
	err = e.SetHosts(ctx, NodeOwner, NodeLine(e, src))
	p.reached = err == nil
	return err
}

// check is the Check of Phase while no settings wait to be loaded. reached means that an API server
// has just answered.
func check(ctx context.Context, e *machine.Env, site *configs.Site, reached bool) run.Verdict {
	joined := member.EnrolledOrEarly(e)
	if NodeAddress(e) == "" && !joined {
		return run.Todo // even if an API server answers
	}
	if !reached {
		if _, err := Reach(ctx, e, member.MastersOf(e, site)); err != nil {
			if !joined || MayTry(e) {
				return run.Todo
			}
			return checkOffline(ctx, e, site)
		}
	}
	src, err := presentAddr(ctx, e, site)
	if err != nil || !e.HasHosts(NodeOwner, NodeLine(e, src)) || IsNew(e) {
		return run.Todo
	}
	return run.Done
}

// checkOffline returns Done if a member has its address and the endpoint answers through ipvscare,
// and Unknown otherwise. In neither case do new network settings count as good.
func checkOffline(ctx context.Context, e *machine.Env, site *configs.Site) run.Verdict {
	if _, err := presentAddr(ctx, e, site); err == nil && !site.IPVS.Disabled && machine.Answers(ctx, e, site.EndpointHostPort()) == nil {
		return run.Done
	}
	return run.Unknown
}

// presentAddr returns the node's recorded address if it is still valid: in nodeIP's subnet or,
// without nodeIP, the source address towards any API server. So the result does not depend on which
// API server answers first.
func presentAddr(ctx context.Context, e *machine.Env, site *configs.Site) (netip.Addr, error) {
	present, err := netip.ParseAddr(NodeAddress(e))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("reading this node's address in /etc/hosts: %w", err)
	}
	if subnets := site.NodeSubnets(); len(subnets) > 0 {
		if src, err := inSubnet(e, site, subnets[0], present); err != nil || src != present {
			return netip.Addr{}, errors.Join(fmt.Errorf("the address %s is not in %s (nodeIP)", present, subnets[0]), err)
		}
		return present, nil
	}
	masters := member.MastersOf(e, site)
	found := make([]bool, len(masters))
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters { // in parallel, because each may take until its timeout
		wg.Go(func() {
			src, err := nodeAddr(ctx, e, site, m)
			found[i], errs[i] = err == nil && src == present, err
		})
	}
	wg.Wait()
	if slices.Contains(found, true) {
		return present, nil
	}
	return netip.Addr{}, errors.Join(append([]error{fmt.Errorf("no API server can be reached from this node's address %s", present)}, errs...)...)
}

// firstAddr returns the source address towards the first API server in the list that answers. If
// none answers, it uses the first one with a route.
func firstAddr(ctx context.Context, e *machine.Env, site *configs.Site) (netip.Addr, error) {
	masters := member.MastersOf(e, site)
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		if len(masters) > 1 { // with only one, there is no choice
			wg.Go(func() { errs[i] = machine.Answers(ctx, e, m) })
		}
	}
	wg.Wait()
	var order []string
	for _, answer := range []bool{true, false} {
		for i, m := range masters {
			if (errs[i] == nil) == answer {
				order = append(order, m)
			}
		}
	}
	var bad []error
	for _, m := range order {
		src, err := nodeAddr(ctx, e, site, m)
		if err == nil {
			return src, nil
		}
		bad = append(bad, err)
	}
	return netip.Addr{}, errors.Join(bad...)
}

// nodeAddr returns this node's source address towards an API server, in the VIP's address family:
// IPVS uses only one family, but a name may have addresses of both.
func nodeAddr(ctx context.Context, e *machine.Env, site *configs.Site, master string) (netip.Addr, error) {
	addrs, err := APIServerAddrs(ctx, e, site, master)
	if err != nil {
		return netip.Addr{}, err
	}
	var errs []error
	for _, addr := range addrs {
		src, err := e.Source(ctx, addr)
		if err == nil && site.IPVS.Disabled && len(addrs) > 1 {
			// Only a connection attempt shows which family works.
			err = machine.Answers(ctx, e, addr)
		}
		if err == nil {
			return src, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", addr, machine.PlainNet(err)))
	}
	return netip.Addr{}, fmt.Errorf("finding the address from which this node connects to %s: %w", master, errors.Join(errs...))
}

// APIServerAddrs returns an API server's addresses as "host:port": those of the VIP's family, or
// without IPVS all.
func APIServerAddrs(ctx context.Context, e *machine.Env, site *configs.Site, master string) ([]string, error) {
	host, port, err := net.SplitHostPort(master)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's address %q: %w", master, err)
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return []string{master}, nil
	}
	bounded, cancel := e.ForProbe(ctx)
	defer cancel()
	addrs, err := e.Resolve(bounded, host)
	if err != nil {
		return nil, fmt.Errorf("looking up the API server %s: %w", host, err)
	}
	vip, err := netip.ParseAddr(site.VIP)
	either := err != nil || site.IPVS.Disabled
	var out []string
	for _, a := range addrs {
		if a = a.Unmap(); either || a.Is4() == vip.Is4() {
			out = append(out, net.JoinHostPort(a.String(), port))
		}
	}
	if len(out) == 0 {
		return nil, run.Advise(fmt.Errorf("API server %s has no address of the family of the VIP %s", host, vip),
			"choose a vip of the API servers' family in site.yaml (10.103.97.2, or fd00:ed6e::2 for IPv6), or give the name such an address in DNS")
	}
	return out, nil
}

// NodeLine returns the node's own line in /etc/hosts. Without it, kubeadm and kubelet look up the
// node's name in DNS, which takes half a minute if no server answers.
func NodeLine(e *machine.Env, addr netip.Addr) siteconf.HostsEntry {
	return siteconf.HostsEntry{IP: addr.String(), Names: []string{e.Text("/etc/hostname")}}
}

// StartTimeout is how long a network may take to start: DHCP, spanning tree, Wi-Fi association.
const StartTimeout = 75 * time.Second

// Timeout is long enough to try the new settings, then the former ones, then the new ones again.
const Timeout = 6 * time.Minute

// KeepOrRollBack waits until the current network settings reach u, and then records them as good.
// If they do not reach u, it tries the former settings; former reports whether those are in place
// now.
func KeepOrRollBack(ctx context.Context, e *machine.Env, u Uplink) (found Reached, former bool, err error) {
	if TrialCutOff(e) {
		if err := takeBack(ctx, e); err != nil {
			return Reached{}, false, err
		}
	}
	if found = u.wait(ctx, e); found.Extent != everything {
		if found, former, err = rollBack(ctx, e, u, found); err != nil {
			return found, former, errors.Join(found.Err, err)
		}
	}
	if found.Extent == everything && !former && IsNew(e) { // if the former settings are in place, the record of their trial must stay
		err = SaveGood(e)
	}
	return found, former, err
}

func waitForAPIServer(ctx context.Context, e *machine.Env, masters []string) (string, error) {
	found := ""
	err := e.Retry(ctx, machine.Wait{Every: 2 * time.Second, For: StartTimeout}, func() (err error) {
		if machine.HasRoute(ctx, e, masters) == nil {
			e.Waiting("an API server to answer (%s)", strings.Join(masters, ", "))
		} else {
			e.Waiting("an address and a route to an API server")
		}
		found, err = Reach(ctx, e, masters)
		return err
	})
	return found, err
}

// networkDirs lists the directories with settings that may cut a node off.
var networkDirs = [...]string{"/etc/systemd/network", "/etc/systemd/resolved.conf.d", "/etc/wpa_supplicant"}

const goodNetwork = ondisk.StateDir + "/network"

// OwnHostPort returns the address and port of the machine's own API server.
func OwnHostPort(site *configs.Site) string {
	_, port, err := net.SplitHostPort(site.Masters[0])
	if err != nil {
		panic("BUG: port of a Site that was not validated: " + err.Error())
	}
	return net.JoinHostPort(site.Self().Address, port)
}

// OfflineHealthy returns nil if a boot counts as healthy although no API server is reachable:
// kubelet and ipvscare run steadily, and there is a route (a new system may lack the network card's
// driver).
func OfflineHealthy(ctx context.Context, e *machine.Env, site *configs.Site) error {
	var errs []error
	units := []string{ondisk.UnitKubelet}
	if !site.IPVS.Disabled {
		units = append(units, ondisk.UnitIPVSCare)
	}
	for _, u := range units {
		errs = append(errs, e.SteadyUnit(ctx, u))
	}
	return errors.Join(append(errs, machine.HasRoute(ctx, e, member.MastersOf(e, site)))...)
}

// NodeAddress returns the address that Phase wrote to /etc/hosts, or "" if there is none.
func NodeAddress(e *machine.Env) string {
	inside := false
	for line := range strings.Lines(string(e.Contents("/etc/hosts"))) {
		line = strings.TrimSpace(line)
		switch {
		case line == "# BEGIN "+NodeOwner:
			inside = true
		case line == "# END "+NodeOwner:
			inside = false
		case inside:
			if f := strings.Fields(line); len(f) > 1 {
				return f[0]
			}
		}
	}
	return ""
}
