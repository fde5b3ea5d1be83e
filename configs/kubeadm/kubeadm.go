// Package kubeadm reads documents of kubeadm, kubelet and kube-proxy, which follow a Cluster in its
// file or are part of a control-plane node's Site.
package kubeadm

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Document is one document of kubeadm, kubelet or kube-proxy.
type Document struct {
	Kind string
	Root *yaml.Node // always a mapping
}

// Documents contains at most one document of each kind.
type Documents []Document

// Of returns the root of the document of this kind, or nil.
func (d Documents) Of(kind string) *yaml.Node {
	for _, doc := range d {
		if doc.Kind == kind {
			return doc.Root
		}
	}
	return nil
}

// Encode encodes the documents as one text.
func (d Documents) Encode() ([]byte, error) {
	var roots []*yaml.Node
	for _, doc := range d {
		roots = append(roots, doc.Root)
	}
	text, err := yamltree.Encode(roots...)
	if err != nil {
		return nil, fmt.Errorf("encoding kubeadm's documents: %w", err)
	}
	return text, nil
}

// VersionForm matches versions of Kubernetes. Its first group is the minor version.
var VersionForm = regexp.MustCompile(`^v1\.([0-9]+)\.([0-9]+)(-(alpha|beta|rc)\.[0-9]+)?$`)

// Minor returns the minor version, such as 37 for v1.37.2. It returns 0 for an invalid version.
func Minor(version string) int {
	if m := VersionForm.FindStringSubmatch(version); m != nil {
		n, _ := strconv.Atoi(m[1])
		return n
	}
	return 0
}

// Before reports whether version is valid and before v1.minor.
func Before(version string, minor int) bool {
	return VersionForm.MatchString(version) && Minor(version) < minor
}

const kubeadmVersion = "kubeadm.k8s.io/v1beta4"

// Versions maps each kind of document to the only supported API version. Merging a document of
// another version could change its meaning.
var Versions = map[string]string{
	"ClusterConfiguration":   kubeadmVersion,
	"InitConfiguration":      kubeadmVersion,
	"KubeletConfiguration":   "kubelet.config.k8s.io/v1beta1",
	"KubeProxyConfiguration": "kubeproxy.config.k8s.io/v1alpha1",
}

// OldestKubernetes is the minor version that introduced v1beta4 of kubeadm's documents. Before, an
// argument could not be repeated, and initial-cluster could not be set.
const OldestKubernetes = 31

// minCertificateValidity is the smallest allowed validity of the control plane's certificates.
// First boot renews them after half of their validity. So a machine may be off for the other half
// before they expire.
const minCertificateValidity = 30 * 24 * time.Hour

// elsewhere maps each kind of kubeadm document that a Cluster does not support to the alternative.
var elsewhere = map[string]string{
	"JoinConfiguration":    "nodes join by their Site: use its fields (kubeletExtraArgs, ignorePreflightErrors, skipPhases)",
	"ResetConfiguration":   "it is of no use here: `firstboot reset` resets a node",
	"UpgradeConfiguration": "it is for `kubeadm upgrade`, which reads it itself",
	"ClusterStatus":        "kubeadm itself writes it: remove it",
}

// ownedByEdgebake lists the fields of each kind of document that edgebake sets, and where their
// values come from.
var ownedByEdgebake = map[string]map[string]string{
	"ClusterConfiguration": {
		"kubernetesVersion":           "use kubernetesVersion of the Cluster",
		"controlPlaneEndpoint":        "use endpoint and port of the Cluster",
		"clusterName":                 "use name of the Cluster",
		"certificatesDir":             "first boot puts the certificates where kubelet expects them",
		"imageRepository":             "use imageRepository of the Cluster",
		"encryptionAlgorithm":         "the keys are made by `edgebake cluster new`",
		"caCertificateValidityPeriod": "the CAs are made by `edgebake cluster new`",
		"networking.podSubnet":        "use podCIDRs of the Cluster",
		"networking.serviceSubnet":    "use serviceCIDRs of the Cluster",
		"proxy.disabled":              "use kubeProxy.mode of the Cluster: none",
		"etcd.external":               "each control-plane node runs a member of etcd",
		"etcd.local.dataDir":          "it is /var/lib/etcd, where first boot looks for etcd's data",
	},
	"InitConfiguration": {
		"bootstrapTokens":                  "`edgebake cluster new` makes one for each node",
		"certificateKey":                   "every control-plane node has the keys already",
		"dryRun":                           "first boot runs the phases for real",
		"localAPIEndpoint":                 "use address of each item of masters, and port of the Cluster",
		"skipPhases":                       "first boot chooses the phases",
		"nodeRegistration.name":            "use name of each item of masters",
		"nodeRegistration.criSocket":       "the image's containerd is used",
		"nodeRegistration.imagePullSerial": "the images are in the disk image",
	},
	"KubeletConfiguration": {
		"staticPodPath":                    "the control plane runs from /etc/kubernetes/manifests",
		"authentication.x509.clientCAFile": "it is the cluster's CA",
		"containerRuntimeEndpoint":         "the image's containerd is used",
		"rotateCertificates":               "it is always on, because otherwise a node's certificate would expire",
	},
	"KubeProxyConfiguration": {
		"mode":                        "use kubeProxy.mode of the Cluster",
		"bindAddress":                 "use kubeProxy.bindAddress of the Cluster",
		"clusterCIDR":                 "use podCIDRs of the Cluster",
		"clientConnection.kubeconfig": "kubeadm writes it",
		"hostnameOverride":            "it is each node's name",
	},
}

// ownedArgs lists the flags of control-plane programs that edgebake or kubeadm sets, for each list
// of arguments.
var ownedArgs = map[string][]string{
	"etcd.local.extraArgs": {"name", "data-dir", "initial-cluster", "initial-cluster-state", "initial-cluster-token", "initial-advertise-peer-urls",
		"listen-client-urls", "listen-peer-urls", "advertise-client-urls", "cert-file", "key-file", "trusted-ca-file", "client-cert-auth",
		"peer-cert-file", "peer-key-file", "peer-trusted-ca-file", "peer-client-cert-auth", "force-new-cluster"},
	"apiServer.extraArgs": {"advertise-address", "secure-port", "etcd-servers", "service-cluster-ip-range", "client-ca-file", "tls-cert-file",
		"tls-private-key-file", "service-account-key-file", "service-account-signing-key-file", "enable-bootstrap-token-auth",
		"etcd-cafile", "etcd-certfile", "etcd-keyfile", "proxy-client-cert-file", "proxy-client-key-file", "requestheader-client-ca-file",
		"kubelet-client-certificate", "kubelet-client-key"},
	"controllerManager.extraArgs": {"cluster-cidr", "service-cluster-ip-range", "cluster-name", "cluster-signing-cert-file", "cluster-signing-key-file",
		"root-ca-file", "client-ca-file", "requestheader-client-ca-file", "service-account-private-key-file", "kubeconfig"},
	"scheduler.extraArgs": {"kubeconfig"},
	"nodeRegistration.kubeletExtraArgs": {"hostname-override", "node-ip", "kubeconfig", "bootstrap-kubeconfig", "config", "cert-dir", "root-dir",
		"rotate-certificates", "container-runtime-endpoint", "pod-infra-container-image"},
}

// ReadAfter reads the documents after a Cluster. If Kubernetes is newer than the schemas, unknown
// fields are only warnings.
func ReadAfter(file string, roots []*yaml.Node, kubernetes string) (docs Documents, warnings, probs strict.Problems) {
	for _, root := range roots {
		d := strict.New(file, root, strict.DefaultLimits)
		if root.Kind != yaml.MappingNode {
			d.Addf(root, "", "expected a document of kubeadm (a mapping with apiVersion and kind), got %s", strict.Shape(root))
			probs = append(probs, d.Probs...)
			continue
		}
		if readable(d) && manifest.Decodes(d) {
			ownedFields(d)
			certificateValidity(d)
			ownedArguments(d, true)
			known := len(d.Probs)
			checkFields(d)
			if Minor(kubernetes) > formsOf {
				warnings = append(warnings, d.Probs[known:]...)
				d.Probs = d.Probs[:known]
			}
		}
		if first := docs.Of(d.Kind); first != nil && Versions[d.Kind] != "" {
			d.Addf(root, d.Kind, "a second %s begins here; the first is on line %d: put both into one", d.Kind, first.Line)
		}
		probs = append(probs, d.Probs...)
		docs = append(docs, Document{d.Kind, root})
	}
	return docs, warnings, probs
}

// ReadText reads the documents in a Site.
func ReadText(text string) (docs Documents, probs strict.Problems) {
	dec := yaml.NewDecoder(strings.NewReader(text))
	for len(probs) <= strict.MaxProblems {
		var n yaml.Node
		err := dec.Decode(&n)
		if errors.Is(err, io.EOF) {
			return docs, probs
		}
		if err != nil {
			return docs, append(probs, strict.SyntaxProblem("", []byte(text), err))
		}
		if len(n.Content) != 1 || n.Content[0].Kind != yaml.MappingNode {
			probs = append(probs, strict.Problem{Line: n.Line, Col: n.Column, Msg: "expected a document of kubeadm (a mapping with apiVersion and kind)"})
			continue
		}
		d := strict.New("", n.Content[0], strict.DefaultLimits)
		if readable(d) && manifest.Decodes(d) {
			ownedArguments(d, false)
			if Versions[d.Kind] == kubeadmVersion {
				checkFields(d)
			}
		}
		if docs.Of(d.Kind) != nil {
			d.Addf(d.Root, d.Kind, "a second %s begins here", d.Kind)
		}
		probs = append(probs, d.Probs...)
		docs = append(docs, Document{d.Kind, d.Root})
	}
	return docs, probs.First("", 0)
}

// readable checks the kind and the version of a document. It returns whether the fields can be
// checked.
func readable(d *strict.Document) bool {
	d.Kind = yamltree.Text(yamltree.Value(d.Root, "kind"))
	version := yamltree.Text(yamltree.Value(d.Root, "apiVersion"))
	at := func(key string) *yaml.Node {
		if n := yamltree.Value(d.Root, key); n != nil {
			return n
		}
		return d.Root
	}
	want, known := Versions[d.Kind]
	group, _, _ := strings.Cut(version, "/")
	wantGroup, _, _ := strings.Cut(want, "/")
	switch {
	case d.Kind == "" || version == "":
		d.Addf(d.Root, "", "a document after the Cluster must have apiVersion and kind; kubeadm's and its components' may follow: %s", strings.Join(slices.Sorted(maps.Keys(Versions)), ", "))
		return false
	case strings.HasPrefix(version, "edgebake.io/"):
		d.Addf(at("kind"), "kind", "a second edgebake document (%s) begins here; put each into its own file", strict.Shorten(d.Kind))
		return false
	case elsewhere[d.Kind] != "":
		d.Addf(at("kind"), "kind", "%s cannot be part of a Cluster: %s", d.Kind, elsewhere[d.Kind])
		return false
	case !known:
		d.Addf(at("kind"), "kind", "unknown document %s of %s%s; want one of %s; Kubernetes objects go into files listed in manifests", strict.Shorten(d.Kind), strict.Shorten(version),
			strict.DidYouMean(d.Kind, slices.Sorted(maps.Keys(Versions))), strings.Join(slices.Sorted(maps.Keys(Versions)), ", "))
		return false
	case group != wantGroup:
		d.Addf(at("apiVersion"), d.Kind+".apiVersion", "%s belongs to %s, not %s", d.Kind, want, strict.Shorten(version))
	case version != want:
		hint := ""
		if group == "kubeadm.k8s.io" {
			hint = ": `kubeadm config migrate --old-config OLD --new-config NEW` rewrites it"
		}
		d.Addf(at("apiVersion"), d.Kind+".apiVersion", "%s is not supported: edgebake writes %s, and fields may mean other things in other versions%s", strict.Shorten(version), want, hint)
		return false // for another version, every field would be reported
	}
	return true
}

// ownedArguments reports arguments that edgebake or kubeadm sets. If a person wrote the document
// (persons), it also reports arguments that edgebake writes into Sites.
func ownedArguments(d *strict.Document, persons bool) {
	for _, list := range slices.Sorted(maps.Keys(ownedArgs)) {
		n := yamltree.At(d.Root, list)
		if n == nil || n.Kind != yaml.SequenceNode {
			continue
		}
		for i, item := range n.Content {
			if item.Kind != yaml.MappingNode {
				continue
			}
			name := yamltree.Text(yamltree.Value(item, "name"))
			path := fmt.Sprintf("%s.%s[%d].name", d.Kind, list, i)
			switch {
			case strings.HasPrefix(name, "-"):
				d.Addf(yamltree.Value(item, "name"), path, "leave the dashes out: %q", strings.TrimLeft(name, "-"))
			case slices.Contains(ownedArgs[list], name) && (persons || name != "node-ip"):
				d.Addf(yamltree.Value(item, "name"), path, "--%s is set by edgebake and kubeadm: remove it", name)
			}
		}
	}
}

// ownedFields reports fields that edgebake sets.
func ownedFields(d *strict.Document) {
	owned := ownedByEdgebake[d.Kind]
	for _, path := range slices.Sorted(maps.Keys(owned)) {
		if n := yamltree.At(d.Root, path); n != nil && !yamltree.IsNull(n) {
			d.Addf(n, d.Kind+"."+path, "is set by edgebake: %s; remove it here", owned[path])
		}
	}
}

// certificateValidity reports a validity of certificates that is too short to renew them in time.
func certificateValidity(d *strict.Document) {
	const field = "certificateValidityPeriod"
	n := yamltree.At(d.Root, field)
	if d.Kind != "ClusterConfiguration" || n == nil || yamltree.IsNull(n) || n.Kind != yaml.ScalarNode {
		return
	}
	switch period, err := time.ParseDuration(n.Value); {
	case err != nil:
		d.Addf(n, d.Kind+"."+field, "%s is not a duration, e.g. 2160h", strict.Shorten(n.Value))
	case period < minCertificateValidity:
		d.Addf(n, d.Kind+"."+field, "must be at least %dh, not %s: certificates are renewed when half of the time is over, and a machine may be off for the other half; set %dh or more", int(minCertificateValidity.Hours()), n.Value, int(minCertificateValidity.Hours()))
	}
}
