package firstboot

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// twoCards returns a machine with a second network card, and with the
// interfaces that a cluster's network makes.
func twoCards(t *testing.T, lines ...string) *world {
	w := nativeWorld(t, lines...)
	w.Put("/sys/class/net/eth1/device/vendor", "0x1af4\n")
	for _, a := range []string{
		"cni0 10.244.0.1", "kube-ipvs0 10.96.0.10", "edgebake0 10.103.97.2", "cali1 fd00:244::1",
		"eth1 10.7.0.20", "eth1 10.7.0.9", "eth1 fe80::9", "eth1 fd00:7::9",
	} {
		name, addr, _ := strings.Cut(a, " ")
		w.ExtraAddrs = append(w.ExtraAddrs, machine.InterfaceAddr{Interface: name, Addr: netip.MustParseAddr(addr)})
	}
	return w
}

// without removes an address from the machine.
func (w *world) without(addr string) {
	w.ExtraAddrs = slices.DeleteFunc(w.ExtraAddrs, func(a machine.InterfaceAddr) bool { return a.Addr.String() == addr })
}

// TestNodeIPSelects checks that the node's address is one of the machine's addresses in nodeIP, and
// does not change while the machine has it.
func TestNodeIPSelects(t *testing.T) {
	t.Parallel()
	for nodeIP, want := range map[string]string{
		"":             "192.0.2.50",
		"10.0.0.0/8":   "10.7.0.9",
		"10.7.0.20":    "10.7.0.20",
		"192.0.2.0/24": "192.0.2.50",
		"0.0.0.0/0":    "192.0.2.50", // the source address towards the API servers
		"fd00::/8":     "fd00:7::9",
	} {
		t.Run(nodeIP, func(t *testing.T) {
			t.Parallel()
			w := twoCards(t)
			if nodeIP != "" {
				w = twoCards(t, "nodeIP: '"+nodeIP+"'")
			}
			w.MustBoot()
			if got := network.NodeAddress(w.Env()); got != want {
				t.Errorf("the address is %s, want %s", got, want)
			}
			if got := w.Get(member.KubeadmFlags); strings.Contains(got, "node-ip") {
				t.Errorf("kubelet has %s", got) // it finds the address by the node's name
			}
		})
	}
	w := twoCards(t, "nodeIP: 10.0.0.0/8")
	w.MustBoot()
	w.ExtraAddrs = append(w.ExtraAddrs, machine.InterfaceAddr{Interface: "eth1", Addr: netip.MustParseAddr("10.7.0.2")})
	w.PowerOn()
	if w.MustBoot(); network.NodeAddress(w.Env()) != "10.7.0.9" {
		t.Errorf("another address on the interface changed the node's address to %s", network.NodeAddress(w.Env()))
	}
	w.without("10.7.0.9")
	w.PowerOn()
	if w.MustBoot(); network.NodeAddress(w.Env()) != "10.7.0.2" {
		t.Errorf("without its address, the node has %s", network.NodeAddress(w.Env()))
	}
}

// TestNodeIPOfMadeInterfaces checks that the address of a VLAN that networkd makes counts, but not
// that of a network plugin's interface.
func TestNodeIPOfMadeInterfaces(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "nodeIP: 10.0.0.0/8", "network: {interfaces: [{name: eth0, dhcp: true, vlans: [{id: 9, dhcp: true}]}]}")
	w.ExtraAddrs = []machine.InterfaceAddr{{Interface: "cni0", Addr: netip.MustParseAddr("10.1.0.1")}, {Interface: "vlan9", Addr: netip.MustParseAddr("10.9.0.7")}}
	if w.MustBoot(); network.NodeAddress(w.Env()) != "10.9.0.7" {
		t.Errorf("the address is %s", network.NodeAddress(w.Env()))
	}
}

// TestNodeIPOfNoAddress checks a nodeIP without a matching address. A new machine reports its
// addresses, and a node keeps its address.
func TestNodeIPOfNoAddress(t *testing.T) {
	t.Parallel()
	w := twoCards(t, "nodeIP: 172.16.0.0/12")
	if err := w.Boot(); err == nil || w.State().Result == ondisk.ResultDone {
		t.Fatalf("the machine joined: %v", err)
	}
	s := w.State()
	if text := strings.Join(w.Console, "\n"); !strings.Contains(text, "no interface has an address in 172.16.0.0/12 (nodeIP); the interfaces have 192.0.2.50 (eth0), 10.7.0.20 (eth1)") || !strings.Contains(text, "correct nodeIP") {
		t.Errorf("%+v, console:\n%s", s, text)
	}

	w = twoCards(t)
	w.MustBoot()
	w.Stamp(worldtest.SlotDevice, w.Site("nodeIP: 172.16.0.0/12"))
	w.PowerOn()
	_ = w.Boot()
	if got := network.NodeAddress(w.Env()); got != "192.0.2.50" || w.Units[ondisk.UnitKubelet] != "active" {
		t.Errorf("the address is %s, kubelet %s", got, w.Units[ondisk.UnitKubelet])
	}
	w.Stamp(worldtest.SlotDevice, w.Site("nodeIP: 10.7.0.0/16"))
	w.PowerOn()
	if w.MustBoot(); network.NodeAddress(w.Env()) != "10.7.0.9" {
		t.Errorf("after the correction, the node has %s", network.NodeAddress(w.Env()))
	}
}

// TestNodeIPOfTwoFamilies checks that two subnets select both addresses of a node in a dual-stack
// cluster.
func TestNodeIPOfTwoFamilies(t *testing.T) {
	t.Parallel()
	w := twoCards(t, "nodeIP: '10.0.0.0/8,fd00::/8'")
	w.Cluster.ServiceCIDRs = []string{"10.96.0.0/16", "fd00:96::/112"}
	w.MustBoot()
	if got := w.Get(member.KubeadmFlags); !strings.Contains(got, "--node-ip=10.7.0.9,fd00:7::9") {
		t.Errorf("kubelet has %s", got)
	}
	w.without("fd00:7::9") // at this boot the address is not configured yet
	w.PowerOn()
	w.MustBoot()
	if got := w.Get(member.KubeadmFlags); !strings.Contains(got, "--node-ip=10.7.0.9,fd00:7::9") || slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
		t.Errorf("without the second address kubelet has %s", got)
	}

	w = twoCards(t, "nodeIP: '10.0.0.0/8,fd00::/8'")
	w.Cluster.ServiceCIDRs = []string{"10.96.0.0/16"}
	w.MustBoot()
	if got := w.Get(member.KubeadmFlags); strings.Contains(got, "node-ip") {
		t.Errorf("in a cluster of one family kubelet has %s", got)
	}
}
