package controlplane_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/network"
)

// onCard returns a control-plane node's Site with its address on this network card.
func onCard(s configs.Site, card string) *configs.Site {
	s.Network.Interfaces = []configs.Interface{{Name: card, Addresses: []string{"192.0.2.11/24"}, Gateway: "192.0.2.1"}}
	return &s
}

// cardWorld returns a control-plane node that has run with its address on eth0.
// Its next Site has the address on eth1.
func cardWorld(t *testing.T, masters int) *controlPlane {
	t.Helper()
	m := newControlPlane(t, mintedSites(t, masters))
	for _, o := range m.others {
		o.state = etcdmember.Blank
	}
	m.stampSite(onCard(*m.site, "eth0"))
	m.bootDone()
	for _, o := range m.others {
		o.mu.Lock()
		o.state = etcdmember.InUse
		o.mu.Unlock()
	}
	next := onCard(*m.site, "eth1")
	next.Credentials = configs.Credentials{}
	m.stampSite(next)
	return m
}

// neighbours makes connections to other machines fail if lead
// returns an error for their address.
func (m *controlPlane) neighbours(lead func(addr string) error) {
	dial := m.DialOther
	m.DialOther = func(ctx context.Context, addr string) (net.Conn, error, bool) {
		host, port, _ := net.SplitHostPort(addr)
		if port != network.GatewayPort && port != configs.EtcdPeerPort || host == "192.0.2.11" || host == "127.0.0.1" {
			return dial(ctx, addr)
		}
		if err := lead(addr); err != nil {
			return nil, err, true
		}
		if port == network.GatewayPort {
			return nil, syscall.ECONNREFUSED, true
		}
		return dial(ctx, addr)
	}
}

func (m *controlPlane) usesCard(name string) bool {
	return strings.Contains(m.Get("/etc/systemd/network/20-edgebake-00.network"), "Name="+name)
}

// TestControlPlaneNetworkSlip checks a corrected Site that has the address on a network card
// without a cable. The former settings are restored, and etcd starts.
func TestControlPlaneNetworkSlip(t *testing.T) {
	t.Parallel()
	for _, hasAddress := range []bool{false, true} {
		t.Run(fmt.Sprintf("address without cable %v", hasAddress), func(t *testing.T) {
			t.Parallel()
			m := cardWorld(t, 1)
			m.neighbours(func(string) error {
				if !m.usesCard("eth0") {
					return syscall.EHOSTUNREACH
				}
				return nil
			})
			if !hasAddress {
				m.NetworkWorks = func() bool { return m.usesCard("eth0") }
			}
			m.on()
			if err := m.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
			}
			if !m.usesCard("eth0") || !controlplane.Decided(m.Env()) || !m.ConsoleHas("the previous settings are back") {
				t.Errorf("etcd may start: %v\n%s", controlplane.Decided(m.Env()), strings.Join(m.Console, "\n"))
			}
			m.on()
			if err := m.Boot(); err != nil || m.ConsoleHas("the previous settings are back") || !m.usesCard("eth0") {
				t.Errorf("the next boot: %v\n%s", err, strings.Join(m.Console, "\n"))
			}
		})
	}
}

// TestControlPlaneSettingsThatAreRight checks that correct settings are never rolled back.
func TestControlPlaneSettingsThatAreRight(t *testing.T) {
	t.Parallel()
	unreachable := syscall.EHOSTUNREACH
	for _, tt := range []struct {
		name    string
		masters int
		lead    func(m *controlPlane, addr string) error
		kept    bool // recorded as working
	}{
		{"the gateway answers", 1, func(*controlPlane, string) error { return nil }, true},
		{"the gateway drops all", 1, func(*controlPlane, string) error { return context.DeadlineExceeded }, true},
		{"a sole control-plane node whose gateway is off", 1, func(*controlPlane, string) error { return unreachable }, false},
		{"another one rejects the connection", 3, func(_ *controlPlane, addr string) error {
			if addr == "192.0.2.12:2380" {
				return syscall.ECONNREFUSED
			}
			return unreachable
		}, true},
		{"the network comes up late, while the former settings are tried", 1, func(m *controlPlane, _ string) error {
			if !m.usesCard("eth0") && !slices.ContainsFunc(m.Console, func(l string) bool { return strings.Contains(l, "previous network settings") }) {
				return unreachable
			}
			return nil
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m := cardWorld(t, tt.masters)
			m.neighbours(func(addr string) error { return tt.lead(m, addr) })
			m.on()
			m.Patience = 15 * time.Minute
			err := m.Boot()
			if tt.masters == 1 && (err != nil || !controlplane.Decided(m.Env())) {
				t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
			}
			if !m.usesCard("eth1") || m.ConsoleHas("the previous settings are back") {
				t.Errorf("console:\n%s", strings.Join(m.Console, "\n"))
			}
			if network.IsNew(m.Env()) == tt.kept {
				t.Errorf("kept as good: %v", !tt.kept)
			}
			// Once etcd may run, the network is not changed.
			m.EffectNames, m.Now = nil, m.Now.Add(2*time.Hour)
			m.neighbours(func(string) error { return unreachable })
			if tt.masters == 1 {
				if err := m.Boot(); err != nil {
					t.Error(err)
				}
				if n := m.EffectCount("networkctl reload"); n != 0 {
					t.Errorf("the settings were changed %d times while etcd ran", n)
				}
			}
		})
	}
}
