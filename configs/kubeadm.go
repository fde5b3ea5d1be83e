package configs

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// KubeadmDocument is a document that follows the Cluster in its file: what a
// person wants of kubeadm, kubelet or kube-proxy beyond the Cluster's fields.
type KubeadmDocument struct {
	Kind string
	// Root is the document's mapping.
	Root *yaml.Node
}

// The API groups of the documents, and the one version of each that edgebake
// writes: merging what was written for another one could change its meaning.
var kubeadmVersions = map[string]string{
	"ClusterConfiguration":   "kubeadm.k8s.io/v1beta4",
	"InitConfiguration":      "kubeadm.k8s.io/v1beta4",
	"KubeletConfiguration":   "kubelet.config.k8s.io/v1beta1",
	"KubeProxyConfiguration": "kubeproxy.config.k8s.io/v1alpha1",
}

// oldestClusterKubernetes is the minor version of Kubernetes that v1beta4 of
// kubeadm's documents came with: in the versions before, an argument cannot be
// given twice and initial-cluster not be set.
const oldestClusterKubernetes = 31

// minCertificateValidity is the shortest time for the control plane's certificates.
// First boot renews them when half of it is over, so a machine that was off for the
// other half finds none that has expired.
const minCertificateValidity = 30 * 24 * time.Hour

// kubeadmElsewhere are kinds that kubeadm reads but a Cluster does not, and
// what to use instead.
var kubeadmElsewhere = map[string]string{
	"JoinConfiguration":    "nodes join by their Site: use its fields (kubeletExtraArgs, ignorePreflightErrors, skipPhases)",
	"ResetConfiguration":   "it is of no use here: `firstboot reset` resets a node",
	"UpgradeConfiguration": "it is for `kubeadm upgrade`, which reads it itself",
	"ClusterStatus":        "kubeadm itself writes it: remove it",
}

// ownedByEdgebake are the fields that edgebake writes, by kind, and where the
// value comes from instead.
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
		"etcd.local.dataDir":          "it is /var/lib/etcd, which the seat decision looks at",
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
		"rotateCertificates":               "it is always on: a node's certificate would expire",
	},
	"KubeProxyConfiguration": {
		"mode":                        "use kubeProxy.mode of the Cluster",
		"bindAddress":                 "use kubeProxy.bindAddress of the Cluster",
		"clusterCIDR":                 "use podCIDRs of the Cluster",
		"clientConnection.kubeconfig": "kubeadm writes it",
		"hostnameOverride":            "it is each node's name",
	},
}

// ownedArgs are flags of the control plane's programs that edgebake or kubeadm
// must set, by the list that would carry them.
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

// The documents' forms as kubeadm v1.31 and later reads them.
type (
	clusterConfiguration struct {
		APIVersion                  string           `yaml:"apiVersion"`
		Kind                        string           `yaml:"kind"`
		Etcd                        kubeadmEtcd      `yaml:"etcd,omitempty"`
		Networking                  kubeadmNetwork   `yaml:"networking,omitempty"`
		KubernetesVersion           string           `yaml:"kubernetesVersion,omitempty"`
		ControlPlaneEndpoint        string           `yaml:"controlPlaneEndpoint,omitempty"`
		APIServer                   kubeadmAPIServer `yaml:"apiServer,omitempty"`
		ControllerManager           kubeadmComponent `yaml:"controllerManager,omitempty"`
		Scheduler                   kubeadmComponent `yaml:"scheduler,omitempty"`
		DNS                         kubeadmDNS       `yaml:"dns,omitempty"`
		Proxy                       kubeadmProxy     `yaml:"proxy,omitempty"`
		CertificatesDir             string           `yaml:"certificatesDir,omitempty"`
		ImageRepository             string           `yaml:"imageRepository,omitempty"`
		FeatureGates                map[string]bool  `yaml:"featureGates,omitempty"`
		ClusterName                 string           `yaml:"clusterName,omitempty"`
		EncryptionAlgorithm         string           `yaml:"encryptionAlgorithm,omitempty"`
		CertificateValidityPeriod   string           `yaml:"certificateValidityPeriod,omitempty"`
		CACertificateValidityPeriod string           `yaml:"caCertificateValidityPeriod,omitempty"`
	}
	initConfiguration struct {
		APIVersion       string              `yaml:"apiVersion"`
		Kind             string              `yaml:"kind"`
		BootstrapTokens  any                 `yaml:"bootstrapTokens,omitempty"`
		DryRun           bool                `yaml:"dryRun,omitempty"`
		NodeRegistration kubeadmRegistration `yaml:"nodeRegistration,omitempty"`
		LocalAPIEndpoint kubeadmEndpoint     `yaml:"localAPIEndpoint,omitempty"`
		CertificateKey   Secret              `yaml:"certificateKey,omitempty"`
		SkipPhases       []string            `yaml:"skipPhases,omitempty"`
		Patches          kubeadmPatches      `yaml:"patches,omitempty"`
		Timeouts         kubeadmTimeouts     `yaml:"timeouts,omitempty"`
	}
	kubeadmArg struct {
		Name  string `yaml:"name"`
		Value string `yaml:"value,omitempty"`
	}
	kubeadmVolume struct {
		Name      string `yaml:"name"`
		HostPath  string `yaml:"hostPath"`
		MountPath string `yaml:"mountPath"`
		ReadOnly  bool   `yaml:"readOnly,omitempty"`
		PathType  string `yaml:"pathType,omitempty"`
	}
	kubeadmEnv struct {
		Name      string `yaml:"name"`
		Value     string `yaml:"value,omitempty"`
		ValueFrom any    `yaml:"valueFrom,omitempty"`
	}
	kubeadmComponent struct {
		ExtraArgs    []kubeadmArg    `yaml:"extraArgs,omitempty"`
		ExtraVolumes []kubeadmVolume `yaml:"extraVolumes,omitempty"`
		ExtraEnvs    []kubeadmEnv    `yaml:"extraEnvs,omitempty"`
	}
	kubeadmAPIServer struct {
		ExtraArgs    []kubeadmArg    `yaml:"extraArgs,omitempty"`
		ExtraVolumes []kubeadmVolume `yaml:"extraVolumes,omitempty"`
		ExtraEnvs    []kubeadmEnv    `yaml:"extraEnvs,omitempty"`
		CertSANs     []string        `yaml:"certSANs,omitempty"`
	}
	kubeadmEtcd struct {
		Local    kubeadmLocalEtcd `yaml:"local,omitempty"`
		External any              `yaml:"external,omitempty"`
	}
	kubeadmLocalEtcd struct {
		ImageRepository string       `yaml:"imageRepository,omitempty"`
		ImageTag        string       `yaml:"imageTag,omitempty"`
		DataDir         string       `yaml:"dataDir,omitempty"`
		ExtraArgs       []kubeadmArg `yaml:"extraArgs,omitempty"`
		ExtraEnvs       []kubeadmEnv `yaml:"extraEnvs,omitempty"`
		ServerCertSANs  []string     `yaml:"serverCertSANs,omitempty"`
		PeerCertSANs    []string     `yaml:"peerCertSANs,omitempty"`
	}
	kubeadmNetwork struct {
		ServiceSubnet string `yaml:"serviceSubnet,omitempty"`
		PodSubnet     string `yaml:"podSubnet,omitempty"`
		DNSDomain     string `yaml:"dnsDomain,omitempty"`
	}
	kubeadmDNS struct {
		ImageRepository string `yaml:"imageRepository,omitempty"`
		ImageTag        string `yaml:"imageTag,omitempty"`
		Disabled        bool   `yaml:"disabled,omitempty"`
	}
	kubeadmProxy struct {
		Disabled bool `yaml:"disabled,omitempty"`
	}
	kubeadmRegistration struct {
		Name                  string       `yaml:"name,omitempty"`
		CRISocket             string       `yaml:"criSocket,omitempty"`
		Taints                []Taint      `yaml:"taints,omitempty"`
		KubeletExtraArgs      []kubeadmArg `yaml:"kubeletExtraArgs,omitempty"`
		IgnorePreflightErrors []string     `yaml:"ignorePreflightErrors,omitempty"`
		ImagePullPolicy       string       `yaml:"imagePullPolicy,omitempty"`
		ImagePullSerial       bool         `yaml:"imagePullSerial,omitempty"`
	}
	kubeadmEndpoint struct {
		AdvertiseAddress string `yaml:"advertiseAddress,omitempty"`
		BindPort         int    `yaml:"bindPort,omitempty"`
	}
	kubeadmPatches struct {
		Directory string `yaml:"directory,omitempty"`
	}
	kubeadmTimeouts struct {
		ControlPlaneComponentHealthCheck string `yaml:"controlPlaneComponentHealthCheck,omitempty"`
		KubeletHealthCheck               string `yaml:"kubeletHealthCheck,omitempty"`
		KubernetesAPICall                string `yaml:"kubernetesAPICall,omitempty"`
		EtcdAPICall                      string `yaml:"etcdAPICall,omitempty"`
		TLSBootstrap                     string `yaml:"tlsBootstrap,omitempty"`
		Discovery                        string `yaml:"discovery,omitempty"`
		UpgradeManifests                 string `yaml:"upgradeManifests,omitempty"`
	}
)

// kubeadmDocuments reads the documents that follow a Cluster of that version of
// Kubernetes. What is wrong with fields of a version that is newer than this program
// are warnings.
func kubeadmDocuments(file string, roots []*yaml.Node, kubernetes string) (_ []KubeadmDocument, warnings, _ Problems) {
	var docs []KubeadmDocument
	var probs Problems
	first := map[string]int{}
	for _, root := range roots {
		d := &document{file: file, root: root, where: map[string]position{}}
		if root.Kind != yaml.MappingNode {
			d.problem(root, "", "expected a document of kubeadm (a mapping with apiVersion and kind), got %s", shape(root))
			probs = append(probs, d.probs...)
			continue
		}
		d.kind = yamltree.Text(yamltree.Value(root, "kind"))
		if d.kubeadmDocument(d.ownedFields) {
			known := len(d.probs)
			d.componentFields()
			if newer := k8sVersion.MatchString(kubernetes) && !KubernetesBefore(kubernetes, componentsOf+1); newer {
				warnings = append(warnings, d.probs[known:]...)
				d.probs = d.probs[:known]
			}
		}
		if line, twice := first[d.kind]; twice && kubeadmVersions[d.kind] != "" {
			d.problem(root, d.kind, "a second %s begins here; the first is on line %d: put both into one", d.kind, line)
		} else {
			first[d.kind] = root.Line
		}
		probs = append(probs, d.probs...)
		docs = append(docs, KubeadmDocument{d.kind, root})
	}
	return docs, warnings, probs
}

// kubeadmDocument reports what is wrong with one document; owned reports the
// fields that are not for a person to set, nil where edgebake wrote it. The result
// is whether it is of a kind and version that can be read further.
func (d *document) kubeadmDocument(owned func()) bool {
	version := yamltree.Text(yamltree.Value(d.root, "apiVersion"))
	at := func(key string) *yaml.Node {
		if n := yamltree.Value(d.root, key); n != nil {
			return n
		}
		return d.root
	}
	want, known := kubeadmVersions[d.kind]
	group, _, _ := strings.Cut(version, "/")
	wantGroup, _, _ := strings.Cut(want, "/")
	switch {
	case d.kind == "" || version == "":
		d.problem(d.root, "", "a document after the Cluster must have apiVersion and kind; kubeadm's and its components' may follow: %s", strings.Join(slices.Sorted(maps.Keys(kubeadmVersions)), ", "))
		return false
	case version == APIVersion:
		d.problem(at("kind"), "kind", "a second edgebake document (%s) begins here; put each into a file of its own", shorten(d.kind))
		return false
	case kubeadmElsewhere[d.kind] != "":
		d.problem(at("kind"), "kind", "%s has no place in a Cluster: %s", d.kind, kubeadmElsewhere[d.kind])
		return false
	case !known:
		d.problem(at("kind"), "kind", "unknown document %s of %s%s; want one of %s; Kubernetes objects go into files listed in manifests", shorten(d.kind), shorten(version),
			DidYouMean(d.kind, slices.Sorted(maps.Keys(kubeadmVersions))), strings.Join(slices.Sorted(maps.Keys(kubeadmVersions)), ", "))
		return false
	case group != wantGroup:
		d.problem(at("apiVersion"), d.kind+".apiVersion", "%s is of %s, not %s", d.kind, want, shorten(version))
	case version != want:
		hint := ""
		if group == "kubeadm.k8s.io" {
			hint = ": `kubeadm config migrate --old-config OLD --new-config NEW` rewrites it"
		}
		d.problem(at("apiVersion"), d.kind+".apiVersion", "%s does not fit: edgebake writes %s, and fields of other versions mean other things%s", shorten(version), want, hint)
		return false // every field of another form would be reported
	}
	if !d.decodes(d.root) {
		return false
	}
	if owned != nil {
		owned()
		d.certificateValidity()
	}
	switch d.kind {
	case "ClusterConfiguration":
		d.kubeadmForm(new(clusterConfiguration), owned != nil)
	case "InitConfiguration":
		d.kubeadmForm(new(initConfiguration), owned != nil)
	}
	return true
}

// kubeadmForm decodes the document strictly, and reports arguments that are
// not the document's to set: a person's, those that edgebake writes.
func (d *document) kubeadmForm(into any, persons bool) {
	before := len(d.probs)
	v := reflect.ValueOf(into).Elem()
	d.strict = true
	d.decode(d.root, v, "")
	for i := before; i < len(d.probs); i++ {
		d.probs[i].Path = join(d.kind, d.probs[i].Path)
	}
	for _, list := range slices.Sorted(maps.Keys(ownedArgs)) {
		n := nodeAt(d.root, list)
		if n == nil || n.Kind != yaml.SequenceNode {
			continue
		}
		for i, item := range n.Content {
			if item.Kind != yaml.MappingNode {
				continue
			}
			name := yamltree.Text(yamltree.Value(item, "name"))
			path := fmt.Sprintf("%s.%s[%d].name", d.kind, list, i)
			switch {
			case strings.HasPrefix(name, "-"):
				d.problem(yamltree.Value(item, "name"), path, "leave the dashes out: %q", strings.TrimLeft(name, "-"))
			case slices.Contains(ownedArgs[list], name) && (persons || !writtenArg(name)):
				d.problem(yamltree.Value(item, "name"), path, "--%s is set by edgebake and kubeadm: remove it", name)
			}
		}
	}
}

// writtenArg reports whether edgebake itself puts an argument into the
// documents of a Site.
func writtenArg(name string) bool { return name == "node-ip" }

// ownedFields reports fields that edgebake writes.
func (d *document) ownedFields() {
	owned := ownedByEdgebake[d.kind]
	for _, path := range slices.Sorted(maps.Keys(owned)) {
		if n := nodeAt(d.root, path); n != nil && !isNull(n) {
			d.problem(n, d.kind+"."+path, "is set by edgebake: %s; remove it here", owned[path])
		}
	}
}

// certificateValidity reports a period that is too short to renew certificates in.
func (d *document) certificateValidity() {
	const field = "certificateValidityPeriod"
	n := nodeAt(d.root, field)
	if d.kind != "ClusterConfiguration" || n == nil || isNull(n) || n.Kind != yaml.ScalarNode {
		return
	}
	switch period, err := time.ParseDuration(n.Value); {
	case err != nil:
		d.problem(n, d.kind+"."+field, "%s is not a duration, e.g. 2160h", shorten(n.Value))
	case period < minCertificateValidity:
		d.problem(n, d.kind+"."+field, "must be at least %dh, not %s: certificates are renewed when half of the time is over, and a machine may be off for the other half; set %dh or more", int(minCertificateValidity.Hours()), n.Value, int(minCertificateValidity.Hours()))
	}
}

// nodeAt is the value at a dotted path, nil if there is none.
func nodeAt(n *yaml.Node, path string) *yaml.Node {
	n = yamltree.Deref(n)
	for part := range strings.SplitSeq(path, ".") {
		if n == nil || n.Kind != yaml.MappingNode {
			return nil
		}
		n = yamltree.Get(n, part)
	}
	return n
}

// DNSDomain is the cluster's DNS domain where ClusterConfiguration sets one.
func (f *ClusterFile) DNSDomain() string {
	for _, d := range f.Kubeadm {
		if n := nodeAt(d.Root, "networking.dnsDomain"); d.Kind == "ClusterConfiguration" && n != nil {
			return n.Value
		}
	}
	return ""
}
