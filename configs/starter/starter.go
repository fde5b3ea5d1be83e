// Package starter makes the documents that `edgebake init` writes: the examples, completed with the
// known facts about the cluster and the person.
package starter

import (
	"bytes"
	"net/netip"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/examples"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/kubeadm"
)

// Values in the examples that are replaced by known values.
const (
	exampleToken = "abcdef.0123456789abcdef"
	exampleHash  = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	exampleKey   = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE0Y2vFLE7fQ2HHmGEUQGTqWn4Ri9GJMn1T9AeeQkMi+ admin@example.com"
)

// Input contains the facts about the cluster and the person. An empty field is unknown.
type Input struct {
	Masters                      []string
	Token                        string
	CAHashes                     []string
	NodeName, NodeType, NodePool string
	SSHKey                       string
	// Endpoint, Kubernetes and Pause come from a running cluster.
	Endpoint, Kubernetes, Pause string
	// DaemonSets means that the file agents.yaml contains the cluster's DaemonSets.
	DaemonSets bool
	// LeftOut lists the flags of the join command that are not needed with an image.
	LeftOut []string
}

// Site returns the example Site with the known values, and with placeholders for unknown ones.
// Optional fields are commented out. The field users is also commented out if the API servers are
// known but no SSH key is known.
func (in *Input) Site() []byte {
	token, hashes, key := forms.PlaceholderToken, []string{forms.PlaceholderCAHash}, forms.PlaceholderKey
	out := []string{"labels:", "taints:", "network:"}
	text := examples.Site
	if len(in.Masters) > 0 {
		token, hashes = in.Token, in.CAHashes
		const masters = "  - 192.168.7.11:6443\n  - 192.168.7.12:6443\n  - 192.168.7.13:6443\n"
		known := ""
		for _, m := range in.Masters {
			known += "  - " + quoteYAML(m) + "\n"
		}
		if a, err := netip.ParseAddrPort(in.Masters[0]); err == nil && a.Addr().Is6() {
			known += "\n# Of the API servers' family; a free address that stands for all of them.\nvip: fd00:ed6e::2\n"
		}
		if in.Endpoint != "" {
			known += "\n# The name in the API servers' certificates.\nendpoint: " + in.Endpoint + "\n"
		}
		text = strings.Replace(text, masters, known, 1)
		if in.SSHKey == "" {
			out = append(out, "users:")
		}
	}
	if in.SSHKey != "" {
		key = in.SSHKey
	}
	const name = "nodeName: shop-{{.MAC}}\n"
	named := name
	if in.NodeName != "" {
		named = "nodeName: " + in.NodeName + "\n"
	}
	if in.NodeType != "" {
		named += "nodeType: " + in.NodeType + "\nnodePool: " + quoteYAML(in.NodePool) + "\n"
	}
	text = strings.Replace(text, name, named, 1)
	text = strings.Replace(text, exampleToken, token, 1)
	text = strings.Replace(text, exampleHash, strings.Join(hashes, "\n  - "), 1)
	text = strings.Replace(text, exampleKey, quoteYAML(key), 1)
	return []byte(commentOut(text, out...))
}

// KeyOf returns the SSH key from a Site that init wrote when only the key was known, or "".
func KeyOf(site []byte) string {
	head := (&Document{Kind: "site", Blanks: [][]byte{nil}}).head()
	text := string(bytes.TrimPrefix(site, []byte(head)))
	before, after, _ := strings.Cut(string((&Input{SSHKey: exampleKey}).Site()), exampleKey)
	text, begins := strings.CutPrefix(text, before)
	text, ends := strings.CutSuffix(text, after)
	if key := strings.Trim(text, "'"); begins && ends && forms.CheckSSHKey(key) == nil {
		return key
	}
	return ""
}

// Image returns the example Image, or the example for OpenYurt nodes.
func (in *Input) Image() []byte {
	if in.NodeType != "" {
		return []byte(examples.OpenYurt)
	}
	text := examples.Image
	if in.Kubernetes != "" {
		text = strings.Replace(text, "version: v1.37.2", "version: "+in.Kubernetes, 1)
	}
	if in.Pause != "" {
		text = strings.Replace(text, exampleSandbox, "  sandbox: "+in.Pause, 1)
	}
	if in.DaemonSets {
		text = strings.Replace(text, "#   imagesFrom: [agents.yaml]", "imagesFrom: [agents.yaml]", 1)
	}
	return []byte(text)
}

// ClusterImage returns the Image for all machines of a new cluster: the example, with the container
// images that kubeadm needs.
func ClusterImage() []byte {
	always, optional, pause := kubeadm.DefaultImages(configs.ExampleKubernetes)
	list := "# The control plane's, as `kubeadm config images list` prints them:\nimages:\n"
	for _, image := range append(always, optional...) {
		list += "  - ref: " + image.Example(configs.ExampleKubernetes) + "\n"
	}
	return []byte(strings.NewReplacer(
		"#   nodeTypes: [native]\n", "nodeTypes: [control-plane, native]\n",
		exampleSandbox, "  sandbox: "+pause.Example(configs.ExampleKubernetes),
		"#   images:\n#     - ref: registry.example.com/app:1.0\n#       archive: app.tar\n", list,
		"#   imagesFrom: [agents.yaml]", "# Those of the network plugin, without which no node becomes Ready (manifests of the\n# Cluster): imagesFrom: [cni.yaml]",
		"# Images of the pods in Kubernetes manifests are included too. To get the manifests of\n# every node's pods: kubectl get daemonsets -A -o yaml > agents.yaml\n", "",
	).Replace(examples.Image))
}

// exampleSandbox is the line in the example Image that contains the pause image.
const exampleSandbox = "  #   sandbox: registry.example.com/pause:3.10"

// Cluster returns the example Cluster with the person's SSH key or, if sshKey is empty, with a
// placeholder.
func Cluster(sshKey string) []byte {
	if sshKey == "" {
		sshKey = forms.PlaceholderKey
	}
	quoted := "'" + strings.ReplaceAll(sshKey, "'", "''") + "'"
	// The node types must be those of the example Image.
	return []byte(strings.NewReplacer(
		`"`+exampleKey+`"`, quoted,
		"\nopenyurt: true\n", "\n# openyurt: true # with nodes of nodeType edge and cloud, which the Image must list too (nodeTypes)\n",
		"nodeType: edge, nodePool: shops, ", "", "nodeType: native, ", "",
	).Replace(examples.Cluster))
}

// quoteYAML quotes a text that YAML would not parse as a string, such as [fd00::1]:6443.
func quoteYAML(s string) string {
	if strings.ContainsAny(s, "[]{}#'\"") || strings.Contains(s, ": ") {
		return "'" + strings.ReplaceAll(s, "'", "''") + "'"
	}
	return s
}

// commentOut comments out these fields, with everything below them.
func commentOut(text string, fields ...string) string {
	var b strings.Builder
	inside := false
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, " ") {
			inside = false
			for _, f := range fields {
				inside = inside || strings.HasPrefix(line, f)
			}
		}
		if inside {
			b.WriteString("# ")
		}
		b.WriteString(line)
	}
	return b.String()
}
