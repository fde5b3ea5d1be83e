package network

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
)

// newAddr finds an address for a node that has none yet or has lost its former one.
func newAddr(ctx context.Context, e *machine.Env, site *configs.Site) (netip.Addr, error) {
	usual, err := firstAddr(ctx, e, site)
	subnets := site.NodeSubnets()
	if len(subnets) == 0 {
		return usual, err
	}
	var src netip.Addr
	// The address may be on another interface than the one to the API servers, and appear later.
	err = e.Retry(ctx, machine.Wait{Every: 2 * time.Second, For: StartTimeout}, func() (err error) {
		e.Waiting("an address in %s (nodeIP)", subnets[0])
		src, err = inSubnet(e, site, subnets[0], usual)
		return err
	})
	if err != nil {
		return src, run.Advise(err, "correct nodeIP or network in site.yaml, or check the cable of that interface")
	}
	return src, nil
}

// BothAddresses returns the node's address and, after a comma, a permanent address of the other
// family, or "" if there is none. An error means that an address required by nodeIP is missing.
func BothAddresses(e *machine.Env, site *configs.Site) (string, error) {
	own, err := netip.ParseAddr(NodeAddress(e))
	if err != nil {
		return "", nil
	}
	for _, p := range site.NodeSubnets() {
		if p.Addr().Is4() != own.Is4() {
			other, err := inSubnet(e, site, p, site.Network.OtherAddress(own))
			if err != nil {
				return "", err
			}
			return own.String() + "," + other.String(), nil
		}
	}
	return site.Network.BothAddresses(own.String()), nil
}

// inSubnet returns the machine's address in subnet: preferred if the machine has it, otherwise the
// lowest one. It ignores interfaces of pods and Services.
func inSubnet(e *machine.Env, site *configs.Site, subnet netip.Prefix, preferred netip.Addr) (netip.Addr, error) {
	all, err := e.Addresses()
	if err != nil {
		return netip.Addr{}, fmt.Errorf("looking for this node's address: %w", err)
	}
	made := madeDevices(e)
	var fitting []netip.Addr
	var others []string
	for _, a := range all {
		switch {
		case a.Addr.IsLinkLocalUnicast() || a.Addr.IsLoopback():
		case !e.Exists(filepath.Join("/sys/class/net", a.Interface, "device")) && !made[a.Interface]:
		case subnet.Contains(a.Addr):
			fitting = append(fitting, a.Addr)
		default:
			others = append(others, fmt.Sprintf("%s (%s)", a.Addr, a.Interface))
		}
	}
	switch {
	case len(fitting) == 0 && len(others) == 0:
		return netip.Addr{}, fmt.Errorf("no interface has an address in %s (nodeIP), nor any other address", subnet)
	case len(fitting) == 0:
		return netip.Addr{}, fmt.Errorf("no interface has an address in %s (nodeIP); the interfaces have %s", subnet, strings.Join(others, ", "))
	case slices.Contains(fitting, preferred):
		return preferred, nil
	}
	return slices.MinFunc(fitting, netip.Addr.Compare), nil
}

// madeDevices returns the interfaces that networkd creates: VLANs, bonds, bridges and tunnels.
func madeDevices(e *machine.Env) map[string]bool {
	made := map[string]bool{}
	files, err := filepath.Glob(e.Path("/etc/systemd/network/*.netdev"))
	if err != nil {
		panic("BUG: " + err.Error())
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "Name="); ok {
				made[name] = true
			}
		}
	}
	return made
}
