package hub

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// yurthub does not authenticate clients and acts with the node's rights. It listens on four ports:
//
//   - The proxy has two. Pods reach them at PodAddress, other nodes at any routable address.
//   - The pool's port is for other nodes of the pool.
//   - One port serves health and profiles, and accepts tokens.
//
// Therefore only root, and the users that the Site allows, may connect to all of them. Pods may
// connect to the proxy's ports, and other machines to the pool's port if the Site opens it.
//
// kubelet connects to the proxy as root, without TLS. While yurthub is down, another user's process
// could listen on these ports, so packets from its sockets are dropped. Answers to a SYN must come
// from a socket of root: if a listener's queue is full, the kernel answers with a SYN cookie, which
// belongs to no socket, so a rule that only names other users would let it pass.
const (
	PortsUnit      = "edgebake-yurthub-ports.service"
	PortsTimer     = "edgebake-yurthub-ports.timer"
	portsUnitFile  = "/etc/systemd/system/" + PortsUnit
	portsTimerFile = "/etc/systemd/system/" + PortsTimer
	portsTable     = "edgebake_yurthub"
	// PortsKubelet loads the rules before kubelet starts, if kubelet runs yurthub as a static pod.
	PortsKubelet = "/etc/systemd/system/kubelet.service.d/20-edgebake-yurthub-ports.conf"
)

// PortRules returns the nftables rules for IPv4 and IPv6. Loading them replaces the tables
// atomically, so the ports are never open.
//
//   - Packets of this node's processes belong to the user who opened the socket. Packets of
//     pods, forwarded packets and the kernel's resets have no user, and match no skuid rule.
//   - A route lookup (fib) finds out if the destination is this node, because NAT may have
//     changed the address.
//   - A packet counts as a pod's if it arrives on an interface of the kind veth, netkit or
//     bridge. Network cards have no kind; VLANs, bonds, tunnels and macvlans have others.
//   - A network card may be a port of a bridge, so the second table also checks the kind of the
//     interface in the bridge. There, tun stands for virtual machines.
func PortRules(p PortAccess) []byte {
	local, pods := openyurt.HealthPort, openyurt.ProxyPort+", "+openyurt.SecurePort
	all := pods + ", " + local + ", " + openyurt.PoolPort
	if !p.Open {
		local += ", " + openyurt.PoolPort
	}
	users := "0"
	for _, uid := range p.Clients {
		users += ", " + strconv.Itoa(uid)
	}
	return []byte(strings.NewReplacer("LOCAL", local, "PODS", pods, "ALL", all, "USERS", users, "TABLE", portsTable).Replace(
		`# Written by firstboot: whoever reaches yurthub's ports gets this node's rights.
table inet TABLE
delete table inet TABLE
table inet TABLE {
	chain input {
		type filter hook input priority filter - 10; policy accept;
		iifname "lo" accept
		tcp dport { LOCAL } drop
		tcp dport { PODS } jump pods
	}
	chain pods {
		meta iifkind { "veth", "netkit", "bridge" } accept
		drop
	}
	chain output {
		type filter hook output priority filter - 10; policy accept;
		tcp dport { ALL } meta skuid != { USERS } fib daddr type local reject with tcp reset
		tcp sport { ALL } meta skuid 0 accept
		tcp sport { ALL } meta skuid != 0 drop
		tcp sport { ALL } tcp flags & syn == syn drop
	}
}
table bridge TABLE
delete table bridge TABLE
table bridge TABLE {
	chain input {
		type filter hook input priority filter; policy accept;
		tcp dport { PODS } jump pods
	}
	chain pods {
		meta iifkind { "veth", "netkit", "tun" } accept
		drop
	}
}
`))
}

// PortAccess contains the settings of the rules for yurthub's ports.
type PortAccess struct {
	Open    bool  // the pool's port is open to other nodes of the pool
	Clients []int // IDs of users that may connect, in addition to root
	pod     bool  // kubelet runs yurthub as a static pod
}

func (h hub) portAccess() PortAccess {
	return PortAccess{Open: h.openPort, Clients: h.clients, pod: h.IsPod()}
}

// portFiles returns the rules and the units that keep them loaded. PortsUnit loads them after
// nftables.service starts, which flushes all rules; the timer loads them after any other loss.
func portFiles(p PortAccess) map[string][]byte {
	files := map[string][]byte{
		NFTFile: PortRules(p),
		portsUnitFile: []byte(`# Written by firstboot.
[Unit]
Description=Close the ports of yurthub to other machines and users
After=nftables.service firewalld.service
Before=` + openyurt.Unit + ` ` + ondisk.UnitKubelet + `

[Service]
Type=oneshot
ExecStart=/bin/sh -c '[ -z "$TRIGGER_UNIT" ] || /usr/sbin/nft list table inet ` + portsTable + ` >/dev/null 2>&1 || echo "<4>something has removed the rules for the ports of yurthub: loading them again"'
ExecStart=/usr/sbin/nft -f ` + NFTFile + `
LogLevelMax=notice

[Install]
WantedBy=multi-user.target nftables.service firewalld.service
`),
		portsTimerFile: []byte(`# Written by firstboot.
[Unit]
Description=Keep the ports of yurthub closed to other machines and users

[Timer]
OnActiveSec=30s
OnUnitInactiveSec=30s
AccuracySec=5s

[Install]
WantedBy=timers.target
`),
	}
	if p.pod { // the same drop-in as for yurthub's own unit
		files[PortsKubelet] = []byte(portRulesDropin)
	}
	return files
}

// installPortRules loads the rules, and installs the units that keep them loaded. Without the
// rules, yurthub does not start, now or at later boots.
func installPortRules(ctx context.Context, e *machine.Env, p PortAccess) error {
	files := portFiles(p)
	wrote := false
	for _, path := range slices.Sorted(maps.Keys(files)) {
		did, err := e.Write(path, files[path], machine.Mode(0o644))
		if err != nil {
			return fmt.Errorf("closing the ports of yurthub: %w", err)
		}
		wrote = wrote || did
	}
	var out strings.Builder
	if err := e.Run(ctx, machine.Cmd{Args: []string{"nft", "-f", NFTFile}, Output: &out}); err != nil {
		return portsError(err, out.String())
	}
	steps := [][2]string{{"enable", PortsUnit}, {"enable", PortsTimer}, {"start", PortsTimer}}
	if wrote {
		steps = slices.Insert(steps, 0, [2]string{"daemon-reload", ""})
	}
	for _, step := range steps {
		if err := e.Unit(ctx, step[0], step[1]); err != nil {
			return fmt.Errorf("keeping the ports of yurthub closed: %w", err)
		}
	}
	return nil
}

// InstallPodPortRules installs the rules for the ports of yurthub before kubelet runs it as a
// static pod: the pod's manifest is on DATA, but an updated root file system has no rules yet.
func InstallPodPortRules(ctx context.Context, e *machine.Env, site *configs.Site) error {
	if !e.Exists(openyurt.Manifest) {
		return nil
	}
	return installPortRules(ctx, e, PortAccess{Open: site.Yurthub.OpenPort, Clients: site.Yurthub.LocalClients, pod: true})
}

// portRulesLoaded reports whether the kernel has the rules.
func portRulesLoaded(ctx context.Context, e *machine.Env) bool {
	for _, family := range []string{"inet", "bridge"} {
		var out strings.Builder
		err := e.Run(ctx, machine.Cmd{Args: []string{"nft", "list", "table", family, portsTable}, Output: &out})
		if err != nil || !strings.Contains(out.String(), "jump pods") || !strings.Contains(out.String(), "drop") || family == "inet" && !strings.Contains(out.String(), "skuid") {
			return false
		}
	}
	return true
}

// RemovePortRules removes the rules and their units. yurthub must not be running.
func RemovePortRules(ctx context.Context, e *machine.Env) error {
	if e.Exists(PortsKubelet) {
		// Remove it first: kubelet must not wait for rules that do not exist.
		if err := e.Remove(PortsKubelet); err != nil {
			return fmt.Errorf("removing the rules for yurthub's ports: %w", err)
		}
		if err := e.Unit(ctx, "daemon-reload", ""); err != nil {
			return fmt.Errorf("removing the rules for yurthub's ports: %w", err)
		}
	}
	if e.Exists(portsTimerFile) {
		for _, step := range [][2]string{{"stop", PortsTimer}, {"disable", PortsTimer}, {"disable", PortsUnit}} {
			if err := e.Unit(ctx, step[0], step[1]); err != nil {
				return fmt.Errorf("removing the rules for yurthub's ports: %w", err)
			}
		}
	}
	if e.Exists(NFTFile) {
		for _, family := range []string{"inet", "bridge"} {
			if err := e.Run(ctx, machine.Cmd{Args: []string{"nft", "delete", "table", family, portsTable}}); err != nil {
				e.Log.Warn("removing the rules for yurthub's ports", "error", err)
			}
		}
	}
	for _, p := range portsLeavings {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing the rules for yurthub's ports: %w", err)
		}
	}
	return nil
}

// checkPortRules checks with nft whether this kernel can load the rules, without loading them.
func checkPortRules(ctx context.Context, e *machine.Env) error {
	var out strings.Builder
	err := e.Run(ctx, machine.Cmd{Args: []string{"nft", "--check", "--file", "-"}, Stdin: strings.NewReader(string(PortRules(PortAccess{}))), Output: &out})
	if err == nil {
		return nil
	}
	return portsError(err, out.String())
}

func portsError(err error, output string) error {
	if output = strings.TrimSpace(output); output != "" {
		err = fmt.Errorf("%w: %s", err, machine.OneLine(errors.New(output)))
	}
	return run.Advise(fmt.Errorf("closing the ports of yurthub, which give this node's rights to any client: %w", err),
		"install nftables 0.9.4 or later; the kernel must be 5.6 or later, with nf_tables for the families inet and bridge, nft_fib_inet and nft_reject_inet")
}
