//go:build linux

package guest

import (
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// strict is a common host firewall: it accepts packets of known connections and drops others, in
// both directions.
const strict = `table inet host {
	chain input {
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		ct state invalid counter drop
		iif lo accept
		meta l4proto { 1, 58 } accept # ICMP, neighbours
		%s
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		ct state established,related accept
		ct state invalid counter drop
	}
	chain output {
		type filter hook output priority filter; policy accept;
		ct state invalid counter drop
	}
}
%s
`

// firewall loads a ruleset on the node.
func (n *machine) firewall(rules string) {
	file := n.dir + "/rules.nft"
	check(os.WriteFile(file, []byte(rules), 0o644))
	n.must("/bin/nft", "-f", file)
}

// setting reads a setting of the node's network.
func (n *machine) setting(name string) (s string) {
	n.in(func() {
		b, err := os.ReadFile("/proc/sys/net/" + name)
		check(err)
		s = strings.TrimSpace(string(b))
	})
	return s
}

func (n *machine) set(name, value string) {
	n.in(func() { check(os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644)) })
}

// TestFirewall checks that a stateful firewall on the node accepts the connections that IPVS
// forwards: those of the node's own processes, of pods on the node's network, and of pods with
// their own network.
func TestFirewall(t *testing.T) {
	l := newLab(t, 2, 1)
	n := l.nodes[0]
	n.firewall(fmt.Sprintf(strict, "iifname pod0 ip daddr 10.103.97.2 tcp dport 6443 accept",
		"table ip cni { chain post { type nat hook postrouting priority srcnat; ip saddr 10.244.0.0/24 ip daddr != 10.244.0.0/24 masquerade; }; }"))
	n.configure(l.virtual())
	n.care()
	n.expect("m1 m2")
	if got := n.setting("ipv4/vs/conntrack"); got != "1" {
		t.Errorf("net.ipv4.vs.conntrack is %s", got)
	}
	reach := func(from *machine) func(t *testing.T) {
		return func(t *testing.T) {
			for range 4 {
				c, _, err := from.ask(vip, time.Minute)
				if err != nil {
					t.Fatalf("%v\n%s", err, n.must("/bin/nft", "list", "ruleset"))
				}
				c.Close()
			}
		}
	}
	l.run("the node and pods on its network", reach(n))
	pod := n.pod()
	l.run("a pod with a network of its own", reach(pod))
	l.run("what is being opened while a master goes gets through with its next SYN", func(t *testing.T) {
		watches := []*watch{n.watch(), n.watch(), pod.watch(), pod.watch()}
		l.masters[0].netem(100, 0)
		time.Sleep(200 * time.Millisecond)
		h, hp := n.hammer(100*time.Millisecond, time.Minute), pod.hammer(100*time.Millisecond, time.Minute)
		began := time.Now()
		n.expect("m2")
		t.Logf("taken out after %s", time.Since(began))
		time.Sleep(time.Second)
		for _, h := range []*hammer{h, hp} {
			if _, failed, ok := h.end(began); failed > 0 || ok == 0 {
				t.Errorf("%d connections failed, %d went well", failed, ok)
			}
		}
		for _, w := range watches[:2] {
			if w.master == "m1" {
				n.breaks(w)
			}
		}
		for _, w := range watches {
			w.close()
		}
		if b, err := n.procFile("nf_conntrack"); err == nil && strings.Contains(string(b), "src=10.103.0.11 dst=10.103.97") {
			t.Errorf("connection tracking still has entries of the dead master:\n%s", b)
		}
		l.masters[0].netem(0, 0)
		n.expect("m1 m2")
	})
	l.run("somebody turns it off", func(t *testing.T) {
		n.set("ipv4/vs/conntrack", "0")
		eventually(t, "it is on again", func() bool { return n.setting("ipv4/vs/conntrack") == "1" })
		reach(n)(t)
	})
	// Check that without ipvscare's settings, this firewall does block connections.
	l.run("without it the firewall is in the way", func(t *testing.T) {
		n.signal(syscall.SIGSTOP)
		n.set("ipv4/vs/conntrack", "0")
		if _, _, err := n.ask(vip, 3*time.Second); err == nil {
			t.Error("the virtual address can be reached without conntrack: this firewall proves nothing")
		}
		n.signal(syscall.SIGCONT)
		eventually(t, "it is on again", func() bool { return n.setting("ipv4/vs/conntrack") == "1" })
		reach(n)(t)
	})
}

// TestFirewallIPv6 is TestFirewall over IPv6.
func TestFirewallIPv6(t *testing.T) {
	l := newLab(t, 2, 1)
	n := l.nodes[0]
	for i, m := range append(l.masters, n) {
		m.must("/bin/ip", "addr", "add", fmt.Sprintf("fd00::%d/64", i+1), "dev", "eth0", "nodad")
	}
	n.firewall(fmt.Sprintf(strict, "", ""))
	v := l.virtual()
	v.VIP, v.Masters = "[fd00:97::2]:6443", []string{"[fd00::1]:6443", "[fd00::2]:6443"}
	n.configure(v)
	n.care()
	eventually(t, "both serve", func() bool { return strings.Count(n.rules(), "Masq 1") == 2 })
	for range 4 {
		c, _, err := n.ask(v.VIP, time.Minute)
		if err != nil {
			t.Fatalf("%v\n%s", err, n.must("/bin/nft", "list", "ruleset"))
		}
		c.Close()
	}
}

// pod makes a pod on the node with its own address.
func (n *machine) pod() *machine {
	p := n.l.bare("pod")
	n.l.t.Cleanup(func() { p.ns.Close() })
	n.in(func() {
		la := netlink.NewLinkAttrs()
		la.Name = "pod0"
		check(netlink.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: "eth0", PeerNamespace: netlink.NsFd(p.ns)}))
		link, err := netlink.LinkByName("pod0")
		check(err)
		check(netlink.LinkSetUp(link))
		check(netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 244, 0, 1), Mask: net.CIDRMask(24, 32)}}))
	})
	n.set("ipv4/ip_forward", "1")
	p.must("/bin/ip", "link", "set", "lo", "up")
	p.must("/bin/ip", "link", "set", "eth0", "up")
	p.must("/bin/ip", "addr", "add", "10.244.0.2/24", "dev", "eth0")
	p.must("/bin/ip", "route", "add", "default", "via", "10.244.0.1")
	return p
}
