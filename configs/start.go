package configs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// What a Site to start from shows where only its reader knows what belongs
// there. Validation tells them to replace it: nothing else would, until a
// machine stands in a shop and does not join.
const (
	placeholderToken = "xxxxxx.xxxxxxxxxxxxxxxx"
	placeholderHash  = "sha256:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
)

// What examples/site.yaml and cluster.yaml have in their places.
const (
	exampleToken = "abcdef.0123456789abcdef"
	exampleHash  = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	exampleKey   = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE0Y2vFLE7fQ2HHmGEUQGTqWn4Ri9GJMn1T9AeeQkMi+ admin@example.com"
)

// Start describes the cluster and the person that documents to start from are for.
// What is empty is unknown.
type Start struct {
	Masters                      []string
	Token                        string
	CAHashes                     []string
	NodeName, NodeType, NodePool string
	SSHKey                       string
	// Endpoint, Kubernetes and Pause are those of a living cluster.
	Endpoint, Kubernetes, Pause string
	// Agents reports that agents.yaml lists what runs on every node.
	Agents bool
	// LeftOut lists flags of the join line for which an image needs nothing.
	LeftOut []string
}

// ParseJoin reads the line that kubeadm prints for machines to join, alone or in the
// output of kubeadm init, or one of yurtadm or edgeadm. Its errors never quote the token.
func ParseJoin(text string) (*Start, error) {
	words, err := joinLine(strings.Fields(strings.NewReplacer("\\\n", " ", "\\\r\n", " ").Replace(text)))
	if err != nil {
		return nil, err
	}
	var j Start
	var errs []error
	for ; len(words) > 0; words = words[1:] {
		if dash := strings.TrimLeft(words[0], "–—−"); dash != words[0] {
			return nil, fmt.Errorf("it has %q, whose dashes a text program has changed: write --%s, or copy the line from the terminal", words[0], dash)
		}
		flag, value, given := strings.Cut(words[0], "=")
		if !strings.HasPrefix(flag, "-") {
			if len(j.Masters) > 0 {
				errs = append(errs, errors.New("it names two API servers: give one, and add the others to masters in site.yaml"))
			}
			j.Masters = strings.Split(words[0], ",") // as yurtadm takes several
			continue
		}
		if !given && len(words) > 1 && !slices.Contains(joinSwitches, flag) && !strings.HasPrefix(words[1], "-") {
			words, value = words[1:], words[1]
		}
		switch flag {
		case "--token":
			j.Token = value
		case "--discovery-token-ca-cert-hash":
			// A terminal that wraps the line may break it inside of the hash.
			for len(words) > 1 && len(value) < caHashLen && isHex(words[1]) {
				words, value = words[1:], value+words[1]
			}
			j.CAHashes = append(j.CAHashes, strings.ToLower(value))
		case "--config", "--discovery-file", "--discovery-token", "--tls-bootstrap-token":
			return nil, fmt.Errorf("it has %s: give a line with --token and --discovery-token-ca-cert-hash, as `kubeadm token create --print-join-command` prints it", flag)
		case "--node-name":
			j.NodeName = strings.ToLower(value) // as kubeadm does
			if err := forms.CheckNodeName(j.NodeName); err != nil {
				errs = append(errs, fmt.Errorf("--node-name: %w", err))
			}
		case "--node-type":
			j.NodeType = value
			if value != NodeEdge && value != NodeCloud {
				errs = append(errs, fmt.Errorf("--node-type %s: edgebake makes nodes of type %s or %s", strict.Shorten(value), NodeEdge, NodeCloud))
			}
		case "--nodepool-name":
			j.NodePool = value
		case "-v", "--v": // how much kubeadm prints
		default:
			if slices.Contains(joinOnBoard, flag) {
				j.LeftOut = append(j.LeftOut, flag)
				continue
			}
			if field := joinFields[flag]; field != "" {
				errs = append(errs, fmt.Errorf("it has %s, which is not taken over: leave it out, and set %s in site.yaml", flag, field))
				continue
			}
			errs = append(errs, fmt.Errorf("it has %s, which is not taken over: leave it out, and look for the field of the Site with `edgebake explain site`", flag))
		}
	}
	if len(j.Masters) == 0 {
		j.Masters = []string{""}
	}
	for _, m := range j.Masters {
		if bad := forms.BadHostPort(m); bad != "" {
			errs = append(errs, fmt.Errorf("the API server %s", bad))
		}
	}
	if yurt := j.NodeType == NodeEdge || j.NodeType == NodeCloud; yurt && j.NodePool == "" {
		errs = append(errs, fmt.Errorf("it has --node-type %s and no --nodepool-name, without which no %[1]s node joins: add it", j.NodeType))
	}
	if !tokenForm.MatchString(j.Token) {
		errs = append(errs, errors.New("it has no --token TOKEN: "+tokenWords))
	}
	if len(j.CAHashes) == 0 {
		errs = append(errs, errors.New("it has no --discovery-token-ca-cert-hash sha256:HEX, by which the machine knows your cluster"))
	}
	for _, h := range j.CAHashes {
		if !caHashForm.MatchString(h) {
			errs = append(errs, fmt.Errorf("--discovery-token-ca-cert-hash %q is not sha256: followed by 64 hexadecimal digits", strict.Shorten(h)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &j, nil
}

// joinLine returns the words that follow "kubeadm join" for a worker. The output of
// kubeadm init also has a line for control-plane nodes, which is skipped.
func joinLine(words []string) (worker []string, err error) {
	starts := []int{}
	for i := 1; i < len(words); i++ {
		if words[i] == "join" && slices.Contains([]string{"kubeadm", "yurtadm", "edgeadm"}, path.Base(words[i-1])) {
			starts = append(starts, i+1)
		}
	}
	if len(starts) == 0 {
		return nil, errors.New("want a line that begins with kubeadm join, as `kubeadm token create --print-join-command` prints it")
	}
	found := 0
	for n, start := range starts {
		line := words[start:]
		if n+1 < len(starts) {
			line = words[start : starts[n+1]-2]
		}
		if i := slices.IndexFunc(line, isControlPlaneFlag); i >= 0 {
			flag, _, _ := strings.Cut(line[i], "=")
			err = fmt.Errorf("it has %s, so it is the line for control-plane nodes: take the one for workers", flag)
			continue
		}
		worker = line
		found++
	}
	switch {
	case found > 1:
		return nil, fmt.Errorf("it has %d lines for workers to join: keep one", found)
	case found == 0:
		return nil, err
	}
	return worker, nil
}

func isControlPlaneFlag(word string) bool {
	flag, _, _ := strings.Cut(word, "=")
	return flag == "--control-plane" || flag == "--certificate-key"
}

// joinSwitches are flags of kubeadm, yurtadm and edgeadm join without a value.
var joinSwitches = []string{
	"--control-plane", "--discovery-token-unsafe-skip-ca-verification", "--dry-run", "--reuse-cni-bin", "--enable-edge",
}

// joinOnBoard are flags of yurtadm and edgeadm join about programs that are in the
// image, and about SuperEdge's lite-apiserver, which no image has.
var joinOnBoard = []string{
	"--install-pkg-path", "--worker-path", "--runtime", "--enable-edge",
	"--kubernetes-resource-server", "--reuse-cni-bin", "--pause-image",
	"--yurthub-image", "--yurthub-binary-url", "--yurthub-server-addr",
}

// joinFields maps flags of kubeadm, yurtadm and edgeadm join to fields of the Site.
var joinFields = map[string]string{
	"--cri-socket":              "criSocket",
	"--ignore-preflight-errors": "ignorePreflightErrors",
	"--skip-phases":             "skipPhases",
	"--node-labels":             "labels",
	"--namespace":               "yurthub.namespace",
	"--organizations":           "organizations",
	"--discovery-token-unsafe-skip-ca-verification": "caCertHashes (or unsafeSkipCAVerification, which trusts any API server)",
}

const caHashLen = len("sha256:") + 2*sha256.Size

func isHex(s string) bool {
	return strings.Trim(strings.ToLower(s), "0123456789abcdef") == ""
}

// Site is a Site to start from: the example with what is known, and placeholders for
// the rest. What the example shows besides is commented out; with the cluster's join
// line, users too where no key is known: the Site is complete without them.
func (j *Start) Site() []byte {
	token, hashes, key := placeholderToken, []string{placeholderHash}, forms.PlaceholderKey
	out := []string{"labels:", "taints:", "network:"}
	text := exampleSite
	if len(j.Masters) > 0 {
		token, hashes = j.Token, j.CAHashes
		const masters = "  - 192.168.7.11:6443\n  - 192.168.7.12:6443\n  - 192.168.7.13:6443\n"
		known := ""
		for _, m := range j.Masters {
			known += "  - " + quoteYAML(m) + "\n"
		}
		if a, err := netip.ParseAddrPort(j.Masters[0]); err == nil && a.Addr().Is6() {
			known += "\n# Of the API servers' family; a free address that stands for all of them.\nvip: fd00:ed6e::2\n"
		}
		if j.Endpoint != "" {
			known += "\n# The name in the API servers' certificates.\nendpoint: " + j.Endpoint + "\n"
		}
		text = strings.Replace(text, masters, known, 1)
		if j.SSHKey == "" {
			out = append(out, "users:")
		}
	}
	if j.SSHKey != "" {
		key = j.SSHKey
	}
	const name = "nodeName: shop-{{.MAC}}\n"
	named := name
	if j.NodeName != "" {
		named = "nodeName: " + j.NodeName + "\n"
	}
	if j.NodeType != "" {
		named += "nodeType: " + j.NodeType + "\nnodePool: " + quoteYAML(j.NodePool) + "\n"
	}
	text = strings.Replace(text, name, named, 1)
	text = strings.Replace(text, exampleToken, token, 1)
	text = strings.Replace(text, exampleHash, strings.Join(hashes, "\n  - "), 1)
	text = strings.Replace(text, exampleKey, quoteYAML(key), 1)
	return []byte(commentOut(text, out...))
}

// Image is an Image to start from: the example, or that of OpenYurt for its nodes.
func (j *Start) Image() []byte {
	if j.NodeType != "" {
		return []byte(exampleOpenYurt)
	}
	text := exampleImage
	if j.Kubernetes != "" {
		text = strings.Replace(text, "version: v1.37.2", "version: "+j.Kubernetes, 1)
	}
	if j.Pause != "" {
		text = strings.Replace(text, "  #   sandbox: registry.example.com/pause:3.10", "  sandbox: "+j.Pause, 1)
	}
	if j.Agents {
		text = strings.Replace(text, "#   imagesFrom: [agents.yaml]", "imagesFrom: [agents.yaml]", 1)
	}
	return []byte(text)
}

// StartCluster is a Cluster to start from: the example, with the key of the person
// who will log in, or a placeholder.
func StartCluster(sshKey string) []byte {
	if sshKey == "" {
		sshKey = forms.PlaceholderKey
	}
	quoted := "'" + strings.ReplaceAll(sshKey, "'", "''") + "'"
	// Its nodes are those of the Image to start from.
	return []byte(strings.NewReplacer(
		`"`+exampleKey+`"`, quoted,
		"\nopenyurt: true\n", "\n# openyurt: true # with nodes of nodeType edge and cloud, which the Image must list too (nodeTypes)\n",
		"nodeType: edge, nodePool: shops, ", "", "nodeType: native, ", "",
	).Replace(exampleCluster))
}

// quoteYAML quotes what YAML would read otherwise: [fd00::1]:6443.
func quoteYAML(s string) string {
	if strings.ContainsAny(s, "[]{}#'\"") || strings.Contains(s, ": ") {
		return "'" + strings.ReplaceAll(s, "'", "''") + "'"
	}
	return s
}

// commentOut makes comments of the fields with these names and all below them.
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
