package lab

import (
	"fmt"
	"strings"
	"text/template"
)

// ControlPlaneImage returns the quickstart Image with the container images of a control plane,
// which come from an OCI layout.
func ControlPlaneImage(quickstart, layout string, r Release) string {
	quickstart = strings.ReplaceAll(quickstart, KubernetesVersion, r.Kubernetes)
	doc := strings.Replace(quickstart, "name: quickstart\n", "name: master\nnodeTypes: [native, control-plane]\n", 1)
	return onBoard(doc, layout, "kube-apiserver:"+r.Kubernetes, "kube-controller-manager:"+r.Kubernetes,
		"kube-scheduler:"+r.Kubernetes, "etcd:"+r.EtcdImageTag)
}

// WithAddons returns an Image with kube-proxy and CoreDNS, for a node with its own CIDR for pods.
func WithAddons(image, layout, podCIDR string) string {
	image = strings.Replace(image, "podCIDR: 10.244.0.0/16\n", "podCIDR: "+podCIDR+"\n", 1)
	return onBoard(image, layout, "kube-proxy:"+KubernetesVersion, "coredns/coredns:"+CoreDNSVersion)
}

func onBoard(image, layout string, refs ...string) string {
	for _, ref := range refs {
		image += fmt.Sprintf("  - {ref: %q, layout: %s}\n", "registry.k8s.io/"+ref, layout)
	}
	return image
}

// Minted is a cluster in which all machines boot from images.
type Minted struct {
	Kubernetes       string
	Masters, Workers []MintedMachine
	Manifests        []string
	CertSANs         []string // in addition to those that edgebake sets
	// Addons adds kube-proxy and CoreDNS. The Image must contain their container images.
	Addons bool
}

// MintedMachine is a machine of a Minted cluster.
type MintedMachine struct {
	Name, Address string
	// Cards are its network interfaces in the syntax of a Site, on one line.
	Cards string
	// DNS and NTP are the servers that it uses; empty: none.
	DNS, NTP string
}

// mintedYAML has longer timeouts than real machines need, because an emulated machine may pause for
// seconds. Its API server lacks the features that repeatedly read the whole description of the API.
var mintedYAML = template.Must(template.New("").Parse(`apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: shops
kubernetesVersion: {{.Kubernetes}}
openyurt: false
kubeProxy: {mode: {{if .Addons}}nftables{{else}}none{{end}}}
{{- with .Manifests}}
manifests: [{{range $i, $m := .}}{{if $i}}, {{end}}{{$m}}{{end}}]
{{- end}}
masters:
{{- range .Masters}}
  - {name: {{.Name}}, address: {{.Address}}, network: {interfaces: [{{.Cards}}]{{with .DNS}}, dns: [{{.}}]{{end}}{{with .NTP}}, ntp: [{{.}}]{{end}}}}
{{- end}}
nodes:
{{- range .Workers}}
  - {name: {{.Name}}, network: {interfaces: [{{.Cards}}]{{with .DNS}}, dns: [{{.}}]{{end}}{{with .NTP}}, ntp: [{{.}}]{{end}}}}
{{- end}}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
{{- if not .Addons}}
dns: {disabled: true}
{{- end}}
apiServer:
  extraArgs: [{name: disable-admission-plugins, value: "MutatingAdmissionPolicy,ValidatingAdmissionPolicy"}]
{{- with .CertSANs}}
  certSANs: [{{range $i, $m := .}}{{if $i}}, {{end}}{{$m}}{{end}}]
{{- end}}
etcd: {local: {extraArgs: [{name: heartbeat-interval, value: "500"}, {name: election-timeout, value: "5000"}]}}
controllerManager: {extraArgs: [{name: leader-elect-lease-duration, value: 60s}, {name: leader-elect-renew-deadline, value: 40s}, {name: leader-elect-retry-period, value: 10s}]}
scheduler: {extraArgs: [{name: leader-elect-lease-duration, value: 60s}, {name: leader-elect-renew-deadline, value: 40s}, {name: leader-elect-retry-period, value: 10s}]}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
timeouts: {controlPlaneComponentHealthCheck: 30m}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
featureGates: {KubeletCrashLoopBackOffMax: true}
crashLoopBackOff: {maxContainerRestartPeriod: 10s}
`))

// YAML renders the Cluster document.
func (m Minted) YAML() (string, error) {
	var b strings.Builder
	err := mintedYAML.Execute(&b, m)
	return b.String(), err
}
