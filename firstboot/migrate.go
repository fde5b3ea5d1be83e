package firstboot

import (
	"fmt"
	"strings"
)

// Equivalent says what stands for one flag of another tool.
type Equivalent struct {
	// Flag as the tool spells it; "(argument)" is what stands without one.
	Flag string
	// Ours is "Site FIELD", "Image FIELD", "firstboot COMMAND [--flag]", or
	// "-" where there is none.
	Ours string
	Note string
}

// Migration is one command of another tool and what stands for its flags.
type Migration struct {
	Command, Versions, Ours string
	Flags                   []Equivalent
}

// migrations lists the tools in the order people meet them. The flags are
// those of the versions named; docs/migrate.md and `firstboot help migrate`
// are made of this.
var migrations = [...]Migration{
	{
		Command: "yurtadm join", Versions: "v1.3 to v1.7", Ours: "a Site, stamped onto the image",
		Flags: []Equivalent{
			{"(argument)", "Site masters", "all masters, not the first alone; each is tried, and lost ones are routed round afterwards"},
			{"--token", "Site credentials.token", "forgotten once the node is Ready"},
			{"--node-type", "Site nodeType", "edge or cloud; native is kubeadm's plain worker. local: see below"},
			{"--node-name", "Site nodeName", "a name, or a template of the machine's serial, MAC or UUID"},
			{"--nodepool-name", "Site nodePool", "the pool need not exist before the join"},
			{"--namespace", "Site yurthub.namespace", ""},
			{"--cri-socket", "Site criSocket", "containerd's, unless told otherwise"},
			{"--organizations", "Site organizations", ""},
			{"--pause-image", "Image containerd.sandbox", "baked; kubelet 1.35 and later know no such flag"},
			{"--yurthub-image", "Image yurthub.image", "baked"},
			{"--yurthub-binary-url", "Image yurthub.binary", "baked, with its sha256; nothing is downloaded at the join"},
			{"--yurthub-server-addr", "Site yurthub.extraArgs", "--bind-address=… there, where 127.0.0.1 is not right"},
			{"--kubernetes-resource-server", "Image kubernetes.source", "url, file or goModule; baked"},
			{"--reuse-cni-bin", "-", "CNI plugins are baked always, and nothing replaces them"},
			{"--node-labels", "Site labels", "OpenYurt's own two follow from nodeType and nodePool"},
			{"--ignore-preflight-errors", "Site ignorePreflightErrors", ""},
			{"--discovery-token-ca-cert-hash", "Site caCertHashes", "yurthub gets it too"},
			{"--discovery-token-unsafe-skip-ca-verification", "Site unsafeSkipCAVerification", ""},
			{"--static-pods", "Image files", "manifests below /etc/kubernetes/manifests; yurtadm 1.7 reads the flag and deploys nothing"},
			{"--config", "-", "the JoinConfiguration follows from the Site; `edgebake render` shows it"},
			{"--host-control-plane-addr", "-", "of node type local only"},
		},
	},
	{
		Command: "yurtadm reset", Versions: "v1.3 to v1.7", Ours: "firstboot reset",
		Flags: []Equivalent{
			{"--cert-dir", "-", "/etc/kubernetes/pki"},
			{"--cri-socket", "Site criSocket", ""},
			{"--force", "firstboot reset --yes", ""},
			{"--ignore-preflight-errors", "-", "reset has no checks that could be ignored"},
		},
	},
	{
		Command: "yurtctl convert", Versions: "v0.2 to v0.6", Ours: "firstboot convert, on each node",
		Flags: []Equivalent{
			{"--cloud-nodes", "firstboot convert --node-type", "cloud, on those nodes; edge is the default"},
			{"--autonomous-nodes", "-", "annotate the Node: node.beta.openyurt.io/autonomy=true"},
			{"--provider", "-", "any node that kubeadm joined"},
			{"--yurthub-image", "Image yurthub.image", "on a node that edgebake did not build: put the program at /usr/local/bin/yurthub"},
			{"--yurthub-healthcheck-timeout", "-", "six minutes, then undone; what is missing in the cluster is named"},
			{"--wait-servant-job-timeout", "-", "there is no job: convert runs on the node"},
			{"--yurt-controller-manager-image", "-", "install OpenYurt's charts in the cluster"},
			{"--node-servant-image", "-", "there is no job: convert runs on the node"},
			{"--yurtctl-servant-image", "-", "there is no job: convert runs on the node"},
			{"--kubeadm-conf-path", "-", "kubelet is turned by kubeadm-flags.env, wherever its drop-in is"},
			{"--pod-manifest-path", "-", "yurthub is a unit, no static pod"},
			{"--deploy-yurttunnel", "-", "OpenYurt has replaced yurt-tunnel by raven"},
			{"--yurt-tunnel-server-image", "-", "OpenYurt has replaced yurt-tunnel by raven"},
			{"--yurt-tunnel-server-address", "-", "OpenYurt has replaced yurt-tunnel by raven"},
			{"--yurt-tunnel-agent-image", "-", "OpenYurt has replaced yurt-tunnel by raven"},
			{"--enable-app-manager", "-", "install OpenYurt's charts in the cluster"},
			{"--yurt-app-manager-image", "-", "install OpenYurt's charts in the cluster"},
			{"--system-architecture", "Image arch", ""},
		},
	},
	{
		Command: "yurtctl revert", Versions: "v0.2 to v0.6", Ours: "firstboot revert, on each node",
		Flags: []Equivalent{
			{"--node-servant-image", "-", "there is no job: revert runs on the node"},
			{"--yurtctl-servant-image", "-", "there is no job: revert runs on the node"},
			{"--kubeadm-conf-path", "-", "kubelet is turned by kubeadm-flags.env, wherever its drop-in is"},
		},
	},
	{
		Command: "edgeadm join", Versions: "SuperEdge v0.3 and later", Ours: "a Site, stamped onto the image",
		Flags: []Equivalent{
			{"(argument)", "Site masters", "all of them"},
			{"--token", "Site credentials.token", "forgotten once the node is Ready"},
			{"--discovery-token", "Site credentials.token", "one token serves both"},
			{"--tls-bootstrap-token", "Site credentials.token", "one token serves both"},
			{"--discovery-token-ca-cert-hash", "Site caCertHashes", ""},
			{"--discovery-token-unsafe-skip-ca-verification", "Site unsafeSkipCAVerification", ""},
			{"--discovery-file", "-", "masters and caCertHashes say the same"},
			{"--node-name", "Site nodeName", "a name, or a template of the machine's serial, MAC or UUID"},
			{"--cri-socket", "Site criSocket", ""},
			{"--ignore-preflight-errors", "Site ignorePreflightErrors", ""},
			{"--skip-phases", "Site skipPhases", ""},
			{"--config", "-", "the JoinConfiguration follows from the Site; `edgebake render` shows it"},
			{"--install-pkg-path", "Image kubernetes", "what the package held is baked"},
			{"--enable-edge", "Site nodeType", "edge; yurthub stands where lite-apiserver stood"},
			{"--control-plane", "-", "worker nodes only"},
			{"--certificate-key", "-", "worker nodes only"},
			{"--apiserver-advertise-address", "-", "worker nodes only"},
			{"--apiserver-bind-port", "-", "worker nodes only"},
			{"--experimental-kustomize", "-", "worker nodes only"},
			{"--experimental-patches", "-", "worker nodes only"},
		},
	},
	{
		Command: "edgeadm reset", Versions: "SuperEdge v0.3 and later", Ours: "firstboot reset",
		Flags: []Equivalent{
			{"--force", "firstboot reset --yes", ""},
			{"--cert-dir", "-", "/etc/kubernetes/pki"},
			{"--cri-socket", "Site criSocket", ""},
			{"--ignore-preflight-errors", "-", "reset has no checks that could be ignored"},
			{"--kubeconfig", "-", "the Node object is the cluster's: kubectl delete node NODE"},
			{"--install-pkg-path", "-", "nothing is unpacked to reset a node"},
			{"--enable-edge", "-", "what yurthub left is removed where it is found"},
		},
	},
}

// localNode says what became of yurtadm's third node type.
const localNode = `yurtadm's --node-type=local is not built. It is a node of a host cluster that
also serves a tenant cluster: yurthub runs there as a balancer alone, keeps
iptables rules to the tenant's API servers, and asks for their addresses
without verifying TLS. In edgebake ipvscare does that work for every node
type, verified; choose nodeType native.
`

// MigrationText is the table for a terminal.
func MigrationText() string {
	var b strings.Builder
	b.WriteString("What stands for the flags of yurtadm, yurtctl and edgeadm.\n")
	for _, m := range migrations {
		fmt.Fprintf(&b, "\n%s (%s): %s\n", m.Command, m.Versions, m.Ours)
		for _, f := range m.Flags {
			fmt.Fprintf(&b, "  %-46s %-34s %s\n", f.Flag, f.Ours, f.Note)
		}
	}
	b.WriteString("\n" + localNode)
	return trimLines(b.String())
}

func trimLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(l, " ")
	}
	return strings.Join(lines, "\n")
}

// MigrationPage is docs/migrate.md.
func MigrationPage() string {
	var b strings.Builder
	b.WriteString(`# Coming from yurtadm, yurtctl or edgeadm

` + "`firstboot help migrate`" + ` prints this table too. It is made of the code
(` + "`firstboot/migrate.go`" + `), and a test holds every field and flag named here
against the ones that exist.
`)
	for _, m := range migrations {
		fmt.Fprintf(&b, "\n## %s\n\n%s → %s\n\n| flag | edgebake | |\n|---|---|---|\n", m.Command, m.Versions, m.Ours)
		for _, f := range m.Flags {
			ours := f.Ours
			if kind, name, ok := strings.Cut(ours, " "); ok && ours != "-" {
				ours = kind + " `" + name + "`"
			}
			flag := f.Flag
			if strings.HasPrefix(flag, "--") {
				flag = "`" + flag + "`"
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", flag, ours, strings.ReplaceAll(f.Note, "|", "\\|"))
		}
	}
	b.WriteString("\n## Node type local\n\n" + localNode)
	return b.String()
}
